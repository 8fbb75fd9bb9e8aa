//! The traffic between memory and media: the attached media, and the transfers in progress.
//!
//! ```text
//!  node ─ offers ─► attach ─► in use ──┬─ demoter (thread) ─ stores ─► copy in the tier
//!                                      └─ restore (a reader waits) ─ loads ─► block in memory
//! ```
//!
//! A node only carries out orders. Each order is one transfer with a ticket, which the node answers
//! once. A ticket belongs to the session that carried it. When the session ends, the outcome of its
//! tickets is unknown. The range of a store is then given up. The extent of a load goes through
//! quarantine, like the extent of a put that ended. The node offers its media again only when its
//! transfers have ended. So transfers of an earlier session never overlap those of a later session.
//!
//! **Architecture Invariant:** the result of a transfer is recorded only while the key's other copy
//! has the same version. No removal of the key may be on its way to the log, and no other put of
//! the key may be open. So the log never brings back a removed or replaced block. A load is recorded
//! beside an open put that is not committing: the log then has the load before the put. So the put
//! replaces the loaded block as it replaces any block in memory.

mod admission;
mod attach;
mod awaited;
mod demoter;
mod drained;
mod evacuate;
mod lines;
mod media;
mod recording;
mod restore;
mod stores;
#[cfg(test)]
mod tests;
mod transfers;
mod unrecorded;
mod zones;

pub use attach::{MOST_MEDIA, OfferedMedium};
pub(super) use demoter::{Put, start};
pub(super) use drained::Room;
pub(super) use evacuate::OnMedia;
pub use media::{Detached, MEDIUM_STATES, MediumView};
pub(super) use restore::{Restored, WantedRoom};
pub(super) use transfers::{Moved, range};

use super::Pool;
use crate::clock::BootInstant;
use crate::directory::{BlockRef, Removed};
use crate::membership::StoreNode;
use crate::placement::Extents;
use crate::replica::{BlockId, Replica};
use crate::workers::{Wake, Workers};
use admission::Admission;
use awaited::OpenLoad;
use kvpool_proto::MediumState;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Incarnation, Key, KeyRef, Length, MediumId, Offset, SegmentId, Version};
use lines::Demotions;
use parking_lot::Mutex;
use recording::Recording;
use smallvec::SmallVec;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use stores::Stores;
use tokio::sync::Notify;
use transfers::{Direction, Transfer};
use unrecorded::Unrecorded;
use zones::{Pause, Saving};

/// The most bytes of transfers in progress on one medium. This many fill the device's queue and fit
/// into a node's buffers.
const WINDOW: u64 = 64 << 20;

/// How often failed moves of copies are repeated, before the copies are dropped with their zone.
const MOST_LISTS_AGAIN: u32 = 2;

/// The state of all media in use and of all transfers.
#[derive(Debug, Default)]
pub(super) struct Tiering {
    traffic: Mutex<Traffic>,
    demotions: Mutex<Demotions>,
    /// Locked while stores are ordered.
    tending: Mutex<()>,
    /// Locked while a put's blocks become visible and are queued for their copies.
    pub(super) queueing: Mutex<()>,
    admission: Admission,
    absent: Mutex<HashMap<SegmentId, Absence>>,
    /// Whether copies were lost or no longer count. Their blocks in memory then need new copies.
    has_lost_copies: AtomicBool,
    /// Keys whose removals are on their way to the log, with the number of such removals.
    leaving: Mutex<HashMap<(NamespaceId, Key), u32>>,
    /// Loads and stores whose records the log has refused.
    refused: Mutex<Vec<Transfer>>,
    /// The room in memory that loads wait for, by the medium of the copies.
    wanted_room: Mutex<HashMap<SegmentId, WantedRoom>>,
    /// Notified when a load ends, for the lookups that wait for room, a quota or the window of a medium.
    loaded: Notify,
    /// Notified when all lookups must look at their loads again for another reason than the end of a load.
    recheck: Notify,
    wake: Wake,
}

/// A medium that no connected node has, or that its node has not attached.
#[derive(Debug)]
struct Absence {
    /// When the leader first noticed the absence.
    since: BootInstant,
    /// Whether a connected node offers the medium.
    is_here: bool,
    /// Whether the copies on the medium still count as copies.
    is_counted: bool,
}

