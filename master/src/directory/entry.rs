//! The directory's data of one block, packed because there may be millions.

use crate::slab::NONE;
use kvpool_types::key::Digest;
use kvpool_types::{Checksum, Version};

/// The latest tick that an entry can store.
pub(super) const MAX_TICK: u64 = (1 << TICK_BITS) - 1;
/// The latest lease end that an entry can store, in milliseconds after the directory's start. It is 34 years.
pub(super) const MAX_LEASE: u64 = (1 << 40) - 1;
/// Offsets from this value on are stored beside the entry.
pub(super) const MAX_OFFSET: u64 = 1 << 48;

const TICK_BITS: u32 = 56;

const PLACE: u8 = 0b111;
const HARD_PIN: u8 = 1 << 3;
const SOFT_PIN: u8 = 1 << 4;
const LOST_PARENT: u8 = 1 << 5;
const SPREAD: u8 = 1 << 6;
const VACANT: u8 = 1 << 7;

/// The queue of its stripe in which a block waits for eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum QueueState {
    /// In the list of ordinary blocks, ordered by tick.
    Listed = 0,
    /// In the set of ordinary blocks whose tick does not fit at the end of the list.
    Stray = 1,
    /// In the set of roots: blocks that lost their parent.
    Root = 2,
    /// In the set of roots, with children.
    RootWithChildren = 3,
    /// In the set of soft-pinned blocks.
    Soft = 4,
    /// In no queue: eviction found the block leased, or on a node that takes no blocks. A timer or a recall
    /// returns it to a queue.
    Parked = 5,
    /// In no queue: the block has children. It returns when the last child leaves.
    Inner = 6,
    /// In no queue: the block is hard-pinned.
    Fixed = 7,
}

impl QueueState {
    const ALL: [Self; 8] = [
        Self::Listed,
        Self::Stray,
        Self::Root,
        Self::RootWithChildren,
        Self::Soft,
        Self::Parked,
        Self::Inner,
        Self::Fixed,
    ];
}

/// The fields of one block that a lookup and a use need, in one cache line. [`Rest`] has the fields
/// that are needed less often, [`Links`] the neighbours in the list of ordinary blocks.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Entry {
    pub(super) digest: Digest,
    /// The tick in the low 56 bits. The high 8 bits of the lease's end lie above it.
    recency: u64,
    /// The interner's number of the digest's affixes. With [`super::interner::NOT_INTERNED`] the
    /// key is stored beside the entry, and the digest's first four bytes number it. In a vacant
    /// slot: the next vacant slot.
    pub(super) affixes: u32,
    lease_low: u32,
    /// The only replica. With [`SPREAD`] set, `extent` numbers a list of replicas instead.
    pub(super) segment: u32,
    pub(super) extent: u32,
    offset_low: u32,
    offset_high: u16,
    flags: u8,
    holders: u8,
}

/// The fields that a lookup and a lease do not need.
#[derive(Debug, Default)]
pub(super) struct Rest {
    pub(super) version: Version,
    pub(super) checksum: Checksum,
    pub(super) length: u32,
    /// The block's node in the lineage, or [`NONE`].
    pub(super) lineage: u32,
}

impl Rest {
    /// The fields of a block without a parent or children.
    pub(super) fn new(version: Version, checksum: Checksum, length: u32) -> Self {
        Self {
            version,
            checksum,
            length,
            lineage: NONE,
        }
    }
}

/// The neighbours of a block in the list of ordinary blocks. A use of a block changes the links of
/// three blocks; apart from the other fields, five links share a cache line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) prev: u32,
    pub(super) next: u32,
    /// The block's order of eviction: [`super::orders::COMMON`], or its tenant's.
    pub(super) order: u32,
}

impl Links {
    /// The links of a block outside the list.
    pub(super) const UNLINKED: Self = Self {
        prev: NONE,
        next: NONE,
        order: super::orders::COMMON,
    };
}

/// A count of holders that has overflowed. The lease then ends only by expiry.
const STICKY: u8 = u8::MAX;
/// Stands for unknown holders of a block during a hold. No count reaches this value.
const HELD: u8 = STICKY - 1;

/// The holders of a lease, and its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Holders {
    pub(super) count: u8,
    pub(super) until: u64,
}

impl Holders {
    /// Holders of unknown number.
    pub(super) const fn unknown() -> Self {
        Self {
            count: STICKY,
            until: 0,
        }
    }
}

