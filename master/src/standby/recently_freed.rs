//! Extents that blocks have left while leases on them may last.
//!
//! A leader keeps what it has freed shut until its leases are over. It does not log those, so who
//! follows keeps everything shut for one whole lease; if the leader grants it earlier, its leases were
//! over earlier.

use crate::clock::BootInstant;
use crate::placement::{ExtentIndex, Extents, Segment};
use kvpool_types::{Length, Offset, SegmentId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// One extent that was freed.
#[derive(Debug)]
pub(crate) struct FreedExtent {
    pub(crate) segment: Arc<Segment>,
    pub(crate) index: ExtentIndex,
    pub(crate) offset: Offset,
    pub(crate) length: Length,
    /// When it became known.
    pub(crate) since: BootInstant,
}

/// See the module's documentation. The extents count as quarantined in their segments.
#[derive(Debug)]
pub(crate) struct RecentlyFreed {
    lease_ttl: Duration,
    left: BTreeMap<(SegmentId, Offset), FreedExtent>,
    /// When this was last looked through.
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

    /// Keeps an extent shut that a block has just left.
    pub(super) fn keep(&mut self, left: FreedExtent) {
        left.segment.quarantine([left.index]);
        let place = (left.segment.id, left.offset);
        self.left.insert(place, left);
    }

    /// Opens what overlaps a range that the leader has granted again.
    pub(super) fn give_up(&mut self, segment: SegmentId, offset: Offset, length: Length) {
        let end = Offset(offset.0.saturating_add(Extents::rounded(length).0));
        // Extents do not overlap each other, so the ends come in the order of the beginnings.
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

    /// Keeps what is left of a range shut when a part of it was granted again.
    fn keep_rest(&mut self, of: &FreedExtent, start: Offset, end: Offset) {
        let Some(length) = end.0.checked_sub(start.0).filter(|length| *length > 0) else {
            return;
        };
        let length = Length(length);
        if let Some(index) = of.segment.allocate_at(start, length) {
            self.keep(FreedExtent {
                segment: Arc::clone(&of.segment),
                index,
                offset: start,
                length,
                since: of.since,
            });
        }
    }

    /// Forgets what lay on a segment that has gone.
    pub(super) fn forget(&mut self, segment: SegmentId) {
        self.left.retain(|(id, _), _| *id != segment);
    }

    /// Opens what has been shut for a whole lease. It looks no more often than ten times in one.
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

    /// Everything that is still shut.
    pub(crate) fn take(&mut self) -> Vec<FreedExtent> {
        std::mem::take(&mut self.left).into_values().collect()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.left.len()
    }
}