#[derive(Debug, Default)]
struct Traffic {
    last_ticket: u64,
    open: HashMap<u64, Transfer>,
    stores: Stores,
    recording: Recording,
    /// The copies that are being loaded. An entry ends when the block is published in memory, or its extent there
    /// is given up.
    loading: HashMap<(BlockId, Version), OpenLoad>,
    /// The copies whose last load failed on the node because of the copy or its medium. Beyond 4096 all are forgotten.
    failed: HashSet<(BlockId, Version)>,
    unrecorded: Unrecorded,
    uses: HashMap<SegmentId, Use>,
    /// The number of the last media list that a node sent.
    last_list: u64,
    /// By node, session and medium: the latest media list that offers the medium, until the list is
    /// processed.
    latest_lists: HashMap<(Incarnation, u64, MediumId), u64>,
}

/// A medium that a node offers in its present session.
#[derive(Debug)]
struct Use {
    node: Arc<StoreNode>,
    session: u64,
    state: MediumState,
    /// Whether the disk has refused a write in this session.
    refuses_writes: bool,
    /// Whether the node has confirmed the generation.
    is_attached: bool,
    in_flight: u64,
    /// The number of transfers in progress, by zone.
    busy: HashMap<u32, u32>,
    /// The number of copies that are moving to another zone and are not recorded there yet.
    forwards: u32,
    /// Whether a copy that should have moved is still at its old offset, intact.
    has_unmoved: bool,
    /// How often the moves of the present oldest zone were repeated.
    lists_again: u32,
    /// The names of the namespaces whose blocks the medium takes; empty for all.
    namespaces: Vec<String>,
    emptying: Emptying,
    /// The pause before the oldest zone is emptied again.
    pause: Option<Pause>,
    /// Whether the log has told that a copy is longer than the memory of the node.
    is_told_of_long: bool,
}

/// The media whose copies can be read now, each with the longest extent of its node's memory. A longer copy cannot be
/// loaded there.
#[derive(Debug)]
pub(super) struct Readable(HashMap<SegmentId, Length>);

impl Readable {
    /// Whether a copy of `length` bytes on a medium can be read.
    pub(super) fn has(&self, medium: SegmentId, length: Length) -> bool {
        let longest = self.0.get(&medium);
        longest.is_some_and(|longest| Extents::rounded(length) <= *longest)
    }
}

/// How far the next zone is emptied. It has the oldest copies.
#[derive(Debug)]
enum Emptying {
    /// Emptying has not begun.
    Idle,
    /// Copies that were used since the zone was written are moving to the written zone.
    Saving(Saving),
    /// The removal of the other copies is being logged, or records of an earlier session are.
    Logging,
    /// Transfers may still touch the zone.
    Draining,
}

impl Use {
    fn is_readable(&self) -> bool {
        let serves = matches!(
            self.state,
            MediumState::MediumReady | MediumState::MediumReadOnly
        );
        serves && self.is_attached && self.node.is_readable()
    }

    /// Whether the memory of the node can take a block of `length` bytes, at least once it is empty.
    fn fits_in_memory(&self, length: Length) -> bool {
        Extents::rounded(length) <= self.node.longest_extent()
    }

    /// Tells once that a copy cannot be read.
    fn tell_of_long(&mut self, medium: MediumId, length: Length) {
        if !std::mem::replace(&mut self.is_told_of_long, true) {
            tracing::warn!(node = %self.node.name, %medium, %length, longest = %self.node.longest_extent(),
                "a block on the medium is longer than any segment of its node takes, and is a miss: start the node \
                 with a larger --segment");
        }
    }

    /// Whether `node` offers the medium in this session.
    fn is_of(&self, node: &Arc<StoreNode>, session: u64) -> bool {
        self.session == session && Arc::ptr_eq(&self.node, node)
    }

    /// Whether the node still has the session in which it offered the medium.
    fn is_in_session(&self) -> bool {
        self.node.session_number() == Some(self.session)
    }

    fn takes_stores(&self) -> bool {
        self.stores() == TakesStores::Now
    }

