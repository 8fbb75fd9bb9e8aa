//! A token bucket without a lock.

use crate::clock::BootInstant;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The tokens of an idle bucket last for this long at the rate of the bucket.
const BURST: Duration = Duration::from_secs(1);
const NANOS: u128 = 1_000_000_000;

/// A token bucket. It stores the time at which all tokens taken so far are repaid.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Nanoseconds of the clock.
    paid_at: AtomicU64,
}

impl Bucket {
    /// Forgets the tokens taken so far.
    pub(super) fn fill(&self) {
        self.paid_at.store(0, Ordering::Release);
    }

    /// Checks that tokens are left, at `rate` tokens a second. An error holds the time until there
    /// are.
    pub(super) fn check(&self, now: BootInstant) -> Result<(), Duration> {
        let owed = self.paid_at.load(Ordering::Acquire);
        wait_at(owed, now).map_or(Ok(()), Err)
    }

    /// Takes `count` tokens, even if fewer are left: later calls then wait longer.
    pub(super) fn take(&self, count: u64, rate: u64, now: BootInstant) {
        let cost = cost(count, rate);
        let update = |paid_at: u64| Some(paid_at.max(nanos(now)).saturating_add(cost));
        let _ = (self.paid_at).fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
    }

    /// Takes one token if a whole one is left. An error holds the time until there is one.
    pub(super) fn take_one(&self, rate: u64, now: BootInstant) -> Result<(), Duration> {
        let paid = |paid_at: u64| paid_at.max(nanos(now)).saturating_add(cost(1, rate));
        let update = |paid_at: u64| {
            let next = paid(paid_at);
            (next <= full(now)).then_some(next)
        };
        (self.paid_at)
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, update)
            .map(|_| ())
            .map_err(|paid_at| Duration::from_nanos(paid(paid_at).saturating_sub(full(now))))
    }
}

fn nanos(at: BootInstant) -> u64 {
    at.0.saturating_mul(1_000_000)
}

fn cost(count: u64, rate: u64) -> u64 {
    let cost = u128::from(count) * NANOS / u128::from(rate.max(1));
    u64::try_from(cost).unwrap_or(u64::MAX)
}

/// The time at which all tokens of a full bucket are repaid.
fn full(now: BootInstant) -> u64 {
    let burst = u64::try_from(BURST.as_nanos()).unwrap_or(u64::MAX);
    nanos(now).saturating_add(burst)
}

/// The time until a part of a token is left; `None` if one is left now.
fn wait_at(paid_at: u64, now: BootInstant) -> Option<Duration> {
    let full = full(now);
    (paid_at >= full).then(|| Duration::from_nanos(paid_at - full + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: BootInstant = BootInstant(1_000_000);

    fn later(ms: u64) -> BootInstant {
        BootInstant(START.0 + ms)
    }

    #[test]
    fn a_second_of_calls_at_once_and_then_the_rate() {
        let bucket = Bucket::default();
        let taken = |now| {
            (0..10_000)
                .take_while(|_| bucket.take_one(100, now).is_ok())
                .count()
        };
        assert_eq!(taken(START), 100);
        assert_eq!(taken(later(500)), 50);
        assert_eq!(taken(later(510)), 1);
        assert_eq!(
            taken(later(3_600_000)),
            100,
            "an idle hour saves one second"
        );
    }

    #[test]
    fn the_hint_is_when_the_next_call_succeeds() {
        let bucket = Bucket::default();
        while bucket.take_one(4, START).is_ok() {}
        let wait = bucket.take_one(4, START).unwrap_err();
        assert!(
            wait > Duration::from_millis(240) && wait <= Duration::from_millis(251),
            "{wait:?}"
        );
        assert!(bucket.take_one(4, later(249)).is_err());
        assert!(bucket.take_one(4, later(251)).is_ok());
    }

    #[test]
    fn a_call_larger_than_the_bucket_goes_once_and_is_paid_for() {
        let bucket = Bucket::default();
        assert_eq!(bucket.check(START), Ok(()));
        bucket.take(10_000, 1000, START);
        assert!(bucket.check(later(8_900)).is_err());
        assert_eq!(bucket.check(later(9_100)), Ok(()));
    }
}
