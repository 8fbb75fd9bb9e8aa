//! The state that the journal captures for snapshots.

use super::Pool;
use crate::directory::{SHARDS, StoredBlock};
use crate::placement::Extents;
use crate::store::ShardIndex;
use crate::store::journal::SnapshotSource;
use crate::store::record::{self, LeasedRanges, Record, UnleasedRanges};
use kvpool_types::{Extent, Length, Offset, SegmentId, Version};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// The most ranges of one record: etcd takes a record as one value.
const MOST_RANGES: usize = 8192;

/// The pool as the journal sees it. The reference is weak because the pool owns the journal.
pub(super) struct Source(pub(super) Weak<Pool>);

impl Source {
    fn pool(&self) -> Option<Arc<Pool>> {
        self.0.upgrade()
    }
}

impl From<StoredBlock> for record::Commit {
    fn from(block: StoredBlock) -> Self {
        let replicas = block.replicas.iter().map(|r| (r.segment, r.offset));
        Self {
            namespace: block.namespace,
            key: block.key,
            version: block.version,
            length: block.length,
            checksum: block.checksum,
            replicas: replicas.collect(),
            parent: block.parent,
            hard_pin: block.hard_pin,
        }
    }
}

impl SnapshotSource for Source {
    fn shards(&self) -> u32 {
        SHARDS
    }

    fn is_there(&self) -> bool {
        self.0.strong_count() > 0
    }

    fn capture(&self, shard: ShardIndex) -> Vec<Record> {
        let Some(pool) = self.pool() else {
            return Vec::new();
        };
        let blocks = pool.directory.snapshot(shard.0);
        let in_memory = blocks.into_iter().map(|block| Record::Commit(block.into()));
        in_memory.chain(pool.tier.snapshot(shard.0)).collect()
    }

    fn capture_system(&self) -> Vec<Record> {
        let Some(pool) = self.pool() else {
            return Vec::new();
        };
        let until = Version(pool.versions_until.load(Ordering::Acquire));
        let mut records = vec![
            Record::Seed(record::Seed { seed: pool.seed }),
            Record::VersionsGranted(record::VersionsGranted { until }),
            pool.segment_ids.record(),
        ];
        records.extend(pool.namespaces.records());
        for (node, incarnation) in pool.members.dropped() {
            let dropped = record::IncarnationDropped { node, incarnation };
            records.push(Record::IncarnationDropped(dropped));
        }
        for medium in pool.tier.media() {
            records.push(Record::Medium(medium.record()));
        }
        let segments = pool.placement.segments();
        for node in pool.members.all() {
            for (index, id) in (0u32..).zip(node.segments()) {
                let Some(segment) = segments.get(id) else {
                    continue;
                };
                records.push(Record::Segment(record::Segment {
                    id,
                    node: node.name.clone(),
                    incarnation: node.incarnation,
                    index,
                    size: segment.size,
                }));
            }
        }
        records
    }

    /// The next leader does not know which blocks left before a snapshot. Readers may still have
    /// leases on their extents.
    fn capture_beside(&self) -> Vec<Record> {
        let Some(pool) = self.pool() else {
            return Vec::new();
        };
        leased_ranges(pool.quarantine.leased(pool.now()))
    }
}

/// The records of extents on which leases run.
pub(super) fn leased_ranges(extents: Vec<Extent>) -> Vec<Record> {
    let of = |(segment, ranges)| Record::LeasedRanges(LeasedRanges { segment, ranges });
    joined(extents).into_iter().map(of).collect()
}

/// The records of extents that removed blocks left without a lease.
pub(super) fn unleased_ranges(extents: Vec<Extent>) -> Vec<Record> {
    let of = |(segment, ranges)| Record::UnleasedRanges(UnleasedRanges { segment, ranges });
    joined(extents).into_iter().map(of).collect()
}

/// The ranges of extents by segment, with neighbours joined. A segment with more than
/// [`MOST_RANGES`] ranges is listed again.
fn joined(mut extents: Vec<Extent>) -> Vec<(SegmentId, Vec<(Offset, Length)>)> {
    extents.sort_unstable_by_key(|extent| (extent.segment, extent.offset));
    let mut all: Vec<(SegmentId, Vec<(Offset, Length)>)> = Vec::new();
    for Extent {
        segment,
        offset,
        length,
    } in extents
    {
        let of_segment = all.last_mut().filter(|(last, _)| *last == segment);
        let Some((_, ranges)) = of_segment.filter(|(_, ranges)| ranges.len() < MOST_RANGES) else {
            all.push((segment, vec![(offset, length)]));
            continue;
        };
        match ranges.last_mut() {
            Some((first, last)) if first.0 + Extents::rounded(*last).0 == offset.0 => {
                *last = Length(offset.0 + length.0 - first.0);
            }
            _ => ranges.push((offset, length)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_range_and_a_record_has_a_bounded_number() {
        let extent = |segment, offset, length| Extent {
            segment: SegmentId(segment),
            offset: Offset(offset),
            length: Length(length),
        };
        let three = vec![extent(2, 0, 64), extent(1, 64, 100), extent(1, 0, 50)];
        let of = |segment, range| {
            Record::LeasedRanges(LeasedRanges {
                segment: SegmentId(segment),
                ranges: vec![range],
            })
        };
        let expected = [
            of(1, (Offset(0), Length(164))),
            of(2, (Offset(0), Length(64))),
        ];
        assert_eq!(leased_ranges(three), expected);

        let many = 2 * MOST_RANGES as u64 + 1;
        let records = leased_ranges((0..many).map(|n| extent(1, n << 10, 1)).collect());
        assert_eq!(records.len(), 3);
    }
}
