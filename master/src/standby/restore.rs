//! Allocates the extents of blocks: of loaded blocks, and of the blocks in one group of the log.

use super::Standby;
use super::freed_ranges::FreedRanges;
use super::recently_freed::FreedExtent;
use crate::directory::{
    Added, Copies, NewBlock, Published, Replica, ReplicaStart, Summary, UNPLACED,
};
use crate::membership::StoreNode;
use crate::placement::{ExtentIndex, Extents, Segment};
use crate::store::record::{self, Commit};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{GrantKey, Key, Length, Offset, SegmentId, Version};
use std::sync::Arc;

/// A block whose extent is allocated.
struct Placed {
    place: ReplicaStart,
    namespace: NamespaceId,
    length: Length,
    version: Version,
    extent: ExtentIndex,
}

impl Placed {
    /// Allocates the extent. Returns false when a part of it is not free.
    fn take(&mut self, segment: &Segment) -> bool {
        let taken = segment.allocate_at(self.place.offset, self.length, self.namespace);
        self.extent = taken.unwrap_or(UNPLACED);
        taken.is_some()
    }

    /// Whether a later block begins within this one.
    fn is_older_under(&self, next: &Self) -> bool {
        let end = self.place.offset.0 + Extents::rounded(self.length).0;
        self.version < next.version
            && self.place.segment == next.place.segment
            && next.place.offset.0 < end
    }
}

impl Standby {
    /// Allocates the extents of all blocks in the order of their addresses. So each segment has at most one
    /// free range behind the allocated ones. A range with a block is removed from the freed ranges. Returns
    /// the replicas whose segments are gone.
    pub(super) fn allocate_extents(&self, left: &mut FreedRanges) -> Vec<ReplicaStart> {
        let mut absent = Vec::new();
        let segments = self.placement.segments();
        let mut before: Option<Placed> = None;
        for place in self.directory.replica_starts() {
            let Some(segment) = segments.get(place.segment) else {
                absent.push(place);
                continue;
            };
            let Some(found) = self.directory.summary(place.block) else {
                continue;
            };
            let mut next = Placed {
                place,
                namespace: found.namespace,
                length: found.length,
                version: found.version,
                extent: UNPLACED,
            };
            if next.take(segment) {
                self.set_extent(segment, &next);
            } else if let Some(other) = before.take_if(|other| other.is_older_under(&next)) {
                segment.let_go(other.extent);
                if next.take(segment) {
                    self.leave_out(&other.place);
                    self.set_extent(segment, &next);
                } else {
                    self.leave_out(&next.place);
                    next = other;
                    next.take(segment);
                    self.set_extent(segment, &next);
                }
            } else {
                self.leave_out(&place);
                continue;
            }
            left.take(place.segment, place.offset, found.length);
            before = Some(next);
        }
        absent
    }

    fn set_extent(&self, segment: &Segment, placed: &Placed) {
        segment
            .extents()
            .set_owner(placed.extent, placed.place.block);
        self.directory.set_extent(&placed.place, placed.extent);
    }

    fn leave_out(&self, place: &ReplicaStart) {
        if let Some(dropped) = self.directory.drop_replica_at(place) {
            tracing::error!(
                key = %dropped.key.shown(),
                segment = %place.segment,
                offset = %place.offset,
                "replica dropped from the metadata: its extent overlaps a later block or exceeds its segment"
            );
        }
    }

    /// Keeps ranges closed that blocks left before this load.
    pub(super) fn keep_shut(&mut self, left: FreedRanges) {
        let segments = self.placement.segments();
        for (id, offset, length) in left.into_ranges() {
            if let Some(segment) = segments.get(id)
                && let Some(index) = segment.quarantine_at(offset, length)
            {
                self.recently_freed.keep_quarantined(FreedExtent {
                    segment: Arc::clone(segment),
                    index,
                    offset,
                    length,
                    since: self.clock.now(),
                });
            }
        }
    }

    /// Adds or changes a medium.
    pub(super) fn set_medium(&mut self, medium: record::Medium) {
        let behind = medium.id.number().saturating_add(1);
        self.next_segment = self.next_segment.max(behind);
        self.tier.set_medium(medium);
    }

