//! Transfers in the background, by number.

use kvpool_transport::TransferError;
use kvpool_types::Code;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// The number of ended transfers whose state is kept.
const REMEMBERED: usize = 4096;

/// The state of a transfer.
#[derive(Clone, Debug)]
pub(super) enum Status {
    /// The transfer is in progress.
    Pending,
    /// All bytes are in place, or the error of the transfer.
    Ended(Result<(), TransferError>),
}

impl Status {
    /// The documented number: 1 done, 0 pending, -1 failed, -2 timed out.
    pub(super) fn number(&self) -> i32 {
        match self {
            Self::Pending => 0,
            Self::Ended(Ok(())) => 1,
            Self::Ended(Err(error)) if error.code == Code::DeadlineExceeded => -2,
            Self::Ended(Err(_)) => -1,
        }
    }
}

/// All transfers of one engine.
#[derive(Default)]
pub(super) struct Batches {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    last: u64,
    known: HashMap<u64, Status>,
    ended: VecDeque<u64>,
}

impl Batches {
    /// Returns the number of a new transfer. It is never 0.
    pub(super) fn begin(&self) -> u64 {
        let mut state = self.state.lock();
        state.last += 1;
        let number = state.last;
        state.known.insert(number, Status::Pending);
        number
    }

    /// Forgets a transfer that did not begin. No caller learns its number.
    pub(super) fn forget(&self, number: u64) {
        self.state.lock().known.remove(&number);
    }

    /// Records the end of a transfer.
    pub(super) fn end(&self, number: u64, outcome: Result<(), TransferError>) {
        let mut state = self.state.lock();
        state.known.insert(number, Status::Ended(outcome));
        state.ended.push_back(number);
        if state.ended.len() > REMEMBERED
            && let Some(oldest) = state.ended.pop_front()
        {
            state.known.remove(&oldest);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The state of a transfer; `None` for a number that is unknown or forgotten.
    pub(super) fn status(&self, number: u64) -> Option<Status> {
        self.state.lock().known.get(&number).cloned()
    }

    /// Waits until a transfer has ended, at most until the deadline. Returns its state.
    pub(super) fn wait(&self, number: u64, deadline: Instant) -> Option<Status> {
        let mut state = self.state.lock();
        loop {
            let status = state.known.get(&number)?.clone();
            if matches!(status, Status::Ended(_)) {
                return Some(status);
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.known.get(&number).cloned();
            }
        }
    }
}
