use super::super::Pool;
use super::demoter::Put;
use super::transfers::{Direction, Moved, Transfer};
use super::{Emptying, OfferedMedium, Place, Use};
use crate::clock::{BootClock, BootInstant};
use crate::config::Config;
use crate::directory::{BlockMut, NewBlock, Tick, Verdict};
use crate::membership::{Address, NodeState, StoreNode};
use crate::metrics::Metrics;
use crate::placement::Segment;
use crate::placement::extents::Use as RangeUse;
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
    let (node, session, _sent) = connected(&pool);
    let medium = SegmentId::on_medium(1);
    let used = in_use(&node, session);
    pool.tiering.traffic.lock().uses.insert(medium, used);
    let stores_are_ordered = pool.tiering.tending.lock();
    pool.replace_lost_copies();
    assert!(!has_lost.load(Ordering::Acquire));
    drop(stores_are_ordered);
    pool.retire().await;
}

/// Dropping the first of two media takes seconds when it has many copies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_came_back_while_another_one_was_dropped_stays() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        ssd_drop_after: Duration::ZERO,
        ..Config::default()
    };
    let pool = pool_with(directory.path(), config).await;
    // The demoter of a term that is over drops nothing. The test does it instead.
    pool.term.end();
    let [first, second] = [1, 2].map(SegmentId::on_medium);
    let (away, session, _sent) = connected(&pool);
    away.end_session(pool.now());
    let first_is_dropped = {
        // While this is held, nobody drops a medium to the end.
        let _held = pool.evicting.write();
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(first, in_use(&away, session));
        drop(traffic);
        for id in [1, 2] {
            pool.tier.set_medium(medium_of(id));
        }
        let dropping = Arc::clone(&pool);
        let dropping = std::thread::spawn(move || dropping.drop_absent_media());
        while pool.tiering.traffic.lock().uses.contains_key(&first) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (back, session, _sent) = connected(&pool);
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(second, in_use(&back, session));
        drop(traffic);
        dropping
    };
    first_is_dropped.join().unwrap();
    pool.retire().await;
    let left: Vec<_> = pool.tier.media().iter().map(|medium| medium.id).collect();
    assert_eq!(left, [second]);
}

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
    let now = pool.now();
    let node = StoreNode::new(NodeName("n".into()), Incarnation(1), GrantKey([1; 32]), now);
    let (outbox, sent) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, now);
    (Arc::new(node), session, sent)
}

fn in_use(node: &Arc<StoreNode>, session: u64) -> Use {
    Use {
        node: Arc::clone(node),
        session,
        state: MediumState::MediumReady,
        is_attached: true,
        in_flight: 0,
        busy: HashMap::new(),
        forwards: 0,
        namespaces: Vec::new(),
        emptying: Emptying::Idle,
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

/// The node of the block was swept, and a load brought the block back, after a removal had looked it up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_takes_a_block_that_came_back_in_another_slot() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let publish = |name: &str, version: u64| {
        let published = pool.directory.publish(&[block(name, version)]).remove(0);
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
    let medium = Medium::new(medium_of(1), pool.directory.accounts()).unwrap();
    let (node, session, mut sent) = connected(&pool);
    let from = Place {
        medium: medium.id,
        offset: Offset(8192),
    };
    let transfer = |session| transfer(&node, session, &medium, Direction::Forward { from });
    let order = proto::Transfer::default;
    {
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(medium.id, in_use(&node, session));
        assert!(!traffic.begin(&medium, transfer(session - 1), order()));
        let used = &traffic.uses[&medium.id];
        assert_eq!((used.in_flight, used.forwards, used.busy.len()), (0, 0, 0));
        assert!(traffic.open.is_empty());
        assert!(sent.try_recv().is_err());
        assert!(traffic.begin(&medium, transfer(session), order()));
        assert_eq!(traffic.open.len(), 1);
        assert!(sent.try_recv().is_ok());
        node.detach(session, pool.now());
        assert!(!traffic.begin(&medium, transfer(session), order()));
    }
    pool.retire().await;
}

/// The evictor takes thousands of blocks out of the directory before it notes the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_ends_while_its_block_is_evicted_leaves_a_copy() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    let block = block("block", 7);
    let id = pool.directory.publish(&[block]).remove(0).id.unwrap();
    let (node, session, _sent) = connected(&pool);
    let transfer = transfer(&node, session, &medium, Direction::Store);
    let ticket = {
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(medium.id, in_use(&node, session));
        assert!(traffic.begin(&medium, transfer, proto::Transfer::default()));
        traffic.last_ticket
    };
    let end = {
        let _until_noted = pool.evicting.read();
        let evicted = pool
            .directory
            .remove_by_id(id, Version(7), |_| Verdict::Remove);
        let (ended, of) = (Arc::clone(&pool), Arc::clone(&node));
        let end = std::thread::spawn(move || ended.transfers_done(&of, &[(ticket, Code::Ok)]));
        std::thread::sleep(Duration::from_millis(50));
        pool.note_left_memory(&[evicted.unwrap()]);
        end
    };
    end.join().unwrap();
    pool.journal().flush().await.unwrap();
    let key = Key::parse("block").unwrap();
    assert!(pool.is_on_medium(SPACE, &key, Version(7)));
    pool.retire().await;
}

