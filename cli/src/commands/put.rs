//! `kvctl put`.

use crate::connection::{is_hidden, no_node, parse_key, put_error};
use crate::context::Context;
use crate::{exit, output, shares};
use anyhow::Context as _;
use clap::value_parser;
use kvpool_client::{PutBlock, PutOptions, PutOutcome};
use kvpool_transport::Region;
use kvpool_types::{Code, Key, Length};
use serde::Serialize;
use std::io::Read;
use std::path::{Path, PathBuf};

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
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
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
    let client = context.connection.connect().await?;
    let bytes = read(&args.file, client.limits().max_block)?;
    let length = bytes.len() as u64;
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
    let put = client.batch_put(vec![block], &options).await.pop();
    let put = match put.context("the client returned no outcome for this put")? {
        Err(error) if error.code() == Code::NoNodes => {
            let why = match client.stats().await {
                Ok(stats) if is_hidden(&stats) => error.to_string(),
                Ok(stats) => no_node(&context.connection, &stats.nodes),
                Err(_) => no_node(&context.connection, &[]),
            };
            return Err(exit::Unreachable(format!("the block was not put: {why}")).into());
        }
        Err(error) if error.code() == Code::Full => {
            let stats = client.stats().await.ok();
            let told = put_error(error);
            return Err(match stats.as_ref().and_then(shares::problem) {
                Some(why) => anyhow::anyhow!("{told:#}; {why}"),
                None => told,
            });
        }
        put => put.map_err(put_error)?,
    };
    let outcome = Outcome {
        key: args.key.to_string(),
        length,
        stored: put != PutOutcome::Present,
        replicas: match put {
            PutOutcome::Stored { replicas } => replicas,
            PutOutcome::Present => 0,
        },
    };
    let wanted = args.replicas as usize;
    context.output.show(&outcome, |outcome| {
        if outcome.stored {
            let (length, replicas) = (output::bytes(outcome.length), outcome.replicas);
            match wanted > replicas {
                true => format!(
                    "stored {length} on {replicas} of {wanted} nodes: no other node took it"
                ),
                false => format!("stored {length}, {replicas} replica(s)"),
            }
        } else {
            "already present: nothing was written (--upsert writes a new version)".to_owned()
        }
    })
}

/// Reads a file, or standard input for `-`, of at most `most` bytes: an endless input must not take all memory.
fn read(file: &Path, most: Length) -> anyhow::Result<Vec<u8>> {
    let source: Box<dyn Read> = match file.as_os_str() == "-" {
        true => Box::new(std::io::stdin().lock()),
        false => Box::new(
            std::fs::File::open(file).with_context(|| format!("cannot read {}", file.display()))?,
        ),
    };
    let mut bytes = Vec::new();
    source
        .take(most.0.saturating_add(1))
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", file.display()))?;
    if bytes.len() as u64 > most.0 {
        return Err(exit::Usage(format!(
            "{} is longer than {}, the largest block that this pool takes",
            file.display(),
            output::bytes(most.0)
        ))
        .into());
    }
    Ok(bytes)
}
