//! Invariant 7 and the rules of leases and grants, on a clock that the test controls.

use kvpool_master::clock::{BootInstant, Clock, ManualClock};
use kvpool_master::membership::{Outbox, Registration, Reported, StoreNode};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{CommitItem, Holder, LeaseOf, Pool, ReserveOptions};
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore};
use kvpool_master::writers::GRACE;
use kvpool_master::{CommitAck, Config};
use kvpool_proto as proto;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, ClientId, Code, Epoch, HostId, Incarnation, Key, Length, NodeName};
use proto::master_message::Body;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const NS: NamespaceId = NamespaceId(0);
const BLOCK: u64 = 1 << 20;
const TTL: Duration = Duration::from_secs(5);

/// A pool with one node of 4 MiB that fences on request of the test.
struct Bench {
    pool: Arc<Pool>,
    clock: Arc<ManualClock>,
    node: Arc<StoreNode>,
    inbox: UnboundedReceiver<Result<proto::MasterMessage, tonic::Status>>,
    _directory: TempDir,
}

fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new().unwrap())
}

/// The registration of a node with one segment.
fn registration(size: Length) -> Registration {
    Registration {
        name: NodeName("n".into()),
        incarnation: Incarnation(7),
        data_address: "127.0.0.1:1".into(),
        shm_path: String::new(),
        host: HostId(1),
        epoch_seen: Epoch(0),
        secret: None,
        epoch_proof: Default::default(),
        segments: vec![(size, None)],
        held: Vec::new(),
        loaded: Vec::new(),
        can_pull: false,
        can_undrain: false,
        version: String::new(),
        wants_signed_reads: false,
    }
}

impl Bench {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
        let config = Config {
            eviction_high_watermark_ratio: 1.0,
            eviction_ratio: 0.0,
            lease_ttl: TTL,
            commit_ack: CommitAck::Durable,
            // The test advances the clock by more than any node may be silent.
            suspect_after: Duration::from_secs(1 << 20),
            drop_after: Duration::from_secs(1 << 21),
            ..Config::default()
        };
        let clock_for_pool = Arc::clone(&clock) as Arc<dyn Clock>;
        let pool = Pool::start(config, Arc::new(store), clock_for_pool, metrics())
            .await
            .unwrap();
        let registration = registration(Length(4 * BLOCK));
        let node = pool.register(&registration).await.unwrap();
        let (outbox, inbox): (Outbox, _) = unbounded_channel();
        pool.activate(&node, &registration, outbox);
        pool.heard(&node, Some(Reported::default()));
        Self {
            pool,
            clock,
            node,
            inbox,
            _directory: directory,
        }
    }

    async fn reserve(&self, name: &str, timeout: Duration) -> Result<u64, Code> {
        let key = Key::parse(name).unwrap();
        let options = ReserveOptions {
            timeout,
            ..ReserveOptions::default()
        };
        let outcome = self
            .pool
            .reserve(NS, &[key.as_ref()], &[Length(BLOCK)], &options)
            .await;
        outcome
            .into_iter()
            .next()
            .unwrap()
            .map(|granted| granted.version.0)
    }

    async fn commit(&self, name: &str, version: u64) -> Code {
        let item = CommitItem {
            key: Key::parse(name).unwrap(),
            version: kvpool_types::Version(version),
            length: Length(BLOCK),
            checksum: Checksum(1),
            segments: self.node.segments().into(),
            parent: None,
        };
        self.pool.commit(NS, vec![item]).await[0]
    }

    async fn put(&self, name: &str) {
        let version = self.reserve(name, Duration::ZERO).await.unwrap();
        assert_eq!(self.commit(name, version).await, Code::Ok);
    }

    fn lease(&self, name: &str) -> BootInstant {
        let key = Key::parse(name).unwrap();
        let leased = self.pool.exist(NS, &[key.as_ref()], true);
        assert_eq!(leased.answer, [true]);
        leased.token
    }

    fn is_there(&self, name: &str) -> bool {
        let key = Key::parse(name).unwrap();
        self.pool.exist(NS, &[key.as_ref()], false).answer[0]
    }

    /// Fences every requested extent for a while.
    async fn fence(&mut self) {
        let limit = tokio::time::Instant::now() + Duration::from_millis(300);
        while let Ok(Some(Ok(message))) = tokio::time::timeout_at(limit, self.inbox.recv()).await {
            if let Some(Body::Fence(fence)) = message.body {
                let tickets: Vec<u64> = fence.items.iter().map(|item| item.ticket).collect();
                self.pool.fenced(&self.node, &tickets);
            }
        }
    }
}

