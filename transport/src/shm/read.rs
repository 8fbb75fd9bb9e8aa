//! A batch of reads, copied directly from the mapping. The node takes no part: the caller's lease
//! and the block's checksum decide whether the bytes are valid.

use super::link::OpenShmLink;
use crate::checksum::{Private, copy_with_whole_sum};
use crate::control::{Read, judged};
use crate::copiers::{Job, by_segment, grouped};
use crate::frame::status;
use crate::link::{ReadOp, TransferError, TransferResult};
use crate::memory::{Region, Slice, total_length};
use crate::outcomes::{Batch, deadline_exceeded};
use crate::split::source;
use kvpool_types::{Checksum, Code, Extent, SegmentId};
use std::sync::Arc;
use std::time::Instant;

/// The most bytes of a batch that the calling thread copies. Two thread switches take as long as
/// copying a few times this.
const INLINE_BYTES: u64 = 64 << 10;

/// Lets the copy threads copy the batch.
pub(super) fn start(
    open: &Arc<OpenShmLink>,
    batch: &Arc<Batch<Checksum>>,
    ops: Vec<ReadOp>,
    deadline: Instant,
) {
    let mut reads = judged(&open.control, batch, ops);
    // The batch keeps the memory, because a node that never answers would hold it forever.
    for read in &mut reads {
        batch.keep(read.item, std::mem::take(&mut read.into));
    }
    for (segment, reads) in by_segment(reads, |read| read.source.segment) {
        let (open, batch) = (open.clone(), batch.clone());
        let asked = open.clone();
        asked
            .segments
            .with(segment, false, move |mapped| match mapped {
                Ok(region) => submit(&open, &region, &batch, reads, deadline),
                Err(error) => {
                    for read in reads {
                        batch.end(read.item, Err(error.clone()));
                    }
                }
            });
    }
}

/// Copies a small batch on the calling thread. `None` when that would block, or take longer than a
/// thread switch.
pub(super) fn now(
    open: &OpenShmLink,
    ops: &[ReadOp],
    deadline: Instant,
) -> Option<Vec<TransferResult>> {
    let bytes = ops.iter().fold(0u64, |bytes, op| {
        bytes.saturating_add(total_length(&op.into).0)
    });
    if bytes > INLINE_BYTES || !open.is_usable() || Instant::now() >= deadline {
        return None;
    }
    let mut outcomes = Vec::with_capacity(ops.len());
    let mut last: Option<(SegmentId, Region)> = None;
    for op in ops {
        let source = match source(op) {
            Ok(source) => source,
            Err(error) => {
                outcomes.push(Err(error));
                continue;
            }
        };
        let region = match &last {
            Some((segment, region)) if *segment == source.segment => region,
            _ => {
                let region = open.segments.mapped(source.segment)?;
                &last.insert((source.segment, region)).1
            }
        };
        outcomes.push(part(region, &source).and_then(|from| {
            copy_with_whole_sum(&[from], &op.into, Private::Destination, || true)
                .ok_or_else(deadline_exceeded)
        }));
    }
    Some(outcomes)
}

/// Queues the reads of one segment.
fn submit(
    open: &OpenShmLink,
    region: &Region,
    batch: &Arc<Batch<Checksum>>,
    reads: Vec<Read>,
    deadline: Instant,
) {
    let groups = grouped(reads, |read| read.source.length);
    open.copiers.submit(groups.into_iter().map(|group| -> Job {
        let (region, batch) = (region.clone(), batch.clone());
        Box::new(move || {
            for read in group {
                copy(&region, &batch, &read, deadline);
            }
        })
    }));
}

fn copy(region: &Region, batch: &Batch<Checksum>, read: &Read, deadline: Instant) {
    let from = match part(region, &read.source) {
        Ok(from) => from,
        Err(error) => return batch.end(read.item, Err(error)),
    };
    let Some(into) = batch.take(read.item) else {
        return;
    };
    let in_time = || Instant::now() < deadline;
    let copied = copy_with_whole_sum(&[from], &into, Private::Destination, in_time);
    // The memory is released before the caller is told.
    drop(into);
    batch.end(read.item, copied.ok_or_else(deadline_exceeded));
}

fn part(region: &Region, source: &Extent) -> Result<Slice, TransferError> {
    region
        .slice(source.offset, source.length)
        .ok_or_else(|| status(Code::OutOfRange))
}
