//! Nodes that leave, or are lost, while their blocks move: no block is lost with them.

use crate::support::replicas::*;
use crate::support::{
    Gated, SPACE, commit, full_and_patient, lead, patient_with_nodes, pool, pool_at, registration,
    reserve_with,
};
use kvpool_master::Config;
use kvpool_master::clock::{BootClock, BootInstant, Clock, ManualClock};
use kvpool_master::membership::NodeState;
use kvpool_master::pool::{Change, Pool, ReserveOptions, TaskState, TaskView};
use kvpool_master::store::MetadataStore;
use kvpool_master::store::journal::JournalOptions;
use kvpool_proto::master_message::Body;
use kvpool_types::{Code, Key, KeyRef, NodeName};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Node `b` reports that it has pulled the block of key 1 from node `a`, while the log's gate is
/// shut.
async fn pulled_late<'s>(
    pool: &Arc<Pool>,
    store: &'s Gated,
) -> (Node, Node, TaskView, tokio::sync::MutexGuard<'s, ()>) {
    let a = join(pool, "a", 1).await;
    put(pool, &key(1)).await;
    let b = join(pool, "b", 2).await;
    let task = begin(pool, Change::Move, Some("a"), &key(1)).await;
    let pull = b.next().await;
    let shut = store.gate.lock().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    (a, b, task, shut)
}

/// The target of a move begins to leave, or is lost, while the log is late, as in a full store.
#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_is_logged_late_keeps_its_source_where_its_target_leaves_or_is_lost() {
    for leaves in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, store) = pool(directory.path(), Config::default()).await;
        let (a, b, task, shut) = pulled_late(&pool, &store).await;
        match leaves {
            true => pool.draining(&b.node, false),
            false => pool.detach(&b.node, b.session),
        }
        drop(shut);
        // A record that is logged after the move is durable after it.
        put(&pool, &key(2)).await;
        assert_eq!(holders(&pool, &key(1)), ["a", "b"]);
        let now = pool.replica_tasks(&[task.id]).remove(0);
        assert_eq!((now.changed, now.state), (0, TaskState::Running), "{now:?}");
        // The move ends at the target once that node is back, or at another node.
        match leaves {
            true => {
                let c = join(&pool, "c", 3).await;
                let pull = c.next().await;
                pool.pulled(&c.node, &[(pull.ticket, Code::Ok)]);
                assert_eq!(end(&pool, &task).await.changed, 1);
                assert_eq!(holders(&pool, &key(1)), ["b", "c"]);
            }
            false => {
                let _again = join(&pool, "b", 2).await;
                let ended = end(&pool, &task).await;
                assert_eq!(ended.changed, 1, "{ended:?}");
                assert_eq!(holders(&pool, &key(1)), ["b"]);
            }
        }
        drop(a);
    }
}

/// The block is copied, and the record of its replica is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_move_waits_for_a_full_store() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let _a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    let task = begin(&pool, Change::Move, Some("a"), &key(1)).await;
    store.is_full.store(true, Ordering::SeqCst);
    let answers = |pull: kvpool_proto::Pull| pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    answers(b.next().await);
    // The pull may be retried meanwhile; every retry is refused.
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        if let Ok(pull) = tokio::time::timeout(Duration::from_millis(100), b.next()).await {
            answers(pull);
        }
    }
    let now = pool.replica_tasks(&[task.id]).remove(0);
    assert_eq!((now.failed, now.state), (0, TaskState::Running), "{now:?}");
    store.is_full.store(false, Ordering::SeqCst);
    answers(b.next().await);
    let ended = end(&pool, &task).await;
    assert_eq!((ended.changed, ended.failed), (1, 0), "{ended:?}");
    assert_eq!(holders(&pool, &key(1)), ["b"]);
}

/// The log of a move may be late, for example in a full store. Its target may have left by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_whose_move_is_logged_after_its_target_went_is_there_in_the_next_term() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let (a, b, task, shut) = pulled_late(&pool, &store).await;
    pool.drop_node(&b.node);
    drop(shut);
    let ended = end(&pool, &task).await;
    assert_eq!((ended.changed, ended.failed), (0, 1), "{ended:?}");
    assert_eq!(holders(&pool, &key(1)), ["a"]);
    // The records of the dropped node are durable too.
    put(&pool, &key(2)).await;
    let store = store as Arc<dyn MetadataStore>;
    let journal = JournalOptions::default();
    let next = lead(&store, Config::default(), journal, Arc::new(BootClock)).await;
    let blocks = next.stored_blocks();
    let block = blocks.iter().find(|block| block.key == key(1));
    assert!(block.is_some(), "the block is lost with the old term");
    drop(a);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_replica_is_dropped_for_one_on_a_node_that_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    pool.draining(&b.node, true);
    let dropped = begin(&pool, Change::Drop, Some("a"), &key(1)).await;
    let ended = end(&pool, &dropped).await;
    assert_eq!((ended.changed, ended.failed), (0, 1), "{ended:?}");
    assert_eq!(holders(&pool, &key(1)).len(), 2);
}

