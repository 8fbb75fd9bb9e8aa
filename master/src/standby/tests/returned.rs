//! Blocks that were loaded from a medium: each has two commits of one version.

use super::moved::{SPACE, beginning, commit, follow, gone};
use super::*;
use crate::store::record::{Places, Remove};

const HERE: (SegmentId, Offset) = (SegmentId(2), Offset(GRANULE));
const THERE: (SegmentId, Offset) = (SegmentId(2), Offset(2 * GRANULE));

fn at(number: u8, place: (SegmentId, Offset)) -> Record {
    let Record::Commit(mut block) = commit(number) else {
        unreachable!("it makes a commit");
    };
    block.replicas = smallvec![place];
    Record::Commit(block)
}

fn medium() -> SegmentId {
    SegmentId::on_medium(3)
}

fn attached() -> Record {
    Record::Medium(record::Medium {
        id: medium(),
        medium: kvpool_types::MediumId(9),
        node: NodeName("node 2".into()),
        generation: 1,
        is_pending: false,
        size: Length(1 << 20),
        zone: Length(1 << 18),
        cursor: 0,
    })
}

/// The block of key 5 is in memory, and has a copy on a medium.
fn copied() -> Vec<Vec<Record>> {
    vec![
        beginning(),
        vec![attached(), at(5, THERE)],
        vec![at(5, (medium(), Offset(0)))],
    ]
}

/// The block of key 5 leaves memory at these extents.
fn evicted(places: &[(SegmentId, Offset)]) -> Record {
    Record::Remove(Remove {
        namespace: SPACE,
        key: key(5),
        version: Version(5),
        unleased: true,
        everywhere: false,
        places: Places::from_slice(places),
    })
}

/// Checks that these blocks are in memory, for a loaded standby and for followers from every group on.
async fn expect(groups: &[Vec<Record>], blocks: &[(u8, (SegmentId, Offset))]) {
    let expected: Vec<Place> = blocks
        .iter()
        .map(|(number, place)| (key(*number), Version((*number).into()), vec![*place]))
        .collect();
    for loaded in 1..=groups.len() {
        let mut standby = follow(groups, loaded, Duration::ZERO).await;
        standby.sweep_all();
        let count = expected.len() as u64;
        assert_eq!(contents(&standby), expected, "{loaded} groups were loaded");
        assert_eq!(standby.directory.accounts().total().blocks, count);
    }
}

/// Commits of other blocks are between the two, and their versions are not in order.
#[tokio::test]
async fn the_last_commit_of_a_block_that_came_back_counts_whatever_was_committed_beside_it() {
    let groups = [
        beginning(),
        vec![commit(5), commit(4)],
        vec![attached()],
        vec![at(5, (medium(), Offset(0)))],
        vec![gone()],
        vec![at(5, HERE)],
    ];
    expect(&groups, &[(5, HERE)]).await;
}

/// An eviction submits its record a little later. The block may be loaded again before that.
#[tokio::test]
async fn a_block_that_came_back_before_its_eviction_was_logged_stays() {
    let mut groups = copied();
    groups.extend([vec![at(5, HERE)], vec![evicted(&[THERE])]]);
    expect(&groups, &[(5, HERE)]).await;
    let mut one_group = groups.to_vec();
    let eviction = one_group.pop().unwrap();
    one_group.last_mut().unwrap().extend(eviction);
    expect(&one_group, &[(5, HERE)]).await;
    // The block leaves when it is evicted once more.
    let mut again = groups.to_vec();
    again.push(vec![evicted(&[HERE])]);
    expect(&again, &[]).await;
}

/// A pull ends after its block was evicted. Its replica is taken back, and the block is loaded to the same
/// segment.
#[tokio::test]
async fn a_replica_that_is_taken_back_takes_no_block_out_of_another_place() {
    let late = (SegmentId(2), Offset(3 * GRANULE));
    let added = Record::ReplicaAdded(record::ReplicaAdded {
        namespace: SPACE,
        key: key(5),
        version: Version(5),
        segment: late.0,
        offset: late.1,
    });
    let taken_back = Record::ReplicaGone(record::ReplicaGone {
        namespace: SPACE,
        key: key(5),
        version: Version(5),
        segment: late.0,
        offset: Some(late.1),
    });
    let mut groups = copied();
    groups.extend([
        vec![added],
        vec![evicted(&[THERE])],
        vec![at(5, HERE)],
        vec![taken_back],
    ]);
    expect(&groups, &[(5, HERE)]).await;
}

/// The leader may have granted the extent that the block left before the record of this was written.
#[tokio::test]
async fn the_place_that_a_block_left_may_be_the_next_ones_in_the_same_group() {
    let mut groups = copied();
    groups.extend([vec![at(5, HERE), at(6, THERE)]]);
    expect(&groups, &[(5, HERE), (6, THERE)]).await;
}

#[tokio::test]
async fn a_block_that_came_back_twice_in_one_group_is_where_it_was_last() {
    let groups = [
        beginning(),
        vec![attached(), at(4, (SegmentId(2), Offset(0)))],
        vec![at(5, (medium(), Offset(0)))],
        vec![at(5, HERE), at(5, THERE)],
    ];
    expect(&groups, &[(4, (SegmentId(2), Offset(0))), (5, THERE)]).await;
}

/// A node that was dropped answers a load late. The leader no longer has an extent for the block.
#[tokio::test]
async fn a_block_that_came_back_to_a_segment_that_is_gone_has_left_its_place() {
    let lost = (SegmentId(1), Offset(GRANULE));
    let mut groups = copied();
    groups.extend([vec![gone()], vec![at(5, lost)], vec![at(6, THERE)]]);
    expect(&groups, &[(6, THERE)]).await;
}
