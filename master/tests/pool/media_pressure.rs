//! Media that are smaller than memory, memory that cannot be evicted, chains, and drains.

use crate::support::media::*;
use crate::support::{SPACE, commit, item, patient_with_nodes, pool, reserve_with};
use kvpool_master::Config;
use kvpool_master::pool::{
    Blocks, Change, Holder, OfferedMedium, Pool, ReserveOptions, TaskState, TaskView, Wish,
};
use kvpool_master::store::MetadataStore;
use kvpool_proto::MediumState;
use kvpool_types::{Code, Key, KeyRef, NodeName};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A medium that is smaller than the copied part of memory is written once. It is written again
/// only for blocks that are used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_pool_writes_nothing_to_a_small_medium() {
    idle_after(&patient()).await;
}

/// The medium could not keep the copies of all pinned blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_pool_of_pinned_blocks_writes_nothing_to_a_small_medium() {
    idle_after(&pinned()).await;
}

/// Each block whose copy is dropped was used since, so each would drop the copy of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_blocks_that_are_read_are_not_written_to_a_small_medium_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 64 * MIB, &disk, 16 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    let pins = 0..24 * MIB / BLOCK;
    let (reader, read) = (Arc::clone(&pool), pins.clone());
    let reading = tokio::spawn(async move {
        let keys: Vec<Key> = read.map(key).collect();
        let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
        for _ in 0..100_000 {
            reader.lookup(SPACE, &keys[..], true);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    for number in pins {
        put(&pool, number, &pinned()).await;
    }
    wait_until_idle(&disk).await;
    reading.abort();
}

/// Fills most of memory beside a medium of a quarter of it, and waits until nothing is written.
async fn idle_after(options: &ReserveOptions) {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 64 * MIB, &disk, 16 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..58 * MIB / BLOCK {
        put(&pool, number, options).await;
    }
    wait_until_idle(&disk).await;
}

/// Waits until nothing is written for a second.
async fn wait_until_idle(disk: &Disk) {
    let (mut before, mut quiet) = (u64::MAX, 0);
    for _ in 0..100 {
        let now = disk.stores.load(Ordering::SeqCst);
        quiet = if now == before { quiet + 1 } else { 0 };
        if quiet == 10 {
            break;
        }
        before = now;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(quiet, 10, "{before} stores, and no end");
    assert!(before > 0, "nothing was stored");
}

/// A drain into a medium that is smaller than memory keeps the most recently used blocks, and ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_when_the_medium_is_full() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 64 * MIB, &disk, 16 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..32 * MIB / BLOCK {
        put(&pool, number, &patient()).await;
    }
    let hot: Vec<Key> = (100..200).map(key).collect();
    let hot: Vec<KeyRef<'_>> = hot.iter().map(Key::as_ref).collect();
    pool.lookup(SPACE, &hot[..], true);
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    let stored = disk.stores.load(Ordering::SeqCst);
    assert!(stored * BLOCK <= 20 * MIB, "{stored} stores into 16 MiB");
    pool.drop_node(&node.node);
    drop(node);
    let _node = join(&pool, "n", 2, 64 * MIB, &disk, 16 * MIB, 4 * MIB).await;
    wait_for_media(&pool, 100..101).await;
    for number in 100..200 {
        assert!(comes_back(&pool, number).await, "{number}");
    }
}

/// Blocks that pass through memory beside pinned blocks all get a copy before they leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_get_copies_beside_blocks_that_cannot_leave() {
    for config in [lru(), Config::default()] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _store) = pool(directory.path(), config).await;
        let disk = Disk::new(1);
        let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
        wait_for_attachment(&disk).await;
        for number in 10_000..10_000 + 12 * MIB / BLOCK {
            put(&pool, number, &pinned()).await;
        }
        // The first blocks that leave show how far eviction reaches.
        for number in 0..24 * MIB / BLOCK {
            put_paced(&pool, number).await;
        }
        let count = || {
            let counters = pool.counters();
            let names = ["blocks_evicted_total", "blocks_evicted_without_copy_total"];
            names.map(|name| counters[name])
        };
        let before = count();
        for number in 1000..1000 + 48 * MIB / BLOCK {
            put_paced(&pool, number).await;
        }
        let after = count();
        let (evicted, lost) = (after[0] - before[0], after[1] - before[1]);
        assert!(evicted > 600, "{evicted} were evicted");
        assert!(
            lost * 12 <= evicted,
            "{lost} of {evicted} left without a copy"
        );
    }
}

