//! A master past its deadline, and after its term.

use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, Clock, ManualClock};
use kvpool_master::leadership::{Role, Seat};
use kvpool_master::membership::{Registration, Reported, StoreNode};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{Pool, TermStart};
use kvpool_master::service::PoolService;
use kvpool_master::standby::Standby;
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore, JournalOptions, MetadataStore};
use kvpool_master::term::Term;
use kvpool_proto as proto;
use kvpool_types::wire::keys;
use kvpool_types::{ClusterId, Code, Epoch, HostId, Incarnation, Key, Length, NodeName, SegmentId};
use proto::pool_server::Pool as _;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tonic::{Request, Status};

const TTL: Duration = Duration::from_secs(3);

/// A master with a term of three seconds and one live node.
struct Bench {
    seat: Arc<Seat>,
    pool: Arc<Pool>,
    service: PoolService,
    clock: Arc<ManualClock>,
    term: Arc<Term>,
    node: Arc<StoreNode>,
    store: Arc<dyn MetadataStore>,
    _directory: TempDir,
}

fn registration() -> Registration {
    Registration {
        name: NodeName("n".into()),
        incarnation: Incarnation(7),
        data_address: "127.0.0.1:1".into(),
        shm_path: String::new(),
        host: HostId(1),
        epoch_seen: Epoch(0),
        secret: None,
        epoch_proof: Default::default(),
        segments: vec![(Length(4 << 20), None)],
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
        Self::with(Config::default()).await
    }

    async fn with(config: Config) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let store: Arc<dyn MetadataStore> = Arc::new(store);
        let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
        let (seat, pool, term) = Self::lead(&store, &clock, config).await;
        let node = Self::register(&pool).await.unwrap();
        Self {
            service: PoolService::new(
                Arc::clone(&seat),
                Arc::new(kvpool_master::overview::Watch::new(Arc::clone(&seat))),
            ),
            seat,
            pool,
            clock,
            term,
            node,
            store,
            _directory: directory,
        }
    }

    /// A new term of a master over `store`, with the state of the last one.
    async fn lead(
        store: &Arc<dyn MetadataStore>,
        clock: &Arc<ManualClock>,
        config: Config,
    ) -> (Arc<Seat>, Arc<Pool>, Arc<Term>) {
        let metrics = Arc::new(Metrics::new().unwrap());
        let seat = Seat::new(config.clone(), Arc::clone(&metrics), Arc::clone(clock) as _);
        let seat = Arc::new(seat);
        let epoch = store.begin_epoch(Epoch(5)).await.unwrap();
        let standby = Standby::load(&**store, &config, Arc::clone(clock) as _);
        let standby = standby.await.unwrap();
        let term = Arc::new(Term::until(epoch, clock.now().after(TTL)));
        let start = TermStart {
            config,
            cluster: ClusterId(1),
            store: Arc::clone(store),
            journal: JournalOptions::default(),
            clock: Arc::clone(clock) as _,
            metrics,
        };
        let pool = Pool::lead(start, standby, Arc::clone(&term));
        let pool = pool.await.unwrap();
        seat.lead(Arc::clone(&pool), "http://here:1");
        (seat, pool, term)
    }

    async fn register(pool: &Arc<Pool>) -> Result<Arc<StoreNode>, Code> {
        let registration = registration();
        let node = pool.register(&registration).await.map_err(|e| e.code)?;
        // The test reads no messages of the master.
        let (outbox, _) = tokio::sync::mpsc::unbounded_channel();
        pool.activate(&node, &registration, outbox);
        pool.heard(&node, Some(Reported::default()));
        Ok(node)
    }

    fn caller(&self) -> Option<proto::Caller> {
        Some(proto::Caller {
            epoch: self.pool.epoch.0,
            ..Default::default()
        })
    }

    async fn reserve(&self, name: &str) -> Result<proto::Reservation, Code> {
        self.reserve_instead(name, 0, &[]).await
    }

    async fn reserve_within(
        &self,
        name: &str,
        timeout_ms: u64,
    ) -> Result<proto::Reservation, Code> {
        self.ask_for(proto::ReserveRequest {
            caller: self.caller(),
            keys: packed(name),
            lengths: vec![100],
            timeout_ms,
            ..Default::default()
        })
        .await
    }

    async fn reserve_instead(
        &self,
        name: &str,
        request: u64,
        instead_of: &[u64],
    ) -> Result<proto::Reservation, Code> {
        self.ask_for(proto::ReserveRequest {
            request,
            instead_of: instead_of.to_vec(),
            caller: self.caller(),
            keys: packed(name),
            lengths: vec![100],
            timeout_ms: 10,
            ..Default::default()
        })
        .await
    }

    async fn ask_for(&self, request: proto::ReserveRequest) -> Result<proto::Reservation, Code> {
        let reply = self.service.reserve(Request::new(request)).await;
        let mut reply = reply.map_err(|status| code(&status))?.into_inner();
        Ok(reply.reservations.remove(0))
    }

    async fn commit(&self, name: &str, of: &proto::Reservation) -> Result<Code, Code> {
        let item = proto::CommitItem {
            version: of.version,
            length: 100,
            segments: of.extents.iter().map(|extent| extent.segment).collect(),
            ..Default::default()
        };
        let request = proto::CommitRequest {
            caller: self.caller(),
            keys: packed(name),
            items: vec![item],
            ..Default::default()
        };
        let reply = self.service.commit(Request::new(request)).await;
        let reply = reply.map_err(|status| code(&status))?.into_inner();
        Ok(from_wire(reply.codes[0]))
    }

    /// Whether a key is present, and the length of its lease.
    async fn exist(&self, name: &str) -> Result<(bool, u64), Code> {
        let request = proto::ExistRequest {
            caller: self.caller(),
            keys: packed(name),
            no_lease: false,
        };
        let reply = self.service.exist(Request::new(request)).await;
        let reply = reply.map_err(|status| code(&status))?.into_inner();
        Ok((reply.present[0] & 1 == 1, reply.lease.unwrap().ttl_ms))
    }

    async fn remove(&self, name: &str) -> Result<u64, Code> {
        let request = proto::RemoveRequest {
            caller: self.caller(),
            what: Some(proto::remove_request::What::Keys(packed(name))),
            force: true,
        };
        let reply = self.service.remove(Request::new(request)).await;
        Ok(reply.map_err(|status| code(&status))?.into_inner().removed)
    }

    async fn create(&self, namespace: &str) -> Result<bool, Code> {
        let request = proto::CreateNamespaceRequest {
            caller: self.caller(),
            namespace: Some(proto::Namespace {
                name: namespace.into(),
                ..Default::default()
            }),
            settings: Vec::new(),
        };
        let reply = self.service.create_namespace(Request::new(request)).await;
        Ok(reply.map_err(|status| code(&status))?.into_inner().created)
    }
}

