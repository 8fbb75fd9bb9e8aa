//! Threads that choose their core for a while.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;

/// The calling thread's leave to go from core to core. Dropped, by the same thread, it lets the thread
/// run wherever it might before.
#[derive(Debug)]
pub(super) struct Leave {
    allowed: CpuSet,
    is_bound: bool,
}

impl Leave {
    /// Of the calling thread; `None` where the kernel does not say where it may run.
    pub(super) fn take() -> Option<Self> {
        Some(Self {
            allowed: sched_getaffinity(None).ok()?,
            is_bound: false,
        })
    }

    /// Whether the thread may run on a core.
    pub(super) fn covers(&self, core: usize) -> bool {
        core < CpuSet::MAX_CPU && self.allowed.is_set(core)
    }

    /// The first of the cores that the thread may run on which `suits`.
    pub(super) fn first(&self, suits: impl Fn(usize) -> bool) -> Option<usize> {
        (0..CpuSet::MAX_CPU).find(|core| self.covers(*core) && suits(*core))
    }

    /// Goes to a core that the thread may run on; whether it is there now. It stays where it is when
    /// the cores that may be used have changed since.
    pub(super) fn go_to(&mut self, core: usize) -> bool {
        let mut one = CpuSet::new();
        one.set(core);
        let is_there = sched_setaffinity(None, &one).is_ok();
        self.is_bound |= is_there;
        is_there
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        if self.is_bound
            && let Err(error) = sched_setaffinity(None, &self.allowed)
        {
            tracing::debug!(error = %io::Error::from(error), "a thread stays on one core");
        }
    }
}
