//! Drains to nodes that are full: which blocks leave the target, and which blocks stay behind.

use crate::support::replicas::*;
use crate::support::{
    SPACE, commit, full_and_patient, item, pool, pool_at, registration, reserve_with,
};
use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, Clock, ManualClock};
use kvpool_master::pool::{Pool, TaskView};
use kvpool_types::{Code, Key, KeyRef, Length, NodeName, SegmentId};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The number of blocks that a node of [`join`] takes.
const BLOCKS_OF_NODE: u8 = 64;

/// Puts blocks on node `b`.
async fn put_on_b(pool: &Arc<Pool>, numbers: Range<u8>) {
    for number in numbers {
        let block = key(number);
        let granted = reserve_with(pool, &block, BLOCK, &on("b")).await.unwrap();
        assert_eq!(commit(pool, &block, BLOCK, granted).await, [Code::Ok]);
    }
}

/// The blocks that node `b` alone has.
fn only_on_b(pool: &Arc<Pool>, numbers: Range<u8>) -> Vec<u8> {
    let is_there = |number: &u8| holders(pool, &key(*number)) == ["b"];
    numbers.filter(is_there).collect()
}

/// The number of blocks of node `a` in [`drain_to_newer`].
const OLD: u8 = 50;
/// The number of all blocks there.
const ALL: u8 = 70;

/// A pool in which node `a` drains.
struct Draining {
    pool: Arc<Pool>,
    a: Node,
    b: Node,
    task: TaskView,
    _directory: tempfile::TempDir,
}

/// Node `a` drains to node `b`, whose blocks are newer. The moves have taken all room of `b`, and wait for answers.
async fn drain_to_newer() -> Draining {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        eviction_ratio: 0.2,
        ..full_and_patient(Duration::from_millis(10))
    };
    let (pool, _) = pool(directory.path(), config).await;
    let a = join(&pool, "a", 1).await;
    for number in 0..OLD {
        put(&pool, &key(number)).await;
    }
    let b = join(&pool, "b", 2).await;
    put_on_b(&pool, OLD..ALL).await;
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let room = BLOCKS_OF_NODE - (ALL - OLD);
    let fills = || b.pulls.lock().len() == usize::from(room);
    crate::support::media::until("moves take all room", fills).await;
    Draining {
        pool,
        a,
        b,
        task,
        _directory: directory,
    }
}

/// The moved blocks take the last room before they arrive. Until then the target has newer blocks only.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_to_a_node_with_newer_blocks_keeps_the_newest_blocks() {
    let draining = drain_to_newer().await;
    let Draining { pool, b, task, .. } = &draining;
    let room = BLOCKS_OF_NODE - (ALL - OLD);
    // The evictor looks for work twice in this time.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let newer: Vec<u8> = (OLD..ALL).collect();
    assert_eq!(only_on_b(pool, OLD..ALL), newer);
    let pulls = std::mem::take(&mut *b.pulls.lock());
    let done = pulls.iter().map(|pull| (pull.ticket, Code::Ok));
    pool.pulled(&b.node, &done.collect::<Vec<_>>());
    let ended = end(pool, task).await;
    let (moved, left) = (u64::from(room), u64::from(OLD - room));
    assert_eq!((ended.changed, ended.failed), (moved, left), "{ended:?}");
    // A round of eviction frees the reserve again.
    let frees = || used_on(pool, &b.node) < u64::from(BLOCKS_OF_NODE - 5) * BLOCK;
    crate::support::media::until("eviction frees the reserve", frees).await;
    let kept = only_on_b(pool, 0..ALL);
    let newest: Vec<u8> = (kept[0]..ALL).collect();
    assert_eq!(kept, newest, "an older block stays in place of a newer one");
    assert!(kept.len() > newer.len(), "{kept:?}");
}

/// The target has no answer for pulls whose source has died.
#[tokio::test(flavor = "multi_thread")]
async fn a_pull_from_a_node_without_a_session_delays_no_eviction() {
    let draining = drain_to_newer().await;
    let Draining { pool, a, b, .. } = &draining;
    pool.detach(&a.node, a.session);
    let frees = || used_on(pool, &b.node) < u64::from(BLOCKS_OF_NODE - 5) * BLOCK;
    crate::support::media::until("eviction frees the reserve", frees).await;
}

