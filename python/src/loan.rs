//! The caller's memory, lent to transfers for the length of one call.
//!
//! The client's operations own their buffers until the last byte has moved, even past a deadline. A
//! Python caller owns its memory itself and may free it as soon as the call returns. So each call lends
//! its memory through a [`Loan`]. When the operation ends, the call waits until no transfer holds any of
//! the memory. This takes microseconds, except when a transfer is being aborted.

// UNSAFETY: makes memory for transfers of the addresses that a Python caller passes. The caller promises that
// the memory is its own, as for every buffer address in Python. This module promises that no transfer uses the
// memory after the call.
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

/// How long a call waits for transfers to release its memory, after its operation has ended and its deadline
/// has passed. An operation past its deadline aborts its transfers, which takes a fraction of this time.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// The deadline of a call that may take `timeout` from now. A timeout too large for the clock counts as a year.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + YEAR)
}

/// The time that a call has left.
pub(crate) fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// The memory of one call.
pub(crate) struct Loan {
    token: Arc<DrainToken>,
    latch: Arc<DrainLatch>,
}

/// A token that every lent slice holds. The latch opens when the last clone is dropped.
struct DrainToken(Arc<DrainLatch>);

/// A latch that is open once no transfer holds any of the call's memory.
#[derive(Debug, Default)]
struct DrainLatch {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Drop for DrainToken {
    fn drop(&mut self) {
        *self.0.open.lock() = true;
        self.0.changed.notify_all();
    }
}

/// Memory of a call that has ended. Transfers may still use it.
#[derive(Clone, Debug)]
pub(crate) struct InUse(Arc<DrainLatch>);

impl InUse {
    /// Whether no transfer uses the memory any more. Waits for that until `until` at the latest. Call it
    /// without the interpreter's lock.
    pub(crate) fn has_ended_by(&self, until: Instant) -> bool {
        let mut is_open = self.0.open.lock();
        while !*is_open {
            if self.0.changed.wait_until(&mut is_open, until).timed_out() {
                break;
            }
        }
        *is_open
    }

    /// Whether no transfer uses the memory any more.
    pub(crate) fn has_ended(&self) -> bool {
        *self.0.open.lock()
    }
}

/// A transfer still uses the call's memory after [`GRACE`].
#[derive(Debug, thiserror::Error)]
#[error(
    "a transfer still uses the call's memory {GRACE:?} after the call's deadline; it must not be freed or used"
)]
pub(crate) struct StillLent(pub(crate) InUse);

impl Loan {
    pub(crate) fn new() -> Self {
        let latch = Arc::new(DrainLatch::default());
        Self {
            token: Arc::new(DrainToken(Arc::clone(&latch))),
            latch,
        }
    }

    /// Lends the `length` bytes at `address`; `None` when that range cannot be memory.
    ///
    /// # Safety
    ///
    /// The bytes must stay mapped and readable until [`Loan::returned`] has returned `Ok`, and writable if
    /// a transfer reads into them.
    pub(crate) unsafe fn lend(&self, address: usize, length: u64) -> Option<Slice> {
        let end = u64::try_from(address).ok()?.checked_add(length)?;
        if i64::try_from(end).is_err() {
            return None;
        }
        let Some(start) = NonNull::new(std::ptr::with_exposed_provenance_mut(address)) else {
            return (length == 0).then(|| Region::from(Vec::new()).whole());
        };
        let keeper = Arc::clone(&self.token);
        // SAFETY: the caller promises that the memory stays mapped until the last token is dropped, and
        // the region holds one.
        let region = unsafe { Region::from_raw(start, Length(length), keeper) };
        Some(region.whole())
    }

    /// Lends a part of memory that is registered for longer than the call.
    pub(crate) fn lend_part(&self, registered: Slice) -> Slice {
        registered.with_hook(Arc::clone(&self.token) as Arc<_>)
    }

    /// Waits until no transfer holds lent memory. Call it without the interpreter's lock.
    ///
    /// `deadline` is the call's own. If a signal ended the call earlier, its transfers may continue until then.
    pub(crate) fn returned_after(self, deadline: Instant) -> Result<(), StillLent> {
        self.returned_by(deadline.max(Instant::now()) + GRACE)
    }

    /// [`Loan::returned_after`] without a deadline, for a call that no signal ends early.
    pub(crate) fn returned(self) -> Result<(), StillLent> {
        self.returned_by(Instant::now() + GRACE)
    }

    fn returned_by(self, until: Instant) -> Result<(), StillLent> {
        let memory = self.end();
        if memory.has_ended_by(until) {
            return Ok(());
        }
        Err(StillLent(memory))
    }

    /// Waits as long as transfers hold lent memory, and logs the wait. For callers that use the memory again
    /// after any end of a call. Call it without the interpreter's lock.
    pub(crate) fn returned_at_last(self) {
        let begin = Instant::now();
        let memory = self.end();
        while !memory.has_ended_by(Instant::now() + GRACE) {
            let seconds = begin.elapsed().as_secs();
            tracing::error!(
                seconds,
                "a call has ended, and waits because a transfer still uses its memory"
            );
        }
    }

    /// Ends the loan: nothing is lent from now on.
    pub(crate) fn end(self) -> InUse {
        let Self { token, latch } = self;
        drop(token);
        InUse(latch)
    }
}
