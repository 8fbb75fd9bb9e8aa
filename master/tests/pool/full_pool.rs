//! A full pool: which puts wait for room, for how long, and which blocks are evicted for them.

use crate::support::{
    SPACE, commit, item, join, join_late, patient_with_nodes, pool, pool_at, registration, reserve,
    reserve_with,
};
use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, ManualClock};
use kvpool_master::membership::Reported;
use kvpool_master::placement::PlacementHints;
use kvpool_master::pool::{Holder, Pool, ReserveOptions};
use kvpool_proto::master_message::Body;
use kvpool_types::{Code, Key, KeyRef, Length};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::time::timeout;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

fn key(n: u64) -> Key {
    Key::parse(&format!("key-{n}")).unwrap()
}

async fn put(pool: &Arc<Pool>, n: u64, bytes: u64) {
    let granted = reserve(pool, &key(n), bytes).await.unwrap();
    assert_eq!(commit(pool, &key(n), bytes, granted).await, [Code::Ok]);
}

/// Puts one block after another until told to stop. Returns the number of puts and the longest
/// duration of one.
fn keep_putting(
    pool: &Arc<Pool>,
    next: &Arc<AtomicU64>,
    done: &Arc<AtomicBool>,
    bytes: u64,
) -> tokio::task::JoinHandle<(u64, Duration)> {
    let (pool, next, done) = (Arc::clone(pool), Arc::clone(next), Arc::clone(done));
    tokio::spawn(async move {
        let (mut puts, mut longest) = (0, Duration::ZERO);
        while !done.load(Ordering::Relaxed) {
            let began = Instant::now();
            put(&pool, next.fetch_add(1, Ordering::Relaxed), bytes).await;
            longest = longest.max(began.elapsed());
            puts += 1;
        }
        (puts, longest)
    })
}

