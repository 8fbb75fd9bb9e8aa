//! The numbers of new segments. Like versions, they are reserved durably before use (ADR 0007).
//!
//! A shard's snapshot may name a segment that has left, until the journal captures the shard again.
//! If a new segment had the same number, that snapshot would bring the old segment's blocks back on
//! it.

use super::Pool;
use super::nodes::{RegisterError, refuse};
use crate::store::record::{Record, SegmentsGranted};
use kvpool_types::{Code, SegmentId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of ids reserved at a time. A term leaves at most this many unused.
const WINDOW: u32 = 64;

/// The ids of this term. They change only under the registration's lock.
#[derive(Debug)]
pub(super) struct SegmentIds {
    next: AtomicU32,
    /// An id from here on needs another durable reservation.
    until: AtomicU32,
}

impl SegmentIds {
    /// The ids after all ids of earlier terms. The caller logs [`SegmentIds::record`].
    pub(super) const fn new(next: u32) -> Self {
        Self {
            next: AtomicU32::new(next),
            until: AtomicU32::new(next.saturating_add(WINDOW)),
        }
    }

    /// Takes back the reservation of [`SegmentIds::new`], because it could not be logged.
    pub(super) fn reserve_nothing(&self) {
        let next = self.next.load(Ordering::Acquire);
        self.until.store(next, Ordering::Release);
    }

    /// The record of the ids that may be in use, for the log and the snapshots.
    pub(super) fn record(&self) -> Record {
        let until = SegmentId(self.until.load(Ordering::Acquire));
        Record::SegmentsGranted(SegmentsGranted { until })
    }
}

impl Pool {
    /// Returns the ids of `count` new segments. The caller holds the registration's lock.
    pub(super) async fn give_segment_ids(
        self: &Arc<Self>,
        count: u32,
    ) -> Result<impl Iterator<Item = SegmentId> + use<>, RegisterError> {
        let first = self.segment_ids.next.load(Ordering::Acquire);
        let exhausted = || refuse(Code::TooLarge, "the pool has no segment ids left");
        let end = first.checked_add(count).ok_or_else(exhausted)?;
        if end > self.segment_ids.until.load(Ordering::Acquire) {
            let until = end.saturating_add(WINDOW);
            let record = Record::SegmentsGranted(SegmentsGranted {
                until: SegmentId(until),
            });
            let pool = Arc::clone(self);
            self.log(vec![record], move || {
                pool.segment_ids.until.fetch_max(until, Ordering::AcqRel);
            })
            .await
            .map_err(|code| refuse(code, "the metadata store failed"))?;
        }
        self.segment_ids.next.store(end, Ordering::Release);
        Ok((first..end).map(SegmentId))
    }
}
