//! `cargo xtask demo`.

use crate::cargo::{DAEMONS, cargo, succeeds, target_dir};
use anyhow::{Context, Result};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Builds the programs of the demo and replaces this process with `kvctl demo`, so that signals and the exit status
/// are the demo's. Returns only when the build failed.
pub(crate) fn run(args: &[String]) -> Result<bool> {
    if !succeeds(cargo(&["build", "--release"]).args(DAEMONS))? {
        return Ok(false);
    }
    let kvctl = target_dir()?.join("release").join("kvctl");
    let error = Command::new(&kvctl).arg("demo").args(args).exec();
    Err(error).with_context(|| format!("cannot run {}", kvctl.display()))
}
