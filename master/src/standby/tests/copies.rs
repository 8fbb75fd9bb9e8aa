//! Copies on media, in the log and in snapshots. A follower, a load and a model must agree.

use super::*;
use crate::store::record::encode_snapshot;
use kvpool_types::{MediumId, medium};
use std::collections::BTreeSet;

const SLOTS: u64 = 24;
const LENGTH: Length = Length(100);

fn slot_bytes() -> u64 {
    medium::footprint(LENGTH).unwrap().0
}

#[derive(Clone, Debug)]
enum Step {
    /// A block is committed in memory.
    Put(u8),
    /// A block in memory is stored on the medium.
    CopyOut(u8),
    /// A copy moves to another offset on the medium.
    Move(u8),
    /// A block leaves memory.
    Evict(u8),
    /// A copy is loaded into memory.
    Restore(u8),
    /// A block leaves memory and is loaded again. The log has the two records in reverse order.
    EvictLate(u8),
    /// A block is removed.
    Remove(u8),
    /// A copy is found damaged.
    CopyGone(u8),
    /// The node's process ends, and its next incarnation offers the same medium.
    NodeRestarts,
    /// The medium is gone, and another is attached.
    MediumGone,
    /// A snapshot of one shard, or of the system.
    Snapshot(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let key = || 0u8..10;
    prop_oneof![
        6 => key().prop_map(Step::Put),
        8 => key().prop_map(Step::CopyOut),
        2 => key().prop_map(Step::Move),
        5 => key().prop_map(Step::Evict),
        4 => key().prop_map(Step::Restore),
        3 => key().prop_map(Step::EvictLate),
        3 => key().prop_map(Step::Remove),
        2 => key().prop_map(Step::CopyGone),
        1 => Just(Step::NodeRestarts),
        1 => Just(Step::MediumGone),
        12 => (0..=directory::SHARDS).prop_map(Step::Snapshot),
    ]
}

/// The state of a leader.
struct Model {
    next_version: u64,
    next_segment: u32,
    life: u128,
    memory_segment: SegmentId,
    medium: record::Medium,
    /// Version and slot, by key.
    memory: BTreeMap<u8, (Version, u64)>,
    copies: BTreeMap<u8, (Version, u64)>,
}

impl Model {
    fn new() -> (Self, Vec<Record>) {
        let mut model = Self {
            next_version: 0,
            next_segment: 1,
            life: 0,
            memory_segment: SegmentId(0),
            medium: record::Medium {
                id: SegmentId(0),
                medium: MediumId(0),
                node: NodeName("node".into()),
                generation: 1,
                is_pending: false,
                size: Length(SLOTS * slot_bytes()),
                zone: Length(4 * slot_bytes()),
                cursor: 0,
            },
            memory: BTreeMap::new(),
            copies: BTreeMap::new(),
        };
        let mut records = vec![Record::Seed(record::Seed { seed: 7 })];
        records.push(model.new_segment());
        records.push(model.new_medium());
        (model, records)
    }

    fn number(&mut self) -> u32 {
        self.next_segment += 1;
        self.next_segment - 1
    }

    fn new_segment(&mut self) -> Record {
        self.life += 1;
        self.memory_segment = SegmentId(self.number());
        Record::Segment(record::Segment {
            id: self.memory_segment,
            node: NodeName("node".into()),
            incarnation: Incarnation(self.life),
            index: 0,
            size: Length(PLACES * GRANULE),
        })
    }

    fn new_medium(&mut self) -> Record {
        self.medium.id = SegmentId::on_medium(self.number());
        self.medium.medium = MediumId(self.medium.id.0.into());
        Record::Medium(self.medium.clone())
    }

    fn free_slot(taken: &BTreeMap<u8, (Version, u64)>, of: u64) -> Option<u64> {
        let taken: BTreeSet<u64> = taken.values().map(|(_, slot)| *slot).collect();
        (0..of).find(|slot| !taken.contains(slot))
    }

    fn commit(number: u8, version: Version, segment: SegmentId, offset: u64) -> Record {
        Record::Commit(Commit {
            namespace: NamespaceId(0),
            key: key(number),
            version,
            length: LENGTH,
            checksum: Checksum(version.0),
            replicas: smallvec![(segment, Offset(offset))],
            parent: None,
            hard_pin: false,
        })
    }

