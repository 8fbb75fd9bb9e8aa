//! What the silence of a node means, and what ends it.

mod support;

use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, Clock, ManualClock};
use kvpool_master::membership::{NodeState, Reported, StoreNode};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::Pool;
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use support::media::until;
use support::registration;

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

/// The clock counts while the machine sleeps. The silence of a live node is then the master's own.
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

/// A node that drains when a new term welcomes it says so before its first heartbeat.
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