/// A process that has died is a node without a session for some seconds. The master does not know
/// yet that it has died.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_session_has_ended_counts_for_no_drop_and_no_drain() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    pool.detach(&b.node, b.session);
    let dropped = begin(&pool, Change::Drop, Some("a"), &key(1)).await;
    let ended = end(&pool, &dropped).await;
    assert_eq!((ended.changed, ended.failed), (0, 1), "{ended:?}");
    assert_eq!(holders(&pool, &key(1)).len(), 2);
    pool.draining(&a.node, true);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(a.left.lock().is_empty(), "the other holder may come back");
    pool.drop_node(&b.node);
    crate::support::media::until("the master answers", || !a.left.lock().is_empty()).await;
    assert_eq!(*a.left.lock(), [1], "the block leaves with the node");
}

/// The connection of the only other node is broken. A block of an operator's task would be given up meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_a_node_that_is_away_for_a_moment() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    pool.detach(&b.node, b.session);
    pool.draining(&a.node, true);
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert!(a.left.lock().is_empty(), "the other node may come back");
    let b = join(&pool, "b", 2).await;
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    let is_told = || *a.left.lock() == [0];
    crate::support::media::until("the node may leave", is_told).await;
    assert_eq!(holders(&pool, &key(1)), ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_leaves_is_told_once_the_session_of_the_other_holder_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    pool.detach(&b.node, b.session);
    pool.draining(&a.node, true);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let _again = join(&pool, "b", 2).await;
    crate::support::media::until("the master answers", || !a.left.lock().is_empty()).await;
    assert_eq!(*a.left.lock(), [0], "the other replica is there");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_read_from_the_node_that_it_leaves_before_one_without_a_session() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    let c = join(&pool, "c", 3).await;
    pool.detach(&b.node, b.session);
    begin(&pool, Change::Move, Some("a"), &key(1)).await;
    let pull = c.next().await;
    assert_eq!(pull.from_incarnation[..], a.node.incarnation.to_bytes()[..]);
}

