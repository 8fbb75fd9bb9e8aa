//! Drains that an operator cancels: the node takes blocks again, and no later leader drains it.

use crate::support::media::until;
use crate::support::replicas::*;
use crate::support::{
    Gated, SPACE, commit, full_and_patient, lead, patient_with_nodes, pool, registration,
    reserve_with,
};
use kvpool_master::Config;
use kvpool_master::clock::BootClock;
use kvpool_master::membership::{NodeState, Reported, StoreNode};
use kvpool_master::pool::{Pool, ReserveOptions, TaskRefused, TaskState};
use kvpool_master::store::MetadataStore;
use kvpool_master::store::journal::JournalOptions;
use kvpool_proto::MasterMessage;
use kvpool_proto::master_message::Body;
use kvpool_types::{Code, Key, KeyRef, NodeName};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;

fn name() -> NodeName {
    NodeName("a".into())
}

/// The master's messages to a node about drains.
#[derive(Debug, PartialEq, Eq)]
enum Word {
    Drain,
    Undrain(u64),
}

/// A node that answers nothing by itself.
struct Silent {
    node: Arc<StoreNode>,
    session: u64,
    inbox: UnboundedReceiver<Result<MasterMessage, tonic::Status>>,
}

impl Silent {
    /// Node `a` in a new session.
    async fn open(pool: &Arc<Pool>, can_undrain: bool) -> Self {
        let registration = kvpool_master::membership::Registration {
            can_undrain,
            ..registration("a", 1, 4 * MIB)
        };
        let node = pool.register(&registration).await.unwrap();
        let (outbox, inbox) = tokio::sync::mpsc::unbounded_channel();
        let session = pool.activate(&node, &registration, outbox);
        pool.heard(&node, Some(Reported::default()));
        Self {
            node,
            session,
            inbox,
        }
    }

    /// The master's messages about drains since the last call.
    fn words(&mut self) -> Vec<Word> {
        let mut words = Vec::new();
        while let Ok(message) = self.inbox.try_recv() {
            match message.unwrap().body {
                Some(Body::Drain(_)) => words.push(Word::Drain),
                Some(Body::Undrain(order)) => words.push(Word::Undrain(order.number)),
                _ => {}
            }
        }
        words
    }
}

/// Cancels the drain of node `a` beside the test.
fn cancel_drain(pool: &Arc<Pool>) -> tokio::task::JoinHandle<Result<bool, TaskRefused>> {
    let pool = Arc::clone(pool);
    tokio::spawn(async move { pool.undrain_node(&name()).await })
}

/// A leader that begins a term on the store of another one.
async fn next_leader(store: Arc<Gated>) -> Arc<Pool> {
    let store = store as Arc<dyn MetadataStore>;
    let journal = JournalOptions::default();
    lead(&store, patient_with_nodes(), journal, Arc::new(BootClock)).await
}

/// Puts a block, and asserts that it lies on this node.
async fn put_on(pool: &Arc<Pool>, node: &str, number: u8) {
    let granted = reserve_with(pool, &key(number), BLOCK, &on(node)).await;
    let done = commit(pool, &key(number), BLOCK, granted.unwrap()).await;
    assert_eq!(done, [Code::Ok]);
    assert_eq!(holders(pool, &key(number)), [node]);
}

