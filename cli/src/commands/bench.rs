//! `kvctl bench`.

mod handoff;

use crate::cluster::{Cluster, CommitAck, LOOPBACK, Plan, Policy, Security};
use crate::connection::{Connection, control_error, is_hidden};
use crate::context::Context;
use crate::load::{self, Load, Operation, Report};
use crate::size::parse_size;
use crate::{exit, output};
use anyhow::Context as _;
use bytesize::ByteSize;
use clap::{Subcommand, value_parser};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Load a pool with puts and gets: rates and latency percentiles
///
/// Each thread has a client of its own. It puts and gets batches of blocks until --duration is over, and
/// verifies a sample of the blocks byte by byte. The latency is that of one call. Rates are sums over the
/// threads for each second of the run.
///
/// With --master (or KVPOOL_MASTER) the command loads that pool. Its blocks stay below --working-set, and it
/// removes them at the end. A full pool evicts other blocks to make room for them. Without --master the
/// command starts a pool on this machine, as `kvctl demo` does.
///
/// The regression bench with cases, limits and goals is the program `kvbench`. `kvctl bench handoff` measures
/// hand-offs, without a pool.
///
/// Exits with code 5 if a block has wrong bytes.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Examples:
  kvctl bench
  kvctl bench --operation get --block-size 1MiB --batch 32 --threads 8 --duration 30s
  kvctl --master http://10.0.0.1:7070 bench --operation mixed --put-share 0.1 --hit-share 0.8
  kvctl bench --operation put --output json | jq .put.latency_us.p99
  kvctl bench handoff")]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    /// The calls
    #[arg(long, value_enum, default_value_t = Operation::Mixed)]
    operation: Operation,
    /// Block size in bytes
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = parse_size)]
    block_size: ByteSize,
    /// Blocks of one call
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u64).range(1..=65_536))]
    batch: u64,
    /// Number of threads, each with a client of its own
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Length of the measurement, such as 10s or 5m
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    duration: Duration,
    /// Share of the calls of `mixed` that put, from 0 to 1 [default: 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    put_share: Option<f64>,
    /// Share of the keys that gets find, from 0 to 1; the other keys were never put [default: 1]
    #[arg(long, value_name = "SHARE", value_parser = share)]
    hit_share: Option<f64>,
    /// Bytes of this run's blocks in the pool at most [default: a quarter of the pool, at most 256MiB; required
    /// with a token that does not show the pool's size]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    working_set: Option<ByteSize>,
    /// Memory of the pool that the command starts: the sum of two nodes [default: 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pool_size: Option<ByteSize>,
    /// Verify every N-th block that a get requests
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = value_parser!(u64).range(1..))]
    verify_every: u64,
    /// Also write the results to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    former: Former,
}

#[derive(Debug, Subcommand)]
enum What {
    Handoff(handoff::Args),
}

/// Options that `kvctl bench` had when it was the regression bench.
#[derive(Debug, clap::Args)]
struct Former {
    #[arg(long, hide = true, num_args = 0..=1)]
    only: Option<Option<String>>,
    #[arg(long, hide = true)]
    list: bool,
    #[arg(long, hide = true, num_args = 0..=1)]
    pairs: Option<Option<String>>,
    #[arg(long, hide = true)]
    quick: bool,
    #[arg(long, hide = true, num_args = 0..=1)]
    span: Option<Option<String>>,
    #[arg(long, hide = true)]
    large: bool,
    #[arg(long, hide = true, num_args = 0..=1)]
    node_loss: Option<Option<String>>,
}

impl Former {
    /// The first of these options that was set.
    const fn flag(&self) -> Option<&'static str> {
        match self {
            Self { only: Some(_), .. } => Some("--only"),
            Self { list: true, .. } => Some("--list"),
            Self { pairs: Some(_), .. } => Some("--pairs"),
            Self { quick: true, .. } => Some("--quick"),
            Self { span: Some(_), .. } => Some("--span"),
            Self { large: true, .. } => Some("--large"),
            Self {
                node_loss: Some(_), ..
            } => Some("--node-loss"),
            _ => None,
        }
    }
}

const NODES: u32 = 2;
const POOL_BYTES: u64 = 1 << 30;
const WORKING_SET: u64 = 256 << 20;

/// Measures hand-offs, or loads a pool.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    match &args.what {
        Some(What::Handoff(handoff)) => handoff::run(handoff, context).await,
        None => load_pool(&args, context).await,
    }
}

