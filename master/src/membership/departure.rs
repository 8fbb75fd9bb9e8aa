//! How a store node left the pool.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How a node left. A node that is in the pool has the default.
#[derive(Debug, Default)]
pub(crate) struct Departure {
    has_taken_leave: AtomicBool,
    lost: AtomicU64,
}

impl Departure {
    /// Records the node's goodbye.
    pub(crate) fn take_leave(&self) {
        self.has_taken_leave.store(true, Ordering::Release);
    }

    /// True once the node has said goodbye.
    pub(crate) fn has_taken_leave(&self) -> bool {
        self.has_taken_leave.load(Ordering::Acquire)
    }

    /// Counts blocks that had their last replica on the node.
    pub(crate) fn add_lost(&self, blocks: u64) {
        self.lost.fetch_add(blocks, Ordering::AcqRel);
    }

    /// True for a node that said goodbye, and with which no block was lost.
    pub(crate) fn is_orderly(&self) -> bool {
        self.has_taken_leave() && self.lost.load(Ordering::Acquire) == 0
    }
}
