//! The command line of kvbench.

use crate::agent;
use crate::run::{self, Args};
use clap::{Parser, Subcommand};
use kvctl::context::Context;
use kvctl::exit;
use kvctl::process::Tether;

/// Measure the pool against the limits of this machine
///
/// Each case (put, get, view, exist, match_prefix) alternates with plain code that does the same work without
/// a pool. This limit is a memory copy, a TCP connection between two processes, or a ping-pong. The table
/// shows the ratio to the limit, computed pair by pair, and the goal of the case.
///
/// RDMA cases run where this host and the nodes have RDMA. They have no limit to compare with:
/// measure bare RDMA with perftest.
///
/// TCP cases and their limits run between two network namespaces over a veth link. This needs root
/// and `ip`; without them the cases run over loopback and have no goals.
///
/// Without --master the command starts its own pools on this machine. With --master (or
/// KVPOOL_MASTER) it measures that pool as far as possible from outside, then removes its own blocks.
///
/// A sample of the bytes is verified; a mismatch ends the run with exit code 5. Results are meaningful
/// only on an otherwise idle machine. To load an existing pool, use `kvctl bench`.
#[derive(Debug, Parser)]
#[command(
    name = "kvbench",
    version,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    after_help = exit::HELP,
    after_long_help = LONG_HELP
)]
pub(crate) struct Cli {
    #[command(flatten)]
    context: Context,
    #[command(flatten)]
    args: Args,
    #[command(subcommand)]
    role: Option<Role>,
}

const LONG_HELP: &str = "\
Examples:
  kvbench
  kvbench --list
  kvbench --only tcp/ --pairs 21
  kvbench --only rdma/ --quick --span 32MiB
  kvbench --only exist,match_prefix --large --json results.json

Exit codes:
  0    success
  1    failure; the message says why
  2    invalid command line
  3    a key is not in the pool
  4    the pool cannot be reached
  5    data corruption: a block's bytes differ from what was put
  130  interrupted";

/// The roles of the processes that kvbench starts.
#[derive(Debug, Subcommand)]
enum Role {
    /// A process that measures: JSON lines in, JSON lines out
    #[command(hide = true)]
    Agent {
        /// The keys of the run are derived from it.
        seed: String,
    },
    #[command(hide = true)]
    Tether(Tether),
}

impl Cli {
    /// Runs the cases, or the hidden role of a child process.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        match self.role {
            None => run::run(self.args, &self.context).await,
            Some(Role::Agent { seed }) => agent::run(seed).await,
            Some(Role::Tether(tether)) => Err(tether.run()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_help_lists_the_exit_codes() {
        Cli::command().debug_assert();
        assert!(LONG_HELP.ends_with(exit::HELP), "one list of exit codes");
    }

    #[test]
    fn help_shows_no_role_of_a_child_process() {
        let help = Cli::command().render_long_help().to_string();
        for role in ["agent", "tether"] {
            assert!(!help.contains(role), "{help}");
        }
    }
}
