//! One medium: its ranges, the order in which they are written, and the node that has it.

use super::ring::{Ring, Taken};
use crate::accounts::{Accounts, Item};
use crate::directory::Tick;
use crate::placement::extents::{Range, Use};
use crate::placement::{Extents, Ledger};
use crate::replica::{BlockId, ExtentIndex, Replica};
use crate::store::record;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Length, MediumId, NodeName, Offset, SegmentId, medium};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The share of a medium that hard-pinned copies may take so that all of them stay: a quarter. The ends of
/// zones that no block fits take less than half of a medium. So at least half of each round of the ring is for
/// new copies, and the disk is written at most twice as much as these need.
const PINNED_SHARE: u64 = 4;

/// A disk, partition or file of blocks.
#[derive(Debug)]
pub struct Medium {
    /// The id of its segment.
    pub id: SegmentId,
    /// The medium.
    pub medium: MediumId,
    /// The bytes for blocks.
    pub size: Length,
    /// The bytes of a zone.
    pub zone: Length,
    extents: Mutex<Extents>,
    /// The number of extents with an owner. It changes under the lock of `extents`.
    copies: AtomicU64,
    /// The extents with hard-pinned copies. They change under the lock of `extents`.
    pins: Mutex<Pins>,
    /// The copies by zone. They change under the lock of `extents`.
    in_zones: Mutex<Vec<InZone>>,
    /// Locked before `in_zones`.
    ring: Mutex<Ring>,
    /// By zone, the tick at which its writing ended. A copy with a later use is kept when the zone is
    /// emptied.
    sealed: Mutex<Vec<Tick>>,
    holder: Mutex<Holder>,
}

/// The copies in one zone.
#[derive(Clone, Copy, Debug, Default)]
struct InZone {
    copies: u32,
    /// The number of hard-pinned ones among them.
    pinned: u32,
    /// The extent of the first copy. The others follow it in the table of extents.
    first: Option<ExtentIndex>,
}

/// The extents with hard-pinned copies, each with its bytes.
#[derive(Debug, Default)]
struct Pins {
    extents: HashMap<ExtentIndex, u64>,
    bytes: u64,
}

impl Pins {
    /// Returns whether the extent is new.
    fn add(&mut self, index: ExtentIndex, length: Length) -> bool {
        let is_new = self.extents.insert(index, length.0).is_none();
        if is_new {
            self.bytes += length.0;
        }
        is_new
    }

    /// Returns whether the extent was there.
    fn remove(&mut self, index: ExtentIndex) -> bool {
        let bytes = self.extents.remove(&index);
        self.bytes -= bytes.unwrap_or(0);
        bytes.is_some()
    }
}

/// The node with the medium, and the generation that it last wrote there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The node that offered the medium last.
    pub node: NodeName,
    /// The generation of the last attachment.
    pub generation: u64,
    /// True while the node has not confirmed that generation.
    pub is_pending: bool,
}

impl Medium {
    /// A medium without blocks. `None` when its zones do not fit its size.
    pub fn new(record: record::Medium, accounts: &Arc<Accounts>) -> Option<Self> {
        let ring = Ring::new(record.size, record.zone, record.cursor, 0)?;
        let zones = ring.zones() as usize;
        let sealed = vec![Tick::default(); zones];
        let ledger = Ledger::new(Arc::clone(accounts), Item::Media);
        Some(Self {
            id: record.id,
            medium: record.medium,
            size: record.size,
            zone: record.zone,
            extents: Mutex::new(Extents::new(record.size).with_ledger(ledger)),
            copies: AtomicU64::new(0),
            pins: Mutex::default(),
            in_zones: Mutex::new(vec![InZone::default(); zones]),
            ring: Mutex::new(ring),
            sealed: Mutex::new(sealed),
            holder: Mutex::new(Holder {
                node: record.node,
                generation: record.generation,
                is_pending: record.is_pending,
            }),
        })
    }

    /// Takes the changes of a later record of the same medium.
    pub(super) fn update(&self, record: record::Medium) {
        *self.holder.lock() = Holder {
            node: record.node,
            generation: record.generation,
            is_pending: record.is_pending,
        };
        let mut ring = self.ring.lock();
        if ring.cursor() != record.cursor
            && let Some(moved) = Ring::new(self.size, self.zone, record.cursor, 0)
        {
            *ring = moved;
        }
    }