/// Blocks of a chain return to the queues of eviction after each attempt to make room elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_evicts_no_block_that_was_used_later() {
    for is_chain in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let config = full_and_patient(Duration::from_millis(10));
        let (pool, _) = pool(directory.path(), config).await;
        let _a = join(&pool, "a", 1).await;
        for number in 1..=3 {
            let block = key(number);
            let granted = reserve_with(&pool, &block, BLOCK, &on("a")).await.unwrap();
            let mut item = item(&block, BLOCK, granted);
            item.parent = (is_chain && number > 1).then(|| key(1));
            assert_eq!(pool.commit(SPACE, vec![item]).await, [Code::Ok]);
        }
        let b = join(&pool, "b", 2).await;
        let later = 10..10 + BLOCKS_OF_NODE;
        put_on_b(&pool, later.clone()).await;
        assert_eq!(used_on(&pool, &b.node), 4 * MIB);
        let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
        let ended = end(&pool, &task).await;
        assert_eq!((ended.changed, ended.failed), (0, 3), "{ended:?}");
        let (code, why) = ended.failure.unwrap();
        assert_eq!(code, Code::Full);
        assert!(why.contains("blocks that were used later"), "{why}");
        let there = only_on_b(&pool, later.clone());
        assert_eq!(there.len(), later.len(), "{is_chain}");
    }
}

/// The process of the node has died. The master does not know yet whether the node comes back.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_of_a_node_without_a_session_evicts_nothing_before_the_node_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let config = full_and_patient(Duration::from_millis(10));
    let (pool, _) = pool(directory.path(), config).await;
    let b = join(&pool, "b", 2).await;
    put_on_b(&pool, 0..BLOCKS_OF_NODE).await;
    let a = join(&pool, "a", 1).await;
    let moved = key(100);
    let granted = reserve_with(&pool, &moved, BLOCK, &on("a")).await.unwrap();
    assert_eq!(commit(&pool, &moved, BLOCK, granted).await, [Code::Ok]);
    pool.detach(&a.node, a.session);
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    // The mover looks at the block every 50 ms.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(b.pulls.lock().is_empty(), "nothing can be read");
    assert_eq!(pool.counters()["blocks_evicted_total"], 0);
    let a = join(&pool, "a", 1).await;
    let first = b.next().await;
    // The session ends again before the pull does.
    pool.detach(&a.node, a.session);
    pool.pulled(&b.node, &[(first.ticket, Code::Unreachable)]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(b.pulls.lock().is_empty(), "nothing can be read again");
    let _again = join(&pool, "a", 1).await;
    let second = b.next().await;
    pool.pulled(&b.node, &[(second.ticket, Code::Ok)]);
    let ended = end(&pool, &task).await;
    assert_eq!((ended.changed, ended.failed), (1, 0), "{ended:?}");
    assert_eq!(holders(&pool, &moved), ["b"]);
}

/// Uses blocks. Each gets a short lease.
fn use_blocks(pool: &Arc<Pool>, numbers: impl Iterator<Item = u8>) {
    let keys: Vec<Key> = numbers.map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let found = pool.lookup(SPACE, &keys[..], true).answer;
    assert!(found.iter().all(Option::is_some));
}

/// The segment of a block's only replica.
fn segment_of(pool: &Arc<Pool>, number: u8) -> SegmentId {
    let found = pool.lookup(SPACE, &[key(number).as_ref()][..], false);
    found.answer[0].as_ref().unwrap().replicas[0].segment
}

/// Puts blocks on node `a`.
async fn put_on_a(pool: &Arc<Pool>, numbers: &[u8]) {
    for number in numbers {
        let block = key(*number);
        let granted = reserve_with(pool, &block, BLOCK, &on("a")).await.unwrap();
        assert_eq!(commit(pool, &block, BLOCK, granted).await, [Code::Ok]);
    }
}