/// The numbers of the blocks that lie on the medium only.
async fn on_medium_only(pool: &Arc<Pool>, numbers: Range<u64>) -> Vec<u64> {
    let held = present(pool, numbers.clone()).await;
    let keys: Vec<Key> = numbers.clone().map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let in_memory = pool.lookup(SPACE, &keys[..], false).answer;
    let all = numbers.zip(held.into_iter().zip(in_memory));
    all.filter_map(|(number, (held, found))| (held && found.is_none()).then_some(number))
        .collect()
}

/// A lookup ends when its caller stops waiting. Afterwards no block is evicted or loaded for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_ends_with_the_patience_of_its_caller() {
    const PATIENCE: Duration = Duration::from_millis(200);
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * BLOCK, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..40 {
        put_paced(&pool, number).await;
    }
    let lies_there = on_medium_only(&pool, 0..40).await;
    assert!(lies_there.len() > 20, "{lies_there:?}");
    let wanted = key(lies_there[0]);
    let wanted = [wanted.as_ref()];

    // A load in progress is not a failure: its caller may ask again.
    disk.loads_stall.store(true, Ordering::SeqCst);
    let asked = Instant::now();
    let restored = pool.restore(SPACE, &wanted[..], PATIENCE).await;
    assert!(asked.elapsed() < Duration::from_secs(3));
    assert_eq!(restored.left, [0]);
    disk.loads_stall.store(false, Ordering::SeqCst);
    assert!(comes_back(&pool, lies_there[0]).await);

    // Every block in memory has a lease, so nothing leaves.
    let all: Vec<Key> = (0..40).map(key).collect();
    let all: Vec<KeyRef<'_>> = all.iter().map(Key::as_ref).collect();
    let leased = pool.lookup(SPACE, &all[..], true);
    let there = on_medium_only(&pool, 0..40).await;
    let wanted = key(there[0]);
    let wanted = [wanted.as_ref()];
    let count = || {
        (
            pool.counters()["blocks_evicted_total"],
            disk.loads.load(Ordering::SeqCst),
        )
    };
    let before = count();
    let asked = Instant::now();
    let restored = pool.restore(SPACE, &wanted[..], PATIENCE).await;
    assert!(asked.elapsed() < Duration::from_secs(3));
    assert_eq!(restored.left, [0], "memory has room");
    // A round of eviction may still have begun for it.
    tokio::time::sleep(Duration::from_millis(100)).await;
    pool.release(SPACE, &all[..], |_| Holder::of_any(leased.token));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(count(), before, "evictions and loads for nobody");
    assert!(comes_back(&pool, there[0]).await);
}

/// Eviction takes the end of a chain first. These blocks must still have copies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_that_is_longer_than_memory_is_copied_whole() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    let blocks = 24 * MIB / BLOCK;
    for number in 0..blocks {
        let block = key(number);
        let granted = reserve_with(&pool, &block, BLOCK, &patient())
            .await
            .unwrap();
        let mut item = item(&block, BLOCK, granted);
        item.parent = number.checked_sub(1).map(key);
        assert_eq!(pool.commit(SPACE, vec![item]).await, [Code::Ok]);
        for _ in 0..1000 {
            if pool.bytes_due() == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let held = present(&pool, 0..blocks).await;
    let matched = held.iter().take_while(|is_held| **is_held).count() as u64;
    assert_eq!(matched, blocks, "the chain has a hole");
}

/// A pinned block whose node restarts is pinned when it comes back, and its copy stays on the medium.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pin_comes_back_with_its_block() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    put(&pool, 7, &pinned()).await;
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    pool.drop_node(&node.node);
    drop(node);
    let _node = join(&pool, "n", 2, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_media(&pool, 7..8).await;
    // The medium is written several times over. The block is not used meanwhile.
    for number in 100..100 + 96 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    let seven = key(7);
    let keys = [seven.as_ref()];
    let described = pool.describe(SPACE, &keys[..]).remove(0).unwrap();
    assert!(described.hard_pin);
    assert_eq!(
        pool.remove(SPACE, &keys[..], false).await.unwrap().codes,
        [Code::Leased],
        "it is pinned on the medium too"
    );
    assert!(comes_back(&pool, 7).await);
    for number in 10_000..10_000 + 16 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    let described = pool.describe(SPACE, &keys[..]).remove(0).unwrap();
    assert!(described.hard_pin);
    let in_memory = |r: &kvpool_master::pool::DescribedReplica| !r.segment.is_on_medium();
    assert!(described.replicas.iter().any(in_memory), "it was evicted");
}

/// A block that no zone can take has no copy, and the drain says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_counts_the_blocks_that_stay_behind() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 32 * MIB, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    put(&pool, 1, &patient()).await;
    let long = key(2);
    let granted = reserve_with(&pool, &long, 8 * MIB, &patient())
        .await
        .unwrap();
    let item = item(&long, 8 * MIB, granted);
    assert_eq!(pool.commit(SPACE, vec![item]).await, [Code::Ok]);
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    assert_eq!(disk.left.load(Ordering::SeqCst), 1);
    assert_eq!(pool.counters()["copies_too_long_total"], 1);
}

