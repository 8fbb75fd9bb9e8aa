//! The master's time. Code that needs the time gets a [`Clock`] or a [`BootInstant`], so that tests
//! and simulations control it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// An instant in milliseconds, on a clock that never goes back and counts while the machine sleeps.
/// It has no meaning on another machine or after a reboot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootInstant(pub u64);

impl BootInstant {
    /// The instant `wait` later, rounded down to a millisecond; the last instant on overflow.
    pub fn after(self, wait: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
        )
    }

    /// The time since `earlier`; zero when `earlier` is not before this instant.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for BootInstant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.0)
    }
}

/// A source of time.
pub trait Clock: Send + Sync {
    /// The current instant.
    fn now(&self) -> BootInstant;
}

/// The machine's clock since boot (`CLOCK_BOOTTIME`), which no process can set.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> BootInstant {
        let since_boot = kvpool_seams::boot_time().as_millis();
        BootInstant(u64::try_from(since_boot).unwrap_or(u64::MAX))
    }
}

/// A clock that moves only on request.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that shows `now`.
    pub const fn new(now: BootInstant) -> Self {
        Self(AtomicU64::new(now.0))
    }

    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        let by = BootInstant(0).after(by).0;
        self.0.fetch_add(by, Ordering::AcqRel);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> BootInstant {
        BootInstant(self.0.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_clock_does_not_go_back() {
        let first = BootClock.now();
        assert!(first.0 > 0);
        assert!(BootClock.now() >= first);
    }

    #[test]
    fn a_manual_clock_moves_only_when_told() {
        let clock = ManualClock::new(BootInstant(5));
        assert_eq!(clock.now(), BootInstant(5));
        clock.advance(Duration::from_millis(7));
        assert_eq!(clock.now(), BootInstant(12));
        assert_eq!(clock.now().since(BootInstant(5)), Duration::from_millis(7));
        assert_eq!(BootInstant(5).since(clock.now()), Duration::ZERO);
    }
}
