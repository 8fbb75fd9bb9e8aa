//! A million blocks on etcd: their size there, and the time until a master serves them.
//!
//!     cargo build --release -p kvpool-master -p kvpool-store-node
//!     cargo bench -p kvpool-tests --bench metadata_etcd [-- BLOCKS]
//!
//! It prints the bytes of etcd per block after the snapshots are written. It prints the time of a
//! cold start until the master leads, and the time in which a warm standby takes over. Then it
//! writes new versions of ten times as many blocks. After each tenth it prints the size, and the
//! resident memory of leader and standby.

use kvpool_tests::commits::Drive;
use kvpool_tests::masters::{self, Options, Pool};
use serde_json::Value;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(600);
const FILL: Drive = Drive {
    connections: 2,
    in_flight: 4,
    batch: 1024,
    upsert: false,
};

fn main() -> anyhow::Result<()> {
    let blocks: u64 = std::env::args()
        .find_map(|text| text.parse().ok())
        .unwrap_or(1_000_000);
    if !masters::available("metadata_etcd") {
        return Ok(());
    }
    let options = Options {
        masters: 2,
        nodes: 1,
        segment: format!("{}MiB", blocks * 160 / (1 << 20) + 64),
        ..Options::default()
    };
    let mut pool = Pool::start(options)?;
    let leader = pool.wait_settled()?.index;
    let empty = size(&pool)?;
    println!("empty: {}", empty.text(0));

    let address = pool.master(leader).listen.clone();
    let filled = FILL.run(&address, 0..blocks, PATIENCE)?;
    println!(
        "{} blocks put, {:.0} a second, median of a batch's commit {:?}",
        filled.blocks,
        filled.rate(),
        filled.median()
    );
    println!("then: {}", size(&pool)?.text(blocks));
    println!("at rest: {}", rest(&pool)?.text(blocks));

    take_over(&mut pool, blocks)?;
    cold_start(&mut pool, blocks)?;

    pool.wait_live(1)?;
    let leader = pool.wait_settled()?.index;
    let address = pool.master(leader).listen.clone();
    let churn = Drive {
        upsert: true,
        ..FILL
    };
    let (mut most, mut rates) = (0, Vec::new());
    for round in 1..=10 {
        let churned = churn.run(&address, 0..blocks, PATIENCE)?;
        let now = size(&pool)?;
        most = most.max(now.bytes);
        rates.push(churned.rate());
        println!(
            "each in version {}: {:.0} a second; {}; resident: leader {} MiB, standby {} MiB",
            round + 1,
            churned.rate(),
            now.text(blocks),
            pool.master(leader).resident_bytes()? >> 20,
            pool.master(1 - leader).resident_bytes()? >> 20
        );
    }
    println!("at rest: {}", rest(&pool)?.text(blocks));
    println!("the most at the end of a round: {} MiB", most >> 20);
    Ok(())
}

/// The standby takes over from a leader that is killed, and from a leader that hands over.
fn take_over(pool: &mut Pool, blocks: u64) -> anyhow::Result<()> {
    for (how, by) in [
        ("SIGTERM", Pool::terminate as fn(&mut Pool, usize) -> _),
        ("kill -9", Pool::kill),
    ] {
        let leader = pool.wait_settled()?;
        caught_up(pool)?;
        let begun = Instant::now();
        by(pool, leader.index)?;
        let next = pool.wait_leader(leader.epoch)?;
        println!("a warm standby leads {:?} after {how}", begun.elapsed());
        said(pool, next.index);
        anyhow::ensure!(pool.gauge("blocks")? == blocks, "blocks are missing");
        pool.restart(leader.index)?;
    }
    pool.wait_settled()?;
    Ok(())
}

/// All masters end. Then one starts and leads.
fn cold_start(pool: &mut Pool, blocks: u64) -> anyhow::Result<()> {
    let leader = pool.wait_settled()?;
    let standby = 1 - leader.index;
    // The standby ends first, so that no master takes over when the leader ends.
    pool.terminate(standby)?;
    pool.terminate(leader.index)?;
    let begun = Instant::now();
    pool.restart(standby)?;
    let listening = begun.elapsed();
    pool.wait_leader(leader.epoch)?;
    println!(
        "a cold master leads {:?} after its start (its ports are open after {listening:?})",
        begun.elapsed()
    );
    said(pool, standby);
    anyhow::ensure!(pool.gauge("blocks")? == blocks, "blocks are missing");
    pool.restart(leader.index)
}

/// Prints a master's log line about its last election: the time from winning to serving.
fn said(pool: &Pool, index: usize) {
    let log = pool.master(index).log_text();
    let is_of_it = |line: &&str| line.contains("elected") || line.contains("promoted");
    let lines: Vec<&str> = log.lines().filter(is_of_it).collect();
    for line in lines.iter().skip(lines.len().saturating_sub(2)) {
        println!("    {line}");
    }
}

/// Waits until every member of the pool holds all of the log.
fn caught_up(pool: &Pool) -> anyhow::Result<()> {
    pool.wait_for("standbys that hold the whole log", || {
        let Some(leader) = pool.leader() else {
            return Ok(false);
        };
        let all = pool.status(leader.index)?.all;
        let members = all["members"].as_array().cloned().unwrap_or_default();
        let has_all = |member: &Value| member["applied"].as_u64() == all["log_last"].as_u64();
        Ok(members.len() == 2 && members.iter().all(has_all))
    })
}

/// The size of the data in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    bytes: u64,
    in_use: u64,
    snapshots: u64,
    log: u64,
}

impl Size {
    fn text(self, blocks: u64) -> String {
        let each = |bytes: u64| match blocks {
            0 => String::new(),
            _ => format!(" ({} B a block)", bytes / blocks),
        };
        format!(
            "etcd takes {} MiB{}, in use {} MiB{}, of it snapshots {} MiB{}; {} groups in the log",
            self.bytes >> 20,
            each(self.bytes),
            self.in_use >> 20,
            each(self.in_use),
            self.snapshots >> 20,
            each(self.snapshots),
            self.log
        )
    }
}

fn size(pool: &Pool) -> anyhow::Result<Size> {
    let leader = pool.wait_leader(0)?;
    let all = pool.status(leader.index)?.all;
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let snapshots = all["snapshots"].as_array().into_iter().flatten();
    Ok(Size {
        bytes: number(&all["store_bytes"]),
        in_use: number(&all["store_in_use_bytes"]),
        snapshots: snapshots.map(|one| number(&one["size_bytes"])).sum(),
        log: number(&all["log_last"]).saturating_sub(number(&all["log_cut"])),
    })
}

/// The size once it has not changed for 10 s, or after two minutes.
fn rest(pool: &Pool) -> anyhow::Result<Size> {
    let limit = Instant::now() + Duration::from_secs(120);
    let (mut last, mut since) = (size(pool)?, Instant::now());
    while since.elapsed() < Duration::from_secs(10) && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(500));
        let now = size(pool)?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}