    /// Takes the state that the node offers.
    ///
    /// A disk that has refused a write takes none until its node restarts. An offer may be processed after the
    /// refusal, although its state is from before.
    fn set_state(&mut self, offered: MediumState) {
        self.state = match offered {
            MediumState::MediumReady if self.refuses_writes => MediumState::MediumReadOnly,
            offered => offered,
        };
    }

    /// Whether the medium takes no stores until its node restarts, and no transfer in progress still
    /// matters. A read-only medium finishes its writes first.
    fn has_stopped(&self, is_written: impl FnOnce() -> bool) -> bool {
        match self.state {
            MediumState::MediumGone => true,
            MediumState::MediumReadOnly => !is_written(),
            MediumState::MediumReady | MediumState::MediumSlow => false,
        }
    }

    /// Whether the copies of the oldest zone must be moved again, because some moves failed. Bounds
    /// the number of repetitions, so that a medium that fails every move does not block the zone.
    fn moves_again(&mut self) -> bool {
        let has_unmoved = std::mem::take(&mut self.has_unmoved);
        let is_again = has_unmoved && self.lists_again < MOST_LISTS_AGAIN;
        self.lists_again = match is_again {
            true => self.lists_again + 1,
            false => 0,
        };
        is_again
    }

    fn stores(&self) -> TakesStores {
        match self.state {
            _ if !self.is_attached || !self.is_in_session() => TakesStores::Never,
            MediumState::MediumReady => TakesStores::Now,
            MediumState::MediumSlow => TakesStores::Later,
            MediumState::MediumReadOnly | MediumState::MediumGone => TakesStores::Never,
        }
    }
}

/// When a medium takes stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TakesStores {
    /// Not before the node attaches it again: it is read-only, gone, or not attached in the node's
    /// present session.
    Never,
    /// Once the medium answers again. It is slow now.
    Later,
    /// Now.
    Now,
}

impl Tiering {
    pub(super) fn new(workers: Workers) -> Self {
        Self {
            wake: Wake::new(workers),
            ..Self::default()
        }
    }

    /// The media whose copies can be read now.
    pub(super) fn readable(&self) -> Readable {
        let traffic = self.traffic.lock();
        let readable = traffic.uses.iter().filter(|(_, used)| used.is_readable());
        let longest = readable.map(|(id, used)| (*id, used.node.longest_extent()));
        Readable(longest.collect())
    }

    /// When the node's media take stores: the earliest time over all media. `None` if no medium is
    /// attached.
    fn takes_stores_of(&self, node: &StoreNode) -> Option<TakesStores> {
        let traffic = self.traffic.lock();
        let uses = traffic.uses.values();
        // A medium must be attached anew in each session.
        let session = node.session_number();
        let attached = uses.filter(|used| {
            used.is_attached
                && used.node.incarnation == node.incarnation
                && session == Some(used.session)
        });
        attached.map(Use::stores).max()
    }

    fn wake(&self) {
        self.wake.wake();
    }

    /// Wakes every lookup that waits for loads. Call it after any event that may end such a wait, except the end of
    /// a load.
    pub(super) fn wake_lookups(&self) {
        self.recheck.notify_waiters();
    }

    /// Calls `each` for every block that is being loaded, with its extent in memory.
    pub(super) fn each_load(&self, mut each: impl FnMut(&Replica, Length, Version)) {
        for ((_, version), load) in &self.traffic.lock().loading {
            each(&load.to, load.length, *version);
        }
    }

    /// The number of orders without an answer, of loads that have not ended, and of removals on their way to
    /// the log.
    pub(super) fn open(&self) -> usize {
        let leaving = self.leaving.lock().len();
        let traffic = self.traffic.lock();
        traffic.open.len() + traffic.loading.len() + leaving
    }
}

impl Pool {
    /// Whether the pool has, or had, a medium.
    pub fn has_media(&self) -> bool {
        !self.tier.is_empty()
    }

