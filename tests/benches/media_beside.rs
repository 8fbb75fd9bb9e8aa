//! What a disk costs the blocks in memory: the same pool with and without one, alternated in one run.
//! The log of the master lies in the temporary directory: on the same disk it would wait for the copies.
//!
//!     cargo build --release -p kvpool-master -p kvpool-store-node
//!     TMPDIR=/dev/shm cargo bench -p kvpool-tests --bench media_beside [-- ROUNDS]
//!
//! - `idle`: the disk is attached, and nothing moves. Puts and gets of blocks that stay in memory.
//! - `full`: memory is full, so each put evicts, and with the disk each block is copied too.
//! - `stall`: single puts and gets in memory while the disk answers nothing for 30 s, against those of the
//!   same pool before. Needs FUSE.
//!
//! It prints the medians over the rounds, of the rates (MB/s) or the 99th percentiles (us), and of the ratios.

use anyhow::Context;
use kvpool_client::{Client, GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions};
use kvpool_tests::blocks::{key, put_all, source, target};
use kvpool_tests::faulty_disk::{Fault, FaultyDisk};
use kvpool_tests::{Cluster, Options};
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = MIB;
/// The number of blocks in one call.
const BATCH: u64 = 16;
/// The number of blocks that fit into memory with room to spare, so that no copy is due.
const FEW: u64 = 512;
const SMALL: usize = 64 << 10;
const STALL: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<()> {
    let rounds = std::env::args()
        .find_map(|text| text.parse().ok())
        .unwrap_or(3);
    let runtime = tokio::runtime::Runtime::new()?;
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    println!("{rounds} rounds; medians");
    println!(
        "{:<16} {:>12} {:>12} {:>7}",
        "case", "with", "without", "ratio"
    );
    let mut rows: Vec<(&str, Vec<[f64; 2]>)> = Vec::new();
    for round in 0..rounds {
        let all = runtime.block_on(async {
            // A later pool finds a warmer machine, so the order changes.
            let (with, without) = match round % 2 {
                0 => {
                    let with = rates(Some(place.path())).await?;
                    (with, rates(None).await?)
                }
                _ => {
                    let without = rates(None).await?;
                    (rates(Some(place.path())).await?, without)
                }
            };
            let pairs = with.into_iter().zip(without);
            let mut all: Vec<_> = pairs.map(|((name, a), (_, b))| (name, [a, b])).collect();
            all.extend(stall(place.path()).await?);
            anyhow::Ok(all)
        })?;
        for (name, pair) in all {
            match rows.iter_mut().find(|(known, _)| *known == name) {
                Some((_, pairs)) => pairs.push(pair),
                None => rows.push((name, vec![pair])),
            }
        }
    }
    for (name, pairs) in rows {
        let of = |value: fn(&[f64; 2]) -> f64| median(pairs.iter().map(value).collect());
        let (with, without, ratio) = (of(|p| p[0]), of(|p| p[1]), of(|p| p[0] / p[1]));
        println!("{name:<16} {with:>12.1} {without:>12.1} {ratio:>7.2}");
    }
    Ok(())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// The rates of one pool in MB/s, with a disk in `place` or without one.
async fn rates(place: Option<&Path>) -> anyhow::Result<Vec<(&'static str, f64)>> {
    let directory = place.map(tempfile::tempdir_in).transpose()?;
    let node = directory.as_ref().map_or_else(Vec::new, |directory| {
        let file = directory.path().join("ssd");
        vec!["--ssd".into(), format!("path={},size=4GiB", file.display())]
    });
    let options = Options {
        segment: "1GiB".into(),
        node,
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&["--lease-ttl", "300ms"]))?;
    let client = cluster.client().await?;
    if place.is_some() {
        cluster.wait_for("the medium is attached", || {
            let line = "kvpool_master_media{state=\"ready\"} 1";
            Ok(cluster.master.http_get("/metrics")?.contains(line))
        })?;
    }
    // The client fills its page tables in the background.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut rows = vec![("idle/put", puts(&client, 0..FEW).await?)];
    rows.push(("idle/get", gets(&client, FEW).await?));
    // Fills memory twice, so that puts evict from here on.
    puts(&client, 10_000..11_500).await?;
    rows.push(("full/put", puts(&client, 20_000..23_000).await?));
    Ok(rows)
}