impl Entry {
    /// A block without key, replicas and queue.
    pub(super) fn new() -> Self {
        Self {
            digest: [0; 32],
            recency: 0,
            affixes: 0,
            lease_low: 0,
            segment: 0,
            extent: 0,
            offset_low: 0,
            offset_high: 0,
            flags: QueueState::Inner as u8,
            holders: 0,
        }
    }

    /// The content of a vacant slot, which names the next vacant slot.
    pub(super) fn vacant(next: u32) -> Self {
        let mut entry = Self::new();
        entry.flags = VACANT;
        entry.affixes = next;
        entry
    }

    /// The next vacant slot; `None` for an occupied slot.
    #[inline]
    pub(super) fn next_vacant(&self) -> Option<u32> {
        (self.flags & VACANT != 0).then_some(self.affixes)
    }

    #[inline]
    pub(super) fn queue_state(&self) -> QueueState {
        let [first, ..] = QueueState::ALL;
        QueueState::ALL
            .get(usize::from(self.flags & PLACE))
            .copied()
            .unwrap_or(first)
    }

    #[inline]
    pub(super) fn set_queue_state(&mut self, place: QueueState) {
        self.flags = self.flags & !PLACE | place as u8;
    }

    /// True for a block in the list of ordinary blocks without pins or other flags.
    #[inline]
    pub(super) fn is_plainly_listed(&self) -> bool {
        self.flags & !SPREAD == QueueState::Listed as u8
    }

    pub(super) fn is_hard_pinned(&self) -> bool {
        self.flags & HARD_PIN != 0
    }

    pub(super) fn set_hard_pinned(&mut self, on: bool) {
        self.set(HARD_PIN, on);
    }

    pub(super) fn is_soft_pinned(&self) -> bool {
        self.flags & SOFT_PIN != 0
    }

    pub(super) fn set_soft_pinned(&mut self, on: bool) {
        self.set(SOFT_PIN, on);
    }

    pub(super) fn has_lost_parent(&self) -> bool {
        self.flags & LOST_PARENT != 0
    }

    pub(super) fn set_lost_parent(&mut self, on: bool) {
        self.set(LOST_PARENT, on);
    }

    pub(super) fn is_spread(&self) -> bool {
        self.flags & SPREAD != 0
    }

    pub(super) fn set_spread(&mut self, on: bool) {
        self.set(SPREAD, on);
    }

    fn set(&mut self, flag: u8, on: bool) {
        if on {
            self.flags |= flag;
        } else {
            self.flags &= !flag;
        }
    }

    #[inline]
    pub(super) fn tick(&self) -> u64 {
        self.recency & MAX_TICK
    }

    #[inline]
    pub(super) fn set_tick(&mut self, tick: u64) {
        self.recency = self.recency & !MAX_TICK | tick.min(MAX_TICK);
    }

    pub(super) fn offset(&self) -> u64 {
        u64::from(self.offset_high) << 32 | u64::from(self.offset_low)
    }

    /// Stores an offset below [`MAX_OFFSET`].
    pub(super) fn set_offset(&mut self, offset: u64) {
        let [a, b, c, d, e, f, ..] = offset.to_le_bytes();
        self.offset_low = u32::from_le_bytes([a, b, c, d]);
        self.offset_high = u16::from_le_bytes([e, f]);
    }

    /// The number under which the key is stored beside the entry.
    pub(super) fn long_key(&self) -> u32 {
        let [a, b, c, d, ..] = self.digest;
        u32::from_le_bytes([a, b, c, d])
    }

    pub(super) fn set_long_key(&mut self, number: u32) {
        self.digest = [0; 32];
        for (to, from) in self.digest.iter_mut().zip(number.to_le_bytes()) {
            *to = from;
        }
    }

    /// The end of the lease, which may be past, in milliseconds after the directory's start; 0
    /// without a lease.
    #[inline]
    pub(super) fn lease_until(&self) -> u64 {
        if self.holders == 0 {
            return 0;
        }
        (self.recency >> TICK_BITS) << 32 | u64::from(self.lease_low)
    }

    #[inline]
    fn set_lease_until(&mut self, until: u64) {
        let [a, b, c, d, high, ..] = until.min(MAX_LEASE).to_le_bytes();
        self.lease_low = u32::from_le_bytes([a, b, c, d]);
        self.recency = self.recency & MAX_TICK | u64::from(high) << TICK_BITS;
    }

