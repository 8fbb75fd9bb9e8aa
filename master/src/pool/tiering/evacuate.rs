//! Copies that leave the media of a node which does not come back.
//!
//! A task loads them into the memory of the node, and the mover takes them to other nodes. There they are stored on
//! media at once: they were used long ago, so eviction would take them first. When a block has its place elsewhere,
//! nothing of it is recorded on the media that leave.

use super::super::Pool;
use super::demoter::{MOST_HELD, Target};
use super::lines::{Turn, Waiting};
use super::stores::Meanwhile;
use super::transfers::Moved;
use super::{Put, Use};
use crate::directory::{BlockRef, Tick};
use crate::membership::StoreNode;
use crate::replica::{BlockId, Replica};
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use kvpool_types::{Length, SegmentId, Version};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The number of copies that are looked at under one lock.
const STEP: usize = 256;
/// How long blocks that have moved wait for the next of their stores, at most.
const STORES_END: Duration = Duration::from_secs(10);
/// How long after the end of a store its record may come.
const RECORDED: Duration = Duration::from_millis(300);
const POLL: Duration = Duration::from_millis(5);
/// The most blocks of a node that wait for stores at once. Its medium may have no write budget for long. Further blocks
/// have their turns as blocks of puts do.
pub(super) const MOST_MOVED: usize = 4096;

/// A copy on a medium of a node, while no node that stays has the block in memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct OnMedia {
    copy: BlockId,
    version: Version,
    /// The last use of the block.
    pub(in crate::pool) used: Tick,
    pub(in crate::pool) length: Length,
}

impl Pool {
    /// The media that a node offered last, whether they can be read or not.
    pub(in crate::pool) fn media_held_by(&self, node: &StoreNode) -> HashSet<SegmentId> {
        let media = self.tier.media().into_iter();
        let own = media.filter(|medium| medium.holder().node == node.name);
        own.map(|medium| medium.id).collect()
    }

    /// The blocks that only these media and nodes that leave hold. The block that was used last comes first.
    pub(in crate::pool) async fn only_on_media(&self, own: &HashSet<SegmentId>) -> Vec<OnMedia> {
        let (mut all, mut page) = (Vec::new(), Vec::new());
        while let Some(further) = self.step_of_evacuation(own, &page, |one| all.push(one)) {
            page = further;
            tokio::task::yield_now().await;
        }
        all.sort_unstable_by_key(|one| std::cmp::Reverse(one.used));
        all
    }

    /// The number of blocks that only the media of a node and nodes that leave hold. The count ends when it has reached
    /// `most`.
    pub(in crate::pool) fn count_only_on_media(&self, node: &StoreNode, most: u64) -> u64 {
        let own = self.media_held_by(node);
        if own.is_empty() {
            return 0;
        }
        let (mut left, mut page) = (0, Vec::new());
        while let Some(further) = self.step_of_evacuation(&own, &page, |_| left += 1) {
            if left >= most {
                break;
            }
            page = further;
        }
        left
    }

    /// One step of a walk over the blocks that only these media and nodes that leave hold. Returns where the next step
    /// begins.
    fn step_of_evacuation(
        &self,
        own: &HashSet<SegmentId>,
        page: &[u8],
        mut each: impl FnMut(OnMedia),
    ) -> Option<Vec<u8>> {
        let mut found = Vec::new();
        let next = self.tier.directory().scan(page, STEP, |block| {
            let at = block.replicas().first().map(|at| at.segment);
            if at.is_some_and(|at| own.contains(&at)) {
                let one = OnMedia {
                    copy: block.id(),
                    version: block.version(),
                    used: block.tick(),
                    length: block.length(),
                };
                found.push((block.namespace(), block.key(), one));
            }
        });
        for (namespace, key, one) in found {
            if !self.stays_in_memory(namespace, &key, one.version) {
                each(one);
            }
        }
        next.ok().flatten()
    }

