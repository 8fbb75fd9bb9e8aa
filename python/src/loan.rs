//! Memory that a caller names, lent for the length of one call.
//!
//! The client's operations own their buffers until the last byte has moved, also past a deadline. A
//! Python caller owns its memory itself and may free it as soon as the call returns. So each call lends
//! its memory through a [`Loan`]. After the operation's end it waits until no transfer holds any of the
//! memory. That takes microseconds, except while a transfer is aborted.

// UNSAFETY: turns the addresses that a Python caller passes into memory that transfers use. That they
// are the caller's own is the caller's promise, as it is for every buffer address in Python; that they
// are not used after the call is this module's.
#![allow(
    unsafe_code,
    reason = "a Python caller names memory by its address, or by the buffer protocol"
)]

use kvpool_transport::{Region, Slice};
use kvpool_types::Length;
use parking_lot::{Condvar, Mutex};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a call waits, after its operation has ended, for transfers to let go of its memory. An
/// operation past its deadline breaks its transfers off, which takes a fraction of this.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// The memory of one call.
pub(crate) struct Loan {
    slip: Arc<Slip>,
    back: Arc<Back>,
}

/// Counted by everything that is lent; the last count says that it is back.
struct Slip(Arc<Back>);

#[derive(Default)]
struct Back {
    is: Mutex<bool>,
    changed: Condvar,
}

impl Drop for Slip {
    fn drop(&mut self) {
        *self.0.is.lock() = true;
        self.0.changed.notify_all();
    }
}

/// Memory is still in use that should have been given back.
#[derive(Debug, thiserror::Error)]
#[error("a transfer still uses the call's memory {0:?} after the call's end; it must not be freed")]
pub(crate) struct StillLent(Duration);

impl Loan {
    /// Nothing is lent yet.
    pub(crate) fn new() -> Self {
        let back = Arc::new(Back::default());
        Self {
            slip: Arc::new(Slip(Arc::clone(&back))),
            back,
        }
    }

    /// Lends the `length` bytes at `address`; `None` when that cannot be memory.
    ///
    /// # Safety
    ///
    /// They must be there, readable, and writable if anything is read into them, until
    /// [`Loan::returned`] has said so.
    pub(crate) unsafe fn lend(&self, address: usize, length: u64) -> Option<Slice> {
        let end = u64::try_from(address).ok()?.checked_add(length)?;
        if i64::try_from(end).is_err() {
            return None;
        }
        let Some(start) = NonNull::new(std::ptr::with_exposed_provenance_mut(address)) else {
            return (length == 0).then(|| Region::from(Vec::new()).whole());
        };
        let keeper = Arc::clone(&self.slip);
        // SAFETY: the caller promises that the memory is there until the slip's last count has gone,
        // which is the keeper's.
        let region = unsafe { Region::from_raw(start, Length(length), keeper) };
        Some(region.whole())
    }

    /// Lends part of memory that is registered for longer than the call.
    pub(crate) fn lend_part(&self, registered: Slice) -> Slice {
        registered.with_hook(Arc::clone(&self.slip) as Arc<_>)
    }

    /// Waits until everything lent is back. To be called without the interpreter's lock.
    pub(crate) fn returned(self) -> Result<(), StillLent> {
        self.returned_by(Instant::now() + GRACE)
    }

    /// The same, waiting no longer than until then: for one of several loans that end together.
    pub(crate) fn returned_by(self, until: Instant) -> Result<(), StillLent> {
        let Self { slip, back } = self;
        drop(slip);
        let mut is_back = back.is.lock();
        while !*is_back {
            if back.changed.wait_until(&mut is_back, until).timed_out() && !*is_back {
                return Err(StillLent(GRACE));
            }
        }
        Ok(())
    }
}
