use crate::clock::{BootInstant, ManualClock};
use crate::config::Config;
use crate::membership::{NodeState, Registration, Reported, StoreNode};
use crate::metrics::Metrics;
use crate::pool::Pool;
use crate::store::{EmbeddedOptions, EmbeddedStore};
use kvpool_types::{Epoch, HostId, Incarnation, Length, NodeName};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The clock counts while the machine sleeps. The silence of a live node is then the master's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_did_not_run_drops_no_node_for_its_silence() {
    let directory = tempfile::tempdir().unwrap();
    let suspect_after = Duration::from_secs(3);
    let config = Config {
        suspect_after,
        drop_after: suspect_after * 2,
        ..Config::default()
    };
    let clock = Arc::new(ManualClock::new(BootInstant(1000)));
    let pool = pool_in(directory.path(), config, &clock).await;
    let node = connect(&pool).await;
    pool.heard(&node, Some(Reported::default()));

    clock.advance(suspect_after * 10);
    until(|| node.last_heard() == pool.now() || node.state() == NodeState::Gone).await;
    assert_eq!(node.state(), NodeState::Live);

    // The master runs from here on, so the node's silence is its own.
    clock.advance(suspect_after);
    until(|| node.state() == NodeState::Suspect).await;
    clock.advance(suspect_after);
    until(|| node.state() == NodeState::Gone).await;
    pool.retire().await;
}

/// A node that drains when a new term welcomes it says so before its first heartbeat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_says_that_it_drains_was_heard() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1000)));
    let pool = pool_in(directory.path(), Config::default(), &clock).await;
    let node = connect(&pool).await;
    for before in [NodeState::Unreported, NodeState::Suspect] {
        node.set_state(before);
        pool.draining(&node, false);
        assert_eq!(node.state(), NodeState::Draining);
    }
    pool.retire().await;
}

async fn pool_in(directory: &Path, config: Config, clock: &Arc<ManualClock>) -> Arc<Pool> {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let pool = Pool::start(config, Arc::new(store), Arc::clone(clock) as _, metrics);
    pool.await.unwrap()
}

/// A node in a session, before its first heartbeat.
async fn connect(pool: &Arc<Pool>) -> Arc<StoreNode> {
    let registration = Registration {
        name: NodeName("n".into()),
        incarnation: Incarnation(1),
        data_address: "127.0.0.1:1".into(),
        shm_path: String::new(),
        host: HostId(1),
        epoch_seen: Epoch(0),
        secret: None,
        epoch_proof: Default::default(),
        segments: vec![(Length(1 << 20), None)],
        held: Vec::new(),
        loaded: Vec::new(),
        can_pull: true,
        wants_signed_reads: false,
    };
    let node = pool.register(&registration).await.unwrap();
    let (outbox, _unread) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &registration, outbox);
    node
}

async fn until(is_so: impl Fn() -> bool) {
    for _ in 0..6000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not happen in a minute");
}
