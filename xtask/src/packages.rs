//! Installs Debian packages, only if the caller passes `--install`.
//!
//! A package with a service is unpacked into the target directory and never installed. So its
//! service is not registered and not started, and a service that exists already is not touched.

use crate::cargo::{answers, succeeds};
use anyhow::{Context, Result};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether this run may add packages to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packages {
    /// Missing packages are installed if that is possible without a prompt.
    Add,
    /// The machine stays as it is.
    LeaveOut,
}

impl Packages {
    /// The choice of the flag `--install`.
    pub(crate) const fn asked(install: bool) -> Self {
        if install { Self::Add } else { Self::LeaveOut }
    }

    /// Installs packages if that is possible without a prompt. Returns whether they are installed.
    ///
    /// None of `packages` may have a service: apt-get would start it.
    pub(crate) fn install(self, packages: &[&str]) -> Result<bool> {
        if self == Self::LeaveOut || !may_install() {
            return Ok(false);
        }
        let install = || {
            let mut install = Command::new("apt-get");
            install.args(["install", "--yes", "--no-install-recommends"]);
            install.args(packages);
            install.env("DEBIAN_FRONTEND", "noninteractive");
            succeeds(&mut install)
        };
        // Package lists may be absent or old. They are fetched only if the installation fails
        // without them.
        Ok(install()? || (update()? && install()?))
    }

    /// The file `program` of a package that this run or an earlier run unpacked into `place`. `None` if the package
    /// cannot be fetched, or may not be installed.
    pub(crate) fn unpacked(
        self,
        package: &str,
        program: &str,
        place: &Path,
    ) -> Result<Option<PathBuf>> {
        self.unpacked_from(program, place, |into| download(package, into))
    }

    /// The same, with the files that `fetch` puts into the directory that it gets.
    fn unpacked_from(
        self,
        program: &str,
        place: &Path,
        fetch: impl FnOnce(&Path) -> Result<bool>,
    ) -> Result<Option<PathBuf>> {
        let path = place.join(program);
        if path.is_file() {
            return Ok(Some(path));
        }
        if self == Self::LeaveOut {
            return Ok(None);
        }
        // The directory starts empty each time, because an interrupted download leaves partial
        // files.
        if place.exists() {
            std::fs::remove_dir_all(place)
                .context("cannot remove the files of an earlier unpacking")?;
        }
        std::fs::create_dir_all(place).context("cannot create a directory for the package")?;
        if !fetch(place)? {
            return Ok(None);
        }
        let entries = std::fs::read_dir(place)?.collect::<Result<Vec<_>, _>>()?;
        let mut archives = entries.iter().map(std::fs::DirEntry::path);
        let Some(archive) = archives.find(|path| path.extension().is_some_and(|end| end == "deb"))
        else {
            return Ok(None);
        };
        let unpacked = place.join("unpacking");
        // No script of the package runs: dpkg-deb only writes its files.
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("--extract").arg(&archive).arg(&unpacked);
        if !succeeds(&mut unpack)? {
            return Ok(None);
        }
        let from = unpacked.join(program);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        // The last step renames the file, so that a program found there is complete.
        std::fs::rename(&from, &path).with_context(|| format!("the package has no {program}"))?;
        Ok(Some(path))
    }
}

/// Whether this process may install packages: root, with apt-get.
pub(crate) fn may_install() -> bool {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|of_self| of_self.uid() == 0);
    is_root && answers(Command::new("apt-get").arg("--version"))
}

fn update() -> Result<bool> {
    succeeds(Command::new("apt-get").args(["update", "--quiet"]))
}

/// Downloads a package's archive into a directory. Needs no root if the package lists exist.
fn download(package: &str, into: &Path) -> Result<bool> {
    if !answers(Command::new("apt-get").arg("--version")) {
        return Ok(false);
    }
    let download = || {
        let mut download = Command::new("apt-get");
        succeeds(download.args(["download", package]).current_dir(into))
    };
    Ok(download()? || (may_install() && update()? && download()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A package with a program and with scripts that leave a trace, in the directory `into`.
    fn package(into: &Path, trace: &Path) -> Result<bool> {
        let tree = into.join("tree");
        let control = tree.join("DEBIAN");
        std::fs::create_dir_all(&control)?;
        std::fs::create_dir_all(tree.join("usr/bin"))?;
        std::fs::write(tree.join("usr/bin/served"), "#!/bin/sh\necho served\n")?;
        std::fs::write(
            control.join("control"),
            "Package: served\nVersion: 1\nArchitecture: all\nMaintainer: n <n@example.org>\nDescription: d\n",
        )?;
        for script in ["preinst", "postinst"] {
            let path = control.join(script);
            std::fs::write(&path, format!("#!/bin/sh\ntouch {}\n", trace.display()))?;
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(&path, mode)?;
        }
        let mut build = Command::new("dpkg-deb");
        build.arg("--build").arg(&tree).arg(into.join("served.deb"));
        succeeds(&mut build)
    }

    fn scratch(name: &str) -> PathBuf {
        let place = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&place);
        std::fs::create_dir_all(&place).unwrap();
        place
    }

    #[test]
    fn a_package_with_a_service_is_unpacked_and_none_of_its_scripts_runs() {
        if !answers(Command::new("dpkg-deb").arg("--version")) {
            eprintln!("SKIPPED a_package_with_a_service_is_unpacked: dpkg-deb is not here");
            return;
        }
        let scratch = scratch("unpacked");
        let (place, trace) = (scratch.join("served"), scratch.join("trace"));
        // The remains of an interrupted run do not matter.
        std::fs::create_dir_all(place.join("unpacking/usr/bin")).unwrap();
        let program = Packages::Add
            .unpacked_from("usr/bin/served", &place, |into| package(into, &trace))
            .unwrap()
            .unwrap();
        assert!(!trace.exists(), "a script of the package ran");
        let text = std::fs::read_to_string(&program).unwrap();
        assert!(text.contains("echo served"), "{text}");
        // It is found again, also by a run that may add nothing, and not fetched twice.
        let again = Packages::LeaveOut
            .unpacked_from("usr/bin/served", &place, |_| panic!("fetched again"))
            .unwrap();
        assert_eq!(again, Some(program));
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    fn without_leave_nothing_is_installed_or_fetched() {
        let scratch = scratch("left-out");
        let place = scratch.join("served");
        let missing = Packages::LeaveOut
            .unpacked_from("usr/bin/served", &place, |_| panic!("fetched"))
            .unwrap();
        assert_eq!(missing, None);
        assert!(!place.exists());
        // A package that apt-get would refuse loudly: it is not even asked.
        assert!(!Packages::LeaveOut.install(&["no-such-package"]).unwrap());
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    fn a_package_that_cannot_be_had_is_no_error() {
        let scratch = scratch("not-had");
        let place = scratch.join("served");
        let missing = Packages::Add.unpacked_from("usr/bin/served", &place, |_| Ok(false));
        assert_eq!(missing.unwrap(), None);
        std::fs::remove_dir_all(&scratch).unwrap();
    }
}
