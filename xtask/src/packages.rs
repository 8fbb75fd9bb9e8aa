//! Installing Debian's packages, where that takes no question.

use crate::cargo::{answers, succeeds};
use anyhow::Result;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

/// Whether this process may install packages: root, with apt-get.
pub(crate) fn may_install() -> bool {
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|of_self| of_self.uid() == 0);
    is_root && answers(Command::new("apt-get").arg("--version"))
}

/// Installs packages where that takes no question. Whether they are there then.
pub(crate) fn install(packages: &[&str]) -> Result<bool> {
    if !may_install() {
        return Ok(false);
    }
    let install = || {
        let mut install = Command::new("apt-get");
        install.args(["install", "--yes", "--no-install-recommends"]);
        install.args(packages);
        install.env("DEBIAN_FRONTEND", "noninteractive");
        succeeds(&mut install)
    };
    // Package lists may be absent or old: they are fetched only if it does not go without.
    Ok(
        install()?
            || (succeeds(Command::new("apt-get").args(["update", "--quiet"]))? && install()?),
    )
}
