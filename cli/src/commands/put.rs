//! `kvctl put`.

use crate::connection::{no_node, parse_key, put_error};
use crate::context::Context;
use crate::exit;
use crate::output;
use anyhow::Context as _;
use kvpool_client::{PutBlock, PutOptions, PutOutcome};
use kvpool_transport::Region;
use kvpool_types::{Code, Key};
use serde::Serialize;
use std::io::Read;
use std::path::PathBuf;

/// Put a file as a block
///
/// If the key is present, nothing is written; --upsert writes a new version.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl put greeting hello.bin
  echo hello | kvctl put greeting - --upsert
  kvctl put chain/1 block.bin --parent chain/0")]
pub(crate) struct Args {
    /// The block's key: up to 1 KiB
    #[arg(value_parser = parse_key)]
    key: Key,
    /// File with the block's bytes; - is standard input
    file: PathBuf,
    /// Key of the parent: the previous block of the chain
    #[arg(long, value_name = "KEY", value_parser = parse_key)]
    parent: Option<Key>,
    /// Number of replicas, each on a different node
    #[arg(long, value_name = "N", default_value_t = 1)]
    replicas: u32,
    /// If the key is present, write a new version
    #[arg(long)]
    upsert: bool,
    /// Never evict this block
    #[arg(long)]
    pin: bool,
}

#[derive(Serialize)]
struct Outcome {
    key: String,
    length: u64,
    stored: bool,
    replicas: usize,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let bytes = if args.file.as_os_str() == "-" {
        let mut bytes = Vec::new();
        std::io::stdin()
            .lock()
            .read_to_end(&mut bytes)
            .context("cannot read standard input")?;
        bytes
    } else {
        std::fs::read(&args.file).with_context(|| format!("cannot read {}", args.file.display()))?
    };
    let length = bytes.len() as u64;
    let client = context.connection.connect().await?;
    let block = PutBlock {
        key: args.key.clone(),
        parent: args.parent,
        buffers: vec![Region::from(bytes).whole()],
    };
    let options = PutOptions {
        replicas: args.replicas,
        upsert: args.upsert,
        hard_pin: args.pin,
        ..PutOptions::default()
    };
    let put = client
        .batch_put(vec![block], &options)
        .await
        .pop()
        .context("the client returned no outcome for this put")?
        .map_err(|error| match error.code() {
            Code::NoNodes => {
                let why = no_node(&context.connection);
                exit::Unreachable(format!("the block was not put: {why}")).into()
            }
            _ => put_error(error),
        })?;
    let outcome = Outcome {
        key: args.key.to_string(),
        length,
        stored: put != PutOutcome::Present,
        replicas: match put {
            PutOutcome::Stored { replicas } => replicas,
            PutOutcome::Present => 0,
        },
    };
    context.output.show(&outcome, |outcome| {
        if outcome.stored {
            format!(
                "stored {} on {} node(s)",
                output::bytes(outcome.length),
                outcome.replicas
            )
        } else {
            "already present: nothing was written (--upsert writes a new version)".to_owned()
        }
    })
}
