//! The ranges of a medium that must never be used again.

use crate::GRANULE;
use std::ops::Range;

/// The most ranges that a superblock holds.
pub const MAX_BAD_RANGES: usize = 240;

const STEP: u64 = GRANULE as u64;

/// The bad ranges of a medium in bytes, in whole granules. They are sorted, do not touch each other, and are
/// at most [`MAX_BAD_RANGES`].
///
/// A range is never removed. A full list joins the two neighbours with the smallest gap, which gives up the
/// good space between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BadRanges(Vec<Range<u64>>);

impl BadRanges {
    /// Adds every granule that `range` touches. Returns whether the list has changed.
    pub fn add(&mut self, range: Range<u64>) -> bool {
        let start = range.start / STEP * STEP;
        let end = range.end.checked_next_multiple_of(STEP);
        let end = end.unwrap_or(u64::MAX / STEP * STEP);
        if range.is_empty()
            || start >= end
            || self.0.iter().any(|r| r.start <= start && end <= r.end)
        {
            return false;
        }
        let mut joined = start..end;
        self.0.retain(|r| {
            let apart = r.end < joined.start || joined.end < r.start;
            if !apart {
                joined = r.start.min(joined.start)..r.end.max(joined.end);
            }
            apart
        });
        let at = self.0.partition_point(|r| r.start < joined.start);
        self.0.insert(at, joined);
        if self.0.len() > MAX_BAD_RANGES {
            self.join_nearest();
        }
        true
    }

    /// Whether a byte of `range` is bad.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.0
            .iter()
            .any(|r| r.start < range.end && range.start < r.end)
    }

    /// The ranges in order.
    pub fn as_slice(&self) -> &[Range<u64>] {
        &self.0
    }

    /// A list of these ranges; `None` unless they have the form of [`as_slice`](Self::as_slice).
    pub(super) fn from_sorted(ranges: Vec<Range<u64>>) -> Option<Self> {
        let aligned = |place: u64| place.is_multiple_of(STEP);
        let whole = |r: &Range<u64>| r.start < r.end && aligned(r.start) && aligned(r.end);
        let apart = ranges.iter().zip(ranges.iter().skip(1));
        (ranges.len() <= MAX_BAD_RANGES
            && ranges.iter().all(whole)
            && apart.into_iter().all(|(a, b)| a.end < b.start))
        .then_some(Self(ranges))
    }

    fn join_nearest(&mut self) {
        let neighbors = self.0.iter().zip(self.0.iter().skip(1));
        let nearest = neighbors
            .enumerate()
            .min_by_key(|(_, (a, b))| b.start.saturating_sub(a.end))
            .map(|(at, (a, b))| (at, a.start..b.end));
        if let Some((at, joined)) = nearest {
            self.0.splice(at..at + 2, [joined]);
        }
    }
}
