//! The closed grants of a segment, in memory that does not grow with their number.
//!
//! A grant covers one extent. An extent is granted again only after the earlier grant was fenced, and with a
//! higher number. So it is enough to keep, for every byte, the highest fenced number: its *floor*. A grant
//! with that number or a lower one is closed. The memory is bounded by the number of ranges in the segment,
//! however many grants there were.

use super::ranges::{Range, Ranges};
use kvpool_types::GrantId;

/// The floor of each byte of a segment, in the present epoch.
#[derive(Debug, Default)]
pub(super) struct Floors {
    ranges: Ranges<GrantId>,
}

impl Floors {
    /// Closes `grant`, and every lower one, for all bytes of `range`.
    pub(super) fn raise(&mut self, range: Range, grant: GrantId) {
        let mut pieces: Vec<(Range, GrantId)> = Vec::new();
        let mut at = range.start;
        for (old, floor) in self.ranges.remove_overlapping(range) {
            if old.start < range.start {
                let end = range.start;
                pieces.push((Range { end, ..old }, floor));
            }
            let start = old.start.max(range.start);
            if at < start {
                pieces.push((
                    Range {
                        start: at,
                        end: start,
                    },
                    grant,
                ));
            }
            let end = old.end.min(range.end);
            pieces.push((Range { start, end }, floor.max(grant)));
            at = end;
            if old.end > range.end {
                let start = range.end;
                pieces.push((Range { start, ..old }, floor));
            }
        }
        if at < range.end {
            pieces.push((Range { start: at, ..range }, grant));
        }
        for (piece, floor) in pieces {
            self.join(piece, floor);
        }
    }

    /// Forgets the floors of `range`. A block was written there, and its record refuses other grants.
    pub(super) fn forget(&mut self, range: Range) {
        for (old, floor) in self.ranges.remove_overlapping(range) {
            if old.start < range.start {
                let end = range.start;
                self.ranges.insert(Range { end, ..old }, floor);
            }
            if old.end > range.end {
                let start = range.end;
                self.ranges.insert(Range { start, ..old }, floor);
            }
        }
    }

    /// The highest grant closed for any byte of `range`.
    pub(super) fn highest(&self, range: Range) -> Option<GrantId> {
        self.ranges
            .overlapping(range)
            .map(|(_, &floor)| floor)
            .max()
    }

    /// Forgets all floors, because the epoch and its grants have ended.
    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }

    /// The number of ranges with a floor.
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Adds a range, joined with neighbours that have the same floor.
    fn join(&mut self, mut range: Range, floor: GrantId) {
        if let Some((before, &same)) = self.ranges.ending_at(range.start)
            && same == floor
        {
            self.ranges.remove(before);
            range.start = before.start;
        }
        if let Some((after, &same)) = self.ranges.starting_at(range.end)
            && same == floor
        {
            self.ranges.remove(after);
            range.end = after.end;
        }
        self.ranges.insert(range, floor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Offset;
    use proptest::prelude::*;

    const BYTES: usize = 24;

    fn range(a: u64, b: u64) -> Range {
        Range {
            start: Offset(a.min(b)),
            end: Offset(a.max(b) + 1),
        }
    }

    proptest! {
        /// The map equals an array with one entry for each byte, and never holds more ranges than
        /// bytes.
        #[test]
        fn floors_match_an_array(
            steps in prop::collection::vec((0..24u64, 0..24u64, 0..40u64, any::<bool>()), 1..200),
        ) {
            let mut floors = Floors::default();
            let mut array = [None::<GrantId>; BYTES];
            for (a, b, grant, forget) in steps {
                let range = range(a, b);
                let bytes = &mut array[range.start.as_usize()..range.end.as_usize()];
                if forget {
                    floors.forget(range);
                    bytes.fill(None);
                } else {
                    floors.raise(range, GrantId(grant));
                    for byte in bytes {
                        *byte = (*byte).max(Some(GrantId(grant)));
                    }
                }
                for (at, byte) in (0..).zip(&array) {
                    prop_assert_eq!(floors.highest(self::range(at, at)), *byte);
                }
                prop_assert_eq!(
                    floors.highest(self::range(3, 17)),
                    array[3..18].iter().copied().max().flatten()
                );
                prop_assert!(floors.len() <= BYTES);
            }
        }
    }

    #[test]
    fn equal_neighbours_are_one() {
        let mut floors = Floors::default();
        for at in [0, 2, 1, 4, 3] {
            floors.raise(range(at, at), GrantId(9));
        }
        assert_eq!(floors.len(), 1);
    }
}
