//! `kvbench`: measures every operation of a pool beside the limit of the machine, in turns.
//!
//! ```text
//!  cases ──► runner ──Command──► agent: clients       ──► pools
//!    │         │    ──Command──► agent: limits ◄─bare TCP─► limits-far
//!    │         └──► pairing ──► report
//!    └ what runs, what bounds it, its goal
//! ```
//!
//! The TCP cases have a runner of their own, whose far processes are in another network namespace ([`veth`]).
//!
//! A case does not say how it is measured. The code that measures a case does not know its goal.

#![forbid(unsafe_code)]

mod agent;
mod cases;
mod cli;
mod left_out;
mod limits;
mod machine;
mod pairing;
mod pools;
mod report;
mod run;
mod runner;
mod security;
mod usage;
mod veth;
mod window;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    kvctl::program::run("kvbench", "warn,kvctl=info,kvbench=info", cli.run())
}
