//! A standby that follows the log equals one that is loaded, whatever the log contains.

mod busy;
mod copies;
mod leased;
mod moved;
mod recorded;
mod returned;
mod swept;

use super::*;
use crate::clock::{BootInstant, ManualClock};
use crate::placement::Extents;
use crate::store::record::{self, Commit, Record, encode_group, encode_snapshot};
use crate::store::{EmbeddedOptions, EmbeddedStore, ShardIndex};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Epoch, Incarnation, Key, Length, NodeName, Offset, SegmentId};
use proptest::prelude::*;
use smallvec::smallvec;
use std::collections::BTreeMap;
use std::time::Duration;

const GRANULE: u64 = 4096;
const PLACES: u64 = 16;

/// A change that a leader may log. Live blocks never share a range, as a leader guarantees.
#[derive(Clone, Debug)]
enum Change {
    Put {
        key: u8,
        child_of: Option<u8>,
    },
    Remove {
        key: u8,
    },
    /// A block gets a replica on the spare node.
    Copy {
        key: u8,
    },
    /// A block's replica on the spare node replaces its other one.
    Move {
        key: u8,
    },
    /// A replica of a version that no longer exists is added.
    CopyLate {
        key: u8,
    },
    DropNode,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (0u8..12, prop::option::of(0u8..12))
            .prop_map(|(key, child_of)| Change::Put { key, child_of }),
        3 => (0u8..12).prop_map(|key| Change::Remove { key }),
        2 => (0u8..12).prop_map(|key| Change::Copy { key }),
        2 => (0u8..12).prop_map(|key| Change::Move { key }),
        1 => (0u8..12).prop_map(|key| Change::CopyLate { key }),
        1 => Just(Change::DropNode),
    ]
}

fn key(number: u8) -> Key {
    Key::from_digest([number; 32])
}

/// The namespace of a key. One of the three has settings.
fn space(number: u8) -> NamespaceId {
    NamespaceId(u32::from(number) % 3)
}

/// The part of a leader's state that these tests need.
#[derive(Default)]
struct Leader {
    next_version: u64,
    life: u128,
    segment: u32,
    node: Option<SegmentId>,
    /// The version of each key, and its extent on the node; [`MOVED`] for a block that is on the spare node
    /// only.
    live: BTreeMap<u8, (Version, u64)>,
    spare: Option<SegmentId>,
    /// The extents on the spare node.
    copies: BTreeMap<u8, u64>,
}

const MOVED: u64 = u64::MAX;

impl Leader {
    fn new_node(&mut self) -> Record {
        self.life += 1;
        self.segment += 1;
        let id = SegmentId(self.segment);
        self.node = Some(id);
        Record::Segment(record::Segment {
            id,
            node: NodeName("node".into()),
            incarnation: Incarnation(self.life),
            index: 0,
            size: Length(PLACES * GRANULE),
        })
    }

    fn new_spare(&mut self) -> Record {
        self.segment += 1;
        let id = SegmentId(self.segment);
        self.spare = Some(id);
        Record::Segment(record::Segment {
            id,
            node: NodeName("spare".into()),
            incarnation: Incarnation(1_000_000),
            index: 0,
            size: Length(PLACES * GRANULE),
        })
    }

    /// A free extent on the spare node; `None` without that node.
    fn free_copy(&self) -> Option<u64> {
        self.spare?;
        let taken: Vec<u64> = self.copies.values().copied().collect();
        (0..PLACES).find(|place| !taken.contains(place))
    }

    fn added(&self, number: u8, version: Version, place: u64) -> Record {
        Record::ReplicaAdded(record::ReplicaAdded {
            namespace: space(number),
            key: key(number),
            version,
            segment: self.spare.unwrap(),
            offset: Offset(place * GRANULE),
        })
    }

