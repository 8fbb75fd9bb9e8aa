//! The transfers in progress, and the consequences of their ends.

use super::super::{FreedReplicas, Pool};
use super::recording::Outcome;
use super::stores::Meanwhile;
use super::{Emptying, OpenLoad, Place, Put, Traffic, Use, WINDOW};
use crate::accounts::Hold;
use crate::clock::BootInstant;
use crate::directory::{BlockRef, Holders, NewBlock, Tick};
use crate::membership::{NodeState, StoreNode};
use crate::replica::{BlockId, Copies, Replica};
use crate::store::LogSeq;
use crate::store::journal::{Ack, JournalError};
use crate::store::record::{self, Commit, Record};
use crate::tier::Medium;
use kvpool_proto::{self as proto, MediumState, master_message::Body};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Code, Extent, GrantId, Key, Length, Offset, SegmentId, Version};
use smallvec::SmallVec;
use std::sync::Arc;

/// A block that is being transferred.
#[derive(Clone, Debug)]
pub(in crate::pool) struct Moved {
    pub(in crate::pool) namespace: NamespaceId,
    pub(in crate::pool) key: Key,
    pub(in crate::pool) version: Version,
    pub(in crate::pool) length: Length,
    pub(in crate::pool) checksum: Checksum,
    pub(in crate::pool) hard_pin: bool,
}

impl Moved {
    pub(in crate::pool) fn of(block: &BlockRef<'_>) -> Self {
        Self {
            namespace: block.namespace(),
            key: block.key(),
            version: block.version(),
            length: block.length(),
            checksum: block.checksum(),
            hard_pin: block.is_hard_pinned(),
        }
    }

    /// The commit record of the block at its new extent.
    fn commit_at(&self, segment: SegmentId, offset: Offset) -> Commit {
        Commit {
            namespace: self.namespace,
            key: self.key.clone(),
            version: self.version,
            length: self.length,
            checksum: self.checksum,
            replicas: smallvec::smallvec![(segment, offset)],
            // Neither the tier nor a load knows the block's chain.
            parent: None,
            hard_pin: self.hard_pin,
        }
    }
}

/// The direction of a transfer.
#[derive(Clone, Debug)]
pub(super) enum Direction {
    /// From memory to the medium.
    Store,
    /// From one zone of the medium to another.
    Forward {
        /// The present location of the copy.
        from: Place,
    },
    /// From the medium to memory.
    Load {
        /// The copy's slot in the tier.
        copy: BlockId,
        /// The extent in memory to write.
        to: Replica,
        /// The grant of that extent.
        grant: GrantId,
        /// The last use of the copy if the load is no use of it.
        used: Option<Tick>,
    },
}

/// One order that a node has not answered.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) node: Arc<StoreNode>,
    pub(super) session: u64,
    pub(super) block: Moved,
    pub(super) place: Place,
    pub(super) direction: Direction,
    /// The hold on a quota while the transfer is open. A store holds bytes of its namespace's quota of media
    /// until it is recorded. A load holds its quota of blocks.
    pub(super) _hold: Option<Arc<Hold>>,
}

impl Transfer {
    /// The zones that the transfer reads or writes.
    fn zones(&self, zone_of: impl Fn(Place) -> u32) -> SmallVec<[u32; 2]> {
        let mut zones = smallvec::smallvec![zone_of(self.place)];
        if let Direction::Forward { from } = self.direction {
            zones.push(zone_of(from));
        }
        zones
    }

    /// The copy that the transfer loads; `None` for a store or a move.
    pub(super) fn loading(&self) -> Option<(BlockId, Version)> {
        match self.direction {
            Direction::Store | Direction::Forward { .. } => None,
            Direction::Load { copy, .. } => Some((copy, self.block.version)),
        }
    }
}

/// Orders by node.
#[derive(Debug, Default)]
pub(super) struct Orders(Vec<(Arc<StoreNode>, Vec<proto::Transfer>)>);

