//! `kvctl ssd format`.

use super::inspect::describe;
use super::target::{Content, Target};
use crate::context::Context;
use crate::exit;
use crate::size::parse_size;
use anyhow::{Context as _, bail};
use bytesize::ByteSize;
use kvpool_disk::medium::erase;
use kvpool_types::medium::GRANULE;
use rustix::fs::{FallocateFlags, FileType};
use rustix::io::Errno;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Make a disk, partition or file blank, so that the next store node formats it for its pool
///
/// It overwrites the first MiB with zeros. All blocks of a medium are lost, and so is its list of bad
/// ranges. `kvstore-node --ssd path=...,reset` keeps a list that it can read. It formats only what is not
/// an intact medium of its pool. A medium in use is never touched.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl ssd format /var/lib/kvpool/ssd --size 2TiB
  kvctl ssd format /dev/nvme0n1p1 --yes")]
pub(crate) struct Args {
    /// The disk, partition or file
    path: PathBuf,
    /// For a file: its size, rounded down to 4 KiB. The file is made or grown, and all its room is taken
    #[arg(long, value_parser = parse_size)]
    size: Option<ByteSize>,
    /// Format although the path holds something
    #[arg(long)]
    yes: bool,
}

/// The result of the command.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    path: String,
    /// The former content of the path.
    pub(super) held: String,
    /// False if the path was blank already.
    pub(super) erased: bool,
    pub(super) size_bytes: u64,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let Args { path, size, yes } = args;
    let size = size.map(|size| size.0);
    let outcome = tokio::task::spawn_blocking(move || format(&path, size, yes)).await??;
    context.output.show(&outcome, |outcome| {
        let did = match outcome.erased {
            true => format!("{} is blank now. It held {}", outcome.path, outcome.held),
            false => format!("{} is blank", outcome.path),
        };
        format!(
            "{did}. A store node with --ssd path={} formats it.",
            outcome.path
        )
    })
}

pub(super) fn format(path: &Path, size: Option<u64>, yes: bool) -> anyhow::Result<Outcome> {
    // A store node rounds its size= too.
    let size = size.map(|size| size / GRANULE * GRANULE);
    let kind = kind(path)?;
    let length = match kind {
        Some(Kind::File(length)) => length,
        Some(Kind::Device) if size.is_some() => {
            return Err(usage(
                path,
                "--size is for files; a device has its own size",
            ));
        }
        Some(Kind::Device) | None => 0,
    };
    if size.is_some_and(|size| size < length / GRANULE * GRANULE) {
        return Err(usage(
            path,
            "the file is larger than --size, and a file is not cut",
        ));
    }
    if size == Some(0) {
        return Err(usage(path, "--size is below 4096 bytes"));
    }
    let is_empty = kind != Some(Kind::Device) && length == 0;
    if is_empty && size.is_none() {
        return Err(usage(
            path,
            "there is no such file, or it is empty: give its --size",
        ));
    }
    // A file that holds something grows only after the consent.
    let target = Target::open(path, size.filter(|_| is_empty))?;
    let held = match target.content()? {
        Content::Blank => None,
        Content::Medium(medium) => {
            let superblock = medium.superblock();
            Some(format!(
                "medium {} of cluster {}, generation {}, with {} bad ranges",
                superblock.medium,
                superblock.cluster,
                superblock.generation,
                superblock.bad.as_slice().len()
            ))
        }
        Content::Refused(refused) => Some(describe(path, &refused)),
    };
    if let Some(held) = &held {
        if !yes {
            bail!(
                "{} holds {held}. Nothing was changed: repeat with --yes to lose that",
                path.display()
            );
        }
        erase(&*target.engine, &target.arena)?;
    }
    let size_bytes = match size.filter(|size| *size > length && !is_empty) {
        Some(size) => grow(path, size)?,
        None => target.engine.size(),
    };
    Ok(Outcome {
        path: path.display().to_string(),
        erased: held.is_some(),
        held: held.unwrap_or_else(|| "nothing".to_owned()),
        size_bytes,
    })
}

/// The type of file at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file of this length in bytes, or what cannot be a medium.
    File(u64),
    Device,
}

/// The type of file at a path. `None` if it does not exist.
fn kind(path: &Path) -> anyhow::Result<Option<Kind>> {
    let found = match rustix::fs::stat(path) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => {
            return Err(errno).with_context(|| format!("cannot examine {}", path.display()));
        }
    };
    let kind = match FileType::from_raw_mode(found.st_mode) {
        FileType::BlockDevice => Kind::Device,
        _ => Kind::File(u64::try_from(found.st_size).unwrap_or(0)),
    };
    Ok(Some(kind))
}

/// Takes the room of a larger file, as a store node does.
fn grow(path: &Path, size: u64) -> anyhow::Result<u64> {
    let what = || format!("cannot grow {} to {size} bytes", path.display());
    let file = std::fs::File::options()
        .write(true)
        .open(path)
        .with_context(what)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size).with_context(what)?;
    file.sync_all().with_context(what)?;
    Ok(size)
}

fn usage(path: &Path, why: &str) -> anyhow::Error {
    exit::Usage(format!("{}: {why}", path.display())).into()
}
