//! The thread that copies blocks to media before memory needs their room, and empties zones.
//!
//! Blocks queue in the order of their commits, by node. A block's turn comes when the blocks behind
//! it fill the larger part of the node's memory: it is then among those that eviction takes next. A
//! block is copied once. So pressure on memory only drops blocks that have a copy, and no put waits
//! for a disk. When the thread lags, eviction takes blocks without a copy, as it does without media.

use super::super::Pool;
use super::transfers::{Direction, Moved, Transfer, store_order};
use super::{Emptying, Place, WINDOW};
use crate::directory::{BlockRef, Verdict};
use crate::membership::StoreNode;
use crate::placement::share;
use crate::replica::{BlockId, Replica};
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use crate::tier::{Medium, Taken};
use kvpool_types::{Incarnation, SegmentId, Version};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The share of a node's memory that holds the latest blocks, which have no copy yet.
const WITHOUT_COPY: f64 = 0.8;
/// How long the thread waits without a wake-up.
const TICK: Duration = Duration::from_millis(20);
/// Blocks examined under one lock.
const STEP: usize = 256;

/// The blocks without a copy, by node.
#[derive(Debug, Default)]
pub(super) struct Demotions {
    nodes: HashMap<Incarnation, Line>,
}

/// The blocks of one node, earliest commit first.
#[derive(Debug, Default)]
struct Line {
    blocks: VecDeque<Waiting>,
    bytes: u64,
    /// True when the node drains: then every block has its turn at once.
    all: bool,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    block: BlockId,
    version: Version,
    bytes: u64,
}

impl Line {
    fn push(&mut self, waiting: Waiting) {
        self.bytes += waiting.bytes;
        self.blocks.push_back(waiting);
    }

    /// The first block, if the blocks behind it have more than `kept` bytes.
    fn pop(&mut self, kept: u64) -> Option<Waiting> {
        if !self.all && self.bytes <= kept {
            return None;
        }
        let first = self.blocks.pop_front()?;
        self.bytes -= first.bytes;
        Some(first)
    }

    fn push_front(&mut self, waiting: Waiting) {
        self.bytes += waiting.bytes;
        self.blocks.push_front(waiting);
    }
}

/// Starts the thread.
pub(in crate::pool) fn start(pool: &Arc<Pool>) -> std::io::Result<()> {
    let pool = Arc::clone(pool);
    std::thread::Builder::new()
        .name("demoter".into())
        .spawn(move || {
            while !pool.is_stopping() {
                pool.tiering.wait(TICK);
                if pool.has_media() && !pool.is_stopping() && pool.leads() {
                    pool.tend_media();
                }
            }
        })?;
    Ok(())
}

impl Pool {
    /// Queues blocks that were put into memory.
    pub(in crate::pool) fn queue_for_media<'b>(
        &self,
        blocks: impl Iterator<Item = (BlockId, Version, u64, &'b [Replica])>,
    ) {
        if self.tier.is_empty() {
            return;
        }
        let segments = self.placement.segments();
        let mut demotions = self.tiering.demotions.lock();
        for (block, version, bytes, replicas) in blocks {
            let waiting = Waiting {
                block,
                version,
                bytes,
            };
            for replica in replicas {
                if let Some(segment) = segments.get(replica.segment)
                    && let Some(line) = demotions.nodes.get_mut(&segment.node.incarnation)
                {
                    line.push(waiting);
                }
            }
        }
    }

    /// Queues every block of a node that has no copy yet: its first medium was attached.
    pub(super) fn queue_all_of(&self, node: &StoreNode) {
        // From here on new blocks are queued. A block that the scan finds too is queued twice, and copied once.
        let mut demotions = self.tiering.demotions.lock();
        demotions.nodes.insert(node.incarnation, Line::default());
        drop(demotions);
        let mut line = Line::default();
        let own = node.segments();
        let mut page = Vec::new();
        loop {
            let mut found = Vec::new();
            let next = self.directory.scan(&page, STEP, |block| {
                if block.replicas().iter().any(|r| own.contains(&r.segment)) {
                    found.push((
                        block.namespace(),
                        block.key(),
                        Waiting {
                            block: block.id(),
                            version: block.version(),
                            bytes: block.length().0,
                        },
                    ));
                }
            });
            for (namespace, key, waiting) in found {
                if !self.is_on_medium(namespace, &key, waiting.version) {
                    line.push(waiting);
                }
            }
            match next {
                Ok(Some(further)) => page = further,
                _ => break,
            }
        }
        line.blocks.make_contiguous().sort_by_key(|one| one.version);
        let mut demotions = self.tiering.demotions.lock();
        let newer = demotions.nodes.insert(node.incarnation, line);
        if let (Some(newer), Some(line)) = (newer, demotions.nodes.get_mut(&node.incarnation)) {
            newer.blocks.into_iter().for_each(|one| line.push(one));
        }
    }

    /// Every block of a draining node has its turn at once.
    pub(in crate::pool) fn demote_all_of(&self, node: &StoreNode) {
        let mut demotions = self.tiering.demotions.lock();
        if let Some(line) = demotions.nodes.get_mut(&node.incarnation) {
            line.all = true;
        }
        drop(demotions);
        self.tiering.wake();
    }

