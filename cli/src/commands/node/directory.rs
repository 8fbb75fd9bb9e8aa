//! `kvctl node directory`.

use crate::context::Context;
use anyhow::Context as _;
use serde::Serialize;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Other users look the socket up below the directory. The socket itself decides who may use it.
const MODE: u32 = 0o755;

/// Make directories on this host that a store node's user may write
///
/// A store node that runs as an ordinary user needs a directory for its socket, and one for files of blocks.
/// Kubernetes makes such directories of a host for root alone. The command makes each directory that is
/// absent and gives it to the owner; files inside keep their owners. It needs the right to change owners, and
/// no pool.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl node directory /run/kvpool /var/lib/kvpool --owner 65532:65532")]
pub(super) struct Args {
    /// The directories, as absolute paths
    #[arg(required = true, value_parser = absolute)]
    directories: Vec<PathBuf>,
    /// The numbers of the user and the group
    #[arg(long, value_name = "UID:GID", value_parser = owner)]
    owner: Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Owner {
    uid: u32,
    gid: u32,
}

#[derive(Serialize)]
struct Outcome<'a> {
    directories: &'a [PathBuf],
    owner: Owner,
}

/// Runs it.
pub(super) fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    for directory in &args.directories {
        give(directory, args.owner)?;
    }
    let outcome = Outcome {
        directories: &args.directories,
        owner: args.owner,
    };
    context.output.show(&outcome, |outcome| {
        let Owner { uid, gid } = outcome.owner;
        let names: Vec<_> = outcome
            .directories
            .iter()
            .map(|directory| directory.display().to_string())
            .collect();
        format!("{} belongs to {uid}:{gid}", names.join(", "))
    })
}

fn give(directory: &Path, Owner { uid, gid }: Owner) -> anyhow::Result<()> {
    let shown = directory.display();
    fs::create_dir_all(directory).with_context(|| format!("cannot make the directory {shown}"))?;
    // The mode first: root without further rights may change it only while root owns the directory.
    let set = fs::set_permissions(directory, Permissions::from_mode(MODE));
    if let Err(error) = set
        && fs::metadata(directory)?.permissions().mode() & 0o777 != MODE
    {
        return Err(error).with_context(|| format!("cannot set the mode of {shown}"));
    }
    chown(directory, Some(uid), Some(gid))
        .with_context(|| format!("cannot give {shown} to {uid}:{gid}: run this as root"))
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() && path.parent().is_some() {
        return Ok(path);
    }
    Err("write an absolute path below /".into())
}

fn owner(text: &str) -> Result<Owner, String> {
    let parts = text.split_once(':');
    parts
        .and_then(|(uid, gid)| {
            let (uid, gid) = (uid.parse().ok()?, gid.parse().ok()?);
            Some(Owner { uid, gid })
        })
        .ok_or_else(|| "write two numbers, such as 65532:65532".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_directory_is_made_with_its_parents_and_a_second_time_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let own = fs::metadata(folder.path()).unwrap();
        // Root can give it away; others can give it to themselves only.
        let owner = match own.uid() {
            0 => Owner {
                uid: 65_532,
                gid: 65_533,
            },
            uid => Owner {
                uid,
                gid: own.gid(),
            },
        };
        let directory = folder.path().join("a/b");
        for _ in 0..2 {
            give(&directory, owner).unwrap();
            let made = fs::metadata(&directory).unwrap();
            assert_eq!((made.uid(), made.gid()), (owner.uid, owner.gid));
            assert_eq!(made.mode() & 0o777, MODE);
            fs::write(directory.join("kept"), "kept").unwrap();
        }
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = give(&file, owner).unwrap_err();
        assert!(error.to_string().contains("cannot make"), "{error}");
    }

    #[test]
    fn paths_and_owners_that_could_mean_something_else_are_refused() {
        for path in ["", "run", "./run", "/"] {
            absolute(path).unwrap_err();
        }
        absolute("/run/kvpool").unwrap();
        for text in ["", "root", "0", "0:", "-1:0", "0:0:0", "0:4294967296"] {
            owner(text).unwrap_err();
        }
        let expected = Owner {
            uid: 65_532,
            gid: 1,
        };
        assert_eq!(owner("65532:1").unwrap(), expected);
    }
}
