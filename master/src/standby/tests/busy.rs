//! Loading beside a leader that appends, replaces snapshots and cuts the log meanwhile.

use super::*;
use crate::store::record::encode_snapshot;
use crate::store::{LogSpan, Snapshot, SnapshotPositions, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::ClusterId;
use std::collections::VecDeque;

/// The number of changes, and of shards with a new snapshot, before each read.
const CHANGES: usize = 2;
const SNAPSHOTS: u32 = 20;
/// A namespace that is created and deleted again and again, each time with another id.
const NAME: &str = "one";

/// A store whose leader continues at every read.
struct Busy {
    store: EmbeddedStore,
    writer: tokio::sync::Mutex<Writer>,
}

struct Writer {
    leader: Leader,
    /// The state of the leader.
    standby: Standby,
    changes: VecDeque<Change>,
    epoch: Epoch,
    next_shard: u32,
    positions: SnapshotPositions,
    dropped: Vec<Record>,
    segment: Record,
    turns: u32,
}

impl Writer {
    async fn append(&mut self, store: &EmbeddedStore, records: &[Record]) {
        if records.is_empty() {
            return;
        }
        for record in records {
            match record {
                Record::IncarnationDropped(_) => self.dropped.push(record.clone()),
                Record::Segment(_) => self.segment = record.clone(),
                _ => {}
            }
        }
        let seq = self.standby.applied().next();
        let group = encode_group(records);
        store.append(self.epoch, seq, group.clone()).await.unwrap();
        self.standby.apply(seq, &group).unwrap();
    }

    async fn snapshot(&mut self, store: &EmbeddedStore, shard: ShardIndex) {
        let records = if shard == ShardIndex::SYSTEM {
            let seed = Record::Seed(record::Seed { seed: 7 });
            let mut records = vec![seed, self.segment.clone()];
            records.extend(self.dropped.iter().cloned());
            records.extend(self.standby.namespaces.records());
            records
        } else {
            let blocks = self.standby.directory.snapshot(shard.0);
            let commit = |block: directory::StoredBlock| {
                let places = block.replicas.iter().map(|r| (r.segment, r.offset));
                Record::Commit(Commit {
                    namespace: block.namespace,
                    key: block.key,
                    version: block.version,
                    length: block.length,
                    checksum: block.checksum,
                    replicas: places.collect(),
                    parent: block.parent,
                    hard_pin: block.hard_pin,
                })
            };
            blocks.into_iter().map(commit).collect()
        };
        let seq = self.standby.applied();
        let chunks = encode_snapshot(directory::SHARDS, records);
        store
            .put_snapshot(self.epoch, shard, seq, chunks)
            .await
            .unwrap();
        self.positions.insert(shard, (seq, 0));
    }

    /// Deletes the namespace with this name. Or creates it with another id, perhaps with settings.
    fn turn_of_namespace(&mut self) -> Vec<Record> {
        self.turns += 1;
        let namespace = kvpool_types::Namespace {
            name: NAME.into(),
            ..Default::default()
        };
        if let Ok(id) = self.standby.namespaces.resolve(NAME) {
            return vec![Record::NamespaceGone(record::NamespaceGone { id })];
        }
        let (id, _) = self.standby.namespaces.find_or_number(&namespace).unwrap();
        let mut records = vec![Record::Namespace(record::Namespace { id, namespace })];
        if self.turns % 4 == 1 {
            let settings = NamespaceSettings::default().with(kvpool_types::Setting::Priority, 2);
            records.push(Record::NamespaceSet(record::NamespaceSet { id, settings }));
        }
        records
    }

    async fn go_on(&mut self, store: &EmbeddedStore) {
        for _ in 0..CHANGES {
            if let Some(change) = self.changes.pop_front() {
                let records = self.leader.records(&change);
                self.append(store, &records).await;
            }
        }
        if self.changes.is_empty() {
            return;
        }
        let records = self.turn_of_namespace();
        self.append(store, &records).await;
        for _ in 0..SNAPSHOTS {
            // The number behind the last shard stands for the system shard.
            let shard = self.next_shard % (directory::SHARDS + 1);
            self.next_shard += 1;
            let shard = if shard == directory::SHARDS {
                ShardIndex::SYSTEM
            } else {
                ShardIndex(shard)
            };
            self.snapshot(store, shard).await;
        }
        if self.positions.len() > directory::SHARDS as usize {
            let oldest = self.positions.values().map(|(seq, _)| *seq).min();
            let cut = oldest.unwrap_or_default();
            store.truncate_log(self.epoch, cut).await.unwrap();
        }
    }
}

impl Busy {
    async fn go_on(&self) {
        self.writer.lock().await.go_on(&self.store).await;
    }
}

#[async_trait]
impl MetadataStore for Busy {
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
        self.store.append(epoch, seq, group).await
    }
    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.go_on().await;
        self.store.log_span().await
    }
    async fn read_log(&self, after: LogSeq, _: u64) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        self.go_on().await;
        // One group is read at a time, so that many changes happen between two reads.
        self.store.read_log(after, 1).await
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
        self.go_on().await;
        self.store.read_snapshot(shard).await
    }
    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        self.go_on().await;
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

async fn load_beside(all: Vec<Change>) {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let mut leader = Leader::default();
    let segment = leader.new_node();
    let mut writer = Writer {
        standby: load(&store).await,
        leader,
        changes: all.into(),
        epoch,
        next_shard: 0,
        positions: SnapshotPositions::new(),
        dropped: Vec::new(),
        segment: segment.clone(),
        turns: 0,
    };
    let seed = Record::Seed(record::Seed { seed: 7 });
    writer.append(&store, &[seed, segment]).await;
    // Some groups exist before the load; some of them are cut.
    for _ in 0..5 {
        writer.go_on(&store).await;
    }
    let busy = Busy {
        store,
        writer: tokio::sync::Mutex::new(writer),
    };
    let clock = Arc::new(ManualClock::new(BootInstant(1)));
    let mut loaded = Standby::load(&busy, &Config::default(), Arc::clone(&clock) as _)
        .await
        .unwrap();
    let groups = busy.store.read_log(loaded.applied(), u64::MAX).await;
    for (seq, group) in groups.unwrap() {
        loaded.apply(seq, &group).unwrap();
    }
    let mut writer = busy.writer.into_inner();
    writer.standby.sweep_all();
    loaded.sweep_all();
    assert_eq!(loaded.applied(), writer.standby.applied());
    assert_eq!(contents(&loaded), contents(&writer.standby));
    let namespaces = |standby: &Standby| standby.namespaces.records();
    assert_eq!(namespaces(&loaded), namespaces(&writer.standby));
    clock.advance(Config::default().lease_ttl * 2);
    loaded.recently_freed.tick(clock.now());
    let fresh = load_settled(&busy.store).await;
    assert_eq!(
        used(&loaded),
        used(&fresh),
        "no extent is lost or taken twice"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn a_load_beside_a_busy_leader_gives_one_position_of_the_log(
        all in prop::collection::vec(change(), 150..400),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(load_beside(all));
    }
}
