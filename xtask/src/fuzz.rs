//! `cargo xtask fuzz`.

use crate::cargo::{EVERYTHING, cargo, succeeds};
use anyhow::Result;

/// How long to fuzz, and where to begin.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of mutations for each decoder and each port
    #[arg(long, default_value_t = 100_000)]
    cases: u64,
    /// Seed of the random choices: the same seed gives the same mutations
    #[arg(long, default_value_t = 17)]
    seed: u64,
}

/// Builds the daemons, gives every decoder its mutations, and then every port of a live pool.
pub(crate) fn run(args: &Args) -> Result<bool> {
    // As `cargo xtask test` builds, so that either finds what the other has built.
    if !succeeds(cargo(&["build"]).args(EVERYTHING))? {
        return Ok(false);
    }
    let fuzz = |program: &[&str]| {
        let mut test = cargo(&["test", "--workspace", "--no-fail-fast", "--test"]);
        test.args(program)
            .args(["--nocapture", "--test-threads", "1"])
            .env("KVPOOL_FUZZ", args.cases.to_string())
            .env("KVPOOL_FUZZ_SEED", args.seed.to_string());
        succeeds(&mut test)
    };
    let decoders = fuzz(&["fuzz", "--"])?;
    Ok(fuzz(&["bytes", "--", "mutations::"])? && decoders)
}