/// A put makes its block visible, and then the block enters the line of those that wait for their copies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_may_leave_once_it_was_in_its_line_when_stores_were_ordered() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let put = |name: &str| {
        let tick = pool.directory.ticks(1).of(0);
        let block = NewBlock {
            tick,
            ..block(name, 7)
        };
        assert!(pool.directory.publish(&[block]).remove(0).id.is_some());
    };
    let evict = |before| -> Vec<String> {
        let evicted = pool
            .directory
            .evict_before(before, u64::MAX, pool.now(), |_| true);
        let names = evicted.iter().map(|block| block.key.shown().to_string());
        names.collect()
    };
    put("early");
    let before = pool.order_stores();
    put("late");
    assert_eq!(evict(before), ["early"]);

    let queueing = pool.tiering.queueing.lock();
    let ordering = std::thread::spawn({
        let pool = Arc::clone(&pool);
        move || pool.order_stores()
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!ordering.is_finished(), "a block is not in its line yet");
    drop(queueing);
    assert_eq!(evict(ordering.join().unwrap()), ["late"]);
    pool.retire().await;
}

/// The journal's thread publishes a block, and ends its put a moment later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_ends_before_the_put_of_its_block_leaves_a_copy() {
    for (of_put, has_copy) in [(7, true), (8, false)] {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        pool.tier.set_medium(medium_of(1));
        let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
        let key = Key::parse("block").unwrap();
        let block = block("block", 7);
        let pending = Pending::granted(Version(of_put), block.length, Copies::new());
        let mut reservations = pool.reservations.lock();
        reservations.insert(SPACE, key.as_ref(), pending);
        drop(reservations);
        assert!(pool.directory.publish(&[block]).remove(0).id.is_some());
        let (node, session, _sent) = connected(&pool);
        let transfer = transfer(&node, session, &medium, Direction::Store);
        let ticket = {
            let mut traffic = pool.tiering.traffic.lock();
            traffic.uses.insert(medium.id, in_use(&node, session));
            assert!(traffic.begin(&medium, transfer, proto::Transfer::default()));
            traffic.last_ticket
        };
        pool.transfers_done(&node, &[(ticket, Code::Ok)]);
        pool.journal().flush().await.unwrap();
        assert_eq!(pool.is_on_medium(SPACE, &key, Version(7)), has_copy);
        pool.retire().await;
    }
}

/// The record of a block's copy at an offset of medium 1.
fn copy_at(offset: u64) -> record::Commit {
    let block = block("block", 7);
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

/// A lookup may come at any moment of a move.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_moves_is_there_at_every_moment() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let key = Key::parse("block").unwrap();
    assert!(pool.tier.publish(copy_at(0)));
    let moves = std::thread::spawn({
        let pool = Arc::clone(&pool);
        move || {
            for n in 1..50_000 {
                assert!(pool.tier.publish(copy_at(n % 2 * 8192)));
            }
        }
    });
    let mut looks = 0;
    while !moves.is_finished() {
        looks += 1;
        assert!(pool.is_on_medium(SPACE, &key, Version(7)), "look {looks}");
    }
    moves.join().unwrap();
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    assert_eq!(medium.copies(), 1, "the others are free");
    pool.retire().await;
}

/// A standby that starts reads records again that it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_record_is_read_again_lies_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    for offset in [0, 0, 8192, 8192, 0] {
        assert!(pool.tier.publish(copy_at(offset)));
        let extents = medium.extents();
        let copies = extents.iter().filter(|range| range.usage != RangeUse::Free);
        let at: Vec<u64> = copies.map(|range| range.offset.0).collect();
        assert_eq!(at, [offset]);
    }
    pool.retire().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_moves_keeps_its_holders() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let (key, now) = (Key::parse("block").unwrap(), pool.now());
    let token = now.after(Duration::from_secs(60));
    let with = |what: &dyn Fn(&mut BlockMut<'_>)| {
        let copies = pool.tier.directory();
        copies.visit(SPACE, &[key.as_ref()], |_, copy| what(&mut copy.unwrap()));
    };
    assert!(pool.tier.publish(copy_at(0)));
    with(&|copy| copy.lease(token, now));
    assert!(pool.tier.publish(copy_at(8192)));
    with(&|copy| assert!(copy.view().is_leased(now, BootInstant(0))));
    with(&|copy| copy.release(token, now));
    with(&|copy| assert!(!copy.view().is_leased(now, BootInstant(0))));
    pool.retire().await;
}

