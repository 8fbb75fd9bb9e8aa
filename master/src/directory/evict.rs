//! Making room.
//!
//! Victims go one by one, always the oldest of all shards: each shard shows its oldest ticks without
//! being locked. Orphans go first, ordinary blocks next, soft-pinned ones last. A block that is met
//! leased is set aside until its lease ends, so a round costs what it evicts and no block is met in
//! vain twice. A block whose node takes no blocks now (it is not heard, or drains) would make no room where
//! room is sought. It is set aside until [`Directory::recall`] names its segment, so a dead node's blocks
//! cost eviction nothing until the node's state changes.

use super::Directory;
use super::block::{BlockId, Removed};
use super::cell::NEVER;
use super::entry::Place;
use super::lineage::Aftermath;
use super::queues::{Rank, SPREAD};
use crate::clock::Millis;
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

/// How many blocks of a shard are recalled before its lock is let go once.
const RECALL_STEP: usize = 256;

impl Directory {
    /// Evicts blocks until the bytes of their extents on segments that `gives_room` names reach `goal`, and
    /// not one more; fewer when no block is left that may go. Never evicts a block that is leased or
    /// hard-pinned, nor one with children, nor one that lies on none of these segments.
    pub fn evict(
        &self,
        goal: u64,
        now: Millis,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Vec<Removed> {
        let mut evicted = Vec::new();
        self.wake(now);
        let mut bytes = 0;
        while bytes < goal {
            let Some((shard, rank)) = self.oldest() else {
                break;
            };
            if let Some(removed) = self.evict_oldest(shard, rank, now, &gives_room) {
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
        now: Millis,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Single {
        let mut aftermath = Aftermath::default();
        let removed = {
            let Some((mut shard, slot)) = self.lock_block(id) else {
                return Single::Gone;
            };
            if shard.entries.rest(slot).version != version {
                return Single::Gone;
            }
            let entry = shard.entries.at(slot);
            if entry.is_leased(self.common.relative(now))
                || entry.is_hard_pinned()
                || entry.is_soft_pinned()
                || self.has_children(shard.entries.rest(slot).lineage)
                || !shard.replicas(slot).iter().any(|r| gives_room(r.segment))
            {
                return Single::Stays;
            }
            shard.remove(slot, &self.common, &mut aftermath)
        };
        self.settle(aftermath);
        Single::Evicted(removed)
    }

    /// The bytes of one extent of the block that is to go first; zero when there is none.
    pub fn first_footprint(&self) -> u64 {
        let Some((shard, rank)) = self.oldest() else {
            return 0;
        };
        let shard = self.lock(shard);
        let Some((_, slot)) = shard.queues.first(rank) else {
            return 0;
        };
        let length = Length(u64::from(shard.entries.rest(slot).length));
        Extents::rounded(length).0
    }

    /// Lets eviction look again at the blocks that it set aside on `segments`: they take blocks again.
    pub fn recall(&self, segments: impl Iterator<Item = SegmentId>) {
        let groups = segments.map(|segment| segment.0);
        for group in groups.chain(std::iter::once(SPREAD)) {
            for cell in &self.shards {
                while cell.lock().recall(group, RECALL_STEP) {}
            }
        }
    }

    /// Looks at blocks whose soft pin or lease has run out.
    pub(super) fn wake(&self, now: Millis) {
        for cell in &self.shards {
            if cell.gauges.timer() <= now.0 {
                cell.lock().wake(now, &self.common);
            }
        }
    }

    /// The shard with the oldest block of the first rank that has any.
    fn oldest(&self) -> Option<(usize, Rank)> {
        Rank::ALL.into_iter().find_map(|rank| {
            let ticks = self.shards.iter().map(|cell| cell.gauges.oldest(rank));
            let (shard, tick) = ticks.enumerate().min_by_key(|(_, tick)| *tick)?;
            (tick != NEVER).then_some((shard, rank))
        })
    }

    /// Evicts the first block of a rank of a shard, or takes it out of the way: each call that
    /// evicts nothing leaves one block less to look at.
    fn evict_oldest(
        &self,
        shard: usize,
        rank: Rank,
        now: Millis,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Option<Removed> {
        let mut aftermath = Aftermath::default();
        let removed = {
            let mut locked = self.lock(shard);
            let shard: &mut super::shard::Shard = &mut locked;
            let (_, slot) = shard.queues.first(rank)?;
            let entry = shard.entries.at(slot);
            if entry.place() == Place::Frontier {
                // The orphan's children are preferred victims in its stead; when the last one has
                // gone, it is one again.
                let lineage = self.common.lineage.lock();
                let children: Vec<BlockId> = lineage
                    .children(shard.entries.rest(slot).lineage)
                    .map(|(block, _)| block)
                    .collect();
                drop(lineage);
                shard.queues.take(&mut shard.entries, slot);
                drop(locked);
                children.into_iter().for_each(|child| self.orphan(child));
                return None;
            }
            if entry.is_leased(self.common.relative(now)) {
                shard.park(slot, &self.common);
                return None;
            }
            if !shard.replicas(slot).iter().any(|r| gives_room(r.segment)) {
                shard.set_aside(slot);
                return None;
            }
            shard.remove(slot, &self.common, &mut aftermath)
        };
        self.settle(aftermath);
        Some(removed)
    }
}
