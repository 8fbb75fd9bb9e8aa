//! One frame of a batch, from the queue to its answer.
//!
//! Every thread that touches the memory of an exchange holds the exchange, and its items end when
//! the last holder drops it. So no outcome is reported while a thread may still touch the caller's
//! memory.

use crate::link::{SumsOp, TransferError};
use crate::memory::Slice;
use crate::outcomes::{Batch, unreachable};
use kvpool_trace::Context;
use kvpool_types::wire::data::ReadItem;
use kvpool_types::{Checksum, Epoch, Grant};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub(super) struct Exchange {
    pub(super) epoch: Epoch,
    pub(super) deadline: Instant,
    pub(super) work: Work,
    /// The trace context of the span that made the exchange. Another thread sends the request.
    pub(super) trace: Option<Context>,
    load: LaneLoad,
}

pub(super) enum Work {
    Read {
        items: Vec<ReadItem>,
        into: Vec<Vec<Slice>>,
        outcomes: ExchangeOutcomes<Checksum>,
    },
    Write {
        grants: Vec<Grant>,
        from: Vec<Vec<Slice>>,
        /// The checksum of each block that has been sent.
        sent: Mutex<Vec<Checksum>>,
        outcomes: ExchangeOutcomes<Checksum>,
    },
    Sums {
        ops: Vec<SumsOp>,
        outcomes: ExchangeOutcomes<Vec<Checksum>>,
    },
}

/// The bytes that a lane has yet to move, counted while an exchange lives.
struct LaneLoad {
    lane: Arc<AtomicU64>,
    bytes: u64,
}

impl LaneLoad {
    fn new(lane: Arc<AtomicU64>, bytes: u64) -> Self {
        lane.fetch_add(bytes, Ordering::Relaxed);
        Self { lane, bytes }
    }
}

impl Drop for LaneLoad {
    fn drop(&mut self) {
        self.lane.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Exchange {
    /// An exchange that adds `bytes` to a lane's load.
    pub(super) fn new(
        epoch: Epoch,
        deadline: Instant,
        work: Work,
        lane: Arc<AtomicU64>,
        bytes: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            epoch,
            deadline,
            work,
            trace: kvpool_trace::current(),
            load: LaneLoad::new(lane, bytes),
        })
    }

    /// Gives all items the same error, unless their outcomes are known.
    pub(super) fn fail(&self, error: TransferError) {
        match &self.work {
            Work::Read { outcomes, .. } | Work::Write { outcomes, .. } => {
                outcomes.set(Err(error));
            }
            Work::Sums { outcomes, .. } => outcomes.set(Err(error)),
        }
    }

    /// The bytes that the exchange moves.
    pub(super) fn bytes(&self) -> u64 {
        self.load.bytes
    }
}

/// The outcomes of an exchange's items. Dropping this reports them to the batch.
pub(super) struct ExchangeOutcomes<T> {
    batch: Arc<Batch<T>>,
    /// The batch index of each item of the exchange.
    items: Vec<usize>,
    known: Mutex<Option<ExchangeResult<T>>>,
}

/// One outcome an item, or one error for all.
type ExchangeResult<T> = Result<Vec<Result<T, TransferError>>, TransferError>;

impl<T> ExchangeOutcomes<T> {
    pub(super) fn new(batch: Arc<Batch<T>>, items: Vec<usize>) -> Self {
        Self {
            batch,
            items,
            known: Mutex::new(None),
        }
    }

    /// Records the outcomes, unless they are known already.
    pub(super) fn set(&self, outcomes: ExchangeResult<T>) {
        self.known.lock().get_or_insert(outcomes);
    }
}

impl<T> Drop for ExchangeOutcomes<T> {
    fn drop(&mut self) {
        let known = self.known.get_mut().take();
        match known.unwrap_or_else(|| Err(unreachable("the connection was closed"))) {
            Ok(outcomes) => {
                for (item, outcome) in self.items.iter().zip(outcomes) {
                    self.batch.end(*item, outcome);
                }
            }
            Err(error) => {
                for item in &self.items {
                    self.batch.end(*item, Err(error.clone()));
                }
            }
        }
    }
}
