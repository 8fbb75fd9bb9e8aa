//! The order in which a medium is written: zone after zone, front to back, and from the last zone
//! back to the first.
//!
//! ```text
//!  zone     0        1        2        3
//!        ┌────────┬────────┬────────┬────────┐
//!        │ older  │ newest │▒▒▒░░░░░│ oldest │
//!        └────────┴────────┴────┬───┴────────┘
//!                           write here; zone 3 is emptied next
//! ```
//!
//! A device that is written in long runs does not move data inside itself. So one byte written here
//! costs the device one byte. The zone behind the cursor always has the oldest copies, so a medium
//! needs no queue of victims.
//!
//! Copies that cannot leave may keep that zone from being emptied. Then a later zone is emptied and written
//! instead. The zones in between keep their copies for another round.

use kvpool_types::{Length, Offset};

/// The most zones of a medium: 257 TiB in zones of 257 MiB. A node reports its number of zones, and
/// that number must not decide how much memory every master takes.
const MOST_ZONES: u32 = 1 << 20;

/// The limit of the allowance for moves, in zones. The allowance accumulates, because the blocks of
/// a chain lie in few zones and are used together.
const MOST_COLLECTED: u64 = 2;

/// The outcome of taking a range in a medium's order of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The range is taken.
    At(Offset),
    /// The next zone must be emptied first.
    NeedsZone,
    /// A zone is shorter than the range.
    TooLong,
}

/// The zones of one medium.
#[derive(Clone, Debug)]
pub struct Ring {
    zone: u64,
    zones: u32,
    cursor: u32,
    /// The first byte in the cursor's zone that is not taken.
    at: u64,
    /// How many zones behind the cursor are left out in this round.
    skipped: u32,
    /// True when the next zone is empty.
    next_is_empty: bool,
    /// The allowance for moves: bytes of copies that may still move out of the oldest zones.
    for_moves: u64,
}

impl Ring {
    /// The zones of `size` bytes, of which zone `cursor` is written from byte `at` of it on. `None`
    /// unless there are at least two zones, and at most `MOST_ZONES`, and both positions lie inside.
    pub fn new(size: Length, zone: Length, cursor: u32, at: u64) -> Option<Self> {
        let zones = u32::try_from(size.0.checked_div(zone.0)?).ok()?;
        ((2..=MOST_ZONES).contains(&zones) && cursor < zones && at <= zone.0).then_some(Self {
            zone: zone.0,
            zones,
            cursor,
            at,
            skipped: 0,
            next_is_empty: false,
            for_moves: zone.0 / 2,
        })
    }

    /// The number of zones.
    pub const fn zones(&self) -> u32 {
        self.zones
    }

    /// Bytes that the written zone can still take.
    pub const fn room(&self) -> Length {
        Length(self.zone - self.at)
    }

    /// The zone that is written.
    pub const fn cursor(&self) -> u32 {
        self.cursor
    }

    /// The zone with the oldest copies of those that can be emptied: the one to be emptied, or already empty.
    pub const fn next(&self) -> u32 {
        self.behind(self.skipped)
    }

    /// The zone behind the cursor, with `skipped` zones in between.
    const fn behind(&self, skipped: u32) -> u32 {
        (self.cursor + 1 + skipped) % self.zones
    }

    /// Takes a later zone for the next one: the first that `may_take` accepts. The written zone is never taken.
    /// Returns false if there is none, or if the next zone is empty.
    pub fn skip(&mut self, may_take: impl Fn(u32) -> bool) -> bool {
        let mut later = self.skipped + 1..self.zones - 1;
        let taken = later.find(|skipped| may_take(self.behind(*skipped)));
        match taken.filter(|_| !self.next_is_empty) {
            Some(skipped) => {
                self.skipped = skipped;
                true
            }
            None => false,
        }
    }

    /// The zone of a byte.
    pub fn zone_of(&self, offset: Offset) -> u32 {
        u32::try_from(offset.0 / self.zone).unwrap_or(u32::MAX)
    }

    /// The first byte of a zone, and the first byte behind it.
    pub fn range(&self, zone: u32) -> (Offset, Offset) {
        let start = u64::from(zone) * self.zone;
        (Offset(start), Offset(start + self.zone))
    }

