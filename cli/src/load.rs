//! The load of `kvctl bench`: threads that put and get blocks for some time.
//!
//! ```text
//!  commands::bench ──Load──► run ──► Worker, one for each thread ──blocking::Client──► pool
//!                              ▲        └ Blocks: keys and bytes
//!                              └── Tally of each worker ──► Report
//! ```
//!
//! It loads a pool and says how the pool responds. It has no goals and compares with nothing: `kvbench` does.

mod blocks;
mod report;
mod worker;

pub(crate) use report::Report;

use crate::connection::Connection;
use crate::progress;
use anyhow::Context as _;
use report::Tally;
use serde::Serialize;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use worker::Worker;

/// The calls of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Operation {
    /// Put new blocks.
    Put,
    /// Get blocks that were put before the measurement.
    Get,
    /// Some calls put, the others get.
    Mixed,
}

/// The settings of a load.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Load {
    pub(crate) operation: Operation,
    /// The bytes of a block.
    pub(crate) block_bytes: u64,
    /// The blocks of one call.
    pub(crate) batch: u64,
    /// The threads, each with its own client.
    pub(crate) threads: u32,
    /// The blocks that each thread keeps in the pool at most.
    pub(crate) blocks_per_thread: u64,
    /// The share of calls that put.
    pub(crate) put_share: f64,
    /// The share of the requested keys that were put.
    pub(crate) hit_share: f64,
    /// Every n-th block of the gets is verified byte by byte.
    pub(crate) verify_every: u64,
    /// The length of the measurement.
    #[serde(skip)]
    pub(crate) duration: Duration,
    /// The keys are derived from it: two runs must differ in it.
    pub(crate) seed: String,
}

/// Loads the pool, removes the blocks of the run, and returns the results.
pub(crate) async fn run(load: &Load, connection: &Connection) -> anyhow::Result<Report> {
    let connect = {
        let (load, options) = (load.clone(), connection.options());
        move |number| Worker::connect(load.clone(), number, options.clone())
    };
    let workers = on_threads((0..load.threads).collect(), connect).await?;
    let workers = workers.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let filled = on_threads(workers, |mut worker: Worker| {
        let filled = worker.fill();
        (worker, filled)
    });
    let (workers, filled): (Vec<_>, Vec<_>) = filled.await?.into_iter().unzip();
    let filled: anyhow::Result<Vec<()>> = filled.into_iter().collect();
    let (workers, measured) = match filled {
        Ok(_) => measure(load, workers).await?,
        Err(error) => (workers, Err(error)),
    };
    // Also after a failure: an existing pool gets its room back.
    let removed = on_threads(workers, Worker::remove_all).await?;
    let report = measured?;
    removed.into_iter().collect::<anyhow::Result<Vec<()>>>()?;
    Ok(report)
}

async fn measure(
    load: &Load,
    workers: Vec<Worker>,
) -> anyhow::Result<(Vec<Worker>, anyhow::Result<Report>)> {
    let begin = Instant::now();
    let until = begin + load.duration;
    let bar = progress::bar(load.duration.as_secs(), "s");
    let ticks = async {
        let mut second = tokio::time::interval(Duration::from_secs(1));
        second.tick().await;
        loop {
            second.tick().await;
            bar.inc(1);
        }
    };
    let loaded = on_threads(workers, move |mut worker: Worker| {
        let tally = worker.load(until);
        (worker, tally)
    });
    let done = tokio::select! {
        done = loaded => done?,
        () = ticks => unreachable!("invariant: the ticks never end"),
    };
    bar.finish_and_clear();
    let elapsed = begin.elapsed();
    let (workers, tallies): (Vec<_>, Vec<_>) = done.into_iter().unzip();
    let report = Tally::of(tallies).and_then(|tally| tally.finish(load, elapsed));
    Ok((workers, report))
}

/// Runs `work` for each item on a plain thread of its own. Returns the results in the order of the items.
///
/// The threads are not tasks of the runtime: a blocking client must not run there, and an interrupted
/// program does not wait for them.
async fn on_threads<T: Send + 'static, R: Send + 'static>(
    items: Vec<T>,
    work: impl Fn(T) -> R + Clone + Send + 'static,
) -> anyhow::Result<Vec<R>> {
    let threads = items.into_iter().map(|item| {
        let (done, ended) = oneshot::channel();
        let work = work.clone();
        std::thread::Builder::new()
            .name("load".to_owned())
            .spawn(move || {
                // The receiver is gone only if the program ends.
                let _ = done.send(work(item));
            })
            .context("cannot start a thread")?;
        Ok(ended)
    });
    let threads = threads.collect::<anyhow::Result<Vec<_>>>()?;
    let mut results = Vec::with_capacity(threads.len());
    for ended in threads {
        results.push(ended.await.context("a thread of the load panicked")?);
    }
    Ok(results)
}
