//! Lookups that wait for loads, and the events that wake them.

use super::super::Restored;
use super::super::awaited::Awaited;
use super::super::lines::Line;
use super::*;
use kvpool_types::KeyRef;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Wake, Waker};

/// Less than a lookup waits at most. At its deadline it would be woken too.
const SOON: Duration = Duration::from_secs(3);

async fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = std::time::Instant::now() + SOON;
    while !is_so() {
        assert!(std::time::Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn key(number: u64) -> Key {
    Key::parse(&format!("block-{number}")).unwrap()
}

/// How often a lookup was woken.
#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A lookup that only the test polls.
struct Lookup {
    work: Pin<Box<dyn Future<Output = Restored>>>,
    wakes: Arc<Wakes>,
}

impl Lookup {
    /// Looks up blocks, until their loads are in progress.
    fn of(pool: &Arc<Pool>, numbers: Range<u64>) -> Self {
        let pool = Arc::clone(pool);
        let work = async move {
            let keys: Vec<Key> = numbers.map(key).collect();
            let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
            pool.restore(SPACE, &keys[..], Duration::MAX).await
        };
        let mut lookup = Self {
            work: Box::pin(work),
            wakes: Arc::default(),
        };
        assert!(lookup.look().is_none(), "it waits for loads");
        lookup
    }

    fn look(&mut self) -> Option<Restored> {
        let waker = Waker::from(Arc::clone(&self.wakes));
        match self.work.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(restored) => Some(restored),
            Poll::Pending => None,
        }
    }

    fn wakes(&self) -> usize {
        self.wakes.0.load(Ordering::SeqCst)
    }
}

/// A node with memory and media. Its blocks lie only on the media, on each in turn.
struct Cold {
    pool: Arc<Pool>,
    node: Arc<StoreNode>,
    session: u64,
    sent: Sent,
    /// The loads that the node has been told of.
    ordered: Vec<proto::Transfer>,
    _directory: tempfile::TempDir,
}

impl Cold {
    async fn with(media: u32, blocks: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let (node, session, sent) = connected(&pool);
        node.set_state(NodeState::Live);
        let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
        pool.placement.insert(Arc::new(segment));
        let media: Vec<SegmentId> = (1..=media)
            .map(|id| {
                let medium = record::Medium {
                    medium: MediumId(id.into()),
                    ..medium_of(id)
                };
                pool.tier.set_medium(medium);
                attach(&pool, &node, session, SegmentId::on_medium(id));
                SegmentId::on_medium(id)
            })
            .collect();
        for (number, medium) in (0..blocks).zip(media.iter().cycle()) {
            let block = block(&format!("block-{number}"), 7 + number);
            assert!(pool.tier.publish(record::Commit {
                namespace: block.namespace,
                key: block.key,
                version: block.version,
                length: block.length,
                checksum: block.checksum,
                replicas: smallvec::smallvec![(*medium, Offset(number * 16384))],
                parent: None,
                hard_pin: false,
            }));
        }
        Self {
            pool,
            node,
            session,
            sent,
            ordered: Vec::new(),
            _directory: directory,
        }
    }

    /// The loads that were ordered so far.
    fn orders(&mut self) -> &[proto::Transfer] {
        while let Ok(message) = self.sent.try_recv() {
            if let Some(Body::Transfers(orders)) = message.unwrap().body {
                // Only a load has a grant.
                let loads = orders.transfers.into_iter();
                self.ordered
                    .extend(loads.filter(|order| order.grant_id != 0));
            }
        }
        &self.ordered
    }

    /// The ticket of the last load of a block.
    fn ticket(&mut self, number: u64) -> u64 {
        let mut orders = self.orders().iter();
        let last = orders.rfind(|order| order.version == 7 + number);
        last.expect("it was ordered").ticket
    }

    async fn load(&mut self, number: u64) {
        self.end(number, Code::Ok).await;
    }

    /// Ends the last load of a block.
    async fn end(&mut self, number: u64, code: Code) {
        let ticket = self.ticket(number);
        let loads = || self.pool.tiering.traffic.lock().loading.len();
        let before = loads();
        self.pool.transfers_done(&self.node, &[(ticket, code)]);
        soon("the load ends", || loads() < before).await;
    }

    fn is_leased(&self, number: u64) -> bool {
        let (key, now) = (key(number), self.pool.now());
        let mut is_leased = false;
        self.pool
            .directory
            .visit(SPACE, &[key.as_ref()], |_, block| {
                is_leased = block.is_some_and(|block| block.is_leased(now, BootInstant(0)));
            });
        is_leased
    }
}

/// Many lookups that wait for many loads would otherwise look at all of their loads at every end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_is_woken_by_the_end_of_its_last_load() {
    let mut cold = Cold::with(1, 3).await;
    let mut lookup = Lookup::of(&cold.pool, 0..3);
    for number in 0..2 {
        cold.load(number).await;
        assert_eq!(lookup.wakes(), 0, "by block {number}");
        assert!(cold.is_leased(number), "eviction would take it");
    }
    cold.load(2).await;
    soon("woken", || lookup.wakes() == 1).await;
    let restored = lookup.look().expect("each load has ended");
    assert!(restored.left.is_empty() && restored.unreadable.is_empty());
    cold.pool.end_restored(SPACE, &restored);
    for number in 0..3 {
        assert!(!cold.is_leased(number), "block {number}");
    }
    cold.pool.retire().await;
}