    /// Takes the next range of `length` bytes for a new copy.
    pub fn take(&mut self, length: Length) -> Taken {
        let taken = self.next_range(length);
        if let Taken::At(_) = taken {
            let most = self.zone.saturating_mul(MOST_COLLECTED);
            self.for_moves = self.for_moves.saturating_add(length.0).min(most);
        }
        taken
    }

    /// Takes the next range of `length` bytes for a copy that moves out of the oldest zone.
    pub fn take_for_move(&mut self, length: Length) -> Taken {
        let taken = self.next_range(length);
        if let Taken::At(_) = taken {
            self.for_moves = self.for_moves.saturating_sub(length.0);
        }
        taken
    }

    fn next_range(&mut self, length: Length) -> Taken {
        if length.0 == 0 || length.0 > self.zone {
            return Taken::TooLong;
        }
        if self.at + length.0 > self.zone {
            if !self.next_is_empty {
                return Taken::NeedsZone;
            }
            self.cursor = self.next();
            self.at = 0;
            self.skipped = 0;
            self.next_is_empty = false;
        }
        let (start, _) = self.range(self.cursor);
        let offset = Offset(start.0 + self.at);
        self.at += length.0;
        Taken::At(offset)
    }

    /// True if the next zone should be emptied now: new copies alone have taken an eighth of the
    /// written zone. The rest takes further copies until the next zone is empty. Moved copies may
    /// take all of the rest, so at least an eighth of each zone is for new copies.
    pub const fn is_next_due(&self) -> bool {
        self.is_next_due_behind(Length(0))
    }

    /// [`Ring::is_next_due`] after `length` more bytes.
    pub const fn is_next_due_behind(&self, length: Length) -> bool {
        !self.next_is_empty && self.at + length.0 >= self.zone / 8
    }

    /// Bytes of copies that may move to the written zone.
    ///
    /// Each byte of a new copy allows one byte of moves. So the writes to a medium are at most twice those of its
    /// new copies. The end of a zone that no block fits allows none. The unused allowance adds up to
    /// `MOST_COLLECTED` zones.
    pub fn room_for_moves(&self) -> Length {
        Length(self.room().0.min(self.for_moves))
    }

