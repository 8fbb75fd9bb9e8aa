//! Room for puts while nodes join, fall silent, or are fewer than the replicas wanted.

use crate::support::{SPACE, commit, item, join, patient_with_nodes, pool, reserve, reserve_with};
use kvpool_master::pool::{CommitItem, Pool, ReserveOptions};
use kvpool_master::{CommitAck, Config};
use kvpool_types::{Code, Key};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::timeout;

const KIB: u64 = 1 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

fn key(n: u64) -> Key {
    Key::parse(&format!("key-{n}")).unwrap()
}

async fn put(pool: &Arc<Pool>, n: u64, bytes: u64) {
    let granted = reserve(pool, &key(n), bytes).await.unwrap();
    assert_eq!(commit(pool, &key(n), bytes, granted).await, [Code::Ok]);
}

fn is_there(pool: &Pool, n: u64) -> bool {
    let key = key(n);
    pool.exist(SPACE, &[key.as_ref()][..], false).answer == [true]
}

/// A put reads the table of segments while a joining node waits to change it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn puts_go_on_while_nodes_join() {
    let directory = tempfile::tempdir().unwrap();
    // These nodes send no heartbeats, however slow the machine is.
    let config = patient_with_nodes();
    let (pool, _store) = pool(directory.path(), config).await;
    join(&pool, "first", 1, KIB << 10).await;
    put(&pool, 0, KIB).await;
    let done = Arc::new(AtomicBool::new(false));
    let putting: Vec<_> = (0..4)
        .map(|_| {
            let (pool, done) = (Arc::clone(&pool), Arc::clone(&done));
            tokio::task::spawn_blocking(move || {
                let runtime = tokio::runtime::Handle::current();
                while !done.load(Ordering::Relaxed) {
                    let present = runtime.block_on(reserve(&pool, &key(0), KIB));
                    assert_eq!(present.unwrap_err(), Code::Exists);
                }
            })
        })
        .collect();
    let joining = async {
        for n in 0..300u32 {
            join(&pool, &format!("node-{n}"), u128::from(n) + 2, KIB).await;
        }
    };
    timeout(PATIENCE, joining)
        .await
        .expect("the pool stands still");
    done.store(true, Ordering::Relaxed);
    for thread in putting {
        timeout(PATIENCE, thread).await.unwrap().unwrap();
    }
}

/// Every node gets a replica, and nothing is evicted for more replicas.
#[tokio::test(flavor = "multi_thread")]
async fn more_replicas_than_nodes_evict_nothing_extra() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    join(&pool, "only", 1, KIB << 10).await;
    let blocks = 16;
    for n in 0..blocks {
        put(&pool, n, 60 * KIB).await;
    }
    let options = ReserveOptions {
        hints: kvpool_master::placement::PlacementHints {
            replicas: usize::MAX,
            ..Default::default()
        },
        timeout: PATIENCE,
        ..ReserveOptions::default()
    };
    let granted = reserve_with(&pool, &key(blocks), 60 * KIB, &options).await;
    assert_eq!(granted.unwrap().replicas.len(), 1);
    let left = pool.blocks();
    assert!(left + 3 >= blocks, "{left} of {blocks} blocks are left");
}

/// Another replica would need a node as large as the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_gets_a_copy_on_each_node_that_it_fits_into() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    join(&pool, "small", 1, KIB << 10).await;
    join(&pool, "large", 2, KIB << 12).await;
    let options = ReserveOptions {
        hints: kvpool_master::placement::PlacementHints {
            replicas: 2,
            ..Default::default()
        },
        timeout: Duration::from_millis(50),
        ..ReserveOptions::default()
    };
    for (n, bytes, copies) in [(1, KIB << 11, 1), (2, KIB, 2)] {
        let granted = reserve_with(&pool, &key(n), bytes, &options).await;
        assert_eq!(granted.unwrap().replicas.len(), copies, "{bytes} bytes");
    }
}

/// Both nodes must have room, although one of them alone has enough for both replicas.
#[tokio::test(flavor = "multi_thread")]
async fn copies_find_room_on_a_full_node_beside_an_empty_one() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    join(&pool, "full", 1, KIB << 10).await;
    for n in 0..16 {
        put(&pool, n, 60 * KIB).await;
    }
    join(&pool, "empty", 2, KIB << 12).await;
    let options = ReserveOptions {
        hints: kvpool_master::placement::PlacementHints {
            replicas: 2,
            ..Default::default()
        },
        timeout: PATIENCE,
        ..ReserveOptions::default()
    };
    for n in 100..108 {
        let granted = reserve_with(&pool, &key(n), 60 * KIB, &options).await;
        assert_eq!(granted.unwrap().replicas.len(), 2, "put {n}");
    }
}

