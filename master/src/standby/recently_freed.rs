//! The freed extents on which leases may run.
//!
//! A leader keeps a freed extent closed until its leases have ended. It does not log leases. So a standby
//! keeps every freed extent closed for one lease TTL. If the leader grants the extent earlier, its leases had
//! ended.

use super::freed_ranges::FreedRanges;
use crate::clock::BootInstant;
use crate::placement::{ExtentIndex, Extents, Segment};
use kvpool_types::{Length, Offset, SegmentId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// One freed extent.
#[derive(Debug)]
pub(crate) struct FreedExtent {
    pub(crate) segment: Arc<Segment>,
    pub(crate) index: ExtentIndex,
    pub(crate) offset: Offset,
    pub(crate) length: Length,
    /// When the standby applied the removal.
    pub(crate) since: BootInstant,
}

/// The freed extents that are kept closed. They count as quarantined in their segments.
#[derive(Debug)]
pub(crate) struct RecentlyFreed {
    lease_ttl: Duration,
    left: BTreeMap<(SegmentId, Offset), FreedExtent>,
    /// When expired entries were last freed.
    looked: BootInstant,
}

impl RecentlyFreed {
    pub(super) const fn new(lease_ttl: Duration) -> Self {
        Self {
            lease_ttl,
            left: BTreeMap::new(),
            looked: BootInstant(0),
        }
    }

    /// Keeps a freed extent closed.
    pub(super) fn keep(&mut self, left: FreedExtent) {
        left.segment.quarantine([left.index]);
        self.keep_quarantined(left);
    }

    /// Keeps an extent closed that already counts as quarantined.
    pub(super) fn keep_quarantined(&mut self, left: FreedExtent) {
        let place = (left.segment.id, left.offset);
        let before = self.left.insert(place, left);
        debug_assert!(before.is_none(), "invariant: freed extents do not overlap");
    }

    /// Drops the extents that overlap a range which the leader has granted again.
    pub(super) fn give_up(&mut self, segment: SegmentId, offset: Offset, length: Length) {
        let end = Offset(offset.0.saturating_add(Extents::rounded(length).0));
        // Extents do not overlap each other, so their ends have the same order as their starts.
        while let Some((place, left)) = self
            .left
            .range((segment, Offset(0))..(segment, end))
            .next_back()
            && left.offset.0 + left.length.0 > offset.0
        {
            let place = *place;
            if let Some(left) = self.left.remove(&place) {
                left.segment
                    .free_quarantined([(left.index, false)].into_iter());
                let last = Offset(left.offset.0 + Extents::rounded(left.length).0);
                self.keep_rest(&left, left.offset, offset);
                self.keep_rest(&left, end, last);
            }
        }
    }

    /// Removes from `ranges` the parts that are closed already and that this range overlaps.
    pub(super) fn leave_out(
        &self,
        ranges: &mut FreedRanges,
        segment: SegmentId,
        offset: Offset,
        length: Length,
    ) {
        let end = Offset(offset.0.saturating_add(Extents::rounded(length).0));
        let before_end = self.left.range((segment, Offset(0))..(segment, end)).rev();
        let overlapping =
            before_end.take_while(|(_, left)| left.offset.0 + left.length.0 > offset.0);
        for (_, left) in overlapping {
            ranges.take(segment, left.offset, left.length);
        }
    }

    /// Keeps the rest of a range closed after a part of it was granted again.
    fn keep_rest(&mut self, of: &FreedExtent, start: Offset, end: Offset) {
        let Some(length) = end.0.checked_sub(start.0).filter(|length| *length > 0) else {
            return;
        };
        let length = Length(length);
        if let Some(index) = of.segment.quarantine_at(start, length) {
            self.keep_quarantined(FreedExtent {
                segment: Arc::clone(&of.segment),
                index,
                offset: start,
                length,
                since: of.since,
            });
        }
    }

    /// Drops the extents of a segment that is gone.
    pub(super) fn forget(&mut self, segment: SegmentId) {
        self.left.retain(|(id, _), _| *id != segment);
    }

    /// Frees the extents that were closed for a lease TTL. Does so at most ten times per TTL.
    pub(super) fn tick(&mut self, now: BootInstant) {
        if self.left.is_empty() || now.since(self.looked) < self.lease_ttl / 10 {
            return;
        }
        self.looked = now;
        let lease_ttl = self.lease_ttl;
        self.left.retain(|_, left| {
            let is_over = now.since(left.since) >= lease_ttl;
            if is_over {
                left.segment
                    .free_quarantined([(left.index, false)].into_iter());
            }
            !is_over
        });
    }

    /// Removes and returns the extents that are still closed.
    pub(crate) fn take(&mut self) -> Vec<FreedExtent> {
        std::mem::take(&mut self.left).into_values().collect()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.left.len()
    }
}