/// The node takes no blocks from the call on, so a task must also move the blocks that it has.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_whose_caller_leaves_begins_all_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    let open = reserve_with(&pool, &key(2), BLOCK, &on("a")).await.unwrap();
    let name = NodeName("a".into());
    let called =
        tokio::time::timeout(Duration::from_millis(50), pool.drain_node(&name, false)).await;
    assert!(called.is_err(), "it waits for the puts on the node");
    assert_eq!(commit(&pool, &key(2), BLOCK, open).await, [Code::Ok]);
    b.next().await;
    assert_eq!(pool.replica_tasks(&[]).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_leave_at_once_do_not_count_on_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    pool.draining(&a.node, true);
    crate::support::media::until("the first hears", || *a.left.lock() == [0]).await;
    pool.draining(&b.node, true);
    crate::support::media::until("the second hears", || *b.left.lock() == [1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_block_moves_to_a_node_that_leaves_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    begin(&pool, Change::Move, Some("a"), &key(1)).await;
    let pull = b.next().await;
    pool.draining(&b.node, true);
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    wait_used(&pool, BLOCK).await;
    assert_eq!(holders(&pool, &key(1)), ["a"]);
}

/// A hard-pinned block leaves a node that is taken out of service, although all other blocks are
/// more recently used.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_makes_room_for_a_pinned_block() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), Config::default()).await;
    let a = join(&pool, "a", 1).await;
    let pinned = ReserveOptions {
        hard_pin: true,
        ..ReserveOptions::default()
    };
    let granted = reserve_with(&pool, &key(1), BLOCK, &pinned).await.unwrap();
    assert_eq!(commit(&pool, &key(1), BLOCK, granted).await, [Code::Ok]);
    let b = join(&pool, "b", 2).await;
    // Both nodes are full of more recently used blocks.
    for number in 0..130 {
        let filler = Key::parse(&format!("filler-{number}")).unwrap();
        if let Ok(granted) = reserve_with(&pool, &filler, BLOCK, &on("b")).await {
            assert_eq!(commit(&pool, &filler, BLOCK, granted).await, [Code::Ok]);
        }
    }
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let mut seen = 0;
    while !holders(&pool, &key(1)).contains(&"b".to_owned()) {
        let pull = b.next().await;
        pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
        seen += 1;
        assert!(seen < 200, "{:?}", pool.replica_tasks(&[task.id]));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(a);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_of_a_node_without_a_session_reads_the_replicas_of_other_nodes() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    let c = join(&pool, "c", 3).await;
    pool.detach(&a.node, a.session);
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let pull = c.next().await;
    assert_eq!(pull.from_incarnation[..], b.node.incarnation.to_bytes()[..]);
    pool.pulled(&c.node, &[(pull.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &task).await.changed, 1);
    assert_eq!(holders(&pool, &key(1)), ["b", "c"]);
}

/// The blocks of open puts on a draining node move too, whether the node stops or an operator
/// drains it.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_is_under_way_when_its_node_drains_moves_with_it() {
    for stops in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
        let granted = reserve_with(&pool, &key(2), BLOCK, &on("a")).await.unwrap();
        let draining = {
            let (pool, node) = (Arc::clone(&pool), Arc::clone(&a.node));
            tokio::spawn(async move {
                if stops {
                    pool.draining(&node, true);
                } else {
                    pool.drain_node(&NodeName("a".into()), false).await.unwrap();
                }
            })
        };
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(commit(&pool, &key(2), BLOCK, granted).await, [Code::Ok]);
        draining.await.unwrap();
        for _ in 0..2 {
            let pull = b.next().await;
            pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
        }
        for number in [1, 2] {
            let is_moved = || holders(&pool, &key(number)) == ["b"];
            crate::support::media::until("the block moves", is_moved).await;
        }
    }
}

/// A client that never ends its put delays no drain, and its block is not left behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_wait_for_a_put_that_never_ends() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    let silent = reserve_with(&pool, &key(2), BLOCK, &on("a")).await.unwrap();
    pool.draining(&a.node, true);
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    let late = commit(&pool, &key(2), BLOCK, silent).await;
    assert_eq!(late, [Code::GrantEnded]);
}

/// Leases keep the target full. Then the log is full for longer than a task waits for room, and the leases
/// end.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_leases_and_only_while_it_may_ask_for_room() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let timed = Arc::clone(&clock) as Arc<dyn Clock>;
    let config = full_and_patient(Duration::from_secs(5));
    let (pool, store) = pool_at(directory.path(), config, timed).await;
    let b = join(&pool, "b", 2).await;
    let fillers: Vec<Key> = (0..4 * MIB / BLOCK)
        .map(|number| Key::parse(&format!("filler-{number}")).unwrap())
        .collect();
    for filler in &fillers {
        let granted = reserve_with(&pool, filler, BLOCK, &on("b")).await.unwrap();
        assert_eq!(commit(&pool, filler, BLOCK, granted).await, [Code::Ok]);
    }
    let fillers: Vec<KeyRef<'_>> = fillers.iter().map(Key::as_ref).collect();
    let leased = pool.exist(SPACE, &fillers[..], true).answer;
    assert!(leased.iter().all(|is_leased| *is_leased));
    let _a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let now = pool.replica_tasks(&[task.id]).remove(0);
    assert_eq!((now.failed, now.state), (0, TaskState::Running), "{now:?}");
    store.is_full.store(true, Ordering::SeqCst);
    let refused = pool.register(&registration("c", 3, 4 * MIB)).await;
    assert_eq!(refused.unwrap_err().code, Code::StoreFull);
    clock.advance(Duration::from_secs(11));
    store.is_full.store(false, Ordering::SeqCst);
    crate::support::media::until("room", || pool.has_room().is_ok()).await;
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    let ended = end(&pool, &task).await;
    assert_eq!((ended.changed, ended.failed), (1, 0), "{ended:?}");
    assert_eq!(holders(&pool, &key(1)), ["b"]);
}

/// A later leader learns only from the node that it is out of service.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_a_session_hears_in_its_next_one_that_it_is_out_of_service() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, _b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    pool.detach(&a.node, a.session);
    pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let again = registration("a", 1, 4 * MIB);
    let node = pool.register(&again).await.unwrap();
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &again, outbox);
    let mut drains = false;
    while let Ok(message) = inbox.try_recv() {
        drains |= matches!(message.unwrap().body, Some(Body::Drain(_)));
    }
    assert!(drains, "the order is lost");
}

