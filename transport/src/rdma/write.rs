//! A batch of writes: announced, written piece by piece by the client's device, and ended.
//!
//! ```text
//! WriteBegin ──answer──► pieces: WRITE in flight ┐
//!                                summed meanwhile ┴─ both done, of all pieces of a block ─┐
//!                                         ok ◄──answer── WriteEnd with the sums ◄─────────┘
//! ```
//!
//! The bytes are summed in place while the device reads them. If a caller changes them meanwhile, the stored
//! block has a wrong checksum, and every reader rejects it.

use super::link::OpenRdmaLink;
use super::pieces::{PieceItem, PieceSlot};
use super::posting::{Group, Moves, Posting};
use super::work::Verb;
use crate::checksum::{ChunkedSum, combine_chunks};
use crate::control::{ControlAnswer, admitted, codes};
use crate::copiers::Job;
use crate::frame::status;
use crate::link::{TransferError, WriteOp};
use crate::outcomes::Batch;
use kvpool_types::wire::data::{WriteEnd, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Checksum, Code, Epoch, GrantId, Offset};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// Announces the writes; the transfers start when the answers arrive. The batch keeps the memory
/// until a write starts.
pub(super) fn start(
    open: &Arc<OpenRdmaLink>,
    batch: Arc<Batch<Checksum>>,
    items: Vec<(usize, WriteOp)>,
    deadline: Instant,
) {
    let epochs = items.iter().map(|(_, write)| write.grant.epoch);
    let epoch = epochs.max().unwrap_or_default();
    let request = WriteRequest {
        incarnation: open.incarnation,
        grants: items.iter().map(|(_, write)| write.grant).collect(),
    };
    let asked = open.clone();
    open.control
        .request(Op::WriteBegin, epoch, &request, move |answer| {
            begun(&asked, batch, items, answer, deadline);
        });
}

/// Starts the admitted writes, and ends the others.
fn begun(
    open: &Arc<OpenRdmaLink>,
    batch: Arc<Batch<Checksum>>,
    items: Vec<(usize, WriteOp)>,
    answer: Result<ControlAnswer, TransferError>,
    deadline: Instant,
) {
    let admitted = admitted(answer, &batch, items).into_iter();
    let items = admitted.map(|(number, write)| PieceItem {
        number,
        tag: write.grant.id,
        range: write.grant.extent,
        memory: Vec::new(),
    });
    Posting::start(open, Writing { batch, deadline }, items.collect());
}

struct Writing {
    batch: Arc<Batch<Checksum>>,
    deadline: Instant,
}

/// The checksums of a piece's chunks.
type Chunks = Vec<Checksum>;

impl Moves for Writing {
    type Tag = GrantId;
    type Sum = Chunks;

    fn begin(&self, open: &OpenRdmaLink, item: &mut PieceItem<GrantId>) -> bool {
        let Some(memory) = self.batch.take(item.number) else {
            // Tells the node that this write is no longer in progress.
            let items = vec![(item.tag, Vec::new())];
            let request = WriteEnd { items };
            open.control
                .request(Op::WriteEnd, Epoch::default(), &request, |_| {});
            return false;
        };
        item.memory = memory;
        true
    }

    fn post(&self, open: &Arc<OpenRdmaLink>, group: Group<Self>, others: impl FnOnce()) {
        let memory = group.first().and_then(|piece| piece.memory.first());
        let ends = open.lanes_near(memory.map(|part| &part.of));
        let mut transfers = Vec::with_capacity(group.len());
        let mut flying = Vec::with_capacity(group.len());
        let mut slots = Vec::with_capacity(group.len());
        for piece in group {
            match ends.transfer(Verb::Write, &piece.range, &piece.memory) {
                Ok(transfer) => {
                    transfers.push(transfer);
                    flying.push(piece.memory);
                    slots.push(piece.slot);
                }
                Err(error) => {
                    drop(piece.memory);
                    finish(open, &self.batch, [(&piece.slot, Err(error))]);
                }
            }
        }
        others();
        if transfers.is_empty() {
            return;
        }
        let landing = Arc::new(Landing {
            open: open.clone(),
            batch: self.batch.clone(),
            slots,
            half: Mutex::new(None),
        });
        let landed = landing.clone();
        ends.submit(
            open,
            Verb::Write,
            transfers,
            self.deadline,
            move |outcomes| landed.landed(outcomes),
        );
        let sums = flying.iter().map(|memory| {
            let mut sums = ChunkedSum::default();
            for part in memory {
                sums.update_private(&part.slice, Offset(0), part.slice.length());
            }
            sums.finish_chunks()
        });
        let sums = sums.collect();
        // The memory is released before the caller can be told. The lane keeps its own reference.
        drop(flying);
        landing.summed(sums);
    }
}

