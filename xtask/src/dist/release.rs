//! The folder of a release, its files, and the parts that were left out.

use crate::cargo::{is_there, metadata, root};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

pub(super) struct Release {
    /// `kvpool-0.1.0-x86_64-linux`.
    pub(super) name: String,
    pub(super) version: String,
    pub(super) folder: PathBuf,
    pub(super) stamp: Stamp,
    made: Vec<PathBuf>,
    left_out: Vec<(String, String)>,
}

/// The time and the commit in the files. The present time would make each build different.
pub(super) struct Stamp {
    /// Seconds since 1970: `SOURCE_DATE_EPOCH`, or the time of the commit.
    pub(super) seconds: String,
    /// The commit; empty outside of git.
    pub(super) commit: String,
}

impl Stamp {
    fn of_the_source() -> Self {
        let commit = git(&["rev-parse", "HEAD"]);
        let seconds = std::env::var("SOURCE_DATE_EPOCH").ok();
        let seconds = seconds.filter(|seconds| seconds.parse::<u64>().is_ok());
        let seconds = seconds.or_else(|| git(&["log", "-1", "--format=%ct"]));
        Self {
            seconds: seconds.unwrap_or_else(|| "0".into()),
            commit: commit.unwrap_or_default(),
        }
    }
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).current_dir(root()).output();
    let output = output.ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned())
}

impl Release {
    /// Begins with an empty folder, so that no file of an earlier run gets into this release.
    pub(super) fn begin(architecture: &str) -> Result<Self> {
        let metadata = metadata()?;
        let version = metadata.version("kvpool-master")?;
        let name = format!("kvpool-{version}-{architecture}-linux");
        let folder = metadata.target_directory.join("releases").join(&name);
        if folder.exists() {
            std::fs::remove_dir_all(&folder)
                .context("cannot remove the files of an earlier release")?;
        }
        std::fs::create_dir_all(&folder).context("cannot make the folder of the release")?;
        Ok(Self {
            name,
            version,
            folder,
            stamp: Stamp::of_the_source(),
            made: Vec::new(),
            left_out: Vec::new(),
        })
    }

    /// Adds the file that `write` writes to the path that it gets.
    pub(super) fn add(
        &mut self,
        file: &str,
        write: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.folder.join(file);
        write(&path).with_context(|| format!("cannot write {file}"))?;
        self.made.push(path.clone());
        Ok(path)
    }

    /// Copies a file that was made elsewhere.
    pub(super) fn keep(&mut self, file: &Path) -> Result<()> {
        let name = file.file_name().and_then(|name| name.to_str());
        let name = name.context("the file has no name")?;
        self.add(name, |path| {
            std::fs::copy(file, path)?;
            Ok(())
        })?;
        Ok(())
    }

    /// Records the part that a missing tool would have made.
    pub(super) fn leave_out(&mut self, what: &str, why: &str) {
        eprintln!("\nleft out: {what}: {why}");
        self.left_out.push((what.to_owned(), why.to_owned()));
    }

    pub(super) const fn is_complete(&self) -> bool {
        self.left_out.is_empty()
    }

    /// Writes `SHA256SUMS`, which `sha256sum --check` reads.
    pub(super) fn checksums(&mut self) -> Result<()> {
        if !is_there(Command::new("sha256sum").arg("--version"))? {
            self.leave_out(
                "SHA256SUMS",
                "the program sha256sum is missing (Debian: coreutils)",
            );
            return Ok(());
        }
        self.made.sort();
        let mut sums = Command::new("sha256sum");
        sums.current_dir(&self.folder);
        sums.args(self.made.iter().filter_map(|path| path.file_name()));
        let output = sums.output().context("cannot run sha256sum")?;
        if !output.status.success() {
            bail!(
                "sha256sum failed: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        self.add("SHA256SUMS", |path| {
            Ok(std::fs::write(path, &output.stdout)?)
        })?;
        Ok(())
    }

    /// Prints the files with their sizes, and the missing parts.
    pub(super) fn print(&self) {
        println!("\n{}", self.folder.display());
        for path in &self.made {
            let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
            let name = path.file_name().unwrap_or_default();
            println!("  {:>10}  {}", size(bytes), name.display());
        }
        for (what, why) in &self.left_out {
            println!("  left out    {what}: {why}");
        }
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes.div_ceil(1024)),
        _ => format!("{}.{} MiB", bytes >> 20, ((bytes & 0xf_ffff) * 10) >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_that_fits() {
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1024), "1 KiB");
        assert_eq!(size(1025), "2 KiB");
        assert_eq!(size(3 << 20), "3.0 MiB");
        assert_eq!(size((7 << 20) + (1 << 19)), "7.5 MiB");
    }

    #[test]
    fn the_stamp_is_of_the_commit() {
        let stamp = Stamp::of_the_source();
        assert!(stamp.seconds.parse::<u64>().is_ok(), "{}", stamp.seconds);
        let hexadecimal = stamp.commit.chars().all(|c| c.is_ascii_hexdigit());
        assert!(hexadecimal, "{}", stamp.commit);
    }
}
