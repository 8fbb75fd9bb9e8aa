//! A batch of reads: the client's device reads the node's memory piece by piece, and sums each
//! piece after it has arrived. The node takes no part. The caller's lease and the block's checksum
//! decide whether the bytes are valid.

use super::link::OpenRdmaLink;
use super::pieces::{PieceItem, PieceSlot};
use super::posting::{Group, Moves, Posting};
use super::work::Verb;
use crate::checksum::{Sum, combine};
use crate::control::judged;
use crate::copiers::Job;
use crate::link::{ReadOp, TransferError};
use crate::memory::Slice;
use crate::outcomes::Batch;
use kvpool_types::{Checksum, Length, Offset};
use std::sync::Arc;
use std::time::Instant;

/// Starts the reads of a batch.
pub(super) fn start(
    open: &Arc<OpenRdmaLink>,
    batch: &Arc<Batch<Checksum>>,
    ops: Vec<ReadOp>,
    deadline: Instant,
) {
    let reads = judged(&open.control, batch, ops).into_iter();
    let items = reads.map(|read| PieceItem {
        number: read.item,
        tag: (),
        range: read.source,
        memory: read.into,
    });
    let reading = Reading {
        batch: batch.clone(),
        deadline,
    };
    Posting::start(open, reading, items.collect());
}

struct Reading {
    batch: Arc<Batch<Checksum>>,
    deadline: Instant,
}

/// The checksum of a piece, and its length.
type Summed = (Checksum, Length);

/// A piece in flight.
struct Flying {
    into: Vec<Slice>,
    slot: PieceSlot<(), Summed>,
}

impl Moves for Reading {
    type Tag = ();
    type Sum = Summed;

    fn begin(&self, _open: &OpenRdmaLink, item: &mut PieceItem<()>) -> bool {
        self.batch.begin(item.number)
    }

    fn post(&self, open: &Arc<OpenRdmaLink>, group: Group<Self>, others: impl FnOnce()) {
        let memory = group.first().and_then(|piece| piece.memory.first());
        let ends = open.lanes_near(memory.map(|part| &part.of));
        let mut transfers = Vec::with_capacity(group.len());
        let mut flying = Vec::with_capacity(group.len());
        for piece in group {
            match ends.transfer(Verb::Read, &piece.range, &piece.memory) {
                Ok(transfer) => {
                    transfers.push(transfer);
                    flying.push(Flying {
                        into: piece.memory.into_iter().map(|part| part.slice).collect(),
                        slot: piece.slot,
                    });
                }
                Err(error) => {
                    drop(piece.memory);
                    end(&self.batch, &piece.slot, Err(error));
                }
            }
        }
        others();
        if transfers.is_empty() {
            return;
        }
        let (asked, batch) = (open.clone(), self.batch.clone());
        ends.submit(
            open,
            Verb::Read,
            transfers,
            self.deadline,
            move |outcomes| {
                let open = asked.clone();
                let job: Job = Box::new(move || land(&open, &batch, flying, outcomes));
                asked.copiers.submit(std::iter::once(job));
            },
        );
    }
}

/// Sums the pieces that have arrived.
fn land(
    open: &OpenRdmaLink,
    batch: &Batch<Checksum>,
    pieces: Vec<Flying>,
    outcomes: Vec<Result<(), TransferError>>,
) {
    let failure = outcomes.iter().find_map(|o| o.as_ref().err().cloned());
    for (piece, outcome) in pieces.into_iter().zip(outcomes) {
        let summed = outcome.map(|()| {
            let mut sum = Sum::default();
            let mut length = 0;
            for slice in &piece.into {
                sum.update_private(slice, Offset(0), slice.length());
                length += slice.length().0;
            }
            (sum.finish(), Length(length))
        });
        // The memory is released before the caller is told.
        drop(piece.into);
        end(batch, &piece.slot, summed);
    }
    // A failed lane has closed, so the whole link ends at both ends.
    if let Some(error) = failure {
        open.fail(&error);
    }
}

/// Ends a piece, and its block with the block's last piece.
fn end(
    batch: &Batch<Checksum>,
    slot: &PieceSlot<(), Summed>,
    summed: Result<Summed, TransferError>,
) {
    if let Some(outcome) = slot.ended(summed) {
        let whole = outcome.map(|pieces| {
            let pieces = pieces.into_iter();
            pieces.fold(Checksum(0), |whole, (sum, length)| {
                combine(whole, sum, length)
            })
        });
        batch.end(slot.whole.number, whole);
    }
}
