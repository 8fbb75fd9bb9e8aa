//! Answers about removed blocks that would return if the master died now.

use crate::support::{Gated, SPACE, commit, item, join, reserve};
use kvpool_master::Config;
use kvpool_master::membership::StoreNode;
use kvpool_master::pool::{Pool, Removal, RemoveReport, ReserveOptions};
use kvpool_master::store::record::{Record, decode};
use kvpool_master::store::{LogSeq, MetadataStore};
use kvpool_types::{Code, Key, KeyRef, Length};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// A pool of one node of 1 MiB, and its store.
async fn pool(directory: &Path) -> (Arc<Pool>, Arc<Gated>) {
    let (pool, store) = crate::support::pool(directory, Config::default()).await;
    join(&pool, "n", 7, 1 << 20).await;
    (pool, store)
}

async fn put(pool: &Arc<Pool>, key: &Key, bytes: u64) -> Result<(), Code> {
    let granted = reserve(pool, key, bytes).await?;
    assert_eq!(commit(pool, key, bytes, granted).await, [Code::Ok]);
    Ok(())
}

/// Joins a node of 256 MiB and puts `blocks` blocks of 64 bytes on it. Returns the node and the
/// keys.
async fn join_filled(pool: &Arc<Pool>, blocks: usize) -> (Arc<StoreNode>, Vec<Key>) {
    let node = join(pool, "n", 7, 256 << 20).await;
    let keys: Vec<Key> = (0..blocks)
        .map(|number| Key::parse(&number.to_string()).unwrap())
        .collect();
    let asked: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let lengths = vec![Length(64); blocks];
    let granted = pool
        .reserve(SPACE, &asked[..], &lengths, &ReserveOptions::default())
        .await;
    let granted = granted.into_iter().map(Result::unwrap);
    let items = keys.iter().zip(granted).map(|(k, g)| item(k, 64, g));
    pool.commit(SPACE, items.collect()).await;
    (node, keys)
}

type Removing = tokio::task::JoinHandle<Result<RemoveReport, Code>>;

fn remove(pool: &Arc<Pool>, key: &Key) -> Removing {
    let (pool, key) = (Arc::clone(pool), key.clone());
    tokio::spawn(async move { pool.remove(SPACE, &[key.as_ref()], true).await })
}

fn is_there(pool: &Pool, key: &Key) -> bool {
    let keys = [key.as_ref()];
    pool.exist(SPACE, &keys[..], false).answer == [true]
}

/// A reader would see the block again if the master died now.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_there_until_its_removal_is_durable() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path()).await;
    let key = Key::parse("a").unwrap();
    put(&pool, &key, 100).await.unwrap();
    let shut = store.gate.lock().await;
    let (first, second) = (remove(&pool, &key), remove(&pool, &key));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(is_there(&pool, &key), "it was gone too early");
    let again = reserve(&pool, &key, 100).await;
    assert_eq!(again.unwrap_err(), Code::Exists);
    assert!(!first.is_finished() && !second.is_finished());
    drop(shut);
    let codes = [
        first.await.unwrap().unwrap().codes,
        second.await.unwrap().unwrap().codes,
    ]
    .concat();
    let one_took_it = [[Code::Ok, Code::Missing], [Code::Missing, Code::Ok]];
    assert!(one_took_it.iter().any(|may| codes == may), "{codes:?}");
    assert!(!is_there(&pool, &key));
    put(&pool, &key, 100).await.unwrap();
}

/// A removal that meets a newer version of the block removes that version too.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_was_replaced_while_it_was_removed_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path()).await;
    let key = Key::parse("a").unwrap();
    put(&pool, &key, 100).await.unwrap();
    let options = ReserveOptions {
        upsert: true,
        ..ReserveOptions::default()
    };
    let keys = [key.as_ref()];
    let granted = pool
        .reserve(SPACE, &keys[..], &[Length(100)], &options)
        .await;
    let granted = granted.into_iter().next().unwrap().unwrap();
    let shut = store.gate.lock().await;
    // The first group of the log waits at the gate, and later groups wait behind it.
    let replacing = commit(&pool, &key, 100, granted);
    let replacing = tokio::spawn(replacing);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let removing = remove(&pool, &key);
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(shut);
    assert_eq!(replacing.await.unwrap(), [Code::Ok]);
    assert_eq!(removing.await.unwrap().unwrap().codes, [Code::Ok]);
    assert!(!is_there(&pool, &key));
}