/// The first block is being moved, and the others wait: the source has used up its bytes for a day.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_drain_is_cancelled_keeps_its_blocks_and_takes_others() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        replica_bandwidth: bytesize::ByteSize(1),
        ..patient_with_nodes()
    };
    let (pool, _) = pool(directory.path(), config).await;
    let a = join(&pool, "a", 1).await;
    for number in 1..=3 {
        put(&pool, &key(number)).await;
    }
    let b = join(&pool, "b", 2).await;
    let task = pool.drain_node(&name(), false).await.unwrap();
    let pull = b.next().await;
    assert_eq!(a.node.state(), NodeState::Draining);
    assert_eq!(pool.undrain_node(&name()).await, Ok(true));
    assert_eq!(pool.state_label(&a.node), "live");
    assert!(a.node.is_placeable());
    let ended = pool.replica_tasks(&[task.id]).remove(0);
    assert_eq!(ended.state, TaskState::Cancelled, "{ended:?}");
    // Pulls that had begun end as usual.
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    let moved = || {
        let keys = (1..=3).filter(|number| holders(&pool, &key(*number)) == ["b"]);
        keys.count()
    };
    until("the move that had begun ends", || moved() == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(b.pulls.lock().is_empty() && moved() == 1);
    put_on(&pool, "a", 9).await;
    assert!(a.left.lock().is_empty(), "nothing was said about a stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_node_is_taken_back_and_can_be_drained_again() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    let moves = async |number| {
        let task = pool.drain_node(&name(), false).await.unwrap();
        let pull = b.next().await;
        pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
        assert_eq!(end(&pool, &task).await.changed, 1);
        until("the node is drained", || {
            pool.state_label(&a.node) == "drained"
        })
        .await;
        assert_eq!(holders(&pool, &key(number)), ["b"]);
    };
    moves(1).await;
    let of_b = NodeName("b".into());
    let refused = pool.drain_node(&of_b, false).await.unwrap_err();
    assert_eq!(refused.code, Code::LastNode, "{refused}");
    assert_eq!(pool.undrain_node(&name()).await, Ok(true));
    assert_eq!(pool.state_label(&a.node), "live");
    assert_eq!(a.node.left_blocks(), None);
    put_on(&pool, "a", 2).await;
    moves(2).await;
    // The other node is not the last node that takes blocks any more.
    assert_eq!(pool.undrain_node(&name()).await, Ok(true));
    pool.drain_node(&of_b, false).await.unwrap();
}

/// Leases keep the other node full.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_waits_for_room_goes_to_a_node_that_is_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let config = full_and_patient(Duration::from_secs(600));
    let (pool, _) = pool(directory.path(), config).await;
    let _b = join(&pool, "b", 2).await;
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
    pool.drain_node(&name(), false).await.unwrap();
    let waits = {
        let pool = Arc::clone(&pool);
        let patient = ReserveOptions {
            timeout: Duration::from_secs(50),
            ..on("a")
        };
        tokio::spawn(async move { reserve_with(&pool, &key(9), BLOCK, &patient).await })
    };
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waits.is_finished(), "the pool is full");
    assert_eq!(pool.undrain_node(&name()).await, Ok(true));
    let granted = tokio::time::timeout(Duration::from_secs(20), waits).await;
    let granted = granted.expect("there is room").unwrap().unwrap();
    let done = commit(&pool, &key(9), BLOCK, granted).await;
    assert_eq!(done, [Code::Ok]);
    assert_eq!(holders(&pool, &key(9)), ["a"]);
}

/// Repeating the call does no harm. A caller that waits for the drain does not begin it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_drain_does_not_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    assert_eq!(pool.undrain_node(&name()).await, Ok(false));
    let unknown = pool.undrain_node(&NodeName("z".into())).await;
    let unknown = unknown.unwrap_err();
    assert_eq!(unknown.code, Code::Missing);
    assert_eq!(unknown.message, "the pool has no node \"z\"");
    let task = pool.drain_node(&name(), false).await.unwrap();
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    end(&pool, &task).await;
    assert_eq!(pool.go_on_draining(&name()).await.unwrap().blocks, 0);
    assert_eq!(pool.undrain_node(&name()).await, Ok(true));
    assert_eq!(pool.undrain_node(&name()).await, Ok(false));
    let refused = pool.go_on_draining(&name()).await.unwrap_err();
    assert_eq!(refused.code, Code::NotDraining, "{refused}");
    assert_eq!(a.node.state(), NodeState::Live);
}

