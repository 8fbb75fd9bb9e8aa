//! Blocks as the directory's callers see them.

use super::common::Common;
use super::stripe::Stripe;
use crate::clock::BootInstant;
use crate::placement::Extents;
use crate::replica::{BlockId, Copies, Replica};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Key, Length, SegmentId, Version};
use std::ops::Deref;

/// A moment in the order of all uses of all blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

/// The ticks of one batch: the last key has the earliest, so that a chain's parents are always more
/// recent than its children.
#[derive(Clone, Copy, Debug)]
pub struct Ticks {
    pub(super) first: u64,
    pub(super) count: u64,
}

impl Ticks {
    /// The tick of the batch's key `index`.
    pub fn of(&self, index: usize) -> Tick {
        Tick(self.first + self.count.saturating_sub(1 + index as u64))
    }
}

/// The copies of a block: a slice of at least one.
#[derive(Clone, Copy, Debug)]
pub struct Replicas<'a>(ReplicaSlice<'a>);

#[derive(Clone, Copy, Debug)]
enum ReplicaSlice<'a> {
    One([Replica; 1]),
    Many(&'a [Replica]),
}

impl Deref for Replicas<'_> {
    type Target = [Replica];

    fn deref(&self) -> &[Replica] {
        match &self.0 {
            ReplicaSlice::One(one) => one,
            ReplicaSlice::Many(many) => many,
        }
    }
}

impl<'a> Replicas<'a> {
    pub(super) fn one(replica: Replica) -> Self {
        Self(ReplicaSlice::One([replica]))
    }

    pub(super) fn many(replicas: &'a [Replica]) -> Self {
        Self(ReplicaSlice::Many(replicas))
    }
}

/// A block to make visible.
#[derive(Clone, Debug)]
pub struct NewBlock {
    /// Its namespace.
    pub namespace: NamespaceId,
    /// Its key.
    pub key: Key,
    /// Its version, above every earlier one of the key.
    pub version: Version,
    /// Its bytes: more than none, less than 4 GiB.
    pub length: Length,
    /// Their checksum.
    pub checksum: Checksum,
    /// Where it lies; at least one.
    pub replicas: Copies,
    /// The block before it in its chain.
    pub parent: Option<Key>,
    /// Until when it is evicted last.
    pub soft_pin_until: Option<BootInstant>,
    /// Whether it is never evicted.
    pub hard_pin: bool,
    /// When it was last used.
    pub tick: Tick,
}

/// What became of a block that was to be made visible.
#[derive(Clone, Debug)]
pub struct Published {
    /// Where it is. `None` when it was refused: the key has this version or a later one, or the
    /// block has no replica, no bytes, or 4 GiB and more.
    pub id: Option<BlockId>,
    /// The earlier version of the key. Leases on it count for the new one too, whose count of
    /// holders goes on; its extents may be reused only after its lease's end.
    pub replaced: Option<Box<Removed>>,
}

/// A block that has left the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Its namespace.
    pub namespace: NamespaceId,
    /// Its key.
    pub key: Key,
    /// Its version.
    pub version: Version,
    /// Its bytes.
    pub length: Length,
    /// Where it lay.
    pub replicas: Copies,
    /// When its last lease ends; zero if nobody held one.
    pub lease_until: BootInstant,
}

impl Removed {
    /// The bytes of all its replicas together.
    pub fn bytes(&self) -> u64 {
        self.length.0 * self.replicas.len() as u64
    }

    /// The bytes of all its extents together: what its leaving makes room for.
    pub fn footprint(&self) -> u64 {
        self.footprint_on(|_| true)
    }

    /// The bytes of its extents on some segments.
    pub fn footprint_on(&self, counts: impl Fn(SegmentId) -> bool) -> u64 {
        let extents = self.replicas.iter().filter(|r| counts(r.segment));
        Extents::rounded(self.length).0 * extents.count() as u64
    }
}

/// A replica that has left the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The block's namespace.
    pub namespace: NamespaceId,
    /// The block's key.
    pub key: Key,
    /// The block's version.
    pub version: Version,
    /// The block's bytes.
    pub length: Length,
    /// Where the replica lay.
    pub replica: Replica,
    /// When the block's last lease ends; zero if nobody holds one.
    pub lease_until: BootInstant,
    /// The block itself, when this was its last replica; it holds the replica too.
    pub removed: Option<Removed>,
}

/// Whether a block may be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes.
    Remove,
    /// It stays.
    Keep,
}

/// What became of a key that was to be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removal {
    /// It was not there.
    Missing,
    /// It stays.
    Kept,
    /// It is gone.
    Removed(Removed),
}

/// A block, seen while its stripe is locked.
#[derive(Clone, Copy)]
pub struct BlockRef<'a> {
    pub(super) common: &'a Common,
    pub(super) stripe: &'a Stripe,
    pub(super) slot: u32,
}

