//! The types with which callers see blocks.

use super::common::Common;
use super::stripe::Stripe;
use crate::clock::BootInstant;
use crate::placement::Extents;
use crate::replica::{BlockId, Copies, Replica};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Key, Length, SegmentId, Version};
use std::ops::Deref;

/// A position in the order of all uses of all blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

impl Tick {
    /// Later than every use.
    pub const MAX: Self = Self(u64::MAX);
}

/// The ticks of one batch. The last key has the earliest tick, so a chain's parents are always more
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

/// A borrowed list of at least one replica of a block.
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

/// A block to publish.
#[derive(Clone, Debug)]
pub struct NewBlock {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// Version of the block, above every earlier version of the key.
    pub version: Version,
    /// Length in bytes: above zero and below 4 GiB.
    pub length: Length,
    /// Checksum of the block's bytes.
    pub checksum: Checksum,
    /// Replicas of the block, at least one.
    pub replicas: Copies,
    /// Key of the block before this one in the chain.
    pub parent: Option<Key>,
    /// Until this time eviction takes the block last.
    pub soft_pin_until: Option<BootInstant>,
    /// A hard-pinned block is never evicted.
    pub hard_pin: bool,
    /// The tick of the last use.
    pub tick: Tick,
    /// The end of the leases on an earlier block of the key, which may have left while the put was
    /// open. If that block has left, the new block is leased until then. So a holder of the earlier
    /// block may release its lease here.
    pub leased_until: Option<BootInstant>,
}

/// The outcome of publishing one block.
#[derive(Clone, Debug)]
pub struct Published {
    /// The block's slot. `None` when the directory refused the block. Then the key has a later version, or
    /// this version at the same extent. Or the block has no replica, no bytes, or 4 GiB and more.
    pub id: Option<BlockId>,
    /// The earlier version of the key. Its leases and its count of holders continue on the new
    /// version. Its extents may be reused only after its lease ends.
    pub replaced: Option<Box<Removed>>,
}

/// A block that has left the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// Version of the block.
    pub version: Version,
    /// Length in bytes.
    pub length: Length,
    /// Replicas that the block had.
    pub replicas: Copies,
    /// The end of the last lease; zero without a lease.
    pub lease_until: BootInstant,
    /// The last use.
    pub tick: Tick,
}

impl Removed {
    /// The bytes of all replicas together.
    pub fn bytes(&self) -> u64 {
        self.length.0 * self.replicas.len() as u64
    }

    /// The bytes of all extents together: the room that the removal frees.
    pub fn footprint(&self) -> u64 {
        self.footprint_on(|_| true)
    }

    /// The bytes of the extents on the segments that `counts` accepts.
    pub fn footprint_on(&self, counts: impl Fn(SegmentId) -> bool) -> u64 {
        let extents = self.replicas.iter().filter(|r| counts(r.segment));
        Extents::rounded(self.length).0 * extents.count() as u64
    }
}

/// A replica that has left the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Namespace of the block's key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// Version of the block.
    pub version: Version,
    /// Length of the block in bytes.
    pub length: Length,
    /// The replica that left.
    pub replica: Replica,
    /// The end of the block's last lease; zero without a lease.
    pub lease_until: BootInstant,
    /// The block, when this was its last replica. Its list contains the replica too.
    pub removed: Option<Removed>,
}

/// The holders of a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holders(super::entry::Holders);

impl Holders {
    /// Holders of unknown number. The lease ends only by expiry.
    pub const fn unknown() -> Self {
        Self(super::entry::Holders::unknown())
    }
}

/// The outcome of adding a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// The block in this slot has the replica now.
    To(BlockId),
    /// The directory has no block of this version under the key.
    Missing,
    /// The block has a replica on the segment already.
    There,
}

/// The outcome of dropping a replica that is not the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Spared {
    /// The replica has left.
    Dropped(Box<Dropped>),
    /// The directory has no such block or replica.
    Missing,
    /// The replica is the block's only one, and stays.
    Last,
}

/// The caller's decision about one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Remove the block.
    Remove,
    /// Keep the block.
    Keep,
}

/// The outcome of a removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The directory had no block under the key.
    Missing,
    /// The caller kept the block.
    Kept,
    /// The directory removed the block.
    Removed(Removed),
}

