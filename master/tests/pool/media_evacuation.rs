//! A node that does not come back: the blocks that only its medium holds move to other nodes and their media.

use crate::support::media::*;
use crate::support::pool;
use kvpool_master::Config;
use kvpool_master::membership::StoreNode;
use kvpool_master::pool::{Blocks, Change, OfferedMedium, Pool, TaskState, TaskView, Wish};
use kvpool_proto::MediumState;
use kvpool_types::{Code, NodeName};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// One and a half times the memory of a node.
const BLOCKS: u64 = 12 * MIB / BLOCK;

/// The move of the blocks that only media of node `a` hold.
fn off_media() -> Wish {
    Wish {
        change: Change::Move,
        from: Some(NodeName("a".into())),
        to: Vec::new(),
        evict: true,
    }
}

async fn ended(pool: &Arc<Pool>, task: TaskView) -> TaskView {
    let mut last = task;
    for _ in 0..6000 {
        if last.state != TaskState::Running {
            return last;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        last = pool.replica_tasks(&[last.id]).remove(0);
    }
    panic!("the task has not ended within a minute: {last:?}");
}

/// Repeats the move until it changes nothing more, as an operator's command does.
async fn empty_media(pool: &Arc<Pool>) -> TaskView {
    for _ in 0..20 {
        let begun = pool.change_replicas(off_media(), Blocks::OnlyOnMedia).await;
        let task = ended(pool, begun.unwrap()).await;
        if task.changed == 0 {
            return task;
        }
    }
    panic!("the medium is never empty");
}

async fn drain(pool: &Arc<Pool>, node: &Arc<StoreNode>, force: bool) {
    let task = pool.drain_node_and_media(&node.name, force).await.unwrap();
    ended(pool, task).await;
}

/// A pool whose node `a` has more blocks than memory, and its disk. A node `b` with a disk has none.
async fn cold_and_empty(pool: &Arc<Pool>) -> (Node, Arc<Disk>, Node, Arc<Disk>) {
    let (one, other) = (Disk::new(1), Disk::new(2));
    other.pulls.store(true, Ordering::SeqCst);
    let a = join(pool, "a", 1, 8 * MIB, &one, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&one).await;
    for number in 0..BLOCKS {
        put_paced(pool, number).await;
    }
    let b = join(pool, "b", 2, 8 * MIB, &other, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&other).await;
    (a, one, b, other)
}

/// The blocks that were there before come back.
async fn check(pool: &Arc<Pool>, before: &[bool]) {
    for (number, _) in (0..BLOCKS).zip(before).filter(|(_, is_there)| **is_there) {
        assert!(comes_back(pool, number).await, "block {number}");
        // What comes back takes the memory of blocks whose copies must be there first.
        until("stored", || pool.bytes_due() == 0).await;
    }
}

/// The other node has less memory than the blocks need, so its medium must take them. With the policy `lru`, eviction
/// takes old blocks before their turn to be stored would come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_on_the_medium_of_a_node_that_does_not_come_back_move_to_another_medium() {
    for (config, is_lru) in [(Config::default(), false), (lru(), true)] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _store) = pool(directory.path(), config).await;
        let (a, one, b, other) = cold_and_empty(&pool).await;
        let before = present(&pool, 0..BLOCKS).await;
        assert!(before.iter().filter(|is_there| **is_there).count() > 150);
        drain(&pool, &a.node, false).await;
        until("counted", || a.node.left_blocks() > Some(0)).await;
        assert_eq!(pool.state_label(&a.node), "draining");
        let last = empty_media(&pool).await;
        assert_eq!((last.failed, last.failure), (0, None));
        let is_drained = || pool.state_label(&a.node) == "drained";
        until("drained", || {
            is_drained() && a.node.left_blocks() == Some(0)
        })
        .await;
        pool.drop_node(&a.node);
        drop(a);
        let after = present(&pool, 0..BLOCKS).await;
        assert_eq!(before, after, "blocks went with the node");
        if !is_lru {
            check(&pool, &before).await;
        }
        for disk in [&one, &other] {
            assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
        }
        drop(b);
    }
}

/// Nothing is lost while the node is there, and the caller learns how many blocks leave with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_on_media_that_no_node_takes_stay_and_are_counted() {
    let cold = Cold::block(Config::default()).await;
    let (pool, node) = (&cold.pool, &cold.node.node);
    let wish = || Wish {
        from: Some(node.name.clone()),
        ..off_media()
    };
    let refused = pool.change_replicas(wish(), Blocks::OnlyOnMedia).await;
    assert_eq!(refused.unwrap_err().code, Code::NotDraining);
    drain(pool, node, true).await;
    let begun = pool.change_replicas(wish(), Blocks::OnlyOnMedia).await;
    let task = ended(pool, begun.unwrap()).await;
    assert_eq!((task.blocks, task.failed, task.changed), (1, 1, 0));
    assert_eq!(task.failure.unwrap().0, Code::Unreachable);
    assert!(comes_back(pool, 1).await);
    assert_eq!(cold.disk.wrong.load(Ordering::SeqCst), 0);
}