impl Orders {
    pub(super) fn push(&mut self, node: &Arc<StoreNode>, order: proto::Transfer) {
        match self
            .0
            .iter_mut()
            .find(|(known, _)| Arc::ptr_eq(known, node))
        {
            Some((_, orders)) => orders.push(order),
            None => self.0.push((Arc::clone(node), vec![order])),
        }
    }

    /// Sends one message to each node.
    pub(super) fn send(self) {
        for (node, transfers) in self.0 {
            node.send(Body::Transfers(proto::Transfers { transfers }));
        }
    }
}

impl Traffic {
    /// Enters a transfer that writes to a medium, and sends its order. Returns false when the session of the
    /// medium has ended meanwhile, since nothing would end the transfer.
    #[must_use = "a transfer that does not begin has no end"]
    pub(super) fn begin(
        &mut self,
        medium: &Medium,
        transfer: Transfer,
        order: proto::Transfer,
    ) -> bool {
        let used = self.uses.get(&medium.id);
        let goes = used.is_some_and(|used| {
            used.is_of(&transfer.node, transfer.session) && used.takes_stores()
        });
        if goes {
            let node = Arc::clone(&transfer.node);
            let mut orders = Orders::default();
            orders.push(&node, self.enter(medium, transfer, order));
            orders.send();
        }
        goes
    }

    /// Enters a transfer. The caller sends the order before it unlocks the traffic, so that the order belongs
    /// to the session that was checked.
    pub(super) fn enter(
        &mut self,
        medium: &Medium,
        transfer: Transfer,
        order: proto::Transfer,
    ) -> proto::Transfer {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        if let Some(used) = self.uses.get_mut(&medium.id) {
            used.in_flight += transfer.block.length.0;
            for zone in transfer.zones(|place| medium.zone_of(place.offset)) {
                *used.busy.entry(zone).or_default() += 1;
            }
            if let Direction::Forward { .. } = transfer.direction {
                used.forwards += 1;
            }
        }
        if let (Some(loading), Direction::Load { to, .. }) =
            (transfer.loading(), &transfer.direction)
        {
            let load = OpenLoad::new(ticket, *to, transfer.block.length);
            self.loading.insert(loading, load);
        }
        match transfer.direction {
            Direction::Store => self.stores.begin(&transfer.block, transfer.place.medium),
            Direction::Load { grant, .. } => self.unrecorded.begin(&transfer.node, grant),
            Direction::Forward { .. } => {}
        }
        self.open.insert(ticket, transfer);
        proto::Transfer { ticket, ..order }
    }

    /// Whether a write to the medium is in progress, or is not recorded yet.
    pub(super) fn writes_to(&self, medium: SegmentId) -> bool {
        let busy = self.uses.get(&medium).map(|used| used.busy.values().sum());
        let is_load = |transfer: &&Transfer| {
            transfer.place.medium == medium && matches!(transfer.direction, Direction::Load { .. })
        };
        let loads = self.open.values().filter(is_load).count();
        busy.is_some_and(|busy: u32| busy as usize > loads)
    }

    /// Removes an answered transfer. Its zones stay busy until `leave_zones`.
    fn end(&mut self, node: &StoreNode, ticket: u64) -> Option<Transfer> {
        let is_of_node = self
            .open
            .get(&ticket)
            .is_some_and(|transfer| transfer.node.incarnation == node.incarnation);
        let transfer = is_of_node.then(|| self.open.remove(&ticket)).flatten()?;
        if let Some(used) = self.uses.get_mut(&transfer.place.medium) {
            used.in_flight = used.in_flight.saturating_sub(transfer.block.length.0);
        }
        Some(transfer)
    }

    /// Releases the zones of a transfer. When its session has ended, they are released already.
    fn leave_zones(&mut self, transfer: &Transfer, zone_of: impl Fn(Place) -> u32) {
        let used = self.uses.get_mut(&transfer.place.medium);
        let of_session = |used: &&mut Use| used.is_of(&transfer.node, transfer.session);
        let Some(used) = used.filter(of_session) else {
            return;
        };
        for zone in transfer.zones(zone_of) {
            if let Some(busy) = used.busy.get_mut(&zone) {
                *busy -= 1;
                if *busy == 0 {
                    used.busy.remove(&zone);
                }
            }
        }
    }
}

