//! Extents that blocks left under leases, as recorded in snapshots at different positions and in the log.

use super::*;
use crate::store::record::{LeasedRanges, UnleasedRanges, encode_snapshot};

const SPACE: NamespaceId = NamespaceId(0);

/// A store with a log, and the shards of the first two keys.
struct Bench {
    store: EmbeddedStore,
    epoch: Epoch,
    shards: [ShardIndex; 2],
    _directory: tempfile::TempDir,
}

fn beginning() -> Vec<Record> {
    let segment = Record::Segment(record::Segment {
        id: SegmentId(1),
        node: NodeName("node".into()),
        incarnation: Incarnation(1),
        index: 0,
        size: Length(PLACES * GRANULE),
    });
    vec![Record::Seed(record::Seed { seed: 7 }), segment]
}

fn commit(number: u8, version: u64, place: u64) -> Record {
    Record::Commit(Commit {
        namespace: SPACE,
        key: key(number),
        version: Version(version),
        length: Length(GRANULE),
        checksum: Checksum(1),
        replicas: smallvec![(SegmentId(1), Offset(place * GRANULE))],
        parent: None,
        hard_pin: false,
    })
}

fn removal(number: u8, version: u64, unleased: bool) -> Record {
    Record::Remove(record::Remove {
        namespace: SPACE,
        key: key(number),
        version: Version(version),
        unleased,
        everywhere: false,
        places: Default::default(),
    })
}

fn leased(place: u64) -> Record {
    Record::LeasedRanges(LeasedRanges {
        segment: SegmentId(1),
        ranges: vec![(Offset(place * GRANULE), Length(GRANULE))],
    })
}

fn unleased(place: u64) -> Record {
    Record::UnleasedRanges(UnleasedRanges {
        segment: SegmentId(1),
        ranges: vec![(Offset(place * GRANULE), Length(GRANULE))],
    })
}

impl Bench {
    /// The first group registers the only segment, so the first of these groups has position 2.
    async fn new(groups: &[Vec<Record>]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
        for (seq, records) in (1..).zip(std::iter::once(&beginning()).chain(groups)) {
            let group = encode_group(records);
            store.append(epoch, LogSeq(seq), group).await.unwrap();
        }
        let directory_of_all = load(&store).await.directory;
        let shard = |number| ShardIndex(directory_of_all.shard_of_key(SPACE, key(number).as_ref()));
        let shards = [shard(1), shard(2)];
        assert_ne!(shards[0], shards[1]);
        Self {
            store,
            epoch,
            shards,
            _directory: directory,
        }
    }

    async fn snapshot(&self, shard: ShardIndex, seq: u64, records: Vec<Record>) {
        let chunks = encode_snapshot(directory::SHARDS, records);
        let put = self
            .store
            .put_snapshot(self.epoch, shard, LogSeq(seq), chunks);
        put.await.unwrap();
    }

    /// The first granules of the ranges that a load keeps closed.
    async fn shut(&self) -> Vec<u64> {
        let mut loaded = load(&self.store).await;
        let shut = loaded.recently_freed.take();
        shut.iter().map(|left| left.offset.0 / GRANULE).collect()
    }
}

#[tokio::test]
async fn only_the_list_of_the_latest_snapshot_counts() {
    let bench = Bench::new(&[vec![commit(1, 1, 0)], vec![commit(2, 2, 1)]]).await;
    let mut old = beginning();
    old.push(leased(5));
    bench.snapshot(ShardIndex::SYSTEM, 1, old).await;
    assert_eq!(bench.shut().await, [5]);
    let new = vec![commit(1, 1, 0), leased(6)];
    bench.snapshot(bench.shards[0], 2, new).await;
    assert_eq!(bench.shut().await, [6]);
    let newest = vec![commit(2, 2, 1)];
    bench.snapshot(bench.shards[1], 3, newest).await;
    assert!(bench.shut().await.is_empty());
}

