//! The demoter: a thread that stores blocks on media before eviction needs their memory.
//!
//! Blocks are queued in the order of their commits, one queue per node (a [`Line`](super::lines)). A block is
//! stored once. So eviction only drops blocks that have a copy, and no put waits for a disk. If the thread
//! lags, it skips the blocks that eviction takes next. They leave memory without a copy, as they do without
//! media.
//!
//! With the policy `lru`, a block's *turn* to be stored comes when many bytes are queued after it.
//! These bytes exceed the share [`WITHOUT_COPY`] of the memory that eviction can reach. It is then
//! among the blocks that eviction takes next. Leases and pins hold the rest of the node's memory,
//! which eviction does not reach. A block that is evicted before its turn shows how far eviction
//! reaches.
//!
//! With the policy `prefix`, eviction takes the ends of chains, whatever their age. So every block's turn
//! comes at once when more than [`WITHOUT_COPY`] of the node's memory is used.
//!
//! A hard-pinned block has its turn at once, and is never skipped.

use super::super::Pool;
use super::lines::{Line, Turn, Turns, WITHOUT_COPY, Waiting};
use super::transfers::{Direction, Moved, Transfer, store_order};
use super::{Emptying, Place, TakesStores, Tiering, Use, WINDOW};
use crate::directory::{Policy, Removed, Tick};
use crate::membership::StoreNode;
use crate::placement::share;
use crate::replica::{BlockId, Replica};
use crate::store::journal::Ack;
use crate::store::record::Record;
use crate::tier::{Medium, Taken};
use crate::workers::Workers;
use kvpool_proto::MediumState;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Incarnation, Key, Length, SegmentId, Version};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::runtime::Handle;

/// With `lru`, the share of the node's memory beyond which a queued block is skipped: eviction would take it
/// before its copy is recorded. So a disk that is slower than the puts stores as many blocks as it can.
const GIVE_UP: f64 = 0.9;
/// The longest time between two rounds of the thread.
const TICK: Duration = Duration::from_millis(20);
/// The number of blocks that are examined under one lock.
const STEP: usize = 256;
/// The most blocks that wait for busy media while later blocks go to other media.
pub(super) const MOST_HELD: usize = 256;
/// The most hard-pinned blocks among them.
const MOST_PINS_HELD: usize = MOST_HELD / 2;
/// The most hard-pinned blocks at a quota of media that are examined in one round.
pub(super) const MOST_AT_QUOTA: usize = 128;

/// A node, and its media that take stores.
pub(super) struct Target {
    pub(super) node: Arc<StoreNode>,
    session: u64,
    /// The media, each with the bytes of its written zone that are reserved for moved copies.
    pub(super) media: Vec<(Arc<Medium>, Length)>,
}

/// A block that was put into memory.
pub(in crate::pool) struct Put<'b> {
    pub(in crate::pool) namespace: NamespaceId,
    pub(in crate::pool) key: &'b Key,
    pub(in crate::pool) parent: Option<&'b Key>,
    pub(in crate::pool) block: BlockId,
    pub(in crate::pool) version: Version,
    pub(in crate::pool) bytes: u64,
    pub(in crate::pool) hard_pin: bool,
    pub(in crate::pool) replicas: &'b [Replica],
}

/// Starts the demoter.
pub(in crate::pool) fn start(pool: &Arc<Pool>, workers: Workers) -> std::io::Result<()> {
    let runtime = Handle::current();
    workers.start(
        pool,
        "demoter",
        |pool| &pool.tiering.wake,
        TICK,
        move |pool| {
            pool.give_up_refused();
            if pool.has_media() && pool.leads() {
                // These calls may scan all blocks, so this thread makes them and the evictor never
                // waits.
                pool.drop_absent_media();
                pool.replace_lost_copies();
                pool.tend_media();
                pool.end_stopped_drains(&runtime);
                pool.ask_for_wanted_room();
            }
            TICK
        },
    )
}

