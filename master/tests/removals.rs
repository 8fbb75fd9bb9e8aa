//! What is told of blocks that have left and may come back, should the master die now.

use async_trait::async_trait;
use bytes::Bytes;
use kvpool_master::Config;
use kvpool_master::clock::BootClock;
use kvpool_master::membership::{Registration, Reported};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{CommitItem, Granted, Pool, RemoveReport, ReserveOptions};
use kvpool_master::store::{
    EmbeddedOptions, EmbeddedStore, LogSeq, LogSpan, MetadataStore, ShardIndex, Snapshot,
    SnapshotPositions, StoreError,
};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, ClusterId, Code, Epoch, HostId, Incarnation, Key, Length, NodeName};
use std::path::Path;
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

async fn reserve(pool: &Arc<Pool>, key: &Key, bytes: u64) -> Result<Granted, Code> {
    let keys = [key.as_ref()];
    let options = ReserveOptions {
        timeout: Duration::from_secs(10),
        ..ReserveOptions::default()
    };
    let granted = pool
        .reserve(SPACE, &keys[..], &[Length(bytes)], &options)
        .await;
    granted.into_iter().next().unwrap()
}

async fn put(pool: &Arc<Pool>, key: &Key, bytes: u64) -> Result<(), Code> {
    let granted = reserve(pool, key, bytes).await?;
    assert_eq!(commit(pool, key, bytes, granted).await, [Code::Ok]);
    Ok(())
}

fn commit(
    pool: &Arc<Pool>,
    key: &Key,
    bytes: u64,
    granted: Granted,
) -> impl Future<Output = Vec<Code>> + use<> {
    let item = CommitItem {
        key: key.clone(),
        version: granted.version,
        length: Length(bytes),
        checksum: Checksum(1),
        segments: granted.replicas.iter().map(|r| r.segment).collect(),
        parent: None,
    };
    let pool = Arc::clone(pool);
    async move { pool.commit(SPACE, vec![item]).await }
}

/// A pool of one node of 1 MiB, and what shuts its store.
async fn pool(directory: &Path) -> (Arc<Pool>, Arc<Mutex<()>>) {
    let gate = Arc::new(Mutex::new(()));
    let store = Gated {
        store: EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap(),
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
    (pool, gate)
}

type Removing = tokio::task::JoinHandle<Result<RemoveReport, Code>>;

fn remove(pool: &Arc<Pool>, key: &Key) -> Removing {
    let (pool, key) = (Arc::clone(pool), key.clone());
    tokio::spawn(async move { pool.remove(SPACE, &[key.as_ref()], true).await })
}

fn is_there(pool: &Pool, key: &Key) -> bool {
    let keys = [key.as_ref()];
    pool.exist(SPACE, &keys[..], false).answer == [true]
}

/// It would be seen again if the master died now.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_there_until_its_removal_is_durable() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, gate) = pool(directory.path()).await;
    let key = Key::parse("a").unwrap();
    put(&pool, &key, 100).await.unwrap();
    let shut = gate.lock().await;
    let (first, second) = (remove(&pool, &key), remove(&pool, &key));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(is_there(&pool, &key), "it was gone too early");
    let again = reserve(&pool, &key, 100).await;
    assert_eq!(again.unwrap_err(), Code::Exists);
    assert!(!first.is_finished() && !second.is_finished());
    drop(shut);
    let codes = [
        first.await.unwrap().unwrap().codes,
        second.await.unwrap().unwrap().codes,
    ]
    .concat();
    let one_took_it = [[Code::Ok, Code::Missing], [Code::Missing, Code::Ok]];
    assert!(one_took_it.iter().any(|may| codes == may), "{codes:?}");
    assert!(!is_there(&pool, &key));
    put(&pool, &key, 100).await.unwrap();
}

/// A removal that meets a newer version of the block ends that one too.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_was_replaced_while_it_was_removed_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, gate) = pool(directory.path()).await;
    let key = Key::parse("a").unwrap();
    put(&pool, &key, 100).await.unwrap();
    let options = ReserveOptions {
        upsert: true,
        ..ReserveOptions::default()
    };
    let keys = [key.as_ref()];
    let granted = pool
        .reserve(SPACE, &keys[..], &[Length(100)], &options)
        .await;
    let granted = granted.into_iter().next().unwrap().unwrap();
    let shut = gate.lock().await;
    // The first group of the log is on its way and waits at the gate; what follows waits behind it.
    let replacing = commit(&pool, &key, 100, granted);
    let replacing = tokio::spawn(replacing);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let removing = remove(&pool, &key);
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(shut);
    assert_eq!(replacing.await.unwrap(), [Code::Ok]);
    assert_eq!(removing.await.unwrap().unwrap().codes, [Code::Ok]);
    assert!(!is_there(&pool, &key));
}

/// Whoever removes a block and is told that it is missing may count on it as on a removal of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_is_not_told_that_a_block_is_missing_before_its_eviction_is_durable() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, gate) = pool(directory.path()).await;
    let key = Key::parse("a").unwrap();
    put(&pool, &key, 800 << 10).await.unwrap();
    let shut = gate.lock().await;
    let (crowding, other) = (Arc::clone(&pool), Key::parse("b").unwrap());
    let _waits = tokio::spawn(async move { reserve(&crowding, &other, 800 << 10).await });
    let evicted = async {
        while is_there(&pool, &key) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), evicted).await.unwrap();
    let mut removing = remove(&pool, &key);
    let early = timeout(Duration::from_millis(200), &mut removing).await;
    assert!(early.is_err(), "it was told before: {early:?}");
    drop(shut);
    assert_eq!(removing.await.unwrap().unwrap().codes, [Code::Missing]);
}
