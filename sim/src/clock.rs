//! The clock of one master's machine: it drifts, and jumps ahead.

use kvpool_master::clock::{BootInstant, Clock};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::time::Instant;

/// See the module's documentation. Machines boot at different times.
#[derive(Debug)]
pub(crate) struct MachineClock {
    begun: Instant,
    ppm: i64,
    ahead_ms: AtomicU64,
}

impl MachineClock {
    pub(crate) fn new(ppm: i64, since_boot_ms: u64) -> Self {
        Self {
            begun: Instant::now(),
            ppm,
            ahead_ms: AtomicU64::new(since_boot_ms),
        }
    }

    pub(crate) fn jump(&self, by_ms: u64) {
        self.ahead_ms.fetch_add(by_ms, Ordering::AcqRel);
    }
}

impl Clock for MachineClock {
    fn now(&self) -> BootInstant {
        let micros = i128::try_from(self.begun.elapsed().as_micros()).unwrap_or(i128::MAX);
        let drifted = micros * i128::from(1_000_000 + self.ppm) / 1_000_000;
        let ms = u64::try_from(drifted / 1000).unwrap_or(0);
        BootInstant(ms + self.ahead_ms.load(Ordering::Acquire))
    }
}
