//! `kvctl node`: store nodes taken out of service and back, directories made for them, and waiting for them.

mod directory;
mod drain;
mod undrain;
mod wait;

use crate::context::Context;
use clap::Subcommand;

/// Drain store nodes, take them back, wait for drains, or make directories for a node
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl node drain node-2
  kvctl node drain node-2 --timeout 2m
  kvctl node undrain node-2
  kvctl node directory /run/kvpool --owner 65532:65532")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Drain(drain::Args),
    Undrain(undrain::Args),
    Directory(directory::Args),
    Wait(wait::Args),
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    match args.command {
        Command::Drain(args) => drain::run(args, context).await,
        Command::Undrain(args) => undrain::run(args, context).await,
        Command::Directory(args) => directory::run(&args, context),
        Command::Wait(args) => wait::run(&args, context).await,
    }
}
