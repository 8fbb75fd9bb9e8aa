//! What calls that wait in the master may hold meanwhile: a call waits for room or for durability with its
//! request in memory.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What a call holds beside its request.
const CALL: usize = 16 << 10;

/// WaitBudget for waiting calls, as bytes. Commits have places of their own, since reservations may wait for what
/// commits make evictable.
#[derive(Clone, Debug)]
pub(crate) struct WaitBudget {
    commits: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

/// The place of one call, until it is dropped.
#[derive(Debug)]
pub(crate) struct WaitPermit(
    #[allow(dead_code, reason = "it is held, and not looked at")] OwnedSemaphorePermit,
);

impl WaitBudget {
    /// `most` bytes for commits, and so many for other calls.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            commits: Arc::new(Semaphore::new(most)),
            others: Arc::new(Semaphore::new(most)),
        }
    }

    /// A place for a commit; none when the commits that wait hold too much already.
    pub(crate) fn for_commit(&self, request_bytes: usize) -> Option<WaitPermit> {
        take(&self.commits, request_bytes)
    }

    /// The same for any other call.
    pub(crate) fn for_other(&self, request_bytes: usize) -> Option<WaitPermit> {
        take(&self.others, request_bytes)
    }
}

fn take(places: &Arc<Semaphore>, request_bytes: usize) -> Option<WaitPermit> {
    let held = u32::try_from(CALL.saturating_add(request_bytes)).ok()?;
    Arc::clone(places)
        .try_acquire_many_owned(held)
        .ok()
        .map(WaitPermit)
}