/// Reports this state of a node's medium.
async fn offer(pool: &Arc<Pool>, node: &Node, disk: &Disk, state: MediumState) {
    let offer = OfferedMedium {
        state,
        ..disk.offer(64 * MIB, 4 * MIB)
    };
    let offered = pool.media_offered(&node.node, node.session, vec![offer]);
    offered.await.unwrap();
}

/// A node with a disk, and twenty blocks in its memory.
async fn twenty_blocks(pool: &Arc<Pool>) -> (Node, Arc<Disk>) {
    let disk = Disk::new(1);
    let node = join(pool, "n", 1, 32 * MIB, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..20 {
        put(pool, number, &patient()).await;
    }
    (node, disk)
}

/// The disk answers within a second, and the node would leave at once. No other node takes its blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_a_disk_that_is_slow_for_a_moment() {
    for move_blocks in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _store) = pool(directory.path(), lru()).await;
        let (node, disk) = twenty_blocks(&pool).await;
        offer(&pool, &node, &disk, MediumState::MediumSlow).await;
        pool.draining(&node.node, move_blocks);
        until("the move has ended", || {
            let moves = pool.replica_tasks(&[]);
            let is_over = |task: &TaskView| task.state != TaskState::Running;
            moves.len() == usize::from(move_blocks) && moves.iter().all(is_over)
        })
        .await;
        // A node that is told too early is told within this time.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!disk.is_demoted.load(Ordering::SeqCst));
        offer(&pool, &node, &disk, MediumState::MediumReady).await;
        until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
        assert_eq!(disk.left.load(Ordering::SeqCst), 0);
    }
}

/// The blocks are copied, and no record of a copy is logged while the store is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_a_full_store() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), lru()).await;
    let (node, disk) = twenty_blocks(&pool).await;
    disk.is_stalled.store(true, Ordering::SeqCst);
    pool.draining(&node.node, false);
    until("ordered", || disk.ordered.lock().len() == 20).await;
    store.is_full.store(true, Ordering::SeqCst);
    disk.is_stalled.store(false, Ordering::SeqCst);
    until("refused", || pool.has_room().is_err()).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!disk.is_demoted.load(Ordering::SeqCst), "no copy is logged");
    store.is_full.store(false, Ordering::SeqCst);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    assert_eq!(disk.left.load(Ordering::SeqCst), 0);
}

/// The copy was used, so it moves before its zone is written again. The log has no room for the
/// record of its new extent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_moves_while_the_store_is_full_stays() {
    let cold = Cold::block(Config::default()).await;
    let Cold {
        pool, store, disk, ..
    } = &cold;
    let mut number = 100;
    while pool.media()[0].record.cursor == 0 {
        assert!(number < 5000, "nothing is stored");
        put_paced(pool, number).await;
        number += 1;
    }
    put_paced(pool, number).await;
    number += 1;
    // It was used after its zone was written, and memory evicts it before the medium is full.
    assert!(comes_back(pool, 1).await);
    disk.moves_stall.store(true, Ordering::SeqCst);
    while disk.moves.load(Ordering::SeqCst) == 0 {
        assert!(number < 5000, "no copy moves");
        put_paced(pool, number).await;
        number += 1;
    }
    store.is_full.store(true, Ordering::SeqCst);
    disk.moves_stall.store(false, Ordering::SeqCst);
    until("refused", || pool.has_room().is_err()).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    store.is_full.store(false, Ordering::SeqCst);
    until("room", || pool.has_room().is_ok()).await;
    until("moved again", || disk.moves.load(Ordering::SeqCst) > 1).await;
    for number in 5000..5000 + 4 * MIB / BLOCK {
        put_paced(pool, number).await;
    }
    assert_eq!(present(pool, 1..2).await, [true]);
}

