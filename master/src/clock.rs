//! Time as the master measures it. Everything that needs the time is given a [`Clock`] or a
//! [`BootInstant`], so that tests and simulations own it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A moment, in milliseconds on a clock that never goes back and does not stop while the machine
/// sleeps. It means nothing on another machine or after a reboot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootInstant(pub u64);

impl BootInstant {
    /// The moment `wait` later, rounded down to a millisecond; the last moment if there is none.
    pub fn after(self, wait: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
        )
    }

    /// How long after `earlier` this is; zero when it is not after it.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for BootInstant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.0)
    }
}

/// What tells the time.
pub trait Clock: Send + Sync {
    /// The present moment.
    fn now(&self) -> BootInstant;
}

/// The machine's clock since boot (`CLOCK_BOOTTIME`), which no one can set.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> BootInstant {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or(0);
        BootInstant(seconds * 1000 + nanoseconds / 1_000_000)
    }
}

/// A clock that stands still until it is moved.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that shows `now`.
    pub const fn new(now: BootInstant) -> Self {
        Self(AtomicU64::new(now.0))
    }

    /// Moves the clock forward.
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
