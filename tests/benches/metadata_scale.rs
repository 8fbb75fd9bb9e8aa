//! How the master's memory and its answers grow with the number of blocks.
//!
//!     cargo build --release -p kvpool-master -p kvpool-store-node
//!     cargo bench -p kvpool-tests --bench metadata_scale [-- BLOCKS]
//!
//! It fills one real kvmaster with digest-key blocks of 64 bytes on one real kvstore-node. At 10,000,
//! 100,000, 1,000,000 and 10,000,000 blocks it prints the master's resident bytes per block, and the
//! time of an exist batch of 1024 random keys (median, quartiles). Then it restarts the master and prints
//! the time of the restart, its peak memory, and its memory afterwards.

use kvpool_client::{Client, PutBlock, PutOptions};
use kvpool_tests::blocks::{key, target};
use kvpool_tests::{Cluster, Options};
use kvpool_types::Key;
use rand::Rng;
use std::time::{Duration, Instant};

const BATCH: u64 = 1024;
const ROUNDS: usize = 301;

fn main() -> anyhow::Result<()> {
    let most: u64 = std::env::args()
        .filter_map(|text| text.parse().ok())
        .next()
        .unwrap_or(1_000_000);
    tokio::runtime::Runtime::new()?.block_on(run(most))
}

async fn run(most: u64) -> anyhow::Result<()> {
    let options = Options {
        segment: format!("{}MiB", most * 80 / (1 << 20) + 16),
        ..Options::default()
    };
    let mut cluster = Cluster::start(options.master(&["--commit-ack", "memory"]))?;
    let client = cluster.client().await?;
    let empty = cluster.master.resident_bytes()?;
    println!("empty master: {} MiB resident", empty >> 20);
    println!(
        "{:>10}  {:>14}  {:>14}  exist of {BATCH}: median (quartiles)",
        "blocks", "resident B/block", "accounted"
    );
    let mut filled = 0;
    for step in [10_000, 100_000, 1_000_000, 10_000_000] {
        if step > most {
            break;
        }
        let started = Instant::now();
        fill(&client, filled, step).await?;
        let took = started.elapsed();
        let added = step - filled;
        filled = step;
        // The last snapshot and the freeing of its buffers take a moment.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let resident = cluster.master.resident_bytes()?.saturating_sub(empty);
        let counters = cluster.counters()?;
        let accounted = counters["counters"]["directory_bytes"]
            .as_u64()
            .unwrap_or(0);
        let times = exist_times(&client, filled).await?;
        println!(
            "{filled:>10}  {:>14}  {:>14}  {:?} ({:?} to {:?}); filled at {} blocks/s",
            resident / filled,
            accounted / filled,
            times[ROUNDS / 2],
            times[ROUNDS / 4],
            times[ROUNDS * 3 / 4],
            u128::from(added) * 1000 / took.as_millis().max(1),
        );
    }
    let steady = cluster.master.resident_bytes()?;
    cluster.master.terminate()?;
    let started = Instant::now();
    cluster.restart_master()?;
    cluster.wait_live(1)?;
    let took = started.elapsed();
    let (peak, after) = (
        cluster.master.peak_bytes()?,
        cluster.master.resident_bytes()?,
    );
    println!(
        "{filled} blocks: steady {} MiB; restarted in {took:?}, peak {} MiB ({}.{:02} times), then {} MiB",
        steady >> 20,
        peak >> 20,
        peak / steady,
        peak * 100 / steady % 100,
        after >> 20,
    );
    Ok(())
}

async fn fill(client: &Client, from: u64, to: u64) -> anyhow::Result<()> {
    let source = target(64);
    for first in (from..to).step_by(usize::try_from(BATCH)?) {
        let puts = (first..to.min(first + BATCH))
            .map(|number| PutBlock::new(key(number), source.clone()))
            .collect();
        for outcome in client.batch_put(puts, &PutOptions::default()).await {
            outcome?;
        }
    }
    Ok(())
}

async fn exist_times(client: &Client, blocks: u64) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let keys: Vec<Key> = {
            let mut random = rand::rng();
            (0..BATCH)
                .map(|_| key(random.random_range(0..blocks)))
                .collect()
        };
        let started = Instant::now();
        let present = client.is_exist(&keys).await?;
        times.push(started.elapsed());
        anyhow::ensure!(present.iter().all(|there| *there), "a block is missing");
    }
    times.sort();
    Ok(times)
}