impl Tiering {
    /// Removes and returns the nodes whose drains end because none of their media takes stores any more.
    fn take_stopped_drains(&self) -> Vec<Arc<StoreNode>> {
        let mut demotions = self.demotions.lock();
        let is_open = |line: &Line| line.drains.is_some() && !line.is_told;
        let traffic = self.traffic.lock();
        let mut stopped: BTreeMap<Incarnation, (Arc<StoreNode>, bool)> = BTreeMap::new();
        for (id, used) in &traffic.uses {
            let line = demotions.nodes.get(&used.node.incarnation);
            if used.is_attached && used.is_in_session() && line.is_some_and(is_open) {
                let node = stopped.entry(used.node.incarnation);
                let (_, all) = node.or_insert_with(|| (Arc::clone(&used.node), true));
                *all &= used.has_stopped(|| traffic.writes_to(*id));
            }
        }
        let stopped = stopped.into_values().filter(|(_, all)| *all);
        let stopped: Vec<_> = stopped.map(|(node, _)| node).collect();
        for node in &stopped {
            demotions.forget(node.incarnation);
        }
        stopped
    }
}

impl Pool {
    /// Queues the blocks of puts.
    pub(in crate::pool) fn queue_for_media<'b>(&self, puts: impl Iterator<Item = Put<'b>>) {
        if self.queue_in_lines(puts) {
            self.tiering.wake();
        }
    }

    /// Queues blocks that came to memory. Returns whether one of them is hard-pinned, or a store of a queued block is
    /// due. The caller wakes the demoter, unless a reader would wait for that.
    pub(super) fn queue_in_lines<'b>(&self, puts: impl Iterator<Item = Put<'b>>) -> bool {
        if self.tier.is_empty() {
            return false;
        }
        let segments = self.placement.segments();
        let mut demotions = self.tiering.demotions.lock();
        let mut traffic = self.tiering.traffic.lock();
        let mut is_due = false;
        for put in puts {
            // A store of an earlier version must not leave a copy.
            traffic
                .stores
                .version_changed(put.namespace, put.key, put.version);
            let waiting = Waiting {
                block: put.block,
                version: put.version,
                bytes: put.bytes,
                was_lost: self.tiering.admission.was_lost(put.namespace, put.key),
                is_pinned: put.hard_pin,
                parent: self.tiering.admission.parent(put.parent),
            };
            for replica in put.replicas {
                if let Some(segment) = segments.get(replica.segment)
                    && let Some(line) = demotions.nodes.get_mut(&segment.node.incarnation)
                {
                    line.push(waiting.clone());
                    is_due |= put.hard_pin || line.bytes > line.kept;
                }
            }
        }
        is_due
    }

    /// Queues every block of these nodes that has no copy, because a medium was attached or copies were lost.
    pub(super) fn queue_all_of(&self, nodes: &[Arc<StoreNode>]) {
        // A block that is put during the scan may be queued twice, and is stored once.
        let mut demotions = self.tiering.demotions.lock();
        nodes
            .iter()
            .for_each(|node| demotions.expect(node.incarnation));
        drop(demotions);
        for (node, mut found) in nodes.iter().zip(self.without_copy(nodes)) {
            found.sort_by_key(|(_, one)| one.version);
            let found = found.into_iter().map(|(_, one)| one).collect();
            self.tiering.demotions.lock().found(node.incarnation, found);
        }
    }

    /// Whether an attached medium of the node takes stores.
    pub(in crate::pool) fn stores_on_media_of(&self, node: &StoreNode) -> bool {
        self.tiering.takes_stores_of(node) == Some(TakesStores::Now)
    }

    /// Whether an attached medium of the node takes stores, now or once it answers again.
    pub(in crate::pool) fn may_store_on_media_of(&self, node: &StoreNode) -> bool {
        self.tiering.takes_stores_of(node) >= Some(TakesStores::Later)
    }

    /// Gives every block of a draining node its turn at once, the most recently used first, since the node
    /// leaves soon.
    pub(in crate::pool) fn demote_all_of(&self, node: &Arc<StoreNode>) {
        // The attachment of a medium later begins the drain.
        if self.tiering.takes_stores_of(node).is_none() {
            return;
        }
        // Zones that were sealed before, also in this moment, do not count as zones of this drain.
        let _earlier = self.directory.ticks(1);
        let since = self.directory.next_tick();
        // The queue is started before the scan, so that a copy that is dropped meanwhile queues its block
        // here.
        let mut demotions = self.tiering.demotions.lock();
        // Checked under the lock: a cancellation changes the state first and then ends the queue
        // under the lock.
        if !node.drains() {
            return;
        }
        let walk = demotions.begin_drain(node.incarnation, since);
        drop(demotions);
        self.walk_for_drain(node, walk);
    }

    /// Ends the queue of a cancelled drain. The node's blocks then wait for their turns as before the drain.
    pub(in crate::pool) fn end_line_of_drain(self: &Arc<Self>, node: &Arc<StoreNode>) {
        let may_store = self.may_store_on_media_of(node);
        let mut demotions = self.tiering.demotions.lock();
        // The node may stop meanwhile. The queue then belongs to the stop, or the stop starts a new
        // one.
        if node.drains() {
            return;
        }
        demotions.end_drain(node.incarnation);
        if !may_store {
            // Nothing would take blocks out of the queue, and it would grow with each put.
            demotions.forget(node.incarnation);
        }
        drop(demotions);
        if may_store {
            let (pool, node) = (Arc::clone(self), Arc::clone(node));
            // The task scans all blocks.
            tokio::spawn(async move {
                pool.queue_all_of(std::slice::from_ref(&node));
                pool.tiering.wake();
            });
        }
    }

    /// Begins the drain of a node again, unless the node was told that its blocks have their copies. Returns
    /// the number of the scan that the caller makes.
    pub(super) fn drain_again(&self, node: &StoreNode) -> Option<u64> {
        let mut demotions = self.tiering.demotions.lock();
        let line = demotions.nodes.get(&node.incarnation)?;
        let since = line.drains.filter(|_| !line.is_told)?;
        Some(demotions.begin_drain(node.incarnation, since))
    }

    /// Queues every block of a draining node that has no copy, and ends the scan.
    pub(super) fn walk_for_drain(&self, node: &Arc<StoreNode>, walk: u64) {
        let found = match self.tiering.takes_stores_of(node) {
            // The next attachment scans again. Until then no block has its turn, and the node is not told.
            None => return,
            // The demoter thread ends the drain.
            Some(TakesStores::Never) => None,
            // The demoter thread works on the queue when the medium has answered.
            Some(TakesStores::Later | TakesStores::Now) => {
                self.without_copy(std::slice::from_ref(node)).pop()
            }
        };
        let mut found = found.unwrap_or_default();
        found.sort_by_key(|(tick, _)| std::cmp::Reverse(*tick));
        let found = found.into_iter().map(|(_, one)| one).collect();
        let mut demotions = self.tiering.demotions.lock();
        demotions.end_walk(node.incarnation, walk, found);
        drop(demotions);
        self.tiering.wake();
    }

    /// Ends the drains to media that take no stores any more, since no further order would end them.
    fn end_stopped_drains(self: &Arc<Self>, runtime: &Handle) {
        for node in self.tiering.take_stopped_drains() {
            let pool = Arc::clone(self);
            runtime.spawn(async move { pool.save_without_media(&node).await });
        }
    }

    /// Moves the blocks of a draining node without a copy to other nodes, if the node waits for this.
    async fn save_without_media(self: &Arc<Self>, node: &Arc<StoreNode>) {
        // The drain may have been cancelled meanwhile.
        let Some(asked) = node.question() else {
            return;
        };
        let is_moved = self.save_after_task_off(node);
        let moves = is_moved || node.waits_for_moves();
        tracing::warn!(node = %node.name, moves, "no medium of a draining node takes stores");
        match moves {
            true if is_moved => {}
            true => self.move_all_of(node).await,
            false => self.tell_saved(node, asked),
        }
    }

    /// For each node, the blocks in its memory without a copy, with their last uses. Scans the directory
    /// once.
    fn without_copy(&self, nodes: &[Arc<StoreNode>]) -> Vec<Vec<(Tick, Waiting)>> {
        let of_segment: HashMap<SegmentId, usize> = (0..)
            .zip(nodes)
            .flat_map(|(index, node)| node.segments().into_iter().map(move |id| (id, index)))
            .collect();
        let mut all = vec![Vec::new(); nodes.len()];
        let mut page = Vec::new();
        loop {
            let mut found = Vec::new();
            let next = self.directory.scan(&page, STEP, |block| {
                let replicas = block.replicas();
                let here = replicas.iter().filter_map(|r| of_segment.get(&r.segment));
                let here: SmallVec<[usize; 2]> = here.copied().collect();
                if !here.is_empty() {
                    let waiting = Waiting {
                        block: block.id(),
                        version: block.version(),
                        bytes: block.length().0,
                        was_lost: false,
                        is_pinned: block.is_hard_pinned(),
                        parent: None,
                    };
                    found.push((here, block.namespace(), block.key(), block.tick(), waiting));
                }
            });
            for (here, namespace, key, tick, waiting) in found {
                for index in here {
                    let node = nodes.get(index).map(|node| &**node);
                    if !self.has_kept_copy(namespace, &key, waiting.version, node)
                        && let Some(of_node) = all.get_mut(index)
                    {
                        of_node.push((tick, waiting.clone()));
                    }
                }
            }
            match next {
                Ok(Some(further)) => page = further,
                _ => return all,
            }
        }
    }

    /// Orders the stores that are due. Returns the tick at which the call began: every block that was put
    /// before this tick was in its queue by then. Without media the tick is later than every use.
    ///
    /// The caller holds no lock, because the emptying of a zone takes the lock `evicting`.
    pub(in crate::pool) fn order_stores(self: &Arc<Self>) -> Tick {
        if !self.has_media() {
            return Tick::MAX;
        }
        let before = {
            let _no_block_between_directory_and_line = self.tiering.queueing.lock();
            self.directory.next_tick()
        };
        self.tend_media();
        before
    }

    /// Orders the stores that are due.
    pub(in crate::pool) fn tend_media(self: &Arc<Self>) {
        // The log takes no records, so no copy could be recorded.
        if !self.takes_records() {
            return;
        }
        let _one_at_a_time = self.tiering.tending.lock();
        let mut targets: BTreeMap<Incarnation, Target> = BTreeMap::new();
        for medium in self.tier.media() {
            let node = {
                let traffic = self.tiering.traffic.lock();
                let used = traffic.uses.get(&medium.id);
                used.filter(|used| used.takes_stores())
                    .map(|used| (Arc::clone(&used.node), used.session))
            };
            let Some((node, session)) = node else {
                continue;
            };
            // Copies of this drain stay, since the remaining blocks are less recently used. Copies
            // that the node was told about stay too.
            let is_full = self
                .drains_since(&node)
                .is_some_and(|since| medium.oldest_sealed() >= since);
            let reserved = match is_full || self.is_told(&node) {
                true => Length(0),
                false => self.empty_next_zone(&medium, &node, session),
            };
            let target = targets.entry(node.incarnation).or_insert_with(|| Target {
                node,
                session,
                media: Vec::new(),
            });
            target.media.push((medium, reserved));
        }
        for target in targets.into_values() {
            self.demote(&target);
        }
    }

    /// Orders stores until no medium of the node takes more, or no store is due.
    fn demote(self: &Arc<Self>, target: &Target) {
        let Target { node, media, .. } = target;
        let (memory, used) = {
            let segments = self.placement.segments();
            let own = segments
                .iter()
                .filter(|segment| Arc::ptr_eq(&segment.node, node));
            own.fold((0, 0), |(memory, used), segment| {
                (memory + segment.limit(), used + segment.used())
            })
        };
        let cursors: Vec<u32> = media.iter().map(|(medium, _)| medium.cursor()).collect();
        let (mut busy, mut held, mut is_all) = (HashSet::new(), Vec::new(), false);
        let (mut pins_held, mut only_pins) = (0, true);
        let mut at_quota = Vec::new();
        let may_take = |medium: &Medium, busy: &HashSet<SegmentId>| {
            !busy.contains(&medium.id) && self.has_window(medium.id)
        };
        while held.len() < MOST_HELD && media.iter().any(|(medium, _)| may_take(medium, &busy)) {
            let next = {
                let mut demotions = self.tiering.demotions.lock();
                let line = demotions.nodes.get_mut(&node.incarnation);
                line.and_then(|line| {
                    let is_enough = at_quota.len() >= MOST_AT_QUOTA;
                    let turns = Turns {
                        pins_wait: pins_held >= MOST_PINS_HELD || is_enough,
                        only_pins,
                        ..self.turns(memory, used, line)
                    };
                    let next = match line.pop(turns) {
                        None if !is_enough => line.pop_at_quota(),
                        next => next,
                    };
                    Some((next?, line.drains))
                })
            };
            let Some((waiting, drains)) = next else {
                if std::mem::take(&mut only_pins) {
                    self.store_moved(target, &mut busy);
                    continue;
                }
                is_all = true;
                break;
            };
            match self.store_one(&waiting, target, (drains, None), &mut busy) {
                Turn::Ended => {}
                // Blocks behind this one may be for another medium.
                Turn::NotNow => {
                    pins_held += usize::from(waiting.is_pinned);
                    held.push(waiting);
                }
                Turn::AtQuota => at_quota.push(waiting),
                Turn::Later => {
                    let mut demotions = self.tiering.demotions.lock();
                    if let Some(line) = demotions.nodes.get_mut(&node.incarnation) {
                        line.put_aside(waiting);
                    }
                }
            }
        }
        if !held.is_empty() || !at_quota.is_empty() {
            let mut demotions = self.tiering.demotions.lock();
            if let Some(line) = demotions.nodes.get_mut(&node.incarnation) {
                line.give_back(held, pins_held >= MOST_PINS_HELD);
                line.put_at_quota(at_quota);
            }
        }
        if is_all {
            self.look_for_missed_pins(node);
            self.tell_demoted(target);
        }
        for ((medium, _), cursor) in media.iter().zip(cursors) {
            if medium.cursor() != cursor {
                // The record need not be durable: a restart with an older cursor only changes which
                // zone is emptied first.
                let record = Record::Medium(medium.record());
                self.journal().insist(vec![record], Ack::Durable, |_| {});
            }
        }
    }

    /// Has all blocks scanned again if hard-pinned ones were dropped from the queue of the node.
    fn look_for_missed_pins(&self, node: &StoreNode) {
        let mut demotions = self.tiering.demotions.lock();
        let line = demotions.nodes.get_mut(&node.incarnation);
        if line.is_some_and(Line::take_missed_pins) {
            self.tiering.has_lost_copies.store(true, Ordering::Release);
        }
    }

    /// The positions in a node's queue at which blocks have their turn and are skipped.
    fn turns(&self, memory: u64, used: u64, line: &Line) -> Turns {
        let without = share(memory, WITHOUT_COPY);
        match self.config.eviction_policy {
            Policy::Prefix => Turns {
                kept: match used <= without {
                    true => line.bytes + (without - used),
                    false => 0,
                },
                // Eviction may take any block next. So a queued block that may still be in memory is never
                // skipped.
                most: memory.saturating_mul(2),
                pins_wait: false,
                only_pins: false,
            },
            Policy::Lru => Turns {
                kept: share(line.reach.unwrap_or(memory).min(memory), WITHOUT_COPY),
                most: share(memory, GIVE_UP),
                pins_wait: false,
                only_pins: false,
            },
        }
    }

    /// Records that a block was evicted from memory.
    pub(super) fn evicted_beside_media(&self, block: &Removed, has_copy: bool) {
        let segments = self.placement.segments();
        let mut demotions = self.tiering.demotions.lock();
        let mut is_early = false;
        for replica in &block.replicas {
            if let Some(segment) = segments.get(replica.segment)
                && let Some(line) = demotions.nodes.get_mut(&segment.node.incarnation)
            {
                is_early |= line.evicted(block.version, block.length, has_copy);
            }
        }
        drop((demotions, segments));
        if is_early {
            self.tiering.wake();
        }
    }

    /// The tick since which a node drains.
    fn drains_since(&self, node: &StoreNode) -> Option<Tick> {
        let demotions = self.tiering.demotions.lock();
        demotions.nodes.get(&node.incarnation)?.drains
    }

    /// Whether a draining node was told that its blocks have their copies.
    pub(super) fn is_told(&self, node: &StoreNode) -> bool {
        let demotions = self.tiering.demotions.lock();
        let line = demotions.nodes.get(&node.incarnation);
        line.is_some_and(|line| line.drains.is_some() && line.is_told)
    }

    pub(super) fn has_window(&self, medium: SegmentId) -> bool {
        let traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get(&medium);
        used.is_some_and(|used| used.in_flight < WINDOW)
    }

    /// Orders the store of one block on the first medium that takes it. `busy` are the media that refused a
    /// block in this round. They get no other block, so that the blocks of each medium keep their order. A block that
    /// `moved` off other media has its last use there.
    pub(super) fn store_one(
        self: &Arc<Self>,
        waiting: &Waiting,
        target: &Target,
        (drains, moved): (Option<Tick>, Option<Tick>),
        busy: &mut HashSet<SegmentId>,
    ) -> Turn {
        let node = &target.node;
        let Some((block, from)) = self.to_store(waiting, node) else {
            return Turn::Ended;
        };
        // The copy would not be recorded now, and the put may fail.
        if block.hard_pin && self.has_other_put(&block) {
            return Turn::NotNow;
        }
        // Memory keeps the block until the other copy is there. A second one would be written in vain.
        if block.hard_pin && drains.is_none() {
            if self.is_being_copied(&block) {
                return Turn::NotNow;
            }
            // Its record may have ended between the two questions. The tier has the copy then.
            if self.to_store(waiting, node).is_none() {
                return Turn::Ended;
            }
        }
        let mut turn = match self.has_slow_medium(node, target.session, block.namespace) {
            true => Turn::Later,
            false => Turn::Ended,
        };
        // Memory does not lose a hard-pinned block meanwhile. A drain must end.
        let waits_for_quota = waiting.is_pinned && drains.is_none() && moved.is_none();
        let (mut too_long, mut is_refused) = (0, false);
        for (medium, reserved) in &target.media {
            if !self.serves_namespace(medium.id, block.namespace) {
                continue;
            }
            if let Turn::Later = turn {
                turn = Turn::Ended;
            }
            if busy.contains(&medium.id) || !self.has_window(medium.id) {
                busy.insert(medium.id);
                turn = Turn::NotNow;
                continue;
            }
            // Older copies are dropped with their zones, which frees space for this block's copy.
            let Ok(hold) = self.hold_media_quota(block.namespace, block.length) else {
                if waits_for_quota {
                    turn = Turn::AtQuota;
                } else {
                    is_refused = true;
                }
                continue;
            };
            if let Some(used) = moved {
                if !medium.takes_old(block.length, used) {
                    continue;
                }
                if !self.may_write(medium) {
                    // The budget grows.
                    busy.insert(medium.id);
                    turn = Turn::NotNow;
                    continue;
                }
            } else if drains.is_none() && !self.is_admitted(medium, waiting, &block) {
                // A hard-pinned block waits for the budget. Memory does not lose it meanwhile.
                match waiting.is_pinned {
                    true => turn = Turn::NotNow,
                    false => is_refused = true,
                }
                continue;
            }
            // A drain that wrote on would soon empty its own first zone, which holds the most
            // recently used blocks.
            let is_full = drains.is_some_and(|since| medium.oldest_sealed() >= since);
            if is_full && medium.makes_next_due(block.length) {
                continue;
            }
            match medium.take_beside(*reserved, block.length, self.directory.next_tick()) {
                Taken::At(offset) => {
                    let place = Place {
                        medium: medium.id,
                        offset,
                    };
                    let admission = &self.tiering.admission;
                    admission.wrote(medium.id, block.length);
                    admission.admitted(block.namespace, &block.key);
                    let order = store_order(&block, from, place);
                    let transfer = Transfer {
                        node: Arc::clone(node),
                        session: target.session,
                        block,
                        place,
                        direction: Direction::Store,
                        _hold: hold,
                    };
                    let mut traffic = self.tiering.traffic.lock();
                    if traffic.begin(medium, transfer, order) {
                        return Turn::Ended;
                    }
                    busy.insert(medium.id);
                    return Turn::NotNow;
                }
                // The medium is full of more recently used blocks.
                Taken::NeedsZone if is_full => {}
                Taken::NeedsZone => {
                    busy.insert(medium.id);
                    turn = Turn::NotNow;
                }
                Taken::TooLong => too_long += 1,
            }
        }
        // A block that waits for another medium does not count as refused yet.
        if is_refused && matches!(turn, Turn::Ended) {
            self.metrics.copy_refused();
        }
        if too_long > 0 && too_long == target.media.len() {
            self.metrics.copy_too_long();
            tracing::debug!(key = %block.key.shown(), length = %block.length,
                "block gets no copy: it is longer than a zone of every medium of its node");
        }
        turn
    }

    /// Queues the blocks that waited for a slow medium of the node, because the medium's state has
    /// changed.
    pub(super) fn take_back_what_waited(&self, node: &StoreNode) {
        let mut demotions = self.tiering.demotions.lock();
        let line = demotions.nodes.get_mut(&node.incarnation);
        let has_some = line.is_some_and(Line::take_back);
        drop(demotions);
        if has_some {
            self.tiering.wake();
        }
    }

    /// The block to store; `None` if it has left memory or has a copy.
    fn to_store(&self, waiting: &Waiting, node: &StoreNode) -> Option<(Moved, Replica)> {
        let own = node.segments();
        let found = self
            .directory
            .read_block(waiting.block, waiting.version, |block| {
                let replicas = block.replicas();
                let from = replicas.iter().find(|r| own.contains(&r.segment)).copied();
                let moved = Moved::of(&block);
                from.map(|from| (moved, from))
            });
        let (block, from) = found.flatten()?;
        let is_copied = self.has_kept_copy(block.namespace, &block.key, block.version, Some(node));
        (!is_copied).then_some((block, from))
    }

    /// Queues a block in memory whose copy was dropped, if it was used since `since`. It goes to the
    /// head of the queue, since it is older than all other blocks there. A block that was not used
    /// gets no copy; otherwise a medium smaller than memory would be rewritten forever. On a
    /// draining node every such block is queued, since the node leaves soon. Returns false if
    /// memory does not hold the block.
    ///
    /// If the hard-pinned copies do not fit their medium (`pins_fit`), each new one drops another.
    /// So their blocks wait for their turns as others do.
    pub(super) fn queue_again(&self, removed: &Removed, since: Tick, pins_fit: bool) -> bool {
        let block = (removed.namespace, &removed.key, removed.version);
        let Some((replicas, mut waiting, used)) = self.waiting_again(block) else {
            return false;
        };
        waiting.is_pinned &= pins_fit;
        let was_used = used > since;
        let segments = self.placement.segments();
        let mut demotions = self.tiering.demotions.lock();
        for replica in replicas {
            if let Some(segment) = segments.get(replica.segment)
                && let Some(line) = demotions.nodes.get_mut(&segment.node.incarnation)
                && (was_used || line.drains.is_some())
            {
                line.push_front(waiting.clone());
            }
        }
        true
    }

    /// A block in memory that lost its copy or got none, with its replicas and its last use.
    pub(super) fn waiting_again(
        &self,
        (namespace, key, version): (NamespaceId, &Key, Version),
    ) -> Option<(Vec<Replica>, Waiting, Tick)> {
        let mut found = None;
        let keys = [key.as_ref()];
        self.directory.visit(namespace, &keys[..], |_, block| {
            let block = block.filter(|block| block.version() == version);
            found = block.map(|block| {
                let waiting = Waiting {
                    block: block.view().id(),
                    version,
                    bytes: block.length().0,
                    was_lost: true,
                    is_pinned: block.view().is_hard_pinned(),
                    parent: None,
                };
                (block.replicas().to_vec(), waiting, block.view().tick())
            });
        });
        found
    }

    /// Tells a draining node once that its blocks have their copies.
    fn tell_demoted(&self, target: &Target) {
        // Read before the queue is examined. The cancellation of this drain ends the queue.
        let Some(asked) = target.node.question() else {
            return;
        };
        {
            let mut demotions = self.tiering.demotions.lock();
            // A report that has come since may have begun the drain anew. The next round answers it.
            let is_latest = target.node.question() == Some(asked);
            let line = demotions.nodes.get_mut(&target.node.incarnation);
            let Some(line) = line.filter(|_| is_latest) else {
                return;
            };
            let traffic = self.tiering.traffic.lock();
            let is_busy = |(medium, used): (&SegmentId, &Use)| {
                let is_ours = used.is_of(&target.node, target.session);
                if !is_ours || !used.is_attached || used.state == MediumState::MediumGone {
                    return false;
                }
                // Emptying a zone removes copies.
                if used.takes_stores() && !matches!(used.emptying, Emptying::Idle) {
                    return true;
                }
                // Stores in progress may still be recorded. Readers may begin one load after another.
                traffic.writes_to(*medium)
            };
            let is_open = line.drains.is_some() && line.walk.is_none() && !line.is_told;
            if !is_open || traffic.uses.iter().any(is_busy) {
                return;
            }
            // A store that left no copy may have returned its block to the queue since the queue was found
            // empty.
            let refused = self.tiering.refused.lock();
            let is_ours =
                |transfer: &Transfer| transfer.node.incarnation == target.node.incarnation;
            if !line.is_empty() || refused.iter().any(is_ours) {
                return;
            }
            line.is_told = true;
        }
        self.tell_saved(&target.node, asked);
    }
}
