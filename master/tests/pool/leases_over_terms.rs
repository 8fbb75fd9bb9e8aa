//! Leases that readers took in one term, and the next term's knowledge of them.

use crate::support::{SPACE, commit, full_and_patient, reserve_with};
use bytesize::ByteSize;
use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, Clock, ManualClock};
use kvpool_master::pool::{Pool, ReserveOptions};
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore, JournalOptions, LogSeq, MetadataStore};
use kvpool_types::{Code, Key, KeyRef, Offset, SegmentId};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = 64 << 10;
/// The number of blocks that fit into the only node.
const ROOM: usize = 4;
const TTL: Duration = Duration::from_secs(5);

fn config() -> Config {
    full_and_patient(TTL)
}

/// A term that captures all shards as soon as it can.
async fn lead(store: &Arc<dyn MetadataStore>, clock: &Arc<ManualClock>) -> Arc<Pool> {
    let journal = JournalOptions {
        log_bytes: ByteSize::b(1),
        log_ratio: 0,
        ..JournalOptions::default()
    };
    let pool = crate::support::lead(store, config(), journal, Arc::clone(clock) as _).await;
    crate::support::join(&pool, "n", 1, ROOM as u64 * BLOCK).await;
    pool
}

/// A term whose removals are in the log but in no snapshot.
async fn lead_without_snapshots(directory: &Path, clock: &Arc<ManualClock>) -> Arc<Pool> {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let store: Arc<dyn MetadataStore> = Arc::new(store);
    let journal = JournalOptions::default();
    let pool = crate::support::lead(&store, config(), journal, Arc::clone(clock) as _).await;
    crate::support::join(&pool, "n", 1, ROOM as u64 * BLOCK).await;
    pool
}

/// The keys of twice as many blocks as there is room for.
fn keys() -> Vec<Key> {
    let names = (0..2 * ROOM).map(|number| format!("block-{number}"));
    names.map(|name| Key::parse(&name).unwrap()).collect()
}

/// Grants room for a block of one key, and returns its location.
async fn grant(pool: &Arc<Pool>, key: &Key, upsert: bool) -> Result<(SegmentId, Offset), Code> {
    let options = ReserveOptions {
        upsert,
        timeout: Duration::from_secs(10),
        ..ReserveOptions::default()
    };
    let granted = reserve_with(pool, key, BLOCK, &options).await?;
    let place = (granted.replicas[0].segment, granted.replicas[0].offset);
    assert_eq!(commit(pool, key, BLOCK, granted).await, [Code::Ok]);
    Ok(place)
}

/// Waits until snapshots contain the whole log.
async fn wait_for_snapshots(store: &Arc<dyn MetadataStore>) {
    for _ in 0..6000 {
        let span = store.log_span().await.unwrap();
        if span.cut > LogSeq(0) && span.cut == span.last {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no snapshot contains the log");
}

/// A snapshot has the new version of a key, and the log has no record of the old one. A reader of
/// the last term has a lease on the old version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_was_left_under_a_lease_before_a_snapshot_stays_shut_in_the_next_term() {
    let directory = tempfile::tempdir().unwrap();
    let open = || -> Arc<dyn MetadataStore> {
        Arc::new(EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap())
    };
    let store = open();
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let key = |number: usize| Key::parse(&format!("block-{number}")).unwrap();

    let pool = lead(&store, &clock).await;
    let left = grant(&pool, &key(0), false).await.unwrap();
    let leased = pool.exist(SPACE, &[key(0).as_ref()], true);
    assert_eq!(leased.answer, [true]);
    let now = grant(&pool, &key(0), true).await.unwrap();
    assert_ne!(left, now);
    wait_for_snapshots(&store).await;
    pool.stop().await;
    drop((pool, store));

    let store = open();
    let pool = lead(&store, &clock).await;
    // The pool is full soon, and evicts.
    for number in 1..5 * ROOM {
        let place = grant(&pool, &key(number), false).await.unwrap();
        assert_ne!(place, left, "a reader may be at this place");
    }
    clock.advance(TTL * 2);
    assert!(clock.now() > leased.token);
    let mut numbers = 5 * ROOM..;
    let again = async {
        while grant(&pool, &key(numbers.next().unwrap()), false)
            .await
            .unwrap()
            != left
        {}
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), again).await;
    assert!(waited.is_ok(), "the place stays shut for ever");
    pool.stop().await;
}

/// A reader has a lease on one of several removed blocks. In the next term only that block's extent
/// stays in quarantine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_blocks_without_a_lease_leave_free_places_to_the_next_term() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let begin = || lead_without_snapshots(directory.path(), &clock);
    let keys = keys();
    let (old, new) = (&keys[..ROOM], &keys[ROOM + 1..]);

    let pool = begin().await;
    let mut places = Vec::new();
    for key in old {
        places.push(grant(&pool, key, false).await.unwrap());
    }
    let leased = pool.exist(SPACE, &[old[0].as_ref()], true);
    assert_eq!(leased.answer, [true]);
    let asked: Vec<KeyRef<'_>> = old.iter().map(Key::as_ref).collect();
    let removed = pool.remove(SPACE, &asked, true).await.unwrap();
    assert_eq!(removed.codes, [Code::Ok; ROOM]);
    pool.stop().await;
    drop(pool);

    let pool = begin().await;
    let shut = places.remove(0);
    let mut taken = Vec::new();
    for key in new {
        let place = grant(&pool, key, false).await;
        taken.push(place.expect("the place of a removed block is free"));
    }
    let asked: Vec<KeyRef<'_>> = new.iter().map(Key::as_ref).collect();
    let there = pool.exist(SPACE, &asked[..], false).answer;
    assert_eq!(there, [true; ROOM - 1], "one was evicted for another");
    assert!(!taken.contains(&shut), "a reader may be at this place");
    places.sort_unstable();
    taken.sort_unstable();
    assert_eq!(taken, places);
    pool.stop().await;
}

/// Readers have leases on all removed blocks, and the second term outlives these leases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_whose_leases_ended_in_one_term_are_free_in_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let begin = || lead_without_snapshots(directory.path(), &clock);
    let keys = keys();
    let (old, new) = keys.split_at(ROOM);

    let pool = begin().await;
    for key in old {
        grant(&pool, key, false).await.unwrap();
    }
    let asked: Vec<KeyRef<'_>> = old.iter().map(Key::as_ref).collect();
    assert_eq!(pool.exist(SPACE, &asked[..], true).answer, [true; ROOM]);
    let removed = pool.remove(SPACE, &asked, true).await.unwrap();
    assert_eq!(removed.codes, [Code::Ok; ROOM]);
    pool.stop().await;
    drop(pool);

    let pool = begin().await;
    clock.advance(TTL * 2);
    grant(&pool, &new[0], false).await.unwrap();
    pool.stop().await;
    drop(pool);

    let pool = begin().await;
    for key in &new[1..] {
        let place = grant(&pool, key, false).await;
        place.expect("the leases on this place are over");
    }
    let asked: Vec<KeyRef<'_>> = new.iter().map(Key::as_ref).collect();
    let there = pool.exist(SPACE, &asked[..], false).answer;
    assert_eq!(there, [true; ROOM], "one was evicted for another");
    pool.stop().await;
}
