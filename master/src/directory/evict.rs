//! Eviction of single blocks.
//!
//! Each victim is the oldest block of all stripes. A gauge of each stripe shows its oldest ticks without its
//! lock. Roots go first, then ordinary blocks, then soft-pinned blocks.
//!
//! Eviction sets a leased block aside until its lease ends. So a round costs only what it evicts, and no
//! block is examined twice without result. A block on a node that takes no blocks now (suspect or draining)
//! gives no usable room. Eviction sets it aside until [`Directory::recall`] names its segment. So a dead
//! node's blocks cost eviction nothing.
//!
//! Only leaves are victims, and a chain lies on several segments. Eviction also takes a leaf that gives no
//! room, if an ancestor gives room and all its few descendants may leave. Otherwise the leaf would keep its
//! ancestors in memory forever.
//!
//! [`Directory::evict_before`] takes no block that was used at a tick or later. Eviction ends when such a
//! block is next. Otherwise blocks behind it would leave first, although a pin or a priority keeps them
//! longer.

use super::BlockId;
use super::Directory;
use super::block::{BlockRef, Removed, Tick};
use super::cell::NEVER;
use super::entry::QueueState;
use super::evict_tenants::{Goal, Whose, is_guaranteed};
use super::lineage::Aftermath;
use super::orders::COMMON;
use super::queues::{Rank, SPREAD};
use crate::clock::BootInstant;
use crate::placement::Extents;
use crate::slab::NONE;
use kvpool_types::{Length, SegmentId, Version};

/// The outcome of [`Directory::evict_block`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Single {
    /// The block has left the directory.
    Evicted(Removed),
    /// The block may not be evicted now.
    Stays,
    /// The block is no longer in the directory.
    Gone,
}

/// The outcome for a stripe's next victim.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// The block has left the directory.
    Evicted(Removed),
    /// The block has left its queue, or there was none.
    Aside,
    /// The block stays in its queue.
    Kept,
}

/// The limits of an eviction.
#[derive(Clone, Copy)]
pub(super) struct Limits<'g> {
    /// Leases that end later than this are respected.
    pub(super) now: BootInstant,
    /// Blocks whose last use is at this tick or later stay.
    pub(super) before: Tick,
    /// The segments where a block makes room.
    pub(super) gives_room: &'g dyn Fn(SegmentId) -> bool,
}

impl Limits<'_> {
    /// Whether the last use of a block is too late for it to leave.
    pub(super) fn is_later(&self, block: &BlockRef<'_>) -> bool {
        block.tick() >= self.before
    }
}

/// Blocks that moved in their queues.
type Touched = smallvec::SmallVec<[BlockId; 4]>;

/// The most descendants of an ancestor for which eviction takes leaves without room.
const LARGEST_FAMILY: usize = 64;
/// The number of blocks that are recalled under one lock of a stripe.
const RECALL_STEP: usize = 256;