/// Loads the named pool, or a new one. Wrong blocks are an error, returned after the report.
async fn load_pool(args: &Args, context: &Context) -> anyhow::Result<()> {
    args.check(&context.connection)?;
    warn_of_build();
    let report = if context.connection.master.is_some() {
        measure(args, &context.connection).await?
    } else {
        let pool_bytes = args.pool_size.map_or(POOL_BYTES, |size| size.as_u64());
        let plan = Plan {
            nodes: NODES,
            node_bytes: pool_bytes / u64::from(NODES),
            last_node_bytes: None,
            policy: Policy::Prefix,
            commit_ack: CommitAck::Durable,
            eviction: None,
            ssd: None,
            keep: false,
            host: LOOPBACK,
            security: Security::default(),
        };
        let mut cluster = Cluster::start(&plan).await?;
        let connection = context.connection.with_master(cluster.master());
        cluster.joined(&connection.connect().await?, &plan).await?;
        let report = measure(args, &connection).await;
        cluster.stop().await;
        report?
    };
    write_json(args.json.as_deref(), &report)?;
    context.output.show(&report, Report::tables)?;
    match report.wrong_blocks() {
        0 => Ok(()),
        blocks => Err(exit::WrongBytes { blocks }.into()),
    }
}

fn warn_of_build() {
    if cfg!(debug_assertions) {
        tracing::warn!("this build is not optimised: its results are meaningless");
    }
}

/// Writes the report to the file of --json, if there is one.
fn write_json<T: Serialize>(path: Option<&Path>, report: &T) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_vec_pretty(report)?;
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

async fn measure(args: &Args, connection: &Connection) -> anyhow::Result<Report> {
    let stats = connection.connect().await?.stats().await;
    let stats = stats.map_err(control_error)?;
    let capacity = (!is_hidden(&stats)).then_some(stats.capacity.0);
    load::run(&args.load(capacity)?, connection).await
}

impl Args {
    /// Refuses options that contradict each other.
    fn check(&self, connection: &Connection) -> Result<(), exit::Usage> {
        let refuse = |text: String| Err(exit::Usage(text));
        if let Some(flag) = self.former.flag() {
            return refuse(format!(
                "{flag} is an option of kvbench: `kvctl bench` only loads a pool. For cases with limits and \
                 goals run `kvbench {flag} ...`, with the same options as the earlier `kvctl bench`"
            ));
        }
        if self.block_size.as_u64() == 0 {
            return refuse("--block-size must be at least 1 byte".to_owned());
        }
        if self.put_share.is_some() && self.operation != Operation::Mixed {
            return refuse("--put-share needs --operation mixed".to_owned());
        }
        if self.hit_share.is_some() && self.operation == Operation::Put {
            return refuse("--hit-share needs --operation get or mixed".to_owned());
        }
        if self.pool_size.is_some() && connection.master.is_some() {
            return refuse(
                "--pool-size is for a pool that the command starts, but --master names one"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// The load for a pool of `capacity` bytes, if that is known.
    fn load(&self, capacity: Option<u64>) -> Result<Load, exit::Usage> {
        let chosen = self.working_set.map(|size| size.as_u64());
        let usual = capacity.map(|capacity| WORKING_SET.min(capacity / 4));
        let Some(working_set) = chosen.or(usual) else {
            return Err(exit::Usage(
                "this token does not show the pool's size: say by --working-set how much of it to use".to_owned(),
            ));
        };
        // Removed blocks keep their room for a while, so more than half of the pool would cause evictions.
        if let Some(capacity) = capacity
            && working_set > capacity / 2
        {
            return Err(exit::Usage(format!(
                "the working set of {} is more than half of the pool, which has {}: lower --working-set",
                output::bytes(working_set),
                output::bytes(capacity)
            )));
        }
        let block_bytes = self.block_size.as_u64();
        let threads = u64::from(self.threads);
        let blocks_per_thread = working_set / threads / block_bytes;
        // A call's blocks, and those of the call before it.
        if blocks_per_thread < 2 * self.batch {
            let least = (2 * self.batch)
                .saturating_mul(threads)
                .saturating_mul(block_bytes);
            return Err(exit::Usage(format!(
                "the working set of {} is too small: two calls of each thread have {}. Raise --working-set, or \
                 lower --threads, --batch or --block-size",
                output::bytes(working_set),
                output::bytes(least)
            )));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_nanos();
        Ok(Load {
            operation: self.operation,
            block_bytes,
            batch: self.batch,
            threads: self.threads,
            blocks_per_thread,
            put_share: match self.operation {
                Operation::Put => 1.0,
                Operation::Get => 0.0,
                Operation::Mixed => self.put_share.unwrap_or(0.5),
            },
            hit_share: self.hit_share.unwrap_or(1.0),
            verify_every: self.verify_every,
            duration: self.duration,
            seed: format!("kvctl bench {} {now}", std::process::id()),
        })
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be a number from 0 to 1, such as 0.5".to_owned()),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(value) if value.is_zero() => Err("must be longer than zero".to_owned()),
        Ok(value) => Ok(value),
        Err(error) => Err(error.to_string()),
    }
}
