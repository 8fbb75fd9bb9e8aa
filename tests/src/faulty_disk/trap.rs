//! A request that is held at the disk, so that a test can kill a process at that point.

use super::Fault;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A kind of request at which a test stops the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A superblock is written.
    Superblock,
    /// An extent is written.
    Extent,
    /// An extent is read.
    Read,
    /// The disk is flushed.
    Flush,
}

/// Holds the next request of its kind before the disk, until it is released.
#[derive(Debug)]
pub struct Trap {
    held: Arc<Held>,
}

/// The disk's half of a trap.
#[derive(Debug)]
pub(super) struct Held {
    point: Point,
    state: Mutex<Hold>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    Armed,
    Sprung,
    Released(Fault),
}

impl Trap {
    /// An armed trap, and the disk's half of it.
    pub(super) fn new(point: Point) -> (Self, Arc<Held>) {
        let held = Arc::new(Held {
            point,
            state: Mutex::new(Hold::Armed),
            changed: Condvar::new(),
        });
        let trap = Self {
            held: Arc::clone(&held),
        };
        (trap, held)
    }

    /// Whether a request is held within this time.
    pub fn has_sprung(&self, within: Duration) -> bool {
        let state = self.held.lock();
        let is_armed = |state: &mut Hold| *state == Hold::Armed;
        let waited = self
            .held
            .changed
            .wait_timeout_while(state, within, is_armed);
        let (state, _timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        *state == Hold::Sprung
    }

    /// Releases the request under this fault. [`Fault::Short`] applies half of it, [`Fault::Fails`]
    /// nothing.
    pub fn release(self, fault: Fault) {
        self.held.end(fault);
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        self.held.end(Fault::None);
    }
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, Hold> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the request under this fault, unless it is already released.
    pub(super) fn end(&self, fault: Fault) {
        let mut state = self.lock();
        if !matches!(*state, Hold::Released(_)) {
            *state = Hold::Released(fault);
        }
        self.changed.notify_all();
    }

    /// Whether the trap takes this request.
    pub(super) fn springs(&self, point: Point) -> bool {
        let mut state = self.lock();
        let takes = *state == Hold::Armed && self.point == point;
        if takes {
            *state = Hold::Sprung;
            self.changed.notify_all();
        }
        takes
    }

    /// Waits until the test releases the request.
    pub(super) fn wait_for_release(&self) -> Fault {
        let state = self.lock();
        let is_held = |state: &mut Hold| *state == Hold::Sprung;
        let waited = self.changed.wait_while(state, is_held);
        match *waited.unwrap_or_else(PoisonError::into_inner) {
            Hold::Released(fault) => fault,
            Hold::Armed | Hold::Sprung => Fault::None,
        }
    }
}