impl Directory {
    /// Evicts blocks until their extents on the segments that `gives_room` accepts reach `goal`
    /// bytes. The last victim reaches the goal, so no further block is evicted. Fewer blocks leave
    /// when no other block may be evicted. Leased and hard-pinned blocks stay, as do blocks with
    /// children and blocks on other segments only.
    pub fn evict(
        &self,
        goal: u64,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Vec<Removed> {
        self.evict_before(Tick::MAX, goal, now, gives_room)
    }

    /// [`Directory::evict`] of blocks whose last use is before a tick.
    pub fn evict_before(
        &self,
        before: Tick,
        goal: u64,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Vec<Removed> {
        let limits = Limits {
            now,
            before,
            gives_room: &gives_room,
        };
        if self.accounts().has_tenants() {
            let goal = Goal {
                bytes: goal,
                blocks: 0,
            };
            return self.evict_in_order(goal, Whose::Anyone, &limits);
        }
        let mut evicted = Vec::new();
        self.wake(now);
        let mut bytes = 0;
        while bytes < goal {
            let Some((stripe, rank, tick)) = self.oldest() else {
                break;
            };
            let keeps = |block: &BlockRef<'_>| limits.is_later(block);
            match self.evict_first(stripe, COMMON, rank, &limits, &keeps).0 {
                Step::Kept if tick >= before.0 => break,
                // The stripe's oldest block has left or was used. Another stripe may have an older block.
                Step::Kept | Step::Aside => {}
                Step::Evicted(removed) => {
                    bytes += removed.footprint_on(&gives_room);
                    evicted.push(removed);
                }
            }
        }
        evicted
    }

    /// Evicts one block by the rules of [`Directory::evict_before`]. A soft-pinned block stays too.
    pub fn evict_block(
        &self,
        id: BlockId,
        version: Version,
        before: Tick,
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
            if stripe.entries.at(slot).tick() >= before.0
                || self.has_children(stripe.entries.rest(slot).lineage)
                || self.keeps(&stripe, slot, now, &gives_room)
            {
                return Single::Stays;
            }
            stripe.remove(slot, &self.common, &mut aftermath)
        };
        self.apply_aftermath(aftermath);
        Single::Evicted(removed)
    }

    /// Whether [`Directory::evict_block`] would take a block, if the children that `leaves` accepts had left before.
    pub(crate) fn may_evict_block(
        &self,
        id: BlockId,
        version: Version,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
        leaves: impl Fn(BlockId) -> bool,
    ) -> bool {
        let Some((stripe, slot)) = self.lock_block(id) else {
            return false;
        };
        let rest = stripe.entries.rest(slot);
        let (present, lineage) = (rest.version, rest.lineage);
        if present != version || self.keeps(&stripe, slot, now, &gives_room) {
            return false;
        }
        let forest = self.common.lineage.lock();
        let mut children = forest.children(lineage);
        lineage == NONE || children.all(|(child, _)| leaves(child))
    }

    /// Whether a lease, a pin or a guaranteed share keeps the block, or its eviction makes no room.
    fn keeps(
        &self,
        stripe: &super::stripe::Stripe,
        slot: u32,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> bool {
        let entry = stripe.entries.at(slot);
        entry.is_leased(self.common.relative(now))
            || entry.is_hard_pinned()
            || entry.is_soft_pinned()
            || !stripe.replicas(slot).iter().any(|r| gives_room(r.segment))
            || self.keeps_share(stripe, slot)
    }

    /// The bytes of one extent of the next victim; zero without a victim.
    pub fn first_footprint(&self) -> u64 {
        if self.accounts().has_tenants() {
            return self.first_in_order().map_or(0, |(length, _)| length);
        }
        let Some((stripe, rank, _)) = self.oldest() else {
            return 0;
        };
        let stripe = self.lock(stripe);
        let Some((_, slot)) = stripe.queues.first(rank) else {
            return 0;
        };
        let length = Length(u64::from(stripe.entries.rest(slot).length));
        Extents::rounded(length).0
    }

    /// The last use of the block that eviction takes next; `None` when no block can be evicted. Blocks whose
    /// lease has expired by `now` are included.
    pub fn first_tick(&self, now: BootInstant) -> Option<Tick> {
        self.wake(now);
        if self.accounts().has_tenants() {
            return self.first_in_order().map(|(_, tick)| Tick(tick));
        }
        let (stripe, rank, _) = self.oldest()?;
        let stripe = self.lock(stripe);
        let (tick, _) = stripe.queues.first(rank)?;
        Some(Tick(tick))
    }

    /// Returns the blocks that eviction set aside on `segments` to the queues, because these
    /// segments take blocks again.
    pub fn recall(&self, segments: impl Iterator<Item = SegmentId>) {
        let groups = segments.map(|segment| segment.0);
        for group in groups.chain(std::iter::once(SPREAD)) {
            for cell in &self.stripes {
                while cell.lock().recall(group, RECALL_STEP) {}
            }
        }
    }

    /// Re-examines blocks whose soft pin or lease has expired.
    pub(super) fn wake(&self, now: BootInstant) {
        for cell in &self.stripes {
            if cell.gauges.timer() <= now.0 {
                cell.lock().wake(now, &self.common);
            }
        }
    }

    /// The stripe with the oldest block of the first rank that has a block, and the block's tick.
    fn oldest(&self) -> Option<(usize, Rank, u64)> {
        Rank::ALL.into_iter().find_map(|rank| {
            let ticks = self.stripes.iter().map(|cell| cell.gauges.oldest(rank));
            let (stripe, tick) = ticks.enumerate().min_by_key(|(_, tick)| *tick)?;
            (tick != NEVER).then_some((stripe, rank, tick))
        })
    }

    /// Evicts the first block of a rank in one order of a stripe, or removes it from its queue. A block that
    /// `keeps` accepts stays. Also returns the blocks of other stripes that moved in their queues.
    pub(super) fn evict_first(
        &self,
        number: usize,
        order: u32,
        rank: Rank,
        limits: &Limits<'_>,
        keeps: &dyn Fn(&BlockRef<'_>) -> bool,
    ) -> (Step, Touched) {
        let Limits {
            now, gives_room, ..
        } = *limits;
        let mut aftermath = Aftermath::default();
        let removed = {
            let mut locked = self.lock(number);
            let mut stripe: &mut super::stripe::Stripe = &mut locked;
            let Some((_, slot)) = stripe.queues.first_of(order, rank) else {
                return (Step::Aside, Touched::new());
            };
            let entry = stripe.entries.at(slot);
            if entry.queue_state() == QueueState::RootWithChildren {
                // The root's children are preferred victims in its place. When the last child has
                // left, the root is a victim again.
                let lineage = self.common.lineage.lock();
                let children: Touched = lineage
                    .children(stripe.entries.rest(slot).lineage)
                    .map(|(block, _)| block)
                    .collect();
                drop(lineage);
                stripe.queues.take(&mut stripe.entries, slot);
                drop(locked);
                children.iter().for_each(|child| self.mark_root(*child));
                return (Step::Aside, children);
            }
            if entry.is_leased(self.common.relative(now)) {
                stripe.park(slot, &self.common);
                return (Step::Aside, Touched::new());
            }
            if !stripe.replicas(slot).iter().any(|r| gives_room(r.segment)) {
                let node = stripe.entries.rest(slot).lineage;
                let version = stripe.entries.rest(slot).version;
                // Ancestors lie in other stripes, which must not be locked together with this one.
                drop(locked);
                let frees = self.frees_an_ancestor(node, now, gives_room);
                locked = self.lock(number);
                stripe = &mut locked;
                let is_first = stripe
                    .queues
                    .first_of(order, rank)
                    .is_some_and(|(_, at)| at == slot);
                if !is_first
                    || stripe.entries.rest(slot).version != version
                    || stripe.entries.at(slot).is_leased(self.common.relative(now))
                {
                    return (Step::Aside, Touched::new());
                }
                if !frees {
                    stripe.set_aside(slot, node != NONE);
                    return (Step::Aside, Touched::new());
                }
            }
            let block = BlockRef {
                common: &self.common,
                stripe,
                slot,
            };
            if keeps(&block) {
                return (Step::Kept, Touched::new());
            }
            stripe.remove(slot, &self.common, &mut aftermath)
        };
        let touched = aftermath.leaves.iter().chain(&aftermath.roots);
        let touched = touched.copied().collect();
        self.apply_aftermath(aftermath);
        (Step::Evicted(removed), touched)
    }

    /// Whether an ancestor makes room once its descendants have left. The descendants must be few,
    /// and none of them leased or pinned. `node` is the lineage node of a leaf; no stripe is
    /// locked.
    fn frees_an_ancestor(
        &self,
        node: u32,
        now: BootInstant,
        gives_room: &dyn Fn(SegmentId) -> bool,
    ) -> bool {
        let ancestors: Vec<(BlockId, u32)> = {
            let lineage = self.common.lineage.lock();
            let ancestors =
                std::iter::successors(lineage.parent(node), |(_, at)| lineage.parent(*at));
            ancestors.take(LARGEST_FAMILY).collect()
        };
        let gives = |id: BlockId| {
            self.lock_block(id).is_some_and(|(stripe, slot)| {
                let replicas = stripe.replicas(slot);
                replicas.iter().any(|replica| gives_room(replica.segment))
            })
        };
        // More distant ancestors have more descendants.
        let Some((id, at)) = ancestors.into_iter().find(|(id, _)| gives(*id)) else {
            return false;
        };
        let family = self.common.lineage.lock().family(id, at, LARGEST_FAMILY);
        family.is_some_and(|family| family.into_iter().all(|id| self.may_leave(id, now)))
    }

    /// Whether the block could be evicted if it had no children.
    fn may_leave(&self, id: BlockId, now: BootInstant) -> bool {
        self.lock_block(id).is_some_and(|(stripe, slot)| {
            let entry = stripe.entries.at(slot);
            let is_kept = entry.is_leased(self.common.relative(now))
                || entry.is_hard_pinned()
                || entry.is_soft_pinned();
            !is_kept && !self.keeps_share(&stripe, slot)
        })
    }

    /// Whether the block's namespace would fall below its guaranteed share without this block.
    pub(super) fn keeps_share(&self, stripe: &super::stripe::Stripe, slot: u32) -> bool {
        self.accounts().has_tenants() && {
            let namespace = stripe.namespace(slot, &self.common);
            is_guaranteed(self.accounts(), namespace, stripe.footprint(slot))
        }
    }
}
