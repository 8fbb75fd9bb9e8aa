//! `cargo xtask simulate`.

use crate::cargo::{cargo, succeeds};
use anyhow::Result;

/// Which histories to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many seeds to run [default: 300; 1 with `--seed`]
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed [default: 0]
    #[arg(long)]
    seed: Option<u64>,
    /// Print the trace of each history
    #[arg(long)]
    trace: bool,
    /// Continue after a failure, and list every seed that breaks a rule
    #[arg(long)]
    keep_going: bool,
    /// Build with the profile `release`
    #[arg(long)]
    release: bool,
}

/// Builds the simulator and runs it; true when no rule was broken.
pub(crate) fn run(args: &Args) -> Result<bool> {
    let mut run = cargo(&["run", "--quiet", "--package", "kvpool-sim"]);
    if args.release {
        run.arg("--release");
    }
    let seeds = args.seeds.unwrap_or(args.seed.map_or(300, |_| 1));
    run.args(["--", "--seeds", &seeds.to_string()]);
    run.args(["--seed", &args.seed.unwrap_or(0).to_string()]);
    if args.trace {
        run.arg("--trace");
    }
    if args.keep_going {
        run.arg("--keep-going");
    }
    succeeds(&mut run)
}