/// The caller of a third lookup has gone, so nothing releases a lease of that lookup.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_load_answers_each_lookup_that_waits_for_it() {
    let mut cold = Cold::with(1, 2).await;
    let mut both = Lookup::of(&cold.pool, 0..2);
    let mut second = Lookup::of(&cold.pool, 1..2);
    drop(Lookup::of(&cold.pool, 0..2));
    cold.load(1).await;
    soon("woken", || second.wakes() == 1).await;
    let second = second.look().expect("its only load has ended");
    assert!(second.left.is_empty());
    assert_eq!(both.wakes(), 0, "block 0 is being loaded");
    cold.load(0).await;
    assert_eq!(cold.orders().len(), 2, "each block is loaded once");
    soon("woken", || both.wakes() == 1).await;
    let both = both.look().expect("each load has ended");
    assert!(both.left.is_empty());
    cold.pool.end_restored(SPACE, &second);
    assert!(cold.is_leased(1), "the other lookup has a lease");
    cold.pool.end_restored(SPACE, &both);
    assert!(!cold.is_leased(0) && !cold.is_leased(1));
    cold.pool.retire().await;
}

/// The connection of a reader ends while its lookup waits for a disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leases_of_a_lookup_end_when_its_caller_has_gone() {
    for has_taken_over in [false, true] {
        let mut cold = Cold::with(1, 2).await;
        let mut lookup = Lookup::of(&cold.pool, 0..2);
        cold.load(0).await;
        if has_taken_over {
            cold.end(1, Code::Full).await;
            assert!(lookup.look().is_none(), "block 1 is loaded again");
        }
        assert!(cold.is_leased(0));
        drop(lookup);
        assert!(!cold.is_leased(0), "{has_taken_over}");
        cold.load(1).await;
        assert!(!cold.is_leased(1), "nobody waits for it");
        cold.pool.retire().await;
    }
}

/// The load of the medium that hangs ends too late for the lookup. Its block has a lease all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_waits_for_no_load_of_a_medium_that_has_become_unreadable() {
    let mut cold = Cold::with(2, 2).await;
    let mut lookup = Lookup::of(&cold.pool, 0..2);
    let hangs = cold.pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    let offers = vec![offer(&hangs, MediumState::MediumSlow)];
    let offered = cold.pool.media_offered(&cold.node, cold.session, offers);
    offered.await.unwrap();
    assert_eq!(lookup.wakes(), 1);
    assert!(lookup.look().is_none(), "block 1 is being loaded");
    cold.load(1).await;
    soon("woken", || lookup.wakes() == 2).await;
    cold.load(0).await;
    let restored = lookup.look().expect("no other load is awaited");
    assert!(restored.left.is_empty() && restored.unreadable.is_empty());
    assert!(cold.is_leased(0) && cold.is_leased(1));
    cold.pool.end_restored(SPACE, &restored);
    assert!(!cold.is_leased(0) && !cold.is_leased(1));
    cold.pool.retire().await;
}

/// A load of the first lookup failed. The second lookup has begun it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_waits_for_no_load_that_began_after_the_end_of_its_own() {
    let mut cold = Cold::with(1, 2).await;
    let mut first = Lookup::of(&cold.pool, 0..2);
    cold.end(0, Code::Unreachable).await;
    assert_eq!(first.wakes(), 0, "block 1 is being loaded");
    let mut second = Lookup::of(&cold.pool, 0..1);
    cold.load(1).await;
    soon("woken", || first.wakes() == 1).await;
    let first = first.look().expect("both of its loads have ended");
    assert_eq!(first.unreadable, [0]);
    cold.load(0).await;
    soon("woken", || second.wakes() == 1).await;
    let second = second.look().expect("its load has ended");
    assert!(second.left.is_empty() && second.unreadable.is_empty());
    cold.pool.end_restored(SPACE, &first);
    cold.pool.end_restored(SPACE, &second);
    assert!(!cold.is_leased(0) && !cold.is_leased(1));
    cold.pool.retire().await;
}

