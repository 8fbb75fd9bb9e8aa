//! Blocks that moved off a node which is gone, loaded from snapshots of different moments.

use super::*;
use crate::clock::BootClock;
use crate::store::record::encode_snapshot;

const SPACE: NamespaceId = NamespaceId(0);

fn segment(number: u32) -> Record {
    Record::Segment(record::Segment {
        id: SegmentId(number),
        node: NodeName(format!("node {number}")),
        incarnation: Incarnation(number.into()),
        index: 0,
        size: Length(PLACES * GRANULE),
    })
}

/// Loads a pool whose only block moved from segment 1 to segment 2, before segment 1 was gone. The system's snapshot
/// is behind all of it. `has_block` says whether there is a snapshot of the block's shard from before the move.
async fn load_after_a_move(has_block: bool) -> Vec<Place> {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let (version, offset) = (Version(1), Offset(GRANULE));
    let seed = Record::Seed(record::Seed { seed: 7 });
    let commit = Record::Commit(Commit {
        namespace: SPACE,
        key: key(1),
        version,
        length: Length(100),
        checksum: Checksum(1),
        replicas: smallvec![(SegmentId(1), Offset(0))],
        parent: None,
        hard_pin: false,
    });
    let added = Record::ReplicaAdded(record::ReplicaAdded {
        namespace: SPACE,
        key: key(1),
        version,
        segment: SegmentId(2),
        offset,
    });
    let left = Record::ReplicaGone(record::ReplicaGone {
        namespace: SPACE,
        key: key(1),
        version,
        segment: SegmentId(1),
    });
    let gone = Record::SegmentGone(record::SegmentGone { id: SegmentId(1) });
    let groups = [
        vec![seed.clone(), segment(1), segment(2)],
        vec![commit.clone()],
        vec![added, left],
        vec![gone],
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
        let put = store.put_snapshot(epoch, shard, LogSeq(2), snapshot(vec![commit]));
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

/// A leader drops the replicas of a segment some time after it has logged the end of the segment. Meanwhile a replica
/// that was on its way may be added.
#[tokio::test]
async fn a_replica_that_is_logged_after_the_end_of_the_others_segment_counts() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let version = Version(1);
    let commit = |number: u8, version| {
        Record::Commit(Commit {
            namespace: SPACE,
            key: key(number),
            version,
            length: Length(100),
            checksum: Checksum(1),
            replicas: smallvec![(SegmentId(1), Offset(u64::from(number) * GRANULE))],
            parent: None,
            hard_pin: false,
        })
    };
    let added = Record::ReplicaAdded(record::ReplicaAdded {
        namespace: SPACE,
        key: key(1),
        version,
        segment: SegmentId(2),
        offset: Offset(0),
    });
    let gone = Record::SegmentGone(record::SegmentGone { id: SegmentId(1) });
    let seed = Record::Seed(record::Seed { seed: 7 });
    let first = encode_group(&[seed, segment(1), segment(2)]);
    store.append(epoch, LogSeq(1), first).await.unwrap();
    let clock: Arc<dyn Clock> = Arc::new(BootClock);
    let standby = Standby::load(&store, &Config::default(), clock).await;
    let mut standby = standby.unwrap();
    let groups = [
        vec![commit(1, version), commit(2, Version(2))],
        vec![gone],
        vec![added],
    ];
    for (seq, records) in (2..).zip(&groups) {
        standby.apply(LogSeq(seq), &encode_group(records)).unwrap();
    }
    standby.sweep_all();
    let blocks: Vec<_> = (0..directory::SHARDS)
        .flat_map(|shard| standby.directory.snapshot(shard))
        .map(|block| (block.key, block.replicas[0].segment, block.replicas.len()))
        .collect();
    assert_eq!(blocks, [(key(1), SegmentId(2), 1)]);
}
