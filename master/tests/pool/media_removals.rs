//! Removals of blocks that are on their way to a medium, or back, and removals that the log refuses.

use crate::support::media::*;
use crate::support::{SPACE, pool};
use kvpool_master::Config;
use kvpool_master::pool::Pool;
use kvpool_types::{Code, Key, KeyRef};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The store of a block ends while the block's removal is being appended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_whose_removal_is_not_logged_yet_gets_no_copy() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..20 {
        put(&pool, number, &patient()).await;
    }
    disk.is_stalled.store(true, Ordering::SeqCst);
    pool.draining(&node.node, false);
    until("ordered", || disk.ordered.lock().len() == 20).await;
    let gate = store.gate.lock().await;
    let removal = {
        let pool = Arc::clone(&pool);
        tokio::spawn(async move {
            let keys: Vec<Key> = (0..10).map(key).collect();
            let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
            pool.remove(SPACE, &keys[..], true).await.unwrap().removed
        })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    disk.is_stalled.store(false, Ordering::SeqCst);
    until("stored", || disk.stores.load(Ordering::SeqCst) == 20).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(gate);
    assert_eq!(removal.await.unwrap(), 10);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let held = present(&pool, 0..20).await;
    assert_eq!(held[..10], [false; 10], "removed");
    pool.drop_node(&node.node);
    drop(node);
    let _node = join(&pool, "n", 2, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_media(&pool, 10..20).await;
    assert_eq!(present(&pool, 0..10).await, [false; 10], "removed");
}

/// A crash would bring the block back to the extent that it left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_a_load_replaced_is_free_after_the_load_is_logged() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    let version = put(&pool, 1, &patient()).await;
    let is_copied = || {
        let block = pool.describe(SPACE, &[key(1).as_ref()]).remove(0).unwrap();
        let mut replicas = block.replicas.iter();
        replicas.any(|replica| replica.segment.is_on_medium())
    };
    let mut number = 2;
    while !is_copied() {
        put_paced(&pool, number).await;
        number += 1;
    }
    let segment = {
        let segments = pool.placement.segments();
        let segment = segments.iter().next().map(Arc::clone);
        segment.unwrap()
    };
    // The replica in memory is under suspicion, so that a reader uses the copy.
    let reported = key(1);
    let report = (
        reported.as_ref(),
        version,
        segment.id,
        Code::ChecksumMismatch,
    );
    assert_eq!(pool.report(SPACE, &[report]), [Code::Ok]);
    // A record that waits at the gate would delay the record of the load.
    until("quiet", || pool.open_transfers() == 0).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let used = segment.used();
    let gate = store.gate.lock().await;
    assert!(comes_back(&pool, 1).await);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(segment.used(), used + BLOCK, "the old place is not free");
    drop(gate);
    until("free", || segment.used() == used).await;
}

/// Begins to load block 1. The task returns whether the block was loaded.
async fn load(pool: &Arc<Pool>) -> tokio::task::JoinHandle<bool> {
    let loading = Arc::clone(pool);
    let loading = tokio::spawn(async move { comes_back(&loading, 1).await });
    until("ordered", || pool.bytes_due() > 0).await;
    loading
}

/// Removes block 1. Returns how many blocks left.
async fn remove(pool: Arc<Pool>) -> u64 {
    let removed = pool.remove(SPACE, &[key(1).as_ref()], true).await;
    removed.unwrap().removed
}

/// A removal that is being appended also ends the load of the block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_whose_removal_is_not_logged_yet_does_not_come_back() {
    let cold = Cold::block(Config::default()).await;
    let Cold {
        pool, store, disk, ..
    } = &cold;
    disk.loads_stall.store(true, Ordering::SeqCst);
    let loading = load(pool).await;
    let gate = store.gate.lock().await;
    let removal = tokio::spawn(remove(Arc::clone(pool)));
    tokio::time::sleep(Duration::from_millis(50)).await;
    disk.loads_stall.store(false, Ordering::SeqCst);
    until("loaded", || disk.loads.load(Ordering::SeqCst) > 0).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(gate);
    assert_eq!(removal.await.unwrap(), 1);
    let _seen_or_not = loading.await.unwrap();
    assert_eq!(present(pool, 1..2).await, [false], "removed");
    assert!(!comes_back(pool, 1).await, "removed");
}

/// The record of a load is being appended when the block, which lies only on its medium, is
/// removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_comes_back_just_before_its_removal_is_removed_too() {
    let cold = Cold::block(Config::default()).await;
    let Cold {
        pool, store, disk, ..
    } = &cold;
    disk.loads_stall.store(true, Ordering::SeqCst);
    let loading = load(pool).await;
    let gate = store.gate.lock().await;
    // An append that waits: the records after it form one group.
    let other = {
        let pool = Arc::clone(pool);
        tokio::spawn(async move { put(&pool, 2, &patient()).await })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    disk.loads_stall.store(false, Ordering::SeqCst);
    until("loaded", || disk.loads.load(Ordering::SeqCst) > 0).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let removal = tokio::spawn(remove(Arc::clone(pool)));
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(gate);
    assert_eq!(removal.await.unwrap(), 1);
    let _seen_or_not = loading.await.unwrap();
    other.await.unwrap();
    assert_eq!(present(pool, 1..2).await, [false], "removed");
    assert!(!comes_back(pool, 1).await, "removed");
}

/// The log refuses the removal within the call, which holds locks then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_a_closed_log_refuses_ends() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    put(&pool, 1, &patient()).await;
    pool.retire().await;
    let removal = tokio::spawn(async move {
        let key = key(1);
        pool.remove(SPACE, &[key.as_ref()], true).await
    });
    let Ok(ended) = tokio::time::timeout(Duration::from_secs(20), removal).await else {
        // The runtime would wait for it.
        eprintln!("the removal hangs");
        std::process::abort();
    };
    let removed = ended.unwrap();
    assert!(removed.is_err(), "{removed:?}");
}
