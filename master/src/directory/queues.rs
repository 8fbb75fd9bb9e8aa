//! The eviction order of the blocks of one stripe.
//!
//! ```text
//!  list     ordinary blocks, oldest first; a use moves a block to the end
//!  strays   ordinary blocks whose tick did not fit near the list's end
//!  roots    blocks that lost their parent: evicted first
//!  soft     soft-pinned blocks: evicted last
//!  timers   ends of soft pins, and of leases on blocks that eviction met leased
//!  aside    blocks on nodes that take no blocks, by segment, until that changes
//! ```
//!
//! Blocks with children and hard-pinned blocks are in none of them. A block that eviction found leased is in
//! the timers only. So eviction never examines the same block twice without result.

use super::entries::Entries;
use super::entry::{Links, QueueState};
use crate::slab::NONE;
use kvpool_seams::maps::HashMap;
use std::collections::BTreeSet;

/// How many blocks from the list's end an insertion searches for its position. Concurrent batches
/// arrive in each stripe a little out of order.
const LONGEST_WALK: usize = 8;

/// The order in which kinds of blocks are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rank {
    Roots,
    Ordinary,
    Soft,
}

impl Rank {
    pub(super) const ALL: [Self; 3] = [Self::Roots, Self::Ordinary, Self::Soft];
}

/// The queues of one stripe.
#[derive(Debug)]
pub(super) struct Queues {
    head: u32,
    tail: u32,
    /// The tick of the block at the list's head. Every use in the stripe reads it, and the block itself is
    /// the least likely to be in a processor's cache.
    head_tick: u64,
    /// The tick of the block at the list's tail. Every use of a block compares with it.
    tail_tick: u64,
    strays: BTreeSet<(u64, u32)>,
    roots: BTreeSet<(u64, u32)>,
    soft: BTreeSet<(u64, u32)>,
    timers: BTreeSet<(u64, u32)>,
    timer_of: HashMap<u32, u64>,
    /// The blocks that are set aside, each with its group.
    aside: BTreeSet<(u32, u32)>,
    group_of: HashMap<u32, u32>,
}

/// The group of blocks with several replicas or with a parent. The return of any segment may
/// concern them.
pub(super) const SPREAD: u32 = u32::MAX;

impl Default for Queues {
    fn default() -> Self {
        Self {
            head: NONE,
            tail: NONE,
            head_tick: 0,
            tail_tick: 0,
            strays: BTreeSet::new(),
            roots: BTreeSet::new(),
            soft: BTreeSet::new(),
            timers: BTreeSet::new(),
            timer_of: HashMap::default(),
            aside: BTreeSet::new(),
            group_of: HashMap::default(),
        }
    }
}

impl Queues {
    /// Puts a block without children into its queue; `soft_until` is the end of its soft pin.
    pub(super) fn put(&mut self, entries: &mut Entries, slot: u32, soft_until: Option<u64>) {
        let entry = entries.at_mut(slot);
        let key = (entry.tick(), slot);
        if entry.is_hard_pinned() {
            entry.set_queue_state(QueueState::Fixed);
        } else if let Some(until) = soft_until {
            entry.set_queue_state(QueueState::Soft);
            self.soft.insert(key);
            self.set_timer(slot, until);
        } else if entry.has_lost_parent() {
            entry.set_queue_state(QueueState::Root);
            self.roots.insert(key);
        } else {
            self.put_ordinary(entries, slot);
        }
    }

    /// Puts a root with children among the roots, where eviction finds it early and continues with
    /// the children.
    pub(super) fn put_frontier(&mut self, entries: &mut Entries, slot: u32) {
        let entry = entries.at_mut(slot);
        entry.set_queue_state(QueueState::RootWithChildren);
        self.roots.insert((entry.tick(), slot));
    }

    /// Sets a block aside until `until`.
    pub(super) fn park(&mut self, entries: &mut Entries, slot: u32, until: u64) {
        entries.at_mut(slot).set_queue_state(QueueState::Parked);
        self.set_timer(slot, until);
    }

    /// Sets a block aside until its group is recalled. The group is its segment's number, or
    /// [`SPREAD`].
    pub(super) fn set_aside(&mut self, entries: &mut Entries, slot: u32, group: u32) {
        entries.at_mut(slot).set_queue_state(QueueState::Parked);
        self.aside.insert((group, slot));
        self.group_of.insert(slot, group);
    }

    /// Any block of a group that was set aside.
    pub(super) fn first_aside(&self, group: u32) -> Option<u32> {
        let mut of_group = self.aside.range((group, 0)..=(group, u32::MAX));
        of_group.next().map(|(_, slot)| *slot)
    }

    /// Whether a block was set aside until its group is recalled.
    pub(super) fn is_aside(&self, slot: u32) -> bool {
        self.group_of.contains_key(&slot)
    }