    /// Runs `submit`, which logs the removal of keys. No transfer of these keys is recorded after it. Pass
    /// the keys to [`Pool::removal_ended`] when the removal has taken effect.
    pub(super) fn removing(
        &self,
        keys: impl Iterator<Item = (NamespaceId, Key)>,
        submit: impl FnOnce(),
    ) {
        if self.tier.is_empty() {
            return submit();
        }
        let mut leaving = self.tiering.leaving.lock();
        let mut traffic = self.tiering.traffic.lock();
        for (namespace, key) in keys {
            // A store that ends after the removal must leave no copy either.
            traffic.stores.key_changed(namespace, &key);
            *leaving.entry((namespace, key)).or_default() += 1;
        }
        drop((traffic, leaving));
        // Transfers of these keys are refused from here on. A log that has failed ends the removal
        // within this call.
        submit();
    }

    /// Ends [`Pool::removing`].
    pub(super) fn removal_ended(&self, keys: impl Iterator<Item = (NamespaceId, Key)>) {
        if self.tier.is_empty() {
            return;
        }
        let mut leaving = self.tiering.leaving.lock();
        for key in keys {
            if let Entry::Occupied(mut removals) = leaving.entry(key) {
                *removals.get_mut() -= 1;
                if *removals.get() == 0 {
                    removals.remove();
                }
            }
        }
    }

    /// Waits for transfers that are being recorded. If an account was closed before this call, no transfer of
    /// it is recorded afterwards.
    pub(super) fn record_no_transfer(&self) {
        drop(self.reservations.lock());
    }

    /// Runs `submit`, which logs the new copy of a transferred block. Does not run it during a put
    /// of another version, during a removal of the key, or after the namespace is deleted. Of the
    /// puts, only one that is committing stops a load. Returns whether the copy was logged, as
    /// `submit` reports.
    fn record_transfer(&self, transfer: &Transfer, submit: impl FnOnce() -> bool) -> bool {
        let block = &transfer.block;
        let (namespace, key) = (block.namespace, &block.key);
        let mut reservations = self.reservations.lock();
        // A deletion closes the account before it takes this lock.
        if self.directory.accounts().of(namespace).is_closed() {
            return false;
        }
        // The block's own put ends a moment after the block is visible. Its record precedes this
        // one in the log.
        let is_replaced = match transfer.direction {
            // A put marks itself as committing under this lock, and then submits its record.
            Direction::Load { .. } => {
                !reservations.note_return(namespace, key.as_ref(), block.version)
            }
            Direction::Store | Direction::Forward { .. } => {
                reservations.has_other_put(namespace, key.as_ref(), block.version)
            }
        };
        if is_replaced {
            return false;
        }
        let leaving = self.tiering.leaving.lock();
        if leaving.contains_key(&(namespace, key.clone())) {
            return false;
        }
        submit()
    }

    /// Whether the key of a block has an open put of another version.
    fn has_other_put(&self, block: &Moved) -> bool {
        let reservations = self.reservations.lock();
        reservations.has_other_put(block.namespace, block.key.as_ref(), block.version)
    }

    /// Makes the stores of evicted blocks leave no copy: the stores of some keys, or all. Once the
    /// log is flushed after this call, the tier has every copy of an earlier store.
    pub(super) fn end_stores_of_evicted<'k>(
        &self,
        keys: Option<(NamespaceId, &mut dyn Iterator<Item = KeyRef<'k>>)>,
    ) {
        // Puts and copies of these keys are recorded under this lock.
        let reservations = self.reservations.lock();
        let mut traffic = self.tiering.traffic.lock();
        match keys {
            None => traffic.stores.end_of_evicted(),
            Some((namespace, keys)) => {
                for key in keys {
                    traffic.stores.key_changed(namespace, &key.to_key());
                }
            }
        }
        drop(traffic);
        drop(reservations);
    }

    /// Records that blocks were evicted from memory. A block without a copy is lost, unless it is being
    /// stored, or the record of its copy is on its way to the log.
    pub(super) fn note_left_memory(&self, left: &[Removed]) {
        if self.tier.is_empty() {
            return;
        }
        for block in left {
            let is_stored = || {
                let mut traffic = self.tiering.traffic.lock();
                let stores = &mut traffic.stores;
                stores.left_memory(block.namespace, &block.key, block.version)
            };
            let is_kept = || self.has_kept_copy(block.namespace, &block.key, block.version, None);
            let is_in_tier = || self.tier.left_memory(block) && is_kept();
            // A copy is being stored, then recorded, then in the tier. It may come there after the first question.
            let has_copy =
                is_in_tier() || is_stored() || self.is_being_recorded(block) || is_in_tier();
            self.evicted_beside_media(block, has_copy);
            if !has_copy {
                self.metrics.evicted_without_copy();
                self.tiering.admission.lost(block.namespace, &block.key);
            }
        }
    }

