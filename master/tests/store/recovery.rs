//! A journal over a model of the directory. Recovery returns the model after any operations, cuts
//! and restarts.

use bytesize::ByteSize;
use kvpool_master::store::record::{
    Commit, IncarnationDropped, Medium, Namespace, NamespaceGone, NamespaceSet, Remove, Seed,
    Segment, SegmentGone, SegmentsGranted, VersionsGranted,
};
use kvpool_master::store::{
    Ack, EmbeddedOptions, EmbeddedStore, Journal, JournalOptions, LogSeq, MetadataStore, Record,
    RecoveryError, ShardIndex, SnapshotSource, StoreError, Target, record, recover,
};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{
    Checksum, Epoch, Incarnation, Key, Length, NamespaceSettings, NodeName, Offset, SegmentId,
    Setting, Version, namespace,
};
use parking_lot::Mutex;
use proptest::prelude::*;
use smallvec::smallvec;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const SHARDS: u32 = 4;

fn shard_of(namespace: NamespaceId, key: &Key) -> ShardIndex {
    let sum: u32 = key.to_string().bytes().map(u32::from).sum();
    ShardIndex((sum + namespace.0) % SHARDS)
}

/// The content of a directory as plain maps.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    blocks: BTreeMap<(NamespaceId, String), Commit>,
    namespaces: BTreeMap<NamespaceId, Namespace>,
    settings: BTreeMap<NamespaceId, NamespaceSet>,
    segments: BTreeMap<SegmentId, Segment>,
    dropped: BTreeMap<String, IncarnationDropped>,
    media: BTreeMap<SegmentId, Medium>,
    seed: Option<Seed>,
    granted: Option<VersionsGranted>,
    segments_granted: Option<SegmentsGranted>,
}

impl Model {
    fn apply(&mut self, record: Record) {
        match record {
            Record::Commit(mut commit) => {
                commit
                    .replicas
                    .retain(|(segment, _)| self.segments.contains_key(segment));
                let place = (commit.namespace, commit.key.to_string());
                if commit.replicas.is_empty() {
                    self.blocks.remove(&place);
                } else {
                    self.blocks.insert(place, commit);
                }
            }
            Record::Remove(remove) => {
                let place = (remove.namespace, remove.key.to_string());
                if self
                    .blocks
                    .get(&place)
                    .is_some_and(|held| held.version == remove.version)
                {
                    self.blocks.remove(&place);
                }
            }
            Record::ReplicaGone(gone) => {
                let place = (gone.namespace, gone.key.to_string());
                if let Some(held) = self.blocks.get_mut(&place)
                    && held.version == gone.version
                {
                    held.replicas
                        .retain(|(segment, _)| *segment != gone.segment);
                    if held.replicas.is_empty() {
                        self.blocks.remove(&place);
                    }
                }
            }
            Record::ReplicaAdded(added) => {
                let place = (added.namespace, added.key.to_string());
                if let Some(held) = self.blocks.get_mut(&place)
                    && held.version == added.version
                    && self.segments.contains_key(&added.segment)
                    && held.replicas.iter().all(|(id, _)| *id != added.segment)
                {
                    held.replicas.push((added.segment, added.offset));
                }
            }
            Record::Namespace(created) => {
                self.namespaces.insert(created.id, created);
            }
            Record::NamespaceSet(set) => {
                self.settings.insert(set.id, set);
            }
            Record::NamespaceGone(gone) => {
                self.namespaces.remove(&gone.id);
                self.settings.remove(&gone.id);
            }
            Record::LeasedRanges(_) | Record::UnleasedRanges(_) => {
                panic!("the captures of this test list none")
            }
            Record::Segment(segment) => {
                self.segments.insert(segment.id, segment);
            }
            Record::SegmentGone(gone) => {
                self.segments.remove(&gone.id);
                for commit in self.blocks.values_mut() {
                    commit.replicas.retain(|(segment, _)| *segment != gone.id);
                }
                self.blocks.retain(|_, commit| !commit.replicas.is_empty());
            }
            Record::IncarnationDropped(dropped) => {
                self.dropped.insert(format!("{dropped:?}"), dropped);
            }
            Record::Seed(seed) => self.seed = Some(seed),
            Record::VersionsGranted(granted) => self.granted = Some(granted),
            Record::SegmentsGranted(granted) => self.segments_granted = Some(granted),
            Record::Medium(medium) => {
                self.media.insert(medium.id, medium);
            }
        }
    }
}