/// A node may be silent for a moment while its medium is attached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_to_a_medium_begins_while_its_node_is_suspect() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let (node, session, mut sent) = connected(&pool);
    node.drain();
    node.set_state(NodeState::Suspect);
    let offered = Use {
        is_attached: false,
        ..in_use(&node, session)
    };
    let medium = SegmentId::on_medium(1);
    pool.tiering.traffic.lock().uses.insert(medium, offered);
    pool.medium_attached(&node, session, MediumId(1), Generation(1))
        .await;
    let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let told = told.expect("the drain has begun").unwrap().unwrap();
    assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
    pool.retire().await;
}

/// The node of the memory is about to leave, or has no session. Its medium is another node's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_copy_moves_only_to_memory_that_stays() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    node.set_state(NodeState::Live);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    let key = Key::parse("block").unwrap();
    assert!(
        pool.directory
            .publish(&[block("block", 7)])
            .remove(0)
            .id
            .is_some()
    );
    let until = pool.now().after(Duration::from_secs(60));
    let moves = || {
        (
            pool.lease_in_memory(SPACE, &key, Version(7), until),
            pool.stays_in_memory(SPACE, &key, Version(7)),
        )
    };
    assert_eq!(moves(), (true, true));
    node.detach(session, pool.now());
    assert_eq!(moves(), (false, false), "without a session");
    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    node.attach(Address::default(), outbox, pool.now());
    assert_eq!(moves(), (true, true));
    node.drain();
    assert_eq!(moves(), (false, false), "of a node that drains");
    pool.retire().await;
}

/// Keeps what the log would do next from taking effect until the sender is dropped.
fn hold_log(pool: &Pool) -> std::sync::mpsc::Sender<()> {
    let (release, held) = std::sync::mpsc::channel();
    pool.journal()
        .submit_now(Vec::new(), Ack::Durable, move |_| {
            let _released = held.recv();
        });
    release
}

/// The block's copy lies in the zone behind the cursor, which is due. It was not used.
fn copy_in_a_zone_that_is_due(pool: &Pool, at: u64) -> Arc<Medium> {
    pool.tier.set_medium(medium_of(1));
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    assert!(pool.tier.publish(copy_at(at)));
    assert_eq!(medium.oldest().len(), 1);
    medium.begin_term(pool.directory.next_tick());
    let taken = medium.take(Length(60 << 10), pool.directory.next_tick());
    assert!(matches!(taken, Taken::At(_)) && medium.is_next_due());
    medium
}

/// A node answers an order to move the block's copy to the beginning of the medium.
fn answer_move(
    pool: &Arc<Pool>,
    node: &Arc<StoreNode>,
    session: u64,
    medium: &Medium,
    from: u64,
    code: Code,
) {
    let from = Place {
        medium: medium.id,
        offset: Offset(from),
    };
    let transfer = transfer(node, session, medium, Direction::Forward { from });
    let ticket = {
        let mut traffic = pool.tiering.traffic.lock();
        assert!(traffic.begin(medium, transfer, proto::Transfer::default()));
        traffic.last_ticket
    };
    pool.transfers_done(node, &[(ticket, code)]);
}

/// Where the block's copy lies.
fn lies_at(tier: &Tier) -> Option<u64> {
    let (key, mut at) = (Key::parse("block").unwrap(), None);
    let copies = tier.directory();
    copies.visit(SPACE, &[key.as_ref()], |_, copy| {
        at = copy.map(|copy| copy.view().replicas()[0].offset.0);
    });
    at
}