    #[inline]
    pub(super) fn is_leased(&self, now: u64) -> bool {
        self.lease_until() > now
    }

    /// The number of holders of an unexpired lease; `None` while it is unknown.
    pub(super) fn known_holders(&self, now: u64) -> Option<u8> {
        match self.is_leased(now) {
            true => Some(self.holders).filter(|count| *count < HELD),
            false => Some(0),
        }
    }

    /// Adds a holder until `until`.
    #[inline]
    pub(super) fn lease(&mut self, until: u64, now: u64) {
        if until <= now {
            return;
        }
        if self.is_leased(now) {
            self.holders = match self.holders.saturating_add(1) {
                HELD.. => STICKY,
                count => count,
            };
            self.set_lease_until(until.max(self.lease_until()));
        } else {
            self.holders = 1;
            self.set_lease_until(until);
        }
    }

    /// Removes a holder, unless its token has expired. Returns true when that ended the lease.
    pub(super) fn release(&mut self, token: u64, now: u64) -> bool {
        if token <= now || !self.is_leased(now) || self.holders >= HELD {
            return false;
        }
        self.holders -= 1;
        self.holders == 0
    }

    /// Leases the block until `until` or later, while the number of its holders is unknown. See
    /// [`Entry::settle`].
    pub(super) fn hold(&mut self, until: u64, now: u64) {
        if until <= now {
            return;
        }
        let (holders, until) = match self.is_leased(now) {
            true => (STICKY, until.max(self.lease_until())),
            false => (HELD, until),
        };
        self.holders = holders;
        self.set_lease_until(until);
    }

    /// Ends a hold and sets the block's holders. If the block was leased before the hold, or during it, the
    /// lease ends only by expiry. Returns true when this ended the lease.
    pub(super) fn settle(&mut self, by: Holders) -> bool {
        if self.holders == HELD && by.count < HELD {
            self.holders = by.count;
            self.set_lease_until(by.until);
            return by.count == 0;
        }
        if self.holders >= HELD {
            self.holders = STICKY;
            self.set_lease_until(by.until.max(self.lease_until()));
        }
        false
    }

    /// Removes and returns the holders of an unexpired lease.
    pub(super) fn take_holders(&mut self, now: u64) -> Holders {
        if !self.is_leased(now) {
            return Holders::default();
        }
        let taken = Holders {
            count: self.holders,
            until: self.lease_until(),
        };
        self.holders = 0;
        taken
    }

