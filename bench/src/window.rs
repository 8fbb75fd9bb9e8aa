//! A window: a short time of repeated calls, and its measurements.

use kvctl::stats::percentile;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The end of a window: by the time spent in calls, or by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Window {
    /// The time spent in calls that ends the window.
    pub(crate) at_least: Duration,
    /// The most calls; at least one is made.
    pub(crate) calls: u64,
}

/// The calls of a window.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter {
    calls: Vec<Duration>,
    units: u64,
}

/// The measurements of a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// The number of calls.
    pub(crate) calls: u64,
    /// The time spent in them, in nanoseconds.
    pub(crate) spent_ns: u64,
    /// The median call, in nanoseconds.
    pub(crate) p50_ns: u64,
    /// The 99th percentile of the calls, in nanoseconds.
    pub(crate) p99_ns: u64,
    /// The bytes or keys of the calls.
    pub(crate) units: u64,
    /// The begin of the first call, in nanoseconds of the monotonic clock.
    pub(crate) begin_ns: u64,
    /// The end of the last call, on the same clock.
    pub(crate) end_ns: u64,
    /// The processor time of the watched processes, in nanoseconds, in order.
    pub(crate) cpu_ns: Vec<u64>,
}

impl Meter {
    /// Adds a call that moved `units`.
    pub(crate) fn add(&mut self, took: Duration, units: u64) {
        self.calls.push(took);
        self.units += units;
    }

    /// The number of calls.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.len() as u64
    }

    /// The time spent in calls.
    pub(crate) fn spent(&self) -> Duration {
        self.calls.iter().sum()
    }

    /// Whether the window is over.
    pub(crate) fn fills(&self, window: Window) -> bool {
        self.calls() >= window.calls.max(1) || (self.calls() > 0 && self.spent() >= window.at_least)
    }

    /// The measurements, without the clock's and the processors' times.
    pub(crate) fn measured(mut self) -> Measured {
        let spent = self.spent();
        self.calls.sort_unstable();
        Measured {
            calls: self.calls(),
            spent_ns: nanos(spent),
            p50_ns: nanos(percentile(&self.calls, 0.5)),
            p99_ns: nanos(percentile(&self.calls, 0.99)),
            units: self.units,
            begin_ns: 0,
            end_ns: 0,
            cpu_ns: Vec::new(),
        }
    }
}

/// The time in nanoseconds of the monotonic clock, which all processes of the machine share.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or_default() * 1_000_000_000
        + u64::try_from(now.tv_nsec).unwrap_or_default()
}

pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_ends_by_time_or_by_calls_and_has_at_least_one() {
        let window = Window {
            at_least: Duration::from_millis(10),
            calls: 3,
        };
        let mut meter = Meter::default();
        assert!(!meter.fills(window));
        meter.add(Duration::from_millis(4), 1);
        assert!(!meter.fills(window));
        meter.add(Duration::from_millis(6), 1);
        assert!(meter.fills(window), "by time");
        let mut meter = Meter::default();
        for _ in 0..3 {
            assert!(!meter.fills(window));
            meter.add(Duration::from_millis(1), 5);
        }
        assert!(meter.fills(window), "by calls");
        let measured = meter.measured();
        assert_eq!((measured.calls, measured.units), (3, 15));
        assert_eq!(measured.spent_ns, 3_000_000);
        assert_eq!(measured.p50_ns, 1_000_000);
        let no_time = Window {
            at_least: Duration::ZERO,
            calls: 0,
        };
        assert!(!Meter::default().fills(no_time));
    }
}
