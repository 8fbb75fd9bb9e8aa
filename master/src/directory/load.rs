//! Fills a directory from the metadata store. Blocks arrive shard by shard in no order, before their extents
//! are allocated. So recency, extents and parents are set at the end.
//!
//! Each pass below uses a list of 16 bytes a block, a tenth of the directory's own memory.

use super::BlockId;
use super::block::Dropped;
use super::common::{Preparer, shard_of_hash};
use super::lineage::Aftermath;
use super::{Directory, Policy};
use crate::replica::ExtentIndex;
use crate::slab::NONE;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{KeyRef, Length, Offset, SegmentId, Version};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The extent of a replica that has none allocated yet.
pub const UNPLACED: ExtentIndex = ExtentIndex(u32::MAX);

/// The start of a block's replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaStart {
    /// The segment that holds the replica.
    pub segment: SegmentId,
    /// The offset in the segment, in bytes.
    pub offset: Offset,
    /// The block.
    pub block: BlockId,
}

/// The fields of a block that are needed to allocate its extents.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Summary {
    pub(crate) namespace: NamespaceId,
    pub(crate) length: Length,
    pub(crate) version: Version,
    pub(crate) is_pinned: bool,
}

impl Directory {
    /// Removes every block of a durable shard.
    pub(crate) fn forget_shard(&self, shard: u32) {
        let mut aftermath = Aftermath::default();
        {
            let mut stripe = self.lock(self.common.stripe_of_shard(shard));
            for slot in 0..stripe.entries.high() {
                let is_it = stripe.entries.get(slot).is_some()
                    && shard_of_hash(stripe.hash(slot, &self.common)) == shard;
                if is_it {
                    stripe.remove(slot, &self.common, &mut aftermath);
                }
            }
        }
        self.apply_aftermath(aftermath);
    }

    /// The block under a key.
    pub(crate) fn find(&self, namespace: NamespaceId, key: KeyRef<'_>) -> Option<BlockId> {
        let key = Preparer::new(&self.common, namespace).prepare(key);
        let stripe = self.cell(self.common.stripe_of_hash(key.hash)).lock_read();
        stripe.find(&key).map(|slot| stripe.id(slot))
    }

    /// The children of the block of this version under a key, with their versions.
    pub(crate) fn children(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
    ) -> Vec<(Version, BlockId)> {
        let key = Preparer::new(&self.common, namespace).prepare(key);
        let children: Vec<BlockId> = {
            let stripe = self.cell(self.common.stripe_of_hash(key.hash)).lock_read();
            let found = stripe.find(&key);
            let found = found.filter(|slot| stripe.entries.rest(*slot).version == version);
            let node = found.map_or(NONE, |slot| stripe.entries.rest(slot).lineage);
            if node == NONE {
                return Vec::new();
            }
            let lineage = self.common.lineage.lock();
            lineage.children(node).map(|(block, _)| block).collect()
        };
        let children = children.into_iter();
        children
            .filter_map(|block| Some((self.summary(block)?.version, block)))
            .collect()
    }

    /// Links blocks to parents that were both found. The links follow the order of the blocks'
    /// versions over all lists, as in [`Directory::link`].
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

    /// The starts of all replicas, by segment and offset.
    pub(crate) fn replica_starts(&self) -> Vec<ReplicaStart> {
        let mut count = 0;
        self.each_block(|stripe, slot| count += stripe.replicas(slot).len());
        let mut starts = Vec::with_capacity(count);
        self.each_block(|stripe, slot| {
            let block = stripe.id(slot);
            starts.extend(stripe.replicas(slot).iter().map(|replica| ReplicaStart {
                segment: replica.segment,
                offset: replica.offset,
                block,
            }));
        });
        starts.sort_unstable();
        starts
    }

    /// Sets the recency of all blocks by the order of their versions.
    pub(crate) fn order_by_version(&self) {
        let mut order = Vec::with_capacity(usize::try_from(self.blocks()).unwrap_or(0));
        self.each_block(|stripe, slot| {
            order.push((stripe.entries.rest(slot).version, stripe.id(slot)));
        });
        order.sort_unstable();
        let ticks = self.ticks(order.len());
        // The first key of a batch has the latest tick.
        for ((_, block), index) in order.iter().zip((0..order.len()).rev()) {
            if let Some((mut stripe, slot)) = self.lock_block(*block) {
                stripe.touch(slot, ticks.of(index).0);
            }
        }
    }

    /// The fields of a block that are needed to allocate its extents.
    pub(crate) fn summary(&self, block: BlockId) -> Option<Summary> {
        let (stripe, slot) = self.lock_block(block)?;
        let rest = stripe.entries.rest(slot);
        Some(Summary {
            namespace: stripe.namespace(slot, &self.common),
            length: Length(u64::from(rest.length)),
            version: rest.version,
            is_pinned: stripe.entries.at(slot).is_hard_pinned(),
        })
    }

    /// Sets the extent of a block's replica.
    pub(crate) fn set_extent(&self, start: &ReplicaStart, extent: ExtentIndex) {
        if let Some((mut stripe, slot)) = self.lock_block(start.block) {
            stripe.set_extent(slot, start.segment, start.offset, extent);
        }
    }

    /// Removes a replica, and the block with its last replica.
    pub(crate) fn drop_replica_at(&self, start: &ReplicaStart) -> Option<Dropped> {
        let mut aftermath = Aftermath::default();
        let dropped = {
            let (mut stripe, slot) = self.lock_block(start.block)?;
            stripe.drop_replica(slot, &self.common, &mut aftermath, |replica| {
                replica.segment == start.segment && replica.offset == start.offset
            })
        };
        self.apply_aftermath(aftermath);
        dropped
    }

    pub(super) fn each_block(&self, mut f: impl FnMut(&super::stripe::Stripe, u32)) {
        for cell in &self.stripes {
            let stripe = cell.lock_read();
            for slot in 0..stripe.entries.high() {
                if stripe.entries.get(slot).is_some() {
                    f(&stripe, slot);
                }
            }
        }
    }

    /// Links a block of this version to a parent, if both are still present.
    fn link_to(&self, block: BlockId, version: Version, parent: BlockId) {
        let Some(node) = self.announce(block, version) else {
            return;
        };
        let linked = self
            .lock_block(parent)
            .is_some_and(|(mut stripe, slot)| self.attach(&mut stripe, slot, node, block, version));
        if !linked {
            let mut lineage = self.common.lineage.lock();
            lineage.withdraw(node, block, version);
        }
    }
}
