//! Loads blocks from media when a reader asks for them.
//!
//! A block is loaded into memory and read there. So every transport serves it. A reader never waits for a
//! disk on a connection that others share.

use super::super::Pool;
use super::super::quotas::QuotaWait;
use super::super::read::View;
use super::awaited::Awaited;
use super::transfers::{Direction, Moved, Orders, Transfer, on_medium, range};
use super::{Place, Traffic, WINDOW};
use crate::clock::BootInstant;
use crate::directory::{BlockRef, Goal, Tick};
use crate::membership::StoreNode;
use crate::placement::{Extents, Segments};
use crate::replica::{BlockId, Replica};
use crate::reservations::End;
use kvpool_proto as proto;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{Extent, GrantId, Key, KeyRef, Length, SegmentId, Version};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The longest time that a lookup waits for media.
const MOST_WAIT: Duration = Duration::from_secs(5);
/// The most loads of one block for one lookup. If a batch is larger than memory, its first blocks may be
/// evicted again before its last ones arrive.
const MOST_LOADS: u32 = 2;
/// The interval at which a load that found no room is tried again. No event reports that room is free.
const RETRY: Duration = Duration::from_millis(2);
/// How long a lookup with some loaded blocks waits for the room of the others. Its caller then reads the
/// loaded blocks, releases their leases, and asks again.
const ROOM_PATIENCE: Duration = Duration::from_millis(100);
/// How much longer than the wait a loaded block is held for its lookup, at most.
const HOLD: Duration = Duration::from_secs(1);

/// The result of [`Pool::restore`].
#[must_use = "what came back is held until it is released"]
#[derive(Debug, Default)]
pub struct Restored {
    /// By the index of its key: the latest version of the block that was loaded. It has one lease with this
    /// token. The lease on an earlier version of the block ended with that version, or expires.
    held: BTreeMap<usize, (Key, Version)>,
    token: BootInstant,
    /// The indices of the keys whose blocks can be read from a medium but are not in memory. Memory had no
    /// room for them, or their loads are in progress.
    pub left: Vec<usize>,
    /// The indices of the keys whose blocks are only on media that cannot be read now, or are longer than the memory of
    /// their nodes.
    pub unreadable: Vec<usize>,
}

/// The leases of a lookup that has no answer yet. If its caller leaves before the answer, they end.
struct Holding<'p> {
    pool: &'p Pool,
    namespace: NamespaceId,
    restored: Restored,
    /// The loads that the lookup waits for. Their ends lease blocks for it.
    awaited: Option<Arc<Awaited>>,
}

impl Holding<'_> {
    /// Ends the wait for loads, and takes over their leases.
    fn end_wait(&mut self) {
        if let Some(awaited) = self.awaited.take() {
            self.restored.held.extend(awaited.close());
        }
    }

    /// Passes the leases to the caller.
    fn answer(mut self) -> Restored {
        std::mem::take(&mut self.restored)
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.end_wait();
        self.pool.end_restored(self.namespace, &self.restored);
    }
}

/// The outcomes of the loads of one lookup.
#[derive(Debug, Default)]
struct Loads {
    /// How often a load of each block has ended.
    ended: HashMap<BlockId, u32>,
    /// The copies that cannot be read.
    failed: HashSet<BlockId>,
}

/// The time limits of a wait for media.
#[derive(Clone, Copy, Debug)]
struct Time {
    /// When the lookup is answered.
    deadline: tokio::time::Instant,
    /// When a load in progress counts as failed.
    too_long: tokio::time::Instant,
}

/// A copy to load.
struct Wanted {
    /// The index of the key.
    index: usize,
    copy: BlockId,
    block: Moved,
    at: Replica,
    /// The ticket of its load that was seen in progress.
    seen: Option<u64>,
    /// The last use of the copy if its load is no use of it.
    used: Option<Tick>,
    /// The end of a put that is replacing the block and is committing.
    commit: Option<Arc<End>>,
}

/// The room in memory of one node that loads wait for.
#[derive(Debug)]
pub(in crate::pool) struct WantedRoom {
    pub(in crate::pool) node: Arc<StoreNode>,
    /// The bytes of all blocks.
    pub(in crate::pool) bytes: Length,
    /// The length of the largest block.
    pub(in crate::pool) largest: Length,
    /// Only blocks that were last used before this tick leave.
    pub(in crate::pool) before: Tick,
}