/// The log would refuse the record when the block is loaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_block_is_loaded_while_the_store_is_full() {
    let cold = Cold::block(Config::default()).await;
    let Cold {
        pool, store, disk, ..
    } = &cold;
    let granted = reserve_with(pool, &key(2), BLOCK, &patient()).await;
    store.is_full.store(true, Ordering::SeqCst);
    let committed = commit(pool, &key(2), BLOCK, granted.unwrap()).await;
    assert_eq!(committed, [Code::StoreFull]);
    let loads = disk.loads.load(Ordering::SeqCst);
    assert!(!comes_back(pool, 1).await, "it cannot be logged");
    assert_eq!(disk.loads.load(Ordering::SeqCst), loads, "loaded in vain");
    store.is_full.store(false, Ordering::SeqCst);
    until("room", || pool.has_room().is_ok()).await;
    assert!(comes_back(pool, 1).await, "it can be logged again");
}

/// A full etcd delays the append of a put. A load would wait behind it, and make room in memory for
/// nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_block_is_loaded_while_appends_wait_for_space() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        eviction_ratio: 0.0,
        ..Config::default()
    };
    let (pool, store) = pool(directory.path(), config).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * BLOCK, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..40 {
        put_paced(&pool, number).await;
    }
    let is_cold = |number: &u64| {
        let key = key(*number);
        let keys = [key.as_ref()];
        let found = pool.lookup(SPACE, &keys[..], false).answer;
        found.into_iter().next().flatten().is_none()
    };
    let held = present(&pool, 0..40).await;
    let held = (0..40).zip(held).filter(|(_, is_held)| *is_held);
    let cold = held.map(|(number, _)| number).find(is_cold).unwrap();
    let granted = reserve_with(&pool, &key(40), BLOCK, &patient()).await;
    store.has_no_space.store(true, Ordering::SeqCst);
    let put = tokio::spawn(commit(&pool, &key(40), BLOCK, granted.unwrap()));
    until("an append waits", || store.is_full()).await;
    let before = pool.counters()["blocks_evicted_total"];
    let loads = disk.loads.load(Ordering::SeqCst);
    let asked = Instant::now();
    assert!(!comes_back(&pool, cold).await, "it cannot be logged");
    assert!(
        asked.elapsed() < Duration::from_secs(1),
        "{:?}",
        asked.elapsed()
    );
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(disk.loads.load(Ordering::SeqCst), loads, "loaded in vain");
    assert_eq!(pool.counters()["blocks_evicted_total"], before);
    assert!(!put.is_finished(), "a put waits for the append");
    store.has_no_space.store(false, Ordering::SeqCst);
    assert_eq!(put.await.unwrap(), [Code::Ok]);
    assert!(comes_back(&pool, cold).await, "it can be logged again");
}

/// The next offset of the medium may take it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_a_drain_that_failed_is_tried_once_more() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), lru()).await;
    let (node, disk) = twenty_blocks(&pool).await;
    // The disk refuses three blocks once each: it answers when all stores are ordered.
    disk.is_stalled.store(true, Ordering::SeqCst);
    disk.refuses_next.store(3, Ordering::SeqCst);
    pool.draining(&node.node, false);
    until("ordered", || disk.ordered.lock().len() == 20).await;
    disk.is_stalled.store(false, Ordering::SeqCst);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    assert_eq!(disk.left.load(Ordering::SeqCst), 0);
}

/// An operator drains the node, and the connection of the only other node breaks. Then the node stops. It would be gone
/// before it gives up the other node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_copies_blocks_to_its_medium_while_the_only_other_node_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        eviction_policy: lru().eviction_policy,
        ..patient_with_nodes()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    let (node, disk) = twenty_blocks(&pool).await;
    let other = crate::support::replicas::join(&pool, "m", 2).await;
    pool.detach(&other.node, other.session);
    let name = NodeName("n".into());
    pool.drain_node(&name, true).await.unwrap();
    pool.draining(&node.node, true);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    assert_eq!(disk.left.load(Ordering::SeqCst), 0);
    assert_eq!(disk.stores.load(Ordering::SeqCst), 20);
}

/// The node offers its medium as read-only only after the drain has tried every store in vain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_moves_the_blocks_whose_stores_its_disk_refuses() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), lru()).await;
    let (node, disk) = twenty_blocks(&pool).await;
    disk.takes_no_writes.store(true, Ordering::SeqCst);
    disk.refuses.store(true, Ordering::SeqCst);
    pool.draining(&node.node, true);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    let moves = pool.replica_tasks(&[]);
    assert!(!moves.is_empty(), "told before the blocks moved");
}