/// The record of a copy that moved is late, and the session breaks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zone_is_emptied_behind_what_an_earlier_session_recorded() {
    const FROM: u64 = 1 << 18;
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let medium = copy_in_a_zone_that_is_due(&pool, FROM);
    let (node, first, _sent) = connected(&pool);
    let used = Use {
        emptying: Emptying::Logging,
        ..in_use(&node, first)
    };
    pool.tiering.traffic.lock().uses.insert(medium.id, used);
    let release = hold_log(&pool);
    answer_move(&pool, &node, first, &medium, FROM, Code::Ok);

    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    let second = node.attach(Address::default(), outbox, pool.now());
    pool.media_left(&node, first);
    let offer = OfferedMedium {
        medium: MediumId(1),
        generation: Generation(1),
        size: medium.size,
        zone: medium.zone,
        state: MediumState::MediumReady,
        budget: 0,
        namespaces: Vec::new(),
    };
    pool.use_medium(&node, second, medium.id, &offer);
    let attach = |used: &mut Use| used.is_attached = true;
    pool.tiering
        .traffic
        .lock()
        .uses
        .get_mut(&medium.id)
        .map(attach);
    pool.tend_media();
    assert_eq!(lies_at(&pool.tier), Some(FROM), "it is on its way");
    pool.set_emptying(medium.id, &node, first, Emptying::Idle);
    pool.tend_media();
    assert_eq!(lies_at(&pool.tier), Some(FROM), "of an earlier session");
    drop(release);
    pool.journal().flush().await.unwrap();
    assert_eq!(lies_at(&pool.tier), Some(0));
    pool.tend_media();
    let is_empty = || {
        pool.tend_media();
        !medium.is_next_due()
    };
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while !is_empty() {
        assert!(std::time::Instant::now() < until, "the zone is not emptied");
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.retire().await;
}

/// The node has a new session already, and offers its medium in a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_takes_stores_in_the_present_session_of_its_node_alone() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let (node, first, _sent) = connected(&pool);
    let used = in_use(&node, first);
    assert!(used.takes_stores());
    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    let second = node.attach(Address::default(), outbox, pool.now());
    assert!(!used.takes_stores());
    assert!(in_use(&node, second).takes_stores());
    pool.retire().await;
}

/// The copy of a block at its old place is wrong, or leaves with its zone, while the block is on its way to another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_gone_takes_none_out_of_another_place() {
    const FROM: u64 = 1 << 18;
    for is_wrong in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap());
        let metrics = Arc::new(Metrics::new().unwrap());
        let kept = Arc::clone(&store) as Arc<dyn MetadataStore>;
        let pool = Pool::start(Config::default(), kept, Arc::new(BootClock), metrics);
        let pool = pool.await.unwrap();
        let records = vec![Record::Medium(medium_of(1)), Record::Commit(copy_at(FROM))];
        pool.log(records, || {}).await.unwrap();
        let medium = copy_in_a_zone_that_is_due(&pool, FROM);
        let (node, session, _sent) = connected(&pool);
        let used = Use {
            emptying: Emptying::Logging,
            ..in_use(&node, session)
        };
        pool.tiering.traffic.lock().uses.insert(medium.id, used);
        let release = hold_log(&pool);
        answer_move(&pool, &node, session, &medium, FROM, Code::Ok);
        match is_wrong {
            true => {
                let code = Code::ChecksumMismatch;
                answer_move(&pool, &node, session, &medium, FROM, code);
            }
            false => pool.drop_oldest(&medium, &node, session),
        }
        assert_eq!(lies_at(&pool.tier), None);
        drop(release);
        pool.journal().flush().await.unwrap();
        assert_eq!(lies_at(&pool.tier), Some(0));
        pool.retire().await;
        let config = Config::default();
        let next = Standby::load(&*store, &config, Arc::new(BootClock));
        let next = next.await.unwrap();
        assert_eq!(lies_at(&next.tier), Some(0), "is wrong: {is_wrong}");
    }
}

/// Between the look at the copy and its removal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_has_moved_stays_when_its_old_place_was_read_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    assert!(pool.tier.publish(copy_at(8192)));
    let block = block("block", 7);
    let gone = |offset| record::ReplicaGone {
        namespace: block.namespace,
        key: block.key.clone(),
        version: block.version,
        segment: SegmentId::on_medium(1),
        offset,
    };
    assert!(!pool.tier.copy_gone(&gone(Some(Offset(0)))));
    assert_eq!(lies_at(&pool.tier), Some(8192));
    // A record of an earlier build.
    assert!(pool.tier.copy_gone(&gone(None)));
    assert_eq!(lies_at(&pool.tier), None);
    pool.retire().await;
}

