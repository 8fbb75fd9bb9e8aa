//! The bound on the memory of the master's waiting calls. A call that waits for room or durability
//! keeps its request in memory.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The bytes that a call takes beside its request.
const CALL: usize = 16 << 10;

/// The budget of waiting calls, in bytes. Commits have their own budget, because reservations may
/// wait for blocks that become evictable after their commit.
#[derive(Clone, Debug)]
pub(crate) struct WaitBudget {
    commits: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

/// The budget of one call, returned on drop.
#[derive(Debug)]
pub(crate) struct WaitPermit(
    #[allow(dead_code, reason = "it is held, and not looked at")] OwnedSemaphorePermit,
);

impl WaitBudget {
    /// `most` bytes for commits, and `most` bytes for other calls.
    pub(crate) fn new(most: usize) -> Self {
        let most = most.min(Semaphore::MAX_PERMITS);
        Self {
            commits: Arc::new(Semaphore::new(most)),
            others: Arc::new(Semaphore::new(most)),
        }
    }

    /// Takes the budget of a commit; `None` when the waiting commits hold too much.
    pub(crate) fn for_commit(&self, request_bytes: usize) -> Option<WaitPermit> {
        take(&self.commits, request_bytes)
    }

    /// Takes the budget of any other call.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_larger_than_any_machine_is_taken() {
        let budget = WaitBudget::new(usize::MAX);
        assert!(budget.for_commit(1 << 20).is_some());
        assert!(budget.for_other(1 << 20).is_some());
    }
}