/// Node `a` has the block of key 1, and gets the block of key 2 once the log is open.
async fn with_a_put_that_waits_for_the_log<'s>(
    pool: &Arc<Pool>,
    store: &'s Gated,
) -> (
    Node,
    Node,
    tokio::task::JoinHandle<Vec<Code>>,
    tokio::sync::MutexGuard<'s, ()>,
) {
    let a = join(pool, "a", 1).await;
    put(pool, &key(1)).await;
    let granted = reserve_with(pool, &key(2), BLOCK, &on("a")).await.unwrap();
    let b = join(pool, "b", 2).await;
    let shut = store.gate.lock().await;
    let committed = tokio::spawn(commit(pool, &key(2), BLOCK, granted));
    tokio::time::sleep(Duration::from_millis(50)).await;
    (a, b, committed, shut)
}

/// The log stalls for longer than the drain waits for puts.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_waited_for_the_log_moves_before_its_node_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient_with_nodes()).await;
    let (a, b, committed, shut) = with_a_put_that_waits_for_the_log(&pool, &store).await;
    pool.draining(&a.node, true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(a.left.lock().is_empty(), "a put is open");
    drop(shut);
    assert_eq!(committed.await.unwrap(), [Code::Ok]);
    for _ in 0..2 {
        let pull = b.next().await;
        pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    }
    crate::support::media::until("the master answers", || !a.left.lock().is_empty()).await;
    assert_eq!(*a.left.lock(), [0], "both blocks have moved");
    assert_eq!(holders(&pool, &key(2)), ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_counts_a_put_that_waits_for_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient_with_nodes()).await;
    let (_a, _b, committed, shut) = with_a_put_that_waits_for_the_log(&pool, &store).await;
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    assert_eq!((task.blocks, task.failed), (2, 1), "{task:?}");
    assert!(matches!(task.failure, Some((Code::InProgress, _))));
    drop(shut);
    assert_eq!(committed.await.unwrap(), [Code::Ok]);
}

/// The caller's time is over before the task gives up a block.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_cancelled_tells_why_its_blocks_waited() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let _a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let task = pool.drain_node(&NodeName("a".into()), true).await.unwrap();
    // The mover looks at the task every 20 ms.
    tokio::time::sleep(Duration::from_millis(500)).await;
    pool.cancel_replica_tasks(&[task.id]);
    let ended = pool.replica_tasks(&[task.id]).remove(0);
    assert_eq!(ended.state, TaskState::Cancelled);
    let (code, why) = ended.failure.unwrap();
    assert_eq!(code, Code::Unreachable);
    assert!(why.contains("no other node takes replicas now"), "{why}");
}

/// The label changes at once when the only other holder of a block begins to leave.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_drained_while_no_block_would_be_lost_with_it() {
    let directory = tempfile::tempdir().unwrap();
    // Nodes without heartbeats stay as they are.
    let config = Config {
        lease_ttl: Duration::from_millis(10),
        ..patient_with_nodes()
    };
    let (pool, _) = pool(directory.path(), config).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    let copy = begin(&pool, Change::Copy, None, &key(1)).await;
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &copy).await.changed, 1);
    pool.draining(&a.node, true);
    let of_a = || pool.state_label(&a.node);
    crate::support::media::until("the first is drained", || of_a() == "drained").await;
    assert_eq!(pool.state_label(&b.node), "live");
    pool.draining(&b.node, true);
    assert_eq!(of_a(), "draining", "the other holder leaves too");
    crate::support::media::until("the second hears", || *b.left.lock() == [1]).await;
    // Longer than the time between two looks at the blocks.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(of_a(), "draining");
    assert_eq!(pool.state_label(&b.node), "draining");
    let removed = key(1);
    pool.remove(SPACE, &[removed.as_ref()][..], true)
        .await
        .unwrap();
    let both = || of_a() == "drained" && pool.state_label(&b.node) == "drained";
    crate::support::media::until("both are drained without the block", both).await;
}

/// The other holder falls silent with its session open. The next look at the blocks may come a second later.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_not_drained_once_the_other_holder_is_suspect() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    pool.draining(&a.node, false);
    let of_a = || pool.state_label(&a.node);
    crate::support::media::until("the first is drained", || of_a() == "drained").await;
    let is_suspect = || {
        pool.heard(&a.node, None);
        b.node.state() == NodeState::Suspect
    };
    crate::support::media::until("the second is suspect", is_suspect).await;
    // The state changes a moment before the doubt.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(of_a(), "draining", "the other holder is silent");
}

