//! `cargo xtask lint`: every check that runs no test.
//!
//! ```text
//!  text    width, sentences, seams ──► ratchet ◄── xtask/ratchet.txt
//!          crate table      ◄── docs/ARCHITECTURE.md and cargo metadata
//!          switch-off       ◄── the text of each mechanism stands once in its file
//!  cargo   fmt, clippy, check, doc, deny, check --target aarch64
//! ```
//!
//! The checks of the text take a second and are part of `cargo xtask test` too.

mod arm;
mod crates;
pub(crate) mod deny;
mod ratchet;
mod seams;
mod sentences;
mod text;
mod width;

use crate::cargo::{DAEMONS, cargo, succeeds};
use crate::switch_off;
use crate::tally::Tally;
use anyhow::Result;
use ratchet::Ratchet;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Install cargo-deny with cargo if it is missing (70 s on two cores)
    #[arg(long)]
    install: bool,
    /// Lower each count in xtask/ratchet.txt to the present count; checks nothing else
    #[arg(long)]
    tighten: bool,
}

/// Runs every check, also after a failure. The last line counts the checks.
pub(crate) fn run(args: &Args) -> Result<bool> {
    if args.tighten {
        return ratchet::tighten(&text::Files::read()?);
    }
    let mut tally = Tally::default();
    tally.checked("format", format()?);
    text(&mut tally)?;
    tally.checked("clippy", clippy()?);
    tally.checked("the crates as delivered", delivered()?);
    tally.checked("cargo doc", documentation()?);
    let missing = match args.install {
        true => deny::Missing::Install,
        false => deny::Missing::Fail,
    };
    deny::check(missing, &mut tally)?;
    arm::check(&mut tally)?;
    tally.print();
    Ok(tally.is_good())
}

/// Checks line width, long sentences, the seams of the simulation, the crate table and the texts of switch-off.
pub(crate) fn text(tally: &mut Tally) -> Result<()> {
    let files = text::Files::read()?;
    let ratchet = Ratchet::read()?;
    tally.checked("line width", ratchet.holds(&width::CHECK, &files));
    tally.checked("long sentences", ratchet.holds(&sentences::CHECK, &files));
    tally.checked(
        "seams of the simulation",
        ratchet.holds(&seams::CHECK, &files),
    );
    let differences = crates::differences()?;
    for difference in &differences {
        eprintln!("docs/ARCHITECTURE.md: {difference}");
    }
    tally.checked("the crate table", differences.is_empty());
    let faults = switch_off::faults_of_texts()?;
    for fault in &faults {
        eprintln!("xtask/src/switch_off: {fault}");
    }
    tally.checked("texts of switch-off", faults.is_empty());
    Ok(())
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

/// Compiles what a release contains. The tests and clippy ask the same crates for more features.
fn delivered() -> Result<bool> {
    let wheel = ["check", "-p", "kvpool-python", "--lib", "--bins"];
    succeeds(cargo(&wheel).args(DAEMONS))
}

fn documentation() -> Result<bool> {
    succeeds(cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
}