fn packed(name: &str) -> bytes::Bytes {
    keys::pack([&Key::parse(name).unwrap()]).into()
}

fn from_wire(code: u32) -> Code {
    Code::from_wire(u16::try_from(code).unwrap()).unwrap()
}

fn code(status: &Status) -> Code {
    let code = status.metadata().get(proto::CODE_METADATA).unwrap();
    from_wire(code.to_str().unwrap().parse().unwrap())
}

/// A client that lost the answer must not wait for its own grant.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_whose_answer_was_lost_ends_when_its_owner_asks_again() {
    let bench = Bench::new().await;
    let lost = bench.reserve_instead("a", 70, &[]).await.unwrap();
    let in_progress = Code::InProgress.to_wire();
    let others = bench.reserve_instead("a", 71, &[69]).await.unwrap();
    assert_eq!(others.code, u32::from(in_progress), "it is another's");
    let again = bench.reserve_instead("a", 72, &[90, 70]).await.unwrap();
    assert_eq!(again.code, 0);
    assert_ne!(again.version, lost.version);
    assert_ne!(again.extents[0].offset, lost.extents[0].offset);
    assert_eq!(bench.commit("a", &lost).await, Ok(Code::GrantEnded));
    assert_eq!(bench.commit("a", &again).await, Ok(Code::Ok));
}