const A_WHILE: Duration = Duration::from_millis(400);

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_holds_to_its_last_moment_and_no_longer() {
    let mut bench = Bench::new().await;
    for name in ["a", "b", "c", "d"] {
        bench.put(name).await;
        bench.lease(name);
    }
    bench.clock.advance(TTL - Duration::from_millis(1));
    assert_eq!(bench.reserve("e", A_WHILE).await, Err(Code::Full));
    assert!(["a", "b", "c", "d"].iter().all(|name| bench.is_there(name)));
    // Lease ends are stored in steps of a few milliseconds, rounded up.
    bench.clock.advance(Duration::from_millis(50));
    let pool = Arc::clone(&bench.pool);
    let waiting = tokio::spawn(async move {
        let key = Key::parse("e").unwrap();
        let options = ReserveOptions {
            timeout: Duration::from_secs(5),
            ..ReserveOptions::default()
        };
        pool.reserve(NS, &[key.as_ref()], &[Length(BLOCK)], &options)
            .await
    });
    bench.fence().await;
    assert!(waiting.await.unwrap()[0].is_ok());
    assert!(!bench.is_there("a"), "the least recently used goes");
    assert!(bench.is_there("d"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_ends_a_lease_only_for_its_own_holder() {
    let bench = Bench::new().await;
    bench.put("a").await;
    let key = Key::parse("a").unwrap();
    let keys = [key.as_ref()];
    let first = bench.lease("a");
    bench.clock.advance(Duration::from_secs(1));
    let second = bench.lease("a");
    bench.pool.release(NS, &keys, |_| Holder::of_any(first));
    let left = bench.pool.describe(NS, &keys)[0]
        .clone()
        .unwrap()
        .lease_left;
    assert!(
        left >= TTL,
        "the second holder's lease has been cut: {left:?}"
    );
    bench.pool.release(NS, &keys, |_| Holder::of_any(second));
    assert_eq!(
        bench.pool.describe(NS, &keys)[0]
            .clone()
            .unwrap()
            .lease_left,
        Duration::ZERO
    );
    // An expired token neither renews nor releases another holder's lease.
    let lapsed = bench.lease("a");
    bench.clock.advance(TTL + Duration::from_secs(1));
    bench.lease("a");
    bench.pool.release(NS, &keys, |_| Holder::of_any(lapsed));
    assert!(
        bench.pool.describe(NS, &keys)[0]
            .clone()
            .unwrap()
            .lease_left
            > Duration::ZERO
    );
    assert_eq!(
        bench
            .pool
            .renew(NS, &keys, LeaseOf::Places, |_| Holder::of_any(lapsed))
            .answer,
        [Code::LeaseEnded]
    );
}

/// The token of an earlier holder has the same end as the new one.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_on_a_lost_block_does_not_end_one_on_the_block_put_after_it() {
    let bench = Bench::new().await;
    bench.put("a").await;
    let key = Key::parse("a").unwrap();
    let keys = [key.as_ref()];
    let old = bench.pool.exist(NS, &keys, true);
    let newest = old.newest;
    bench.pool.remove(NS, &keys, true).await.unwrap();
    bench.put("a").await;
    let new = bench.pool.exist(NS, &keys, true);
    assert_eq!((old.token, old.ttl), (new.token, new.ttl));
    let holder = |_| Holder {
        token: old.token,
        newest,
    };
    assert_eq!(bench.pool.release(NS, &keys, holder), [Code::LeaseEnded]);
    assert_eq!(
        bench.pool.renew(NS, &keys, LeaseOf::Places, holder).answer,
        [Code::LeaseEnded]
    );
    let left = || {
        let described = bench.pool.describe(NS, &keys).swap_remove(0);
        described.unwrap().lease_left
    };
    assert!(left() > Duration::ZERO, "the new holder's lease was ended");
    // The holder of the new lease ends it.
    let newest = new.newest;
    let holder = |_| Holder {
        token: new.token,
        newest,
    };
    assert_eq!(bench.pool.release(NS, &keys, holder), [Code::Ok]);
    assert_eq!(left(), Duration::ZERO);
}

/// A put gets its version when it begins. So the put's version is not above the versions that the
/// lost block could have.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_on_a_lost_block_ends_none_on_the_block_of_a_put_that_was_open() {
    let bench = Bench::new().await;
    let key = Key::parse("a").unwrap();
    let keys = [key.as_ref()];
    let left = || {
        let described = bench.pool.describe(NS, &keys).swap_remove(0);
        described.unwrap().lease_left
    };
    for has_block in [false, true] {
        let options = ReserveOptions {
            upsert: true,
            ..ReserveOptions::default()
        };
        let granted = bench.pool.reserve(NS, &keys, &[Length(BLOCK)], &options);
        let version = granted.await.swap_remove(0).unwrap().version;
        let lost = bench.pool.exist(NS, &keys, true);
        assert_eq!(lost.answer, [has_block]);
        let newest = lost.newest;
        assert!(newest >= version);
        bench.pool.remove(NS, &keys, true).await.unwrap();
        assert_eq!(bench.commit("a", version.0).await, Code::Ok);
        assert_eq!(left() > Duration::ZERO, has_block);
        bench.clock.advance(Duration::from_secs(1));
        bench.lease("a");
        if has_block {
            let holder = |_| Holder {
                token: lost.token,
                newest,
            };
            bench.pool.release(NS, &keys, holder);
        }
        assert!(left() >= TTL, "the new holder's lease was ended");
        bench.clock.advance(TTL + Duration::from_secs(1));
        assert_eq!(left(), Duration::ZERO);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_puts_of_a_client_end_with_its_last_connection_and_no_others() {
    let bench = Bench::new().await;
    let reserve = async |name: &str, client: Option<u128>| {
        let key = Key::parse(name).unwrap();
        let options = ReserveOptions {
            writer: client.map(ClientId),
            timeout: Duration::from_secs(20),
            ..ReserveOptions::default()
        };
        let keys = [key.as_ref()];
        let granted = bench.pool.reserve(NS, &keys, &[Length(BLOCK)], &options);
        let granted = granted.await.swap_remove(0);
        granted.map(|granted| granted.version.0)
    };
    let first = bench.pool.enter_writer(ClientId(1));
    let second = bench.pool.enter_writer(ClientId(1));
    let other = bench.pool.enter_writer(ClientId(2));
    let dead = reserve("a", Some(1)).await.unwrap();
    let alive = reserve("b", Some(2)).await.unwrap();
    let untied = reserve("c", None).await.unwrap();
    drop(first);
    tick(&bench, GRACE * 2).await;
    assert_eq!(bench.pool.reservations(), 3);
    drop(second);
    // The client returns before the grace period is over.
    tick(&bench, GRACE / 2).await;
    let back = bench.pool.enter_writer(ClientId(1));
    tick(&bench, GRACE * 2).await;
    assert_eq!(bench.pool.reservations(), 3);
    drop(back);
    tick(&bench, GRACE * 2).await;
    // Another client's put of the key need not wait for the grant's end, and the late commit is
    // refused.
    let next = reserve("a", Some(2)).await.unwrap();
    assert_eq!(bench.commit("a", dead).await, Code::GrantEnded);
    assert_eq!(bench.commit("a", next).await, Code::Ok);
    assert_eq!(bench.commit("b", alive).await, Code::Ok);
    assert_eq!(bench.commit("c", untied).await, Code::Ok);
    drop(other);
}

/// Advances the clock and lets the caretaker run.
async fn tick(bench: &Bench, by: Duration) {
    bench.clock.advance(by);
    tokio::time::sleep(Duration::from_millis(150)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_grant_commits_nothing_and_its_room_waits_for_the_node() {
    let mut bench = Bench::new().await;
    let ttl = bench.pool.grant_ttl(Duration::ZERO);
    let version = bench.reserve("a", Duration::ZERO).await.unwrap();
    bench.clock.advance(ttl + Duration::from_millis(1));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(bench.commit("a", version).await, Code::GrantEnded);
    assert!(!bench.is_there("a"));
    let usage = bench.pool.placement.usage();
    assert_eq!((usage.used, usage.quarantined), (BLOCK, BLOCK));
    bench.fence().await;
    assert_eq!(bench.pool.placement.usage().used, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn extents_of_a_removed_block_wait_for_its_leases() {
    let mut bench = Bench::new().await;
    bench.put("a").await;
    bench.lease("a");
    let key = Key::parse("a").unwrap();
    let report = bench.pool.remove(NS, &[key.as_ref()], true).await.unwrap();
    assert_eq!(report.removed, 1);
    bench.fence().await;
    assert_eq!(
        bench.pool.placement.usage().quarantined,
        BLOCK,
        "a reader may still be reading"
    );
    bench.clock.advance(TTL + Duration::from_millis(50));
    bench.fence().await;
    assert_eq!(bench.pool.placement.usage().used, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_put_of_a_key_at_a_time_and_the_second_sees_the_first() {
    let bench = Bench::new().await;
    let version = bench.reserve("a", Duration::ZERO).await.unwrap();
    assert_eq!(
        bench.reserve("a", Duration::ZERO).await,
        Err(Code::InProgress)
    );
    let pool = Arc::clone(&bench.pool);
    let second = tokio::spawn(async move {
        let key = Key::parse("a").unwrap();
        let options = ReserveOptions {
            timeout: Duration::from_secs(5),
            ..ReserveOptions::default()
        };
        pool.reserve(NS, &[key.as_ref()], &[Length(BLOCK)], &options)
            .await
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(bench.commit("a", version).await, Code::Ok);
    assert_eq!(second.await.unwrap()[0], Err(Code::Exists));
    // The answer was lost: the same commit succeeds again, but another one does not.
    assert_eq!(bench.commit("a", version).await, Code::Ok);
    assert_eq!(bench.commit("a", version + 1).await, Code::GrantEnded);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_node_is_not_taken_for_one_that_has_long_been_silent() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    // The machine has been up for longer than a node may be silent.
    let clock = Arc::new(ManualClock::new(BootInstant(1 << 40)));
    let pool = Pool::start(Config::default(), Arc::new(store), clock, metrics())
        .await
        .unwrap();
    let registration = registration(Length(BLOCK));
    let node = pool.register(&registration).await.unwrap();
    // The caretaker runs several times between the registration and the first heartbeat.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(pool.members.get(&registration.name).is_some());
    let (outbox, _inbox): (Outbox, _) = unbounded_channel();
    pool.activate(&node, &registration, outbox);
    pool.heard(&node, Some(Reported::default()));
    assert!(node.is_placeable());
    // A node that is dropped while its session begins loses that session, so that it registers
    // again.
    pool.drop_node(&node);
    let (outbox, mut inbox): (Outbox, _) = unbounded_channel();
    pool.activate(&node, &registration, outbox);
    let ended = tokio::time::timeout(Duration::from_secs(5), async {
        while inbox.recv().await.is_some() {}
    });
    assert!(ended.await.is_ok());
    let refused = pool.register(&registration).await.unwrap_err();
    assert_eq!(refused.code, Code::IncarnationDropped);
}

/// The number of fences in each message received so far.
fn asked(inbox: &mut UnboundedReceiver<Result<proto::MasterMessage, tonic::Status>>) -> Vec<usize> {
    let mut counts = Vec::new();
    while let Ok(message) = inbox.try_recv() {
        if let Some(Body::Fence(fence)) = message.unwrap().body {
            counts.push(fence.items.len());
        }
    }
    counts
}

/// A message has a largest size. A node that receives a larger one reconnects, and would receive it
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn fences_are_sent_in_messages_of_bounded_size() {
    const COUNT: usize = 3 * proto::MAX_TICKETS + 1;
    let mut bench = Bench::new().await;
    let keys: Vec<Key> = (0..COUNT)
        .map(|number| Key::parse(&format!("k{number}")).unwrap())
        .collect();
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    // The length is no multiple of a cache line, so neighbours do not meet and each is fenced
    // alone.
    let lengths = vec![Length(60); COUNT];
    let options = ReserveOptions::default();
    let granted = bench.pool.reserve(NS, &keys[..], &lengths, &options).await;
    let versions: Vec<_> = granted.into_iter().map(|g| g.unwrap().version).collect();
    bench.pool.revoke(NS, &keys[..], &versions);
    let most = proto::MAX_TICKETS;
    assert_eq!(asked(&mut bench.inbox), [most, most, most, 1]);

    let (outbox, mut inbox): (Outbox, _) = unbounded_channel();
    let registration = registration(Length(4 * BLOCK));
    bench.pool.activate(&bench.node, &registration, outbox);
    assert_eq!(asked(&mut inbox), [most, most, most, 1], "and once more");
}
