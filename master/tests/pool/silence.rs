//! The meaning of a node's silence, and its end.

use crate::support::media::until;
use crate::support::registration;
use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, Clock, ManualClock};
use kvpool_master::membership::{NodeState, Reported, StoreNode};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::Pool;
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const SUSPECT_AFTER: Duration = Duration::from_secs(3);

/// A pool whose time stands still, and a node in a session before its first heartbeat.
async fn with_a_silent_node(directory: &Path) -> (Arc<Pool>, Arc<ManualClock>, Arc<StoreNode>) {
    let config = Config {
        suspect_after: SUSPECT_AFTER,
        drop_after: SUSPECT_AFTER * 2,
        ..Config::default()
    };
    let clock = Arc::new(ManualClock::new(BootInstant(1000)));
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let pool = Pool::start(config, Arc::new(store), Arc::clone(&clock) as _, metrics);
    let pool = pool.await.unwrap();
    let registration = registration("n", 1, 1 << 20);
    let node = pool.register(&registration).await.unwrap();
    let (outbox, _unread) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &registration, outbox);
    (pool, clock, node)
}

/// The clock counts while the machine sleeps. A live node's silence is then the master's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_did_not_run_drops_no_node_for_its_silence() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, clock, node) = with_a_silent_node(directory.path()).await;
    pool.heard(&node, Some(Reported::default()));

    clock.advance(SUSPECT_AFTER * 10);
    until("the caretaker looks", || {
        node.last_heard() == clock.now() || node.state() == NodeState::Gone
    })
    .await;
    assert_eq!(node.state(), NodeState::Live);

    // The master runs from here on, so the node's silence is its own.
    clock.advance(SUSPECT_AFTER);
    until("suspect", || node.state() == NodeState::Suspect).await;
    clock.advance(SUSPECT_AFTER);
    until("gone", || node.state() == NodeState::Gone).await;
    pool.retire().await;
}

/// A pool of two nodes whose time stands still. Both are live, with open sessions.
async fn with_two_nodes(directory: &Path) -> (Arc<Pool>, Arc<ManualClock>, [Node; 2]) {
    let (pool, clock, first) = with_a_silent_node(directory).await;
    let registration = registration("m", 2, 1 << 20);
    let second = pool.register(&registration).await.unwrap();
    let (outbox, _unread) = tokio::sync::mpsc::unbounded_channel();
    let session = pool.activate(&second, &registration, outbox);
    for node in [&first, &second] {
        pool.heard(node, Some(Reported::default()));
    }
    let nodes = [(first, 1), (second, session)].map(|(node, session)| Node { node, session });
    (pool, clock, nodes)
}

struct Node {
    node: Arc<StoreNode>,
    session: u64,
}

/// Advances the time in steps that the caretaker sees, until `is_so`. Meanwhile the nodes in
/// `speaking` are heard.
async fn passes(
    pool: &Pool,
    clock: &ManualClock,
    speaking: &[&Arc<StoreNode>],
    mut is_so: impl FnMut() -> bool,
) {
    for _ in 0..100 {
        clock.advance(Duration::from_millis(500));
        for node in speaking {
            pool.heard(node, Some(Reported::default()));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        if is_so() {
            return;
        }
    }
    panic!("it does not come so");
}

/// Without this time, the first client to be heard would miss the blocks of all nodes that return
/// later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_nodes_of_a_master_that_was_cut_off_get_time_to_return_once() {
    for is_client in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, clock, [first, second]) = with_two_nodes(directory.path()).await;
        let (first, second) = (first.node, second.node);
        let are_suspect = || [&first, &second].map(|node| node.state()) == [NodeState::Suspect; 2];
        passes(&pool, &clock, &[], are_suspect).await;
        match is_client {
            false => pool.heard(&second, Some(Reported::default())),
            true => pool.heard_client(),
        }
        assert_eq!(first.state(), NodeState::Live, "it may be about to return");
        assert_eq!(second.state(), NodeState::Live);

        // The next silence of all begins at once.
        passes(&pool, &clock, &[], are_suspect).await;
        pool.heard_client();
        assert_eq!(first.state(), NodeState::Suspect, "it had its time");
        pool.heard(&first, Some(Reported::default()));
        passes(&pool, &clock, &[], are_suspect).await;
        pool.heard(&second, Some(Reported::default()));
        assert_eq!(first.state(), NodeState::Live, "it was heard again");
        pool.retire().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_lost_before_its_master_was_cut_off_stays_suspect() {
    for has_ended in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, clock, [lost, other]) = with_two_nodes(directory.path()).await;
        if has_ended {
            pool.detach(&lost.node, lost.session);
        }
        let (lost, other) = (lost.node, other.node);
        let is_suspect = || lost.state() == NodeState::Suspect;
        if !has_ended {
            passes(&pool, &clock, &[&other], is_suspect).await;
        }
        let is_suspect = || other.state() == NodeState::Suspect;
        passes(&pool, &clock, &[], is_suspect).await;
        pool.heard(&other, Some(Reported::default()));
        assert_eq!(lost.state(), NodeState::Suspect);
        pool.retire().await;
    }
}

/// The node's last message may be long ago when a cut heals and ends sessions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_gets_time_for_a_new_session_from_the_end_of_its_last_one() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, clock, [cut, other]) = with_two_nodes(directory.path()).await;
    let (heard, other) = (cut.node.last_heard(), other.node);
    let is_late = || clock.now().since(heard) == SUSPECT_AFTER - Duration::from_millis(500);
    passes(&pool, &clock, &[&other], is_late).await;
    pool.detach(&cut.node, cut.session);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(cut.node.state(), NodeState::Live);
    let is_suspect = || cut.node.state() == NodeState::Suspect;
    passes(&pool, &clock, &[&other], is_suspect).await;
    pool.retire().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_hears_nobody_drops_no_node() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, clock, [first, second]) = with_two_nodes(directory.path()).await;
    let (first, second) = (first.node, second.node);
    let heard = first.last_heard();
    let is_long = || clock.now().since(heard) >= SUSPECT_AFTER * 4;
    passes(&pool, &clock, &[], is_long).await;
    pool.heard(&second, Some(Reported::default()));
    assert_eq!(first.state(), NodeState::Live);
    let is_gone = || first.state() == NodeState::Gone;
    passes(&pool, &clock, &[&second], is_gone).await;
    pool.retire().await;
}

/// A node that drains when a new term welcomes it reports that before its first heartbeat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_says_that_it_drains_was_heard() {
    for is_suspect in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, clock, node) = with_a_silent_node(directory.path()).await;
        if is_suspect {
            pool.heard(&node, Some(Reported::default()));
            clock.advance(SUSPECT_AFTER);
            until("suspect", || node.state() == NodeState::Suspect).await;
        }
        pool.draining(&node, false);
        assert_eq!(node.state(), NodeState::Draining);
        pool.retire().await;
    }
}
