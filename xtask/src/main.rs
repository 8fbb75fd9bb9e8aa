//! The repository's own tasks: `cargo xtask demo | test | lint | wheels | dist | rdma | fuzz | simulate |
//! switch-off`.
//!
//! xtask builds and runs the other packages through cargo, as users do. It depends on none of them.

mod cargo;
mod charts;
mod demo;
mod dist;
mod fuzz;
mod lint;
mod packages;
mod python;
mod rdma;
mod simulate;
mod switch_off;
mod tally;
mod test;

use clap::{Parser, Subcommand};
use packages::Packages;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The tasks of the kvpool repository")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the release binaries and run `kvctl demo`: a master, two store nodes, and four workers
    /// that share KV blocks; every byte is checked
    Demo {
        /// Arguments of `kvctl demo` (`cargo xtask demo -- --help` lists them)
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Check formatting and lints, then run every test; the last line counts the results
    Test {
        /// Skip the cluster tests, which start real daemons
        #[arg(long)]
        quick: bool,
        /// Install missing Debian packages and cargo-deny; without the flag the tests that need them skip
        #[arg(long)]
        install: bool,
    },
    /// Check formatting, lints, line width, long sentences, the crate table, rustdoc and dependencies
    Lint(lint::Args),
    /// Build the Python wheels (profile `dist`, with the three commands inside) and print their paths
    Wheels {
        /// Install the Debian package python3-venv if it is missing
        #[arg(long)]
        install: bool,
    },
    /// Make the files of a release: programs for glibc 2.17, wheels, image, chart, licences, checksums
    Dist(dist::Args),
    /// Run the RDMA tests in virtual machines with a software device; the last line counts the results
    Rdma(rdma::Args),
    /// Send mutated input to every decoder and to every port of a live pool
    Fuzz(fuzz::Args),
    /// Run histories of a whole pool in one thread and in virtual time; a seed repeats one
    Simulate(simulate::Args),
    /// Disable, one at a time in a copy of the tree, each mechanism behind an invariant, and check that
    /// the invariant's test fails
    SwitchOff(switch_off::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Demo { args } => demo::run(&args),
        Task::Test { quick, install } => test::run(quick, Packages::asked(install)),
        Task::Lint(args) => lint::run(&args),
        Task::Wheels { install } => python::wheels(Packages::asked(install)),
        Task::Dist(args) => dist::run(&args),
        Task::Rdma(args) => rdma::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Simulate(args) => simulate::run(&args),
        Task::SwitchOff(args) => switch_off::run(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
