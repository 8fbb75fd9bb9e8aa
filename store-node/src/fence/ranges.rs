//! A map from ranges of one segment to values. The ranges do not overlap.

use kvpool_types::{Length, Offset};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// The bytes from `start` up to, not including, `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Range {
    /// The first byte.
    pub(crate) start: Offset,
    /// The first byte past the range.
    pub(crate) end: Offset,
}

impl Range {
    /// The bytes of the range.
    pub(crate) const fn length(&self) -> Length {
        Length(self.end.0.saturating_sub(self.start.0))
    }
}

/// The entries that were removed from a map, in most cases at most one.
pub(super) type Removed<T> = SmallVec<[(Range, T); 1]>;

/// A map from disjoint, non-empty ranges to values.
#[derive(Debug)]
pub(super) struct Ranges<T> {
    by_start: BTreeMap<Offset, (Offset, T)>,
}

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Self {
            by_start: BTreeMap::new(),
        }
    }
}

impl<T> Ranges<T> {
    pub(super) fn len(&self) -> usize {
        self.by_start.len()
    }

    pub(super) fn clear(&mut self) {
        self.by_start.clear();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Range, &T)> {
        self.by_start
            .iter()
            .map(|(&start, (end, value))| (Range { start, end: *end }, value))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (Range, &mut T)> {
        self.by_start
            .iter_mut()
            .map(|(&start, (end, value))| (Range { start, end: *end }, value))
    }

    /// The value of exactly this range.
    pub(super) fn get(&self, range: Range) -> Option<&T> {
        match self.by_start.get(&range.start) {
            Some((end, value)) if *end == range.end => Some(value),
            _ => None,
        }
    }

    /// The value of exactly this range.
    pub(super) fn get_mut(&mut self, range: Range) -> Option<&mut T> {
        match self.by_start.get_mut(&range.start) {
            Some((end, value)) if *end == range.end => Some(value),
            _ => None,
        }
    }

    /// The ranges that share a byte with `range`, highest first. Ranges are disjoint. So the search ends at
    /// the first range that ends before `range`, and takes one descent of the tree.
    pub(super) fn overlapping(&self, range: Range) -> impl Iterator<Item = (Range, &T)> {
        self.by_start
            .range(..range.end)
            .rev()
            .map(|(&start, (end, value))| (Range { start, end: *end }, value))
            .take_while(move |(found, _)| found.end > range.start)
    }

    /// The ranges that share a byte with `range`, highest first.
    pub(super) fn overlapping_mut(
        &mut self,
        range: Range,
    ) -> impl Iterator<Item = (Range, &mut T)> {
        self.by_start
            .range_mut(..range.end)
            .rev()
            .map(|(&start, (end, value))| (Range { start, end: *end }, value))
            .take_while(move |(found, _)| found.end > range.start)
    }

    /// Adds a range that overlaps no other.
    pub(super) fn insert(&mut self, range: Range, value: T) {
        debug_assert!(range.start < range.end, "invariant: ranges are not empty");
        debug_assert!(
            self.overlapping(range).next().is_none(),
            "invariant: ranges are disjoint"
        );
        self.by_start.insert(range.start, (range.end, value));
    }

    /// Removes exactly this range.
    pub(super) fn remove(&mut self, range: Range) -> Option<T> {
        self.get(range)?;
        self.by_start.remove(&range.start).map(|(_, value)| value)
    }

    /// Removes all ranges that share a byte with `range`, lowest first.
    pub(super) fn remove_overlapping(&mut self, range: Range) -> Removed<T> {
        let found: SmallVec<[Offset; 1]> = self
            .overlapping(range)
            .map(|(found, _)| found.start)
            .collect();
        let taken = found.iter().rev().filter_map(|start| {
            let (end, value) = self.by_start.remove(start)?;
            let start = *start;
            Some((Range { start, end }, value))
        });
        taken.collect()
    }

    /// The range that ends where `at` begins.
    pub(super) fn ending_at(&self, at: Offset) -> Option<(Range, &T)> {
        let (&start, (end, value)) = self.by_start.range(..at).next_back()?;
        (*end == at).then_some((Range { start, end: at }, value))
    }

    /// The range that begins at `at`.
    pub(super) fn starting_at(&self, at: Offset) -> Option<(Range, &T)> {
        let (end, value) = self.by_start.get(&at)?;
        Some((
            Range {
                start: at,
                end: *end,
            },
            value,
        ))
    }
}
