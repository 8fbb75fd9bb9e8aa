//! One submission: its plan, its memory, and the outcome of each item.

use super::plan::{Bounds, Plan, PlanItem, PlanPart, PlannedWork};
use super::sys::Sge;
use super::work::{Fault, Transfer, Verb, WorkError};
use crate::rdma::device::Device;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// The outcome of every item.
pub(super) type WorkOutcomes = Vec<Result<(), WorkError>>;

/// The callback of a submission. It is called once, with the outcomes.
pub(super) type Done = Box<dyn FnOnce(WorkOutcomes) + Send>;

/// A submission that has not ended.
pub(super) struct Operation {
    plan: Plan,
    /// The index of the first work request that has not been posted.
    next: usize,
    /// The number of work requests that have not ended.
    open: usize,
    outcomes: WorkOutcomes,
    /// The memory that the work requests name, kept until all have ended.
    transfers: Vec<Transfer>,
    done: Done,
}

/// A submission that has ended. Its submitter is told outside any lock.
pub(super) struct Finished {
    transfers: Vec<Transfer>,
    outcomes: WorkOutcomes,
    done: Done,
}

impl Operation {
    /// Plans transfers. An invalid transfer gets its error at once and is not planned.
    pub(super) fn new(
        transfers: Vec<Transfer>,
        device: &Arc<Device>,
        bounds: Bounds,
        done: Done,
    ) -> Self {
        let mut plan = Plan::default();
        let outcomes = transfers
            .iter()
            .enumerate()
            .map(|(number, transfer)| {
                let item = item(transfer, device)?;
                plan.add(number, &item, bounds);
                Ok(())
            })
            .collect();
        Self {
            next: 0,
            open: plan.works().len(),
            plan,
            outcomes,
            transfers,
            done,
        }
    }

    /// The next work request to post, and its parts of memory.
    pub(super) fn next(&self) -> Option<(&PlannedWork, &[Sge])> {
        let work = self.plan.works().get(self.next)?;
        Some((work, self.plan.parts(work)))
    }

    /// Counts the next work request as posted. Returns its index.
    pub(super) fn posted(&mut self) -> usize {
        self.next += 1;
        self.next - 1
    }

    /// Whether all work requests have ended.
    pub(super) fn is_finished(&self) -> bool {
        self.open == 0
    }

    /// Ends a work request.
    pub(super) fn retire(&mut self, work: usize, outcome: &Result<(), WorkError>) {
        self.open -= 1;
        let Err(error) = outcome else {
            return;
        };
        let items = self.plan.works()[work].items.clone();
        for before in &mut self.outcomes[items] {
            // The first error is kept, but any error replaces a flush.
            let is_worse = match before {
                Ok(()) => true,
                Err(before) => before.fault == Fault::Flushed && error.fault != Fault::Flushed,
            };
            if is_worse {
                *before = Err(error.clone());
            }
        }
    }

    /// Ends all work requests that have not been posted.
    pub(super) fn cancel(&mut self, error: &WorkError) {
        let failed = Err(error.clone());
        while self.next < self.plan.works().len() {
            let work = self.posted();
            self.retire(work, &failed);
        }
    }

    /// Takes the outcomes and the callback of the submitter.
    pub(super) fn finish(self) -> Finished {
        Finished {
            transfers: self.transfers,
            outcomes: self.outcomes,
            done: self.done,
        }
    }
}

impl Finished {
    /// Releases the memory and tells the submitters. A panic of one callback does not stop the
    /// others.
    pub(super) fn tell(all: Vec<Self>) {
        for finished in all {
            let told = std::panic::catch_unwind(AssertUnwindSafe(move || {
                drop(finished.transfers);
                (finished.done)(finished.outcomes);
            }));
            if told.is_err() {
                tracing::error!("the completion callback of an RDMA transfer panicked");
            }
        }
    }
}

/// Checks a transfer and resolves it to addresses and keys.
fn item(transfer: &Transfer, device: &Arc<Device>) -> Result<PlanItem, WorkError> {
    if transfer
        .remote
        .address
        .checked_add(transfer.length())
        .is_none()
    {
        return Err(WorkError::invalid(
            "the peer's range exceeds the address space",
        ));
    }
    let parts = transfer
        .local
        .iter()
        .map(|(registration, slice)| {
            let (address, length) = (slice.as_ptr().addr() as u64, slice.length().0);
            if !registration.is_of(device) {
                return Err(WorkError::invalid(
                    "the memory is registered with another device",
                ));
            }
            if !registration.covers(address, length) {
                return Err(WorkError::invalid(
                    "the registration does not cover the memory",
                ));
            }
            let can_receive = registration.can_receive() && slice.is_writable();
            if transfer.verb == Verb::Read && !can_receive {
                return Err(WorkError::invalid(
                    "the memory is read-only, so nothing can be read into it",
                ));
            }
            Ok(PlanPart {
                address,
                length,
                lkey: registration.lkey(),
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(PlanItem {
        verb: transfer.verb,
        remote: transfer.remote,
        parts,
    })
}
