//! The queues of blocks that wait for their copies, one for each node. In the code a queue is a *line*.
//!
//! A block has its *turn* to be stored when enough bytes are queued after it. A hard-pinned block has its turn
//! at once: it stays in memory, so its copy is written sooner or later. Until then a killed node loses it. A
//! *walk* is a scan of the directory for a node's blocks without a copy.

use crate::directory::Tick;
use crate::placement::share;
use crate::replica::BlockId;
use kvpool_types::{Incarnation, Key, Length, Version};
use std::collections::{HashMap, HashSet, VecDeque};

/// The share of a node's memory that the latest blocks take before their copies are made.
pub(super) const WITHOUT_COPY: f64 = 0.6;
/// The most blocks whose failed store is remembered. Beyond it all are forgotten, except during a drain.
const MOST_TRIED: usize = 4096;
/// The bound on hard-pinned blocks, as a multiple of the bound on other blocks. All that memory holds fit.
const MOST_PINNED: u64 = 2;
/// How slowly the estimate of eviction's reach grows again: by one byte for this many evicted bytes.
const REACH_AGAIN: u64 = 256;

/// The queues of blocks without a copy, by node.
#[derive(Debug, Default)]
pub(super) struct Demotions {
    pub(super) nodes: HashMap<Incarnation, Line>,
    last_walk: u64,
}

/// The queue of one node, in the order of the blocks' turns.
#[derive(Debug, Default)]
pub(super) struct Line {
    pub(super) blocks: VecDeque<Waiting>,
    pub(super) bytes: u64,
    /// The hard-pinned blocks, which go before all others.
    pub(super) pinned: VecDeque<Waiting>,
    pub(super) pinned_bytes: u64,
    /// The hard-pinned blocks whose namespace was at its quota of media when they had their turn. They wait apart, so
    /// that they delay none of other namespaces.
    pub(super) at_quota: VecDeque<Waiting>,
    at_quota_bytes: u64,
    /// Whether a hard-pinned block was dropped from a queue that was too long. A walk then finds the block.
    pub(super) has_missed_pins: bool,
    /// The blocks that have moved off media of a node that leaves, each with its last use before that. They have their
    /// turn at once, after hard-pinned blocks.
    pub(super) moved: VecDeque<(Waiting, Tick)>,
    /// The tick since which the node drains. During a drain every block has its turn at once.
    pub(super) drains: Option<Tick>,
    /// The number of the draining node's scan that has not ended. No block has its turn before its end.
    pub(super) walk: Option<u64>,
    /// Whether the draining node has been told that its blocks have their copies.
    pub(super) is_told: bool,
    /// The blocks whose store has failed once.
    tried_again: HashSet<Version>,
    /// The blocks that only slow media take. They are queued again when such a medium has answered.
    aside: VecDeque<Waiting>,
    aside_bytes: u64,
    /// The bytes that must be queued after a block for its turn, as last computed.
    pub(super) kept: u64,
    /// The bytes that must be queued after a block for it to be skipped. `None` before the first round of the
    /// thread.
    pub(super) most: Option<u64>,
    /// How many bytes without a copy eviction passes over before it takes the first block of this queue.
    /// `None` means the whole memory.
    pub(super) reach: Option<u64>,
    /// The latest version of a block that had its turn.
    pub(super) had_turn: Version,
}

/// The outcome for a block that had its turn.
pub(super) enum Turn {
    /// The store of the block was ordered, or the block needs no copy.
    Ended,
    /// Every medium that takes the block is busy.
    NotNow,
    /// Every medium that takes the block is slow.
    Later,
    /// The block is hard-pinned, and its namespace is at its quota of media.
    AtQuota,
}

/// The positions in a queue at which a block has its turn and is skipped.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turns {
    /// The block has its turn when more bytes than this are queued after it.
    pub(super) kept: u64,
    /// The block is skipped when more bytes than this are queued after it.
    pub(super) most: u64,
    /// Whether the hard-pinned blocks wait for their media, so that other blocks go before them.
    pub(super) pins_wait: bool,
    /// Whether only hard-pinned blocks have their turn.
    pub(super) only_pins: bool,
}