/// A full disk refuses the drain's own stores. The blocks go to other nodes if the node waits for
/// that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_when_its_medium_takes_no_more_stores() {
    for (state, move_blocks) in [
        (MediumState::MediumReadOnly, false),
        (MediumState::MediumGone, true),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _store) = pool(directory.path(), lru()).await;
        let (node, disk) = twenty_blocks(&pool).await;
        disk.is_stalled.store(true, Ordering::SeqCst);
        pool.draining(&node.node, move_blocks);
        until("ordered", || disk.ordered.lock().len() == 20).await;
        offer(&pool, &node, &disk, state).await;
        disk.refuses.store(true, Ordering::SeqCst);
        disk.is_stalled.store(false, Ordering::SeqCst);
        until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
        assert_eq!(disk.left.load(Ordering::SeqCst), 20);
        let moves = pool.replica_tasks(&[]);
        assert_eq!(!moves.is_empty(), move_blocks, "{moves:?}");
    }
}

/// A copy by key names more blocks on a medium than memory takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_counts_the_blocks_that_do_not_come_from_media_to_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * BLOCK, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..40 {
        put_paced(&pool, number).await;
    }
    let keys: Vec<Key> = (0..40).map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let described = pool.describe(SPACE, &keys[..]);
    let has_copy = |at: &usize| {
        let block = described.get(*at).and_then(Option::as_ref);
        block.is_some_and(|block| block.replicas.iter().any(|r| r.segment.is_on_medium()))
    };
    let keys: Vec<KeyRef<'_>> = (0..40).filter(has_copy).map(|at| keys[at]).collect();
    assert!(keys.len() > 20, "{}", keys.len());
    let target = crate::support::replicas::join(&pool, "m", 2).await;
    let copy = Wish {
        change: Change::Copy,
        from: None,
        to: vec![NodeName("m".into())],
        evict: false,
    };
    let blocks = Blocks::Keys(SPACE, &keys[..]);
    let task = pool.change_replicas(copy, blocks).await.unwrap();
    let mut ended = task;
    until("ended", || {
        let pulls: Vec<_> = target.pulls.lock().drain(..).collect();
        for pull in pulls {
            pool.pulled(&target.node, &[(pull.ticket, Code::Ok)]);
        }
        ended = pool.replica_tasks(&[ended.id]).remove(0);
        ended.state != TaskState::Running
    })
    .await;
    assert_eq!(ended.state, TaskState::Failed, "{ended:?}");
    let counted = ended.changed + ended.gone + ended.failed;
    assert_eq!(counted, keys.len() as u64, "{ended:?}");
}

/// Puts on another node make eviction set the draining node's blocks aside. Loads there need the
/// room of these blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_on_a_node_that_drains_are_read_while_its_memory_is_full() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 8 * BLOCK, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..40 {
        put_paced(&pool, number).await;
    }
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    let there = on_medium_only(&pool, 0..40).await;
    assert!(there.len() > 20, "{there:?}");
    let other = Disk::new(2);
    let _other = join(&pool, "m", 2, 8 * BLOCK, &other, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&other).await;
    let mut filler = 1000..;
    for number in there.into_iter().take(12) {
        for later in filler.by_ref().take(16) {
            put_paced(&pool, later).await;
        }
        assert!(comes_back(&pool, number).await, "{number}");
    }
    assert_eq!(disk.left.load(Ordering::SeqCst), 0, "the drain lost none");
}

/// A load on a draining node takes room only from blocks that have copies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_a_node_that_drains_takes_no_room_of_blocks_without_copies() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 8 * BLOCK, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..40 {
        put_paced(&pool, number).await;
    }
    disk.refuses.store(true, Ordering::SeqCst);
    for number in 100..120 {
        put(&pool, number, &patient()).await;
    }
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    let keys: Vec<Key> = (100..120).map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let in_memory = || {
        let found = pool.lookup(SPACE, &keys[..], false).answer;
        found.iter().filter(|found| found.is_some()).count()
    };
    let before = in_memory();
    assert!(before >= 5, "{before}");
    let there = on_medium_only(&pool, 0..40).await;
    for number in there.into_iter().take(4) {
        let wanted = key(number);
        let wanted = [wanted.as_ref()];
        let patience = Duration::from_millis(300);
        let restored = pool.restore(SPACE, &wanted[..], patience).await;
        pool.end_restored(SPACE, &restored);
    }
    assert_eq!(in_memory(), before, "a drain loses no block");
}