/// The node had no memory for the load, or another reader still uses the extent. The caller asks again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_unreadable_only_if_its_load_failed_because_of_the_copy() {
    let of_node = [
        Code::Full,
        Code::InProgress,
        Code::StaleEpoch,
        Code::GrantEnded,
    ];
    for code in of_node {
        let mut cold = Cold::with(1, 1).await;
        let mut lookup = Lookup::of(&cold.pool, 0..1);
        cold.end(0, code).await;
        assert!(lookup.look().is_none(), "{code}: it is loaded again");
        cold.end(0, code).await;
        let restored = lookup.look().expect("it has failed twice");
        assert_eq!((restored.left.len(), restored.unreadable.len()), (1, 0));
        cold.pool.retire().await;
    }
    let of_copy = [
        Code::Unreachable,
        Code::ChecksumMismatch,
        Code::TooLarge,
        Code::Malformed,
        Code::Internal,
    ];
    for code in of_copy {
        let mut cold = Cold::with(1, 1).await;
        let mut lookup = Lookup::of(&cold.pool, 0..1);
        cold.end(0, code).await;
        let restored = lookup.look().expect("the copy cannot be read");
        assert!(restored.left.is_empty(), "{code}");
        cold.pool.retire().await;
    }
}

/// The last lookup comes when the end of the load leases the block for the others. The test delays one of these leases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_that_comes_while_a_load_ends_gets_a_lease_too() {
    let mut cold = Cold::with(1, 1).await;
    let begins = Lookup::of(&cold.pool, 0..1);
    let ticket = cold.ticket(0);
    let token = cold.pool.now().after(Duration::from_secs(60));
    let [early, delayed, late] = std::array::from_fn(|_| Arc::new(Awaited::new(token)));
    let register = |awaited: &Arc<Awaited>| {
        let mut traffic = cold.pool.tiering.traffic.lock();
        let loads: Vec<_> = traffic.loading.keys().map(|load| (0, *load)).collect();
        traffic.await_loads(awaited, loads.into_iter());
    };
    register(&early);
    register(&delayed);
    let end = {
        let delays = delayed.leased.lock();
        let (pool, node) = (Arc::clone(&cold.pool), Arc::clone(&cold.node));
        let end = std::thread::spawn(move || pool.transfers_done(&node, &[(ticket, Code::Ok)]));
        let until = std::time::Instant::now() + SOON;
        while early.take(0).is_none() {
            assert!(std::time::Instant::now() < until, "leased");
            std::thread::sleep(Duration::from_millis(1));
        }
        register(&late);
        drop(delays);
        end
    };
    end.join().unwrap();
    let loads = || cold.pool.tiering.traffic.lock().loading.len();
    soon("the load ends", || loads() == 0).await;
    assert!(delayed.take(0).is_some());
    assert!(late.take(0).is_some());
    drop(begins);
    cold.pool.retire().await;
}

/// A store of a queued block is due. The demoter finds it by itself, and a reader waits for the load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loaded_block_that_has_its_copy_wakes_no_demoter() {
    let mut cold = Cold::with(1, 1).await;
    let lookup = Lookup::of(&cold.pool, 0..1);
    let ticket = cold.ticket(0);
    let pool = Arc::clone(&cold.pool);
    {
        let _nothing_is_ordered = pool.tiering.tending.lock();
        pool.tiering.demotions.lock().expect(cold.node.incarnation);
        let before = pool.tiering.wake.times();
        pool.transfers_done(&cold.node, &[(ticket, Code::Ok)]);
        let until = std::time::Instant::now() + SOON;
        while pool.metrics.snapshot()["blocks_loaded_total"] == 0 {
            assert!(std::time::Instant::now() < until, "loaded");
            std::thread::sleep(Duration::from_millis(1));
        }
        let line = |line: &Line| (line.bytes, line.kept);
        let demotions = pool.tiering.demotions.lock();
        assert_eq!(line(&demotions.nodes[&cold.node.incarnation]), (100, 0));
        drop(demotions);
        assert_eq!(pool.tiering.wake.times(), before);
    }
    drop(lookup);
    pool.retire().await;
}

/// The answer of a lookup for one block whose wait is ended by an event.
async fn answer_at(event: impl FnOnce(&Cold)) -> Restored {
    let cold = Cold::with(1, 1).await;
    let mut lookup = Lookup::of(&cold.pool, 0..1);
    event(&cold);
    assert_eq!(lookup.wakes(), 1);
    let restored = lookup.look().expect("it waits no longer");
    cold.pool.retire().await;
    restored
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_ends_at_once_when_the_pool_stops_or_lapses() {
    let stopped = answer_at(|cold| cold.pool.quiesce()).await;
    assert_eq!(stopped.left, [0]);
    let lapsed = answer_at(|cold| {
        cold.pool.term.end();
        cold.pool.lapse();
    });
    assert_eq!(lapsed.await.left, [0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_ends_at_once_when_its_medium_or_node_has_gone() {
    let id = SegmentId::on_medium(1);
    let forgotten = answer_at(|cold| drop(cold.pool.drop_medium(id))).await;
    assert!(forgotten.left.is_empty() && forgotten.unreadable.is_empty());
    let gone = answer_at(|cold| cold.pool.drop_node(&cold.node)).await;
    assert_eq!(gone.unreadable, [0]);
    let offered_anew = answer_at(|cold| {
        let medium = cold.pool.tier.medium(id).unwrap();
        let ready = offer(&medium, MediumState::MediumReady);
        cold.pool.use_medium(&cold.node, cold.session, id, &ready);
    });
    assert_eq!(offered_anew.await.unreadable, [0]);
}
