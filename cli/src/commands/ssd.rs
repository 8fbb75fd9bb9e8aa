//! `kvctl ssd`: the media of store nodes, offline by path and in a pool by id.

mod detach;
mod format;
mod inspect;
mod target;
#[cfg(test)]
mod tests;
mod verify;

use crate::context::Context;
use clap::Subcommand;

/// Look at SSD media, verify them, format them, or retire one
///
/// `inspect`, `verify` and `format` need no pool. They take the disk, partition or file that a store
/// node's --ssd names, on the node's host. `detach` asks the pool.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl ssd inspect /var/lib/kvpool/ssd
  kvctl ssd verify /dev/nvme0n1p1
  kvctl ssd format /dev/nvme0n1p1 --yes
  kvctl ssd detach 2f1c77f0a6f94c2b8d4e5b6a7c8d9e0f --yes")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Args),
    Verify(verify::Args),
    Format(format::Args),
    Detach(detach::Args),
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    match args.command {
        Command::Inspect(args) => inspect::run(args, context).await,
        Command::Verify(args) => verify::run(args, context).await,
        Command::Format(args) => format::run(args, context).await,
        Command::Detach(args) => detach::run(args, context).await,
    }
}
