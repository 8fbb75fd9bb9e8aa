//! `kvctl`: the command line of kvpool.

#![forbid(unsafe_code)]

use clap::Parser;
use kvctl::{Cli, program};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    program::run("kvctl", "warn,kvctl=info", cli.run())
}
