//! Reads over TCP in progress, on a node whose readers need signed locations.
//!
//! A client may receive its bytes slowly. Meanwhile the extent must not get another block, whose
//! bytes may belong to another tenant. So a ticket waits for such reads, and slow reads are
//! aborted. A new term knows no tickets of the previous one: it aborts all reads. No write begins
//! in a range that is being read.
//!
//! Without tokens no read is recorded. A reader verifies the checksum, so it does not accept bytes of another
//! block.

use super::{Aborts, Range, SegmentIndex, Span};
use kvpool_transport::host::Abort;
use kvpool_types::Offset;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long after its begin a read may delay a ticket before it is aborted. The parts of a large block are
/// read one after the other, and each takes less.
pub(super) const LONGEST: Duration = Duration::from_secs(1);

/// The reads over TCP that are in progress.
#[derive(Default)]
pub(super) struct Reading(Mutex<Table>);

#[derive(Default)]
struct Table {
    reads: BTreeMap<Place, Read>,
    next: u64,
}

/// Segment, first byte, and a number that tells readers apart. Reads within one extent are adjacent in this
/// order.
type Place = (usize, u64, u64);

struct Read {
    end: Offset,
    begun: Instant,
    abort: Arc<dyn Abort>,
}

/// A read in progress. Dropping this ends it.
#[derive(Debug)]
pub(crate) struct ReadGuard {
    reading: Arc<Reading>,
    place: Place,
}

impl std::fmt::Debug for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reading({})", self.0.lock().reads.len())
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.reading.0.lock().reads.remove(&self.place);
    }
}

impl Reading {
    /// Records a read of `span`; `abort` ends its connection.
    pub(super) fn begin(self: &Arc<Self>, span: Span, abort: Arc<dyn Abort>) -> ReadGuard {
        let mut table = self.0.lock();
        table.next += 1;
        let place = (span.segment.0, span.range.start.0, table.next);
        let read = Read {
            end: span.range.end,
            begun: Instant::now(),
            abort,
        };
        table.reads.insert(place, read);
        ReadGuard {
            reading: Arc::clone(self),
            place,
        }
    }

    /// The bytes that are being read.
    pub(super) fn spans(&self, out: &mut Vec<Span>) {
        let table = self.0.lock();
        out.extend(table.reads.iter().map(|(&(segment, start, _), read)| Span {
            segment: SegmentIndex(segment),
            range: Range {
                start: Offset(start),
                end: read.end,
            },
        }));
    }

    /// Collects the reads within `span` that began at least `LONGEST` ago. A read lies within one extent.
    pub(super) fn late_in(&self, span: Span, now: Instant, aborts: &mut Aborts) {
        let from = (span.segment.0, span.range.start.0, 0);
        let to = (span.segment.0, span.range.end.0, 0);
        let table = self.0.lock();
        let late = table
            .reads
            .range(from..to)
            .filter(|(_, read)| now >= read.begun + LONGEST);
        aborts.extend(late.map(|(_, read)| Arc::clone(&read.abort)));
    }

    /// Whether bytes of `span` are being read.
    pub(super) fn overlaps(&self, span: &Span) -> bool {
        let segment = span.segment.0;
        let to = (segment, span.range.end.0, 0);
        let table = self.0.lock();
        let mut reads = table.reads.range((segment, 0, 0)..to);
        reads.any(|(_, read)| read.end > span.range.start)
    }

    /// Collects all reads.
    pub(super) fn all(&self, aborts: &mut Aborts) {
        let table = self.0.lock();
        aborts.extend(table.reads.values().map(|read| Arc::clone(&read.abort)));
    }
}
