//! Measures the embedded metadata store under the journal: append latency, memory, file size, and
//! time to start again. Usage: `store_bench DIRECTORY [BLOCKS] [CHURN]` writes BLOCKS blocks,
//! rewrites them CHURN times, and dies without closing. Then run it again with `--reopen
//! DIRECTORY`.

use kvpool_master::store::record::Commit;
use kvpool_master::store::{
    Ack, EmbeddedOptions, EmbeddedStore, Journal, JournalOptions, LogSeq, MetadataStore, Record,
    RecoveryError, ShardIndex, SnapshotSource, Target, recover,
};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Epoch, Key, KeyRef, Length, Offset, SegmentId, Version};
use smallvec::smallvec;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SHARDS: u32 = 64;
const GROUP: u64 = 1000;

/// A directory of `blocks` blocks without memory: a block follows from its number.
struct Numbers {
    blocks: AtomicU64,
}

fn block(number: u64, version: u64) -> Record {
    let mut digest = [0x5a; 32];
    digest[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    digest[8..16].copy_from_slice(&number.to_le_bytes());
    Record::Commit(Commit {
        namespace: NamespaceId(0),
        key: Key::from_digest(digest),
        version: Version((1 << 40) + version),
        length: Length(2 << 20),
        checksum: Checksum(number.wrapping_mul(0xd134_2543_de82_ef95)),
        replicas: smallvec![(SegmentId(1), Offset(number * (2 << 20)))],
        parent: None,
        hard_pin: false,
    })
}

fn shard_of(_: NamespaceId, key: &Key) -> ShardIndex {
    match key.as_ref() {
        KeyRef::Digest { digest, .. } => ShardIndex(u32::from(digest[8]) % SHARDS),
        KeyRef::Text(_) => ShardIndex(0),
    }
}

impl SnapshotSource for Numbers {
    fn shards(&self) -> u32 {
        SHARDS
    }

    fn capture(&self, shard: ShardIndex) -> Vec<Record> {
        let blocks = self.blocks.load(Ordering::SeqCst);
        (0..blocks)
            .filter(|number| number & 0xff & u64::from(SHARDS - 1) == u64::from(shard.0))
            .map(|number| block(number, number))
            .collect()
    }

    fn capture_system(&self) -> Vec<Record> {
        Vec::new()
    }
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) >> 10
}

fn quantiles(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |chunk: usize| {
        times
            .get(times.len() * chunk / 1000)
            .copied()
            .unwrap_or_default()
    };
    format!("p50 {:?} p99 {:?} p99.9 {:?}", at(500), at(990), at(999))
}

/// Reads every record and keeps none.
struct Nobody;

impl Target for Nobody {
    fn shard_of(&self, namespace: NamespaceId, key: &Key) -> ShardIndex {
        shard_of(namespace, key)
    }
    fn forget(&mut self, _: ShardIndex) {}
    fn snapshot(&mut self, _: ShardIndex, _: Record) {}
    fn logged(&mut self, _: LogSeq, _: Record) -> Result<(), RecoveryError> {
        Ok(())
    }
}

async fn append(journal: &Journal, records: Vec<Record>) -> anyhow::Result<Duration> {
    let start = Instant::now();
    journal.submit(records, Ack::Durable, |_| ()).await?;
    journal.flush().await?;
    Ok(start.elapsed())
}

async fn write(directory: &Path, blocks: u64, churn: u64) -> anyhow::Result<()> {
    let store = Arc::new(EmbeddedStore::open(&EmbeddedOptions::new(directory))?);
    let epoch = store.begin_epoch(Epoch(1)).await?;
    let recovered = recover(&*store, SHARDS, &mut Nobody).await?;
    let numbers = Arc::new(Numbers {
        blocks: AtomicU64::new(0),
    });
    let journal = Journal::start(
        Arc::clone(&store) as Arc<dyn MetadataStore>,
        epoch,
        &recovered.state,
        Arc::clone(&numbers) as Arc<dyn SnapshotSource>,
        JournalOptions::default(),
    )?;
    let mut times = Vec::new();
    for number in 0..2000 {
        times.push(append(&journal, vec![block(number, number)]).await?);
    }
    println!("one record:   {}", quantiles(times));
    for round in 0..=churn {
        let (start, mut times) = (Instant::now(), Vec::new());
        for first in (0..blocks / GROUP).map(|group| group * GROUP) {
            let group = (first..first + GROUP)
                .map(|n| block(n, n + round * blocks))
                .collect();
            times.push(append(&journal, group).await?);
            numbers.blocks.fetch_max(first + GROUP, Ordering::SeqCst);
        }
        println!(
            "round {round}: {:?}, {GROUP} records: {}, resident {} MiB, file {} MiB",
            start.elapsed(),
            quantiles(times),
            resident(),
            store.size_on_disk().await? >> 20
        );
    }
    Ok(())
}

async fn reopen(directory: &Path) -> anyhow::Result<()> {
    let start = Instant::now();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory))?;
    let opened = start.elapsed();
    let recovered = recover(&store, SHARDS, &mut Nobody).await?;
    println!(
        "opened in {opened:?}, read in {:?}: {} from snapshots, {} from the log, {} skipped, resident {} MiB",
        start.elapsed() - opened,
        recovered.from_snapshots,
        recovered.from_log,
        recovered.skipped,
        resident()
    );
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default| arguments.get(at).map_or(Ok(default), |n| n.parse());
    match arguments.first().map(String::as_str) {
        Some("--reopen") => reopen(Path::new(arguments.get(1).map_or(".", |d| d))).await,
        Some(directory) => {
            write(Path::new(directory), number(1, 1_000_000)?, number(2, 10)?).await?;
            // Nothing is closed, so the next start finds the state of a crash.
            std::process::exit(0)
        }
        None => anyhow::bail!("usage: store_bench DIRECTORY [BLOCKS] [CHURN] | --reopen DIRECTORY"),
    }
}
