//! What happened, in order: one line an event.

use parking_lot::Mutex;
use std::fmt::Display;
use tokio::time::Instant;

/// The trace of one history. Times are of the simulation, in milliseconds.
#[derive(Debug)]
pub(crate) struct Trace {
    begun: Instant,
    lines: Mutex<Vec<String>>,
}

impl Trace {
    pub(crate) fn new() -> Self {
        Self {
            begun: Instant::now(),
            lines: Mutex::default(),
        }
    }

    /// The time since the history began, in milliseconds.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn note(&self, who: impl Display, what: impl Display) {
        let line = format!("{:>8} {who:<4} {what}", self.now());
        self.lines.lock().push(line);
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.lines.lock())
    }
}
