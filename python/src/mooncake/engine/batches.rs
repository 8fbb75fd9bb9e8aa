//! Transfers that nobody waits for, by number.

use kvpool_transport::TransferError;
use kvpool_types::Code;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// How many transfers that have ended can still be asked about.
const REMEMBERED: usize = 4096;

/// What became of a transfer so far.
#[derive(Clone, Debug)]
pub(super) enum Status {
    /// It goes on.
    Pending,
    /// All bytes are in place, or why they are not.
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
    /// The number of a new one, which is never 0.
    pub(super) fn begin(&self) -> u64 {
        let mut state = self.state.lock();
        state.last += 1;
        let number = state.last;
        state.known.insert(number, Status::Pending);
        number
    }

    /// Says how one ended.
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

    /// How one stands; `None` for a number that was never given, or has been forgotten.
    pub(super) fn status(&self, number: u64) -> Option<Status> {
        self.state.lock().known.get(&number).cloned()
    }

    /// How one stands once it has ended, or at the deadline.
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
