//! `cargo xtask fuzz`.

use crate::cargo::{EVERYTHING, cargo, lint_in_builds, succeeds, watch};
use crate::tally::Doctests;
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

/// The test program that mutates the input of decoders.
const DECODERS: &str = "fuzz";
/// The test program and module that mutate the input of ports.
const PORTS: (&str, &str) = ("bytes", "mutations");

/// Builds the daemons, gives every decoder its mutations, and then every port of a live pool. A run without
/// a test fails.
pub(crate) fn run(args: &Args) -> Result<bool> {
    // Builds as `cargo xtask test` does, so that both tasks share one build. Without clippy it is an ordinary build.
    lint_in_builds();
    if !succeeds(cargo(&["build"]).args(EVERYTHING))? {
        return Ok(false);
    }
    let fuzz = |program: &[&str]| {
        let mut test = cargo(&["test", "--workspace", "--no-fail-fast", "--test"]);
        test.args(program)
            .args(["--nocapture", "--test-threads", "1"])
            .env("KVPOOL_FUZZ", args.cases.to_string())
            .env("KVPOOL_FUZZ_SEED", args.seed.to_string());
        let mut results = Doctests::default();
        let ended_well = watch(&mut test, |line| results.read(line))?;
        anyhow::Ok(ended_well && results.tally().is_good())
    };
    let decoders = fuzz(&[DECODERS, "--"])?;
    let (program, module) = PORTS;
    Ok(fuzz(&[program, "--", &format!("{module}::")])? && decoders)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::root;

    #[test]
    fn the_programs_and_modules_of_the_mutations_exist() {
        let tests = root().join("tests/tests");
        let (program, module) = PORTS;
        for file in [format!("{DECODERS}.rs"), format!("{program}/{module}.rs")] {
            assert!(tests.join(&file).is_file(), "{file}");
        }
    }
}
