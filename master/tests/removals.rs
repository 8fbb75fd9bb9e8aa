//! What is told of blocks that have left and may come back, should the master die now.

use async_trait::async_trait;
use bytes::Bytes;
use kvpool_master::Config;
use kvpool_master::clock::BootClock;
use kvpool_master::membership::{Registration, Reported};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{CommitItem, Pool, ReserveOptions};
use kvpool_master::store::{
    EmbeddedOptions, EmbeddedStore, LogSeq, LogSpan, MetadataStore, ShardIndex, Snapshot,
    SnapshotPositions, StoreError,
};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{
    Checksum, ClusterId, Code, Epoch, HostId, Incarnation, Key, Length, NodeName, SegmentId,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::timeout;

const SPACE: NamespaceId = NamespaceId(0);

/// A store whose appends wait while the gate is held.
struct Gated {
    store: EmbeddedStore,
    gate: Arc<Mutex<()>>,
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
        self.store.append(epoch, seq, group).await
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
        parts: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        self.store.put_snapshot(epoch, shard, seq, parts).await
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

async fn put(pool: &Arc<Pool>, key: &Key) {
    let keys = [key.as_ref()];
    let options = ReserveOptions::default();
    let granted = pool.reserve(SPACE, &keys[..], &[Length(100)], &options);
    let granted = granted.await.remove(0).unwrap();
    let item = CommitItem {
        key: key.clone(),
        version: granted.version,
        length: Length(100),
        checksum: Checksum(1),
        segments: granted
            .replicas
            .iter()
            .map(|r| r.segment)
            .collect::<smallvec::SmallVec<[SegmentId; 2]>>(),
        parent: None,
    };
    assert_eq!(pool.commit(SPACE, vec![item]).await, [Code::Ok]);
}

/// Whoever is told that a block is missing may count on it as on a removal of its own.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_told_that_a_block_is_missing_before_its_removal_is_durable() {
    let directory = tempfile::tempdir().unwrap();
    let gate = Arc::new(Mutex::new(()));
    let store = Gated {
        store: EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap(),
        gate: Arc::clone(&gate),
    };
    let metrics = Arc::new(Metrics::new().unwrap());
    let pool = Pool::start(
        Config::default(),
        Arc::new(store),
        Arc::new(BootClock),
        metrics,
    );
    let pool = pool.await.unwrap();
    let registration = Registration {
        name: NodeName("n".into()),
        incarnation: Incarnation(7),
        data_address: "127.0.0.1:1".into(),
        shm_path: String::new(),
        host: HostId(1),
        epoch_seen: Epoch(0),
        segments: vec![(Length(1 << 20), None)],
        held: Vec::new(),
    };
    let node = pool.register(&registration).await.unwrap();
    let (outbox, _unread) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &registration, outbox);
    pool.heard(&node, Some(Reported::default()));
    let key = Key::parse("a").unwrap();
    put(&pool, &key).await;

    let shut = gate.lock().await;
    let remove = || {
        let (pool, key) = (Arc::clone(&pool), key.clone());
        tokio::spawn(async move { pool.remove(SPACE, &[key.as_ref()], true).await })
    };
    let first = remove();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut second = remove();
    let early = timeout(Duration::from_millis(200), &mut second).await;
    assert!(early.is_err(), "it was told before: {early:?}");
    drop(shut);
    assert_eq!(first.await.unwrap().unwrap().codes, [Code::Ok]);
    assert_eq!(second.await.unwrap().unwrap().codes, [Code::Missing]);
}
