//! The ranges that blocks have left according to the log, and on which leases may run. Adjacent ranges are
//! joined, so a long log of removals needs little memory.

use crate::placement::Extents;
use crate::store::record::LeasedRanges;
use kvpool_types::{Length, Offset, SegmentId};
use std::collections::BTreeMap;

/// The ends of ranges by their starts. No two ranges touch or overlap.
#[derive(Debug, Default)]
pub(super) struct FreedRanges(BTreeMap<(SegmentId, u64), u64>);

impl FreedRanges {
    /// Adds the extent of a removed block.
    pub(super) fn add(&mut self, segment: SegmentId, offset: Offset, length: Length) {
        let Some((mut start, mut end)) = bounds(offset, length) else {
            return;
        };
        while let Some((&place, &last)) = self.0.range(..=(segment, end)).next_back()
            && place.0 == segment
            && last >= start
        {
            self.0.remove(&place);
            start = start.min(place.1);
            end = end.max(last);
        }
        self.0.insert((segment, start), end);
    }

    /// Adds the extents of a record.
    pub(super) fn add_all(&mut self, leased: &LeasedRanges) {
        for (offset, length) in &leased.ranges {
            self.add(leased.segment, *offset, *length);
        }
    }

    /// Removes a range that was granted again, because its leases had ended.
    pub(super) fn take(&mut self, segment: SegmentId, offset: Offset, length: Length) {
        let Some((start, end)) = bounds(offset, length) else {
            return;
        };
        while let Some((&place, &last)) = self.0.range(..(segment, end)).next_back()
            && place.0 == segment
            && last > start
        {
            self.0.remove(&place);
            if place.1 < start {
                self.0.insert(place, start);
            }
            if last > end {
                self.0.insert((segment, end), last);
            }
        }
    }

    /// All ranges.
    pub(super) fn into_ranges(self) -> impl Iterator<Item = (SegmentId, Offset, Length)> {
        let range = |((segment, start), end)| (segment, Offset(start), Length(end - start));
        self.0.into_iter().map(range)
    }
}

fn bounds(offset: Offset, length: Length) -> Option<(u64, u64)> {
    let end = offset.0.checked_add(Extents::rounded(length).0)?;
    (end > offset.0).then_some((offset.0, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const GRANULE: u64 = crate::placement::extents::GRANULE;

    proptest! {
        #[test]
        fn ranges_are_what_was_added_and_not_taken(
            steps in prop::collection::vec((any::<bool>(), 0u32..2, 0u64..30, 1u64..6), 0..60),
        ) {
            let mut ranges = FreedRanges::default();
            let mut model = BTreeSet::new();
            for (adds, segment, start, count) in steps {
                let segment = SegmentId(segment);
                let (offset, length) = (Offset(start * GRANULE), Length(count * GRANULE));
                let granules = (start..start + count).map(|at| (segment, at));
                if adds {
                    ranges.add(segment, offset, length);
                    model.extend(granules);
                } else {
                    ranges.take(segment, offset, length);
                    granules.for_each(|granule| {
                        model.remove(&granule);
                    });
                }
            }
            let all: Vec<_> = ranges.into_ranges().collect();
            for pair in all.windows(2) {
                let apart = pair[0].0 != pair[1].0 || pair[0].1.0 + pair[0].2.0 < pair[1].1.0;
                prop_assert!(apart, "{pair:?} could be one");
            }
            let found: BTreeSet<_> = all
                .into_iter()
                .flat_map(|(segment, offset, length)| {
                    let first = offset.0 / GRANULE;
                    (first..first + length.0 / GRANULE).map(move |at| (segment, at))
                })
                .collect();
            prop_assert_eq!(found, model);
        }
    }
}
