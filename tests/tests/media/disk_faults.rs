//! Each kind of disk fault, under load. The pool reports the state within seconds. Calls keep their
//! deadlines, blocks in memory are served, no heartbeat is late, and no byte is wrong.

use fuser::Errno;
use kvpool_client::{Client, GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions};
use kvpool_tests::blocks::{check_all, is_right, key, put_all, source, target};
use kvpool_tests::churn::{Churn, Shape};
use kvpool_tests::faulty_disk::{Fault, FaultyDisk};
use kvpool_tests::{Cluster, Options};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Three times the memory, so that most blocks lie only on the disk.
const SHAPE: Shape = Shape {
    tasks: 4,
    keys: 100,
    length: 256 << 10,
};
const SEGMENT: &str = "32MiB";
/// The goal is 2 s; the rest is for a busy machine.
const TOLD_WITHIN: Duration = Duration::from_secs(4);
/// The longest put and get of a block in memory. Such a call does not wait for the disk, which is
/// seconds late.
const MOST: Duration = Duration::from_secs(1);

/// Puts a block and gets it again and again, and records the longest call.
struct Probe {
    is_over: Arc<AtomicBool>,
    longest_ms: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<anyhow::Result<Probed>>,
}

/// The observations of a probe.
#[derive(Debug, Default)]
struct Probed {
    hits: u64,
    /// A run of small blocks may leave a full pool for a large block, even the newest ones.
    misses: u64,
    longest: Duration,
}

