//! Empties the next zone of a medium before its space is needed: the zone behind the cursor, or a later one.
//!
//! ```text
//!  idle ─ the written zone has begun ────► saving ─ all saved ─► logging ─ durable ─► draining ─► empty
//!                                          copies that were        the others leave      no transfer
//!                                          used since move         the tier              touches it
//! ```
//!
//! A copy that was used since its zone was written moves to the zone that is written now. So the medium keeps
//! about the same copies as an LRU list would. If the block is in memory, it is stored again from there
//! instead.
//!
//! Some copies cannot leave for a while: leased ones, those that are being loaded, and hard-pinned ones whose block is
//! nowhere else. The zone then pauses before it is emptied again. Hard-pinned copies may have to stay for good, so a
//! later zone is emptied in place of theirs after a second.

use super::super::Pool;
use super::transfers::{Direction, Moved, Transfer, on_medium, range};
use super::{Emptying, Place, Traffic, Use, WINDOW};
use crate::clock::BootInstant;
use crate::directory::{BlockRef, Tick, Verdict};
use crate::membership::StoreNode;
use crate::replica::{BlockId, Replica};
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use crate::tier::{Medium, Taken};
use kvpool_proto as proto;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, Length, Offset, SegmentId, Version, medium};
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The shortest pause of a zone whose copies cannot leave.
const LEAST_PAUSE: Duration = Duration::from_millis(5);
/// The longest one. No event reports the end of a lease, so the zone may be emptied this much later.
const MOST_PAUSE: Duration = Duration::from_millis(100);
/// How long hard-pinned copies keep their zone the next one, although none of its copies leaves.
const PIN_PATIENCE: Duration = Duration::from_secs(1);

/// The pause of a zone with copies that cannot leave.
#[derive(Clone, Debug)]
pub(super) struct Pause {
    /// The bytes of the zone.
    bytes: Range<Offset>,
    /// The number of copies that stay. The pause ends when it changes.
    copies: u32,
    /// The time since which the same copies stay.
    since: BootInstant,
    until: BootInstant,
    /// Whether it was reported that no other zone can be emptied instead.
    is_told: bool,
}

impl Pause {
    /// Whether the next zone of the medium must not be emptied yet.
    fn lasts(&self, medium: &Medium, now: BootInstant) -> bool {
        now < self.until && self.is_of(medium)
    }

    /// Whether the pause is about the next zone of the medium with its present copies.
    fn is_of(&self, medium: &Medium) -> bool {
        let zone = medium.next_zone();
        self.bytes == medium.bytes_of(zone) && self.copies == medium.copies_in(zone)
    }
}

impl Traffic {
    /// Ends the pause of the zone with this copy, because the copy may leave now.
    pub(super) fn may_leave(&mut self, copy: Place) {
        let used = self.uses.get_mut(&copy.medium);
        if let Some(pause) = used.and_then(|used| used.pause.as_mut())
            && pause.bytes.contains(&copy.offset)
        {
            pause.until = BootInstant::default();
        }
    }
}

/// The copies to move from the oldest zone.
#[derive(Debug, Default)]
pub(super) struct Saving {
    left: VecDeque<ToSave>,
    /// The bytes of the written zone that are reserved for them.
    reserved: Length,
}

/// A copy to move.
#[derive(Clone, Copy, Debug)]
struct ToSave {
    copy: BlockId,
    version: Version,
    /// The bytes that it takes in a zone.
    room: Length,
    /// Whether the copy is hard-pinned and its block is nowhere else. Such a copy moves even beyond
    /// the write budget.
    must_move: bool,
}

/// The outcome of an order to move a copy.
enum Saved {
    /// The move is in progress, or the copy is gone.
    Goes,
    /// No further copy can be moved now.
    Enough,
    /// The session of the medium has ended.
    NotServed,
}

impl Saving {
    fn pop(&mut self) -> Option<ToSave> {
        let next = self.left.pop_front()?;
        self.reserved = Length(self.reserved.0.saturating_sub(next.room.0));
        Some(next)
    }
}