/// Waits until the block has left for another one.
async fn wait_for_eviction(pool: &Arc<Pool>, key: &Key) {
    let (crowding, other) = (Arc::clone(pool), Key::parse("b").unwrap());
    let _waits = tokio::spawn(async move { reserve(&crowding, &other, 800 << 10).await });
    let evicted = async {
        while is_there(pool, key) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), evicted).await.unwrap();
}

/// A remove that reports a missing block gives the same guarantee as a remove that removes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_remove_reports_a_missing_block_after_its_eviction_is_durable() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path()).await;
    let key = Key::parse("a").unwrap();
    put(&pool, &key, 800 << 10).await.unwrap();
    let shut = store.gate.lock().await;
    wait_for_eviction(&pool, &key).await;
    let mut removing = remove(&pool, &key);
    let early = timeout(Duration::from_millis(200), &mut removing).await;
    assert!(early.is_err(), "it was told before: {early:?}");
    drop(shut);
    assert_eq!(removing.await.unwrap().unwrap().codes, [Code::Missing]);
}

/// The same guarantee for a removal that names no keys.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_of_all_blocks_ends_after_earlier_evictions_are_durable() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path()).await;
    let key = Key::parse("a").unwrap();
    put(&pool, &key, 800 << 10).await.unwrap();
    let shut = store.gate.lock().await;
    wait_for_eviction(&pool, &key).await;
    let all = Arc::clone(&pool);
    let mut removing =
        tokio::spawn(async move { all.remove_all(&Removal::Everything, true).await });
    let early = timeout(Duration::from_millis(200), &mut removing).await;
    assert!(early.is_err(), "it ended before: {early:?}");
    drop(shut);
    assert_eq!(removing.await.unwrap().unwrap().removed, 0);
}

/// The same guarantee for a block that was lost with its node.
#[tokio::test(flavor = "multi_thread")]
async fn a_remove_reports_a_missing_block_after_the_loss_of_its_node_is_durable() {
    const BLOCKS: usize = 100_000;
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = crate::support::pool(directory.path(), Config::default()).await;
    let (node, keys) = join_filled(&pool, BLOCKS).await;
    // The block is the first to leave.
    let first = [keys[0].as_ref()];
    let dropping = std::thread::spawn({
        let pool = Arc::clone(&pool);
        move || pool.drop_node(&node)
    });
    while pool.describe(SPACE, &first[..])[0].is_some() {
        std::thread::yield_now();
    }
    let removed = pool.remove(SPACE, &first, false).await.unwrap();
    assert_eq!(removed.codes, [Code::Missing]);
    let logged = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
    let is_logged = logged.iter().any(|(_, group)| {
        let records = decode(group).unwrap().records;
        records.iter().any(|r| matches!(r, Record::SegmentGone(_)))
    });
    assert!(is_logged, "it would be back");
    dropping.join().unwrap();
}

/// A node may have millions of blocks, and registrations wait for each other.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_dropped_without_waiting_for_its_blocks_to_leave_the_directory() {
    const BLOCKS: usize = 100_000;
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = crate::support::pool(directory.path(), Config::default()).await;
    let (node, keys) = join_filled(&pool, BLOCKS).await;
    let asked: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    pool.drop_node(&node);
    let left = pool.blocks();
    assert!(left > 0, "it waited until all {BLOCKS} blocks had left");
    // No lookup returns the remaining blocks.
    let found = pool.exist(SPACE, &asked[..], false).answer;
    assert!(found.iter().all(|found| !found));
    let swept = async {
        while pool.blocks() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(60), swept).await.unwrap();
}

/// The block was recorded and left at once, and so did the key's earlier block. A code of a put that changed nothing
/// would be wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_is_answered_as_lost_with_the_node_that_was_dropped_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = crate::support::pool(directory.path(), Config::default()).await;
    let node = join(&pool, "n", 7, 1 << 20).await;
    let key = Key::parse("a").unwrap();
    let granted = reserve(&pool, &key, 64).await.unwrap();
    let shut = store.gate.lock().await;
    let (committing, of) = (Arc::clone(&pool), key.clone());
    let committed = tokio::spawn(async move { commit(&committing, &of, 64, granted).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    pool.drop_node(&node);
    drop(shut);
    let codes = timeout(Duration::from_secs(20), committed).await;
    assert_eq!(codes.unwrap().unwrap(), [Code::Unreachable]);
    assert_eq!(pool.blocks(), 0);
}
