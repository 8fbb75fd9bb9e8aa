//! The journal's promises, over the real store with injected faults.

mod acks;
mod ends;
mod full;
mod groups;
mod snapshots;

use super::worker::LINGER;
use super::*;
use crate::store::record::{self, SegmentGone};
use crate::store::{
    EmbeddedOptions, EmbeddedStore, LogSpan, RecoveryError, Snapshot, Target, recover,
};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{ClusterId, Key, SegmentId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The embedded store with faults that the test injects.
struct Faulty {
    store: EmbeddedStore,
    /// The test holds this lock to block appends.
    gate: tokio::sync::Mutex<()>,
    /// Appends fail as if the answer were lost.
    lose: AtomicBool,
    /// The disk is full.
    full: AtomicBool,
    /// The disk has little room left, so the store promises none in advance.
    promises_none: AtomicBool,
    appends: AtomicU64,
}

fn full() -> StoreError {
    StoreError::DirectoryFull {
        directory: "/data".into(),
    }
}

impl Faulty {
    fn check_room(&self) -> Result<(), StoreError> {
        if self.full.load(Ordering::SeqCst) {
            return Err(full());
        }
        Ok(())
    }
}

#[async_trait]
impl MetadataStore for Faulty {
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
        self.appends.fetch_add(1, Ordering::SeqCst);
        let _open = self.gate.lock().await;
        if self.lose.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable {
                reason: "the answer was lost".into(),
            });
        }
        self.check_room()?;
        self.store.append(epoch, seq, group).await
    }
    async fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        if self.promises_none.load(Ordering::SeqCst) {
            return Err(full());
        }
        self.check_room()?;
        self.store.make_room(bytes).await
    }
    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.store.log_span().await
    }
    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        self.store.read_log(after, limit_bytes).await
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

    async fn snapshot_positions(&self) -> Result<crate::store::SnapshotPositions, StoreError> {
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

struct Nothing {
    is_there: bool,
}

impl SnapshotSource for Nothing {
    fn shards(&self) -> u32 {
        1
    }
    fn is_there(&self) -> bool {
        self.is_there
    }
    fn capture(&self, _: ShardIndex) -> Vec<Record> {
        Vec::new()
    }
    fn capture_system(&self) -> Vec<Record> {
        Vec::new()
    }
}

struct Setup {
    _directory: tempfile::TempDir,
    store: Arc<Faulty>,
    journal: Journal,
    epoch: Epoch,
}

async fn setup(options: JournalOptions) -> Setup {
    setup_of(options, Nothing { is_there: true }).await
}

async fn setup_of(options: JournalOptions, source: Nothing) -> Setup {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty {
        store: EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap(),
        gate: tokio::sync::Mutex::new(()),
        lose: AtomicBool::new(false),
        full: AtomicBool::new(false),
        promises_none: AtomicBool::new(false),
        appends: AtomicU64::new(0),
    });
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let journal = Journal::start(
        Arc::clone(&store) as Arc<dyn MetadataStore>,
        epoch,
        &LogState::default(),
        Arc::new(source),
        options,
    )
    .unwrap();
    Setup {
        _directory: directory,
        store,
        journal,
        epoch,
    }
}

/// A store and its journal with the usual options.
async fn usual() -> (Arc<Faulty>, Journal, tempfile::TempDir) {
    let setup = setup(JournalOptions::default()).await;
    (setup.store, setup.journal, setup._directory)
}

fn gone(id: u32) -> Record {
    Record::SegmentGone(SegmentGone { id: SegmentId(id) })
}

async fn logged(store: &Faulty) -> Vec<Record> {
    let groups = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
    groups
        .iter()
        .flat_map(|(_, group)| record::decode(group).unwrap().records)
        .collect()
}

type Seen = Arc<Mutex<Vec<(u32, Result<LogSeq, JournalError>)>>>;

fn note(seen: &Seen, id: u32) -> impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static {
    let seen = Arc::clone(seen);
    move |outcome| seen.lock().push((id, outcome))
}

/// Waits until the journal is inside an append.
async fn in_append(store: &Faulty, count: u64) {
    while store.appends.load(Ordering::SeqCst) < count {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