impl Pool {
    /// The disk of a node refused these writes, and takes no others. Call it before [`Pool::transfers_done`].
    ///
    /// The node's next offer says the same, but later. By then a drain would have tried all of its stores in vain. It
    /// would have told the node to leave, with blocks that other nodes could take.
    pub fn writes_refused(&self, node: &StoreNode, tickets: impl IntoIterator<Item = u64>) {
        for ticket in tickets {
            let mut traffic = self.tiering.traffic.lock();
            let Traffic { open, uses, .. } = &mut *traffic;
            let transfer = open.get(&ticket);
            let Some(transfer) = transfer.filter(|one| one.node.incarnation == node.incarnation)
            else {
                continue;
            };
            let used = uses.get_mut(&transfer.place.medium);
            if let Some(used) = used
                && used.is_of(&transfer.node, transfer.session)
            {
                used.refuses_writes = true;
                if used.state == MediumState::MediumReady {
                    used.state = MediumState::MediumReadOnly;
                }
            }
        }
    }

    /// Processes a node's answers to orders.
    pub fn transfers_done(self: &Arc<Self>, node: &StoreNode, done: &[(u64, Code)]) {
        let mut is_awaited = false;
        for (ticket, code) in done {
            let ended = self.tiering.traffic.lock().end(node, *ticket);
            let Some(transfer) = ended else { continue };
            is_awaited |= self.demoter_awaits(&transfer, *code);
            let writes = !matches!(transfer.direction, Direction::Load { .. });
            let has_failed = !matches!(code, Code::Ok | Code::ChecksumMismatch);
            if has_failed && matches!(transfer.direction, Direction::Store) {
                // The block is queued before the zones are released: a drain must not end in between.
                self.store_again_once(&transfer);
            }
            // A copy that is recorded releases its zones when the tier has it.
            if !writes || *code != Code::Ok {
                self.leave_zones(&transfer);
            }
            match (&transfer.direction, code) {
                (Direction::Store, Code::Ok) => {
                    self.stored(&transfer);
                }
                (Direction::Store, code) => {
                    let key = &transfer.block.key;
                    tracing::debug!(key = %key.shown(), %code, "copy to a medium failed");
                    self.give_up_transfer(transfer);
                }
                (Direction::Forward { .. }, Code::Ok) => {
                    if !self.stored(&transfer) {
                        self.forwarded(&transfer, true);
                    }
                }
                (Direction::Forward { .. }, code) => {
                    let is_wrong = *code == Code::ChecksumMismatch;
                    if is_wrong {
                        self.copy_is_wrong(&transfer);
                    }
                    self.forwarded(&transfer, is_wrong);
                }
                (Direction::Load { .. }, Code::Ok) => self.loaded(transfer),
                (Direction::Load { .. }, code) => {
                    self.tiering.traffic.lock().load_failed(&transfer, *code);
                    if *code == Code::ChecksumMismatch {
                        self.copy_is_wrong(&transfer);
                    }
                    self.give_up_transfer(transfer);
                }
            }
        }
        if is_awaited {
            self.tiering.wake();
        }
    }

    /// True if the demoter may have waited for the end of this transfer, and so must be woken.
    ///
    /// A reader waits for the end of a load. On a busy machine, waking another thread would delay that reader.
    /// If the demoter is not woken here, it finds its work by itself later.
    pub(super) fn demoter_awaits(&self, ended: &Transfer, code: Code) -> bool {
        let is_load = matches!(ended.direction, Direction::Load { .. });
        if !is_load || code != Code::Ok || ended.node.drains() {
            return true;
        }
        let Some(medium) = self.tier.medium(ended.place.medium) else {
            return true;
        };
        let traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get(&medium.id);
        used.is_none_or(|used| {
            let was_full = used.in_flight + ended.block.length.0 >= WINDOW;
            was_full || !matches!(used.emptying, Emptying::Idle) || medium.is_next_due()
        })
    }