    fn records(&mut self, change: &Change) -> Vec<Record> {
        match change {
            Change::Put {
                key: number,
                child_of,
            } => {
                let taken: Vec<u64> = self.live.values().map(|(_, place)| *place).collect();
                let Some(place) = (0..PLACES).find(|place| !taken.contains(place)) else {
                    return Vec::new();
                };
                self.next_version += 1;
                let version = Version(self.next_version);
                self.copies.remove(number);
                self.live.insert(*number, (version, place));
                vec![Record::Commit(Commit {
                    namespace: space(*number),
                    key: key(*number),
                    version,
                    length: Length(100),
                    checksum: Checksum(version.0),
                    replicas: smallvec![(self.node.unwrap(), Offset(place * GRANULE))],
                    parent: child_of.filter(|parent| parent != number).map(key),
                    hard_pin: false,
                })]
            }
            Change::Copy { key: number } | Change::Move { key: number } => {
                let (Some(place), false) = (self.free_copy(), self.copies.contains_key(number))
                else {
                    return Vec::new();
                };
                let Some((version, at)) = self.live.get_mut(number) else {
                    return Vec::new();
                };
                let (version, moves) = (*version, matches!(change, Change::Move { .. }));
                if moves {
                    *at = MOVED;
                }
                self.copies.insert(*number, place);
                let mut records = vec![self.added(*number, version, place)];
                records.extend(moves.then(|| {
                    Record::ReplicaGone(record::ReplicaGone {
                        namespace: space(*number),
                        key: key(*number),
                        version,
                        segment: self.node.unwrap(),
                        offset: None,
                    })
                }));
                records
            }
            Change::CopyLate { key: number } => {
                let held = self.live.get(number).map_or(1, |(version, _)| version.0);
                let late = Version(held.saturating_sub(1));
                self.free_copy()
                    .map_or_else(Vec::new, |place| vec![self.added(*number, late, place)])
            }
            Change::Remove { key: number } => match self.live.remove(number) {
                Some((version, _)) => {
                    self.copies.remove(number);
                    vec![Record::Remove(record::Remove {
                        namespace: space(*number),
                        key: key(*number),
                        version,
                        unleased: false,
                        everywhere: false,
                        places: Default::default(),
                    })]
                }
                None => Vec::new(),
            },
            Change::DropNode => {
                let copies = &self.copies;
                self.live.retain(|number, (_, place)| {
                    *place = MOVED;
                    copies.contains_key(number)
                });
                vec![
                    Record::SegmentGone(record::SegmentGone {
                        id: self.node.unwrap(),
                    }),
                    Record::IncarnationDropped(record::IncarnationDropped {
                        node: NodeName("node".into()),
                        incarnation: Incarnation(self.life),
                    }),
                    self.new_node(),
                ]
            }
        }
    }
}

/// A block with its locations.
type Place = (Key, Version, Vec<(SegmentId, Offset)>);

fn contents(standby: &Standby) -> Vec<Place> {
    let mut all: Vec<_> = (0..directory::SHARDS)
        .flat_map(|shard| standby.directory.snapshot(shard))
        .map(|block| {
            let places = block.replicas.iter().map(|r| (r.segment, r.offset));
            (block.key, block.version, places.collect())
        })
        .collect();
    all.sort_by_key(|(_, version, _)| *version);
    all
}

/// The used bytes of each segment.
fn used(standby: &Standby) -> Vec<u64> {
    let segments = standby.placement.segments();
    segments.iter().map(|segment| segment.used()).collect()
}

/// A standby that was loaded at the end of the log.
async fn load(store: &EmbeddedStore) -> Standby {
    let clock = Arc::new(ManualClock::new(BootInstant(1)));
    let standby = Standby::load(store, &Config::default(), clock).await;
    let mut standby = standby.unwrap();
    standby.sweep_all();
    standby
}

/// A standby for which every earlier lease has expired.
async fn load_settled(store: &EmbeddedStore) -> Standby {
    let mut standby = load(store).await;
    standby
        .recently_freed
        .tick(BootInstant(1).after(Config::default().lease_ttl * 2));
    standby
}

/// Appends each change as its own group, and advances the follower's clock in between.
async fn compare(all: Vec<Change>, wait: Duration) {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1)));
    let mut follower = Standby::load(&store, &Config::default(), Arc::clone(&clock) as _)
        .await
        .unwrap();
    let mut leader = Leader::default();
    let mut seq = LogSeq(0);
    let seed = Record::Seed(record::Seed { seed: 7 });
    let namespace = kvpool_types::Namespace {
        name: "one".into(),
        ..Default::default()
    };
    let id = NamespaceId(1);
    let created = Record::Namespace(record::Namespace { id, namespace });
    let settings = NamespaceSettings::default().with(kvpool_types::Setting::Priority, 2);
    let set = Record::NamespaceSet(record::NamespaceSet { id, settings });
    let beginning = vec![seed, leader.new_spare(), leader.new_node(), created, set];
    let groups = std::iter::once(beginning);
    for records in groups.chain(
        all.iter()
            .map(|change| leader.records(change))
            .collect::<Vec<_>>(),
    ) {
        if records.is_empty() {
            continue;
        }
        seq = seq.next();
        let group = encode_group(&records);
        store.append(epoch, seq, group.clone()).await.unwrap();
        follower.apply(seq, &group).unwrap();
        clock.advance(wait);
    }
    follower.sweep_all();
    let loaded = load_settled(&store).await;
    assert_eq!(contents(&follower), contents(&loaded));
    assert_eq!(follower.applied(), loaded.applied());
    assert_eq!(follower.state.runs, loaded.state.runs);
    assert_eq!(follower.next_segment, loaded.next_segment);
    // Once every lease has expired, the follower has no closed range that a loaded standby would grant.
    clock.advance(Config::default().lease_ttl);
    follower.recently_freed.tick(clock.now());
    assert_eq!(follower.recently_freed.len(), 0);
    assert_eq!(used(&follower), used(&loaded));
    for standby in [&follower, &loaded] {
        let accounts = standby.directory.accounts();
        let total = accounts.total();
        assert_eq!(total.memory, used(standby).iter().sum::<u64>());
        assert_eq!(
            (total.resident, total.blocks),
            (total.memory, standby.blocks())
        );
    }
    for number in 0..3 {
        let of = |standby: &Standby| standby.directory.accounts().balance(NamespaceId(number));
        assert_eq!(of(&follower), of(&loaded));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn following_the_log_and_loading_it_come_to_the_same(
        all in prop::collection::vec(change(), 1..60),
        wait_ms in prop_oneof![Just(0u64), Just(700), Just(6000)],
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(compare(all, Duration::from_millis(wait_ms)));
    }
}