/// The node is stopped during its drain, and does not wait for the end. An operator's command must not succeed then.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_leave_with_their_node_during_its_drain_have_failed() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = join(&pool, "a", 1).await;
    for number in 1..=2 {
        put(&pool, &key(number)).await;
    }
    let b = join(&pool, "b", 2).await;
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let (first, second) = (b.next().await, b.next().await);
    pool.pulled(&b.node, &[(first.ticket, Code::Ok)]);
    let changed = || pool.replica_tasks(&[task.id])[0].changed;
    crate::support::media::until("a block has moved", || changed() == 1).await;
    pool.said_goodbye(&a.node);
    pool.pulled(&b.node, &[(second.ticket, Code::Unreachable)]);
    let ended = end(&pool, &task).await;
    let counts = (ended.changed, ended.gone, ended.failed);
    assert_eq!(counts, (1, 0, 1), "{ended:?}");
    let (code, why) = ended.failure.unwrap();
    assert_eq!(code, Code::Missing);
    assert!(why.contains("node a has left the pool"), "{why}");
}

/// A client removes the block while it is copied. Then the node stops.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_is_removed_during_a_drain_does_not_fail_with_its_node() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = join(&pool, "a", 1).await;
    for number in 1..=2 {
        put(&pool, &key(number)).await;
    }
    let b = join(&pool, "b", 2).await;
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let pulls = [b.next().await, b.next().await];
    let removed = key(1);
    pool.remove(SPACE, &[removed.as_ref()][..], true)
        .await
        .unwrap();
    pool.said_goodbye(&a.node);
    for pull in pulls {
        pool.pulled(&b.node, &[(pull.ticket, Code::Unreachable)]);
    }
    let ended = end(&pool, &task).await;
    let counts = (ended.changed, ended.gone, ended.failed);
    assert_eq!(counts, (0, 1, 1), "{ended:?}");
}

/// The next look at the blocks may come a second later.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_not_drained_once_the_other_replica_is_found_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    pool.draining(&a.node, false);
    let of_a = || pool.state_label(&a.node);
    crate::support::media::until("the first is drained", || of_a() == "drained").await;
    let damaged = suspected_on(&pool, &b);
    pool.verified(damaged, false);
    assert_eq!(of_a(), "draining", "its replica is the last one");
}

/// The media of the node may come back without their copies. The next look at the blocks may come a second later.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_is_not_drained_by_a_look_of_its_earlier_session() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, _b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    pool.draining(&a.node, false);
    let of_a = || pool.state_label(&a.node);
    crate::support::media::until("the first is drained", || of_a() == "drained").await;
    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&a.node, &registration("a", 1, 4 * MIB), outbox);
    assert_eq!(of_a(), "draining", "its session is new");
}

/// No message tells the node that its drain is complete: an operator began the drain, and its task
/// ended before the node knew of it.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_that_a_drain_is_complete() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    let task = pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let pull = b.next().await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(pool.state_label(&a.node), "draining", "a block is left");
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &task).await.changed, 1);
    let is_drained = || pool.state_label(&a.node) == "drained";
    crate::support::media::until("the node is drained", is_drained).await;
    assert!(a.left.lock().is_empty(), "{:?}", a.left);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_of_the_last_node_that_takes_blocks_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), Config::default()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let name = NodeName("a".into());
    // A node without a session takes no blocks.
    let b = join(&pool, "b", 2).await;
    pool.detach(&b.node, b.session);
    let refused = pool.drain_node(&name, false).await.unwrap_err();
    assert_eq!(refused.code, Code::LastNode, "{refused}");
    assert!(refused.message.contains("1 blocks"), "{refused}");
    assert_eq!(a.node.state(), NodeState::Live, "nothing was changed");
    assert!(pool.replica_tasks(&[]).is_empty());
    // A draining node takes none either.
    pool.drain_node(&name, true).await.unwrap();
    assert_eq!(a.node.state(), NodeState::Draining);
    pool.drain_node(&name, false).await.unwrap();
}

/// An empty node loses nothing, and a stop by signal is never refused.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_node_leaves_without_force_when_it_is_empty_or_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), Config::default()).await;
    let _a = join(&pool, "a", 1).await;
    pool.drain_node(&NodeName("a".into()), false).await.unwrap();
    let b = join(&pool, "b", 2).await;
    put(&pool, &key(1)).await;
    pool.draining(&b.node, false);
    assert_eq!(b.node.state(), NodeState::Draining);
}