    /// Extends the lease for a holder whose token has not expired. Returns whether the holder has a lease.
    pub(super) fn renew(&mut self, token: u64, until: u64, now: u64) -> bool {
        if token <= now || !self.is_leased(now) {
            return false;
        }
        self.set_lease_until(until.max(self.lease_until()));
        if self.holders == HELD {
            self.holders = STICKY;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_entry_fits_the_budget() {
        assert_eq!((size_of::<Entry>(), align_of::<Entry>()), (64, 64));
        assert_eq!(
            size_of::<Entry>() + size_of::<Rest>() + size_of::<Links>(),
            100
        );
    }

    #[test]
    fn a_hold_outlasts_releases_and_ends_with_the_holders_that_are_known() {
        let some = Holders {
            count: 1,
            until: 80,
        };
        let mut entry = Entry::new();
        entry.hold(100, 0);
        assert!(!entry.release(90, 10));
        assert!(entry.settle(Holders::default()));
        assert!(!entry.is_leased(10));
        entry.hold(100, 0);
        assert!(!entry.settle(some));
        assert_eq!((entry.holders, entry.lease_until()), (1, 80));
        assert_eq!(entry.known_holders(10), Some(1));
        assert_eq!(entry.known_holders(80), Some(0), "the lease is over");
        assert!(entry.release(80, 10), "the last one ends it");
        assert_eq!(entry.take_holders(10), Holders::default());
    }

    #[test]
    fn a_lease_that_comes_during_a_hold_is_never_lost() {
        for token in [99, 100, 101] {
            let mut entry = Entry::new();
            entry.hold(100, 0);
            entry.lease(token, 1);
            assert!(!entry.settle(Holders::default()));
            assert!(!entry.release(token, 2), "nobody counts it");
            assert!(entry.is_leased(token - 1) && !entry.is_leased(101));
        }
        let mut entry = Entry::new();
        entry.hold(100, 0);
        assert!(entry.renew(90, 120, 1));
        assert!(!entry.settle(Holders::default()));
        assert!(entry.is_leased(119));
        let mut entry = Entry::new();
        entry.hold(100, 0);
        assert!(!entry.settle(Holders::unknown()));
        assert!(!entry.release(100, 1) && entry.is_leased(99));
    }

    #[test]
    fn packed_fields_do_not_touch_each_other() {
        let mut entry = Entry::new();
        entry.set_tick(MAX_TICK);
        entry.lease(MAX_LEASE, 0);
        entry.set_offset(MAX_OFFSET - 1);
        assert_eq!((entry.tick(), entry.lease_until()), (MAX_TICK, MAX_LEASE));
        entry.set_tick(0);
        assert_eq!((entry.tick(), entry.lease_until()), (0, MAX_LEASE));
        assert_eq!(entry.offset(), MAX_OFFSET - 1);
        for place in QueueState::ALL {
            entry.set_queue_state(place);
            entry.set_soft_pinned(true);
            assert_eq!(entry.queue_state(), place);
        }
        assert!(!entry.is_hard_pinned() && !entry.has_lost_parent() && !entry.is_spread());
        entry.set_long_key(0x0102_0304);
        assert_eq!(entry.long_key(), 0x0102_0304);
    }

    #[test]
    fn a_saturated_count_of_holders_keeps_the_lease_to_its_end() {
        let mut entry = Entry::new();
        for _ in 0..300 {
            entry.lease(100, 0);
        }
        for _ in 0..400 {
            assert!(!entry.release(100, 1));
        }
        assert!(entry.is_leased(99) && !entry.is_leased(100));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Wait(u64),
        Lease(u64),
        Release(usize),
        Renew(usize, u64),
    }

    proptest! {
        /// The model knows every holder by its token. The entry knows one end and a count. The
        /// entry may protect longer than the model, never shorter.
        #[test]
        fn a_lease_is_never_lost_by_another_holders_doing(
            steps in proptest::collection::vec(prop_oneof![
                (1..30u64).prop_map(Step::Wait),
                (1..50u64).prop_map(Step::Lease),
                any::<usize>().prop_map(Step::Release),
                (any::<usize>(), 1..50u64).prop_map(|(who, ttl)| Step::Renew(who, ttl)),
            ], 1..100)
        ) {
            let mut entry = Entry::new();
            let mut now = 0;
            let mut tokens: Vec<u64> = Vec::new();
            let mut latest = 0;
            for step in steps {
                match step {
                    Step::Wait(time) => now += time,
                    Step::Lease(ttl) => {
                        entry.lease(now + ttl, now);
                        tokens.push(now + ttl);
                        latest = latest.max(now + ttl);
                    }
                    Step::Release(who) if !tokens.is_empty() => {
                        let token = tokens.swap_remove(who % tokens.len());
                        let ended = entry.release(token, now);
                        prop_assert!(!ended || tokens.iter().all(|token| *token <= now));
                    }
                    Step::Renew(who, ttl) if !tokens.is_empty() => {
                        let who = who % tokens.len();
                        let alive = tokens[who] > now;
                        prop_assert_eq!(entry.renew(tokens[who], now + ttl, now), alive);
                        if alive {
                            tokens[who] = now + ttl;
                            latest = latest.max(now + ttl);
                        }
                    }
                    Step::Release(_) | Step::Renew(..) => {}
                }
                let needed = tokens.iter().any(|token| *token > now);
                prop_assert!(!needed || entry.is_leased(now), "a holder lost its lease");
                prop_assert!(entry.lease_until() <= latest);
                // When no holder expired uncounted, the last release ends the lease at once.
                if tokens.is_empty() && latest == 0 {
                    prop_assert!(!entry.is_leased(now));
                }
            }
        }

        #[test]
        fn releasing_every_live_token_ends_the_lease_at_once(ttls in proptest::collection::vec(10..50u64, 1..100)) {
            let mut entry = Entry::new();
            for ttl in &ttls {
                entry.lease(*ttl, 0);
            }
            for (left, ttl) in ttls.iter().enumerate().rev() {
                prop_assert!(entry.is_leased(5));
                prop_assert_eq!(entry.release(*ttl, 5), left == 0);
            }
            prop_assert!(!entry.is_leased(5));
        }
    }
}
