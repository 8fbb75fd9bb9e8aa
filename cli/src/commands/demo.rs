//! `kvctl demo`.

use super::replay::read_trace;
use crate::cluster::{CommitAck, LOOPBACK, Plan, Policy, Security};
use crate::context::Context;
use crate::fleet::{Pace, Size};
use crate::job::{self, Job};
use crate::size::parse_size;
use crate::worker::Blocks;
use crate::workload::chat::Chat;
use crate::workload::trace;
use bytesize::ByteSize;
use clap::value_parser;
use std::num::NonZeroUsize;
use std::path::PathBuf;

const NODES: u32 = 2;
const CHAT_BLOCK_TOKENS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// Start a pool and workers on this machine and share KV blocks between them
///
/// Starts one kvmaster (metadata in a temporary directory), two kvstore-nodes, and prefill and decode
/// workers, each in its own process. For each request a prefill worker hashes the prompt's blocks and
/// asks for the longest prefix in the pool. It gets that prefix, computes the other blocks and puts
/// them. A decode worker then gets the whole chain and checks every byte. ("Computing" fills a block
/// with bytes derived from its key, so any process can verify them.)
///
/// Without --trace the requests are multi-turn chats with shared system prompts, generated from --seed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl demo
  kvctl demo --requests 1000 --pool-size 1GiB --transport tcp
  kvctl demo --trace conversation_trace.jsonl --block-size 64KiB --requests 500 --output json")]
pub(crate) struct Args {
    /// Number of requests [default: 400, or all of the trace]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Block size in bytes
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = parse_size)]
    block_size: ByteSize,
    /// Tokens per block [default: 16; a trace's blocks have 512]
    #[arg(long, value_name = "N", conflicts_with = "trace")]
    block_tokens: Option<NonZeroUsize>,
    /// Memory of the pool: the sum of both nodes
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_size)]
    pool_size: ByteSize,
    /// Seed of the workload: the same seed gives the same requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of prefill worker processes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(1..=64))]
    prefill: u32,
    /// Number of decode worker processes
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(1..=64))]
    decode: u32,
    /// Which blocks a full pool evicts first
    #[arg(long, value_enum, default_value_t = Policy::Prefix)]
    policy: Policy,
    /// When a put is acknowledged
    #[arg(long, value_enum, default_value_t = CommitAck::Durable)]
    commit_ack: CommitAck,
    /// Keep the directory with metadata and logs, and print its path
    #[arg(long)]
    keep: bool,
    /// Replay this trace (JSONL) instead
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

const DEFAULT_REQUESTS: u32 = 400;

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let (workload, block_tokens, requests) = match &args.trace {
        Some(path) => {
            let requests = read_trace(path, args.requests)?;
            (path.display().to_string(), trace::BLOCK_TOKENS, requests)
        }
        None => {
            let count = args.requests.unwrap_or(DEFAULT_REQUESTS);
            let chat = Chat {
                seed: args.seed,
                requests: count,
            };
            let name = format!("multi-turn chat, seed {}", args.seed);
            (
                name,
                args.block_tokens.unwrap_or(CHAT_BLOCK_TOKENS),
                chat.generate(),
            )
        }
    };
    let size = Size {
        prefill: args.prefill,
        decode: args.decode,
    };
    let job = Job {
        workload,
        requests,
        blocks: Blocks {
            bytes: args.block_size.as_u64(),
            tokens: block_tokens,
        },
        plan: Plan {
            nodes: NODES,
            node_bytes: args.pool_size.as_u64() / u64::from(NODES),
            last_node_bytes: None,
            policy: args.policy,
            commit_ack: args.commit_ack,
            eviction: None,
            ssd: None,
            keep: args.keep,
            host: LOOPBACK,
            security: Security::default(),
        },
        size,
        pace: Pace {
            in_flight: (args.prefill + args.decode) as usize,
            speedup: None,
        },
    };
    job::run(job, context).await
}
