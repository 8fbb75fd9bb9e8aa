//! `kvctl describe`.

use crate::connection::{control_error, parse_key};
use crate::context::Context;
use crate::exit;
use crate::output;
use kvpool_types::Key;
use serde::Serialize;
use std::time::Duration;

/// Show a block: its size, checksum, version, leases and replicas
///
/// Takes no lease and does not change the block's recency. Exits with code 3 if the pool does not have
/// the block; with --output json the result says so too.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl describe greeting")]
pub(crate) struct Args {
    /// The block's key
    #[arg(value_parser = parse_key)]
    key: Key,
}

#[derive(Serialize)]
struct Block {
    key: String,
    present: bool,
    length: u64,
    checksum: String,
    version: u64,
    lease_left_seconds: f64,
    soft_pin_left_seconds: f64,
    hard_pin: bool,
    replicas: Vec<Replica>,
}

#[derive(Serialize)]
struct Replica {
    node: String,
    /// `memory` or `ssd`.
    tier: &'static str,
    segment: u32,
    offset: u64,
    state: String,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let described = client
        .describe(std::slice::from_ref(&args.key))
        .await
        .map_err(control_error)?
        .into_iter()
        .next()
        .flatten();
    let Some(described) = described else {
        return Err(exit::missing(&args.key, context.output));
    };
    let block = Block {
        key: args.key.to_string(),
        present: true,
        length: described.length.0,
        checksum: described.checksum.to_string(),
        version: described.version.0,
        lease_left_seconds: described.lease_left.as_secs_f64(),
        soft_pin_left_seconds: described.soft_pin_left.as_secs_f64(),
        hard_pin: described.hard_pin,
        replicas: described
            .replicas
            .into_iter()
            .map(|replica| Replica {
                node: replica.node,
                tier: match replica.extent.segment.is_on_medium() {
                    true => "ssd",
                    false => "memory",
                },
                segment: replica.extent.segment.0,
                offset: replica.extent.offset.0,
                state: replica.state,
            })
            .collect(),
    };
    context.output.show(&block, tables)
}

fn tables(block: &Block) -> String {
    let left = |seconds: f64| {
        if seconds > 0.0 {
            humantime::format_duration(Duration::from_secs_f64(seconds)).to_string()
        } else {
            "none".to_owned()
        }
    };
    let mut facts = output::facts();
    facts.add_row(["key", &block.key]);
    let length = format!("{} bytes", output::count(block.length));
    facts.add_row(["length", &length]);
    facts.add_row(["checksum (CRC-64/NVME)", &block.checksum]);
    facts.add_row(["version", &block.version.to_string()]);
    facts.add_row(["lease left", &left(block.lease_left_seconds)]);
    facts.add_row(["soft pin left", &left(block.soft_pin_left_seconds)]);
    facts.add_row(["hard pin", if block.hard_pin { "yes" } else { "no" }]);

    let mut replicas = output::table(["node", "in", "segment", "offset", "state"]);
    for replica in &block.replicas {
        replicas.add_row([
            replica.node.clone(),
            replica.tier.to_owned(),
            replica.segment.to_string(),
            output::count(replica.offset),
            replica.state.clone(),
        ]);
    }
    format!("{facts}\n{replicas}")
}