async fn puts(client: &Client, numbers: std::ops::Range<u64>) -> anyhow::Result<f64> {
    let bytes = (numbers.end - numbers.start) * BLOCK;
    let begun = Instant::now();
    let mut took = Duration::ZERO;
    for first in numbers.clone().step_by(usize::try_from(BATCH)?) {
        let batch = first..(first + BATCH).min(numbers.end);
        let blocks = batch.map(|number| {
            let key = key(number);
            // All blocks share their bytes: making them is not measured.
            PutBlock::new(key, SOURCE.with(Clone::clone))
        });
        let blocks = blocks.collect();
        let begun = Instant::now();
        for outcome in client.batch_put(blocks, &PutOptions::default()).await {
            outcome?;
        }
        took += begun.elapsed();
    }
    anyhow::ensure!(took <= begun.elapsed());
    Ok(bytes as f64 / 1e6 / took.as_secs_f64())
}

thread_local! {
    static SOURCE: kvpool_transport::Slice = source(&key(1), 1 << 20);
}

async fn gets(client: &Client, blocks: u64) -> anyhow::Result<f64> {
    let targets: Vec<_> = (0..BATCH).map(|_| target(1 << 20)).collect();
    let options = GetOptions {
        release: true,
        ..GetOptions::default()
    };
    let begun = Instant::now();
    for first in (0..blocks).step_by(usize::try_from(BATCH)?) {
        let gets = (first..first + BATCH).zip(&targets);
        let gets = gets.map(|(n, to)| GetBlock::new(key(n), to.clone()));
        for outcome in client.batch_get(gets.collect(), &options).await {
            anyhow::ensure!(matches!(outcome?, GetOutcome::Hit { .. }), "a miss");
        }
    }
    Ok((blocks * BLOCK) as f64 / 1e6 / begun.elapsed().as_secs_f64())
}

/// The 99th percentiles of single puts and gets in memory, while the disk stalls and before, in us.
/// Also the lateness of the last heartbeat in us, against its interval.
async fn stall(place: &Path) -> anyhow::Result<Vec<(&'static str, [f64; 2])>> {
    let directory = tempfile::tempdir_in(place)?;
    let disk = match FaultyDisk::mount(directory.path()) {
        Ok(disk) => disk,
        Err(error) => {
            eprintln!("no rows for a stall: {error:#}");
            return Ok(Vec::new());
        }
    };
    let ssd = format!("path={},size=1GiB", disk.path().display());
    let options = Options {
        segment: "256MiB".into(),
        node: vec!["--ssd".into(), ssd],
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&["--lease-ttl", "300ms"]))?;
    let client = cluster.client().await?;
    // Memory is full, so copies are in progress all the time.
    for first in (0..400).step_by(16) {
        put_all(&client, first..first + 16, 1 << 20).await?;
    }
    let before = single(&client, 1 << 32, Duration::from_secs(10)).await?;
    disk.set(Fault::Hangs);
    let during = single(&client, 2 << 32, STALL).await?;
    let late = cluster.nodes[0].metric("kvpool_node_heartbeat_lateness_seconds")?;
    disk.set(Fault::None);
    drop(cluster);
    let rows = vec![
        ("stall/put p99", [during.0, before.0]),
        ("stall/get p99", [during.1, before.1]),
        ("stall/beat late", [late * 1e6, 1e6]),
    ];
    Ok(rows)
}

/// The 99th percentiles of puts, and of gets of blocks that were just put, in us.
async fn single(client: &Client, first: u64, during: Duration) -> anyhow::Result<(f64, f64)> {
    let until = Instant::now() + during;
    let (mut puts, mut gets) = (Vec::new(), Vec::new());
    let to = target(SMALL);
    let options = GetOptions {
        release: true,
        ..GetOptions::default()
    };
    let mut number = first;
    while Instant::now() < until {
        let key = key(number);
        number += 1;
        let put = PutBlock::new(key.clone(), source(&key, SMALL));
        let begun = Instant::now();
        client
            .batch_put(vec![put], &PutOptions::default())
            .await
            .remove(0)?;
        puts.push(begun.elapsed().as_secs_f64() * 1e6);
        let get = GetBlock::new(key, to.clone());
        let begun = Instant::now();
        let got = client.batch_get(vec![get], &options).await.remove(0)?;
        gets.push(begun.elapsed().as_secs_f64() * 1e6);
        anyhow::ensure!(matches!(got, GetOutcome::Hit { .. }), "a miss");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok((percentile(puts)?, percentile(gets)?))
}

fn percentile(mut all: Vec<f64>) -> anyhow::Result<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len() * 99 / 100).copied().context("no calls")
}