/// The budget of the other medium is one byte a day, so it takes one block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_off_a_medium_waits_for_the_write_budget_of_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), lru()).await;
    let (one, other) = (Disk::new(1), Disk::new(2));
    other.pulls.store(true, Ordering::SeqCst);
    other.budget.store(1, Ordering::SeqCst);
    let a = join(&pool, "a", 1, 8 * MIB, &one, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&one).await;
    for number in 0..BLOCKS {
        put_paced(&pool, number).await;
    }
    let before = present(&pool, 0..BLOCKS).await;
    let _b = join(&pool, "b", 2, 32 * MIB, &other, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&other).await;
    drain(&pool, &a.node, false).await;
    let begun = pool.change_replicas(off_media(), Blocks::OnlyOnMedia).await;
    let task = begun.unwrap().id;
    let view = || pool.replica_tasks(&[task]).remove(0);
    until("blocks have moved", || view().changed > 8).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(other.stores.load(Ordering::SeqCst) <= 1);
    assert_eq!(view().state, TaskState::Running);
    // No block that waits has lost its copy.
    assert_eq!(present(&pool, 0..BLOCKS).await, before);
    // The operator says that the medium comes back after all.
    let begun = Instant::now();
    let plain = pool.drain_node(&a.node.name, false).await.unwrap();
    ended(&pool, plain).await;
    ended(&pool, view()).await;
    assert!(begun.elapsed() < Duration::from_secs(5));
}

/// The drain is cancelled while blocks are loaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_drain_leaves_the_blocks_of_a_medium_where_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let (a, one, _b, _other) = cold_and_empty(&pool).await;
    let before = present(&pool, 0..BLOCKS).await;
    drain(&pool, &a.node, false).await;
    one.loads_stall.store(true, Ordering::SeqCst);
    let begun = pool.change_replicas(off_media(), Blocks::OnlyOnMedia).await;
    let task = begun.unwrap();
    assert!(task.blocks > 0, "{task:?}");
    assert!(pool.undrain_node(&a.node.name).await.unwrap());
    let cancelled = ended(&pool, task).await;
    assert_eq!(cancelled.state, TaskState::Cancelled, "{cancelled:?}");
    one.loads_stall.store(false, Ordering::SeqCst);
    check(&pool, &before).await;
}

/// The next leader has heard of the drain from the node alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_media_leave_is_drained_under_no_leader_while_blocks_are_only_there() {
    let cold = Cold::block(Config::default()).await;
    let (pool, node) = (&cold.pool, &cold.node.node);
    pool.out_of_service(node, cold.node.session, false);
    let is_drained = || pool.state_label(node) == "drained";
    until("drained, with its medium", is_drained).await;
    // Of an earlier session.
    pool.media_leave(node, cold.node.session - 1);
    until("drained still", is_drained).await;
    pool.media_leave(node, cold.node.session);
    until("the block is counted", || node.left_blocks() == Some(1)).await;
    assert_eq!(pool.state_label(node), "draining");
    let shown = |left| move || pool.counters().get("node_left_blocks") == Some(&left);
    until("the metric has the block", shown(1)).await;
    assert!(pool.undrain_node(&node.name).await.unwrap());
    assert_eq!(node.left_blocks(), None);
    until("the metric has none", shown(0)).await;
    pool.out_of_service(node, cold.node.session, false);
    until("drained again, with its medium", is_drained).await;
}

/// A disk that takes no more stores is a reason to retire its node. The task of the stop moves nothing off the disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stops_is_told_while_blocks_are_only_on_its_medium_that_leaves() {
    let cold = Cold::block(Config::default()).await;
    let (pool, node, disk) = (&cold.pool, &cold.node.node, &cold.disk);
    drain(pool, node, true).await;
    let shut = OfferedMedium {
        state: MediumState::MediumReadOnly,
        ..disk.offer(32 * MIB, 4 * MIB)
    };
    let offered = pool.media_offered(node, cold.node.session, vec![shut]);
    offered.await.unwrap();
    disk.is_demoted.store(false, Ordering::SeqCst);
    pool.draining(node, true);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    assert_eq!(disk.left.load(Ordering::SeqCst), 1);
}

/// A caller takes the count for final when the task has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_off_media_voids_the_count_of_the_blocks_that_are_left() {
    let cold = Cold::block(Config::default()).await;
    let (pool, node) = (&cold.pool, &cold.node.node);
    drain(pool, node, true).await;
    until("counted", || node.left_blocks() == Some(1)).await;
    let wish = Wish {
        from: Some(node.name.clone()),
        ..off_media()
    };
    let begun = pool.change_replicas(wish, Blocks::OnlyOnMedia).await;
    assert_eq!(node.left_blocks(), None);
    ended(pool, begun.unwrap()).await;
    until("counted again", || node.left_blocks() == Some(1)).await;
}

/// The leader that was told so may have died before it told the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_off_media_says_that_the_media_leave() {
    let cold = Cold::block(Config::default()).await;
    let (pool, node) = (&cold.pool, &cold.node.node);
    let task = pool.drain_node(&node.name, true).await.unwrap();
    ended(pool, task).await;
    let is_drained = || pool.state_label(node) == "drained";
    until("drained, with its medium", is_drained).await;
    let wish = Wish {
        from: Some(node.name.clone()),
        ..off_media()
    };
    let begun = pool.change_replicas(wish, Blocks::OnlyOnMedia).await;
    ended(pool, begun.unwrap()).await;
    until("the block is counted", || node.left_blocks() == Some(1)).await;
    assert!(!is_drained());
}

/// It comes back with its media.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_block_moves_off_the_media_of_a_node_that_only_stops() {
    let cold = Cold::block(Config::default()).await;
    let (pool, node) = (&cold.pool, &cold.node.node);
    pool.draining(node, false);
    let wish = Wish {
        from: Some(node.name.clone()),
        ..off_media()
    };
    let refused = pool.change_replicas(wish, Blocks::OnlyOnMedia).await;
    assert_eq!(refused.unwrap_err().code, Code::NotDraining);
}