#[tokio::test]
async fn a_group_out_of_turn_and_a_damaged_one_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let mut standby = load(&store).await;
    let group = encode_group(&[Record::Seed(record::Seed { seed: 7 })]);
    let late = standby.apply(LogSeq(2), &group);
    assert!(matches!(late, Err(ApplyError::Gap { .. })), "{late:?}");
    let mut damaged = group.to_vec();
    if let Some(byte) = damaged.last_mut() {
        *byte ^= 1;
    }
    let damaged = standby.apply(LogSeq(1), &damaged);
    assert!(
        matches!(damaged, Err(ApplyError::Damaged { .. })),
        "{damaged:?}"
    );
    assert_eq!(standby.applied(), LogSeq(0));
    standby.apply(LogSeq(1), &group).unwrap();
}

/// Readers of the leader may still hold leases on a block that was just removed.
#[tokio::test]
async fn freed_extents_stay_closed_for_a_lease_ttl_unless_the_leader_grants_them() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1)));
    let mut standby = Standby::load(&store, &Config::default(), Arc::clone(&clock) as _)
        .await
        .unwrap();
    let mut leader = Leader::default();
    let mut seq = LogSeq(0);
    let put = |key| Change::Put {
        key,
        child_of: None,
    };
    let mut groups = vec![vec![leader.new_node()]];
    for change in [
        put(1),
        put(2),
        Change::Remove { key: 1 },
        Change::Remove { key: 2 },
        put(3),
    ] {
        groups.push(leader.records(&change));
    }
    for records in groups {
        seq = seq.next();
        standby.apply(seq, &encode_group(&records)).unwrap();
    }
    // The third block has the first block's range; the second block's range is still closed.
    assert_eq!(standby.recently_freed.len(), 1);
    clock.advance(Config::default().lease_ttl - Duration::from_millis(1));
    standby.recently_freed.tick(clock.now());
    assert_eq!(standby.recently_freed.len(), 1);
    clock.advance(Config::default().lease_ttl / 10);
    standby.recently_freed.tick(clock.now());
    assert_eq!(standby.recently_freed.len(), 0);
}