    fn remove(number: u8, version: Version, everywhere: bool) -> Record {
        Record::Remove(record::Remove {
            namespace: NamespaceId(0),
            key: key(number),
            version,
            unleased: false,
            everywhere,
            places: record::Places::new(),
        })
    }

    /// The eviction of the block in this slot.
    fn evict(&self, number: u8, version: Version, slot: u64) -> Record {
        Record::Remove(record::Remove {
            namespace: NamespaceId(0),
            key: key(number),
            version,
            unleased: false,
            everywhere: false,
            places: smallvec![(self.memory_segment, Offset(slot * GRANULE))],
        })
    }

    fn records(&mut self, step: &Step) -> Vec<Record> {
        self.changed(step).unwrap_or_default()
    }

    fn changed(&mut self, step: &Step) -> Option<Vec<Record>> {
        let one = match step {
            Step::Put(number) => {
                let slot = Self::free_slot(&self.memory, PLACES)?;
                self.next_version += 1;
                let version = Version(self.next_version);
                self.memory.insert(*number, (version, slot));
                self.copies.remove(number);
                Self::commit(*number, version, self.memory_segment, slot * GRANULE)
            }
            Step::CopyOut(number) => {
                let (version, _) = *self.memory.get(number)?;
                self.copy_to_free(*number, version)?
            }
            Step::Move(number) => {
                let (version, _) = *self.copies.get(number)?;
                self.copy_to_free(*number, version)?
            }
            Step::Evict(number) => {
                let (version, slot) = self.memory.remove(number)?;
                self.evict(*number, version, slot)
            }
            Step::EvictLate(number) => {
                let (version, _) = *self.copies.get(number)?;
                let (_, old) = *self.memory.get(number)?;
                let slot = Self::free_slot(&self.memory, PLACES)?;
                self.memory.insert(*number, (version, slot));
                let back = Self::commit(*number, version, self.memory_segment, slot * GRANULE);
                return Some(vec![back, self.evict(*number, version, old)]);
            }
            Step::Restore(number) => {
                let (version, _) = *self.copies.get(number)?;
                if self.memory.contains_key(number) {
                    return None;
                }
                let slot = Self::free_slot(&self.memory, PLACES)?;
                self.memory.insert(*number, (version, slot));
                Self::commit(*number, version, self.memory_segment, slot * GRANULE)
            }
            Step::Remove(number) => {
                let in_memory = self.memory.remove(number);
                let copy = self.copies.remove(number);
                let (version, _) = in_memory.or(copy)?;
                Self::remove(*number, version, true)
            }
            Step::CopyGone(number) => {
                let (version, _) = self.copies.remove(number)?;
                Record::ReplicaGone(record::ReplicaGone {
                    namespace: NamespaceId(0),
                    key: key(*number),
                    version,
                    segment: self.medium.id,
                    offset: None,
                })
            }
            Step::NodeRestarts => {
                self.memory.clear();
                let gone = record::SegmentGone {
                    id: self.memory_segment,
                };
                self.medium.generation += 1;
                self.medium.cursor = (self.medium.cursor + 1) % 6;
                return Some(vec![
                    Record::SegmentGone(gone),
                    self.new_segment(),
                    Record::Medium(self.medium.clone()),
                ]);
            }
            Step::MediumGone => {
                self.copies.clear();
                let gone = record::SegmentGone { id: self.medium.id };
                return Some(vec![Record::SegmentGone(gone), self.new_medium()]);
            }
            Step::Snapshot(_) => return None,
        };
        Some(vec![one])
    }

    fn copy_to_free(&mut self, number: u8, version: Version) -> Option<Record> {
        let slot = Self::free_slot(&self.copies, SLOTS)?;
        self.copies.insert(number, (version, slot));
        let offset = slot * slot_bytes();
        Some(Self::commit(number, version, self.medium.id, offset))
    }

    fn in_memory(&self) -> Vec<Place> {
        let at = |slot: u64| vec![(self.memory_segment, Offset(slot * GRANULE))];
        let blocks = self.memory.iter();
        let mut all: Vec<Place> = blocks
            .map(|(number, (version, slot))| (key(*number), *version, at(*slot)))
            .collect();
        all.sort_by_key(|(_, version, _)| *version);
        all
    }