/// No zone takes the copy, and the node with the block in memory is about to leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_copy_is_loaded_where_the_memory_with_its_block_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    assert!(pool.tier.publish(record::Commit {
        hard_pin: true,
        ..copy_at(1 << 18)
    }));
    let (node, session, _sent) = connected(&pool);
    let (leaving, _, _to_it) = connected(&pool);
    for (id, node) in [(1, &leaving), (2, &node)] {
        node.set_state(NodeState::Live);
        let segment = Segment::new(SegmentId(id), Arc::clone(node), Length(1 << 20), 1.0);
        pool.placement.insert(Arc::new(segment));
    }
    let published = pool.directory.publish(&[block("block", 7)]).remove(0);
    assert!(published.id.is_some());
    let used = in_use(&node, session);
    pool.tiering.traffic.lock().uses.insert(medium.id, used);
    pool.load_pinned(SPACE, &Key::parse("block").unwrap());
    assert!(pool.tiering.traffic.lock().loading.is_empty());
    leaving.drain();
    pool.drop_oldest(&medium, &node, session);
    assert_eq!(lies_at(&pool.tier), Some(1 << 18));
    assert_eq!(pool.tiering.traffic.lock().loading.len(), 1);
    pool.retire().await;
}

/// Blocks whose copies lay on it get others from the node's second medium.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_blocks_of_a_medium_that_is_gone_are_copied_again() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    let (node, session, _sent) = connected(&pool);
    pool.tiering
        .traffic
        .lock()
        .uses
        .insert(medium.id, in_use(&node, session));
    let offer = |state| OfferedMedium {
        medium: MediumId(1),
        generation: Generation(1),
        size: medium.size,
        zone: medium.zone,
        state,
        budget: 0,
        namespaces: Vec::new(),
    };
    let has_lost = || pool.tiering.has_lost_copies.load(Ordering::Acquire);
    let offers = vec![offer(MediumState::MediumSlow)];
    pool.media_offered(&node, session, offers).await.unwrap();
    assert!(!has_lost());
    let offers = vec![offer(MediumState::MediumGone)];
    pool.media_offered(&node, session, offers).await.unwrap();
    assert!(has_lost());
    // Nothing takes stores at the moment.
    pool.replace_lost_copies();
    assert!(has_lost());
    pool.retire().await;
}

/// The slow medium's last stores are not recorded when the session ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_stores_on_a_medium_that_has_become_slow() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    pool.tier.set_medium(record::Medium {
        medium: MediumId(2),
        ..medium_of(2)
    });
    let slow = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    assert!(
        pool.directory
            .publish(&[block("block", 7)])
            .remove(0)
            .id
            .is_some()
    );
    let (node, session, mut sent) = connected(&pool);
    node.drain();
    let ticket = {
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(slow.id, in_use(&node, session));
        let store = transfer(&node, session, &slow, Direction::Store);
        assert!(traffic.begin(&slow, store, proto::Transfer::default()));
        let ticket = traffic.last_ticket;
        let used = traffic.uses.get_mut(&slow.id).unwrap();
        used.state = MediumState::MediumSlow;
        let offered = Use {
            is_attached: false,
            ..in_use(&node, session)
        };
        traffic.uses.insert(SegmentId::on_medium(2), offered);
        ticket
    };
    let order = sent.recv().await.unwrap().unwrap();
    assert!(matches!(order.body, Some(Body::Transfers(_))), "{order:?}");
    pool.medium_attached(&node, session, MediumId(2), Generation(1))
        .await;
    let early = tokio::time::timeout(Duration::from_millis(300), sent.recv()).await;
    assert!(early.is_err(), "{early:?}");
    pool.transfers_done(&node, &[(ticket, Code::Ok)]);
    let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let told = told.expect("the drain has ended").unwrap().unwrap();
    assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
    pool.retire().await;
}

/// A pull brings the block to another node while its copy is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_replica_of_a_block_takes_no_copy_from_it() {
    for (of_put, has_copy) in [(7, true), (8, false)] {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        pool.tier.set_medium(medium_of(1));
        let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
        let key = Key::parse("block").unwrap();
        let id = pool.directory.publish(&[block("block", 7)]).remove(0).id;
        let (node, session, _sent) = connected(&pool);
        let store = transfer(&node, session, &medium, Direction::Store);
        let ticket = {
            let mut traffic = pool.tiering.traffic.lock();
            traffic.uses.insert(medium.id, in_use(&node, session));
            assert!(traffic.begin(&medium, store, proto::Transfer::default()));
            traffic.last_ticket
        };
        pool.queue_for_media(std::iter::once(Put {
            namespace: SPACE,
            key: &key,
            parent: None,
            block: id.unwrap(),
            version: Version(of_put),
            bytes: 100,
            replicas: &[],
        }));
        pool.transfers_done(&node, &[(ticket, Code::Ok)]);
        pool.journal().flush().await.unwrap();
        assert_eq!(pool.is_on_medium(SPACE, &key, Version(7)), has_copy);
        pool.retire().await;
    }
}
