//! The state that the journal captures for snapshots.

use super::Pool;
use crate::directory::{SHARDS, StoredBlock};
use crate::store::ShardIndex;
use crate::store::journal::SnapshotSource;
use crate::store::record::{self, Record};
use kvpool_types::Version;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

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

    /// The next leader does not know which blocks left before a snapshot. Readers may still have leases on them.
    fn capture_beside(&self) -> Vec<Record> {
        let Some(pool) = self.pool() else {
            return Vec::new();
        };
        let leased = pool.quarantine.leased(pool.now()).into_iter();
        leased
            .map(|(segment, ranges)| Record::LeasedRanges(record::LeasedRanges { segment, ranges }))
            .collect()
    }
}