impl Model {
    /// Removes blocks on segments that are gone: a shard's snapshot may be older than the segment's
    /// end.
    fn settle(&mut self) {
        let segments = &self.segments;
        for commit in self.blocks.values_mut() {
            commit.replicas.retain(|(id, _)| segments.contains_key(id));
        }
        self.blocks.retain(|_, commit| !commit.replicas.is_empty());
    }
}

impl Target for Model {
    fn shard_of(&self, namespace: NamespaceId, key: &Key) -> ShardIndex {
        shard_of(namespace, key)
    }

    fn forget(&mut self, shard: ShardIndex) {
        if shard == ShardIndex::SYSTEM {
            self.segments.clear();
        } else {
            self.blocks
                .retain(|_, commit| shard_of(commit.namespace, &commit.key) != shard);
        }
    }

    fn snapshot(&mut self, _: ShardIndex, record: Record) {
        match record {
            Record::Commit(commit) => {
                let place = (commit.namespace, commit.key.to_string());
                self.blocks.insert(place, commit);
            }
            record => self.apply(record),
        }
    }

    fn logged(&mut self, _: LogSeq, record: Record) -> Result<(), RecoveryError> {
        self.apply(record);
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Directory(Mutex<Model>);

impl SnapshotSource for Directory {
    fn shards(&self) -> u32 {
        SHARDS
    }

    fn capture(&self, shard: ShardIndex) -> Vec<Record> {
        let model = self.0.lock();
        let here = model
            .blocks
            .values()
            .filter(|c| shard_of(c.namespace, &c.key) == shard);
        here.cloned().map(Record::Commit).collect()
    }

    fn capture_system(&self) -> Vec<Record> {
        let model = self.0.lock();
        let namespaces = model.namespaces.values().cloned().map(Record::Namespace);
        let segments = model.segments.values().cloned().map(Record::Segment);
        let dropped = model
            .dropped
            .values()
            .cloned()
            .map(Record::IncarnationDropped);
        let seed = model.seed.map(Record::Seed);
        let granted = model.granted.map(Record::VersionsGranted);
        let settings = model.settings.values().cloned().map(Record::NamespaceSet);
        namespaces
            .chain(settings)
            .chain(segments)
            .chain(dropped)
            .chain(seed)
            .chain(granted)
            .chain(model.segments_granted.map(Record::SegmentsGranted))
            .collect()
    }
}

/// One life of a master: it recovers, executes its steps, and ends.
async fn live(
    directory: &Path,
    work: Vec<Vec<Record>>,
    expected: &mut Model,
) -> Result<u64, RecoveryError> {
    let store = Arc::new(EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap());
    let mut recovered_model = Model::default();
    let recovered = recover(&*store, SHARDS, &mut recovered_model).await?;
    recovered_model.settle();
    assert_eq!(recovered_model, *expected);
    let epoch = store.begin_epoch(Epoch(1)).await?;
    let pool = Arc::new(Directory(Mutex::new(recovered_model)));
    let journal = Journal::start(
        Arc::clone(&store) as Arc<dyn MetadataStore>,
        epoch,
        &recovered.state,
        Arc::clone(&pool) as Arc<dyn SnapshotSource>,
        // Small enough that a shard is captured and the log cut every few groups.
        JournalOptions {
            log_bytes: ByteSize::b(600),
            log_ratio: 0,
            group_records: 3,
            ..JournalOptions::default()
        },
    )
    .unwrap();
    for records in work {
        for record in &records {
            expected.apply(record.clone());
        }
        let pool = Arc::clone(&pool);
        let applied = records.clone();
        journal
            .submit(records, Ack::Durable, move |outcome| {
                outcome.unwrap();
                let mut model = pool.0.lock();
                applied.into_iter().for_each(|record| model.apply(record));
            })
            .await
            .unwrap();
    }
    journal.close().await;
    let cut = store.log_span().await?.cut;
    store.close().await?;
    Ok(cut.0)
}

fn key(number: u8) -> Key {
    Key::from_digest([number; 32])
}

fn operations() -> impl Strategy<Value = Record> {
    let segment = || (0u32..6).prop_map(SegmentId);
    prop_oneof![
        6 => (0u8..20, 0u64..4, proptest::collection::vec(segment(), 1..3)).prop_map(
            |(number, version, segments)| {
                Record::Commit(Commit {
                    namespace: NamespaceId(u32::from(number % 2)),
                    key: key(number),
                    version: Version(version),
                    length: Length(4096),
                    checksum: Checksum(version),
                    replicas: segments.into_iter().map(|s| (s, Offset(version * 4096))).collect(),
                    parent: (number > 1).then(|| key(number - 2)),
                    hard_pin: number == 3,
                })
            }
        ),
        3 => (0u8..20, 0u64..4).prop_map(|(number, version)| {
            Record::Remove(Remove {
                namespace: NamespaceId(u32::from(number % 2)),
                key: key(number),
                version: Version(version),
                unleased: false,
                everywhere: false,
                places: Default::default(),
            })
        }),
        1 => (0u8..20, 0u64..4, segment()).prop_map(|(number, version, segment)| {
            Record::ReplicaGone(record::ReplicaGone {
                namespace: NamespaceId(u32::from(number % 2)),
                key: key(number),
                version: Version(version),
                segment,
                offset: None,
            })
        }),
        2 => (0u8..20, 0u64..4, segment()).prop_map(|(number, version, segment)| {
            Record::ReplicaAdded(record::ReplicaAdded {
                namespace: NamespaceId(u32::from(number % 2)),
                key: key(number),
                version: Version(version),
                segment,
                offset: Offset(version * 4096),
            })
        }),
        1 => (0u32..3).prop_map(|id| Record::Namespace(Namespace {
            id: NamespaceId(id),
            namespace: namespace::Namespace { name: format!("n{id}"), ..Default::default() },
        })),
        1 => (0u32..3, 0u64..9).prop_map(|(id, priority)| Record::NamespaceSet(NamespaceSet {
            id: NamespaceId(id),
            settings: NamespaceSettings::default().with(Setting::Priority, priority),
        })),
        1 => (0u32..3).prop_map(|id| Record::NamespaceGone(NamespaceGone {
            id: NamespaceId(id),
        })),
        1 => (0u32..3).prop_map(|n| Record::IncarnationDropped(IncarnationDropped {
            node: NodeName(format!("node-{n}")),
            incarnation: Incarnation(n.into()),
        })),
        1 => any::<u64>().prop_map(|seed| Record::Seed(Seed { seed })),
        1 => (0u64..99).prop_map(|until| Record::VersionsGranted(VersionsGranted {
            until: Version(until),
        })),
        1 => (0u32..99).prop_map(|until| Record::SegmentsGranted(SegmentsGranted {
            until: SegmentId(until),
        })),
    ]
}

/// Adds the log's own rules: a segment is registered once, before its use, and never returns.
fn with_segments(mut lives: Vec<Vec<Vec<Record>>>, gone: &[(u32, usize)]) -> Vec<Vec<Vec<Record>>> {
    let all = (0..6).map(|id| {
        Record::Segment(Segment {
            id: SegmentId(id),
            node: NodeName(format!("node-{id}")),
            incarnation: Incarnation(u128::from(id) << 90),
            index: id,
            size: Length(1 << 30),
        })
    });
    lives[0].insert(0, all.collect());
    for (id, at) in gone {
        let life = at % lives.len();
        let place = 1 + at % lives[life].len();
        let gone = Record::SegmentGone(SegmentGone { id: SegmentId(*id) });
        let place = place.min(lives[life].len());
        lives[life].insert(place, vec![gone]);
    }
    lives
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn recovery_returns_every_durable_record(
        lives in proptest::collection::vec(
            proptest::collection::vec(proptest::collection::vec(operations(), 1..4), 1..40),
            1..4,
        ),
        gone in proptest::collection::vec((0u32..6, 0usize..100), 0..3),
    ) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut expected = Model::default();
        runtime.block_on(async {
            for work in with_segments(lives, &gone) {
                live(directory.path(), work, &mut expected).await.unwrap();
            }
            live(directory.path(), Vec::new(), &mut expected).await.unwrap();
        });
    }
}

fn commit(number: u8, version: u64) -> Record {
    Record::Commit(Commit {
        namespace: NamespaceId(0),
        key: key(number),
        version: Version(version),
        length: Length(1),
        checksum: Checksum(version),
        replicas: smallvec![(SegmentId(0), Offset(0))],
        parent: None,
        hard_pin: false,
    })
}

#[tokio::test]
async fn a_long_log_is_cut_behind_the_snapshots() {
    let directory = tempfile::tempdir().unwrap();
    let mut work = with_segments(vec![Vec::new()], &[]);
    work[0].extend((0..500u64).map(|n| vec![commit(u8::try_from(n % 50).unwrap(), n)]));
    let mut expected = Model::default();
    live(directory.path(), work.remove(0), &mut expected)
        .await
        .unwrap();
    // Snapshots are written beside the appends, one at a time. So each life waits for the one in
    // progress, and the log can be cut once each shard was captured.
    let mut cut = 0;
    for _ in 0..2 * SHARDS {
        let work = vec![vec![commit(1, 1000)]; 50];
        cut = live(directory.path(), work, &mut expected).await.unwrap();
    }
    assert!(cut > 0, "no snapshot let the log be cut");
    live(directory.path(), Vec::new(), &mut expected)
        .await
        .unwrap();
}

/// A store whose log has `through` groups of one commit each, and an empty snapshot.
async fn logged(directory: &Path, through: u64) -> (EmbeddedStore, Epoch) {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    for seq in 1..=through {
        let group = record::encode_group(&[commit(1, seq)]);
        store.append(epoch, LogSeq(seq), group).await.unwrap();
    }
    (store, epoch)
}

async fn recovery_error(store: &EmbeddedStore) -> RecoveryError {
    let mut model = Model::default();
    recover(store, SHARDS, &mut model).await.unwrap_err()
}

#[tokio::test]
async fn a_damaged_group_is_named_and_nothing_is_dropped_silently() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = logged(directory.path(), 3).await;
    // The last group is torn. It was acknowledged, so recovery must not drop it.
    let torn = record::encode_group(&[commit(2, 4)]).slice(..20);
    store.append(epoch, LogSeq(4), torn).await.unwrap();
    let error = recovery_error(&store).await;
    assert!(
        matches!(error, RecoveryError::DamagedGroup { seq: LogSeq(4), .. }),
        "{error}"
    );
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn a_damaged_snapshot_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = logged(directory.path(), 3).await;
    let shard = ShardIndex(2);
    let system = record::encode_snapshot(SHARDS, []);
    store
        .put_snapshot(epoch, ShardIndex::SYSTEM, LogSeq(3), system)
        .await
        .unwrap();
    let mut chunks = record::encode_snapshot(SHARDS, [commit(1, 1)]);
    chunks.push(chunks[0].slice(1..));
    store
        .put_snapshot(epoch, shard, LogSeq(3), chunks)
        .await
        .unwrap();
    let error = recovery_error(&store).await;
    assert!(
        matches!(error, RecoveryError::DamagedSnapshot { shard: s, chunk: 1, .. } if s == shard),
        "{error}"
    );
}