/// A block, readable while its stripe is locked.
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

    /// The block's slot.
    pub fn id(&self) -> BlockId {
        self.stripe.id(self.slot)
    }

    /// Namespace of the key.
    pub fn namespace(&self) -> NamespaceId {
        self.stripe.namespace(self.slot, self.common)
    }

    /// Key of the block.
    pub fn key(&self) -> Key {
        self.stripe.key(self.slot, self.common)
    }

    fn rest(&self) -> &'a super::entry::Rest {
        self.stripe.entries.rest(self.slot)
    }

    /// Version of the block.
    pub fn version(&self) -> Version {
        self.rest().version
    }

    /// Length in bytes.
    pub fn length(&self) -> Length {
        Length(u64::from(self.rest().length))
    }

    /// Checksum of the block's bytes.
    pub fn checksum(&self) -> Checksum {
        self.rest().checksum
    }

    /// Replicas of the block.
    pub fn replicas(&self) -> Replicas<'a> {
        self.stripe.replicas(self.slot)
    }

    /// The segment of the only replica; `None` for several replicas.
    #[inline]
    pub fn only_segment(&self) -> Option<SegmentId> {
        self.stripe.only_segment(self.slot)
    }

    /// The tick of the last use.
    pub fn tick(&self) -> Tick {
        Tick(self.entry().tick())
    }

    /// The end of the last lease, which may be past; zero without a lease.
    pub fn lease_until(&self) -> BootInstant {
        self.common.absolute(self.entry().lease_until())
    }

    /// Whether a lease is unexpired. Before `floor` every block counts as leased.
    pub fn is_leased(&self, now: BootInstant, floor: BootInstant) -> bool {
        now < floor || self.lease_until() > now
    }

    /// The number of holders of an unexpired lease; `None` while it is unknown. The lease then ends only
    /// by expiry.
    pub fn known_holders(&self, now: BootInstant) -> Option<u8> {
        self.entry().known_holders(self.common.relative(now))
    }

    /// The end of the soft pin, unless eviction has already found it expired.
    pub fn soft_pin_until(&self) -> Option<BootInstant> {
        self.stripe.soft_until(self.slot)
    }

    /// Whether the block is never evicted.
    pub fn is_hard_pinned(&self) -> bool {
        self.entry().is_hard_pinned()
    }
}

/// A block, writable while its stripe is locked.
pub struct BlockMut<'a> {
    pub(super) common: &'a Common,
    pub(super) stripe: &'a mut Stripe,
    pub(super) slot: u32,
}

impl BlockMut<'_> {
    /// A readable view of the block.
    #[inline]
    pub fn view(&self) -> BlockRef<'_> {
        BlockRef {
            common: self.common,
            stripe: self.stripe,
            slot: self.slot,
        }
    }

    /// Version of the block.
    pub fn version(&self) -> Version {
        self.view().version()
    }

    /// Length in bytes.
    pub fn length(&self) -> Length {
        self.view().length()
    }

    /// Checksum of the block's bytes.
    pub fn checksum(&self) -> Checksum {
        self.view().checksum()
    }

    /// Replicas of the block.
    pub fn replicas(&self) -> Replicas<'_> {
        self.stripe.replicas(self.slot)
    }

    /// The end of the last lease, which may be past; zero without a lease.
    pub fn lease_until(&self) -> BootInstant {
        self.view().lease_until()
    }

    /// Whether a lease is unexpired. Before `floor` every block counts as leased.
    pub fn is_leased(&self, now: BootInstant, floor: BootInstant) -> bool {
        self.view().is_leased(now, floor)
    }

    /// Records a use. A root that is used moves back to the ordinary blocks.
    pub fn touch(&mut self, tick: Tick) {
        self.stripe.touch(self.slot, tick.0);
    }

    /// Adds a holder of the block's lease. The holder's token is `until`.
    pub fn lease(&mut self, until: BootInstant, now: BootInstant) {
        let (until, now) = (self.common.relative(until), self.common.relative(now));
        self.stripe.entries.at_mut(self.slot).lease(until, now);
    }

    /// Records a use by a new holder: [`BlockMut::lease`] and [`BlockMut::touch`] in one call.
    #[inline]
    pub fn lease_used(&mut self, until: BootInstant, now: BootInstant, tick: Tick) {
        let (until, now) = (self.common.relative(until), self.common.relative(now));
        self.stripe.lease_used(self.slot, until, now, tick.0);
    }

    /// Removes the holder whose lease ends at `token`. The last holder's release ends the lease. An
    /// expired token changes nothing, because its holder no longer counts.
    pub fn release(&mut self, token: BootInstant, now: BootInstant) {
        let (token, now) = (self.common.relative(token), self.common.relative(now));
        if self.stripe.entries.at_mut(self.slot).release(token, now) {
            self.stripe.unpark(self.slot);
        }
    }

    /// Sets the holders of a block that was published with [`super::Directory::publish_held`], and ends that
    /// hold.
    pub fn settle(&mut self, by: Holders) {
        if self.stripe.entries.at_mut(self.slot).settle(by.0) {
            self.stripe.unpark(self.slot);
        }
    }

    /// Removes and returns the holders of an unexpired lease, for another block with the same content.
    pub fn take_holders(&mut self, now: BootInstant) -> Holders {
        let now = self.common.relative(now);
        Holders(self.stripe.entries.at_mut(self.slot).take_holders(now))
    }

    /// Extends the lease of the holder whose lease ends at `token`. Returns false for an expired token:
    /// eviction may then take the block at any time.
    pub fn renew(&mut self, token: BootInstant, until: BootInstant, now: BootInstant) -> bool {
        let relative = |moment| self.common.relative(moment);
        let (token, until, now) = (relative(token), relative(until), relative(now));
        self.stripe
            .entries
            .at_mut(self.slot)
            .renew(token, until, now)
    }
}