impl WantedRoom {
    /// No block was last used before this tick.
    pub(in crate::pool) const NO_BLOCK: Tick = Tick(0);

    /// The room for one block.
    pub(in crate::pool) fn new(node: &Arc<StoreNode>, length: Length) -> Self {
        Self {
            node: Arc::clone(node),
            bytes: Length(0),
            largest: length,
            before: Tick::MAX,
        }
    }
}

/// The outcome of an attempt to begin a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begun {
    /// The load with this ticket is in progress.
    Goes(u64),
    /// The load was in progress and has ended, or the copy no longer lies where it was found.
    Ended,
    /// The medium has enough transfers in progress.
    Queued,
    /// Memory has no room now.
    NoRoom,
    /// The namespace is at a hard quota.
    AtQuota,
    /// The block exceeds a hard quota of the namespace by itself.
    NeverFits,
    /// The copy cannot be read now, or the memory of its node can never take it.
    Unreadable,
    /// A put that replaces the block is committing. The load would not be recorded.
    KeyChanges,
}

impl Begun {
    /// Whether the load may begin later.
    const fn waits(self) -> bool {
        matches!(self, Self::Queued | Self::NoRoom | Self::AtQuota)
    }
}

impl Pool {
    /// Loads the blocks of `keys` that lie only on media into memory. It waits for `patience` at most, and
    /// for at most 5 s. A block that is not loaded reads as missing. The loaded blocks have a lease
    /// until [`Pool::end_restored`].
    pub async fn restore<'k>(
        self: &Arc<Self>,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        patience: Duration,
    ) -> Restored {
        let keys = keys.into();
        self.load_from_media(namespace, keys, patience, true).await
    }

    /// As [`Pool::restore`], but no use of the blocks. They come to memory with their last uses.
    pub(in crate::pool) async fn restore_unused(
        self: &Arc<Self>,
        namespace: NamespaceId,
        keys: KeyBatch<'_>,
        patience: Duration,
    ) -> Restored {
        self.load_from_media(namespace, keys, patience, false).await
    }

    async fn load_from_media(
        self: &Arc<Self>,
        namespace: NamespaceId,
        keys: KeyBatch<'_>,
        patience: Duration,
        is_use: bool,
    ) -> Restored {
        let wait = patience.min(MOST_WAIT);
        let mut holding = Holding {
            pool: self,
            namespace,
            restored: Restored {
                token: self.now().after(wait + HOLD),
                ..Restored::default()
            },
            awaited: None,
        };
        let mut loads = Loads::default();
        let now = tokio::time::Instant::now();
        let time = Time {
            deadline: now + wait,
            too_long: now + MOST_WAIT,
        };
        let on_media = || {
            self.on_media_only(namespace, &keys, is_use, |view, block| {
                view.is_present(block)
            })
        };
        while self.leads() && !self.is_stopping() {
            let mut wanted = on_media();
            wanted.retain(|one| !loads.failed.contains(&one.copy));
            let ended = |one: &Wanted| loads.ended.get(&one.copy).copied().unwrap_or_default();
            wanted.retain(|one| ended(one) < MOST_LOADS);
            if wanted.is_empty() {
                break;
            }
            let awaited = Arc::new(Awaited::new(holding.restored.token));
            holding.awaited = Some(Arc::clone(&awaited));
            let loading = self.load_all(
                namespace,
                &mut wanted,
                &mut loads,
                &mut holding.restored,
                &awaited,
                time,
            );
            let goes_on = loading.await;
            // A load may end when the lookup no longer looks at it, for example after the deadline.
            holding.end_wait();
            if !goes_on {
                break;
            }
        }
        for one in on_media() {
            match loads.failed.contains(&one.copy) {
                true => holding.restored.unreadable.push(one.index),
                false => holding.restored.left.push(one.index),
            }
        }
        holding.answer()
    }

    /// Loads these blocks, and begins with no others until all of them have ended. Returns false when some
    /// are left.
    async fn load_all(
        self: &Arc<Self>,
        namespace: NamespaceId,
        wanted: &mut Vec<Wanted>,
        loads: &mut Loads,
        restored: &mut Restored,
        awaited: &Arc<Awaited>,
        time: Time,
    ) -> bool {
        let mut progress = tokio::time::Instant::now();
        let mut waits_for_quota: Option<QuotaWait<'_>> = None;
        let mut commits = Vec::new();
        loop {
            // Both notice every event from here on, even before they are awaited.
            let recheck = self.tiering.recheck.notified();
            let loaded = self.tiering.loaded.notified();
            let mut goes = false;
            let mut over_quota = Goal::default();
            let begun = self.begin_loads(wanted, WINDOW, Some(awaited));
            let waits = begun.iter().any(|begun| begun.waits());
            self.wake_evictor_if_low();
            let mut begun = begun.into_iter();
            wanted.retain(|one| match begun.next() {
                Some(Begun::Goes(_)) => {
                    goes = true;
                    true
                }
                Some(Begun::NoRoom) => {
                    self.want_room(one);
                    true
                }
                Some(Begun::AtQuota) => {
                    let need = need_of(one);
                    over_quota.bytes += need.bytes;
                    over_quota.blocks += need.blocks;
                    true
                }
                Some(Begun::NeverFits) => {
                    loads.ended.insert(one.copy, MOST_LOADS);
                    false
                }
                Some(Begun::Queued) => true,
                Some(Begun::Unreadable) => {
                    loads.failed.insert(one.copy);
                    false
                }
                // The key is looked up again after the commit.
                Some(Begun::KeyChanges) => {
                    commits.extend(one.commit.clone());
                    false
                }
                Some(Begun::Ended) | None => {
                    *loads.ended.entry(one.copy).or_default() += 1;
                    let is_held = self.hold(one, restored, awaited);
                    // Where no load has begun, the failure is of an earlier one, perhaps at another place.
                    if !is_held && one.seen.is_some() && self.has_failed(one) {
                        loads.failed.insert(one.copy);
                    }
                    progress = tokio::time::Instant::now();
                    false
                }
            });
            // The full need of this lookup is registered once, for as long as the lookup waits.
            self.wait_for_quota(namespace, over_quota, &mut waits_for_quota);
            if wanted.is_empty() {
                let has_some = !restored.held.is_empty();
                return self.commits_end(&commits, has_some, time).await;
            }
            if waits {
                self.evictor_wake.wake();
            }
            let now = tokio::time::Instant::now();
            let is_stuck =
                !goes && !restored.held.is_empty() && now.duration_since(progress) > ROOM_PATIENCE;
            if now >= time.too_long {
                // No lookup waits for these loads again.
                let begun = wanted.iter().filter(|one| one.seen.is_some());
                loads.failed.extend(begun.map(|one| one.copy));
            }
            if is_stuck || now >= time.deadline || !self.leads() || self.is_stopping() {
                return false;
            }
            let until = match waits {
                true => time.deadline.min(now + RETRY),
                false => time.deadline,
            };
            let woken = async {
                tokio::select! {
                    biased;
                    () = recheck => {}
                    // The end of another lookup's load may make room.
                    () = loaded, if waits => {}
                    () = awaited.all_ended(), if !waits => {}
                }
            };
            let _late_or_woken = tokio::time::timeout_at(until, woken).await;
        }
    }

    /// Waits for the ends of these commits. If the lookup has loaded blocks, `has_some` is true and the wait is short.
    /// Returns false when the lookup must be answered first.
    async fn commits_end(&self, commits: &[Arc<End>], has_some: bool, time: Time) -> bool {
        if commits.is_empty() {
            return true;
        }
        let recheck = self.tiering.recheck.notified();
        let now = tokio::time::Instant::now();
        if now >= time.deadline || !self.leads() || self.is_stopping() {
            return false;
        }
        let until = match has_some {
            true => time.deadline.min(now + ROOM_PATIENCE),
            false => time.deadline,
        };
        let all = async {
            for end in commits {
                end.reached().await;
            }
        };
        let woken = async {
            tokio::select! {
                biased;
                () = recheck => {}
                () = all => {}
            }
        };
        tokio::time::timeout_at(until, woken).await.is_ok()
    }

    /// Leases a loaded block until its lookup has leased it. Returns false when the block is not in memory.
    fn hold(&self, wanted: &Wanted, restored: &mut Restored, awaited: &Awaited) -> bool {
        let block = &wanted.block;
        let leased = awaited.take(wanted.index).or_else(|| {
            let is_there = self.lease_loaded(block, restored.token);
            is_there.then(|| (block.key.clone(), block.version))
        });
        let Some(leased) = leased else { return false };
        restored.held.insert(wanted.index, leased);
        true
    }

    fn has_failed(&self, wanted: &Wanted) -> bool {
        let traffic = self.tiering.traffic.lock();
        let failed = &traffic.failed;
        failed.contains(&(wanted.copy, wanted.block.version))
    }

    /// Releases the leases of [`Pool::restore`]. Call this when the blocks have leases of their own.
    pub fn end_restored(&self, namespace: NamespaceId, restored: &Restored) {
        if restored.held.is_empty() {
            return;
        }
        let held = restored.held.values();
        let (keys, versions): (Vec<KeyRef<'_>>, Vec<Version>) =
            held.map(|(key, version)| (key.as_ref(), *version)).unzip();
        let moved = &self.quarantine.moved;
        // Only the directory of memory is searched, which has the lease. Others may hold copies on media. A
        // block that was lost meanwhile may have been loaded again, and does not count this lease.
        self.directory.visit(namespace, &keys[..], |at, found| {
            let is_it = |version| versions.get(at) == Some(&version);
            if let Some(mut found) = found.filter(|found| is_it(found.version()))
                && !moved.may_be_elsewhere(found.version(), restored.token)
            {
                found.release(restored.token, self.now());
            }
        });
        // A waiting put may need the released blocks.
        if !self.put_queue.is_empty() {
            self.evictor_wake.wake();
        }
    }

    /// Asks the evictor for room for a load. Only loads with a waiting lookup ask.
    fn want_room(&self, wanted: &Wanted) {
        let traffic = self.tiering.traffic.lock();
        let Some(node) = traffic.uses.get(&wanted.at.segment).map(|used| &used.node) else {
            return;
        };
        self.want_room_on(
            wanted.at.segment,
            WantedRoom::new(node, wanted.block.length),
        );
    }

    /// Asks the evictor for room for a block on a node. `of` is any segment of the node, in memory or on a
    /// medium.
    pub(in crate::pool) fn want_room_on(&self, of: SegmentId, wanted: WantedRoom) {
        let (node, length, before) = (Arc::clone(&wanted.node), wanted.largest, wanted.before);
        let mut rooms = self.tiering.wanted_room.lock();
        let room = rooms.entry(of).or_insert(wanted);
        room.node = node;
        room.bytes = Length((room.bytes.0 + length.0).min(WINDOW));
        room.largest = room.largest.max(length);
        room.before = room.before.max(before);
    }

    /// Asks the evictor which block leaves a node next for a block of this length. No block leaves for this.
    pub(in crate::pool) fn ask_next_victim(&self, node: &Arc<StoreNode>, length: Length) {
        let Some(of) = node.segments().first().copied() else {
            return;
        };
        let mut rooms = self.tiering.wanted_room.lock();
        rooms.entry(of).or_insert_with(|| WantedRoom {
            before: WantedRoom::NO_BLOCK,
            ..WantedRoom::new(node, length)
        });
    }

    /// Wakes the evictor if loads wait for room, or for a quota.
    pub(super) fn ask_for_wanted_room(&self) {
        if !self.tiering.wanted_room.lock().is_empty() || !self.quotas.is_empty() {
            self.evictor_wake.wake();
        }
    }

    /// Takes the requests for room since the last call. Loads that still wait ask again.
    pub(in crate::pool) fn take_wanted_room(&self) -> Vec<WantedRoom> {
        let mut rooms = self.tiering.wanted_room.lock();
        rooms.drain().map(|(_, room)| room).collect()
    }

    /// The blocks with a copy on a medium that are not in memory, as `is_in_memory` says.
    fn on_media_only(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        is_use: bool,
        is_in_memory: impl Fn(&View<'_>, &BlockRef<'_>) -> bool,
    ) -> Vec<Wanted> {
        let mut in_memory = vec![false; keys.len()];
        let view = self.view();
        self.directory.visit(namespace, keys, |index, block| {
            let is_present = block.is_some_and(|block| is_in_memory(&view, &block.view()));
            if let Some(slot) = in_memory.get_mut(index) {
                *slot = is_present;
            }
        });
        drop(view);
        if in_memory.iter().all(|is_present| *is_present) {
            return Vec::new();
        }
        let mut wanted = Vec::new();
        let ticks = self.tier.directory().ticks(keys.len());
        self.tier
            .directory()
            .visit(namespace, keys, |index, block| {
                let Some(mut block) = block.filter(|_| in_memory.get(index) == Some(&false)) else {
                    return;
                };
                if is_use {
                    block.touch(ticks.of(index));
                }
                let block = block.view();
                if let Some(at) = block.replicas().first() {
                    wanted.push(Wanted {
                        index,
                        copy: block.id(),
                        block: Moved::of(&block),
                        at: *at,
                        seen: None,
                        used: (!is_use).then(|| block.tick()),
                        commit: None,
                    });
                }
            });
        wanted
    }

    /// Begins to load the first of these blocks that lie only on media, if memory has room now. No lookup
    /// waits for these loads. A caller that asks for the blocks' presence will probably read them.
    pub(in crate::pool) fn prefetch(&self, namespace: NamespaceId, keys: &KeyBatch<'_>) {
        let mut wanted =
            self.on_media_only(namespace, keys, true, |view, block| view.is_present(block));
        if !wanted.is_empty() {
            self.begin_loads(&mut wanted, WINDOW / 2, None);
            self.wake_evictor_if_low();
        }
    }

    /// Begins to load a hard-pinned block whose zone is being emptied, and asks for its room in memory. The
    /// memory of a node that leaves does not count.
    pub(super) fn load_pinned(&self, namespace: NamespaceId, key: &Key) {
        let keys = [key.as_ref()];
        let keys = KeyBatch::from(&keys[..]);
        let mut wanted =
            self.on_media_only(namespace, &keys, true, |view, block| view.stays(block));
        let begun = self.begin_loads(&mut wanted, WINDOW, None);
        for (one, begun) in wanted.iter().zip(begun) {
            match begun {
                // The demoter wakes the evictor for these loads. The evictor itself may run this, and would
                // wake itself again and again.
                Begun::NoRoom => self.want_room(one),
                Begun::AtQuota => self.quotas.note_load(namespace, need_of(one)),
                _ => {}
            }
        }
    }

    /// Looks up the offsets of copies again whose loads have not begun, since a copy moves when its zone is
    /// emptied. A copy that is gone keeps its old offset, and no load of it begins.
    fn find_again(&self, wanted: &mut [Wanted]) {
        for one in wanted.iter_mut().filter(|one| one.seen.is_none()) {
            let copies = self.tier.directory();
            let keys = [one.block.key.as_ref()];
            copies.visit(one.block.namespace, &keys, |_, block| {
                let block = block.filter(|block| block.version() == one.block.version);
                if let Some(block) = block
                    && let Some(at) = block.view().replicas().first()
                {
                    (one.copy, one.at) = (block.view().id(), *at);
                }
            });
        }
    }

    /// Looks up the commits that replace the blocks whose loads have not begun. A commit may begin after this call.
    /// Then the block is loaded in vain.
    fn find_commits(&self, wanted: &mut [Wanted]) {
        let mut reservations = self.reservations.lock();
        for one in wanted.iter_mut().filter(|one| one.seen.is_none()) {
            let block = &one.block;
            let (namespace, version) = (block.namespace, block.version);
            one.commit = reservations.end_of_commit(namespace, block.key.as_ref(), version);
        }
    }

    /// Begins loads, unless their medium has `window` bytes in progress. The orders for one node travel in
    /// one message. If each load is in progress or over, the lookup `awaited` waits for the ends.
    fn begin_loads(
        &self,
        wanted: &mut [Wanted],
        window: u64,
        awaited: Option<&Arc<Awaited>>,
    ) -> Vec<Begun> {
        self.find_again(wanted);
        self.find_commits(wanted);
        // The table of segments is locked before the traffic, as everywhere else.
        let segments = self.placement.segments();
        let mut traffic = self.tiering.traffic.lock();
        let mut orders = Orders::default();
        let begun: Vec<Begun> = wanted
            .iter_mut()
            .map(|one| {
                let begun = self.begin_load(one, window, &segments, &mut traffic, &mut orders);
                if let Begun::Goes(ticket) = begun {
                    one.seen = Some(ticket);
                }
                begun
            })
            .collect();
        if let Some(awaited) = awaited
            && !begun.iter().any(|begun| begun.waits())
        {
            let going = wanted.iter().zip(&begun);
            let going = going.filter(|(_, begun)| matches!(begun, Begun::Goes(_)));
            let loads = going.map(|(one, _)| (one.index, (one.copy, one.block.version)));
            traffic.await_loads(awaited, loads);
        }
        orders.send();
        begun
    }

    fn wake_evictor_if_low(&self) {
        if self.is_low(&self.placement.usage()) {
            self.evictor_wake.wake();
        }
    }

    fn begin_load(
        &self,
        wanted: &Wanted,
        window: u64,
        segments: &Segments<'_>,
        traffic: &mut Traffic,
        orders: &mut Orders,
    ) -> Begun {
        let Wanted {
            copy,
            block,
            at,
            seen,
            used: last_use,
            ..
        } = wanted;
        let Some(medium) = self.tier.medium(at.segment) else {
            return Begun::Unreadable;
        };
        // The wait for the loads of a medium that hangs ends here.
        let used = traffic.uses.get_mut(&at.segment);
        let Some(used) = used.filter(|used| used.is_readable()) else {
            return Begun::Unreadable;
        };
        // No eviction makes room for it. The medium may come to a node with more memory.
        if !used.fits_in_memory(block.length) {
            used.tell_of_long(medium.medium, block.length);
            return Begun::Unreadable;
        }
        let going = traffic.loading.get(&(*copy, block.version));
        let going = going.map(|load| load.ticket);
        // After the end of the load that was seen, another lookup may have begun the next one.
        if seen.is_some() && going != *seen {
            return Begun::Ended;
        }
        if let Some(ticket) = going {
            return Begun::Goes(ticket);
        }
        // The log would refuse the record of the loaded block, so memory would have made room in vain.
        if !self.takes_records() {
            return Begun::Unreadable;
        }
        if wanted.commit.is_some() {
            return Begun::KeyChanges;
        }
        if used.in_flight >= window {
            return Begun::Queued;
        }
        // Its old zone may have been written anew since the offset was read. From here on, the load keeps the zone.
        if !self.lies_at(block, Place::of(at)) {
            return Begun::Ended;
        }
        // A draining node serves its blocks until it stops.
        let (node, session) = (Arc::clone(&used.node), used.session);
        // Blocks of the same namespace are evicted for the quota, not those of others.
        let taken = self.below_quota(block.namespace, need_of(wanted), || {
            let to = segments.allocate_on(&node, block.length, block.namespace)?;
            Some((to, self.hold_block_quota(block.namespace)))
        });
        let (to, hold) = match taken {
            Ok(Some(taken)) => taken,
            Ok(None) => return Begun::NoRoom,
            Err(over) if over.is_final => return Begun::NeverFits,
            Err(_) => return Begun::AtQuota,
        };
        if !self.has_versions() {
            segments.release(&[to]);
            return Begun::Queued;
        }
        let grant = GrantId(self.next_version.fetch_add(1, Ordering::Relaxed));
        let extent = Extent {
            segment: to.segment,
            offset: to.offset,
            length: block.length,
        };
        let signed = node
            .signer
            .sign(node.incarnation, self.epoch, grant, extent);
        let place = Place {
            medium: at.segment,
            offset: at.offset,
        };
        let order = proto::Transfer {
            ticket: 0,
            from: Some(range(&on_medium(place, block.length))),
            to: Some(range(&extent)),
            version: block.version.0,
            checksum: block.checksum.0,
            grant: bytes::Bytes::copy_from_slice(&signed.mac),
            grant_id: grant.0,
        };
        let transfer = Transfer {
            node: Arc::clone(&node),
            session,
            block: block.clone(),
            place,
            direction: Direction::Load {
                copy: *copy,
                to,
                grant,
                used: *last_use,
            },
            _hold: hold,
        };
        let order = traffic.enter(&medium, transfer, order);
        let ticket = order.ticket;
        orders.push(&node, order);
        Begun::Goes(ticket)
    }
}

/// The need of a load, in bytes and blocks of its namespace's hard quotas.
fn need_of(wanted: &Wanted) -> Goal {
    Goal {
        bytes: Extents::rounded(wanted.block.length).0,
        blocks: 1,
    }
}