impl Pool {
    /// Continues to empty the next zone. Returns the bytes of the written zone that are reserved for moved copies.
    pub(super) fn empty_next_zone(
        self: &Arc<Self>,
        medium: &Arc<Medium>,
        node: &Arc<StoreNode>,
        session: u64,
    ) -> Length {
        // Leases of an earlier term are not known before this time.
        let now = self.now();
        if now < self.lease_floor {
            return Length(0);
        }
        loop {
            let mut traffic = self.tiering.traffic.lock();
            let used = traffic.uses.get_mut(&medium.id);
            let is_served = |used: &&mut Use| used.is_of(node, session) && used.takes_stores();
            let Some(used) = used.filter(is_served) else {
                return Length(0);
            };
            let pause = used.pause.as_ref();
            let is_paused = pause.is_some_and(|pause| pause.lasts(medium, now));
            match &mut used.emptying {
                Emptying::Idle if !is_paused && medium.is_next_due() => {
                    drop(traffic);
                    let saving = self.worth_saving(medium);
                    self.set_emptying(medium.id, node, session, Emptying::Saving(saving));
                }
                Emptying::Saving(saving) => {
                    if used.in_flight >= WINDOW {
                        return saving.reserved;
                    }
                    let next = saving.pop();
                    let is_saved = next.is_none() && used.forwards == 0;
                    if is_saved && used.moves_again() {
                        used.emptying = Emptying::Idle;
                        continue;
                    }
                    drop(traffic);
                    match next {
                        Some(next) => match self.save(medium, next, node, session) {
                            Saved::Goes => {}
                            Saved::Enough => {
                                let none = Emptying::Saving(Saving::default());
                                self.set_emptying(medium.id, node, session, none);
                            }
                            Saved::NotServed => return Length(0),
                        },
                        None => {
                            if is_saved {
                                self.drop_oldest(medium, node, session);
                            }
                            return Length(0);
                        }
                    }
                }
                Emptying::Draining if !used.busy.contains_key(&medium.next_zone()) => {
                    (used.emptying, used.pause) = (Emptying::Idle, None);
                    // A copy whose record was on its way to the log may have entered the zone meanwhile. No load
                    // begins in a zone without copies. Loads begin under the lock of the traffic.
                    if medium.copies_in(medium.next_zone()) == 0 {
                        medium.emptied();
                    }
                    return Length(0);
                }
                Emptying::Idle | Emptying::Logging | Emptying::Draining => return Length(0),
            }
        }
    }