/// Eight writers of 64 KiB blocks fill every gap. The large block needs contiguous room.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_large_put_is_served_among_small_ones_and_evicts_about_its_size() {
    const POOL: u64 = 4096 * MIB;
    const FILL: u64 = POOL / (64 * KIB);
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient_with_nodes()).await;
    join(&pool, "only", 1, POOL).await;
    let next = Arc::new(AtomicU64::new(0));
    // Blocks are used in another order than their addresses.
    for _ in 0..FILL {
        put(&pool, next.fetch_add(1, Ordering::Relaxed), 64 * KIB).await;
    }
    for n in 0..FILL {
        let used = key(n * 7919 % FILL);
        pool.exist(SPACE, &[used.as_ref()][..], false);
    }
    let done = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..8)
        .map(|_| keep_putting(&pool, &next, &done, 64 * KIB))
        .collect();
    let (large, mut slowest) = (256 * MIB, Duration::ZERO);
    for n in 0..10 {
        let began = Instant::now();
        put(&pool, 1_000_000 + n, large).await;
        slowest = slowest.max(began.elapsed());
    }
    done.store(true, Ordering::Relaxed);
    let (mut small, mut longest) = (0, Duration::ZERO);
    for writer in writers {
        let (puts, took) = timeout(PATIENCE, writer).await.unwrap().unwrap();
        small += puts;
        longest = longest.max(took);
    }
    let offered = (FILL + small) * 64 * KIB + 10 * large;
    // A round in progress counts its victims a moment after they have left.
    let counted = async {
        loop {
            let counters = pool.counters();
            let (evicted, live) = (counters["bytes_evicted_total"], counters["live_bytes"]);
            if offered == evicted + live {
                break (evicted, live);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let counted = timeout(PATIENCE, counted).await;
    let (evicted, live) = counted.expect("every byte put is live or was evicted");
    println!("slowest large put {slowest:?}, slowest of {small} small ones {longest:?}");
    println!("{offered} bytes put, {evicted} evicted, {live} left");
    assert!(
        slowest < Duration::from_secs(5),
        "a large put took {slowest:?}"
    );
    assert!(
        longest < Duration::from_secs(5),
        "a small put took {longest:?}"
    );
    // The high watermark is 0.95 of the pool. Eviction keeps another 0.05 free and overshoots by
    // less than a block.
    let least = POOL / 100 * 90 - large;
    assert!(live >= least, "{live} bytes are left of {least}");
}

/// Leases keep the pool closed until all puts wait. Each put makes another pass only when there is
/// room for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_waiting_put_is_woken_about_once_and_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: Duration::from_secs(60),
        ..patient_with_nodes()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    join(&pool, "only", 1, 16 * MIB).await;
    let blocks = 243;
    let mut leases = Vec::new();
    for n in 0..blocks {
        put(&pool, n, 64 * KIB).await;
        let leased = pool.lookup(SPACE, &[key(n).as_ref()][..], true);
        leases.push(leased.token);
    }
    let before = pool.counters();
    let grown = |name: &str| pool.counters()[name] - before[name];
    let served = Arc::new(AtomicU64::new(0));
    let mut waiting = Vec::new();
    for n in 0..150 {
        let (ended, waits) = (served.load(Ordering::Relaxed), grown("put_waits_total"));
        let (pool, counted) = (Arc::clone(&pool), Arc::clone(&served));
        waiting.push(tokio::spawn(async move {
            put(&pool, 1000 + n, 64 * KIB).await;
            counted.fetch_add(1, Ordering::Relaxed)
        }));
        // The next put comes when this one is in the queue, or has found room.
        let settled = async {
            while served.load(Ordering::Relaxed) == ended && grown("put_waits_total") == waits {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, settled).await.unwrap();
    }
    for (n, token) in (0..).zip(leases) {
        pool.release(SPACE, &[key(n).as_ref()][..], |_| Holder::of_any(token));
    }
    let mut late = 0;
    for (n, put) in (0..).zip(waiting) {
        let place = timeout(PATIENCE, put).await.unwrap().unwrap();
        // Puts that are woken together may commit in any order.
        late += u64::from(place.abs_diff(n) > 60);
    }
    let (waits, calls, passes) = (
        grown("put_waits_total"),
        grown("puts_called_total"),
        grown("put_passes_total"),
    );
    println!("{waits} puts waited, {calls} calls, {passes} passes, {late} far from their place");
    assert!(waits > 100, "{waits}");
    assert!(calls <= 2 * waits, "{calls} calls of {waits} puts");
    assert!(
        passes <= 150 + 2 * calls,
        "{passes} passes of {calls} calls"
    );
    assert!(
        late < 30,
        "{late} of 150 puts were served far from their place"
    );
}

/// Blocks of the last term count as leased for a minute. Blocks put since then do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn puts_go_on_after_a_restart_with_a_full_pool() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: Duration::from_secs(60),
        ..patient_with_nodes()
    };
    let (first, store) = pool(directory.path(), config.clone()).await;
    join(&first, "only", 1, 64 * MIB).await;
    for n in 0..2000 {
        put(&first, n, 64 * KIB).await;
    }
    let full = first.blocks();
    first.stop().await;
    drop((first, store));
    let again = async {
        loop {
            // The first pool's threads hold the store for a moment.
            let opened = kvpool_master::store::EmbeddedStore::open(
                &kvpool_master::store::EmbeddedOptions::new(directory.path()),
            );
            if opened.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        pool(directory.path(), config).await
    };
    let (second, _store) = timeout(PATIENCE, again).await.unwrap();
    join(&second, "only", 1, 64 * MIB).await;
    assert_eq!(second.blocks(), full);
    let (mut longest, began) = (Duration::ZERO, Instant::now());
    for n in 0..2000 {
        let began = Instant::now();
        put(&second, 10_000 + n, 64 * KIB).await;
        longest = longest.max(began.elapsed());
    }
    let took = began.elapsed();
    println!("2000 puts in {took:?}, the longest {longest:?}, {full} blocks before");
    assert!(took < Duration::from_secs(50), "the floor has passed");
    assert!(longest < Duration::from_secs(5), "a put took {longest:?}");
    let old: Vec<Key> = (0..2000).map(key).collect();
    let old: Vec<_> = old.iter().map(Key::as_ref).collect();
    let kept = second.exist(SPACE, &old[..], false).answer;
    let kept = kept.iter().filter(|there| **there).count() as u64;
    assert_eq!(kept, full, "a lease of the term before may run");
}

/// The extents of a forced removal become free when the leases end, before the put gives up.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_put_waits_for_leases_that_end_in_time_and_evicts_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: Duration::from_secs(2),
        ..patient_with_nodes()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    join(&pool, "only", 1, 64 * MIB).await;
    for n in 0..59 {
        put(&pool, n, MIB).await;
    }
    let keys: Vec<Key> = (0..20).map(key).collect();
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    pool.lookup(SPACE, &keys[..], true);
    pool.remove(SPACE, &keys, true).await.unwrap();
    for n in 100..115 {
        put(&pool, n, MIB).await;
    }
    let counters = pool.counters();
    assert_eq!(counters["bytes_evicted_total"], 0);
    assert_eq!(pool.blocks(), 39 + 15);
    // A put that gives up before the leases end must be served by eviction.
    let keys: Vec<Key> = (20..58).map(key).collect();
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    pool.lookup(SPACE, &keys[..], true);
    pool.remove(SPACE, &keys, true).await.unwrap();
    let brief = ReserveOptions {
        timeout: Duration::from_secs(1),
        ..ReserveOptions::default()
    };
    for n in 200..210 {
        reserve_with(&pool, &key(n), MIB, &brief).await.unwrap();
    }
    assert!(pool.counters()["bytes_evicted_total"] > 0);
}