/// The drain still waits for a put when it is cancelled. Neither its task nor its order to the node
/// may follow.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_is_cancelled_while_it_begins_does_not_begin() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let mut a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    let open = reserve_with(&pool, &key(2), BLOCK, &on("a")).await.unwrap();
    let drain = {
        let pool = Arc::clone(&pool);
        tokio::spawn(async move { pool.drain_node(&name(), false).await })
    };
    until("the drain begins", || a.node.state() == NodeState::Draining).await;
    let cancel = cancel_drain(&pool);
    let refused = drain.await.unwrap().unwrap_err();
    assert_eq!(refused.code, Code::NotDraining, "{refused}");
    pool.undrained(&a.node, 1);
    assert_eq!(cancel.await.unwrap(), Ok(true));
    assert_eq!(a.words(), [Word::Undrain(1)]);
    assert!(pool.replica_tasks(&[]).is_empty());
    // The open put continues.
    assert_eq!(commit(&pool, &key(2), BLOCK, open).await, [Code::Ok]);
    assert_eq!(holders(&pool, &key(2)), ["a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_is_not_taken_back() {
    for is_drained_first in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, a, _b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
        if is_drained_first {
            pool.drain_node(&name(), false).await.unwrap();
            pool.out_of_service(&a.node, a.session, false);
        }
        pool.draining(&a.node, true);
        let tasks = pool.replica_tasks(&[]).len();
        let refused = pool.undrain_node(&name()).await.unwrap_err();
        assert_eq!(refused.code, Code::NodeStops, "{refused}");
        assert!(a.node.drains() && !a.node.is_placeable());
        assert_eq!(a.node.state(), NodeState::Draining);
        let after = pool.replica_tasks(&[]);
        assert!(after.len() >= tasks, "nothing was changed");
        assert!(after.iter().all(|task| task.state != TaskState::Cancelled));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_is_not_cancelled_on_a_node_that_would_not_hear_of_it() {
    for can_undrain in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
        let mut a = Silent::open(&pool, can_undrain).await;
        put(&pool, &key(1)).await;
        let _b = join(&pool, "b", 2).await;
        pool.drain_node(&name(), false).await.unwrap();
        match can_undrain {
            true => pool.detach(&a.node, a.session),
            // A node of an earlier version sends the same report for each drain.
            false => pool.draining(&a.node, false),
        }
        let refused = pool.undrain_node(&name()).await.unwrap_err();
        let code = match can_undrain {
            true => Code::NodeUnheard,
            false => Code::Unimplemented,
        };
        assert_eq!(refused.code, code, "{refused}");
        assert!(a.node.drains(), "nothing was changed");
        assert_eq!(a.words(), [Word::Drain]);
    }
}

/// The node's report crosses the order to end the drain. A later leader learns of a drain only from
/// the node, so the caller waits for the node.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_ends_when_the_node_has_confirmed_it() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let mut a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    assert_eq!(a.words(), [Word::Drain]);
    let cancel = cancel_drain(&pool);
    until("the node is in service", || a.node.is_placeable()).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!cancel.is_finished(), "the node has confirmed nothing");
    assert_eq!(a.words(), [Word::Undrain(1)]);
    // The node had not heard of the cancellation when it sent the report.
    pool.out_of_service(&a.node, a.session, true);
    assert!(a.node.is_placeable(), "the drain is back");
    pool.undrained(&a.node, 1);
    assert_eq!(cancel.await.unwrap(), Ok(true));
    assert!(a.node.is_placeable());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_was_lost_with_a_session_is_repeated_in_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    let late = pool.undrain_node(&name()).await.unwrap_err();
    assert_eq!(late.code, Code::NodeUnheard, "{late}");
    pool.detach(&a.node, a.session);
    let mut again = Silent::open(&pool, true).await;
    assert_eq!(again.words(), [Word::Undrain(1)]);
    pool.out_of_service(&again.node, again.session, false);
    assert_eq!(again.node.state(), NodeState::Live, "the drain is back");
    pool.undrained(&again.node, 1);
    assert_eq!(pool.undrain_node(&name()).await, Ok(false));
    // An order that was confirmed is not repeated, and the next drain counts.
    pool.drain_node(&name(), false).await.unwrap();
    pool.out_of_service(&again.node, again.session, false);
    assert_eq!(again.node.state(), NodeState::Draining);
    pool.detach(&again.node, again.session);
    let mut third = Silent::open(&pool, true).await;
    assert_eq!(third.words(), [Word::Drain]);
}