/// The only node that is large enough may return later.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_fits_only_an_absent_node_gets_a_retryable_code() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    join(&pool, "small", 1, KIB << 10).await;
    let large = join(&pool, "large", 2, KIB << 12).await;
    pool.draining(&large, false);
    let brief = ReserveOptions {
        timeout: Duration::from_millis(50),
        ..ReserveOptions::default()
    };
    let away = reserve_with(&pool, &key(1), KIB << 11, &brief).await;
    assert_eq!(away.unwrap_err(), Code::NoNodes);
    let never = reserve_with(&pool, &key(2), KIB << 13, &brief).await;
    assert_eq!(never.unwrap_err(), Code::TooLarge);
}

/// A returning node still has its blocks, although other blocks were written meanwhile and its
/// blocks are the oldest.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_a_silent_node_are_not_evicted_for_room_on_others() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        heartbeat_interval: Duration::from_millis(100),
        suspect_after: Duration::from_millis(400),
        ..Config::default()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    let silent = join(&pool, "silent", 1, KIB << 10).await;
    for n in 0..10 {
        put(&pool, n, 60 * KIB).await;
    }
    let busy = join(&pool, "busy", 2, KIB << 10).await;
    let (heard, hearing) = (Arc::clone(&pool), Arc::clone(&busy));
    let beating = tokio::spawn(async move {
        loop {
            heard.heard(&hearing, None);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let suspect = async {
        while is_there(&pool, 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, suspect).await.unwrap();
    let before = pool.blocks();
    // Three times the capacity of the other node.
    for n in 100..150 {
        put(&pool, n, 60 * KIB).await;
    }
    assert!(
        pool.blocks() > before,
        "something was evicted, and not these"
    );
    pool.heard(&silent, None);
    let there: Vec<bool> = (0..10).map(|n| is_there(&pool, n)).collect();
    assert_eq!(there, [true; 10]);
    beating.abort();
}

/// The blocks of a chain lie on both nodes. The blocks on the node that takes none keep no others
/// in memory.
#[tokio::test(flavor = "multi_thread")]
async fn chains_over_a_node_that_takes_no_blocks_make_room_on_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let leaves = join(&pool, "leaves", 1, KIB << 10).await;
    join(&pool, "stays", 2, KIB << 10).await;
    // Chains of four blocks fill both nodes.
    for n in 0..28 {
        let granted = reserve(&pool, &key(n), 60 * KIB).await.unwrap();
        let parent = (n % 4 > 0).then(|| key(n - 1));
        let block = CommitItem {
            parent,
            ..item(&key(n), 60 * KIB, granted)
        };
        assert_eq!(pool.commit(SPACE, vec![block]).await, [Code::Ok]);
    }
    pool.draining(&leaves, false);
    // Twice as many blocks as the other node holds.
    for n in 100..128 {
        put(&pool, n, 60 * KIB).await;
    }
}

/// A crash would bring back the version that the put replaced.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_replaced_from_memory_is_freed_after_the_commit_is_logged() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        commit_ack: CommitAck::Memory,
        ..Config::default()
    };
    let (pool, store) = pool(directory.path(), config).await;
    join(&pool, "n", 1, KIB << 10).await;
    put(&pool, 1, 500 * KIB).await;
    let shut = store.gate.lock().await;
    let options = ReserveOptions {
        upsert: true,
        ..ReserveOptions::default()
    };
    let granted = reserve_with(&pool, &key(1), 400 * KIB, &options)
        .await
        .unwrap();
    assert_eq!(commit(&pool, &key(1), 400 * KIB, granted).await, [Code::Ok]);
    let brief = ReserveOptions {
        timeout: Duration::from_millis(500),
        ..ReserveOptions::default()
    };
    let early = reserve_with(&pool, &key(2), 450 * KIB, &brief).await;
    assert_eq!(
        early.unwrap_err(),
        Code::Full,
        "where version 1 may yet be read back"
    );
    drop(shut);
    put(&pool, 2, 450 * KIB).await;
}