/// A store with this log.
async fn logged(groups: &[Vec<Record>]) -> (tempfile::TempDir, EmbeddedStore, Epoch) {
    let place = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(place.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    for (seq, records) in (1..).zip(groups) {
        let group = encode_group(records);
        store.append(epoch, LogSeq(seq), group).await.unwrap();
    }
    (place, store, epoch)
}

/// Loads a log whose last block has key 4, and key 1 as its parent. The snapshot of its shard is at the log's
/// end. The arguments are records of other shards, or of the system shard. Returns the key of its parent.
async fn parent_of_4(
    groups: &[Vec<Record>],
    others: impl Fn(&Directory) -> Vec<(ShardIndex, u64, Vec<Record>)>,
) -> Option<Key> {
    let (_place, store, epoch) = logged(groups).await;
    let whole = load(&store).await.directory;
    let shard = whole.shard_of_key(space(4), key(4).as_ref());
    assert_ne!(shard, whole.shard_of_key(space(1), key(1).as_ref()));
    let of_it = |directory: &Directory| {
        let mut blocks = directory.snapshot(shard).into_iter();
        blocks.find(|block| block.key == key(4)).unwrap()
    };
    let block = of_it(&whole);
    assert_eq!(block.parent, Some(key(1)));
    let mut snapshots = others(&whole);
    let last = groups.len() as u64;
    snapshots.push((ShardIndex(shard), last, vec![Record::Commit(block.into())]));
    for (shard, seq, records) in snapshots {
        let chunks = encode_snapshot(directory::SHARDS, records);
        let put = store.put_snapshot(epoch, shard, LogSeq(seq), chunks);
        put.await.unwrap();
    }
    of_it(&load(&store).await.directory).parent
}

/// The snapshots of shards are written one after another, and a master may die in between.
#[tokio::test]
async fn a_block_keeps_its_parent_when_only_its_own_shard_has_a_snapshot() {
    let mut leader = Leader::default();
    let seed = Record::Seed(record::Seed { seed: 7 });
    let mut groups = vec![vec![seed, leader.new_node()]];
    for (key, child_of) in [(1, None), (4, Some(1))] {
        groups.push(leader.records(&Change::Put { key, child_of }));
    }
    let others = |_: &Directory| vec![(ShardIndex::SYSTEM, 1, groups[0].clone())];
    assert_eq!(parent_of_4(&groups, others).await, Some(key(1)));
}

/// The parent was evicted and put again between the two snapshots.
#[tokio::test]
async fn a_block_keeps_its_parent_when_the_snapshot_of_its_own_shard_is_later() {
    let mut leader = Leader::default();
    let seed = Record::Seed(record::Seed { seed: 7 });
    let mut groups = vec![vec![seed, leader.new_node()]];
    let put = |key, child_of| Change::Put { key, child_of };
    for change in [
        put(1, None),
        Change::Remove { key: 1 },
        put(1, None),
        put(4, Some(1)),
    ] {
        groups.push(leader.records(&change));
    }
    let others = |directory: &Directory| {
        let of_parent = ShardIndex(directory.shard_of_key(space(1), key(1).as_ref()));
        vec![
            (ShardIndex::SYSTEM, 1, groups[0].clone()),
            (of_parent, 2, groups[1].clone()),
        ]
    };
    assert_eq!(parent_of_4(&groups, others).await, Some(key(1)));
}

/// A master that restarts at once after its death must respect leases too.
#[tokio::test]
async fn freed_extents_in_the_log_stay_closed_for_a_lease_ttl_after_a_load() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let mut leader = Leader::default();
    let put = |key| Change::Put {
        key,
        child_of: None,
    };
    let mut groups = vec![vec![leader.new_node()]];
    for change in [
        put(1),
        put(2),
        put(3),
        put(3),
        Change::Remove { key: 1 },
        put(4),
        Change::Remove { key: 2 },
    ] {
        groups.push(leader.records(&change));
    }
    for (seq, records) in (1..).zip(&groups) {
        let group = encode_group(records);
        store.append(epoch, LogSeq(seq), group).await.unwrap();
    }
    let one = Extents::rounded(Length(100)).0;
    let loaded = load(&store).await;
    assert_eq!(contents(&loaded).len(), 2);
    // These are the ranges of the second block and of the first version of the third block. The fourth block
    // has the range of the first block.
    assert_eq!(
        (loaded.recently_freed.len(), used(&loaded)),
        (2, vec![4 * one])
    );
    let settled = load_settled(&store).await;
    assert_eq!(
        (settled.recently_freed.len(), used(&settled)),
        (0, vec![2 * one])
    );
}

/// Waits until freed extents are no longer kept closed.
fn leases_end(standby: &mut Standby) {
    standby.recently_freed.tick(BootInstant(u64::MAX));
}

/// A master with `--commit-ack memory` logs both versions together.
#[tokio::test]
async fn two_versions_of_a_key_in_one_group_are_one_block() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let mut standby = load(&store).await;
    let mut leader = Leader::default();
    let put = Change::Put {
        key: 1,
        child_of: None,
    };
    let mut group = vec![leader.new_node()];
    group.extend(leader.records(&put));
    group.extend(leader.records(&put));
    // No earlier key used this namespace.
    for record in &mut group {
        if let Record::Commit(commit) = record {
            commit.key = Key::parse(&format!("model@{:064x}@0", 1)).unwrap();
        }
    }
    standby.apply(LogSeq(1), &encode_group(&group)).unwrap();
    let versions: Vec<Version> = contents(&standby).into_iter().map(|b| b.1).collect();
    assert_eq!(versions, [Version(2)]);
    leases_end(&mut standby);
    assert_eq!(used(&standby), [Extents::rounded(Length(100)).0]);
}

#[tokio::test]
async fn a_commit_that_is_older_than_what_is_there_takes_room_until_its_leases_end() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let mut standby = load(&store).await;
    let mut leader = Leader::default();
    let node = leader.new_node();
    let put = |key| Change::Put {
        key,
        child_of: None,
    };
    let older = leader.records(&put(1));
    let newer = leader.records(&put(1));
    for (seq, records) in [vec![node], newer, older].iter().enumerate() {
        let seq = LogSeq(seq as u64 + 1);
        standby.apply(seq, &encode_group(records)).unwrap();
    }
    let one = Extents::rounded(Length(100)).0;
    assert_eq!(contents(&standby).len(), 1);
    assert_eq!(used(&standby), [2 * one]);
    leases_end(&mut standby);
    assert_eq!(used(&standby), [one]);
}