    pub(super) fn leave_zones(&self, transfer: &Transfer) {
        let zone_of = |place: Place| {
            let medium = self.tier.medium(place.medium);
            medium.map_or(u32::MAX, |medium| medium.zone_of(place.offset))
        };
        let mut traffic = self.tiering.traffic.lock();
        traffic.leave_zones(transfer, zone_of);
    }

    /// Ends a move between zones. `is_over` is false if the copy should still move.
    pub(super) fn forwarded(&self, transfer: &Transfer, is_over: bool) {
        let mut traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get_mut(&transfer.place.medium);
        if let Some(used) = used.filter(|used| used.is_of(&transfer.node, transfer.session)) {
            used.forwards = used.forwards.saturating_sub(1);
            used.has_unmoved |= !is_over;
        }
        drop(traffic);
        self.tiering.wake();
    }

    /// Records a copy that was written. Returns false when the block has gone meanwhile, or its key is being
    /// changed.
    ///
    /// The copy of a block that was evicted meanwhile is kept. Its bytes were right when they were
    /// read, and since then no put and no removal has changed the key.
    ///
    /// A second copy of a block is not recorded: it would replace the first copy, and might leave
    /// with its node or its zone.
    fn stored(self: &Arc<Self>, transfer: &Transfer) -> bool {
        let mut outcome = self.record_copy(transfer);
        if outcome == Outcome::Gone && self.may_be_evicted_now(transfer) {
            // An eviction is recorded only at the end of its step. After that it is known whether the block
            // was evicted or removed.
            drop(self.evicting.write());
            outcome = self.record_copy(transfer);
        }
        match outcome {
            Outcome::Recorded => {}
            Outcome::Second => self.end_second(transfer),
            Outcome::Gone => {
                let Moved { key, version, .. } = &transfer.block;
                // The put or removal of the key may fail, and memory keeps a hard-pinned block.
                if transfer.block.hard_pin && matches!(transfer.direction, Direction::Store) {
                    self.store_again_once(transfer);
                }
                self.leave_zones(transfer);
                tracing::debug!(key = %key.shown(), %version,
                    "copy not recorded: the block has gone, or its key changes");
            }
        }
        self.store_ended(transfer, outcome != Outcome::Gone);
        outcome != Outcome::Gone
    }

    fn record_copy(self: &Arc<Self>, transfer: &Transfer) -> Outcome {
        let Moved {
            namespace,
            key,
            version,
            length,
            ..
        } = transfer.block.clone();
        let moves = matches!(transfer.direction, Direction::Forward { .. });
        let place = transfer.place;
        let commit = transfer.block.commit_at(place.medium, place.offset);
        let (pool, of) = (Arc::clone(self), transfer.clone());
        let mut outcome = Outcome::Gone;
        self.record_transfer(transfer, || {
            // Asked under the lock of the reservations. Two copies that end at once must not miss each other.
            let is_second = self.has_good_copy_beside(&transfer.block, place.medium);
            outcome = match moves {
                _ if is_second => Outcome::Second,
                true if self.is_on_medium(namespace, &key, version) => Outcome::Recorded,
                false if self.is_still_wanted(&transfer.block) => Outcome::Recorded,
                _ => Outcome::Gone,
            };
            if outcome != Outcome::Recorded {
                return false;
            }
            let mut traffic = self.tiering.traffic.lock();
            traffic.recording.begin(&transfer.block, place);
            drop(traffic);
            let record = Record::Commit(commit.clone());
            self.journal()
                .submit_now(vec![record], Ack::Durable, move |durable| {
                    let is_logged = durable.is_ok();
                    match durable {
                        Ok(_) if !pool.tier.publish(commit) => {}
                        Ok(_) if moves => pool.metrics.copy_forwarded(length),
                        Ok(_) => pool.metrics.copy_stored(length),
                        // The block is queued before the zones are released: a drain must not end in between.
                        Err(error) if !moves && !error.is_outcome_unknown() => {
                            pool.tiering.refused.lock().push(of.clone());
                        }
                        Err(_) => {}
                    }
                    let mut traffic = pool.tiering.traffic.lock();
                    traffic.recording.end(&of.block, place);
                    drop(traffic);
                    // If the zones were released earlier, a copy of the next round could take a range that
                    // this copy still takes.
                    pool.leave_zones(&of);
                    if moves {
                        pool.forwarded(&of, is_logged);
                    }
                    pool.tiering.wake();
                });
            true
        });
        outcome
    }