    /// The copies to move from the oldest zone:
    ///
    /// 1. hard-pinned copies whose block no staying node has in memory. They fill at most the written zone's space.
    /// 2. other hard-pinned copies. The node with the block in memory may be killed. If such a copy cannot move,
    ///    the block is stored again from memory.
    /// 3. copies that were used since the zone was written and whose block no staying node has in memory, the most
    ///    recently used first.
    ///
    /// The copies of the second and third kind fill at most as much as new copies did.
    fn worth_saving(&self, medium: &Medium) -> Saving {
        let (sealed, now) = (medium.oldest_sealed(), self.now());
        let mut used: Vec<_> = Vec::new();
        for copy in medium.oldest() {
            let Some(version) = self.tier.directory().version_of(copy) else {
                continue;
            };
            let read = |block: BlockRef<'_>| {
                let is_pinned = block.is_hard_pinned();
                // A copy that moves to another medium keeps its slot in the tier.
                let is_here = block.replicas().iter().any(|at| at.segment == medium.id);
                let is_used = block.tick() > sealed || block.is_leased(now, BootInstant(0));
                let is_wanted = is_here && (is_pinned || is_used);
                let what = (is_pinned, block.tick());
                is_wanted.then(|| (what, block.namespace(), block.key(), block.length()))
            };
            let found = self.tier.directory().read_block(copy, version, read);
            let Some(((is_pinned, tick), namespace, key, length)) = found.flatten() else {
                continue;
            };
            let is_in_memory = self.stays_in_memory(namespace, &key, version);
            if is_pinned || !is_in_memory {
                let must_move = is_pinned && !is_in_memory;
                used.push((Reverse((must_move, is_pinned, tick)), copy, version, length));
            }
        }
        used.sort_unstable();
        let (room, for_moves) = (medium.room_in_zone(), medium.room_for_moves());
        let mut saving = Saving::default();
        for (Reverse((must_move, ..)), copy, version, length) in used {
            let Some(taken) = medium::footprint(length) else {
                continue;
            };
            let most = match must_move {
                true => room.0,
                false => for_moves.0,
            };
            if saving.reserved.0 + taken.0 > most {
                // A shorter one may still fit.
                continue;
            }
            saving.reserved.0 += taken.0;
            saving.left.push_back(ToSave {
                copy,
                version,
                room: taken,
                must_move,
            });
        }
        saving
    }

    /// Orders the move of a copy into the written zone.
    fn save(
        self: &Arc<Self>,
        medium: &Arc<Medium>,
        next: ToSave,
        node: &Arc<StoreNode>,
        session: u64,
    ) -> Saved {
        let ToSave {
            copy,
            version,
            must_move,
            ..
        } = next;
        let read = |block: BlockRef<'_>| {
            let mut copies = block.replicas().to_vec().into_iter();
            let here = copies.find(|copy| copy.segment == medium.id);
            let at = here.map(|copy| copy.offset);
            let moved = Moved::of(&block);
            at.map(|at| (moved, at))
        };
        let found = self.tier.directory().read_block(copy, version, read);
        let Some((block, from)) = found.flatten() else {
            return Saved::Goes;
        };
        if !must_move && !self.may_write(medium) {
            return Saved::Enough;
        }
        let now = self.directory.next_tick();
        let Taken::At(offset) = medium.take_for_move(block.length, now) else {
            return Saved::Enough;
        };
        self.tiering.admission.wrote(medium.id, block.length);
        let at = |offset| Place {
            medium: medium.id,
            offset,
        };
        let order = proto::Transfer {
            ticket: 0,
            from: Some(range(&on_medium(at(from), block.length))),
            to: Some(range(&on_medium(at(offset), block.length))),
            version: version.0,
            checksum: block.checksum.0,
            grant: bytes::Bytes::new(),
            grant_id: 0,
        };
        let transfer = Transfer {
            node: Arc::clone(node),
            session,
            block,
            place: at(offset),
            direction: Direction::Forward { from: at(from) },
            _hold: None,
        };
        match self.tiering.traffic.lock().begin(medium, transfer, order) {
            true => Saved::Goes,
            false => Saved::NotServed,
        }
    }

    /// Drops the copies in the next zone. The zone is empty once this is durable and no transfer
    /// touches the zone. A hard-pinned copy stays until memory has its block again, or for another round of the ring.
    pub(super) fn drop_oldest(
        self: &Arc<Self>,
        medium: &Arc<Medium>,
        node: &Arc<StoreNode>,
        session: u64,
    ) {
        let (now, sealed) = (self.now(), medium.oldest_sealed());
        let (zone, pins_fit) = (medium.next_zone(), medium.pins_fit());
        let _until_submitted = self.evicting.read();
        let mut records = Vec::new();
        let mut is_kept = false;
        let mut pinned = Vec::new();
        for copy in medium.oldest() {
            let Some(version) = self.tier.directory().version_of(copy) else {
                continue;
            };
            let read = |block: BlockRef<'_>| {
                let is_pinned = block.is_hard_pinned();
                (
                    block.namespace(),
                    block.key(),
                    block.lease_until(),
                    is_pinned,
                )
            };
            let Some((namespace, key, until, is_pinned)) =
                self.tier.directory().read_block(copy, version, read)
            else {
                continue;
            };
            if is_pinned && !self.stays_in_memory(namespace, &key, version) {
                pinned.push((namespace, key));
                continue;
            }
            // A loaded block is recorded only while its copy is in the tier.
            let traffic = self.tiering.traffic.lock();
            let is_loading = traffic.loading.contains_key(&(copy, version));
            drop(traffic);
            if is_loading || until > now && !self.lease_in_memory(namespace, &key, version, until) {
                is_kept = true;
                continue;
            }
            // A copy that was leased or has moved meanwhile stays.
            let allow = |block: &BlockRef<'_>| {
                let at = block.replicas().first().copied();
                let is_here =
                    |at: Replica| at.segment == medium.id && medium.zone_of(at.offset) == zone;
                match at.is_some_and(is_here) && block.lease_until() <= until {
                    true => Verdict::Remove,
                    false => Verdict::Keep,
                }
            };
            if let Some(removed) = self.tier.remove_copy(copy, version, allow) {
                // A hard-pinned block in memory gets another copy, also if it was not used.
                let since = match is_pinned && pins_fit {
                    true => Tick::default(),
                    false => sealed,
                };
                if !self.queue_again(&removed, since, pins_fit) {
                    self.tiering.admission.lost(removed.namespace, &removed.key);
                }
                records.push(Record::ReplicaGone(record::ReplicaGone {
                    namespace: removed.namespace,
                    key: removed.key,
                    version,
                    segment: medium.id,
                    // The same copy may be on its way to another offset.
                    offset: removed.replicas.first().map(|at| at.offset),
                }));
            }
        }
        // The memory of a node that leaves does not count.
        if node.stays() {
            for (namespace, key) in &pinned {
                self.load_pinned(*namespace, key);
            }
        }
        // The copy is dropped when its lease or its load ends.
        let next = match is_kept || !pinned.is_empty() {
            true => {
                self.pause_emptying(medium, node, session, pinned.first());
                Emptying::Idle
            }
            false => Emptying::Draining,
        };
        if records.is_empty() {
            self.set_emptying(medium.id, node, session, next);
            return;
        }
        self.metrics.copies_dropped(records.len());
        self.set_emptying(medium.id, node, session, Emptying::Logging);
        let (pool, id, node) = (Arc::clone(self), medium.id, Arc::clone(node));
        self.journal()
            .insist(records, Ack::Durable, move |durable| {
                if durable.is_ok() {
                    pool.set_emptying(id, &node, session, next);
                    pool.tiering.wake();
                }
            });
    }

    /// Delays the next attempt to empty a zone whose copies cannot leave. If hard-pinned copies have kept it too long,
    /// a later zone takes its place. `pin` is one of these copies.
    ///
    /// The pause is as long as the same copies have stayed, within limits. So a copy that stays for a short time delays
    /// its zone by about as much.
    fn pause_emptying(
        &self,
        medium: &Medium,
        node: &Arc<StoreNode>,
        session: u64,
        pin: Option<&(NamespaceId, Key)>,
    ) {
        let now = self.now();
        let mut traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get_mut(&medium.id);
        let Some(used) = used.filter(|used| used.is_of(node, session)) else {
            return;
        };
        let before = used.pause.take().filter(|pause| pause.is_of(medium));
        let since = before.as_ref().map_or(now, |pause| pause.since);
        let mut is_told = before.is_some_and(|pause| pause.is_told);
        let stayed = now.since(since);
        let zone = medium.next_zone();
        if let Some((namespace, key)) = pin
            && stayed >= PIN_PATIENCE
        {
            let is_left_out = medium.skip_oldest();
            if is_left_out || !is_told {
                tracing::warn!(medium = %medium.medium, node = %node.name, zone, is_left_out,
                    %namespace, key = %key.shown(),
                    "a zone is not emptied: hard-pinned copies fit neither the written zone nor memory");
            }
            if is_left_out {
                return;
            }
            is_told = true;
        }
        used.pause = Some(Pause {
            bytes: medium.bytes_of(zone),
            copies: medium.copies_in(zone),
            since,
            until: now.after(stayed.clamp(LEAST_PAUSE, MOST_PAUSE)),
            is_told,
        });
    }

    /// Extends a lease on a copy to the same block in memory, which then serves the lease's holder. Returns
    /// false when no staying node has the block in memory.
    pub(super) fn lease_in_memory(
        &self,
        namespace: NamespaceId,
        key: &Key,
        version: Version,
        until: BootInstant,
    ) -> bool {
        let (now, mut is_leased) = (self.now(), false);
        let view = self.view();
        self.directory
            .visit(namespace, &[key.as_ref()], |_, block| {
                let block = block.filter(|block| block.version() == version);
                if let Some(mut block) = block.filter(|block| view.stays(&block.view())) {
                    block.lease(until, now);
                    is_leased = true;
                }
            });
        is_leased
    }

    /// Records how far the next zone is emptied in a session. Records of an earlier session have no effect.
    pub(super) fn set_emptying(
        &self,
        medium: SegmentId,
        node: &Arc<StoreNode>,
        session: u64,
        to: Emptying,
    ) {
        let mut traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get_mut(&medium);
        if let Some(used) = used.filter(|used| used.is_of(node, session)) {
            used.emptying = to;
        }
    }
}