    /// The record of the present state.
    pub fn record(&self) -> record::Medium {
        let Holder {
            node,
            generation,
            is_pending,
        } = self.holder.lock().clone();
        record::Medium {
            id: self.id,
            medium: self.medium,
            node,
            generation,
            is_pending,
            size: self.size,
            zone: self.zone,
            cursor: self.ring.lock().cursor(),
        }
    }

    /// Changes the holder.
    pub fn set_holder(&self, holder: Holder) {
        *self.holder.lock() = holder;
    }

    /// The zone that is written.
    pub fn cursor(&self) -> u32 {
        self.ring.lock().cursor()
    }

    /// The zone that is emptied next: the one behind the cursor, which has the oldest copies, or a later one instead
    /// ([`Medium::skip_oldest`]).
    pub fn next_zone(&self) -> u32 {
        self.ring.lock().next()
    }

    /// The zone of a byte.
    pub fn zone_of(&self, offset: Offset) -> u32 {
        self.ring.lock().zone_of(offset)
    }

    /// The node with the medium.
    pub fn holder(&self) -> Holder {
        self.holder.lock().clone()
    }

    /// Locks the table of ranges.
    pub fn extents(&self) -> MutexGuard<'_, Extents> {
        self.extents.lock()
    }

    /// Takes the next range for a new copy. `now` is the tick of this moment.
    pub fn take(&self, length: Length, now: Tick) -> Taken {
        self.take_beside(Length(0), length, now)
    }

    /// [`Medium::take`] for a copy that moves out of the oldest zone.
    pub fn take_for_move(&self, length: Length, now: Tick) -> Taken {
        self.take_by(Ring::take_for_move, Length(0), length, now)
    }

    /// Takes the next range for a new copy, but leaves `reserved` bytes of the written zone to
    /// moved copies.
    pub fn take_beside(&self, reserved: Length, length: Length, now: Tick) -> Taken {
        self.take_by(Ring::take, reserved, length, now)
    }

    fn take_by(
        &self,
        take: fn(&mut Ring, Length) -> Taken,
        reserved: Length,
        length: Length,
        now: Tick,
    ) -> Taken {
        let Some(footprint) = medium::footprint(length) else {
            return Taken::TooLong;
        };
        let mut ring = self.ring.lock();
        if reserved.0 > 0 && ring.room().0 < reserved.0 + footprint.0 {
            return Taken::NeedsZone;
        }
        let zone = ring.cursor();
        let taken = take(&mut ring, footprint);
        if ring.cursor() != zone
            && let Some(sealed) = self.sealed.lock().get_mut(zone as usize)
        {
            *sealed = now;
        }
        taken
    }

    /// Bytes that the written zone can still take.
    pub fn room_in_zone(&self) -> Length {
        self.ring.lock().room()
    }

    /// Bytes of copies that may move to the written zone.
    pub fn room_for_moves(&self) -> Length {
        self.ring.lock().room_for_moves()
    }

    /// The tick at which the writing of the next zone ended.
    pub fn oldest_sealed(&self) -> Tick {
        self.sealed(self.next_zone())
    }

    /// The ticks at which the writing of each zone ended last.
    pub fn sealed_zones(&self) -> Vec<Tick> {
        self.sealed.lock().clone()
    }

    /// The tick at which the writing of a zone ended last.
    pub(crate) fn sealed(&self, zone: u32) -> Tick {
        let sealed = self.sealed.lock();
        sealed.get(zone as usize).copied().unwrap_or_default()
    }

    /// The last use of a copy at `offset` whose record comes at `now`.
    ///
    /// The record of a store may come after its zone is full. Then the copy counts as last used
    /// when the zone was full, since the record is not a use of the copy.
    pub(super) fn used_at(&self, offset: Offset, now: Tick) -> Tick {
        let ring = self.ring.lock();
        let zone = ring.zone_of(offset);
        let sealed = self.sealed(zone);
        // A standby does not know when the zones were written.
        match zone == ring.cursor() || sealed == Tick::default() {
            true => now,
            false => now.min(sealed),
        }
    }

    /// Continues after the copies on the medium. Each term begins with this call: a standby knows
    /// the copies, but not how far their zone was written. Uses before `now` are forgotten.
    pub fn begin_term(&self, now: Tick) {
        self.continue_behind_blocks();
        self.sealed.lock().fill(now);
    }

    /// True when the next zone should be emptied now.
    pub fn is_next_due(&self) -> bool {
        self.ring.lock().is_next_due()
    }

    /// True when a block of this length would make the next zone due.
    pub fn makes_next_due(&self, length: Length) -> bool {
        let footprint = medium::footprint(length).unwrap_or(length);
        self.ring.lock().is_next_due_behind(footprint)
    }

    /// True when a new copy of a block that was used last at `used` drops no copy that may have been used later. The
    /// zone that would be emptied for it has no copies then, or its copies were written before that use.
    pub fn takes_old(&self, length: Length, used: Tick) -> bool {
        let fits = medium::footprint(length).is_some_and(|bytes| bytes <= self.zone);
        let empties = || self.makes_next_due(length) && self.copies_in(self.next_zone()) > 0;
        fits && (!empties() || self.oldest_sealed() < used)
    }

    /// The number of copies in a zone.
    pub fn copies_in(&self, zone: u32) -> u32 {
        self.in_zone(zone).copies
    }

    fn in_zone(&self, zone: u32) -> InZone {
        let in_zones = self.in_zones.lock();
        in_zones.get(zone as usize).copied().unwrap_or_default()
    }

    /// The bytes of a zone.
    pub fn bytes_of(&self, zone: u32) -> std::ops::Range<Offset> {
        let (start, end) = self.ring.lock().range(zone);
        start..end
    }

    /// The owners of the ranges in the next zone, which has the oldest copies.
    pub fn oldest(&self) -> Vec<BlockId> {
        self.owners_in(self.next_zone())
    }

    fn owners_in(&self, zone: u32) -> Vec<BlockId> {
        let end = self.bytes_of(zone).end;
        let extents = self.extents.lock();
        let first = self.in_zone(zone).first;
        copies_from(&extents, first, end)
            .map(|(_, block)| block)
            .collect()
    }

    /// Has a later zone emptied in place of the next one: the first that has no hard-pinned copies. The zones in
    /// between keep their copies for another round of the ring. Returns false if there is none.
    pub fn skip_oldest(&self) -> bool {
        let mut ring = self.ring.lock();
        let in_zones = self.in_zones.lock();
        ring.skip(|zone| {
            let zone = in_zones.get(zone as usize);
            zone.is_some_and(|zone| zone.pinned == 0)
        })
    }

    /// Records that the next zone has no copies and no transfers in progress.
    pub fn emptied(&self) {
        self.ring.lock().emptied();
    }

    /// Takes the range of a block that was written. `None` unless the whole range is free.
    pub(super) fn allocate_at(
        &self,
        offset: Offset,
        length: Length,
        namespace: NamespaceId,
    ) -> Option<ExtentIndex> {
        let footprint = medium::footprint(length)?;
        let mut extents = self.extents.lock();
        let index = extents.allocate_at(offset, footprint)?;
        extents.charge(index, namespace);
        debug_assert!(
            (extents.ledger().filter(|ledger| !ledger.is_closed()))
                .is_none_or(|ledger| ledger.total() == extents.used().0),
            "invariant: charges follow extents"
        );
        Some(index)
    }

    pub(super) fn set_owner(&self, index: ExtentIndex, block: BlockId, is_pinned: bool) {
        let mut extents = self.extents.lock();
        let is_new = extents.owner(index).is_none();
        extents.set_owner(index, block);
        let is_pinned_now = is_pinned && self.pins.lock().add(index, extents.length(index));
        if is_new {
            self.copies.fetch_add(1, Ordering::Relaxed);
        }
        let Some(range) = extents.range(index) else {
            return;
        };
        let zone = self.zone_of(range.offset) as usize;
        if let Some(zone) = self.in_zones.lock().get_mut(zone) {
            zone.copies += u32::from(is_new);
            zone.pinned += u32::from(is_pinned_now);
            let first = zone.first.and_then(|first| extents.range(first));
            if first.is_none_or(|first| range.offset < first.offset) {
                zone.first = Some(index);
            }
        }
    }

    pub(super) fn free(&self, replica: &Replica) {
        let mut extents = self.extents.lock();
        let was_pinned = self.pins.lock().remove(replica.extent);
        if extents.owner(replica.extent).is_some()
            && let Some(range) = extents.range(replica.extent)
        {
            self.copies.fetch_sub(1, Ordering::Relaxed);
            let zone = self.zone_of(range.offset);
            let end = self.bytes_of(zone).end;
            if let Some(zone) = self.in_zones.lock().get_mut(zone as usize) {
                zone.copies = zone.copies.saturating_sub(1);
                zone.pinned = zone.pinned.saturating_sub(u32::from(was_pinned));
                if zone.first == Some(replica.extent) {
                    let behind = extents.next(replica.extent).map(|range| range.index);
                    let mut others = copies_from(&extents, behind, end);
                    zone.first = others.next().map(|(range, _)| range.index);
                }
            }
        }
        extents.free(replica.extent);
    }

    fn continue_behind_blocks(&self) {
        let extents = self.extents.lock();
        let mut ring = self.ring.lock();
        let cursor = ring.cursor();
        let (start, end) = ring.range(cursor);
        let used = copies_from(&extents, self.in_zone(cursor).first, end);
        let ends = used.map(|(range, _)| range.offset.0 + range.length.0);
        let last = ends.max();
        let at = last.map_or(0, |last| last.saturating_sub(start.0).min(self.zone.0));
        if let Some(behind) = Ring::new(self.size, self.zone, cursor, at) {
            *ring = behind;
        }
    }

    /// The copies on the medium.
    pub fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// Whether the hard-pinned copies are so few that all of them may stay.
    pub fn pins_fit(&self) -> bool {
        self.pins.lock().bytes <= self.size.0 / PINNED_SHARE
    }

    /// Bytes of blocks with their headers.
    pub fn used(&self) -> Length {
        self.extents.lock().used()
    }
}