    /// Whether the block of a store has left memory, and its eviction may not be recorded yet.
    fn may_be_evicted_now(&self, transfer: &Transfer) -> bool {
        let block = &transfer.block;
        let meanwhile = || self.tiering.traffic.lock().stores.meanwhile(block);
        matches!(transfer.direction, Direction::Store)
            && !self.is_in_memory(block.namespace, &block.key, block.version)
            && meanwhile() != Meanwhile::Changed
    }

    /// Records a loaded block.
    fn loaded(self: &Arc<Self>, transfer: Transfer) {
        let Direction::Load { to, grant, .. } = transfer.direction else {
            return;
        };
        let Moved {
            namespace,
            key,
            version,
            ..
        } = transfer.block.clone();
        let commit = transfer.block.commit_at(to.segment, to.offset);
        let (pool, arrived) = (Arc::clone(self), transfer.clone());
        let on_logged = move |logged: Result<LogSeq, JournalError>| match logged {
            Ok(_) => {
                let mut traffic = pool.tiering.traffic.lock();
                traffic.unrecorded.logged(&arrived.node, grant);
                drop(traffic);
                pool.publish_loaded(arrived);
            }
            Err(error) if !error.is_outcome_unknown() => {
                // A log that has failed reports this within the call, while locks are held.
                pool.tiering.refused.lock().push(arrived);
                pool.tiering.wake();
            }
            // The journal has failed, and the next leader reads the log. The extent stays taken until then.
            Err(_) => pool.tiering.wake_lookups(),
        };
        // A reader waits for this record. If the journal is free, it calls back on this thread.
        let is_recorded = self.journal().submit_under(|submitter| {
            self.record_transfer(&transfer, || {
                // The check is made here, since a removal may run until here. If the node was
                // dropped, memory no longer has the block.
                let is_gone = transfer.node.state() == NodeState::Gone;
                if is_gone || !self.is_on_medium(namespace, &key, version) {
                    return false;
                }
                submitter.submit_now(vec![Record::Commit(commit)], on_logged);
                true
            })
        });
        if !is_recorded {
            self.give_up_transfer(transfer);
        }
    }

    pub(super) fn publish_loaded(self: &Arc<Self>, transfer: Transfer) {
        let Direction::Load { to, used, .. } = transfer.direction else {
            return;
        };
        let Moved {
            namespace,
            key,
            version,
            length,
            checksum,
            hard_pin,
        } = transfer.block.clone();
        let block = NewBlock {
            namespace,
            key: key.clone(),
            version,
            length,
            checksum,
            replicas: Copies::from_slice(&[to]),
            parent: None,
            soft_pin_until: None,
            hard_pin,
            tick: used.unwrap_or_else(|| self.directory.ticks(1).of(0)),
            leased_until: None,
        };
        // The block may already be in memory elsewhere, in an extent that cannot be read.
        let moved = &self.quarantine.moved;
        let leaving = moved.leaves(version, self.latest_token());
        // The new block does not count leases on the copy, nor leases from before memory lost the
        // block. Their holders release them all the same. Such a release must not end another
        // holder's lease.
        let now = self.now();
        let published = self
            .directory
            .publish_held(&[block], self.latest_token(), now);
        let published = published.into_iter().next();
        match published.as_ref().and_then(|one| one.replaced.as_ref()) {
            Some(old) if old.version == version => moved.left(leaving, old.lease_until),
            _ => moved.stays(leaving),
        }
        let Some(published) = published else { return };
        let Some(id) = published.id else {
            self.give_up_transfer(transfer);
            return;
        };
        self.end_hold(namespace, &key, version);
        self.load_succeeded(&transfer);
        let is_there = {
            let segments = self.placement.segments();
            segments.set_owners(std::iter::once((&to, id)));
            segments.get(to.segment).is_some()
        };
        if !is_there {
            // The node was dropped before the block was published.
            self.sweep_late(namespace, &key, version, to.segment);
        }
        let freed = self.freed(
            published
                .replaced
                .as_deref()
                .map(|old| self.left(old))
                .into_iter(),
        );
        if !freed.is_empty() {
            // The load's record need not be durable yet. After a crash the block may be read at its old
            // extent.
            self.free_once_logged(Vec::new(), freed);
        }
        // The block takes memory like a block that was put, so the blocks before it need their copies sooner.
        let put = Put {
            namespace,
            key: &key,
            parent: None,
            block: id,
            version,
            bytes: length.0,
            hard_pin,
            replicas: std::slice::from_ref(&to),
        };
        let is_due = self.queue_in_lines(std::iter::once(put));
        // The block has its copy, unless the copy was dropped meanwhile. See `demoter_awaits`.
        if is_due && hard_pin && !self.has_kept_copy(namespace, &key, version, None) {
            self.tiering.wake();
        }
        self.metrics.copy_loaded(length);
    }

