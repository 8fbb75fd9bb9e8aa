//! A pool whose store the test can stop, with nodes that fence at once.

#![allow(dead_code, reason = "each test binary uses some of it")]

pub(crate) mod media;
pub(crate) mod replicas;
pub(crate) mod tenants;

use async_trait::async_trait;
use bytes::Bytes;
use kvpool_master::Config;
use kvpool_master::clock::{BootClock, Clock};
use kvpool_master::membership::{Registration, Reported, StoreNode};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{CommitItem, Granted, Pool, ReserveOptions, TermStart};
use kvpool_master::standby::Standby;
use kvpool_master::store::{
    EmbeddedOptions, EmbeddedStore, JournalOptions, LogSeq, LogSpan, MetadataStore, ShardIndex,
    Snapshot, SnapshotPositions, Stalled, StoreError,
};
use kvpool_master::term::Term;
use kvpool_proto::master_message::Body;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, ClusterId, Code, Epoch, HostId, Incarnation, Key, Length, NodeName};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;

pub(crate) const SPACE: NamespaceId = NamespaceId(0);

/// A store whose appends wait while the gate is held, and which can be full.
pub(crate) struct Gated {
    store: EmbeddedStore,
    pub(crate) gate: Mutex<()>,
    pub(crate) is_full: AtomicBool,
    /// While set, appends wait, as with a full etcd.
    pub(crate) has_no_space: AtomicBool,
    /// Whether an append waits for space.
    waits_for_space: AtomicBool,
    /// While set, the store says why it has taken no write.
    pub(crate) stalled: parking_lot::Mutex<Option<Stalled>>,
}

impl Gated {
    fn check_room(&self) -> Result<(), StoreError> {
        match self.is_full.load(Ordering::SeqCst) {
            true => Err(StoreError::DirectoryFull {
                directory: "/data".into(),
            }),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl MetadataStore for Gated {
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError> {
        self.store.cluster_id(fresh).await
    }
    async fn epoch(&self) -> Result<Epoch, StoreError> {
        self.store.epoch().await
    }
    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError> {
        self.store.begin_epoch(at_least).await
    }
    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError> {
        let _open = self.gate.lock().await;
        self.check_room()?;
        while self.has_no_space.load(Ordering::SeqCst) {
            self.waits_for_space.store(true, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.waits_for_space.store(false, Ordering::SeqCst);
        self.store.append(epoch, seq, group).await
    }
    fn is_full(&self) -> bool {
        self.waits_for_space.load(Ordering::SeqCst)
    }
    fn stalled(&self) -> Option<Stalled> {
        self.stalled.lock().clone()
    }
    async fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        self.check_room()?;
        self.store.make_room(bytes).await
    }
    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.store.log_span().await
    }
    async fn read_log(&self, after: LogSeq, most: u64) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        self.store.read_log(after, most).await
    }
    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        chunks: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        self.store.put_snapshot(epoch, shard, seq, chunks).await
    }
    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        self.store.read_snapshot(shard).await
    }
    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        self.store.snapshots().await
    }
    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError> {
        self.store.snapshot_positions().await
    }
    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        self.store.truncate_log(epoch, through).await
    }
    async fn size_on_disk(&self) -> Result<u64, StoreError> {
        self.store.size_on_disk().await
    }
    async fn close(&self) -> Result<(), StoreError> {
        self.store.close().await
    }
}

/// A pool without nodes, and its store.
pub(crate) async fn pool(directory: &Path, config: Config) -> (Arc<Pool>, Arc<Gated>) {
    pool_at(directory, config, Arc::new(BootClock)).await
}

/// [`pool`] with another clock.
pub(crate) async fn pool_at(
    directory: &Path,
    config: Config,
    clock: Arc<dyn Clock>,
) -> (Arc<Pool>, Arc<Gated>) {
    let store = Arc::new(Gated {
        store: EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap(),
        gate: Mutex::default(),
        is_full: AtomicBool::default(),
        has_no_space: AtomicBool::default(),
        waits_for_space: AtomicBool::default(),
        stalled: parking_lot::Mutex::default(),
    });
    let metrics = Arc::new(Metrics::new().unwrap());
    let kept = Arc::clone(&store) as Arc<dyn MetadataStore>;
    let pool = Pool::start(config, kept, clock, metrics);
    (pool.await.unwrap(), store)
}

