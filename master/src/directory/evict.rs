//! Making room.
//!
//! Victims go one by one, always the oldest of all stripes: each stripe shows its oldest ticks without
//! being locked. Roots go first, ordinary blocks next, soft-pinned ones last. A block that is met
//! leased is set aside until its lease ends, so a round costs what it evicts and no block is met in
//! vain twice. A block whose node takes no blocks now (it is not heard, or drains) would make no room where
//! room is sought. It is set aside until [`Directory::recall`] names its segment, so a dead node's blocks
//! cost eviction nothing until the node's state changes.

use super::BlockId;
use super::Directory;
use super::block::Removed;
use super::cell::NEVER;
use super::entry::QueueState;
use super::lineage::Aftermath;
use super::queues::{Rank, SPREAD};
use crate::clock::BootInstant;
use crate::placement::Extents;
use kvpool_types::{Length, SegmentId, Version};

/// What became of one block that was to be evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Single {
    /// It has left the directory.
    Evicted(Removed),
    /// It may not go now.
    Stays,
    /// It is not there any more.
    Gone,
}

/// How many blocks of a stripe are recalled before its lock is let go once.
const RECALL_STEP: usize = 256;

impl Directory {
    /// Evicts blocks until the bytes of their extents on segments that `gives_room` names reach `goal`, and
    /// not one more; fewer when no block is left that may go. Never evicts a block that is leased or
    /// hard-pinned, nor one with children, nor one that lies on none of these segments.
    pub fn evict(
        &self,
        goal: u64,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Vec<Removed> {
        let mut evicted = Vec::new();
        self.wake(now);
        let mut bytes = 0;
        while bytes < goal {
            let Some((stripe, rank)) = self.oldest() else {
                break;
            };
            if let Some(removed) = self.evict_oldest(stripe, rank, now, &gives_room) {
                bytes += removed.footprint_on(&gives_room);
                evicted.push(removed);
            }
        }
        evicted
    }

    /// Evicts one block, by the same rules. Soft-pinned blocks stay too.
    pub fn evict_block(
        &self,
        id: BlockId,
        version: Version,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Single {
        let mut aftermath = Aftermath::default();
        let removed = {
            let Some((mut stripe, slot)) = self.lock_block(id) else {
                return Single::Gone;
            };
            if stripe.entries.rest(slot).version != version {
                return Single::Gone;
            }
            let entry = stripe.entries.at(slot);
            if entry.is_leased(self.common.relative(now))
                || entry.is_hard_pinned()
                || entry.is_soft_pinned()
                || self.has_children(stripe.entries.rest(slot).lineage)
                || !stripe.replicas(slot).iter().any(|r| gives_room(r.segment))
            {
                return Single::Stays;
            }
            stripe.remove(slot, &self.common, &mut aftermath)
        };
        self.apply_aftermath(aftermath);
        Single::Evicted(removed)
    }

    /// The bytes of one extent of the block that is to go first; zero when there is none.
    pub fn first_footprint(&self) -> u64 {
        let Some((stripe, rank)) = self.oldest() else {
            return 0;
        };
        let stripe = self.lock(stripe);
        let Some((_, slot)) = stripe.queues.first(rank) else {
            return 0;
        };
        let length = Length(u64::from(stripe.entries.rest(slot).length));
        Extents::rounded(length).0
    }

    /// Lets eviction look again at the blocks that it set aside on `segments`: they take blocks again.
    pub fn recall(&self, segments: impl Iterator<Item = SegmentId>) {
        let groups = segments.map(|segment| segment.0);
        for group in groups.chain(std::iter::once(SPREAD)) {
            for cell in &self.stripes {
                while cell.lock().recall(group, RECALL_STEP) {}
            }
        }
    }

    /// Looks at blocks whose soft pin or lease has run out.
    pub(super) fn wake(&self, now: BootInstant) {
        for cell in &self.stripes {
            if cell.gauges.timer() <= now.0 {
                cell.lock().wake(now, &self.common);
            }
        }
    }

    /// The stripe with the oldest block of the first rank that has any.
    fn oldest(&self) -> Option<(usize, Rank)> {
        Rank::ALL.into_iter().find_map(|rank| {
            let ticks = self.stripes.iter().map(|cell| cell.gauges.oldest(rank));
            let (stripe, tick) = ticks.enumerate().min_by_key(|(_, tick)| *tick)?;
            (tick != NEVER).then_some((stripe, rank))
        })
    }

    /// Evicts the first block of a rank of a stripe, or takes it out of the way: each call that
    /// evicts nothing leaves one block less to look at.
    fn evict_oldest(
        &self,
        stripe: usize,
        rank: Rank,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Option<Removed> {
        let mut aftermath = Aftermath::default();
        let removed = {
            let mut locked = self.lock(stripe);
            let stripe: &mut super::stripe::Stripe = &mut locked;
            let (_, slot) = stripe.queues.first(rank)?;
            let entry = stripe.entries.at(slot);
            if entry.queue_state() == QueueState::RootWithChildren {
                // The root's children are preferred victims in its stead; when the last one has
                // gone, it is one again.
                let lineage = self.common.lineage.lock();
                let children: Vec<BlockId> = lineage
                    .children(stripe.entries.rest(slot).lineage)
                    .map(|(block, _)| block)
                    .collect();
                drop(lineage);
                stripe.queues.take(&mut stripe.entries, slot);
                drop(locked);
                children.into_iter().for_each(|child| self.mark_root(child));
                return None;
            }
            if entry.is_leased(self.common.relative(now)) {
                stripe.park(slot, &self.common);
                return None;
            }
            if !stripe.replicas(slot).iter().any(|r| gives_room(r.segment)) {
                stripe.set_aside(slot);
                return None;
            }
            stripe.remove(slot, &self.common, &mut aftermath)
        };
        self.apply_aftermath(aftermath);
        Some(removed)
    }
}
