//! The setup that the tests of the tier share: a pool, a medium, and a node in a session.

mod awaited;
mod drains;
mod evacuate;
mod evicted;
mod media;
mod pins;
mod restore;
mod second;
mod stores;
mod zones;

use super::super::Pool;
use super::demoter::Put;
use super::transfers::{Direction, Moved, Transfer};
use super::{Emptying, OfferedMedium, Place, Use};
use crate::clock::{BootClock, BootInstant};
use crate::config::Config;
use crate::directory::{BlockMut, NewBlock, Tick, Verdict};
use crate::membership::{Address, NodeState, StoreNode};
use crate::metrics::Metrics;
use crate::placement::extents::Use as RangeUse;
use crate::placement::{Extents, Segment};
use crate::replica::{Copies, ExtentIndex, Replica};
use crate::reservations::Pending;
use crate::standby::Standby;
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use crate::store::{EmbeddedOptions, EmbeddedStore, MetadataStore};
use crate::tier::{Medium, Taken, Tier};
use kvpool_proto::master_message::Body;
use kvpool_proto::{self as proto, MediumState};
use kvpool_types::ids::NamespaceId;
use kvpool_types::medium::Generation;
use kvpool_types::{
    Checksum, Code, GrantKey, Incarnation, Key, Length, MediumId, NodeName, Offset, SegmentId,
    Version,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SPACE: NamespaceId = NamespaceId(1);

async fn pool_in(directory: &std::path::Path) -> Arc<Pool> {
    pool_with(directory, Config::default()).await
}

async fn pool_with(directory: &std::path::Path, config: Config) -> Arc<Pool> {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let clock = Arc::new(BootClock);
    let pool = Pool::start(config, Arc::new(store), clock, metrics);
    pool.await.unwrap()
}

/// A block in memory.
fn block(name: &str, version: u64) -> NewBlock {
    NewBlock {
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
        tick: Tick::default(),
        leased_until: None,
    }
}

/// The record of a copy of the block "block" at an offset of medium 1.
fn copy_at(offset: u64) -> record::Commit {
    copy_of(block("block", 7), offset)
}

/// The record of a block's copy at an offset of medium 1.
fn copy_of(block: NewBlock, offset: u64) -> record::Commit {
    record::Commit {
        namespace: block.namespace,
        key: block.key,
        version: block.version,
        length: block.length,
        checksum: block.checksum,
        replicas: smallvec::smallvec![(SegmentId::on_medium(1), Offset(offset))],
        parent: None,
        hard_pin: false,
    }
}

fn medium_of(id: u32) -> record::Medium {
    record::Medium {
        id: SegmentId::on_medium(id),
        medium: MediumId(1),
        node: NodeName("n".into()),
        generation: 1,
        is_pending: false,
        size: Length(1 << 20),
        zone: Length(1 << 18),
        cursor: 0,
    }
}

type Sent = tokio::sync::mpsc::UnboundedReceiver<Result<proto::MasterMessage, tonic::Status>>;

/// A node in a session, with the messages to it.
fn connected(pool: &Pool) -> (Arc<StoreNode>, u64, Sent) {
    connected_with(pool, 1 << 20)
}

/// [`connected`], whose memory takes blocks of at most so many bytes.
fn connected_with(pool: &Pool, longest: u64) -> (Arc<StoreNode>, u64, Sent) {
    let now = pool.now();
    let node = StoreNode::new(NodeName("n".into()), Incarnation(1), GrantKey([1; 32]), now);
    node.gives_extents(longest);
    let (outbox, sent) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, now);
    (Arc::new(node), session, sent)
}

fn in_use(node: &Arc<StoreNode>, session: u64) -> Use {
    Use {
        node: Arc::clone(node),
        session,
        state: MediumState::MediumReady,
        refuses_writes: false,
        is_attached: true,
        in_flight: 0,
        busy: HashMap::new(),
        forwards: 0,
        has_unmoved: false,
        lists_again: 0,
        namespaces: Vec::new(),
        emptying: Emptying::Idle,
        pause: None,
        is_told_of_long: false,
    }
}

/// A transfer of [`block`] `"block"` of version 7 to the beginning of a medium.
fn transfer(
    node: &Arc<StoreNode>,
    session: u64,
    medium: &Medium,
    direction: Direction,
) -> Transfer {
    Transfer {
        node: Arc::clone(node),
        session,
        block: Moved {
            namespace: SPACE,
            key: Key::parse("block").unwrap(),
            version: Version(7),
            length: Length(100),
            checksum: Checksum(1),
            hard_pin: false,
        },
        place: Place {
            medium: medium.id,
            offset: Offset(0),
        },
        direction,
        _hold: None,
    }
}

/// A pool with one medium.
async fn pool_on_medium(directory: &std::path::Path) -> (Arc<Pool>, Arc<Medium>) {
    let pool = pool_in(directory).await;
    pool.tier.set_medium(medium_of(1));
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    (pool, medium)
}

/// Attaches a medium to a node.
fn attach(pool: &Pool, node: &Arc<StoreNode>, session: u64, medium: SegmentId) {
    let used = in_use(node, session);
    pool.tiering.traffic.lock().uses.insert(medium, used);
}

/// Begins the [`transfer`], and returns its ticket.
fn begin(
    pool: &Pool,
    node: &Arc<StoreNode>,
    session: u64,
    medium: &Medium,
    direction: Direction,
) -> u64 {
    let transfer = transfer(node, session, medium, direction);
    let mut traffic = pool.tiering.traffic.lock();
    assert!(traffic.begin(medium, transfer, proto::Transfer::default()));
    traffic.last_ticket
}

/// Delays the effects of later records in the log until the sender is dropped.
fn hold_log(pool: &Pool) -> std::sync::mpsc::Sender<()> {
    let (release, held) = std::sync::mpsc::channel();
    pool.journal()
        .submit_now(Vec::new(), Ack::Durable, move |_| {
            let _released = held.recv();
        });
    release
}

/// A node's offer of a medium that was attached before.
fn offer(medium: &Medium, state: MediumState) -> OfferedMedium {
    OfferedMedium {
        medium: MediumId(1),
        generation: Generation(1),
        size: medium.size,
        zone: medium.zone,
        state,
        budget: 0,
        namespaces: Vec::new(),
    }
}