    /// Records that the next zone has no copies and no transfers in progress.
    pub const fn emptied(&mut self) {
        self.next_is_empty = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ring() -> Ring {
        Ring::new(Length(4000), Length(1000), 2, 0).unwrap()
    }

    #[test]
    fn impossible_zones_are_refused() {
        for (size, zone, cursor, at) in [
            (4000, 0, 0, 0),
            (1999, 1000, 0, 0),
            (4000, 1000, 4, 0),
            (4000, 1000, 0, 1001),
            (u64::MAX, 1, 0, 0),
            (1 << 62, (1 << 30) + 4096, 0, 0),
        ] {
            assert!(Ring::new(Length(size), Length(zone), cursor, at).is_none());
        }
    }

    #[test]
    fn a_zone_is_left_only_for_an_empty_one() {
        let mut ring = ring();
        assert_eq!(ring.take(Length(1001)), Taken::TooLong);
        assert_eq!(ring.take(Length(700)), Taken::At(Offset(2000)));
        assert!(ring.is_next_due());
        assert_eq!(ring.take(Length(400)), Taken::NeedsZone);
        // A range that fits is still taken.
        assert_eq!(ring.take(Length(300)), Taken::At(Offset(2700)));
        ring.emptied();
        assert!(!ring.is_next_due());
        assert_eq!(ring.take(Length(400)), Taken::At(Offset(3000)));
        assert_eq!((ring.cursor(), ring.next()), (3, 0));
        assert_eq!(ring.take(Length(700)), Taken::NeedsZone);
        ring.emptied();
        assert_eq!(ring.take(Length(700)), Taken::At(Offset(0)));
    }

    #[test]
    fn a_zone_that_is_left_out_comes_again_in_the_next_round() {
        let mut ring = ring();
        assert_eq!(ring.take(Length(700)), Taken::At(Offset(2000)));
        assert!(ring.skip(|zone| zone != 3));
        assert_eq!(ring.next(), 0);
        assert_eq!(ring.take(Length(400)), Taken::NeedsZone);
        assert!(ring.skip(|_| true));
        assert_eq!(ring.next(), 1);
        assert!(!ring.skip(|_| true), "the zone behind it is written");
        ring.emptied();
        assert_eq!(ring.take(Length(400)), Taken::At(Offset(1000)));
        ring.emptied();
        assert!(!ring.skip(|_| true), "the next zone is empty");
        assert_eq!(ring.take(Length(700)), Taken::At(Offset(2000)));
        assert_eq!(ring.next(), 3);
    }

    /// The blocks of a chain are used together, and fill the zones in which they were written.
    #[test]
    fn no_more_bytes_move_than_new_copies_have() {
        let mut ring = ring();
        let block = Length(260);
        assert_eq!(ring.room_for_moves(), Length(500));
        assert_eq!(ring.take(block), Taken::At(Offset(2000)));
        assert_eq!(
            ring.room_for_moves(),
            Length(740),
            "the zone has no more room"
        );
        assert_eq!(ring.take_for_move(block), Taken::At(Offset(2260)));
        assert_eq!(ring.take_for_move(block), Taken::At(Offset(2520)));
        // The end of the zone takes no block. Nothing is written there, and nothing moves for it.
        ring.emptied();
        assert_eq!(ring.take(block), Taken::At(Offset(3000)));
        assert_eq!(ring.room_for_moves(), Length(500));
        assert_eq!(ring.take_for_move(block), Taken::At(Offset(3260)));
        assert_eq!(ring.room_for_moves(), Length(240));
        // The bytes of two zones at most are collected.
        for _ in 0..10 {
            ring.emptied();
            assert!(matches!(ring.take(Length(1000)), Taken::At(_)));
        }
        for room in [900, 900, 400] {
            ring.emptied();
            assert!(matches!(ring.take(Length(100)), Taken::At(_)));
            assert_eq!(ring.room_for_moves(), Length(room));
            assert!(matches!(ring.take_for_move(Length(room)), Taken::At(_)));
        }
    }

    /// The allowance may cover a whole zone, and hard-pinned copies need none.
    #[test]
    fn an_eighth_of_each_zone_is_for_new_copies() {
        let mut ring = ring();
        for _ in 0..4 {
            ring.emptied();
            assert!(matches!(ring.take(Length(1000)), Taken::At(_)));
        }
        for _ in 0..10 {
            ring.emptied();
            let mut new = 0;
            while !ring.is_next_due() {
                assert!(matches!(ring.take(Length(50)), Taken::At(_)));
                new += 50;
            }
            let room = ring.room();
            assert!(matches!(ring.take_for_move(room), Taken::At(_)));
            assert_eq!(ring.take(Length(50)), Taken::NeedsZone);
            assert!(new >= 125, "{new} of 1000");
        }
    }

    proptest! {
        #[test]
        fn moves_at_most_double_the_writes(steps in prop::collection::vec((1u64..1000, any::<bool>()), 1..300)) {
            let mut ring = ring();
            let (mut new, mut moved) = (0, 0);
            for (length, moves) in steps {
                if moves && length <= ring.room_for_moves().0 {
                    prop_assert!(matches!(ring.take_for_move(Length(length)), Taken::At(_)));
                    moved += length;
                } else {
                    if ring.take(Length(length)) == Taken::NeedsZone {
                        ring.emptied();
                        prop_assert!(matches!(ring.take(Length(length)), Taken::At(_)));
                    }
                    new += length;
                }
                // A term begins with half a zone.
                prop_assert!(moved <= new + 500);
            }
        }

        /// A range is taken again only after its zone was emptied.
        #[test]
        fn no_range_is_taken_twice_without_an_emptying(lengths in prop::collection::vec(1u64..1000, 1..200)) {
            let mut ring = ring();
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for length in lengths {
                let offset = loop {
                    match ring.take(Length(length)) {
                        Taken::At(offset) => break offset.0,
                        Taken::NeedsZone => {
                            let (start, end) = ring.range(ring.next());
                            taken.retain(|(from, _)| !(start.0..end.0).contains(from));
                            ring.emptied();
                        }
                        Taken::TooLong => unreachable!("every length fits a zone"),
                    }
                };
                let end = offset + length;
                prop_assert!(end <= 4000 && offset / 1000 == (end - 1) / 1000);
                prop_assert!(taken.iter().all(|(from, to)| end <= *from || *to <= offset));
                taken.push((offset, end));
            }
        }
    }
}