/// A batch of most of the pool is granted in steps. Each step evicts an eighth of the pool, not all
/// of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_batch_as_large_as_the_pool_does_not_empty_it() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient_with_nodes()).await;
    join(&pool, "only", 1, 64 * MIB).await;
    let blocks = 960;
    for n in 0..blocks {
        put(&pool, n, 64 * KIB).await;
    }
    // The block exceeds any free range, so the batch must wait.
    let names: Vec<Key> = (0..13).map(|n| key(1_000_000 + n)).collect();
    let keys: Vec<KeyRef<'_>> = names.iter().map(Key::as_ref).collect();
    let options = ReserveOptions {
        hints: PlacementHints {
            replicas: 1,
            ..PlacementHints::default()
        },
        timeout: PATIENCE,
        ..ReserveOptions::default()
    };
    let lengths = vec![Length(4 * MIB); keys.len()];
    let asked = pool.reserve(SPACE, &keys[..], &lengths, &options);
    let granted = timeout(PATIENCE, asked).await.expect("it is served");
    let granted = granted.iter().filter(|outcome| outcome.is_ok()).count();
    assert!(granted > 0);
    let left = pool.blocks();
    // An eighth of the pool, the reserve of a twentieth, and a step of eviction.
    assert!(
        left * 10 >= blocks * 7,
        "{left} of {blocks} blocks are left, {granted} granted"
    );
}

/// The first writer that ends lets the batch continue.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_goes_on_when_any_other_writer_of_its_keys_ends() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient_with_nodes()).await;
    join(&pool, "only", 1, 64 * MIB).await;
    let _unfinished = reserve(&pool, &key(1), KIB).await.unwrap();
    let other = reserve(&pool, &key(2), KIB).await.unwrap();
    let options = ReserveOptions {
        timeout: PATIENCE,
        ..ReserveOptions::default()
    };
    let names = [key(1), key(2)];
    let keys = names.each_ref().map(Key::as_ref);
    let lengths = [Length(KIB); 2];
    let batch = pool.reserve(SPACE, &keys[..], &lengths, &options);
    let gives_up = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        pool.revoke(SPACE, &keys[1..], &[other.version])
    };
    let both = async { tokio::join!(batch, gives_up) };
    let (outcomes, _) = timeout(PATIENCE / 6, both)
        .await
        .expect("it waits for the first");
    assert_eq!(outcomes[0].as_ref().unwrap_err(), &Code::InProgress);
    assert!(outcomes[1].is_ok(), "{outcomes:?}");
}