/// Pieces that must both land and be summed, in either order.
struct Landing {
    open: Arc<OpenRdmaLink>,
    batch: Arc<Batch<Checksum>>,
    slots: Vec<PieceSlot<GrantId, Chunks>>,
    half: Mutex<Option<Half>>,
}

type EndOutcomes = Vec<Result<(), TransferError>>;

enum Half {
    Landed(EndOutcomes),
    Summed(Vec<Chunks>),
}

impl Landing {
    /// Records one half. Returns both halves when this was the second.
    fn both(&self, half: Half) -> Option<(EndOutcomes, Vec<Chunks>)> {
        let mut kept = self.half.lock();
        let Some(other) = kept.take() else {
            *kept = Some(half);
            return None;
        };
        match (half, other) {
            (Half::Landed(outcomes), Half::Summed(sums))
            | (Half::Summed(sums), Half::Landed(outcomes)) => Some((outcomes, sums)),
            _ => unreachable!("invariant: each half ends once"),
        }
    }

    /// Runs on the completion thread, which serves other lanes too.
    fn landed(self: &Arc<Self>, outcomes: EndOutcomes) {
        if let Some((outcomes, sums)) = self.both(Half::Landed(outcomes)) {
            let landing = self.clone();
            let job: Job = Box::new(move || landing.end(outcomes, sums));
            self.open.copiers.submit(std::iter::once(job));
        }
    }

    fn summed(&self, sums: Vec<Chunks>) {
        if let Some((outcomes, sums)) = self.both(Half::Summed(sums)) {
            self.end(outcomes, sums);
        }
    }

    fn end(&self, outcomes: EndOutcomes, sums: Vec<Chunks>) {
        let failure = outcomes.iter().find_map(|o| o.as_ref().err().cloned());
        if let Some(error) = &failure {
            // The lane has closed, and which bytes reached the node is unknown. The node must end
            // its queue pair before the extent is written again.
            self.open.fail(error);
        }
        let outcomes = outcomes.into_iter().zip(sums);
        let outcomes = outcomes.map(|(outcome, sums)| outcome.map(|()| sums));
        finish(&self.open, &self.batch, self.slots.iter().zip(outcomes));
    }
}

/// Records outcomes of pieces, and tells the node about every block whose last piece has ended.
fn finish<'p>(
    open: &OpenRdmaLink,
    batch: &Arc<Batch<Checksum>>,
    pieces: impl IntoIterator<
        Item = (
            &'p PieceSlot<GrantId, Chunks>,
            Result<Chunks, TransferError>,
        ),
    >,
) {
    let mut items = Vec::new();
    let mut told = Vec::new();
    for (slot, outcome) in pieces {
        let Some(outcome) = slot.ended(outcome) else {
            continue;
        };
        let (item, grant) = (slot.whole.number, slot.whole.tag);
        match outcome.map(|chunks| chunks.concat()) {
            Ok(chunks) if batch.pause(item) => {
                let whole = combine_chunks(slot.whole.length, &chunks);
                told.push(Some((item, whole)));
                items.push((grant, chunks));
            }
            outcome => {
                told.push(None);
                items.push((grant, Vec::new()));
                if let Err(error) = outcome {
                    batch.end(item, Err(error));
                }
            }
        }
    }
    if items.is_empty() {
        return;
    }
    let batch = batch.clone();
    let request = WriteEnd { items };
    open.control
        .request(Op::WriteEnd, Epoch::default(), &request, move |answer| {
            let outcomes = match codes(answer, told.len()) {
                Ok(codes) => codes.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error); told.len()],
            };
            for (told, outcome) in told.into_iter().zip(outcomes) {
                let Some((item, whole)) = told else {
                    continue;
                };
                let outcome = match outcome {
                    Ok(Code::Ok) => Ok(whole),
                    Ok(code) => Err(status(code)),
                    Err(error) => Err(error),
                };
                batch.end(item, outcome);
            }
        });
}