impl Demotions {
    /// Starts a queue for new blocks of the node. The queue of a drain stays.
    pub(super) fn expect(&mut self, node: Incarnation) {
        let line = self.nodes.entry(node).or_default();
        if line.drains.is_none() {
            *line = line.for_walk();
        }
    }

    /// Adds the blocks that a scan has found, before the blocks that were queued meanwhile. If a drain has
    /// begun, its own scan finds them. If the node has left, nothing happens.
    pub(super) fn found(&mut self, node: Incarnation, found: Vec<Waiting>) {
        let Some(line) = self.nodes.get_mut(&node) else {
            return;
        };
        if line.drains.is_some() {
            return;
        }
        let anew = Line {
            has_missed_pins: line.has_missed_pins,
            ..line.for_walk()
        };
        let newer = std::mem::replace(line, anew);
        let before = found.into_iter().chain(newer.aside);
        let pinned = newer.at_quota.into_iter().chain(newer.pinned);
        let all = before.chain(pinned).chain(newer.blocks);
        all.for_each(|one| line.push(one));
    }

    /// Starts the queue of a draining node. The drain began at `since`, or at the tick of an earlier call.
    /// Returns the number of the scan that the caller makes next. That scan finds every block that was queued
    /// before.
    pub(super) fn begin_drain(&mut self, node: Incarnation, since: Tick) -> u64 {
        self.last_walk += 1;
        let line = self.nodes.entry(node).or_default();
        *line = Line {
            drains: line.drains.or(Some(since)),
            walk: Some(self.last_walk),
            ..line.anew()
        };
        self.last_walk
    }

    /// Ends the queue of a cancelled drain. A scan then queues the blocks again, as after an attachment.
    pub(super) fn end_drain(&mut self, node: Incarnation) {
        if let Some(line) = self.nodes.get_mut(&node)
            && line.drains.is_some()
        {
            *line = line.anew();
        }
    }

    /// Adds the blocks that the scan of a drain has found, after the blocks that were queued meanwhile. If a
    /// later scan has begun, or the node has left, nothing happens.
    pub(super) fn end_walk(&mut self, node: Incarnation, walk: u64, found: Vec<Waiting>) {
        let line = self.nodes.get_mut(&node);
        if let Some(line) = line.filter(|line| line.walk == Some(walk)) {
            line.walk = None;
            found.into_iter().for_each(|one| line.push(one));
        }
    }

    /// Drops the queue of a node.
    pub(super) fn forget(&mut self, node: Incarnation) {
        self.nodes.remove(&node);
    }
}

#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) block: BlockId,
    pub(super) version: Version,
    pub(super) bytes: u64,
    /// Whether the block was put again after the pool had lost it.
    pub(super) was_lost: bool,
    /// Whether the block is hard-pinned.
    pub(super) is_pinned: bool,
    /// The parent of the block. It is set only in pools with a write budget.
    pub(super) parent: Option<Box<Key>>,
}

impl Line {
    /// An empty queue with the same bound as this one. The bound holds even if no medium takes
    /// blocks for long.
    fn anew(&self) -> Self {
        Self {
            most: self.most,
            ..Self::default()
        }
    }

    /// An empty queue for a walk over all blocks. The blocks that have moved off media keep their turn.
    fn for_walk(&mut self) -> Self {
        let moved = std::mem::take(&mut self.moved);
        Self {
            moved,
            ..self.anew()
        }
    }

    /// Appends a block. While the disk stalls, blocks at the head are dropped: eviction has already taken
    /// them.
    pub(super) fn push(&mut self, waiting: Waiting) {
        let most = self.most.unwrap_or(u64::MAX);
        if waiting.is_pinned {
            return self.push_pinned(waiting, most.saturating_mul(MOST_PINNED));
        }
        self.bytes += waiting.bytes;
        self.blocks.push_back(waiting);
        while self.bytes > most && self.drains.is_none() {
            let Some(first) = self.blocks.pop_front() else {
                return;
            };
            self.bytes -= first.bytes;
        }
    }

