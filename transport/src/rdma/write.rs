//! A batch of writes: announced, written by the client's device, ended.
//!
//! ```text
//! WriteBegin ──answer──► WRITE in flight ┐
//!                        summed meanwhile ┴─ both done ──► WriteEnd with the sums ──answer──► ok
//! ```
//!
//! The bytes are summed where they lie while the device reads them too. A caller that changes them
//! meanwhile stores a block that no reader takes for good.

use super::link::Open;
use super::work::Way;
use crate::batch::Batch;
use crate::checksum::{BlockSums, ChunkedSum};
use crate::control::{Answer, admitted, codes};
use crate::copiers::{Job, grouped};
use crate::frame::status;
use crate::link::{TransferError, WriteOp};
use crate::memory::total_length;
use kvpool_types::wire::data::{WriteEnd, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Checksum, Code, Epoch, GrantId, Offset};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// A write, and which item of its batch it is. The batch keeps the memory until the write is begun.
type Item = (usize, WriteOp);

/// Announces the writes and has the rest done as answers come.
pub(super) fn start(
    open: &Arc<Open>,
    batch: Arc<Batch<Checksum>>,
    items: Vec<Item>,
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
            begun(&asked, &batch, items, answer, deadline);
        });
}

/// Has the admitted writes done, in groups, and ends the others.
fn begun(
    open: &Arc<Open>,
    batch: &Arc<Batch<Checksum>>,
    items: Vec<Item>,
    answer: Result<Answer, TransferError>,
    deadline: Instant,
) {
    let admitted = admitted(answer, batch, items);
    let groups = grouped(admitted, |(_, write)| write.grant.extent.length);
    open.copiers.submit(groups.into_iter().map(|group| -> Job {
        let (open, batch) = (open.clone(), batch.clone());
        Box::new(move || submit(&open, &batch, group, deadline))
    }));
}

fn submit(open: &Arc<Open>, batch: &Arc<Batch<Checksum>>, group: Vec<Item>, deadline: Instant) {
    let mut taken = Vec::with_capacity(group.len());
    let mut given_up = Vec::new();
    for (item, mut write) in group {
        match batch.take(item) {
            Some(from) => {
                write.from = from;
                taken.push((item, write));
            }
            None => given_up.push((write.grant.id, Vec::new())),
        }
    }
    let memory = taken.first().and_then(|(_, write)| write.from.first());
    let ends = open.end_near(memory);
    let mut transfers = Vec::with_capacity(taken.len());
    let mut flying = Vec::with_capacity(taken.len());
    for (item, write) in taken {
        match ends.transfer(Way::Write, &write.grant.extent, &write.from) {
            Ok(transfer) => {
                transfers.push(transfer);
                flying.push((item, write));
            }
            Err(error) => {
                given_up.push((write.grant.id, Vec::new()));
                batch.end(item, Err(error));
            }
        }
    }
    if !given_up.is_empty() {
        // The node need not take them for writes in progress any more.
        let end = WriteEnd { items: given_up };
        open.control
            .request(Op::WriteEnd, Epoch::default(), &end, |_| {});
    }
    if transfers.is_empty() {
        return;
    }
    let landing = Arc::new(Landing {
        open: open.clone(),
        batch: batch.clone(),
        items: flying
            .iter()
            .map(|(item, write)| (*item, write.grant.id))
            .collect(),
        half: Mutex::new(None),
    });
    let landed = landing.clone();
    ends.submit(open, Way::Write, transfers, deadline, move |outcomes| {
        landed.half_done(Half::Landed(outcomes));
    });
    let sums = flying.iter().map(|(_, write)| {
        let mut sums = ChunkedSum::for_length(total_length(&write.from));
        for slice in &write.from {
            sums.update_private(slice, Offset(0), slice.length());
        }
        sums.finish()
    });
    let sums = sums.collect();
    // The caller's memory is let go of before the caller can be told; the lane has its own hold of it.
    drop(flying);
    landing.half_done(Half::Summed(sums));
}

/// Writes of which two things have to come to an end, in either order.
struct Landing {
    open: Arc<Open>,
    batch: Arc<Batch<Checksum>>,
    items: Vec<(usize, GrantId)>,
    half: Mutex<Option<Half>>,
}

enum Half {
    Landed(Vec<Result<(), TransferError>>),
    Summed(Vec<BlockSums>),
}

impl Landing {
    fn half_done(self: &Arc<Self>, half: Half) {
        let other = {
            let mut kept = self.half.lock();
            match kept.take() {
                Some(other) => other,
                None => {
                    *kept = Some(half);
                    return;
                }
            }
        };
        let (outcomes, sums) = match (half, other) {
            (Half::Landed(outcomes), Half::Summed(sums))
            | (Half::Summed(sums), Half::Landed(outcomes)) => (outcomes, sums),
            _ => unreachable!("invariant: each half ends once"),
        };
        // What comes first may be on the thread of the device, which has others to serve.
        let landing = self.clone();
        let job: Job = Box::new(move || landing.end(outcomes, sums));
        self.open.copiers.submit(std::iter::once(job));
    }

    /// Tells the node what is in place.
    fn end(&self, outcomes: Vec<Result<(), TransferError>>, sums: Vec<BlockSums>) {
        let mut failure = None;
        let mut items = Vec::with_capacity(self.items.len());
        let mut told = Vec::with_capacity(self.items.len());
        for ((&(item, grant), outcome), sums) in self.items.iter().zip(outcomes).zip(sums) {
            match outcome {
                Ok(()) if self.batch.pause(item) => {
                    items.push((grant, sums.chunks));
                    told.push((item, sums.whole));
                }
                Ok(()) => items.push((grant, Vec::new())),
                Err(error) => {
                    self.batch.end(item, Err(error.clone()));
                    failure = Some(error);
                }
            }
        }
        if let Some(error) = failure {
            // The lane has closed, and what of it the node has got is not known: the node is to end
            // its queue pair before anything else is written there.
            self.open.fail(&error);
            for (item, _) in told {
                self.batch.end(item, Err(error.clone()));
            }
            return;
        }
        let batch = self.batch.clone();
        let count = items.len();
        let all = items
            .iter()
            .map(|(_, sums)| !sums.is_empty())
            .collect::<Vec<_>>();
        self.open.control.request(
            Op::WriteEnd,
            Epoch::default(),
            &WriteEnd { items },
            move |answer| match codes(answer, count) {
                Ok(codes) => {
                    let of_told = codes.into_iter().zip(all).filter(|(_, told)| *told);
                    for ((item, whole), (code, _)) in told.into_iter().zip(of_told) {
                        let outcome = match code {
                            Code::Ok => Ok(whole),
                            code => Err(status(code)),
                        };
                        batch.end(item, outcome);
                    }
                }
                Err(error) => {
                    for (item, _) in told {
                        batch.end(item, Err(error.clone()));
                    }
                }
            },
        );
    }
}
