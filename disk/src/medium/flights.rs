//! The stores and loads in flight, which a detach waits for.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

#[derive(Debug, Default)]
struct State {
    count: usize,
    closed: bool,
}

/// Counts what is in flight, until it is closed.
#[derive(Debug, Default)]
pub(super) struct Flights {
    state: Mutex<State>,
    idle: Condvar,
}

/// One store or load in flight. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Flight(Arc<Flights>);

impl Flights {
    /// Begins one; `None` after [`close`](Self::close).
    pub(super) fn begin(self: &Arc<Self>) -> Option<Flight> {
        let mut state = self.state.lock();
        if state.closed {
            return None;
        }
        state.count += 1;
        Some(Flight(Arc::clone(self)))
    }

    /// Refuses new ones and waits for the rest. The error is how many were left at `until`.
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
