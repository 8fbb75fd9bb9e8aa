//! The repository's own tasks: `cargo xtask demo | test | lint | wheels | rdma | fuzz | switch-off`.
//!
//! It builds and runs the other packages as their users do, through cargo, and depends on none of them.

mod cargo;
mod demo;
mod fuzz;
mod lint;
mod packages;
mod python;
mod rdma;
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
    /// Build the release binaries and run `kvctl demo`: a master, two store nodes and four workers
    /// that share KV over them, every byte checked
    Demo {
        /// What `kvctl demo` is to be given (`cargo xtask demo -- --help` lists it)
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Check the format and the lints, then run every test; the last line is the tally
    Test {
        /// Leave out the cluster tests, which start real daemons
        #[arg(long)]
        quick: bool,
        /// Add Debian's packages that tests need and this machine lacks; without it, such tests skip
        #[arg(long)]
        install: bool,
    },
    /// Check format, lints, line width, long sentences, the crate table, rustdoc and dependencies
    Lint(lint::Args),
    /// Build the Python wheels, of the profile `dist` with the three commands inside, and say where they are
    Wheels {
        /// Add Debian's package python3-venv if this machine lacks it
        #[arg(long)]
        install: bool,
    },
    /// Run what needs an RDMA device in virtual machines with a software one; the last line is the tally
    Rdma(rdma::Args),
    /// Give every decoder, and every port of a live pool, inputs that are almost right
    Fuzz(fuzz::Args),
    /// Switch off, in a copy of the tree, each mechanism that an invariant rests on, and see that the
    /// invariant's test fails without it
    SwitchOff {
        /// The number of one invariant; else all
        invariant: Option<u8>,
    },
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Demo { args } => demo::run(&args),
        Task::Test { quick, install } => test::run(quick, Packages::asked(install)),
        Task::Lint(args) => lint::run(&args),
        Task::Wheels { install } => python::wheels(Packages::asked(install)),
        Task::Rdma(args) => rdma::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::SwitchOff { invariant } => switch_off::run(invariant),
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