    /// The block of a copy; `None` once the copy has left these media, or a node that stays has the block in memory.
    pub(in crate::pool) fn still_only_on_media(
        &self,
        own: &HashSet<SegmentId>,
        one: &OnMedia,
    ) -> Option<Moved> {
        let read = |block: BlockRef<'_>| {
            let at = block.replicas().first().map(|at| at.segment);
            at.is_some_and(|at| own.contains(&at))
                .then(|| Moved::of(&block))
        };
        let copies = self.tier.directory();
        let block = copies.read_block(one.copy, one.version, read).flatten()?;
        let stays = self.stays_in_memory(block.namespace, &block.key, block.version);
        (!stays).then_some(block)
    }

    /// Whether a medium of a node takes a block that was used last at `used`, now or when its write budget has grown.
    /// It drops no copy that may have been used later.
    pub(in crate::pool) fn takes_moved(&self, node: &StoreNode, block: &Moved, used: Tick) -> bool {
        if self
            .hold_media_quota(block.namespace, block.length)
            .is_err()
        {
            return false;
        }
        let takes = |of: &Use| of.node.incarnation == node.incarnation && of.takes_stores();
        let own: Vec<SegmentId> = {
            let traffic = self.tiering.traffic.lock();
            let own = traffic.uses.iter().filter(|(_, of)| takes(of));
            own.map(|(id, _)| *id).collect()
        };
        own.into_iter().any(|id| {
            let medium = self.tier.medium(id);
            medium.is_some_and(|medium| {
                self.serves_namespace(id, block.namespace) && medium.takes_old(block.length, used)
            })
        })
    }

    /// Gives a block its turn at the media of its new node at once. During a drain of that node every block has its
    /// turn at once, and must not wait for the write budget.
    pub(in crate::pool) fn queue_moved_for_media(&self, put: &Put<'_>, used: Tick) {
        let waiting = Waiting {
            block: put.block,
            version: put.version,
            bytes: put.bytes,
            was_lost: true,
            is_pinned: put.hard_pin,
            parent: None,
        };
        let segments = self.placement.segments();
        let mut demotions = self.tiering.demotions.lock();
        for replica in put.replicas {
            if let Some(segment) = segments.get(replica.segment)
                && let Some(line) = demotions.nodes.get_mut(&segment.node.incarnation)
                && line.drains.is_none()
                && line.moved.len() < MOST_MOVED
            {
                line.moved.push_back((waiting.clone(), used));
            }
        }
        drop((demotions, segments));
        self.tiering.wake();
    }

    /// Orders the stores of blocks that have moved to this node. A block whose medium is busy, slow or without write
    /// budget keeps its place. Blocks behind it may be for another medium.
    pub(super) fn store_moved(self: &Arc<Self>, target: &Target, busy: &mut HashSet<SegmentId>) {
        let node = &target.node;
        let may_take = |busy: &HashSet<SegmentId>| {
            let mut media = target.media.iter().map(|(medium, _)| medium.id);
            media.any(|medium| !busy.contains(&medium) && self.has_window(medium))
        };
        let mut held = 0;
        while held < MOST_HELD
            && may_take(busy)
            && let Some((waiting, used)) = self.moved_at(node, held)
        {
            match self.store_one(&waiting, target, (None, Some(used)), busy) {
                Turn::Ended => self.end_moved(node, waiting.version),
                Turn::NotNow | Turn::Later | Turn::AtQuota => held += 1,
            }
        }
        if held >= MOST_HELD {
            self.put_last(node, held);
        }
    }

    /// The block at this place of the queue of blocks that have moved to this node. It stays in the queue, so that
    /// [`Pool::settle_moved`] knows that it waits.
    fn moved_at(&self, node: &StoreNode, place: usize) -> Option<(Waiting, Tick)> {
        let demotions = self.tiering.demotions.lock();
        let line = demotions.nodes.get(&node.incarnation)?;
        line.moved.get(place).cloned()
    }

    /// Takes a block out of this queue.
    fn end_moved(&self, node: &StoreNode, version: Version) {
        let mut demotions = self.tiering.demotions.lock();
        if let Some(line) = demotions.nodes.get_mut(&node.incarnation) {
            let mut moved = line.moved.iter();
            let place = moved.position(|(waiting, _)| waiting.version == version);
            let _ended = place.and_then(|place| line.moved.remove(place));
        }
    }

    /// Puts the first blocks of this queue at its end. They may wait for a write budget for days.
    fn put_last(&self, node: &StoreNode, blocks: usize) {
        let mut demotions = self.tiering.demotions.lock();
        if let Some(line) = demotions.nodes.get_mut(&node.incarnation) {
            line.moved.rotate_left(blocks.min(line.moved.len()));
        }
    }

    /// Drops these blocks, which have left memory, from the queues of stores at once. Otherwise they would take the
    /// places of later blocks while a medium has no write budget.
    fn forget_moved(&self, versions: &HashSet<Version>) {
        let mut demotions = self.tiering.demotions.lock();
        for line in demotions.nodes.values_mut() {
            line.moved
                .retain(|(waiting, _)| !versions.contains(&waiting.version));
        }
    }

    /// Waits until blocks that have moved off these media have other copies, as far as other media take them. Then the
    /// copies of those that memory takes are given up. Each block comes with whether memory takes it without a copy.
    pub(in crate::pool) async fn settle_moved(
        self: &Arc<Self>,
        own: &HashSet<SegmentId>,
        mut moved: Vec<(Moved, bool)>,
        is_over: &(impl Fn() -> bool + Sync),
    ) {
        let mut versions: HashSet<Version> = moved.iter().map(|(block, _)| block.version).collect();
        let nodes = self.members.all();
        let may_store = nodes
            .iter()
            .any(|node| node.stays() && self.may_store_on_media_of(node));
        let begun = Instant::now();
        let mut until = match may_store {
            true => begun + RECORDED,
            false => begun,
        };
        let (mut waited, mut progress) = (usize::MAX, begun);
        loop {
            // A block that has left memory already is on these media alone again.
            moved.retain(|(block, _)| {
                self.copy_on(own, block).is_some()
                    && self.stays_in_memory(block.namespace, &block.key, block.version)
            });
            if is_over() {
                return;
            }
            if moved.is_empty() {
                return self.forget_moved(&versions);
            }
            let now = Instant::now();
            let queued = self.queued_of(&versions);
            let waits = |one: &&(Moved, bool)| self.waits_for_store(&one.0, &queued);
            let waiting = moved.iter().filter(waits).count();
            if waiting > 0 {
                until = now + RECORDED;
            }
            if waiting < waited {
                (waited, progress) = (waiting, now);
            }
            if now >= until.min(progress + STORES_END) {
                break;
            }
            sleep(POLL).await;
        }
        let queued = self.queued_of(&versions);
        for (block, _) in &moved {
            versions.remove(&block.version);
        }
        self.forget_moved(&versions);
        moved.retain(|(block, is_taken)| *is_taken && !self.waits_for_store(block, &queued));
        let (pool, own) = (Arc::clone(self), own.clone());
        // An eviction may wait for the log meanwhile.
        let given_up = kvpool_seams::blocking(move || {
            for (block, _) in &moved {
                pool.give_up_copy(&own, block);
            }
        });
        if given_up.await.is_err() {
            tracing::error!("copies of blocks that have moved were not given up");
        }
    }

    /// Those of these blocks that wait for stores at once.
    fn queued_of(&self, versions: &HashSet<Version>) -> HashSet<Version> {
        let demotions = self.tiering.demotions.lock();
        let moved = demotions.nodes.values().flat_map(|line| &line.moved);
        let queued = moved.map(|(waiting, _)| waiting.version);
        queued
            .filter(|version| versions.contains(version))
            .collect()
    }

    /// Whether a block that has moved is `queued` for its store, or is being stored.
    fn waits_for_store(&self, block: &Moved, queued: &HashSet<Version>) -> bool {
        let meanwhile = || self.tiering.traffic.lock().stores.meanwhile(block);
        queued.contains(&block.version) || meanwhile() != Meanwhile::Changed
    }

    /// The copy of a block on one of these media.
    fn copy_on(&self, own: &HashSet<SegmentId>, block: &Moved) -> Option<Replica> {
        let mut at = None;
        let keys = [block.key.as_ref()];
        let copies = self.tier.directory();
        copies.visit(block.namespace, &keys, |_, found| {
            let found = found.filter(|found| found.version() == block.version);
            at = found.and_then(|found| found.view().replicas().first().copied());
        });
        at.filter(|at: &Replica| own.contains(&at.segment))
    }

    /// Drops the copy of a block that a node which stays has in memory.
    fn give_up_copy(self: &Arc<Self>, own: &HashSet<SegmentId>, block: &Moved) {
        // No eviction takes the block out of memory in between.
        let _no_eviction = self.evicting.write();
        if !self.stays_in_memory(block.namespace, &block.key, block.version) {
            return;
        }
        let Some(at) = self.copy_on(own, block) else {
            return;
        };
        let gone = record::ReplicaGone {
            namespace: block.namespace,
            key: block.key.clone(),
            version: block.version,
            segment: at.segment,
            offset: Some(at.offset),
        };
        if self.tier.copy_gone(&gone) {
            self.journal()
                .insist(vec![Record::ReplicaGone(gone)], Ack::Durable, |_| {});
        }
    }
}