/// An earlier leader began the drain. The node has reported it to this leader.
#[tokio::test(flavor = "multi_thread")]
async fn a_later_leader_cancels_the_drain_of_an_earlier_one() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient_with_nodes()).await;
    let _a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    let next = next_leader(store).await;
    let mut a = Silent::open(&next, true).await;
    next.out_of_service(&a.node, a.session, true);
    assert_eq!(a.node.state(), NodeState::Draining);
    // An answer without an order has no effect.
    next.undrained(&a.node, 1);
    let cancel = {
        let next = Arc::clone(&next);
        tokio::spawn(async move { next.undrain_node(&name()).await })
    };
    until("the node is in service", || a.node.is_placeable()).await;
    next.undrained(&a.node, 1);
    assert_eq!(cancel.await.unwrap(), Ok(true));
    assert_eq!(a.words(), [Word::Undrain(1)]);
    let is_running = || {
        let tasks = next.replica_tasks(&[]);
        tasks.iter().any(|task| task.state == TaskState::Running)
    };
    until("no task runs", || !is_running()).await;
    put_on(&next, "a", 2).await;
}

/// A pull of the cancelled drain is still in progress when the node stops.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_after_a_cancelled_drain_moves_every_block_before_the_node_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    let first = b.next().await;
    assert_eq!(pool.undrain_node(&name()).await, Ok(true));
    put_on(&pool, "a", 9).await;
    pool.draining(&a.node, true);
    let second = b.next().await;
    pool.pulled(&b.node, &[(first.ticket, Code::Ok)]);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(a.left.lock().is_empty(), "a block is on its way");
    pool.pulled(&b.node, &[(second.ticket, Code::Ok)]);
    until("the node may leave", || *a.left.lock() == [0]).await;
    for number in [1, 9] {
        assert_eq!(holders(&pool, &key(number)), ["b"]);
    }
}

/// An operator's command cancels its task when its time is over. A pull of the task is on its way when the node stops.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_after_a_cancelled_task_moves_every_block_before_the_node_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    let task = pool.drain_node(&name(), false).await.unwrap();
    let first = b.next().await;
    pool.cancel_replica_tasks(&[task.id]);
    pool.draining(&a.node, true);
    pool.pulled(&b.node, &[(first.ticket, Code::Unreachable)]);
    let second = b.next().await;
    assert!(a.left.lock().is_empty(), "the block is on its way");
    pool.pulled(&b.node, &[(second.ticket, Code::Ok)]);
    until("the node may leave", || *a.left.lock() == [0]).await;
    assert_eq!(holders(&pool, &key(1)), ["b"]);
}

/// The node stops while an operator's command waits. Then the time of the command is over, and it cancels its task.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_moves_the_blocks_of_a_task_that_is_cancelled_later() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    let task = pool.drain_node(&name(), false).await.unwrap();
    let first = b.next().await;
    pool.draining(&a.node, true);
    pool.cancel_replica_tasks(&[task.id]);
    pool.pulled(&b.node, &[(first.ticket, Code::Unreachable)]);
    let second = b.next().await;
    assert!(a.left.lock().is_empty(), "the block is on its way");
    pool.pulled(&b.node, &[(second.ticket, Code::Ok)]);
    until("the node may leave", || *a.left.lock() == [0]).await;
    assert_eq!(holders(&pool, &key(1)), ["b"]);
}

