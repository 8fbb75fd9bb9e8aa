//! A batch of reads: the client's device reads the node's memory, and the bytes are summed when they are
//! here. Nobody is asked, and the caller's lease and the block's checksum say whether what was read
//! counts.

use super::link::Open;
use super::work::Way;
use crate::batch::Batch;
use crate::checksum::Sum;
use crate::control::{Read, judged};
use crate::copiers::{Job, grouped};
use crate::link::{ReadOp, TransferError};
use kvpool_types::{Checksum, Offset};
use std::sync::Arc;
use std::time::Instant;

/// Has the batch read, in groups, so that the first are summed while the last are on their way.
pub(super) fn start(
    open: &Arc<Open>,
    batch: &Arc<Batch<Checksum>>,
    ops: Vec<ReadOp>,
    deadline: Instant,
) {
    let reads = judged(&open.control, batch, ops);
    if reads.is_empty() {
        return;
    }
    let groups = grouped(reads, |read| read.source.length);
    let (asked, batch) = (open.clone(), batch.clone());
    let job: Job = Box::new(move || {
        for group in groups {
            submit(&asked, &batch, group, deadline);
        }
    });
    open.copiers.submit(std::iter::once(job));
}

fn submit(open: &Arc<Open>, batch: &Arc<Batch<Checksum>>, group: Vec<Read>, deadline: Instant) {
    let memory = group.first().and_then(|read| read.into.first());
    let ends = open.end_near(memory);
    let mut transfers = Vec::with_capacity(group.len());
    let mut flying = Vec::with_capacity(group.len());
    for read in group {
        if !batch.begin(read.item) {
            continue;
        }
        match ends.transfer(Way::Read, &read.source, &read.into) {
            Ok(transfer) => {
                transfers.push(transfer);
                flying.push(read);
            }
            Err(error) => batch.end(read.item, Err(error)),
        }
    }
    if transfers.is_empty() {
        return;
    }
    let (asked, batch) = (open.clone(), batch.clone());
    ends.submit(open, Way::Read, transfers, deadline, move |outcomes| {
        let open = asked.clone();
        let job: Job = Box::new(move || land(&open, &batch, flying, outcomes));
        asked.copiers.submit(std::iter::once(job));
    });
}

/// Sums what has come.
fn land(
    open: &Open,
    batch: &Batch<Checksum>,
    reads: Vec<Read>,
    outcomes: Vec<Result<(), TransferError>>,
) {
    let failure = outcomes.iter().find_map(|o| o.as_ref().err().cloned());
    for (read, outcome) in reads.into_iter().zip(outcomes) {
        let sum = outcome.map(|()| {
            let mut sum = Sum::default();
            for slice in &read.into {
                sum.update_private(slice, Offset(0), slice.length());
            }
            sum.finish()
        });
        // The caller's memory is let go of before the caller is told.
        drop(read.into);
        batch.end(read.item, sum);
    }
    // Its lane has closed: the rest of the link goes too, at both ends.
    if let Some(error) = failure {
        open.fail(&error);
    }
}