    /// Adds a segment, and its node if this is the incarnation's first segment.
    pub(super) fn add_segment(&mut self, segment: record::Segment) {
        self.next_segment = self.next_segment.max(segment.id.0.saturating_add(1));
        let node = match self.members.get(&segment.node) {
            Some(node) if node.incarnation == segment.incarnation => node,
            _ => {
                let key = GrantKey(kvpool_seams::random());
                let now = self.clock.now();
                let node = Arc::new(StoreNode::new(segment.node, segment.incarnation, key, now));
                self.members.insert(Arc::clone(&node));
                node
            }
        };
        node.add_segment(segment.id);
        let high = self.high_watermark;
        let accounts = self.directory.accounts();
        let segment = Segment::new(segment.id, node, segment.size, high).charging(accounts);
        self.placement.insert(Arc::new(segment));
    }

    /// Publishes blocks at their logged extents. Returns the blocks that were replaced, in order. The last
    /// block counts as the most recently used. A block without an allocated extent is not published, and only
    /// removes what its key had before.
    pub(super) fn publish(&mut self, commits: Vec<Commit>) -> Vec<Published> {
        let ticks = self.directory.ticks(commits.len());
        let count = commits.len();
        let mut placed = Vec::with_capacity(count);
        for (at, block) in commits.into_iter().enumerate() {
            let replicas = self.place(&block);
            if replicas.is_empty() {
                self.take_out_older(&block);
                continue;
            }
            placed.push(NewBlock {
                namespace: block.namespace,
                key: block.key,
                version: block.version,
                length: block.length,
                checksum: block.checksum,
                replicas,
                parent: block.parent,
                soft_pin_until: None,
                hard_pin: block.hard_pin,
                tick: ticks.of(count - 1 - at),
                leased_until: None,
            });
        }
        let published = self.directory.publish(&placed);
        let segments = self.placement.segments();
        let owned = published
            .iter()
            .zip(&placed)
            .flat_map(|(published, block)| {
                let id = published.id;
                block.replicas.iter().filter_map(move |r| Some((r, id?)))
            });
        segments.set_owners(owned);
        drop(segments);
        // A later commit has replaced this block, perhaps in the same batch. Readers may have leases on it.
        for (published, block) in published.iter().zip(&placed) {
            if published.id.is_none() {
                self.freed_copies(&block.replicas, block.length);
            }
        }
        published
    }

    /// Adds a replica to a block that is still present in this version.
    pub(super) fn add_replica(&mut self, added: &record::ReplicaAdded) {
        let key = added.key.as_ref();
        let block = self.directory.find(added.namespace, key);
        let found = block.and_then(|block| self.directory.summary(block));
        let Some(found) = found.filter(|found| found.version == added.version) else {
            return;
        };
        let places = [(added.segment, added.offset)];
        let Some(replica) = self.place_at(&added.key, &places, &found).pop() else {
            return;
        };
        match self
            .directory
            .add_replica(added.namespace, key, added.version, replica)
        {
            Added::To(block) => {
                let owned = std::iter::once((&replica, block));
                self.placement.segments().set_owners(owned);
            }
            Added::Missing | Added::There => self.placement.segments().release(&[replica]),
        }
    }

    fn place(&mut self, block: &Commit) -> Copies {
        let summary = Summary {
            namespace: block.namespace,
            length: block.length,
            version: block.version,
            is_pinned: block.hard_pin,
        };
        self.place_at(&block.key, &block.replicas, &summary)
    }

    /// Allocates the extents of a block.
    fn place_at(&mut self, key: &Key, places: &[(SegmentId, Offset)], block: &Summary) -> Copies {
        let length = block.length;
        let segments = self.placement.segments();
        let mut replicas = Copies::new();
        for (id, offset) in places {
            // An absent segment is gone, and the replica with it.
            let Some(segment) = segments.get(*id) else {
                continue;
            };
            self.recently_freed.give_up(*id, *offset, length);
            match segment.allocate_at(*offset, length, block.namespace) {
                Some(extent) => replicas.push(Replica {
                    segment: *id,
                    extent,
                    offset: *offset,
                }),
                None => tracing::error!(
                    key = %key.shown(),
                    segment = %id,
                    %offset,
                    "replica dropped from the metadata: its extent is not free or exceeds its segment"
                ),
            }
        }
        replicas
    }
}