    /// Whether memory has a block with this key and version.
    fn is_in_memory(&self, namespace: NamespaceId, key: &Key, version: Version) -> bool {
        let mut is_it = false;
        self.directory
            .visit(namespace, &[key.as_ref()], |_, block| {
                is_it = block.is_some_and(|block| block.version() == version);
            });
        is_it
    }

    /// Whether readers find this version of a block in memory, now and later. The directory still
    /// lists a block for a while after its node has left. The memory of a draining node leaves with
    /// the node.
    fn stays_in_memory(&self, namespace: NamespaceId, key: &Key, version: Version) -> bool {
        let (view, mut is_it) = (self.view(), false);
        self.directory
            .visit(namespace, &[key.as_ref()], |_, block| {
                let block = block.filter(|block| block.version() == version);
                is_it = block.is_some_and(|block| view.stays(&block.view()));
            });
        is_it
    }

    /// Whether the key has a copy on a medium.
    pub(super) fn has_copy(&self, namespace: NamespaceId, key: KeyRef<'_>) -> bool {
        let mut has_copy = false;
        self.tier
            .directory()
            .visit(namespace, &[key], |_, block| has_copy = block.is_some());
        has_copy
    }

    /// Whether a medium takes blocks of a namespace.
    fn serves_namespace(&self, medium: SegmentId, namespace: NamespaceId) -> bool {
        let traffic = self.tiering.traffic.lock();
        let names = traffic
            .uses
            .get(&medium)
            .map(|used| used.namespaces.as_slice());
        names.is_some_and(|names| {
            let is_it = |name: &String| self.namespaces.resolve(name) == Ok(namespace);
            names.is_empty() || names.iter().any(is_it)
        })
    }

    /// Whether a slow medium that this node has in this session takes blocks of a namespace.
    fn has_slow_medium(&self, node: &Arc<StoreNode>, session: u64, namespace: NamespaceId) -> bool {
        let slow: SmallVec<[SegmentId; 4]> = {
            let traffic = self.tiering.traffic.lock();
            let is_slow =
                |used: &Use| used.is_of(node, session) && used.stores() == TakesStores::Later;
            let slow = traffic.uses.iter().filter(|(_, used)| is_slow(used));
            slow.map(|(id, _)| *id).collect()
        };
        slow.into_iter()
            .any(|medium| self.serves_namespace(medium, namespace))
    }

    /// Queues blocks in memory again, because copies on media that do not come back count no more.
    pub(super) fn replace_copies_that_leave(&self) {
        self.tiering.has_lost_copies.store(true, Ordering::Release);
        self.tiering.wake();
    }

