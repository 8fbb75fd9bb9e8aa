//! The replicas of a segment that is gone leave in steps, while the log goes on.

use super::*;

/// More blocks than one step drops.
const BLOCKS: u32 = 6_000;
const GONE: SegmentId = SegmentId(1);
const STAYS: SegmentId = SegmentId(2);
const SPACE: NamespaceId = NamespaceId(0);

fn numbered(number: u32) -> Key {
    let mut digest = [7; 32];
    digest[..4].copy_from_slice(&number.to_le_bytes());
    Key::from_digest(digest)
}

fn segment(id: SegmentId) -> Record {
    Record::Segment(record::Segment {
        id,
        node: NodeName(format!("node-{id}")),
        incarnation: Incarnation(u128::from(id.0)),
        index: 0,
        size: Length(u64::from(BLOCKS) * GRANULE),
    })
}

fn commit(key: Key, version: u64, segment: SegmentId, place: u32) -> Record {
    Record::Commit(Commit {
        namespace: SPACE,
        key,
        version: Version(version),
        length: Length(100),
        checksum: Checksum(version),
        replicas: smallvec![(segment, Offset(u64::from(place) * GRANULE))],
        parent: None,
        hard_pin: false,
    })
}

#[tokio::test]
async fn the_blocks_of_a_segment_that_is_gone_leave_in_steps_while_others_come() {
    let seed = Record::Seed(record::Seed { seed: 7 });
    let mut beginning = vec![seed, segment(GONE), segment(STAYS)];
    beginning.extend((0..BLOCKS).map(|at| commit(numbered(at), u64::from(at) + 1, GONE, at)));
    let ended = Record::SegmentGone(record::SegmentGone { id: GONE });
    let groups = [beginning, vec![ended]];
    let (_place, store, _) = logged(&groups).await;
    for is_loaded in [false, true] {
        let clock = Arc::new(ManualClock::new(BootInstant(1)));
        let mut seq = LogSeq(0);
        let mut follow = |standby: &mut Standby, records: &[Record]| {
            seq = seq.next();
            if seq > standby.applied() {
                standby.apply(seq, &encode_group(records)).unwrap();
            }
            clock.advance(Duration::from_secs(1));
        };
        let directory = tempfile::tempdir().unwrap();
        let empty = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let from = if is_loaded { &store } else { &empty };
        let config = Config::default();
        let loaded = Standby::load(from, &config, Arc::clone(&clock) as _).await;
        let mut standby = loaded.unwrap();
        for records in &groups {
            follow(&mut standby, records);
        }
        assert_eq!(standby.blocks(), u64::from(BLOCKS));
        let until = Version(u64::from(BLOCKS) + 1);
        let nothing = [Record::VersionsGranted(record::VersionsGranted { until })];
        for _ in 0..60 {
            if standby.blocks() < u64::from(BLOCKS) {
                break;
            }
            follow(&mut standby, &nothing);
        }
        let rest = contents(&standby);
        let count = rest.len();
        assert!(count > 3 && count < BLOCKS as usize, "{is_loaded}: {count}");

        // One block was dropped, and its slot may be used again. Of the others, one is put again, one gets another
        // replica, and one is removed.
        let [put_again, copied, removed] = [0, 1, 2].map(|at: usize| rest[at].clone());
        let mut all = (0..BLOCKS).map(numbered);
        let dropped = all.find(|key| rest.iter().all(|(left, ..)| left != key));
        let dropped = dropped.unwrap();
        let changes = [
            commit(dropped.clone(), 10_000, STAYS, 0),
            commit(put_again.0.clone(), 10_001, STAYS, 1),
            Record::ReplicaAdded(record::ReplicaAdded {
                namespace: SPACE,
                key: copied.0.clone(),
                version: copied.1,
                segment: STAYS,
                offset: Offset(2 * GRANULE),
            }),
            Record::Remove(record::Remove {
                namespace: SPACE,
                key: removed.0,
                version: removed.1,
                unleased: false,
                everywhere: false,
                places: Default::default(),
            }),
        ];
        follow(&mut standby, &changes);
        for _ in 0..3 {
            follow(&mut standby, &nothing);
        }
        let at = |place: u64| vec![(STAYS, Offset(place * GRANULE))];
        let expected = [
            (copied.0, copied.1, at(2)),
            (dropped, Version(10_000), at(0)),
            (put_again.0, Version(10_001), at(1)),
        ];
        assert_eq!(contents(&standby), expected, "{is_loaded}");
        assert_eq!(standby.blocks(), 3);
    }
}
