//! `kvctl ssd`: the media of store nodes, offline by path.

mod format;
mod inspect;
mod target;
#[cfg(test)]
mod tests;
mod verify;

use crate::context::Context;
use clap::Subcommand;

/// Look at SSD media, verify them, or format them
///
/// The commands need no pool. They take the disk, partition or file that a store
/// node's --ssd names, on the node's host. `detach` asks the pool.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl ssd inspect /var/lib/kvpool/ssd
  kvctl ssd verify /dev/nvme0n1p1
  kvctl ssd format /dev/nvme0n1p1 --yes")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Args),
    Verify(verify::Args),
    Format(format::Args),
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    match args.command {
        Command::Inspect(args) => inspect::run(args, context).await,
        Command::Verify(args) => verify::run(args, context).await,
        Command::Format(args) => format::run(args, context).await,
    }
}