    /// Whether the block's copy will outlive its memory. The copy's medium must not have failed,
    /// nor be absent for long. The medium's node must not be out of service. `node` is an
    /// exception: its own copies count. The copy must not be longer than the memory of its node.
    pub(super) fn has_kept_copy(
        &self,
        namespace: NamespaceId,
        key: &Key,
        version: Version,
        node: Option<&StoreNode>,
    ) -> bool {
        let mut found = None;
        self.tier
            .directory()
            .visit(namespace, &[key.as_ref()], |_, block| {
                let copy = block.filter(|block| block.version() == version);
                let first = |block: BlockRef<'_>| {
                    let medium = block.replicas().first()?.segment;
                    Some((medium, block.length()))
                };
                found = copy.and_then(|copy| first(copy.view()));
            });
        found.is_some_and(|(medium, length)| {
            self.may_load_from(medium, length) && self.keeps_copies(medium, node)
        })
    }

    /// Whether the memory of a medium's node takes a block of `length` bytes. A node without a session may come back
    /// with more memory.
    fn may_load_from(&self, medium: SegmentId, length: Length) -> bool {
        let traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get(&medium);
        used.is_none_or(|used| !used.node.is_connected() || used.fits_in_memory(length))
    }

    /// Whether a block has a copy on another medium than this one that can be read and stays. The node of such a copy
    /// does not leave, and the copy's zone is not the next one to be emptied. A copy whose record is on its way to the
    /// log counts too.
    fn has_good_copy_beside(&self, block: &Moved, medium: SegmentId) -> bool {
        let is_beside = |at: &Place| at.medium != medium && self.outlasts_next_zone(*at);
        // Read before the tier: the tier has a copy before the copy leaves this table.
        let on_their_way = self.tiering.traffic.lock().recording.places(block);
        let mut beside: SmallVec<[Place; 2]> =
            on_their_way.into_iter().filter(&is_beside).collect();
        let keys = [block.key.as_ref()];
        let copies = self.tier.directory();
        copies.visit(block.namespace, &keys, |_, copy| {
            let copy = copy.filter(|copy| copy.version() == block.version);
            let at = copy.and_then(|copy| copy.view().replicas().first().map(Place::of));
            // Asked under the lock of the copy. After it, the zone could be emptied and written again.
            beside.extend(at.filter(&is_beside));
        });
        let traffic = self.tiering.traffic.lock();
        beside.iter().any(|at| {
            let used = traffic.uses.get(&at.medium);
            used.is_some_and(|used| {
                used.is_readable() && used.node.stays() && used.fits_in_memory(block.length)
            })
        })
    }

    /// Whether a medium that takes stores now is getting a copy of the block, or the record of a copy is on its way to
    /// the log.
    fn is_being_copied(&self, block: &Moved) -> bool {
        let traffic = self.tiering.traffic.lock();
        let mut media = traffic.stores.media(block).iter();
        let is_written = media.any(|medium| {
            let used = traffic.uses.get(medium);
            used.is_some_and(Use::takes_stores)
        });
        is_written || !traffic.recording.places(block).is_empty()
    }

    /// Whether the zone of a copy is not the next one to be emptied.
    fn outlasts_next_zone(&self, at: Place) -> bool {
        let medium = self.tier.medium(at.medium);
        medium.is_some_and(|medium| medium.zone_of(at.offset) != medium.next_zone())
    }

    /// Whether the node has a medium whose copies count as kept.
    pub(super) fn keeps_copies_on_own_media(&self, node: &StoreNode) -> bool {
        let own: Vec<SegmentId> = {
            let traffic = self.tiering.traffic.lock();
            let uses = traffic.uses.iter();
            let own = uses.filter(|(_, used)| used.node.incarnation == node.incarnation);
            own.map(|(id, _)| *id).collect()
        };
        own.into_iter()
            .any(|medium| self.keeps_copies(medium, Some(node)))
    }

    fn keeps_copies(&self, medium: SegmentId, node: Option<&StoreNode>) -> bool {
        if let Some(used) = self.tiering.traffic.lock().uses.get(&medium) {
            let is_own = node.is_some_and(|node| node.incarnation == used.node.incarnation);
            let has_failed = used.node.is_connected() && used.state == MediumState::MediumGone;
            // A new leader may hear that the media leave before an operator orders the drain anew.
            let leaves = used.node.leaves() || used.node.media_leave();
            if has_failed || (leaves && !is_own) {
                return false;
            }
        }
        let absent = self.tiering.absent.lock();
        absent.get(&medium).is_none_or(|absence| absence.is_counted)
    }

    /// Whether the tier has a copy with this key and version.
    pub(super) fn is_on_medium(&self, namespace: NamespaceId, key: &Key, version: Version) -> bool {
        let mut is_it = false;
        self.tier
            .directory()
            .visit(namespace, &[key.as_ref()], |_, block| {
                is_it = block.is_some_and(|block| block.version() == version);
            });
        is_it
    }
}

/// The location of a copy on a medium: the segment of the medium, and the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    medium: SegmentId,
    offset: Offset,
}

impl Place {
    const fn of(copy: &Replica) -> Self {
        Self {
            medium: copy.segment,
            offset: copy.offset,
        }
    }
}
