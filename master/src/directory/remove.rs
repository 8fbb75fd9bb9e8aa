//! Taking blocks and replicas out, other than by eviction.

use super::Directory;
use super::block::{BlockId, BlockRef, Dropped, Removal, Removed, Verdict};
use super::entry::Place;
use super::lineage::Aftermath;
use super::slab::NONE;
use crate::placement::Extents;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{KeyRef, SegmentId, Version};
use std::ops::Deref;

impl Directory {
    /// Removes the blocks that `allow` lets go, whatever their leases and pins. Outcomes come in the
    /// order of the keys.
    pub fn remove(
        &self,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        mut allow: impl FnMut(&BlockRef<'_>) -> Verdict,
    ) -> Vec<Removal> {
        let mut outcomes = vec![Removal::Missing; keys.len()];
        let mut aftermath = Aftermath::default();
        self.each(namespace, keys, |shard, index, key| {
            let (Some(slot), Some(outcome)) = (shard.find(key), outcomes.get_mut(index)) else {
                return;
            };
            let verdict = allow(&BlockRef {
                common: &self.common,
                shard,
                slot,
            });
            *outcome = match verdict {
                Verdict::Keep => Removal::Kept,
                Verdict::Remove => {
                    Removal::Removed(shard.remove(slot, &self.common, &mut aftermath))
                }
            };
        });
        self.settle(aftermath);
        outcomes
    }

    /// Removes the block at `id` if it has this version and `allow` lets it go. `None` when it was
    /// not there or stays.
    pub fn remove_by_id(
        &self,
        id: BlockId,
        version: Version,
        allow: impl FnOnce(&BlockRef<'_>) -> Verdict,
    ) -> Option<Removed> {
        let mut aftermath = Aftermath::default();
        let removed = {
            let (mut shard, slot) = self.lock_block(id)?;
            let block = BlockRef {
                common: &self.common,
                shard: &shard,
                slot,
            };
            if block.version() != version || allow(&block) == Verdict::Keep {
                return None;
            }
            shard.remove(slot, &self.common, &mut aftermath)
        };
        self.settle(aftermath);
        Some(removed)
    }

    /// Takes out the replica that a block of this version has on a segment, and the block with its
    /// last one. `None` when there is no such replica.
    pub fn drop_replica(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        segment: SegmentId,
    ) -> Option<Dropped> {
        let mut aftermath = Aftermath::default();
        let mut dropped = None;
        self.each(namespace, &[key], |shard, _, key| {
            let found = shard.find(key);
            let found = found.filter(|slot| shard.entries.rest(*slot).version == version);
            if let Some(slot) = found {
                dropped = shard
                    .drop_replica(slot, &self.common, &mut aftermath, |r| r.segment == segment);
            }
        });
        self.settle(aftermath);
        dropped
    }

    /// Takes out the replicas on a segment, as far as `limit` places of its table of extents go:
    /// call it with place 0 first, then with the place returned, until that is `None`. `extents`
    /// locks the table; it is not locked while a shard is.
    pub fn drop_segment<T: Deref<Target = Extents>>(
        &self,
        segment: SegmentId,
        extents: impl Fn() -> T,
        place: u32,
        limit: u32,
    ) -> (Vec<Dropped>, Option<u32>) {
        let (owned, next) = extents().owners(place, limit);
        let mut all = Vec::with_capacity(owned.len());
        let mut aftermath = Aftermath::default();
        for (extent, block) in owned {
            if let Some((mut shard, slot)) = self.lock_block(block) {
                all.extend(
                    shard.drop_replica(slot, &self.common, &mut aftermath, |replica| {
                        replica.segment == segment && replica.extent == extent
                    }),
                );
            }
        }
        self.settle(aftermath);
        (all, next)
    }

    /// Does for other blocks what the leaving of some has made due. No shard may be locked.
    pub(super) fn settle(&self, aftermath: Aftermath) {
        for block in aftermath.leaves {
            self.may_be_leaf(block);
        }
        for block in aftermath.orphans {
            self.orphan(block);
        }
    }

    /// Lets a block that has lost its last child wait for eviction again.
    fn may_be_leaf(&self, block: BlockId) {
        let Some((mut shard, slot)) = self.lock_block(block) else {
            return;
        };
        let entry = shard.entries.at(slot);
        let waits_for_children = matches!(entry.place(), Place::Inner | Place::Frontier);
        // It may have got another child since, or be another block.
        let node = shard.entries.rest(slot).lineage;
        let has_children = node != NONE && self.common.lineage.lock().has_children(node);
        if waits_for_children && !has_children {
            let shard: &mut super::shard::Shard = &mut shard;
            shard.queues.take(&mut shard.entries, slot);
            shard.put_back(slot);
        }
    }

    /// Makes a block whose chain is broken above it a preferred victim. Should the block have left
    /// and another have come in its place, that one is evicted early, which does no harm.
    pub(super) fn orphan(&self, block: BlockId) {
        let Some((mut shard, slot)) = self.lock_block(block) else {
            return;
        };
        let shard: &mut super::shard::Shard = &mut shard;
        let entry = shard.entries.at_mut(slot);
        entry.set_orphaned(true);
        match entry.place() {
            Place::Inner => shard.queues.put_frontier(&mut shard.entries, slot),
            Place::Listed | Place::Stray => {
                shard.queues.take(&mut shard.entries, slot);
                shard.put_back(slot);
            }
            Place::Orphan | Place::Frontier | Place::Soft | Place::Parked | Place::Fixed => {}
        }
    }
}