/// A term without end over `store`, with the state of the last one.
pub(crate) async fn lead(
    store: &Arc<dyn MetadataStore>,
    config: Config,
    journal: JournalOptions,
    clock: Arc<dyn Clock>,
) -> Arc<Pool> {
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let standby = Standby::load(&**store, &config, Arc::clone(&clock));
    let standby = standby.await.unwrap();
    let start = TermStart {
        config,
        cluster: ClusterId(1),
        store: Arc::clone(store),
        journal,
        clock,
        metrics: Arc::new(Metrics::new().unwrap()),
    };
    let term = Arc::new(Term::unlimited(epoch));
    Pool::lead(start, standby, term).await.unwrap()
}

/// Settings of a pool that evicts only when its memory is full, and whose nodes may be silent for long: a test may
/// advance the clock.
pub(crate) fn full_and_patient(lease_ttl: Duration) -> Config {
    Config {
        eviction_high_watermark_ratio: 1.0,
        eviction_ratio: 0.0,
        lease_ttl,
        ..patient_with_nodes()
    }
}

/// Settings of a pool whose nodes may be silent, however slow the machine is.
pub(crate) fn patient_with_nodes() -> Config {
    Config {
        suspect_after: Duration::from_secs(1 << 20),
        drop_after: Duration::from_secs(1 << 21),
        ..Config::default()
    }
}

/// The registration of a node with one segment.
pub(crate) fn registration(name: &str, incarnation: u128, bytes: u64) -> Registration {
    Registration {
        name: NodeName(name.into()),
        incarnation: Incarnation(incarnation),
        data_address: "127.0.0.1:1".into(),
        shm_path: String::new(),
        host: HostId(1),
        epoch_seen: Epoch(0),
        secret: None,
        epoch_proof: Default::default(),
        segments: vec![(Length(bytes), None)],
        held: Vec::new(),
        loaded: Vec::new(),
        can_pull: true,
        can_undrain: true,
        version: "0.1.0-test".into(),
        wants_signed_reads: false,
    }
}

/// A node with one segment that fences every requested extent.
pub(crate) async fn join(
    pool: &Arc<Pool>,
    name: &str,
    incarnation: u128,
    bytes: u64,
) -> Arc<StoreNode> {
    join_late(pool, name, incarnation, bytes, Duration::ZERO).await
}

/// [`join`] with fences that take this long.
pub(crate) async fn join_late(
    pool: &Arc<Pool>,
    name: &str,
    incarnation: u128,
    bytes: u64,
    late: Duration,
) -> Arc<StoreNode> {
    let registration = registration(name, incarnation, bytes);
    join_as(pool, &registration, late).await.0
}

/// [`join`] with this registration. Also returns the number of the session.
pub(crate) async fn join_as(
    pool: &Arc<Pool>,
    registration: &Registration,
    late: Duration,
) -> (Arc<StoreNode>, u64) {
    let node = pool.register(registration).await.unwrap();
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = pool.activate(&node, registration, outbox);
    pool.heard(&node, Some(Reported::default()));
    let (pool, fencing) = (Arc::clone(pool), Arc::clone(&node));
    tokio::spawn(async move {
        while let Some(Ok(message)) = inbox.recv().await {
            if let Some(Body::Fence(fence)) = message.body {
                let tickets: Vec<u64> = fence.items.iter().map(|item| item.ticket).collect();
                if !late.is_zero() {
                    tokio::time::sleep(late).await;
                }
                pool.fenced(&fencing, &tickets);
            }
        }
    });
    (node, session)
}

pub(crate) async fn reserve(pool: &Arc<Pool>, key: &Key, bytes: u64) -> Result<Granted, Code> {
    let options = ReserveOptions {
        timeout: Duration::from_secs(10),
        ..ReserveOptions::default()
    };
    reserve_with(pool, key, bytes, &options).await
}

pub(crate) async fn reserve_with(
    pool: &Arc<Pool>,
    key: &Key,
    bytes: u64,
    options: &ReserveOptions,
) -> Result<Granted, Code> {
    let keys = [key.as_ref()];
    let lengths = [Length(bytes)];
    let granted = pool.reserve(SPACE, &keys[..], &lengths, options);
    granted.await.into_iter().next().unwrap()
}

/// The commit item of a block of `bytes` that was written to its grants.
pub(crate) fn item(key: &Key, bytes: u64, granted: Granted) -> CommitItem {
    CommitItem {
        key: key.clone(),
        version: granted.version,
        length: Length(bytes),
        checksum: Checksum(1),
        segments: granted.replicas.iter().map(|r| r.segment).collect(),
        parent: None,
    }
}

pub(crate) fn commit(
    pool: &Arc<Pool>,
    key: &Key,
    bytes: u64,
    granted: Granted,
) -> impl Future<Output = Vec<Code>> + use<> {
    let item = item(key, bytes, granted);
    let pool = Arc::clone(pool);
    async move { pool.commit(SPACE, vec![item]).await }
}
