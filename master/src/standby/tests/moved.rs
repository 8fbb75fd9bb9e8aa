//! Blocks that moved off a node which is gone, loaded from snapshots at different positions.

use super::*;
use crate::store::record::encode_snapshot;

pub(super) const SPACE: NamespaceId = NamespaceId(0);

fn segment(number: u32) -> Record {
    Record::Segment(record::Segment {
        id: SegmentId(number),
        node: NodeName(format!("node {number}")),
        incarnation: Incarnation(number.into()),
        index: 0,
        size: Length(PLACES * GRANULE),
    })
}

/// The block of key `number`, whose only replica is on segment 1.
pub(super) fn commit(number: u8) -> Record {
    Record::Commit(Commit {
        namespace: SPACE,
        key: key(number),
        version: Version(number.into()),
        length: Length(100),
        checksum: Checksum(1),
        replicas: smallvec![(SegmentId(1), Offset(u64::from(number) * GRANULE))],
        parent: None,
        hard_pin: false,
    })
}

/// The block of key 1 gets a replica on segment 2.
fn added() -> Record {
    Record::ReplicaAdded(record::ReplicaAdded {
        namespace: SPACE,
        key: key(1),
        version: Version(1),
        segment: SegmentId(2),
        offset: Offset(GRANULE),
    })
}

/// Segment 1 is gone.
pub(super) fn gone() -> Record {
    Record::SegmentGone(record::SegmentGone { id: SegmentId(1) })
}

pub(super) fn beginning() -> Vec<Record> {
    let seed = Record::Seed(record::Seed { seed: 7 });
    vec![seed, segment(1), segment(2)]
}

/// Loads a pool whose only block moved from segment 1 to segment 2, before segment 1 was gone. The system's
/// snapshot is later than all of this. `has_block` says whether the block's shard has a snapshot from before
/// the move.
async fn load_after_a_move(has_block: bool) -> Vec<Place> {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let seed = Record::Seed(record::Seed { seed: 7 });
    let left = Record::ReplicaGone(record::ReplicaGone {
        namespace: SPACE,
        key: key(1),
        version: Version(1),
        segment: SegmentId(1),
        offset: None,
    });
    let groups = [
        beginning(),
        vec![commit(1)],
        vec![added(), left],
        vec![gone()],
    ];
    for (seq, records) in (1..).zip(&groups) {
        let group = encode_group(records);
        store.append(epoch, LogSeq(seq), group).await.unwrap();
    }
    let snapshot = |records: Vec<Record>| encode_snapshot(directory::SHARDS, records);
    let of_system = snapshot(vec![seed, segment(2)]);
    let put = store.put_snapshot(epoch, ShardIndex::SYSTEM, LogSeq(4), of_system);
    put.await.unwrap();
    if has_block {
        let shard = load(&store).await.directory;
        let shard = ShardIndex(shard.shard_of_key(SPACE, key(1).as_ref()));
        let put = store.put_snapshot(epoch, shard, LogSeq(2), snapshot(vec![commit(1)]));
        put.await.unwrap();
    }
    contents(&load(&store).await)
}

#[tokio::test]
async fn a_block_that_moved_off_a_node_that_is_gone_is_loaded_whichever_snapshots_there_are() {
    for has_block in [false, true] {
        let expected = (key(1), Version(1), vec![(SegmentId(2), Offset(GRANULE))]);
        let loaded = load_after_a_move(has_block).await;
        assert_eq!(loaded, [expected], "with a snapshot: {has_block}");
    }
}

/// Loads a standby from the first groups of a log, and then follows the other groups, with a pause of `pause`
/// before each.
pub(super) async fn follow(groups: &[Vec<Record>], loaded: usize, pause: Duration) -> Standby {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1)));
    let numbered: Vec<_> = (1..).map(LogSeq).zip(groups).collect();
    let (before, after) = numbered.split_at(loaded);
    for (seq, records) in before {
        store
            .append(epoch, *seq, encode_group(*records))
            .await
            .unwrap();
    }
    let config = Config::default();
    let standby = Standby::load(&store, &config, Arc::clone(&clock) as _);
    let mut standby = standby.await.unwrap();
    for (seq, records) in after {
        clock.advance(pause);
        standby.apply(*seq, &encode_group(*records)).unwrap();
    }
    standby
}

/// A replica may be in transfer when the segment of the block's other replicas is dropped. The leader keeps
/// such a block. So does a standby, wherever in the log it was loaded.
#[tokio::test]
async fn a_replica_that_is_logged_after_the_end_of_the_others_segment_counts() {
    let groups = [
        beginning(),
        vec![commit(1), commit(2)],
        vec![gone()],
        vec![added()],
    ];
    for loaded in 1..=groups.len() {
        // A pause of the standby proves nothing about the leader.
        for pause in [0, 100, 3_600_000] {
            let pause = Duration::from_millis(pause);
            let mut standby = follow(&groups, loaded, pause).await;
            standby.sweep_all();
            let expected = (key(1), Version(1), vec![(SegmentId(2), Offset(GRANULE))]);
            assert_eq!(contents(&standby), [expected], "{loaded} {pause:?}");
            assert_eq!(standby.blocks(), 1);
        }
    }
}

#[tokio::test]
async fn a_standby_that_follows_drops_what_was_on_a_segment_that_is_gone() {
    let mut groups = vec![beginning(), vec![commit(1)], vec![gone()]];
    let other = |until| Record::VersionsGranted(record::VersionsGranted { until });
    groups.extend((3..70).map(|number| vec![other(Version(number))]));
    for loaded in [1, 3] {
        let follow = |count, pause| follow(&groups[..count], loaded, Duration::from_millis(pause));
        assert_eq!(follow(50, 500).await.blocks(), 1);
        assert_eq!(follow(70, 500).await.blocks(), 0);
        // The log of a quiet pool.
        assert_eq!(follow(20, 60_000).await.blocks(), 1);
        assert_eq!(follow(50, 60_000).await.blocks(), 0);
    }
}
