//! One run of a workload on a new pool with new workers, for `demo` and `replay`.

use crate::cluster::{Cluster, GRANULE, Plan};
use crate::connection::control_error;
use crate::context::Context;
use crate::fleet::{Fleet, Pace, Size};
use crate::report::{OfSsd, Report, Setting};
use crate::worker::{Blocks, Options};
use crate::workload::Request;
use anyhow::{Context as _, bail};
use kvpool_client::PoolStats;
use std::time::Instant;

/// The master's counter of evicted blocks.
const EVICTED: &str = "blocks_evicted_total";

/// The settings of a run.
#[derive(Debug)]
pub(crate) struct Job {
    /// The source of the requests, for the report.
    pub(crate) workload: String,
    /// The requests in order of arrival.
    pub(crate) requests: Vec<Request>,
    /// The size of every block.
    pub(crate) blocks: Blocks,
    /// The pool to start.
    pub(crate) plan: Plan,
    /// The workers to start.
    pub(crate) size: Size,
    /// How the requests are scheduled.
    pub(crate) pace: Pace,
}

/// The bytes that a block of `block_bytes` occupies in a segment.
pub(crate) const fn extent_bytes(block_bytes: u64) -> u64 {
    block_bytes.next_multiple_of(GRANULE)
}

/// Runs the job and prints its report. A fault of the pool is an error, and so is a run that verified
/// nothing. Errors come after the report.
pub(crate) async fn run(job: Job, context: &Context) -> anyhow::Result<()> {
    let report = measure(&job, context).await?;
    context.output.show(&report, Report::tables)?;
    report.verdict()
}

/// Starts the pool and the workers, executes the requests, and stops all processes in order. Dropping
/// the future kills the processes.
async fn measure(job: &Job, context: &Context) -> anyhow::Result<Report> {
    let setting = job.setting()?;
    tracing::info!(
        "starting a kvmaster, {} kvstore-node(s) and {} workers",
        job.plan.nodes,
        job.size.prefill + job.size.decode
    );
    let mut cluster = Cluster::start(&job.plan).await?;
    let connection = context.connection.with_master(cluster.master());
    let client = connection.connect().await?;
    cluster.joined(&client, &job.plan).await?;
    let options = Options {
        blocks: job.blocks,
        connection,
    };
    let fleet = Fleet::start(job.size, &options, cluster.path()).await?;
    let begin = Instant::now();
    let tally = fleet.run(&job.requests, job.pace).await?;
    let elapsed = begin.elapsed();
    let stats = client.stats().await.map_err(control_error)?;
    fleet.stop().await;
    cluster.stop().await;
    let of_ssd = job.plan.ssd.map(|_| OfSsd::read(&stats));
    Ok(tally.finish(setting, elapsed, evictions(&stats)?, of_ssd))
}

impl Job {
    fn setting(&self) -> anyhow::Result<Setting> {
        if self.blocks.bytes == 0 {
            bail!("--block-size must be at least 1 byte");
        }
        let pool_bytes = self.plan.node_bytes * u64::from(self.plan.nodes);
        let capacity_blocks =
            self.plan.node_bytes / extent_bytes(self.blocks.bytes) * u64::from(self.plan.nodes);
        let longest = self
            .requests
            .iter()
            .map(|request| request.prompt.blocks(self.blocks.tokens))
            .max()
            .unwrap_or_default();
        if capacity_blocks < longest {
            bail!(
                "the pool has room for {capacity_blocks} blocks, but the longest prompt has \
                 {longest}: give it more memory, or smaller blocks"
            );
        }
        Ok(Setting {
            workload: self.workload.clone(),
            block_bytes: self.blocks.bytes,
            block_tokens: self.blocks.tokens.get(),
            pool_bytes,
            capacity_blocks,
            policy: self.plan.policy,
            commit_ack: self.plan.commit_ack,
            nodes: self.plan.nodes,
            prefill_workers: self.size.prefill,
            decode_workers: self.size.decode,
        })
    }
}

/// The number of blocks that the master has evicted.
fn evictions(stats: &PoolStats) -> anyhow::Result<u64> {
    stats
        .counters
        .get(EVICTED)
        .copied()
        .with_context(|| format!("the master has no counter {EVICTED}"))
}