#[tokio::test(flavor = "multi_thread")]
async fn past_its_deadline_a_leader_answers_without_leases_and_changes_nothing() {
    let bench = Bench::new().await;
    let first = bench.reserve("a").await.unwrap();
    assert_eq!(bench.commit("a", &first).await, Ok(Code::Ok));
    assert_eq!(bench.create("known").await, Ok(true));
    let late = bench.reserve("b").await.unwrap();
    assert_eq!(bench.exist("a").await, Ok((true, 5000)));

    bench.clock.advance(TTL);
    assert_eq!(bench.seat.role(), Role::ReadOnly);
    assert_eq!(bench.exist("a").await, Ok((true, 0)), "it is unleased");
    assert_eq!(bench.reserve("c").await.unwrap_err(), Code::NotLeader);
    assert_eq!(bench.commit("b", &late).await, Err(Code::NotLeader));
    assert_eq!(bench.remove("a").await, Err(Code::NotLeader));
    assert_eq!(bench.create("new").await, Err(Code::NotLeader));
    assert_eq!(bench.create("known").await, Ok(false), "nothing changes");
    assert_eq!(
        Bench::register(&bench.pool).await.unwrap_err(),
        Code::NotLeader
    );

    // The store answers, and no other master has led meanwhile.
    bench.term.renew(bench.clock.now().after(TTL));
    bench.pool.heard(&bench.node, Some(Reported::default()));
    assert_eq!(bench.seat.role(), Role::Leader);
    assert_eq!(bench.commit("b", &late).await, Ok(Code::Ok));
    assert_eq!(bench.exist("a").await, Ok((true, 5000)));
    assert_eq!(bench.remove("a").await, Ok(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_end_at_the_deadline_and_nodes_get_time_to_return() {
    let bench = Bench::new().await;
    let first = bench.reserve("a").await.unwrap();
    assert_eq!(bench.commit("a", &first).await, Ok(Code::Ok));
    // Far beyond the time after which a silent node is dropped with its blocks.
    bench.clock.advance(Config::default().drop_after * 2);
    wait(|| !bench.node.is_connected()).await;
    assert_eq!(bench.exist("a").await, Ok((true, 0)), "reads go on");
    bench.term.renew(bench.clock.now().after(TTL));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(bench.node.is_readable(), "it has not had the time to speak");
    assert_eq!(bench.exist("a").await, Ok((true, 5000)));
    Bench::register(&bench.pool).await.unwrap();
    assert!(bench.node.is_connected(), "the same incarnation is back");
}

/// A process of another pool, or a copy that was started by mistake, must not cost a node its
/// blocks before the node returns.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_term_keeps_the_name_of_a_node_for_it_while_it_may_come_back() {
    let bench = Bench::new().await;
    let first = bench.reserve("a").await.unwrap();
    assert_eq!(bench.commit("a", &first).await, Ok(Code::Ok));
    bench.seat.step_down("the next term");
    let (_seat, pool, _term) = Bench::lead(&bench.store, &bench.clock, Config::default()).await;
    let newcomer = Registration {
        incarnation: Incarnation(8),
        ..registration()
    };
    let refused = pool.register(&newcomer).await.unwrap_err();
    assert_eq!(refused.code, Code::InProgress, "{refused}");
    Bench::register(&pool).await.unwrap();
    assert_eq!(pool.blocks(), 1, "the node is back with its block");

    // After its time to return, a node is replaced.
    let (_seat, pool, term) = Bench::lead(&bench.store, &bench.clock, Config::default()).await;
    let refused = pool.register(&newcomer).await.unwrap_err();
    assert_eq!(refused.code, Code::InProgress, "{refused}");
    term.renew(bench.clock.now().after(TTL * 3));
    bench.clock.advance(Config::default().suspect_after);
    wait(|| pool.have_nodes_returned()).await;
    pool.register(&newcomer).await.unwrap();
    wait(|| pool.blocks() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_its_term_a_master_refuses_every_call() {
    let bench = Bench::new().await;
    bench.term.end();
    assert_eq!(bench.exist("a").await.unwrap_err(), Code::NotLeader);
    bench.term.renew(bench.clock.now().after(TTL));
    assert_eq!(bench.exist("a").await.unwrap_err(), Code::NotLeader);
    bench.seat.step_down("another leads");
    bench.seat.learn("http://there:1", Epoch(9));
    let told = bench
        .service
        .cluster(Request::new(proto::ClusterRequest::default()));
    let told = told.await.unwrap().into_inner();
    assert_eq!((told.leader.as_str(), told.epoch), ("http://there:1", 9));
    assert_eq!(bench.exist("a").await.unwrap_err(), Code::NotLeader);
}

async fn wait(mut until: impl FnMut() -> bool) {
    for _ in 0..500 {
        if until() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not happen in 5 s");
}

/// A call waits with its request in memory, and many clients may wait over gRPC.
#[tokio::test(flavor = "multi_thread")]
async fn calls_over_grpc_that_wait_hold_a_bounded_amount() {
    let config = Config {
        max_waiting: bytesize::ByteSize::mib(16),
        ..Config::default()
    };
    let bench = Bench::with(config).await;
    // While this put is open, other puts of its key wait.
    bench.reserve("k").await.unwrap();
    let bench = Arc::new(bench);
    // Each call takes 16 KiB beside its request, so fewer than 1,024 fit.
    let waiting: Vec<_> = (0..1100)
        .map(|_| {
            let bench = Arc::clone(&bench);
            tokio::spawn(async move { bench.reserve_within("k", 3000).await })
        })
        .collect();
    let mut refused = 0;
    for call in waiting {
        match call.await.unwrap() {
            Ok(reservation) => assert_eq!(from_wire(reservation.code), Code::InProgress),
            Err(code) => {
                assert_eq!(code, Code::TooManyHeld);
                refused += 1;
            }
        }
    }
    assert!(
        (77..1000).contains(&refused),
        "{refused} of 1100 were refused"
    );
    // The calls hold nothing after they have ended.
    bench.reserve("later").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn namespaces_are_bounded() {
    let config = Config {
        max_namespaces: 2,
        ..Config::default()
    };
    let bench = Bench::with(config).await;
    assert_eq!(bench.create("a").await, Ok(true));
    assert_eq!(bench.create("b").await, Ok(true));
    assert_eq!(bench.create("c").await, Err(Code::TooManyHeld));
    assert_eq!(bench.create("a").await, Ok(false), "it is there already");
}

/// The table of dropped incarnations is bounded. The segments that an older incarnation names
/// identify it.
#[tokio::test]
async fn a_dropped_incarnation_is_recognised_by_the_segment_ids_it_names() {
    let bench = Bench::new().await;
    let mut late = registration();
    late.name = NodeName("late".into());
    late.incarnation = Incarnation(77);
    late.segments = vec![(Length(4 << 20), Some(SegmentId(900)))];
    let refused = bench.pool.register(&late).await.unwrap_err();
    assert_eq!(refused.code, Code::IncarnationDropped);
    assert!(bench.pool.members.get(&late.name).is_none());
}