    /// Ends the hold on a loaded block. Holders of leases on its copy release them at this block from now on.
    fn end_hold(&self, namespace: NamespaceId, key: &Key, version: Version) {
        let now = self.now();
        let keys = [key.as_ref()];
        let mut holders = Holders::default();
        self.tier
            .directory()
            .visit(namespace, &keys[..], |_, copy| {
                let copy = copy.filter(|copy| copy.version() == version);
                holders = copy.map_or(holders, |mut copy| copy.take_holders(now));
            });
        if self.quarantine.moved.may_be_elsewhere(version, now) {
            // The holder of a lease from before memory lost the block may release it here.
            holders = Holders::unknown();
        }
        self.directory.visit(namespace, &keys[..], |_, block| {
            if let Some(mut block) = block.filter(|block| block.version() == version) {
                block.settle(holders);
            }
        });
    }

    /// Drops a copy whose bytes on the medium are wrong. A copy that has moved is kept: the range that was
    /// read may hold another block now.
    fn copy_is_wrong(self: &Arc<Self>, transfer: &Transfer) {
        let block = &transfer.block;
        let read = match transfer.direction {
            Direction::Forward { from } => from,
            Direction::Load { .. } | Direction::Store => transfer.place,
        };
        if !self.lies_at(block, read) {
            tracing::debug!(key = %block.key.shown(), offset = %read.offset, "copy moved before it was read");
            return;
        }
        tracing::error!(key = %block.key.shown(), version = %block.version, segment = %read.medium,
            offset = %read.offset, "copy on a medium is wrong, dropped");
        let gone = record::ReplicaGone {
            namespace: block.namespace,
            key: block.key.clone(),
            version: block.version,
            segment: read.medium,
            // The copy may move meanwhile to an offset where its bytes are right.
            offset: Some(read.offset),
        };
        let _until_submitted = self.evicting.read();
        if self.tier.copy_gone(&gone) {
            // The block may now be in the memory of a draining node only.
            self.doubt_drained();
            self.metrics.corrupt_replica();
            self.journal()
                .insist(vec![Record::ReplicaGone(gone)], Ack::Durable, |_| {});
        }
    }

    /// Whether the tier's copy of a block is at this location.
    pub(super) fn lies_at(&self, block: &Moved, place: Place) -> bool {
        let mut is_it = false;
        let keys = [block.key.as_ref()];
        let copies = self.tier.directory();
        copies.visit(block.namespace, &keys, |_, found| {
            let found = found.filter(|found| found.version() == block.version);
            is_it = found.is_some_and(|found| {
                let at = found.view().replicas().first().copied();
                at.is_some_and(|at| (at.segment, at.offset) == (place.medium, place.offset))
            });
        });
        is_it
    }

