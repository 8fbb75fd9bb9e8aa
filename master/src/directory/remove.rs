//! Removal of blocks and replicas, other than by eviction.

use super::BlockId;
use super::Directory;
use super::block::{Added, BlockRef, Dropped, Removal, Removed, Spared, Verdict};
use super::entry::QueueState;
use super::lineage::Aftermath;
use crate::placement::Extents;
use crate::replica::Replica;
use crate::slab::NONE;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{KeyRef, Offset, SegmentId, Version};
use std::ops::Deref;

impl Directory {
    /// Removes the blocks that `allow` accepts, despite leases and pins. Outcomes follow the order
    /// of the keys.
    pub fn remove(
        &self,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        mut allow: impl FnMut(&BlockRef<'_>) -> Verdict,
    ) -> Vec<Removal> {
        let mut outcomes = vec![Removal::Missing; keys.len()];
        let mut aftermath = Aftermath::default();
        self.each(namespace, keys, |stripe, index, key| {
            let (Some(slot), Some(outcome)) = (stripe.find(key), outcomes.get_mut(index)) else {
                return;
            };
            let verdict = allow(&BlockRef {
                common: &self.common,
                stripe,
                slot,
            });
            *outcome = match verdict {
                Verdict::Keep => Removal::Kept,
                Verdict::Remove => {
                    Removal::Removed(stripe.remove(slot, &self.common, &mut aftermath))
                }
            };
        });
        self.apply_aftermath(aftermath);
        outcomes
    }

    /// Removes the block at `id` if it has this version and `allow` accepts it. `None` when the
    /// block is absent or stays.
    pub fn remove_by_id(
        &self,
        id: BlockId,
        version: Version,
        allow: impl FnOnce(&BlockRef<'_>) -> Verdict,
    ) -> Option<Removed> {
        let mut aftermath = Aftermath::default();
        let removed = {
            let (mut stripe, slot) = self.lock_block(id)?;
            let block = BlockRef {
                common: &self.common,
                stripe: &stripe,
                slot,
            };
            if block.version() != version || allow(&block) == Verdict::Keep {
                return None;
            }
            stripe.remove(slot, &self.common, &mut aftermath)
        };
        self.apply_aftermath(aftermath);
        Some(removed)
    }

    /// Removes the replica of a block of this version on a segment, and the block with its last
    /// replica. `None` without such a replica.
    pub fn drop_replica(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        segment: SegmentId,
    ) -> Option<Dropped> {
        self.drop_where(namespace, key, version, |replica| {
            replica.segment == segment
        })
    }

    /// Removes the replicas at these extents, and the block with its last one. Replicas at other extents
    /// stay.
    pub(crate) fn drop_places(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        places: &[(SegmentId, Offset)],
    ) -> Vec<Dropped> {
        let places = places.iter();
        let dropped = places.filter_map(|place| {
            let is_it = |at: &Replica| (at.segment, at.offset) == *place;
            self.drop_where(namespace, key, version, is_it)
        });
        dropped.collect()
    }

    /// [`Directory::drop_replica`] for the first replica that `which` names.
    pub(crate) fn drop_where(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        which: impl Fn(&Replica) -> bool,
    ) -> Option<Dropped> {
        let mut aftermath = Aftermath::default();
        let mut dropped = None;
        self.each(namespace, &[key], |stripe, _, key| {
            let found = stripe.find(key);
            let found = found.filter(|slot| stripe.entries.rest(*slot).version == version);
            if let Some(slot) = found {
                dropped = stripe.drop_replica(slot, &self.common, &mut aftermath, &which);
            }
        });
        self.apply_aftermath(aftermath);
        dropped
    }

    /// [`Directory::drop_replica`] for a replica that is not the block's last one.
    pub fn drop_spare_replica(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        segment: SegmentId,
    ) -> Spared {
        let mut aftermath = Aftermath::default();
        let mut outcome = Spared::Missing;
        self.each(namespace, &[key], |stripe, _, key| {
            let found = stripe.find(key);
            let found = found.filter(|slot| stripe.entries.rest(*slot).version == version);
            let Some(slot) = found else { return };
            if stripe.only_segment(slot) == Some(segment) {
                outcome = Spared::Last;
            } else if stripe.replicas(slot).len() > 1 {
                let dropped = stripe
                    .drop_replica(slot, &self.common, &mut aftermath, |r| r.segment == segment);
                outcome = dropped.map_or(Spared::Missing, |dropped| {
                    Spared::Dropped(Box::new(dropped))
                });
            }
        });
        self.apply_aftermath(aftermath);
        outcome
    }

    /// Adds a replica to the block of this version. A block has one replica on a segment.
    pub fn add_replica(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        replica: Replica,
    ) -> Added {
        let mut outcome = Added::Missing;
        self.each(namespace, &[key], |stripe, _, key| {
            let found = stripe.find(key);
            let copied = found.filter(|slot| stripe.entries.rest(*slot).version == version);
            let Some(slot) = copied else { return };
            let replicas = stripe.replicas(slot);
            if replicas.iter().any(|old| old.segment == replica.segment) {
                outcome = Added::There;
                return;
            }
            stripe.add_replica(slot, replica, &self.common);
            outcome = Added::To(stripe.id(slot));
        });
        outcome
    }

    /// Removes the replicas on a segment, `limit` slots of its table of extents at a time. Call it with slot
    /// 0 first, then with the returned slot, until it returns `None`. `extents` locks the table, which is
    /// never locked together with a stripe. `leaves` is called for each replica before the block's stripe is
    /// unlocked.
    pub fn drop_segment<T: Deref<Target = Extents>>(
        &self,
        segment: SegmentId,
        extents: impl Fn() -> T,
        place: u32,
        limit: u32,
        leaves: impl Fn(&Dropped),
    ) -> (Vec<Dropped>, Option<u32>) {
        let (owned, next) = extents().owners(place, limit);
        let mut all = Vec::with_capacity(owned.len());
        let mut aftermath = Aftermath::default();
        for (extent, block) in owned {
            if let Some((mut stripe, slot)) = self.lock_block(block) {
                let is_it =
                    |replica: &Replica| replica.segment == segment && replica.extent == extent;
                let dropped = stripe.drop_replica(slot, &self.common, &mut aftermath, is_it);
                dropped.iter().for_each(&leaves);
                all.extend(dropped);
            }
        }
        self.apply_aftermath(aftermath);
        (all, next)
    }

    /// Updates other blocks after some blocks have left. The caller must hold no stripe's lock.
    pub(super) fn apply_aftermath(&self, aftermath: Aftermath) {
        for block in aftermath.leaves {
            self.may_be_leaf(block);
        }
        for block in aftermath.roots {
            self.mark_root(block);
        }
    }

    /// Returns a block that lost its last child to the eviction queues.
    fn may_be_leaf(&self, block: BlockId) {
        let Some((mut stripe, slot)) = self.lock_block(block) else {
            return;
        };
        let entry = stripe.entries.at(slot);
        let waits_for_children = matches!(
            entry.queue_state(),
            QueueState::Inner | QueueState::RootWithChildren
        );
        // The block may have a new child since then, or the slot may hold another block.
        let node = stripe.entries.rest(slot).lineage;
        let has_children = node != NONE && self.common.lineage.lock().has_children(node);
        if waits_for_children && !has_children {
            let stripe: &mut super::stripe::Stripe = &mut stripe;
            stripe.queues.take(&mut stripe.entries, slot);
            stripe.put_back(slot);
        }
    }

    /// Makes a block that lost its parent a preferred victim. If another block has the slot now, that block
    /// is evicted early, which does no harm.
    pub(super) fn mark_root(&self, block: BlockId) {
        let Some((mut stripe, slot)) = self.lock_block(block) else {
            return;
        };
        let stripe: &mut super::stripe::Stripe = &mut stripe;
        let entry = stripe.entries.at_mut(slot);
        entry.set_lost_parent(true);
        match entry.queue_state() {
            QueueState::Inner => stripe.queues.put_frontier(&mut stripe.entries, slot),
            QueueState::Listed | QueueState::Stray => {
                stripe.queues.take(&mut stripe.entries, slot);
                stripe.put_back(slot);
            }
            QueueState::Root
            | QueueState::RootWithChildren
            | QueueState::Soft
            | QueueState::Parked
            | QueueState::Fixed => {}
        }
    }
}
