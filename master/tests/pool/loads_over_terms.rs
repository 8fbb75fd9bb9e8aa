//! Blocks that were loaded from a medium in one term, and whose records the next term never sees.

use crate::support::media::*;
use crate::support::{
    Gated, SPACE, commit, full_and_patient, join_as, pool_at, registration, reserve_with,
};
use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, Clock, ManualClock};
use kvpool_master::membership::Registration;
use kvpool_master::pool::{Found, Holder, Pool, ReserveOptions};
use kvpool_master::store::{JournalOptions, MetadataStore};
use kvpool_types::{Code, Epoch, Extent, Key, Length};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The number of blocks that fit into the only node.
const ROOM: u64 = 4;
const TTL: Duration = Duration::from_secs(5);

fn config() -> Config {
    full_and_patient(TTL)
}

/// A pool with room for `room` blocks, whose only block, of key 1 and `bytes`, is on a medium and not in memory.
async fn on_a_medium(
    directory: &std::path::Path,
    disk: &Arc<Disk>,
    room: u64,
    bytes: u64,
) -> (Arc<Pool>, Arc<Gated>, Arc<ManualClock>, Node) {
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let (pool, store) = pool_at(directory, config(), Arc::clone(&clock) as _).await;
    let join = |life| join(&pool, "n", life, room * BLOCK, disk, 32 * MIB, 4 * MIB);
    let node = join(1).await;
    wait_for_attachment(disk).await;
    let granted = reserve_with(&pool, &key(1), bytes, &patient()).await;
    assert_eq!(
        commit(&pool, &key(1), bytes, granted.unwrap()).await,
        [Code::Ok]
    );
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    pool.drop_node(&node.node);
    drop(node);
    until("swept", || pool.blocks() == 0).await;
    let node = join(2).await;
    wait_for_media(&pool, 1..2).await;
    (pool, store, clock, node)
}

/// The location of the block of key 1, and the end of its reader's lease.
fn lease(pool: &Pool, bytes: u64) -> (Extent, BootInstant) {
    let key = key(1);
    let found = pool.lookup(SPACE, &[key.as_ref()][..], true);
    let block: &Found = found.answer[0].as_ref().expect("it is in memory");
    let place = Extent {
        segment: block.replicas[0].segment,
        offset: block.replicas[0].offset,
        length: Length(bytes),
    };
    (place, found.token)
}

/// Puts a block that may take the room of others, and returns its extent.
async fn put_somewhere(pool: &Arc<Pool>, key: &Key) -> Extent {
    let granted = reserve_with(pool, key, BLOCK, &patient()).await.unwrap();
    let place = Extent {
        segment: granted.replicas[0].segment,
        offset: granted.replicas[0].offset,
        length: Length(BLOCK),
    };
    commit(pool, key, BLOCK, granted).await;
    place
}

