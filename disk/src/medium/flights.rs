//! Counts the stores and loads in flight, for which a detach waits.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

#[derive(Debug, Default)]
struct State {
    count: usize,
    closed: bool,
}

/// The number of stores and loads in flight, until the count is closed.
#[derive(Debug, Default)]
pub(super) struct Flights {
    state: Mutex<State>,
    idle: Condvar,
}

/// One store or load in flight. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Flight(Arc<Flights>);

impl Flights {
    /// Begins a store or load; `None` after [`close`](Self::close).
    pub(super) fn begin(self: &Arc<Self>) -> Option<Flight> {
        let mut state = self.state.lock();
        if state.closed {
            return None;
        }
        state.count += 1;
        Some(Flight(Arc::clone(self)))
    }

    /// Refuses new stores and loads, and waits for the others. The error is the number of requests
    /// that remain at `until`.
    pub(super) fn close(&self, until: Instant) -> Result<(), usize> {
        let mut state = self.state.lock();
        state.closed = true;
        while state.count > 0 {
            if self.idle.wait_until(&mut state, until).timed_out() && state.count > 0 {
                return Err(state.count);
            }
        }
        Ok(())
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.count -= 1;
        if state.count == 0 {
            self.0.idle.notify_all();
        }
    }
}