    /// Removes a block from its queue. Its state is then [`QueueState::Inner`].
    pub(super) fn take(&mut self, entries: &mut Entries, slot: u32) {
        let entry = entries.at_mut(slot);
        let key = (entry.tick(), slot);
        let place = entry.queue_state();
        entry.set_queue_state(QueueState::Inner);
        match place {
            QueueState::Listed => self.unlink(entries, slot),
            QueueState::Stray => {
                self.strays.remove(&key);
            }
            QueueState::Root | QueueState::RootWithChildren => {
                self.roots.remove(&key);
            }
            QueueState::Soft => {
                self.soft.remove(&key);
                self.clear_timer(slot);
            }
            QueueState::Parked => {
                self.clear_timer(slot);
                if let Some(group) = self.group_of.remove(&slot) {
                    self.aside.remove(&(group, slot));
                }
            }
            QueueState::Inner | QueueState::Fixed => {}
        }
    }

    /// The next victim of a rank, with its tick.
    pub(super) fn first(&self, rank: Rank) -> Option<(u64, u32)> {
        match rank {
            Rank::Roots => self.roots.first().copied(),
            Rank::Soft => self.soft.first().copied(),
            Rank::Ordinary => {
                let head = (self.head != NONE).then_some((self.head_tick, self.head));
                match (head, self.strays.first().copied()) {
                    (Some(head), Some(stray)) => Some(head.min(stray)),
                    (head, stray) => head.or(stray),
                }
            }
        }
    }

    /// The end of the next timer.
    pub(super) fn next_timer(&self) -> Option<u64> {
        self.timers.first().map(|(until, _)| *until)
    }

    /// A block whose timer has expired by `now`. It stays in its queue, without the timer.
    pub(super) fn pop_timer(&mut self, now: u64) -> Option<u32> {
        let (_, slot) = self
            .timers
            .first()
            .copied()
            .filter(|(until, _)| *until <= now)?;
        self.clear_timer(slot);
        Some(slot)
    }

    /// An estimate of the bytes of memory beside the entries.
    pub(super) fn memory_bytes(&self) -> u64 {
        // A node of a B-tree is between half full and full.
        let in_trees = self.strays.len() + self.roots.len() + self.soft.len() + self.timers.len();
        let maps = self.timer_of.allocation_size() + self.group_of.allocation_size();
        (in_trees * 24 + self.aside.len() * 12 + maps) as u64
    }

    /// Moves a block in the list to the position of its new tick.
    #[inline]
    pub(super) fn move_listed(&mut self, entries: &mut Entries, slot: u32, tick: u64) {
        self.unlink(entries, slot);
        if self.tail != NONE && self.tail_tick <= tick {
            self.link(entries, slot, tick, self.tail);
        } else {
            self.put_ordinary(entries, slot);
        }
    }

    fn put_ordinary(&mut self, entries: &mut Entries, slot: u32) {
        let tick = entries.at(slot).tick();
        let mut after = self.tail;
        for _ in 0..LONGEST_WALK {
            match entries.get(after) {
                Some(entry) if entry.tick() > tick => after = entries.links(after).prev,
                _ => {
                    entries.at_mut(slot).set_queue_state(QueueState::Listed);
                    return self.link(entries, slot, tick, after);
                }
            }
        }
        entries.at_mut(slot).set_queue_state(QueueState::Stray);
        self.strays.insert((tick, slot));
    }

    /// Links a block behind `after`, or at the front.
    #[inline]
    fn link(&mut self, entries: &mut Entries, slot: u32, tick: u64, after: u32) {
        let next = if after == NONE {
            self.head_tick = tick;
            std::mem::replace(&mut self.head, slot)
        } else {
            std::mem::replace(&mut entries.links_mut(after).next, slot)
        };
        if next == NONE {
            self.tail = slot;
            self.tail_tick = tick;
        } else {
            entries.links_mut(next).prev = slot;
        }
        let links = entries.links_mut(slot);
        (links.prev, links.next) = (after, next);
    }

    #[inline]
    fn unlink(&mut self, entries: &mut Entries, slot: u32) {
        let Links { prev, next, .. } = entries.links(slot);
        let links = entries.links_mut(slot);
        (links.prev, links.next) = (NONE, NONE);
        if prev == NONE {
            self.head = next;
            self.head_tick = entries.get(next).map_or(0, super::entry::Entry::tick);
        } else {
            entries.links_mut(prev).next = next;
        }
        if next == NONE {
            self.tail = prev;
            self.tail_tick = entries.get(prev).map_or(0, super::entry::Entry::tick);
        } else {
            entries.links_mut(next).prev = prev;
        }
    }

    fn set_timer(&mut self, slot: u32, until: u64) {
        self.clear_timer(slot);
        self.timer_of.insert(slot, until);
        self.timers.insert((until, slot));
    }

    fn clear_timer(&mut self, slot: u32) {
        if let Some(until) = self.timer_of.remove(&slot) {
            self.timers.remove(&(until, slot));
        }
    }
}