impl<'a> BlockRef<'a> {
    fn entry(&self) -> &'a super::entry::Entry {
        self.stripe.entries.at(self.slot)
    }

    /// Where it is in the directory.
    pub fn id(&self) -> BlockId {
        self.stripe.id(self.slot)
    }

    /// Its namespace.
    pub fn namespace(&self) -> NamespaceId {
        self.stripe.namespace(self.slot, self.common)
    }

    /// Its key.
    pub fn key(&self) -> Key {
        self.stripe.key(self.slot, self.common)
    }

    fn rest(&self) -> &'a super::entry::Rest {
        self.stripe.entries.rest(self.slot)
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.rest().version
    }

    /// Its bytes.
    pub fn length(&self) -> Length {
        Length(u64::from(self.rest().length))
    }

    /// Their checksum.
    pub fn checksum(&self) -> Checksum {
        self.rest().checksum
    }

    /// Where it lies.
    pub fn replicas(&self) -> Replicas<'a> {
        self.stripe.replicas(self.slot)
    }

    /// The segment of its only replica; `None` when it has several.
    #[inline]
    pub fn only_segment(&self) -> Option<SegmentId> {
        self.stripe.only_segment(self.slot)
    }

    /// When it was last used.
    pub fn tick(&self) -> Tick {
        Tick(self.entry().tick())
    }

    /// When its last lease ends or ended; zero if nobody holds one.
    pub fn lease_until(&self) -> BootInstant {
        self.common.absolute(self.entry().lease_until())
    }

    /// Whether someone holds a lease; before `floor` everything counts as leased.
    pub fn is_leased(&self, now: BootInstant, floor: BootInstant) -> bool {
        now < floor || self.lease_until() > now
    }

    /// Until when it is evicted last, if it is soft-pinned and eviction has not seen that run out.
    pub fn soft_pin_until(&self) -> Option<BootInstant> {
        self.stripe.soft_until(self.slot)
    }

    /// Whether it is never evicted.
    pub fn is_hard_pinned(&self) -> bool {
        self.entry().is_hard_pinned()
    }
}

/// A block, seen and changed while its stripe is locked.
pub struct BlockMut<'a> {
    pub(super) common: &'a Common,
    pub(super) stripe: &'a mut Stripe,
    pub(super) slot: u32,
}

impl BlockMut<'_> {
    /// The block, to look at.
    #[inline]
    pub fn view(&self) -> BlockRef<'_> {
        BlockRef {
            common: self.common,
            stripe: self.stripe,
            slot: self.slot,
        }
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.view().version()
    }

    /// Its bytes.
    pub fn length(&self) -> Length {
        self.view().length()
    }

    /// Their checksum.
    pub fn checksum(&self) -> Checksum {
        self.view().checksum()
    }

    /// Where it lies.
    pub fn replicas(&self) -> Replicas<'_> {
        self.stripe.replicas(self.slot)
    }

    /// When its last lease ends or ended; zero if nobody holds one.
    pub fn lease_until(&self) -> BootInstant {
        self.view().lease_until()
    }

    /// Whether someone holds a lease; before `floor` everything counts as leased.
    pub fn is_leased(&self, now: BootInstant, floor: BootInstant) -> bool {
        self.view().is_leased(now, floor)
    }

    /// Notes a use. A root that is used is an ordinary block again.
    pub fn touch(&mut self, tick: Tick) {
        self.stripe.touch(self.slot, tick.0);
    }

    /// Adds a holder of the block's lease, whose token is `until`.
    pub fn lease(&mut self, until: BootInstant, now: BootInstant) {
        let (until, now) = (self.common.relative(until), self.common.relative(now));
        self.stripe.entries.at_mut(self.slot).lease(until, now);
    }

    /// Notes a use by a new holder of the block's lease: [`BlockMut::lease`] and [`BlockMut::touch`].
    #[inline]
    pub fn lease_used(&mut self, until: BootInstant, now: BootInstant, tick: Tick) {
        let (until, now) = (self.common.relative(until), self.common.relative(now));
        self.stripe.lease_used(self.slot, until, now, tick.0);
    }

    /// Takes a holder away, who had the lease until `token`; the last one ends the lease. A token
    /// that has run out does nothing, since its holder no longer counts.
    pub fn release(&mut self, token: BootInstant, now: BootInstant) {
        let (token, now) = (self.common.relative(token), self.common.relative(now));
        if self.stripe.entries.at_mut(self.slot).release(token, now) {
            self.stripe.unpark(self.slot);
        }
    }

    /// Extends the lease of a holder who has it until `token`. Returns false when that has run out:
    /// the block may be gone at any time.
    pub fn renew(&mut self, token: BootInstant, until: BootInstant, now: BootInstant) -> bool {
        let relative = |moment| self.common.relative(moment);
        let (token, until, now) = (relative(token), relative(until), relative(now));
        self.stripe
            .entries
            .at_mut(self.slot)
            .renew(token, until, now)
    }
}
