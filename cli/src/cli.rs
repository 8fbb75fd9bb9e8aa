//! The command line of kvctl: every command and its dispatch.

use crate::commands::{
    bench, cluster, demo, describe, doctor, exist, get, ls, namespace, node, put, replay, replica,
    rm, ssd, status, token, top,
};
use crate::context::Context;
use crate::process::Tether;
use crate::{exit, worker};
use clap::{Parser, Subcommand};

/// Command line of kvpool, a distributed KV-cache pool for language models
///
/// Most commands use a running pool: name its masters with --master. `demo` and `replay` start a pool
/// of their own; `bench` does so without --master.
#[derive(Debug, Parser)]
#[command(name = "kvctl", version, after_help = exit::HELP, after_long_help = LONG_HELP)]
pub struct Cli {
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

#[derive(Debug, Subcommand)]
enum Command {
    Status(status::Args),
    Top(top::Args),
    Cluster(cluster::Args),
    Ls(ls::Args),
    Get(get::Args),
    Put(put::Args),
    Rm(rm::Args),
    Exist(exist::Args),
    Describe(describe::Args),
    Doctor(doctor::Args),
    #[command(visible_alias = "namespaces")]
    Namespace(namespace::Args),
    Node(node::Args),
    Replica(replica::Args),
    Ssd(ssd::Args),
    Token(token::Args),
    Bench(bench::Args),
    Demo(demo::Args),
    Replay(replay::Args),
    /// A worker process of `demo` and `replay`: JSON lines in, JSON lines out
    #[command(hide = true)]
    Worker(worker::Blocks),
    #[command(hide = true)]
    Tether(Tether),
}

impl Cli {
    /// Runs the command.
    pub async fn run(self) -> anyhow::Result<()> {
        let context = &self.context;
        match self.command {
            Command::Status(args) => status::run(args, context).await,
            Command::Top(args) => top::run(args, context).await,
            Command::Cluster(args) => cluster::run(args, context).await,
            Command::Ls(args) => ls::run(args, context).await,
            Command::Get(args) => get::run(args, context).await,
            Command::Put(args) => put::run(args, context).await,
            Command::Rm(args) => rm::run(args, context).await,
            Command::Exist(args) => exist::run(args, context).await,
            Command::Describe(args) => describe::run(args, context).await,
            Command::Doctor(args) => doctor::run(args, context).await,
            Command::Namespace(args) => namespace::run(args, context).await,
            Command::Node(args) => node::run(args, context).await,
            Command::Replica(args) => replica::run(args, context).await,
            Command::Ssd(args) => ssd::run(args, context).await,
            Command::Token(args) => token::run(args, context).await,
            Command::Bench(args) => bench::run(args, context).await,
            Command::Demo(args) => demo::run(args, context).await,
            Command::Replay(args) => replay::run(args, context).await,
            Command::Worker(blocks) => worker::run(blocks, &context.connection).await,
            Command::Tether(tether) => Err(tether.run()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, FromArgMatches};
    use std::time::Duration;

    #[test]
    fn the_command_line_is_consistent_and_help_lists_the_exit_codes() {
        Cli::command().debug_assert();
        assert!(LONG_HELP.ends_with(exit::HELP), "one list of exit codes");
    }

    /// The calls of a command that waits have a timeout of their own.
    #[test]
    fn the_time_that_a_command_waits_is_not_the_timeout_of_its_calls() {
        let times = |line: &str| {
            let matches = Cli::command().try_get_matches_from(line.split(' '));
            let matches = matches.unwrap_or_else(|error| panic!("{line}: {error}"));
            let (_, node) = matches.subcommand().unwrap();
            let (_, command) = node.subcommand().unwrap();
            let wait: Duration = *command.get_one("wait").unwrap();
            let cli = Cli::from_arg_matches(&matches).unwrap();
            let call = cli.context.connection.timeout;
            (wait.as_millis(), call.as_millis())
        };
        for command in ["drain n", "wait"] {
            let times =
                |before: &str, after: &str| times(&format!("kvctl{before} node {command}{after}"));
            assert_eq!(times("", ""), (300_000, 10_000));
            assert_eq!(times("", " --timeout 0s"), (0, 10_000));
            assert_eq!(times("", " --timeout 3ms"), (3, 10_000));
            assert_eq!(times(" --timeout 2s", " --timeout 1m"), (60_000, 2_000));
            assert_eq!(times("", " --call-timeout 2s"), (300_000, 2_000));
        }
    }

    #[test]
    fn all_namespaces_are_listed_by_each_of_four_commands() {
        for line in [
            &["namespaces"][..],
            &["namespace"],
            &["namespace", "list"],
            &["namespaces", "list"],
        ] {
            let read = Cli::try_parse_from([&["kvctl"][..], line].concat());
            assert!(read.is_ok(), "{line:?}");
        }
    }

    /// An empty text mostly comes from a variable of a script that is not set.
    #[test]
    fn empty_names_are_refused() {
        let lines: [&[&str]; 4] = [
            &["--tls-server-name=", "status"],
            &["--namespace=", "status"],
            &["node", "drain", ""],
            &["node", "undrain", ""],
        ];
        for line in lines {
            let read = Cli::try_parse_from([&["kvctl"][..], line].concat());
            let kind = read.err().map(|error| error.kind());
            assert_eq!(kind, Some(clap::error::ErrorKind::InvalidValue), "{line:?}");
        }
    }

    #[test]
    fn every_visible_command_has_an_example() {
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