    /// Appends a hard-pinned block. The queue can exceed `most` only by blocks that were replaced or removed
    /// since, while no medium takes copies.
    fn push_pinned(&mut self, waiting: Waiting, most: u64) {
        self.pinned_bytes += waiting.bytes;
        self.pinned.push_back(waiting);
        while self.pinned_bytes > most && self.drains.is_none() {
            let Some(first) = self.pinned.pop_front() else {
                return;
            };
            self.pinned_bytes -= first.bytes;
            self.has_missed_pins = true;
        }
    }

    pub(super) fn push_front(&mut self, waiting: Waiting) {
        if waiting.is_pinned {
            self.pinned_bytes += waiting.bytes;
            self.pinned.push_front(waiting);
            return;
        }
        self.bytes += waiting.bytes;
        self.blocks.push_front(waiting);
    }

    /// Returns blocks that wait for their media, in their order. With `is_most` they are as many hard-pinned blocks as
    /// may be held at once, and go to the end. They may wait long for a write budget. Pinned blocks behind them may be
    /// for other media.
    pub(super) fn give_back(&mut self, held: Vec<Waiting>, is_most: bool) {
        let to_end = is_most && self.drains.is_none();
        let (last, first): (Vec<_>, Vec<_>) =
            held.into_iter().partition(|one| to_end && one.is_pinned);
        first.into_iter().rev().for_each(|one| self.push_front(one));
        last.into_iter().for_each(|one| self.push(one));
    }

    /// Whether hard-pinned blocks were dropped from the queue, and all others of it have had their turn.
    pub(super) fn take_missed_pins(&mut self) -> bool {
        let is_over = self.pinned.is_empty() && self.at_quota.is_empty();
        is_over && std::mem::take(&mut self.has_missed_pins)
    }

    /// Returns hard-pinned blocks whose namespace is at its quota of media. They have the same bound as other
    /// hard-pinned blocks. If a drain has begun, its own scan finds them.
    pub(super) fn put_at_quota(&mut self, waiting: Vec<Waiting>) {
        if self.drains.is_some() {
            return;
        }
        self.at_quota_bytes += waiting.iter().map(|one| one.bytes).sum::<u64>();
        self.at_quota.extend(waiting);
        let most = self.most.unwrap_or(u64::MAX).saturating_mul(MOST_PINNED);
        while self.at_quota_bytes > most {
            let Some(first) = self.at_quota.pop_front() else {
                return;
            };
            self.at_quota_bytes -= first.bytes;
            self.has_missed_pins |= first.is_pinned;
        }
    }

    /// Takes a block that [`Line::put_at_quota`] has returned. The operator may have raised the quota.
    pub(super) fn pop_at_quota(&mut self) -> Option<Waiting> {
        let first = self.at_quota.pop_front()?;
        self.at_quota_bytes -= first.bytes;
        Some(first)
    }

    /// Whether no block waits. During a drain none waits for a quota.
    pub(super) fn is_empty(&self) -> bool {
        self.pinned.is_empty() && self.blocks.is_empty() && self.aside.is_empty()
    }

    /// Sets a block aside, since the media that take it are slow. Later blocks overtake it. The blocks that
    /// are set aside have the same bound as the queue.
    pub(super) fn put_aside(&mut self, waiting: Waiting) {
        self.aside_bytes += waiting.bytes;
        self.aside.push_back(waiting);
        let most = self.most.unwrap_or(u64::MAX);
        while self.aside_bytes > most && self.drains.is_none() {
            let Some(first) = self.aside.pop_front() else {
                return;
            };
            self.aside_bytes -= first.bytes;
            self.has_missed_pins |= first.is_pinned;
        }
    }

    /// Queues the blocks that were set aside at the head. Returns whether there were any.
    pub(super) fn take_back(&mut self) -> bool {
        let aside = std::mem::take(&mut self.aside);
        self.aside_bytes = 0;
        let is_some = !aside.is_empty();
        aside.into_iter().rev().for_each(|one| self.push_front(one));
        is_some
    }