/// The client repeats a call by itself. The repeated call must not report that the node did not
/// drain.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_cancel_tells_of_a_drain_that_ends_only_now() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let mut a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    let late = pool.undrain_node(&name()).await.unwrap_err();
    assert_eq!(late.code, Code::NodeUnheard, "{late}");
    assert_eq!(a.words(), [Word::Drain, Word::Undrain(1)]);
    let again = cancel_drain(&pool);
    tokio::time::sleep(Duration::from_millis(100)).await;
    pool.undrained(&a.node, 1);
    assert_eq!(again.await.unwrap(), Ok(true));
    assert!(a.words().is_empty());
    assert_eq!(pool.undrain_node(&name()).await, Ok(false));
}

/// The node was taken out of service under an earlier leader, and is cut off from this one.
#[tokio::test(flavor = "multi_thread")]
async fn no_leader_says_that_a_node_does_not_drain_before_it_has_heard_the_node() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient_with_nodes()).await;
    let _a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    let next = next_leader(store).await;
    let unknown = next.undrain_node(&name()).await.unwrap_err();
    assert_eq!(unknown.code, Code::NodeUnheard, "{unknown}");
    let unknown = next.go_on_draining(&name()).await.unwrap_err();
    assert_eq!(unknown.code, Code::NodeUnheard, "{unknown}");
    let a = Silent::open(&next, true).await;
    assert_eq!(next.undrain_node(&name()).await, Ok(false));
    next.out_of_service(&a.node, a.session, true);
    assert_eq!(a.node.state(), NodeState::Draining);
    next.go_on_draining(&name()).await.unwrap();
}

/// The connection of the earlier session was slow. The node was taken back into service in the
/// later session.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_word_of_an_earlier_session_brings_no_drain_back() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let earlier = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    pool.detach(&earlier.node, earlier.session);
    let later = Silent::open(&pool, true).await;
    let cancel = cancel_drain(&pool);
    until("the node is in service", || later.node.is_placeable()).await;
    pool.undrained(&later.node, 1);
    assert_eq!(cancel.await.unwrap(), Ok(true));
    pool.out_of_service(&earlier.node, earlier.session, true);
    assert!(later.node.is_placeable(), "the drain is back");
    pool.out_of_service(&later.node, later.session, true);
    assert_eq!(later.node.state(), NodeState::Draining);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_tells_of_a_stop_that_came_after_it() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    let cancel = cancel_drain(&pool);
    until("the node is in service", || a.node.is_placeable()).await;
    pool.draining(&a.node, true);
    let stops = cancel.await.unwrap().unwrap_err();
    assert_eq!(stops.code, Code::NodeStops, "{stops}");
    assert!(
        stops.message.contains("since its drain was cancelled"),
        "{stops}"
    );
    // The repeated call cancels nothing.
    let stops = pool.undrain_node(&name()).await.unwrap_err();
    assert_eq!(stops.code, Code::NodeStops, "{stops}");
    assert!(stops.message.contains("Nothing was changed"), "{stops}");
}

/// The next incarnation of the process may report a drain again.
#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_ends_when_its_node_has_left_the_pool() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _) = pool(directory.path(), patient_with_nodes()).await;
    let a = Silent::open(&pool, true).await;
    put(&pool, &key(1)).await;
    let _b = join(&pool, "b", 2).await;
    pool.drain_node(&name(), false).await.unwrap();
    let cancel = cancel_drain(&pool);
    until("the node is in service", || a.node.is_placeable()).await;
    pool.drop_node(&a.node);
    let left = cancel.await.unwrap().unwrap_err();
    assert_eq!(left.code, Code::NodeUnheard, "{left}");
    assert!(left.message.contains("has left the pool"), "{left}");
    let unknown = pool.undrain_node(&name()).await.unwrap_err();
    assert_eq!(unknown.code, Code::Missing, "{unknown}");
}
