//! `kvctl node undrain`.

use crate::connection::control_error;
use crate::context::Context;
use clap::builder::NonEmptyStringValueParser;
use serde::Serialize;

/// Take a store node back into service that `kvctl node drain` took out of it
///
/// The node takes new blocks again, and no more of its blocks move. Blocks that have moved stay where they are. A
/// `kvctl node drain` that still runs fails, and says that the drain was cancelled. A node that stops cannot be
/// taken back: start it again. To repeat the command does no harm.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl node undrain node-2")]
pub(super) struct Args {
    /// The node's name, as `kvctl status` shows it
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    name: String,
}

#[derive(Serialize)]
struct Outcome {
    node: String,
    /// Whether the node drained until now. True also after an attempt whose answer was lost.
    drained: bool,
}

/// Runs it.
pub(super) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let drained = client.undrain_node(&args.name).await;
    let outcome = Outcome {
        drained: drained.map_err(control_error)?,
        node: args.name,
    };
    context.output.show(&outcome, said)
}

fn said(outcome: &Outcome) -> String {
    let node = &outcome.node;
    match outcome.drained {
        true => format!(
            "node {node} takes new blocks again: its drain was cancelled. Blocks that have moved stay where they are"
        ),
        false => format!("node {node} does not drain: nothing was changed"),
    }
}
