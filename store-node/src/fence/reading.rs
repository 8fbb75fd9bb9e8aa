//! Reads over TCP that are under way, where locations are signed.
//!
//! A client may take its bytes slowly. Until it has them, the extent must not get another block: those bytes may be
//! another tenant's. So a ticket waits for such reads, and reads that take long are aborted. A new term has no tickets
//! of the term before: it aborts all reads, and no write begins where one has not ended.
//!
//! Without tokens no read is noted. Whoever reads verifies checksums, and takes no byte of another block for its own.

use super::{Aborts, Range, SegmentIndex, Span};
use kvpool_transport::host::Abort;
use kvpool_types::Offset;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long a ticket waits for a read before the read is aborted, counted from the read's begin. The parts of a
/// large block are read in turn, and each takes less.
pub(super) const LONGEST: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Reading(Mutex<Table>);

#[derive(Default)]
struct Table {
    reads: BTreeMap<Place, Read>,
    next: u64,
}

/// By segment and first byte, so that those within an extent follow each other. The number tells readers apart.
type Place = (usize, u64, u64);

struct Read {
    end: Offset,
    begun: Instant,
    abort: Arc<dyn Abort>,
}

/// A read under way; it ends when this is dropped.
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
    /// Notes a read of `span`; `abort` stops its connection.
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