    /// Records that a block's store failed. Returns true for the first failure.
    pub(super) fn tries_again(&mut self, version: Version) -> bool {
        if self.drains.is_none() && self.tried_again.len() >= MOST_TRIED {
            self.tried_again.clear();
        }
        self.tried_again.insert(version)
    }

    /// Takes the first block that has its turn.
    pub(super) fn pop(&mut self, turns: Turns) -> Option<Waiting> {
        self.kept = turns.kept;
        self.most = Some(turns.most);
        if self.walk.is_some() {
            return None;
        }
        if !turns.pins_wait
            && let Some(first) = self.pinned.pop_front()
        {
            self.pinned_bytes -= first.bytes;
            return Some(first);
        }
        if turns.only_pins || (self.drains.is_none() && self.bytes <= turns.kept) {
            return None;
        }
        loop {
            let first = self.blocks.pop_front()?;
            self.bytes -= first.bytes;
            self.had_turn = self.had_turn.max(first.version);
            if self.drains.is_some() || self.bytes <= turns.most {
                return Some(first);
            }
        }
    }

    /// Records that a block was evicted. Returns true if it was evicted before its turn.
    pub(super) fn evicted(&mut self, version: Version, length: Length, has_copy: bool) -> bool {
        if let Some(reach) = &mut self.reach {
            *reach += length.0.div_ceil(REACH_AGAIN);
        }
        let is_early = !has_copy
            && version > self.had_turn
            && self.bytes <= self.kept
            && self.drains.is_none();
        if is_early {
            // Eviction takes several blocks at a time, so some blocks behind this one have left too.
            let reach = self.bytes / 4 * 3;
            self.reach = Some(reach);
            self.kept = share(reach, WITHOUT_COPY).min(self.kept);
        }
        is_early
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Incarnation = Incarnation(1);

    /// The turns of a queue of three blocks at most.
    const SHORT: Turns = Turns {
        kept: 3,
        most: 3,
        pins_wait: false,
        only_pins: false,
    };

    fn waiting(version: u64) -> Waiting {
        Waiting {
            block: BlockId(u32::try_from(version).unwrap()),
            version: Version(version),
            bytes: 1,
            was_lost: false,
            is_pinned: false,
            parent: None,
        }
    }

    fn pinned(version: u64) -> Waiting {
        Waiting {
            is_pinned: true,
            ..waiting(version)
        }
    }

    fn versions(demotions: &Demotions) -> Vec<u64> {
        let blocks = &demotions.nodes[&NODE].blocks;
        blocks.iter().map(|one| one.version.0).collect()
    }

    #[test]
    fn what_a_walk_has_found_stands_before_what_came_meanwhile() {
        let mut demotions = Demotions::default();
        demotions.expect(NODE);
        demotions.nodes.get_mut(&NODE).unwrap().push(waiting(9));
        demotions.found(NODE, vec![waiting(1), waiting(2)]);
        assert_eq!(versions(&demotions), [1, 2, 9]);
        assert_eq!(demotions.nodes[&NODE].bytes, 3);
    }

    /// Their medium became slow during the walk, which may have passed them already.
    #[test]
    fn a_walk_keeps_the_blocks_that_were_set_aside_meanwhile() {
        let mut demotions = Demotions::default();
        demotions.expect(NODE);
        let line = demotions.nodes.get_mut(&NODE).unwrap();
        line.put_aside(waiting(8));
        line.push(waiting(9));
        line.push(pinned(10));
        demotions.found(NODE, vec![waiting(1)]);
        assert_eq!(versions(&demotions), [1, 8, 9]);
        assert_eq!(demotions.nodes[&NODE].pinned.len(), 1);
    }

    /// Otherwise eviction would take these blocks before their copies are made. A medium that is lost begins a walk.
    #[test]
    fn a_walk_keeps_the_turn_of_blocks_that_moved_off_media() {
        let mut demotions = Demotions::default();
        demotions.expect(NODE);
        for version in [8, 9] {
            let line = demotions.nodes.get_mut(&NODE).unwrap();
            line.moved.push_back((waiting(version), Tick(5)));
            demotions.expect(NODE);
        }
        demotions.found(NODE, vec![waiting(1)]);
        let moved = demotions.nodes[&NODE].moved.iter();
        let moved: Vec<u64> = moved.map(|(one, _)| one.version.0).collect();
        assert_eq!(moved, [8, 9]);
        assert_eq!(versions(&demotions), [1]);
    }

    /// The end of a drain's queue is followed by word to the node, which waits for it.
    #[test]
    fn a_walk_over_blocks_leaves_the_line_of_a_drain() {
        // The drain begins before the walk, or while it runs.
        for is_before in [true, false] {
            let mut demotions = Demotions::default();
            if is_before {
                let line = demotions.nodes.entry(NODE).or_default();
                line.drains = Some(Tick(5));
            }
            demotions.expect(NODE);
            demotions
                .nodes
                .entry(NODE)
                .or_default()
                .drains
                .get_or_insert(Tick(5));
            demotions.nodes.get_mut(&NODE).unwrap().push(waiting(9));
            demotions.found(NODE, vec![waiting(1)]);
            assert_eq!(demotions.nodes[&NODE].drains, Some(Tick(5)));
            assert_eq!(versions(&demotions), [9]);
        }
    }

    /// The medium may be slow meanwhile, so nothing takes blocks out of the queue.
    #[test]
    fn the_line_after_a_cancelled_drain_is_as_long_at_most_as_the_line_before_it() {
        let mut demotions = Demotions::default();
        demotions.expect(NODE);
        let line = demotions.nodes.get_mut(&NODE).unwrap();
        assert!(line.pop(SHORT).is_none());
        demotions.begin_drain(NODE, Tick(5));
        demotions.end_drain(NODE);
        demotions.expect(NODE);
        demotions.found(NODE, (1..=6).map(waiting).collect());
        for version in 7..=9 {
            let line = demotions.nodes.get_mut(&NODE).unwrap();
            line.push(waiting(version));
        }
        assert_eq!(versions(&demotions), [7, 8, 9]);
    }

    /// Eviction takes no hard-pinned block, so nothing is gained by passing over it.
    #[test]
    fn a_pinned_block_has_its_turn_at_once_also_when_the_disk_lags() {
        let mut line = Line::default();
        assert!(line.pop(SHORT).is_none());
        line.push(pinned(1));
        (2..=20).map(waiting).for_each(|one| line.push(one));
        let waits = Turns {
            pins_wait: true,
            ..SHORT
        };
        assert!(line.pop(waits).is_none(), "no other block has its turn");
        let first = line.pop(SHORT).map(|one| one.version);
        assert_eq!(first, Some(Version(1)));
        assert_eq!((line.pinned_bytes, line.bytes), (0, 3));
        // A pinned block shows nothing about the reach of eviction.
        assert_eq!(line.had_turn, Version::default());
    }

    #[test]
    fn pinned_blocks_alone_can_have_their_turn() {
        let mut line = Line::default();
        line.push(waiting(1));
        line.push(pinned(2));
        let turns = |only_pins| Turns {
            kept: 0,
            only_pins,
            ..SHORT
        };
        let mut taken = |only_pins| line.pop(turns(only_pins)).map(|one| one.version.0);
        assert_eq!(taken(true), Some(2));
        assert_eq!(taken(true), None);
        assert_eq!(taken(false), Some(1));
    }

    #[test]
    fn a_line_at_a_quota_is_bounded_and_a_walk_keeps_its_blocks() {
        let mut demotions = Demotions::default();
        demotions.expect(NODE);
        let line = demotions.nodes.get_mut(&NODE).unwrap();
        assert!(line.pop(SHORT).is_none());
        line.put_at_quota((1..=7).map(pinned).collect());
        assert_eq!(line.at_quota.len(), 6, "twice the bound of other blocks");
        assert!(!line.take_missed_pins(), "others wait");
        assert_eq!(line.pop_at_quota().map(|one| one.version.0), Some(2));
        demotions.found(NODE, vec![pinned(1)]);
        let line = demotions.nodes.get_mut(&NODE).unwrap();
        let queued: Vec<u64> = line.pinned.iter().map(|one| one.version.0).collect();
        assert_eq!(queued, [1, 3, 4, 5, 6, 7]);
        assert!(line.at_quota.is_empty());
        while line.pop(SHORT).is_some() {}
        assert!(line.take_missed_pins());
        demotions.begin_drain(NODE, Tick(5));
        let line = demotions.nodes.get_mut(&NODE).unwrap();
        line.put_at_quota(vec![pinned(8)]);
        assert!(line.at_quota.is_empty(), "the walk of the drain finds it");
    }

    /// The first ones may wait for days: for the write budget of a medium of one namespace.
    #[test]
    fn pinned_blocks_that_wait_for_one_medium_let_those_of_another_go_first() {
        for (is_most, first) in [(true, 3), (false, 1)] {
            let mut line = Line::default();
            (1..=3).map(pinned).for_each(|one| line.push(one));
            line.push(waiting(4));
            let held: Vec<Waiting> = (0..2).filter_map(|_| line.pop(SHORT)).collect();
            line.give_back(held, is_most);
            assert_eq!((line.pinned_bytes, line.bytes), (3, 1));
            let next = line.pop(SHORT).map(|one| one.version);
            assert_eq!(next, Some(Version(first)));
        }
        let mut line = Line {
            drains: Some(Tick(1)),
            ..Line::default()
        };
        (1..=2).map(pinned).for_each(|one| line.push(one));
        let held = line.pop(SHORT).into_iter().collect();
        line.give_back(held, true);
        let next = line.pop(SHORT).map(|one| one.version);
        assert_eq!(next, Some(Version(1)), "a drain keeps its order");
    }

    /// The key of a pinned block may be put again and again while the disk hangs.
    #[test]
    fn pinned_blocks_that_a_long_queue_dropped_are_found_by_a_walk() {
        let mut line = Line::default();
        assert!(line.pop(SHORT).is_none());
        (1..=6).map(pinned).for_each(|one| line.push(one));
        assert!(!line.has_missed_pins);
        line.push(pinned(7));
        assert_eq!((line.pinned.len(), line.pinned_bytes), (6, 6));
        assert!(!line.take_missed_pins(), "the others go first");
        let taken = std::iter::from_fn(|| line.pop(SHORT)).map(|one| one.version.0);
        let taken: Vec<u64> = taken.collect();
        assert_eq!(taken, [2, 3, 4, 5, 6, 7]);
        assert!(line.take_missed_pins());
        assert!(!line.take_missed_pins());
    }

    /// The later walk finds every block of the node.
    #[test]
    fn a_walk_of_a_drain_that_began_again_queues_nothing() {
        let mut demotions = Demotions::default();
        let first = demotions.begin_drain(NODE, Tick(5));
        let second = demotions.begin_drain(NODE, Tick(6));
        demotions.end_walk(NODE, first, vec![waiting(1)]);
        let turn = demotions
            .nodes
            .get_mut(&NODE)
            .unwrap()
            .pop(Turns::default());
        assert!(turn.is_none() && versions(&demotions).is_empty());
        demotions.nodes.get_mut(&NODE).unwrap().push(waiting(9));
        demotions.end_walk(NODE, second, vec![waiting(2)]);
        assert_eq!(versions(&demotions), [9, 2]);
        assert_eq!(demotions.nodes[&NODE].drains, Some(Tick(5)));
    }

    #[test]
    fn a_walk_brings_no_line_to_a_node_that_left() {
        let mut demotions = Demotions::default();
        demotions.expect(NODE);
        demotions.forget(NODE);
        demotions.found(NODE, vec![waiting(1)]);
        assert!(demotions.nodes.is_empty());
    }
}