impl Probe {
    fn start(client: &Client) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let longest_ms = Arc::new(AtomicU64::new(0));
        let (client, over, longest) = (
            client.clone(),
            Arc::clone(&is_over),
            Arc::clone(&longest_ms),
        );
        let task = tokio::spawn(async move {
            let mut number = 1 << 40;
            let mut probed = Probed::default();
            while !over.load(Ordering::Acquire) {
                let (key, length) = (key(number), 4096);
                number += 1;
                let begun = Instant::now();
                let put = PutBlock::new(key.clone(), source(&key, length));
                let put = client.batch_put(vec![put], &PutOptions::default()).await;
                anyhow::ensure!(put.iter().all(Result::is_ok), "{put:?}");
                let took = begun.elapsed();
                let (begun, to) = (Instant::now(), target(length));
                let get = GetBlock::new(key.clone(), to.clone());
                let options = GetOptions {
                    release: true,
                    ..GetOptions::default()
                };
                let got = client.batch_get(vec![get], &options).await;
                let took = took.max(begun.elapsed());
                longest.fetch_max(u64::try_from(took.as_millis())?, Ordering::AcqRel);
                for outcome in got {
                    let outcome = outcome?;
                    match outcome {
                        GetOutcome::Hit { .. } => probed.hits += 1,
                        GetOutcome::Miss => {
                            probed.misses += 1;
                            continue;
                        }
                    }
                    anyhow::ensure!(is_right(&key, &to, length), "not as it was put");
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            Ok(probed)
        });
        Self {
            is_over,
            longest_ms,
            task,
        }
    }

    async fn end(self) -> Probed {
        self.is_over.store(true, Ordering::Release);
        let probed = self.task.await.unwrap().unwrap();
        Probed {
            longest: Duration::from_millis(self.longest_ms.load(Ordering::Acquire)),
            ..probed
        }
    }
}

/// Waits until the master counts the medium under this state, and returns the time that this took.
fn wait_for_state(cluster: &Cluster, state: &str) -> Duration {
    let since = Instant::now();
    let line = format!("kvpool_master_media{{state=\"{state}\"}} 1");
    let is_told = || Ok(cluster.master.http_get("/metrics")?.contains(&line));
    cluster.wait_for(state, is_told).unwrap();
    since.elapsed()
}

/// A pool with one node, whose disk has faults that the test chooses.
struct Faulty {
    cluster: Cluster,
    disk: FaultyDisk,
    _place: tempfile::TempDir,
}

impl Faulty {
    /// `None` if this process cannot mount a filesystem.
    fn start(test: &str) -> Option<Self> {
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = match FaultyDisk::mount(place.path()) {
            Ok(disk) => disk,
            Err(error) => {
                eprintln!("SKIPPED {test}: no FUSE here: {error:#}");
                return None;
            }
        };
        let ssd = format!("path={},size=256MiB", disk.path().display());
        let options = Options {
            segment: SEGMENT.into(),
            node: vec!["--ssd".into(), ssd],
            ..Options::default()
        };
        let cluster = Cluster::start(options.master(&["--lease-ttl", "300ms"])).unwrap();
        wait_for_state(&cluster, "ready");
        Some(Self {
            cluster,
            disk,
            _place: place,
        })
    }
}

/// Runs a pool whose disk has this fault for some seconds. `heals` says whether the medium is in
/// use again after the fault.
async fn under(test: &str, fault: Fault, state: &str, heals: bool) {
    let Some(Faulty {
        cluster,
        disk,
        _place,
    }) = Faulty::start(test)
    else {
        return;
    };
    let client = cluster.client().await.unwrap();
    let churn = Churn::start(&client, SHAPE);
    let moves = |name: &str| {
        cluster.counters().unwrap()["counters"][name]
            .as_u64()
            .unwrap()
    };
    let both_ways = || Ok(moves("blocks_stored_total") > 200 && moves("blocks_loaded_total") > 50);
    cluster
        .wait_for("blocks move both ways", both_ways)
        .unwrap();

    let probe = Probe::start(&client);
    disk.set(fault);
    let told = wait_for_state(&cluster, state);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let probed = probe.end().await;
    let late = cluster.nodes[0]
        .metric("kvpool_node_heartbeat_lateness_seconds")
        .unwrap();
    println!("{test}: {state} after {told:?}; {probed:?} in memory; heartbeat late by {late} s");
    assert!(told < TOLD_WITHIN, "{told:?}");
    assert!(probed.longest < MOST, "{probed:?}");
    assert!(probed.misses <= probed.hits / 20, "{probed:?}");
    assert!(late < 0.3, "{late}");
    assert!(
        cluster
            .node_states()
            .unwrap()
            .iter()
            .all(|(_, state)| state == "live")
    );

    disk.set(Fault::None);
    if heals {
        wait_for_state(&cluster, "ready");
        let before = moves("blocks_stored_total");
        let stores_again = || Ok(moves("blocks_stored_total") > before + 50);
        cluster
            .wait_for("the medium is in use again", stores_again)
            .unwrap();
    }
    let mut left = churn.end().await.unwrap();
    let seen = left.check(&client).await.unwrap();
    println!("under load {:?}; afterwards {seen:?}", left.seen);
    assert!(left.seen.stored > 200 && seen.right > 20, "{seen:?}");
    // The mount outlives the daemon, which has the file open.
    drop(cluster);
    drop(disk);
}

/// A batch names blocks in memory and blocks on a hanging disk. The disk must not cost the batch
/// any block in memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_gets_what_is_in_memory_beside_a_disk_that_hangs() {
    const LENGTH: usize = 256 << 10;
    let test = "a_batch_gets_what_is_in_memory_beside_a_disk_that_hangs";
    let Some(Faulty {
        cluster,
        disk,
        _place,
    }) = Faulty::start(test)
    else {
        return;
    };
    let client = cluster.client().await.unwrap();
    for number in 0..200 {
        let key = key(number);
        let put = PutBlock::new(key.clone(), source(&key, LENGTH));
        let put = client.batch_put(vec![put], &PutOptions::default()).await;
        assert!(put.iter().all(Result::is_ok), "{put:?}");
    }
    disk.set(Fault::Hangs);
    // The first blocks are on the disk by now, the last ones in memory.
    let numbers: Vec<u64> = (0..4).chain(196..200).collect();
    let to: Vec<_> = numbers.iter().map(|_| target(LENGTH)).collect();
    let gets = numbers.iter().zip(&to);
    let gets = gets.map(|(number, to)| GetBlock::new(key(*number), to.clone()));
    // The get ends before the disk is known to be slow.
    let options = GetOptions {
        timeout: Some(Duration::from_secs(1)),
        ..GetOptions::default()
    };
    let begun = Instant::now();
    let got = client.batch_get(gets.collect(), &options).await;
    println!("{got:?} in {:?}", begun.elapsed());
    // A failed test must not wait for the disk.
    disk.set(Fault::None);
    for ((number, outcome), to) in numbers.iter().zip(got).zip(&to) {
        match outcome.unwrap() {
            GetOutcome::Hit { .. } => assert!(is_right(&key(*number), to, LENGTH)),
            GetOutcome::Miss => assert!(*number < 4, "{number} was in memory"),
        }
    }
    drop(cluster);
    drop(disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_failed_every_request_has_its_blocks_when_it_is_back() {
    const LENGTH: usize = 256 << 10;
    let test = "a_disk_that_failed_every_request_has_its_blocks_when_it_is_back";
    let Some(Faulty {
        mut cluster,
        disk,
        _place,
    }) = Faulty::start(test)
    else {
        return;
    };
    let counter = |cluster: &Cluster, name: &str| {
        let counters = cluster.counters().unwrap();
        counters["counters"][name].as_u64().unwrap()
    };
    let client = cluster.client().await.unwrap();
    for first in (0..200).step_by(4) {
        put_all(&client, first..first + 4, LENGTH).await.unwrap();
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    let are_stored = || Ok(counter(&cluster, "blocks_stored_total") > 80);
    cluster
        .wait_for("the blocks have copies", are_stored)
        .unwrap();
    disk.set(Fault::Fails(Errno::EIO));
    // The first blocks are on the disk alone by now.
    let during = check_all(&client, 0..40, LENGTH).await;
    wait_for_state(&cluster, "gone");
    assert_eq!(counter(&cluster, "replicas_corrupt_total"), 0);
    disk.set(Fault::None);
    cluster.nodes[0].kill().unwrap();
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    wait_for_state(&cluster, "ready");
    let client = cluster.client().await.unwrap();
    let after = check_all(&client, 0..40, LENGTH).await;
    println!("{during:?} while it fails, {after:?} afterwards");
    assert!(during.missed > 8 && after.right >= 30, "{after:?}");
    assert_eq!(during.wrong + after.wrong, 0);
    // The mount outlives the daemon, which has the file open.
    drop(cluster);
    drop(disk);
}

macro_rules! faults {
    ($($test:ident: $fault:expr => $state:literal, $heals:literal;)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            under(stringify!($test), $fault, $state, $heals).await;
        }
    )*};
}

faults! {
    a_disk_that_fails_every_request_is_gone: Fault::Fails(Errno::EIO) => "gone", false;
    a_disk_that_was_pulled_is_gone: Fault::Fails(Errno::ENODEV) => "gone", false;
    a_disk_that_transfers_too_little_is_gone: Fault::Short => "gone", false;
    a_disk_without_room_is_read_only: Fault::RefusesWrites(Errno::ENOSPC) => "read_only", false;
    a_disk_that_became_read_only_is_read_only: Fault::RefusesWrites(Errno::EROFS) => "read_only", false;
    a_disk_that_takes_two_seconds_is_slow: Fault::Late(Duration::from_secs(2)) => "slow", true;
    a_disk_that_hangs_is_slow: Fault::Hangs => "slow", true;
}
