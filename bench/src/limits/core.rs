//! The core of a thread.
//!
//! The scheduler may put two communicating processes on one core or on two, and the result differs
//! several times over. The limits therefore choose the core themselves.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::OnceLock;

/// Pins a thread to its core until it is dropped.
#[derive(Debug)]
pub(super) struct Pinned(());

/// The cores that this process may use, read before any of its threads is pinned.
fn allowed() -> Option<&'static CpuSet> {
    static ALLOWED: OnceLock<Option<CpuSet>> = OnceLock::new();
    ALLOWED
        .get_or_init(|| sched_getaffinity(None).ok())
        .as_ref()
}

/// Pins the calling thread to a core of the process: `number` modulo the number of cores. If the kernel
/// refuses, the thread is not pinned.
pub(super) fn pin(number: u64) -> Pinned {
    if let Some(allowed) = allowed() {
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        let number = number % u64::from(allowed.count().max(1));
        if let Some(core) = usize::try_from(number).ok().and_then(|at| cores.nth(at)) {
            let mut one = CpuSet::new();
            one.set(core);
            if let Err(error) = sched_setaffinity(None, &one) {
                tracing::debug!(%error, core, "cannot pin a thread to a core");
            }
        }
    }
    Pinned(())
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(allowed) = allowed()
            && let Err(error) = sched_setaffinity(None, allowed)
        {
            tracing::debug!(%error, "cannot unpin a thread from its core");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_on_its_core_until_the_pin_is_dropped() {
        std::thread::spawn(|| {
            let all = sched_getaffinity(None).unwrap().count();
            let pinned = pin(1);
            assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
            drop(pinned);
            assert_eq!(sched_getaffinity(None).unwrap().count(), all);
        })
        .join()
        .unwrap();
    }
}