    fn places(&self) -> Vec<(u8, Version, SegmentId, Offset)> {
        let copy = |(number, (version, slot)): (&u8, &(Version, u64))| {
            let offset = Offset(slot * slot_bytes());
            (*number, *version, self.medium.id, offset)
        };
        self.copies.iter().map(copy).collect()
    }
}

/// The copies in a standby's tier, each with the range that its medium holds for it.
fn copies(standby: &Standby) -> Vec<(u8, Version, SegmentId, Offset)> {
    let mut all = Vec::new();
    for shard in 0..directory::SHARDS {
        for block in standby.tier.directory().snapshot(shard) {
            let number = (0..=u8::MAX)
                .find(|number| key(*number) == block.key)
                .unwrap();
            let replica = block.replicas[0];
            let medium = standby.tier.medium(replica.segment).unwrap();
            let range = medium.extents().range(replica.extent).unwrap();
            assert_eq!(range.offset, replica.offset, "the table knows the range");
            assert!(medium.extents().owner(replica.extent).is_some());
            all.push((number, block.version, replica.segment, replica.offset));
        }
    }
    all.sort_unstable();
    all
}

/// The records of one shard, or of the system, as a leader would capture them.
fn captured(standby: &Standby, model: &Model, shard: u32) -> Vec<Record> {
    if shard == directory::SHARDS {
        return vec![
            Record::Seed(record::Seed { seed: 7 }),
            Record::SegmentsGranted(record::SegmentsGranted {
                until: SegmentId(model.next_segment),
            }),
            Record::Segment(record::Segment {
                id: model.memory_segment,
                node: NodeName("node".into()),
                incarnation: Incarnation(model.life),
                index: 0,
                size: Length(PLACES * GRANULE),
            }),
            Record::Medium(model.medium.clone()),
        ];
    }
    let in_memory = standby.directory.snapshot(shard).into_iter();
    let in_memory = in_memory.map(|block| Record::Commit(block.into()));
    in_memory.chain(standby.tier.snapshot(shard)).collect()
}

async fn compare_copies(steps: Vec<Step>) {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1)));
    let mut follower = Standby::load(&store, &Config::default(), Arc::clone(&clock) as _)
        .await
        .unwrap();
    let (mut model, beginning) = Model::new();
    let mut seq = LogSeq(1);
    let group = encode_group(&beginning);
    store.append(epoch, seq, group.clone()).await.unwrap();
    follower.apply(seq, &group).unwrap();
    // The seed that maps keys to shards is known before any shard's snapshot.
    let first = std::iter::once(Step::Snapshot(directory::SHARDS));
    for step in first.chain(steps) {
        let step = &step;
        if let Step::Snapshot(shard) = step {
            let records = captured(&follower, &model, *shard);
            let chunks = encode_snapshot(directory::SHARDS, records);
            let shard = match *shard {
                directory::SHARDS => ShardIndex::SYSTEM,
                shard => ShardIndex(shard),
            };
            store.put_snapshot(epoch, shard, seq, chunks).await.unwrap();
            continue;
        }
        let records = model.records(step);
        if records.is_empty() {
            continue;
        }
        seq = seq.next();
        let group = encode_group(&records);
        store.append(epoch, seq, group.clone()).await.unwrap();
        follower.apply(seq, &group).unwrap();
        clock.advance(Config::default().lease_ttl * 2);
    }
    follower.sweep_all();
    assert_eq!(copies(&follower), model.places(), "followed");
    assert_eq!(contents(&follower), model.in_memory(), "followed");
    let loaded = load_settled(&store).await;
    assert_eq!(copies(&loaded), model.places(), "loaded");
    assert_eq!(contents(&follower), contents(&loaded));
    assert_eq!(follower.next_segment, loaded.next_segment);
    let footprint = slot_bytes() * model.copies.len() as u64;
    for standby in [&follower, &loaded] {
        let media = standby.tier.media();
        let [medium] = media.as_slice() else {
            panic!("{media:?}");
        };
        assert_eq!(medium.used(), Length(footprint), "no range leaks");
        assert_eq!(medium.record(), model.medium);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn copies_on_media_are_what_the_log_says_after_any_history(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(compare_copies(steps));
    }
}