/// The copies from an extent on, up to `end`, in the order of their addresses.
fn copies_from(
    extents: &Extents,
    first: Option<ExtentIndex>,
    end: Offset,
) -> impl Iterator<Item = (Range, BlockId)> {
    let first = first.and_then(|first| extents.range(first));
    let ranges = std::iter::successors(first, move |range| extents.next(range.index));
    let inside = ranges.take_while(move |range| range.offset < end);
    inside.filter_map(|range| match range.usage {
        Use::Block(block) => Some((range, block)),
        Use::Free | Use::Held => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const MIB: u64 = 1 << 20;

    fn medium() -> Medium {
        Medium::new(
            record::Medium {
                id: SegmentId::on_medium(1),
                medium: MediumId(1),
                node: NodeName("n".into()),
                generation: 1,
                is_pending: false,
                size: Length(8 * MIB),
                zone: Length(2 * MIB),
                cursor: 1,
            },
            &Arc::default(),
        )
        .unwrap()
    }

    /// A standby learns of copies, but not how far the leader had written their zone.
    #[test]
    fn a_term_continues_behind_the_copies_that_are_there() {
        let medium = medium();
        let block = Length(MIB - 4096);
        let at = Offset(2 * MIB);
        let taken = medium.allocate_at(at, block, NamespaceId(0)).unwrap();
        medium.set_owner(taken, BlockId(7), false);
        medium.begin_term(Tick(9));
        let Taken::At(next) = medium.take(Length(4096), Tick(10)) else {
            panic!("the zone has room");
        };
        assert!(
            next.0 >= at.0 + medium::footprint(block).unwrap().0,
            "{next}"
        );
        assert_eq!(medium.oldest_sealed(), Tick(9));
    }

    /// Copies of a node that leaves would push out the copies of this one.
    #[test]
    fn an_old_block_is_taken_while_no_later_copy_is_dropped_for_it() {
        let medium = medium();
        medium.begin_term(Tick(9));
        let block = Length(MIB - 4096);
        assert!(medium.takes_old(block, Tick(1)), "the next zone is empty");
        let next = Offset(4 * MIB);
        let taken = medium.allocate_at(next, block, NamespaceId(0)).unwrap();
        medium.set_owner(taken, BlockId(7), false);
        assert!(!medium.takes_old(block, Tick(9)), "the copy may be later");
        assert!(medium.takes_old(block, Tick(10)));
        assert!(!medium.takes_old(Length(2 * MIB), Tick(10)), "no zone fits");
        let small = Length(4096);
        assert!(medium.takes_old(small, Tick(1)), "no zone is emptied");
        medium.free(&Replica {
            segment: medium.id,
            extent: taken,
            offset: next,
        });
        assert!(medium.takes_old(block, Tick(1)), "it is empty again");
    }

    #[test]
    fn pinned_copies_fit_while_they_take_a_quarter_of_the_medium() {
        let medium = medium();
        let block = Length(MIB - 4096);
        let places = [(0, true), (1, false), (2, true), (3, true)].map(|(n, is_pinned)| {
            let offset = Offset(n * MIB);
            let extent = medium.allocate_at(offset, block, NamespaceId(0)).unwrap();
            medium.set_owner(extent, BlockId(7), is_pinned);
            Replica {
                segment: medium.id,
                extent,
                offset,
            }
        });
        assert!(!medium.pins_fit(), "three of eight MiB");
        medium.free(&places[1]);
        assert!(!medium.pins_fit());
        medium.free(&places[0]);
        assert!(medium.pins_fit());
    }

    #[test]
    fn a_zone_is_sealed_when_the_next_one_is_begun() {
        let medium = medium();
        medium.begin_term(Tick(1));
        let block = Length(MIB - 4096);
        let mut tick = 1;
        for _ in 0..2 {
            tick += 1;
            assert!(matches!(medium.take(block, Tick(tick)), Taken::At(_)));
        }
        medium.emptied();
        assert!(matches!(medium.take(block, Tick(50)), Taken::At(_)));
        assert_eq!(medium.cursor(), 2);
        assert_eq!(*medium.sealed.lock(), [Tick(1), Tick(50), Tick(1), Tick(1)]);
    }

    proptest! {
        /// Copies come and go in any order, at any place of a zone.
        #[test]
        fn each_zone_knows_its_copies(steps in prop::collection::vec((0u32..32, any::<bool>()), 1..200)) {
            const SLOT: u64 = 256 << 10;
            let medium = medium();
            let mut there: BTreeMap<u32, (ExtentIndex, bool)> = BTreeMap::new();
            for (slot, is_pinned) in steps {
                let offset = Offset(u64::from(slot) * SLOT);
                if let Some((extent, _)) = there.remove(&slot) {
                    let segment = medium.id;
                    medium.free(&Replica { segment, extent, offset });
                } else {
                    let length = Length(SLOT - 8192);
                    let extent = medium.allocate_at(offset, length, NamespaceId(0)).unwrap();
                    medium.set_owner(extent, BlockId(slot), is_pinned);
                    there.insert(slot, (extent, is_pinned));
                }
                for zone in 0..4 {
                    let inside = there.range(zone * 8..zone * 8 + 8);
                    let owners: Vec<BlockId> = inside.clone().map(|(slot, _)| BlockId(*slot)).collect();
                    let pinned = inside.filter(|(_, (_, is_pinned))| *is_pinned).count();
                    let known = medium.in_zone(zone);
                    prop_assert_eq!((known.copies as usize, known.pinned as usize), (owners.len(), pinned));
                    prop_assert_eq!(medium.owners_in(zone), owners);
                }
            }
        }
    }

    /// Commits wait for the table of ranges meanwhile.
    #[test]
    fn the_oldest_copies_are_found_without_a_walk_over_the_others() {
        const COPIES: u32 = 1 << 17;
        const EACH: u64 = 8192;
        let record = record::Medium {
            size: Length(u64::from(COPIES) * EACH),
            zone: Length(64 * EACH),
            ..medium().record()
        };
        let medium = Medium::new(record, &Arc::default()).unwrap();
        for copy in 0..COPIES {
            let offset = Offset(u64::from(copy) * EACH);
            let extent = medium.allocate_at(offset, Length(4096), NamespaceId(0));
            medium.set_owner(extent.unwrap(), BlockId(copy), false);
        }
        // The shortest of several runs: others may take the processor in some of them.
        let time = |what: &dyn Fn() -> usize| {
            let runs = (0..20).map(|_| {
                let begun = std::time::Instant::now();
                let found = what();
                (begun.elapsed(), found)
            });
            runs.min().unwrap()
        };
        let (walk, all) = time(&|| medium.extents().iter().count());
        let (zone, oldest) = time(&|| medium.oldest().len());
        assert_eq!((all, oldest), (COPIES as usize, 64));
        assert!(zone * 10 < walk, "{zone:?} of {walk:?}");
    }

    #[test]
    fn a_zone_with_pinned_copies_is_not_taken_in_place_of_another() {
        let medium = medium();
        let block = Length(MIB - 4096);
        let at = |zone: u64| Offset(zone * 2 * MIB);
        for (zone, is_pinned) in [(2, true), (3, true), (0, false)] {
            let extent = medium.allocate_at(at(zone), block, NamespaceId(0));
            medium.set_owner(extent.unwrap(), BlockId(7), is_pinned);
        }
        assert_eq!(medium.next_zone(), 2);
        assert!(medium.skip_oldest());
        assert_eq!(medium.next_zone(), 0);
        assert!(!medium.skip_oldest(), "the written zone is behind it");
        assert_eq!(medium.next_zone(), 0);
    }
}
