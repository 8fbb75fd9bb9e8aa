//! `kvctl replay`.

use crate::cluster::{CommitAck, Eviction, LOOPBACK, Plan, Policy, Security, Ssd};
use crate::context::Context;
use crate::fleet::{Pace, Size};
use crate::job::{self, Job};
use crate::size::parse_size;
use crate::worker::Blocks;
use crate::workload::{Prompt, Request, trace};
use anyhow::{Context as _, bail};
use bytesize::ByteSize;
use clap::value_parser;
use kvpool_types::{Length, medium};
use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Replay a trace through a new pool and check every byte
///
/// A trace has one request per line,
/// {"timestamp":ms,"input_length":n,"output_length":n,"hash_ids":[..]}. Each id names a block of 512
/// tokens together with everything before it. The command starts its own daemons and workers, as
/// `kvctl demo` does. For each request a prefill worker matches, gets and puts the blocks; a decode
/// worker then gets the whole chain and checks every byte.
///
/// With one worker pair each request ends before the next begins, in the order of the trace. The hit rate
/// then depends only on the eviction policy.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl replay --trace conversation_trace.jsonl
  kvctl replay --trace conversation_trace.jsonl --policy lru --capacity-blocks 10000 --output json
  kvctl replay --trace conversation_trace.jsonl --pool-size 1GiB --block-size 64KiB --workers 4 --speedup 100

`hit_rate` in the JSON is the percentage of blocks that the pool had when their request came, counted
up to the first that it had not.")]
pub(crate) struct Args {
    /// The trace (JSONL)
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Which blocks a full pool evicts first
    #[arg(long, value_enum, default_value_t = Policy::Prefix)]
    policy: Policy,
    /// Size the pool for exactly this many blocks on one node; evict only what a put needs
    #[arg(long, value_name = "N", conflicts_with = "pool_size", value_parser = value_parser!(u64).range(1..))]
    capacity_blocks: Option<u64>,
    /// Memory of the pool, all on one node [default: enough for every block of the trace]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pool_size: Option<ByteSize>,
    /// Give the node an SSD with room for this many blocks: a file in the temporary directory
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    ssd_blocks: Option<u64>,
    /// Write budget of the SSD, in drive writes per day [default: none]
    #[arg(long, value_name = "N", requires = "ssd_blocks")]
    ssd_dwpd: Option<f64>,
    /// Block size in bytes
    #[arg(long, value_name = "SIZE", default_value = "4KiB", value_parser = parse_size)]
    block_size: ByteSize,
    /// Number of worker pairs (one prefill, one decode)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Follow the trace's timestamps, this many times faster [default: as fast as possible]
    #[arg(long, value_name = "X", value_parser = speedup)]
    speedup: Option<f64>,
    /// Only the first N requests
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// When a put is acknowledged
    #[arg(long, value_enum, default_value_t = CommitAck::Durable)]
    commit_ack: CommitAck,
    /// Keep the directory with metadata and logs, and print its path
    #[arg(long)]
    keep: bool,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let requests = read_trace(&args.trace, args.limit)?;
    let block_bytes = args.block_size.as_u64();
    let extent = job::extent_bytes(block_bytes);
    let (node_bytes, eviction) = match (args.capacity_blocks, args.pool_size) {
        (Some(blocks), _) if args.ssd_blocks.is_some() => {
            (blocks * extent, Some(Eviction::NEARLY_ENOUGH))
        }
        (Some(blocks), _) => (blocks * extent, Some(Eviction::JUST_ENOUGH)),
        (None, Some(size)) => (size.as_u64(), None),
        (None, None) => (
            distinct_blocks(&requests) * extent,
            Some(Eviction::JUST_ENOUGH),
        ),
    };
    let job = Job {
        workload: args.trace.display().to_string(),
        requests,
        blocks: Blocks {
            bytes: block_bytes,
            tokens: trace::BLOCK_TOKENS,
        },
        plan: Plan {
            nodes: 1,
            node_bytes,
            last_node_bytes: None,
            policy: args.policy,
            commit_ack: args.commit_ack,
            eviction,
            ssd: args.ssd_blocks.map(|blocks| Ssd {
                bytes: ssd_bytes(blocks, block_bytes),
                dwpd: args.ssd_dwpd,
            }),
            keep: args.keep,
            host: LOOPBACK,
            security: Security::default(),
        },
        size: Size {
            prefill: args.workers,
            decode: args.workers,
        },
        pace: Pace {
            in_flight: args.workers as usize,
            speedup: args.speedup,
        },
    };
    job::run(job, context).await
}

/// The size of a medium with room for this many blocks.
fn ssd_bytes(blocks: u64, block_bytes: u64) -> u64 {
    let footprint = medium::footprint(Length(block_bytes)).map_or(block_bytes, |bytes| bytes.0);
    medium::DATA_START + blocks * footprint
}

/// Reads at most `limit` requests of the trace at `path`. A trace without a request is an error.
pub(super) fn read_trace(path: &Path, limit: Option<u32>) -> anyhow::Result<Vec<Request>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let limit = limit.map_or(usize::MAX, |limit| limit as usize);
    let requests = trace::parse(BufReader::new(file), limit)
        .with_context(|| format!("{} cannot be replayed", path.display()))?;
    if requests.is_empty() {
        bail!("{} has no requests", path.display());
    }
    Ok(requests)
}

fn distinct_blocks(requests: &[Request]) -> u64 {
    let mut distinct: HashSet<u64> = HashSet::new();
    for request in requests {
        if let Prompt::Ids(ids) = &request.prompt {
            distinct.extend(ids);
        }
    }
    distinct.len() as u64
}

fn speedup(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("must be a number above 0, such as 10".to_owned()),
    }
}
