//! Licences, sources, banned crates and advisories of the dependencies, by cargo-deny and `deny.toml`.

use crate::cargo::{answers, cargo, succeeds};
use crate::tally::Tally;
use anyhow::Result;

/// The remedy when cargo-deny is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// Install it with cargo, which takes 70 s on two cores without optimization; where that fails the check
    /// is skipped.
    Install,
    /// The check fails.
    Fail,
    /// The check is counted as skipped.
    Skip,
}

/// Runs `cargo deny check`. Without a network it leaves out the advisories and counts them as skipped.
pub(crate) fn check(missing: Missing, tally: &mut Tally) -> Result<()> {
    let is_there = || answers(&mut cargo(&["deny", "--version"]));
    if missing == Missing::Install && !is_there() {
        // Without a network the installation fails. cargo prints the reason, and the check counts as skipped.
        succeeds(&mut cargo(&[
            "install",
            "--locked",
            "--debug",
            "cargo-deny",
        ]))?;
    }
    if !is_there() {
        match missing {
            Missing::Install => tally.skip("cargo deny", "cargo-deny could not be installed"),
            Missing::Skip => {
                tally.skip("cargo deny", "cargo-deny is missing (--install adds it)");
            }
            Missing::Fail => {
                eprintln!("\ncargo-deny is missing: `cargo xtask lint --install` adds it");
                tally.checked("cargo deny, which is missing", false);
            }
        }
        return Ok(());
    }
    let offline = ["deny", "check", "bans", "licenses", "sources"];
    tally.checked("cargo deny", succeeds(&mut cargo(&offline))?);
    if succeeds(&mut cargo(&["deny", "fetch", "db"]))? {
        let advisories = ["deny", "check", "--disable-fetch", "advisories"];
        tally.checked("advisories", succeeds(&mut cargo(&advisories))?);
    } else {
        tally.skip("advisories", "their database cannot be fetched (see above)");
    }
    Ok(())
}
