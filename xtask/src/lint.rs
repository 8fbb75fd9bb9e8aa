//! `cargo xtask lint`.

use crate::cargo::{answers, cargo, succeeds};
use anyhow::Result;

/// Checks everything, whatever fails first, and tells whether all was well.
pub(crate) fn run() -> Result<bool> {
    let format = format()?;
    let clippy = clippy()?;
    let dependencies = if answers(&mut cargo(&["deny", "--version"])) {
        succeeds(&mut cargo(&["deny", "check"]))?
    } else {
        eprintln!(
            "\ncargo-deny is not installed: licences, sources and advisories are NOT checked"
        );
        eprintln!("(`cargo install --locked cargo-deny` installs it)");
        true
    };
    Ok(format && clippy && dependencies)
}

pub(crate) fn format() -> Result<bool> {
    succeeds(&mut cargo(&["fmt", "--all", "--check"]))
}

pub(crate) fn clippy() -> Result<bool> {
    succeeds(&mut cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))
}