    fn tend_media(self: &Arc<Self>) {
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
            self.empty_next_zone(&medium);
            self.store_on(&medium, &node, session);
        }
    }

    /// Orders stores until the medium has enough of them, or no block is due.
    fn store_on(self: &Arc<Self>, medium: &Arc<Medium>, node: &Arc<StoreNode>, session: u64) {
        let memory: u64 = {
            let segments = self.placement.segments();
            let own = segments
                .iter()
                .filter(|segment| Arc::ptr_eq(&segment.node, node));
            own.map(|segment| segment.limit()).sum()
        };
        let kept = share(memory, WITHOUT_COPY);
        let cursor = medium.cursor();
        loop {
            let has_room = {
                let traffic = self.tiering.traffic.lock();
                let used = traffic.uses.get(&medium.id);
                used.is_some_and(|used| used.in_flight < WINDOW)
            };
            if !has_room {
                break;
            }
            let next = {
                let mut demotions = self.tiering.demotions.lock();
                let line = demotions.nodes.get_mut(&node.incarnation);
                line.and_then(|line| line.pop(kept))
            };
            let Some(waiting) = next else { break };
            let Some((block, from)) = self.to_store(&waiting, node) else {
                continue;
            };
            match medium.take(block.length) {
                Taken::At(offset) => {
                    let place = Place {
                        medium: medium.id,
                        offset,
                    };
                    let order = store_order(&block, from, place);
                    let transfer = Transfer {
                        node: Arc::clone(node),
                        session,
                        block,
                        place,
                        direction: Direction::Store,
                    };
                    let mut traffic = self.tiering.traffic.lock();
                    traffic.begin(medium, transfer, order);
                }
                Taken::NeedsZone => {
                    let mut demotions = self.tiering.demotions.lock();
                    if let Some(line) = demotions.nodes.get_mut(&node.incarnation) {
                        line.push_front(waiting);
                    }
                    break;
                }
                Taken::TooLong => {}
            }
        }
        if medium.cursor() != cursor {
            // A start from an older cursor only changes which zone is emptied first.
            let record = Record::Medium(medium.record());
            self.journal().insist(vec![record], Ack::Durable, |_| {});
        }
    }

    /// The block to copy, unless it has left memory or has a copy.
    fn to_store(&self, waiting: &Waiting, node: &StoreNode) -> Option<(Moved, Replica)> {
        let own = node.segments();
        let found = self
            .directory
            .read_block(waiting.block, waiting.version, |block| {
                let replicas = block.replicas();
                let from = replicas.iter().find(|r| own.contains(&r.segment)).copied();
                let moved = Moved {
                    namespace: block.namespace(),
                    key: block.key(),
                    version: block.version(),
                    length: block.length(),
                    checksum: block.checksum(),
                };
                from.map(|from| (moved, from))
            });
        let (block, from) = found.flatten()?;
        let is_copied = self.is_on_medium(block.namespace, &block.key, block.version);
        (!is_copied).then_some((block, from))
    }

    /// Empties the zone behind the cursor ahead of need: drops its copies, waits until that is
    /// durable and until no transfer touches it.
    fn empty_next_zone(self: &Arc<Self>, medium: &Arc<Medium>) {
        let step = {
            let traffic = self.tiering.traffic.lock();
            traffic.uses.get(&medium.id).map(|used| used.emptying)
        };
        match step {
            Some(Emptying::Idle) if medium.is_next_due() => self.drop_oldest(medium),
            Some(Emptying::Draining) => {
                let mut traffic = self.tiering.traffic.lock();
                if let Some(used) = traffic.uses.get_mut(&medium.id)
                    && !used.busy.contains_key(&medium.next_zone())
                {
                    used.emptying = Emptying::Idle;
                    // A copy whose record was on its way to the log may have come since.
                    if medium.oldest().is_empty() {
                        medium.emptied();
                    }
                }
            }
            _ => {}
        }
    }

    fn drop_oldest(self: &Arc<Self>, medium: &Arc<Medium>) {
        let now = self.now();
        let _until_submitted = self.evicting.read();
        let mut records = Vec::new();
        let mut is_leased = false;
        for copy in medium.oldest() {
            let Some(version) = self.tier.directory().version_of(copy) else {
                continue;
            };
            let allow = |block: &BlockRef<'_>| {
                is_leased |= block.is_leased(now, crate::clock::BootInstant(0));
                match block.is_leased(now, crate::clock::BootInstant(0)) {
                    true => Verdict::Keep,
                    false => Verdict::Remove,
                }
            };
            if let Some(removed) = self.tier.remove_copy(copy, version, allow) {
                self.queue_again(&removed);
                records.push(Record::ReplicaGone(record::ReplicaGone {
                    namespace: removed.namespace,
                    key: removed.key,
                    version,
                    segment: medium.id,
                }));
            }
        }
        if is_leased && records.is_empty() {
            return;
        }
        self.metrics.copies_dropped(records.len());
        let next = match is_leased {
            // The rest leaves when its leases end.
            true => Emptying::Idle,
            false => Emptying::Draining,
        };
        self.set_emptying(medium.id, Emptying::Logging);
        let (pool, id) = (Arc::clone(self), medium.id);
        self.journal()
            .insist(records, Ack::Durable, move |durable| {
                if durable.is_ok() {
                    pool.set_emptying(id, next);
                    pool.tiering.wake();
                }
            });
    }

    /// A block whose copy was dropped while it is in memory gets another copy.
    fn queue_again(&self, removed: &crate::directory::Removed) {
        let mut again = None;
        self.directory
            .visit(removed.namespace, &[removed.key.as_ref()], |_, block| {
                again = block
                    .filter(|block| block.version() == removed.version)
                    .map(|block| {
                        let replicas = block.replicas().to_vec();
                        (block.view().id(), block.length().0, replicas)
                    });
            });
        if let Some((id, bytes, replicas)) = again {
            let one = (id, removed.version, bytes, replicas.as_slice());
            self.queue_for_media(std::iter::once(one));
        }
    }

    fn set_emptying(&self, medium: SegmentId, to: Emptying) {
        let mut traffic = self.tiering.traffic.lock();
        if let Some(used) = traffic.uses.get_mut(&medium) {
            used.emptying = to;
        }
    }
}