/// The next term over the same store. Records that the last term has not made durable are lost.
async fn next_term(
    store: &Arc<Gated>,
    clock: &Arc<ManualClock>,
    unwritten: tokio::sync::MutexGuard<'_, ()>,
) -> Arc<Pool> {
    let kept = Arc::clone(store) as Arc<dyn MetadataStore>;
    let before = kept.epoch().await.unwrap();
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    let (next, at_once) = (Arc::clone(&kept), JournalOptions::default());
    let leads =
        tokio::spawn(async move { crate::support::lead(&next, config(), at_once, clock).await });
    while kept.epoch().await.unwrap() == before {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(unwritten);
    leads.await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_a_load_filled_stays_shut_when_the_record_of_the_load_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::new(1);
    let (pool, store, clock, node) = on_a_medium(directory.path(), &disk, ROOM, BLOCK).await;
    let unwritten = store.gate.lock().await;
    assert!(comes_back(&pool, 1).await);
    let (leased, token) = lease(&pool, BLOCK);
    let life = node.node.incarnation.0;

    let pool = next_term(&store, &clock, unwritten).await;
    assert!(pool.epoch > Epoch(1));
    assert_eq!(pool.blocks(), 0, "the record of the load is durable");
    let says = Registration {
        loaded: vec![leased],
        ..registration("n", life, ROOM * BLOCK)
    };
    let (node, session) = join_as(&pool, &says, Duration::ZERO).await;
    // Memory is full soon, and the pool evicts.
    for number in 10..10 + 5 * ROOM {
        let place = put_somewhere(&pool, &key(number)).await;
        assert_ne!(place, leased, "a reader may be at this place");
    }
    // The node's connection breaks, and the node repeats its report.
    pool.detach(&node, session);
    join_as(&pool, &says, Duration::ZERO).await;
    assert_eq!(node.segments(), [leased.segment]);
    let place = put_somewhere(&pool, &key(100)).await;
    assert_ne!(place, leased, "a reader may be at this place");

    clock.advance(TTL * 2);
    assert!(clock.now() > token);
    let mut numbers = 101..;
    let again =
        async { while put_somewhere(&pool, &key(numbers.next().unwrap())).await != leased {} };
    let waited = tokio::time::timeout(Duration::from_secs(20), again).await;
    assert!(waited.is_ok(), "the place stays shut for ever");
    pool.stop().await;
}

/// The next term keeps the extent of a block that left just before in quarantine, and with it a
/// part of the load's extent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_load_took_beside_a_place_that_is_shut_already_stays_shut_too() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::new(1);
    let (pool, store, clock, node) = on_a_medium(directory.path(), &disk, 2, 2 * BLOCK).await;
    let before = put_somewhere(&pool, &key(2)).await;
    let removed = pool.remove(SPACE, &[key(2).as_ref()], false).await;
    assert_eq!(removed.unwrap().codes, [Code::Ok]);
    let unwritten = store.gate.lock().await;
    assert!(comes_back(&pool, 1).await);
    let (leased, _) = lease(&pool, 2 * BLOCK);
    assert!(leased.overlaps(&before));
    let life = node.node.incarnation.0;

    let pool = next_term(&store, &clock, unwritten).await;
    let says = Registration {
        loaded: vec![leased],
        ..registration("n", life, 2 * BLOCK)
    };
    join_as(&pool, &says, Duration::ZERO).await;
    let soon = ReserveOptions {
        timeout: Duration::from_millis(200),
        ..ReserveOptions::default()
    };
    let refused = reserve_with(&pool, &key(3), BLOCK, &soon).await;
    assert!(refused.is_err(), "a reader may be at {refused:?}");
    clock.advance(TTL * 2);
    put_somewhere(&pool, &key(4)).await;
    put_somewhere(&pool, &key(5)).await;
    pool.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_names_places_of_its_own_only() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = crate::support::pool(directory.path(), config()).await;
    let one = crate::support::join(&pool, "one", 1, ROOM * BLOCK).await;
    let other = Extent {
        segment: one.segments()[0],
        offset: kvpool_types::Offset(0),
        length: Length(ROOM * BLOCK),
    };
    let says = Registration {
        loaded: vec![other],
        ..registration("two", 2, ROOM * BLOCK)
    };
    join_as(&pool, &says, Duration::ZERO).await;
    let mut places = Vec::new();
    for number in 0..2 * ROOM {
        places.push(put_somewhere(&pool, &key(number)).await.segment);
    }
    let on_one = places.iter().filter(|place| **place == other.segment);
    assert_eq!(on_one.count() as u64, ROOM, "its room was shut by another");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_need_not_name_a_load_once_its_record_is_durable() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::new(1);
    let (pool, store, _clock, node) = on_a_medium(directory.path(), &disk, ROOM, BLOCK).await;
    let below = || pool.loads_recorded_below(&node.node);
    let of_load = below();
    let unwritten = store.gate.lock().await;
    assert!(comes_back(&pool, 1).await);
    for _ in 0..10 {
        assert_eq!(below(), of_load, "the record may be lost");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(unwritten);
    until("recorded", || below() > of_load).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_need_not_name_a_load_that_failed() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::new(1);
    let (pool, _store, _clock, node) = on_a_medium(directory.path(), &disk, ROOM, BLOCK).await;
    let below = || pool.loads_recorded_below(&node.node);
    let of_load = below();
    disk.loads_stall.store(true, Ordering::SeqCst);
    let asking = tokio::spawn({
        let pool = Arc::clone(&pool);
        async move { comes_back(&pool, 1).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(below(), of_load, "the load is under way");
    disk.blocks.lock().clear();
    disk.loads_stall.store(false, Ordering::SeqCst);
    assert!(!asking.await.unwrap(), "the disk lost the block");
    until("given up", || below() > of_load).await;
}

/// The next term does not know the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_on_a_medium_is_removed_only_when_leases_of_the_last_term_are_over() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::new(1);
    let (pool, store, clock, _node) = on_a_medium(directory.path(), &disk, ROOM, BLOCK).await;
    disk.loads_stall.store(true, Ordering::SeqCst);
    let key = key(1);
    let keys = [key.as_ref()];
    assert_eq!(pool.exist(SPACE, &keys[..], true).answer, [true]);
    let unwritten = store.gate.lock().await;

    let pool = next_term(&store, &clock, unwritten).await;
    let removed = pool.remove(SPACE, &keys[..], false).await.unwrap();
    assert_eq!(removed.codes, [Code::Leased]);
    clock.advance(TTL * 2);
    let removed = pool.remove(SPACE, &keys[..], false).await.unwrap();
    assert_eq!(removed.codes, [Code::Ok]);
    pool.stop().await;
}

/// The copy's holders had moved to the block, which left at once with its node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_copy_whose_load_came_too_late_ends_no_lease_on_the_next_load() {
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::new(1);
    let (pool, store, _clock, node) = on_a_medium(directory.path(), &disk, ROOM, BLOCK).await;
    put_somewhere(&pool, &key(2)).await;
    disk.loads_stall.store(true, Ordering::SeqCst);
    let block = key(1);
    let keys = [block.as_ref()];
    let of_copy = pool.exist(SPACE, &keys[..], true);
    assert_eq!(of_copy.answer, [true]);
    // A record that is logged later takes effect after a removal that is durable first.
    let shut = store.gate.lock().await;
    let remover = Arc::clone(&pool);
    let removal = tokio::spawn(async move {
        let other = key(2);
        remover.remove(SPACE, &[other.as_ref()][..], true).await
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    disk.loads_stall.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(pool.lookup(SPACE, &keys[..], false).answer, [None]);
    pool.drop_node(&node.node);
    drop(shut);
    removal.await.unwrap().unwrap();
    drop(node);
    until("swept", || pool.blocks() == 0).await;
    let _node = join(&pool, "n", 3, ROOM * BLOCK, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_media(&pool, 1..2).await;
    assert!(comes_back(&pool, 1).await);
    lease(&pool, BLOCK);
    pool.release(SPACE, &keys[..], |_| Holder::of_any(of_copy.token));
    let described = pool.describe(SPACE, &keys[..]).remove(0).unwrap();
    assert!(
        described.lease_left > Duration::ZERO,
        "the lease of the reader was ended"
    );
    pool.stop().await;
}
