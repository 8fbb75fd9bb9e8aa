//! The command line: what every command shares, and which command it is.

use crate::bench::agent as bench_agent;
use crate::commands::{
    self, bench, cluster, demo, describe, doctor, exist, get, ls, put, replay, rm, status,
};
use crate::connection::Connection;
use crate::output::Format;
use crate::{exit, process, worker};
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use tracing_subscriber::EnvFilter;

/// Command line of kvpool, a distributed KV-cache pool for language models
///
/// Most commands use a running pool: name its masters with --master. `demo` and `replay` start a pool
/// of their own; `bench` does so without --master.
#[derive(Debug, Parser)]
#[command(name = "kvctl", version, after_help = exit::HELP, after_long_help = LONG_HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    context: Context,
    #[command(subcommand)]
    command: Command,
}

const LONG_HELP: &str = "\
Examples:
  kvctl demo
  kvctl --master http://10.0.0.1:7070 status
  kvctl put greeting - < file && kvctl get greeting -o copy

Exit codes:
  0    success
  1    failure; the message says why
  2    invalid command line
  3    a key is not in the pool
  4    the pool cannot be reached
  5    data corruption: a block's bytes differ from what was put
  130  interrupted";

/// What every command gets.
#[derive(Debug, clap::Args)]
pub(crate) struct Context {
    /// Format of the results
    #[arg(long, global = true, value_enum, default_value_t = Format::Table)]
    pub(crate) output: Format,
    #[command(flatten)]
    pub(crate) connection: Connection,
}

#[derive(Debug, Subcommand)]
enum Command {
    Status(status::Args),
    Cluster(cluster::Args),
    Ls(ls::Args),
    Get(get::Args),
    Put(put::Args),
    Rm(rm::Args),
    Exist(exist::Args),
    Describe(describe::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
    Demo(demo::Args),
    Replay(replay::Args),
    /// A worker process of `demo` and `replay`: JSON lines in, JSON lines out
    #[command(hide = true)]
    Worker(worker::Blocks),
    /// A process of `bench`: JSON lines in, JSON lines out
    #[command(hide = true)]
    BenchAgent {
        /// What the keys of the run are made from.
        seed: String,
    },
    /// Runs a program that dies with the process that started it
    #[command(hide = true)]
    Tether {
        /// The process id of the one that starts it.
        parent: u32,
        /// The program.
        program: OsString,
        /// Its arguments.
        #[arg(last = true)]
        arguments: Vec<OsString>,
    },
}

impl Cli {
    /// What is logged: RUST_LOG, or what matters.
    pub(crate) fn log_filter(&self) -> EnvFilter {
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn,kvctl=info"))
    }

    /// Runs the command.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let context = &self.context;
        match self.command {
            Command::Status(args) => commands::status::run(args, context).await,
            Command::Cluster(args) => commands::cluster::run(args, context).await,
            Command::Ls(args) => commands::ls::run(args, context).await,
            Command::Get(args) => commands::get::run(args, context).await,
            Command::Put(args) => commands::put::run(args, context).await,
            Command::Rm(args) => commands::rm::run(args, context).await,
            Command::Exist(args) => commands::exist::run(args, context).await,
            Command::Describe(args) => commands::describe::run(args, context).await,
            Command::Doctor(args) => commands::doctor::run(args, context).await,
            Command::Bench(args) => commands::bench::run(args, context).await,
            Command::Demo(args) => commands::demo::run(args, context).await,
            Command::Replay(args) => commands::replay::run(args, context).await,
            Command::Worker(blocks) => worker::run(blocks, context).await,
            Command::BenchAgent { seed } => bench_agent::run(seed).await,
            Command::Tether {
                parent,
                program,
                arguments,
            } => Err(process::tether(parent, &program, &arguments)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_its_codes_are_told() {
        Cli::command().debug_assert();
        assert!(LONG_HELP.ends_with(exit::HELP), "one list of exit codes");
    }

    #[test]
    fn every_command_that_people_see_has_an_example() {
        for command in Cli::command().get_subcommands() {
            if command.is_hide_set() {
                continue;
            }
            let name = command.get_name();
            let help = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(help.contains(&format!("kvctl {name}")), "{name}");
        }
    }
}
