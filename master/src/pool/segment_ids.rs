//! The numbers of new segments: set aside durably before they are given, as versions are (ADR 0007).
//!
//! A shard's snapshot may name a segment that has gone, for as long as the shard has not been captured again.
//! Were its number given again, the blocks in that snapshot would come back on the new segment.

use super::Pool;
use super::nodes::{RegisterError, refuse};
use crate::store::record::{Record, SegmentsGranted};
use kvpool_types::{Code, SegmentId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many ids are set aside at a time. A term leaves at most so many unused.
const WINDOW: u32 = 64;

/// The ids of this term. Changed under the registration's lock alone.
#[derive(Debug)]
pub(super) struct SegmentIds {
    next: AtomicU32,
    /// Ids from here on may not be given before more have been set aside durably.
    until: AtomicU32,
}

impl SegmentIds {
    /// Those behind everything that earlier terms may have given. The caller logs [`SegmentIds::record`].
    pub(super) const fn new(next: u32) -> Self {
        Self {
            next: AtomicU32::new(next),
            until: AtomicU32::new(next.saturating_add(WINDOW)),
        }
    }

    /// What the log and the snapshots say: the ids that may have been given.
    pub(super) fn record(&self) -> Record {
        let until = SegmentId(self.until.load(Ordering::Acquire));
        Record::SegmentsGranted(SegmentsGranted { until })
    }
}

impl Pool {
    /// Gives the ids of `count` new segments. Call it under the registration's lock.
    pub(super) async fn give_segment_ids(
        self: &Arc<Self>,
        count: u32,
    ) -> Result<impl Iterator<Item = SegmentId> + use<>, RegisterError> {
        let first = self.segment_ids.next.load(Ordering::Acquire);
        let exhausted = || refuse(Code::TooLarge, "no segment id is left in this pool");
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
