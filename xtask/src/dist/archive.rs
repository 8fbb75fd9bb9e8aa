//! The archive of programs, units, configuration, manual and completions.
//!
//! Its folders are the folders below `/usr/local`, so unpacking it there installs all files.

use super::release::Release;
use crate::cargo::{cargo, root, succeeds, target_dir};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Files of the repository, and the folder in the archive.
const FILES: [(&str, &str); 9] = [
    ("deploy/systemd/kvmaster.service", "lib/systemd/system"),
    ("deploy/systemd/kvstore-node.service", "lib/systemd/system"),
    ("deploy/systemd/kvpool.conf", "lib/sysusers.d"),
    ("deploy/systemd/kvmaster.toml", "share/kvpool"),
    ("deploy/systemd/kvstore-node.toml", "share/kvpool"),
    ("deploy/systemd/kvmaster.env", "share/kvpool"),
    ("deploy/systemd/kvstore-node.env", "share/kvpool"),
    ("LICENSE", "share/doc/kvpool"),
    ("CHANGELOG.md", "share/doc/kvpool"),
];

/// Writes `NAME.tar.gz` with the programs, FILES, the manual and `documents`. False when a step failed.
pub(super) fn write(
    release: &mut Release,
    programs: &[PathBuf],
    documents: &[&Path],
) -> Result<bool> {
    let above = target_dir()?.join("releases/tree");
    if above.exists() {
        std::fs::remove_dir_all(&above).context("cannot remove the tree of an earlier release")?;
    }
    let tree = above.join(&release.name);
    for program in programs {
        copy(program, &tree.join("bin"))?;
    }
    for (file, folder) in FILES {
        copy(&root().join(file), &tree.join(folder))?;
    }
    for document in documents {
        copy(document, &tree.join("share/doc/kvpool"))?;
    }
    // Unoptimised, as xtask is: it compiles much faster, and runs once.
    let mut manual = cargo(&["run", "--quiet", "--locked", "--profile", "xtask"]);
    manual
        .args(["--package", "kvpool-manual", "--"])
        .arg(tree.join("share"));
    if !succeeds(&mut manual)? {
        return Ok(false);
    }
    let tar = format!("{}.tar", release.name);
    let mut pack = Command::new("tar");
    // Names in one order, one owner and one time: the same files give the same bytes.
    pack.args([
        "--sort=name",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--mode=u+rw,go+r,go-w",
    ]);
    pack.arg(format!("--mtime=@{}", release.stamp.seconds));
    pack.args(["--format=gnu", "--create", "--file", &tar, &release.name]);
    if !succeeds(pack.current_dir(&above))? {
        return Ok(false);
    }
    let mut compress = Command::new("gzip");
    compress.args(["--no-name", "--best", "--force", &tar]);
    if !succeeds(compress.current_dir(&above))? {
        return Ok(false);
    }
    release.keep(&above.join(format!("{tar}.gz")))?;
    Ok(true)
}

fn copy(file: &Path, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let name = file.file_name().context("a file to ship has no name")?;
    std::fs::copy(file, folder.join(name))
        .with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_of_the_archive_is_in_the_repository() {
        for (file, _) in FILES {
            assert!(root().join(file).is_file(), "{file}");
        }
    }
}