#[tokio::test]
async fn without_the_systems_snapshot_all_is_read_from_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let seed = Record::Seed(Seed { seed: 41 });
    let group = record::encode_group(&[seed, commit(1, 1)]);
    store.append(epoch, LogSeq(1), group).await.unwrap();
    // A crash came between the first snapshots and the flush of their directory: the system's is not there.
    let chunks = record::encode_snapshot(kvpool_master::directory::SHARDS, [commit(1, 1)]);
    let shard = ShardIndex(1);
    store
        .put_snapshot(epoch, shard, LogSeq(1), chunks)
        .await
        .unwrap();
    let config = kvpool_master::Config::default();
    let clock = Arc::new(kvpool_master::clock::BootClock);
    let standby = kvpool_master::standby::Standby::load(&store, &config, clock).await;
    assert_eq!(standby.unwrap().applied(), LogSeq(1));
}

#[tokio::test]
async fn a_log_that_was_cut_too_far_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = logged(directory.path(), 3).await;
    let chunks = record::encode_snapshot(SHARDS, []);
    for shard in [
        ShardIndex::SYSTEM,
        ShardIndex(0),
        ShardIndex(1),
        ShardIndex(2),
    ] {
        store
            .put_snapshot(epoch, shard, LogSeq(3), chunks.clone())
            .await
            .unwrap();
    }
    store.truncate_log(epoch, LogSeq(1)).await.unwrap();
    let error = recovery_error(&store).await;
    assert!(
        matches!(
            error,
            RecoveryError::LostGroups {
                missing: LogSeq(1),
                shard: ShardIndex(3)
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn another_number_of_shards_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = logged(directory.path(), 1).await;
    let chunks = record::encode_snapshot(SHARDS + 1, []);
    store
        .put_snapshot(epoch, ShardIndex::SYSTEM, LogSeq(1), chunks)
        .await
        .unwrap();
    let error = recovery_error(&store).await;
    assert!(
        matches!(error, RecoveryError::ShardCount { stored, configured, .. }
            if (stored, configured) == (SHARDS + 1, SHARDS)),
        "{error}"
    );
}

#[tokio::test]
async fn a_closed_store_is_a_store_error() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = logged(directory.path(), 1).await;
    store.close().await.unwrap();
    let error = recovery_error(&store).await;
    assert!(
        matches!(error, RecoveryError::Store(StoreError::Closed)),
        "{error}"
    );
}