/// The blocks on one segment of the target were used later than the moved block, those on the other were not.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_evicts_the_oldest_blocks_of_its_target_on_whichever_segment_they_are() {
    const MOVED: u8 = 100;
    for newer in [0_usize, 1] {
        let directory = tempfile::tempdir().unwrap();
        let config = full_and_patient(Duration::from_millis(10));
        let (pool, _) = pool(directory.path(), config).await;
        let mut with_two = registration("b", 2, 2 * MIB);
        with_two.segments.push((Length(2 * MIB), None));
        let b = join_fencing(&pool, &with_two, Duration::ZERO).await;
        put_on_b(&pool, 0..BLOCKS_OF_NODE).await;
        assert_eq!(used_on(&pool, &b.node), 4 * MIB);
        let segments = b.node.segments();
        assert_eq!(segments.len(), 2);
        let _a = join(&pool, "a", 1).await;
        put_on_a(&pool, &[MOVED]).await;
        let is_newer = |number: &u8| segment_of(&pool, *number) == segments[newer];
        let used: Vec<u8> = (0..BLOCKS_OF_NODE).filter(is_newer).collect();
        assert_eq!(used.len(), usize::from(BLOCKS_OF_NODE / 2));
        use_blocks(&pool, used.iter().copied());
        // The leases end.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
        let pull = b.next().await;
        pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
        let ended = end(&pool, &task).await;
        assert_eq!((ended.changed, ended.failed), (1, 0), "{ended:?}");
        assert_eq!(holders(&pool, &key(MOVED)), ["b"]);
        let there = only_on_b(&pool, 0..BLOCKS_OF_NODE);
        let stays = |number: &u8| there.contains(number);
        assert!(used.iter().all(stays), "a newer block left: {there:?}");
    }
}

/// The blocks on the first target were used later than the moved block, those on the other were not.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_evicts_the_oldest_blocks_of_any_target() {
    const MOVED: u8 = 200;
    let directory = tempfile::tempdir().unwrap();
    let config = full_and_patient(Duration::from_millis(10));
    let (pool, _) = pool(directory.path(), config).await;
    // Both targets are full. The one that joined first is tried first.
    let b = join(&pool, "b", 2).await;
    let c = join(&pool, "c", 3).await;
    let newer = 0..BLOCKS_OF_NODE;
    for number in BLOCKS_OF_NODE..2 * BLOCKS_OF_NODE {
        let block = key(number);
        let granted = reserve_with(&pool, &block, BLOCK, &on("c")).await.unwrap();
        assert_eq!(commit(&pool, &block, BLOCK, granted).await, [Code::Ok]);
    }
    let _a = join(&pool, "a", 1).await;
    put_on_a(&pool, &[MOVED]).await;
    put_on_b(&pool, newer.clone()).await;
    for full in [&b, &c] {
        assert_eq!(used_on(&pool, &full.node), 4 * MIB);
    }
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let pull = c.next().await;
    pool.pulled(&c.node, &[(pull.ticket, Code::Ok)]);
    let ended = end(&pool, &task).await;
    assert_eq!((ended.changed, ended.failed), (1, 0), "{ended:?}");
    assert_eq!(holders(&pool, &key(MOVED)), ["c"]);
    let there = only_on_b(&pool, newer.clone());
    assert_eq!(there, newer.collect::<Vec<u8>>(), "a newer block left");
}

/// The target fences slowly. Its other blocks were used later than the moved ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_moved_block_waits_for_its_room_that_is_still_in_quarantine() {
    const OLDER: u8 = 100;
    const MOVED: u8 = 101;
    let directory = tempfile::tempdir().unwrap();
    // No extent counts as stuck while the clock stands still.
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let timed = Arc::clone(&clock) as Arc<dyn Clock>;
    let config = full_and_patient(Duration::from_millis(10));
    let (pool, _) = pool_at(directory.path(), config, timed).await;
    let of_b = registration("b", 2, 4 * MIB);
    let b = join_fencing(&pool, &of_b, Duration::from_millis(300)).await;
    put_on_b(&pool, 0..BLOCKS_OF_NODE).await;
    assert_eq!(used_on(&pool, &b.node), 4 * MIB);
    let _a = join(&pool, "a", 1).await;
    put_on_a(&pool, &[OLDER, MOVED]).await;
    // One block of the target may leave. The newest block moves first.
    use_blocks(&pool, 1..BLOCKS_OF_NODE);
    clock.advance(Duration::from_secs(1));
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    let ended = end(&pool, &task).await;
    assert_eq!((ended.changed, ended.failed), (1, 1), "{ended:?}");
    assert_eq!(holders(&pool, &key(MOVED)), ["b"]);
    let newer: Vec<u8> = (1..BLOCKS_OF_NODE).collect();
    assert_eq!(only_on_b(&pool, 0..BLOCKS_OF_NODE), newer);
}
