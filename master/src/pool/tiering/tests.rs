use super::super::Pool;
use super::transfers::{Direction, Moved, Transfer};
use super::{Emptying, Place, Use};
use crate::clock::BootClock;
use crate::config::Config;
use crate::directory::{NewBlock, Verdict};
use crate::membership::{Address, StoreNode};
use crate::metrics::Metrics;
use crate::replica::{Copies, ExtentIndex, Replica};
use crate::store::record;
use crate::store::{EmbeddedOptions, EmbeddedStore};
use crate::tier::Medium;
use kvpool_proto::{self as proto, MediumState};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{
    Checksum, GrantKey, Incarnation, Key, Length, MediumId, NodeName, Offset, SegmentId, Version,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SPACE: NamespaceId = NamespaceId(1);

/// The evictor orders stores too. It must not wait for a walk over all blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ordering_stores_walks_over_no_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let has_lost = &pool.tiering.has_lost_copies;
    has_lost.store(true, Ordering::Release);
    // Without media the demoter's own thread does nothing.
    pool.tend_media();
    assert!(
        has_lost.load(Ordering::Acquire),
        "the walk is left to the demoter"
    );
    let stores_are_ordered = pool.tiering.tending.lock();
    pool.replace_lost_copies();
    assert!(!has_lost.load(Ordering::Acquire));
    drop(stores_are_ordered);
    pool.retire().await;
}

async fn pool_in(directory: &std::path::Path) -> Arc<Pool> {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let clock = Arc::new(BootClock);
    let pool = Pool::start(Config::default(), Arc::new(store), clock, metrics);
    pool.await.unwrap()
}

/// The node of the block was swept, and a load brought the block back, after a removal had looked it up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_takes_a_block_that_came_back_in_another_slot() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let publish = |name: &str, version: u64| {
        let block = NewBlock {
            namespace: SPACE,
            key: Key::parse(name).unwrap(),
            version: Version(version),
            length: Length(100),
            checksum: Checksum(1),
            replicas: Copies::from_slice(&[Replica {
                segment: SegmentId(1),
                extent: ExtentIndex(0),
                offset: Offset(0),
            }]),
            parent: None,
            soft_pin_until: None,
            hard_pin: false,
            tick: pool.directory.ticks(1).of(0),
        };
        let published = pool.directory.publish(&[block]).remove(0);
        published.id.unwrap()
    };
    let key = Key::parse("block").unwrap();
    let before = publish("block", 7);
    let removed = pool
        .directory
        .remove_by_id(before, Version(7), |_| Verdict::Remove);
    assert!(removed.is_some());
    // Others take the slot.
    for number in 0..4096 {
        publish(&format!("other {number}"), 8);
    }
    let now = publish("block", 7);
    assert_ne!(before, now);
    let taken = pool.take_out(&[(Some(before), Version(7))], &[(SPACE, key.clone())]);
    assert_eq!(taken, [true]);
    assert_eq!(pool.directory.find(SPACE, key.as_ref()), None);
    pool.retire().await;
}

/// Who orders transfers has looked at the session a while before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_begins_in_the_session_of_its_medium_alone() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let record = record::Medium {
        id: SegmentId::on_medium(1),
        medium: MediumId(1),
        node: NodeName("n".into()),
        generation: 1,
        is_pending: false,
        size: Length(1 << 20),
        zone: Length(1 << 18),
        cursor: 0,
    };
    let medium = Medium::new(record, pool.directory.accounts()).unwrap();
    let now = pool.now();
    let node = StoreNode::new(NodeName("n".into()), Incarnation(1), GrantKey([1; 32]), now);
    let node = Arc::new(node);
    let (outbox, mut sent) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, now);
    let mut traffic = pool.tiering.traffic.lock();
    let used = Use {
        node: Arc::clone(&node),
        session,
        state: MediumState::MediumReady,
        is_attached: true,
        in_flight: 0,
        busy: HashMap::new(),
        forwards: 0,
        namespaces: Vec::new(),
        emptying: Emptying::Idle,
    };
    traffic.uses.insert(medium.id, used);
    let place = |offset| Place {
        medium: medium.id,
        offset: Offset(offset),
    };
    let transfer = |session| Transfer {
        node: Arc::clone(&node),
        session,
        block: Moved {
            namespace: SPACE,
            key: Key::parse("block").unwrap(),
            version: Version(1),
            length: Length(100),
            checksum: Checksum(1),
            hard_pin: false,
        },
        place: place(0),
        direction: Direction::Forward { from: place(8192) },
        _hold: None,
    };
    let order = proto::Transfer::default;
    assert!(!traffic.begin(&medium, transfer(session - 1), order()));
    let used = &traffic.uses[&medium.id];
    assert_eq!((used.in_flight, used.forwards, used.busy.len()), (0, 0, 0));
    assert!(traffic.open.is_empty());
    assert!(sent.try_recv().is_err());
    assert!(traffic.begin(&medium, transfer(session), order()));
    assert_eq!(traffic.open.len(), 1);
    assert!(sent.try_recv().is_ok());
    node.detach(session);
    assert!(!traffic.begin(&medium, transfer(session), order()));
    drop(traffic);
    pool.retire().await;
}