    /// Whether the block of a successful store is in memory, or was evicted during the store. The caller
    /// keeps puts and removals of the key away.
    fn is_still_wanted(&self, block: &Moved) -> bool {
        let meanwhile = self.tiering.traffic.lock().stores.meanwhile(block);
        match meanwhile {
            Meanwhile::Evicted => true,
            Meanwhile::Stayed => self.is_in_memory(block.namespace, &block.key, block.version),
            Meanwhile::Changed => false,
        }
    }

    /// Ends a store. A block that was evicted during the store is lost if the store left no copy.
    fn store_ended(&self, transfer: &Transfer, is_recorded: bool) {
        let Direction::Store = transfer.direction else {
            return;
        };
        let block = &transfer.block;
        let mut traffic = self.tiering.traffic.lock();
        let meanwhile = traffic.stores.end(block, transfer.place.medium);
        drop(traffic);
        if meanwhile == Meanwhile::Evicted && !is_recorded {
            self.metrics.evicted_without_copy();
            self.tiering.admission.lost(block.namespace, &block.key);
        }
    }

    /// Frees the extents of loads whose records the log refused, and queues the blocks of such stores again.
    pub(super) fn give_up_refused(&self) {
        let refused = std::mem::take(&mut *self.tiering.refused.lock());
        for transfer in refused {
            let block = &transfer.block;
            match transfer.direction {
                Direction::Store if self.store_again(&transfer) => {}
                Direction::Store => {
                    self.metrics.evicted_without_copy();
                    self.tiering.admission.lost(block.namespace, &block.key);
                }
                _ => self.give_up_transfer(transfer),
            }
        }
    }

    /// Queues the block of a store that left no copy at the head of its node's queue. Returns false when
    /// memory does not hold the block.
    pub(super) fn store_again(&self, transfer: &Transfer) -> bool {
        let block = &transfer.block;
        let block = (block.namespace, &block.key, block.version);
        let Some((_, waiting, _)) = self.waiting_again(block) else {
            return false;
        };
        let mut demotions = self.tiering.demotions.lock();
        if let Some(line) = demotions.nodes.get_mut(&transfer.node.incarnation) {
            line.push_front(waiting);
        }
        true
    }

    /// [`Pool::store_again`], once for each block. Another offset of the medium may take the block.
    pub(super) fn store_again_once(&self, transfer: &Transfer) {
        let is_first = {
            let mut demotions = self.tiering.demotions.lock();
            let line = demotions.nodes.get_mut(&transfer.node.incarnation);
            line.is_some_and(|line| line.tries_again(transfer.block.version))
        };
        if is_first {
            self.store_again(transfer);
        }
    }

    /// Frees what a failed transfer held. The range of a store stays unused until its zone is written again.
    pub(super) fn give_up_transfer(&self, transfer: Transfer) {
        self.load_ended(&transfer);
        self.store_ended(&transfer, false);
        if let Direction::Load { to, grant, .. } = transfer.direction {
            let mut traffic = self.tiering.traffic.lock();
            traffic.unrecorded.end(transfer.node.incarnation, grant);
            drop(traffic);
            let freed = self.freed(std::iter::once(FreedReplicas {
                replicas: &[to],
                version: Version(grant.0),
                length: transfer.block.length,
                not_before: BootInstant(0),
            }));
            self.free(freed);
        }
    }
}

/// The order of a store.
pub(super) fn store_order(block: &Moved, from: Replica, place: Place) -> proto::Transfer {
    proto::Transfer {
        ticket: 0,
        from: Some(range(&Extent {
            segment: from.segment,
            offset: from.offset,
            length: block.length,
        })),
        to: Some(range(&on_medium(place, block.length))),
        version: block.version.0,
        checksum: block.checksum.0,
        grant: bytes::Bytes::new(),
        grant_id: 0,
    }
}

pub(super) fn on_medium(place: Place, length: Length) -> Extent {
    Extent {
        segment: place.medium,
        offset: place.offset,
        length,
    }
}

pub(in crate::pool) fn range(extent: &Extent) -> proto::ExtentRange {
    proto::ExtentRange {
        segment: extent.segment.0,
        offset: extent.offset.0,
        length: extent.length.0,
    }
}