/// The range was granted three times. The log has the first block. The snapshot contains the second block,
/// which has leases.
#[tokio::test]
async fn a_record_from_before_a_snapshot_opens_no_range_of_its_list() {
    let groups = [
        vec![commit(2, 1, 0)],
        vec![removal(2, 1, true)],
        vec![commit(1, 2, 0)],
        vec![commit(1, 3, 1)],
    ];
    let bench = Bench::new(&groups).await;
    bench.snapshot(ShardIndex::SYSTEM, 1, beginning()).await;
    let later = vec![commit(1, 3, 1), leased(0)];
    bench.snapshot(bench.shards[0], 5, later).await;
    assert_eq!(bench.shut().await, [0]);
}

/// The next block in the range may be read under a lease.
#[tokio::test]
async fn a_range_that_a_removed_block_left_without_a_lease_is_open_until_the_next_block_leaves_it()
{
    let groups = [
        vec![commit(1, 1, 3)],
        vec![removal(1, 1, false)],
        vec![unleased(3)],
        vec![commit(2, 2, 3)],
        vec![removal(2, 2, false)],
    ];
    assert_eq!(Bench::new(&groups[..2]).await.shut().await, [3]);
    let open = Bench::new(&groups[..3]).await;
    assert!(open.shut().await.is_empty());
    // The system's snapshot contains the record. The snapshot of the block's shard does not contain the
    // removal.
    open.snapshot(ShardIndex::SYSTEM, 4, beginning()).await;
    assert!(open.shut().await.is_empty());
    assert_eq!(Bench::new(&groups).await.shut().await, [3]);

    let mut standby = load(&Bench::new(&[]).await.store).await;
    let mut shut = Vec::new();
    for (seq, group) in (2..).zip(&groups) {
        standby.apply(LogSeq(seq), &encode_group(group)).unwrap();
        shut.push(standby.recently_freed.len());
    }
    assert_eq!(shut, [0, 1, 0, 0, 1]);
}

/// A block leaves memory, then a snapshot is written, then the log gets the record of the removal.
#[tokio::test]
async fn a_range_is_shut_whose_block_left_memory_before_a_snapshot_and_the_log_after_it() {
    let gone = removal(1, 1, false);
    let bench = Bench::new(&[vec![commit(1, 1, 3)], vec![gone, leased(3)]]).await;
    bench.snapshot(ShardIndex::SYSTEM, 1, beginning()).await;
    bench.snapshot(bench.shards[0], 2, Vec::new()).await;
    assert_eq!(bench.shut().await, [3]);
}

/// A standby is loaded between the two records, and then follows the log. It has one of two neighbours, which
/// leave together.
#[tokio::test]
async fn a_standby_shuts_a_range_whose_block_its_snapshot_lacked() {
    let bench = Bench::new(&[vec![commit(1, 1, 3)], vec![commit(2, 2, 4)]]).await;
    bench.snapshot(ShardIndex::SYSTEM, 1, beginning()).await;
    bench.snapshot(bench.shards[0], 3, Vec::new()).await;
    let mut standby = load(&bench.store).await;
    let both = Record::LeasedRanges(LeasedRanges {
        segment: SegmentId(1),
        ranges: vec![(Offset(3 * GRANULE), Length(2 * GRANULE))],
    });
    let group = encode_group(&[removal(1, 1, false), removal(2, 2, false), both]);
    standby.apply(LogSeq(4), &group).unwrap();
    let shut = standby.recently_freed.take();
    let places: Vec<u64> = shut.iter().map(|left| left.offset.0 / GRANULE).collect();
    assert_eq!(places, [3, 4]);
}

/// A block is loaded into memory, read under a lease, and replaced, all in one group of the log.
#[tokio::test]
async fn a_standby_shuts_the_place_of_a_block_that_was_replaced_in_the_same_group() {
    let bench = Bench::new(&[]).await;
    let mut standby = load(&bench.store).await;
    let group = encode_group(&[commit(1, 1, 3), commit(2, 2, 4), commit(1, 3, 5)]);
    standby.apply(LogSeq(2), &group).unwrap();
    let shut = standby.recently_freed.take();
    let places: Vec<u64> = shut.iter().map(|left| left.offset.0 / GRANULE).collect();
    assert_eq!(places, [3]);
}