/// Passes of woken puts run in any order. A put that runs first must not take the range that
/// eviction made for the put before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_is_not_woken_to_take_the_range_of_the_put_before_it() {
    const BLOCK: u64 = 64 * KIB;
    /// Longer than the free range above the watermark. Two such blocks are within the demand that
    /// eviction serves at once.
    const LARGE: u64 = 15 * BLOCK;
    let directory = tempfile::tempdir().unwrap();
    // Without a reserve, no block leaves while the test fills the pool. A block that left early
    // would give its extent to a leased block, among the 15 neighbours below.
    let config = Config {
        eviction_ratio: 0.0,
        lease_ttl: Duration::from_secs(60),
        ..patient_with_nodes()
    };
    // While the time stands still, the first put keeps its place at the head of the queue.
    let clock = Arc::new(ManualClock::new(BootInstant(1000)));
    let (pool, _store) = pool_at(directory.path(), config, clock).await;
    let registration = registration("only", 1, 16 * MIB);
    let node = pool.register(&registration).await.unwrap();
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &registration, outbox);
    pool.heard(&node, Some(Reported::default()));
    // The blocks without a lease: 15 neighbours, and 40 blocks between leased ones.
    let may_leave = |n: u64| n < 15 || (n > 20 && n < 101 && n % 2 == 1);
    for n in 0..243 {
        put(&pool, n, BLOCK).await;
        if !may_leave(n) {
            pool.lookup(SPACE, &[key(n).as_ref()][..], true);
        }
    }
    assert_eq!(pool.blocks(), 243, "no block has left");
    let options = ReserveOptions {
        timeout: PATIENCE,
        ..ReserveOptions::default()
    };
    let (a, b) = (key(1_000), key(1_001));
    let mut first = std::pin::pin!(reserve_with(&pool, &a, LARGE, &options));
    let mut second = std::pin::pin!(reserve_with(&pool, &b, LARGE, &options));
    assert!(futures::poll!(&mut first).is_pending());
    assert!(futures::poll!(&mut second).is_pending());
    // Each answer wakes the puts that fit into the room that is free then.
    timeout(PATIENCE, async {
        let mut fenced = 0;
        while fenced < 2 * LARGE {
            let message = inbox.recv().await.unwrap().unwrap();
            if let Some(Body::Fence(fence)) = message.body {
                let tickets: Vec<u64> = fence.items.iter().map(|item| item.ticket).collect();
                let extents = fence.items.iter().filter_map(|item| item.extent.as_ref());
                fenced += extents.map(|extent| extent.length).sum::<u64>();
                pool.fenced(&node, &tickets);
            }
        }
    })
    .await
    .expect("eviction makes room for both puts");
    // The pool has room for both blocks, and a contiguous range for one.
    assert_eq!(pool.counters()["puts_called_total"], 1);
    assert!(futures::poll!(&mut second).is_pending());
    assert!(first.await.is_ok());
}

/// Blocks that were just evicted become free room soon. A put that waits for it must not cost young
/// blocks that happen to be neighbours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_oldest_blocks_leave_while_the_room_of_others_is_fenced() {
    const BLOCK: u64 = 64 * KIB;
    const BATCH: usize = 24;
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        eviction_high_watermark_ratio: 1.0,
        eviction_ratio: 0.02,
        lease_ttl: Duration::from_millis(10),
        ..patient_with_nodes()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    let fence = Duration::from_millis(60);
    join_late(&pool, "only", 1, 256 * BLOCK, fence).await;
    let patience = ReserveOptions {
        timeout: Duration::from_secs(10),
        ..ReserveOptions::default()
    };
    // Keys by their last use, the latest at the end.
    let mut used: Vec<u64> = Vec::new();
    let mut draws = StdRng::seed_from_u64(1);
    for first in (0u64..).step_by(BATCH).take(30) {
        let mut left: Vec<Key> = (first..).map(key).take(BATCH).collect();
        while !left.is_empty() {
            let keys: Vec<KeyRef<'_>> = left.iter().map(Key::as_ref).collect();
            let lengths = vec![Length(BLOCK); left.len()];
            let granted = pool.reserve(SPACE, &keys[..], &lengths, &patience).await;
            // A batch that was granted a part asks again for the rest.
            let mut items = Vec::new();
            let mut refused = Vec::new();
            for (key, granted) in left.into_iter().zip(granted) {
                match granted {
                    Ok(granted) => items.push(item(&key, BLOCK, granted)),
                    Err(code) => {
                        assert_eq!(code, Code::Full);
                        refused.push(key);
                    }
                }
            }
            let codes = pool.commit(SPACE, items).await;
            assert!(codes.iter().all(|code| *code == Code::Ok));
            left = refused;
        }
        used.extend((first..).take(BATCH));
        // Some older blocks are used again, so that neighbours differ in age.
        for _ in 0..BATCH / 2 {
            let at = draws.random_range(used.len().saturating_sub(150)..used.len());
            let again = used.remove(at);
            pool.lookup(SPACE, &[key(again).as_ref()][..], true);
            used.push(again);
        }
        for young in used.iter().rev().take(160) {
            let key = key(*young);
            let is_there = pool.exist(SPACE, &[key.as_ref()][..], false).answer;
            assert_eq!(is_there, [true], "{young} of {first}");
        }
    }
}
