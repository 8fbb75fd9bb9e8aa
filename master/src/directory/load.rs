//! Filling a directory with what is stored. Blocks come shard by shard, in no order, and before it is known where
//! they lie in their segments' tables: their recency, their places and their parents are settled at the end.
//!
//! Each pass below takes one list of 16 bytes a block, which is a tenth of what the directory itself takes.

use super::block::{BlockId, Dropped, Removed};
use super::common::{Preparer, part_of_hash};
use super::lineage::Aftermath;
use super::{Directory, Policy};
use crate::placement::ExtentIndex;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{KeyRef, Length, Offset, SegmentId, Version};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// In place of an extent's index until the extent has been allocated.
pub const UNPLACED: ExtentIndex = ExtentIndex(u32::MAX);

/// Where a replica of a block begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The segment.
    pub segment: SegmentId,
    /// Where in the segment.
    pub offset: Offset,
    /// The block.
    pub block: BlockId,
}

impl Directory {
    /// Takes out every block of a part.
    pub(crate) fn forget_part(&self, part: u32) {
        let mut aftermath = Aftermath::default();
        {
            let mut shard = self.lock(self.common.shard_of_part(part));
            for slot in 0..shard.entries.high() {
                let is_it = shard.entries.get(slot).is_some()
                    && part_of_hash(shard.hash(slot, &self.common)) == part;
                if is_it {
                    shard.remove(slot, &self.common, &mut aftermath);
                }
            }
        }
        self.settle(aftermath);
    }

    /// Where a key's block is.
    pub(crate) fn find(&self, namespace: NamespaceId, key: KeyRef<'_>) -> Option<BlockId> {
        let key = Preparer::new(&self.common, namespace).prepare(key);
        let shard = self
            .cell(self.common.shard_of_hash(key.hash))
            .lock_to_look();
        shard.find(&key).map(|slot| shard.id(slot))
    }

    /// Links blocks to their parents, both of which were found: in the order of the blocks' versions over all
    /// lists, as [`Directory::link`] does.
    pub(crate) fn link_found(&self, mut lists: Vec<Vec<(Version, BlockId, BlockId)>>) {
        if self.common.policy == Policy::Lru {
            return;
        }
        for list in &mut lists {
            list.sort_unstable();
        }
        let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
        let firsts = lists.iter_mut().enumerate();
        let firsts = firsts.filter_map(|(index, list)| Some(Reverse((list.next()?, index))));
        let mut firsts: BinaryHeap<_> = firsts.collect();
        while let Some(Reverse(((version, block, parent), index))) = firsts.pop() {
            self.link_to(block, version, parent);
            if let Some(next) = lists.get_mut(index).and_then(Iterator::next) {
                firsts.push(Reverse((next, index)));
            }
        }
    }

    /// Where all replicas lie, by segment and offset.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut count = 0;
        self.each_block(|shard, slot| count += shard.replicas(slot).len());
        let mut places = Vec::with_capacity(count);
        self.each_block(|shard, slot| {
            let block = shard.id(slot);
            places.extend(shard.replicas(slot).iter().map(|replica| Place {
                segment: replica.segment,
                offset: replica.offset,
                block,
            }));
        });
        places.sort_unstable();
        places
    }

    /// Counts all blocks as used in the order of their versions.
    pub(crate) fn order_by_version(&self) {
        let mut order = Vec::with_capacity(usize::try_from(self.blocks()).unwrap_or(0));
        self.each_block(|shard, slot| {
            order.push((shard.entries.rest(slot).version, shard.id(slot)));
        });
        order.sort_unstable();
        let ticks = self.ticks(order.len());
        // A batch of ticks has the latest first.
        for ((_, block), index) in order.iter().zip((0..order.len()).rev()) {
            if let Some((mut shard, slot)) = self.lock_block(*block) {
                shard.touch(slot, ticks.of(index).0);
            }
        }
    }

    /// The bytes and the version of a block.
    pub(crate) fn size_and_version(&self, block: BlockId) -> Option<(Length, Version)> {
        let (shard, slot) = self.lock_block(block)?;
        let rest = shard.entries.rest(slot);
        Some((Length(u64::from(rest.length)), rest.version))
    }

    /// Notes which extent a block's replica was given.
    pub(crate) fn set_extent(&self, place: &Place, extent: ExtentIndex) {
        if let Some((mut shard, slot)) = self.lock_block(place.block) {
            shard.set_extent(slot, place.segment, place.offset, extent);
        }
    }

    /// Takes a replica out, and the block with its last one.
    pub(crate) fn drop_place(&self, place: &Place) -> Option<Dropped> {
        let mut aftermath = Aftermath::default();
        let dropped = {
            let (mut shard, slot) = self.lock_block(place.block)?;
            shard.drop_replica(slot, &self.common, &mut aftermath, |replica| {
                replica.segment == place.segment && replica.offset == place.offset
            })
        };
        self.settle(aftermath);
        dropped
    }

    /// Takes a block out if it is of an earlier version.
    pub(crate) fn remove_older(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
    ) -> Option<Removed> {
        let block = self.find(namespace, key)?;
        let (_, before) = self.size_and_version(block)?;
        (before < version)
            .then(|| self.remove_by_id(block, before, |_| super::Verdict::Remove))
            .flatten()
    }

    fn each_block(&self, mut f: impl FnMut(&super::shard::Shard, u32)) {
        for cell in &self.shards {
            let shard = cell.lock_to_look();
            for slot in 0..shard.entries.high() {
                if shard.entries.get(slot).is_some() {
                    f(&shard, slot);
                }
            }
        }
    }

    /// Links a block of this version to a parent, if both are still there.
    fn link_to(&self, block: BlockId, version: Version, parent: BlockId) {
        let Some(node) = self.announce(block, version) else {
            return;
        };
        let linked = self
            .lock_block(parent)
            .is_some_and(|(mut shard, slot)| self.attach(&mut shard, slot, node, block, version));
        if !linked {
            let mut lineage = self.common.lineage.lock();
            lineage.withdraw(node, block, version);
        }
    }
}
