//! The state of a standby, for tests and simulations. Most calls scan every block or segment.

use super::Standby;
use crate::directory::{Directory, SHARDS, StoredBlock};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{NamespaceSettings, SegmentId, Version};
use std::ops::Range;

impl Standby {
    /// The blocks with a replica in a known segment. Replicas in unknown segments are left out.
    pub fn stored_blocks(&self) -> Vec<StoredBlock> {
        let segments = self.placement.segments();
        let mut blocks = all_of(&self.directory);
        for block in &mut blocks {
            let is_there = |id| segments.get(id).is_some();
            block.replicas.retain(|replica| is_there(replica.segment));
        }
        blocks.retain(|block| !block.replicas.is_empty());
        blocks
    }

    /// Every copy on a medium.
    pub fn stored_copies(&self) -> Vec<StoredBlock> {
        all_of(self.tier.directory())
    }

    /// The ids of the media.
    pub fn media(&self) -> Vec<SegmentId> {
        self.tier.media().iter().map(|medium| medium.id).collect()
    }

    /// The free byte ranges of a segment. A term that began with this state could grant them at once. `None` if
    /// the segment is unknown.
    pub fn free_ranges(&self, segment: SegmentId) -> Option<Vec<Range<u64>>> {
        let segments = self.placement.segments();
        let extents = segments.get(segment)?.extents();
        let ranges = extents.longest_free().map(|free| {
            let start = free.offset.0;
            start..start + free.length.0
        });
        Some(ranges.collect())
    }

    /// The first version that a term with this state would grant.
    pub const fn first_version(&self) -> Version {
        self.versions
    }

    /// The id of the first new segment in a term with this state.
    pub const fn next_segment(&self) -> SegmentId {
        SegmentId(self.next_segment)
    }

    /// The namespaces that have settings.
    pub fn settings(&self) -> Vec<(NamespaceId, NamespaceSettings)> {
        self.namespaces.with_settings()
    }
}

fn all_of(directory: &Directory) -> Vec<StoredBlock> {
    (0..SHARDS)
        .flat_map(|shard| directory.snapshot(shard))
        .collect()
}
