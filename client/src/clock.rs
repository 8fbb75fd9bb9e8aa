//! The two clocks of a client.
//!
//! Deadlines of operations are on the runtime's clock ([`Deadline`]). Leases are on
//! `CLOCK_BOOTTIME` ([`BootTime`]), as they are at the master. That clock continues while the
//! machine sleeps, and no process can set it.

use kvpool_types::Length;
use std::time::Duration;
use tokio::time::Instant;

/// A time in whole milliseconds, rounded up so that a short time does not become 0.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// A time on `CLOCK_BOOTTIME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BootTime(Duration);

impl BootTime {
    /// The time now.
    pub(crate) fn now() -> Self {
        Self(kvpool_seams::boot_time())
    }

    /// The time that is `later` after this one.
    pub(crate) fn after(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }

    /// The time left from `now` until this time; zero when it has passed.
    pub(crate) const fn left(self, now: Self) -> Duration {
        self.0.saturating_sub(now.0)
    }
}

/// The time by which an operation must have returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline(Instant);

/// The deadline passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passed;

impl Deadline {
    /// The deadline of an operation that may take `timeout` from now.
    pub(crate) fn after(timeout: Duration) -> Self {
        let now = Instant::now();
        // A timeout too long to be added counts as a year.
        Self(
            now.checked_add(timeout)
                .unwrap_or(now + Duration::from_secs(365 * 24 * 3600)),
        )
    }

    /// The time until the deadline; zero when it has passed.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub(crate) fn has_passed(self) -> bool {
        self.left().is_zero()
    }

    /// The earlier of this deadline and `timeout` from now.
    pub(crate) fn at_most(self, timeout: Duration) -> Self {
        self.min(Self::after(timeout))
    }

    /// The deadline of one attempt of up to `attempts`: an equal share of the time left. The share is at
    /// least the time that moving `bytes` takes on a slow network.
    pub(crate) fn share(self, attempts: u32, bytes: Length) -> Self {
        const LEAST: Duration = Duration::from_millis(100);
        const SLOW_BYTES_PER_SECOND: u64 = 200_000_000;
        let moving = Duration::from_nanos(
            bytes
                .0
                .saturating_mul(1_000_000_000 / SLOW_BYTES_PER_SECOND),
        );
        self.at_most((self.left() / attempts.max(1)).max(LEAST + moving))
    }

    /// A deadline after seven eighths of the remaining time. In the rest, the caller can learn the
    /// outcome of a call without an answer.
    pub(crate) fn leaving_rest(self) -> Self {
        self.at_most(self.left() * 7 / 8)
    }

    /// A slightly later deadline, for waiting on work that itself ends by this deadline.
    pub(crate) fn with_grace(self) -> Self {
        const GRACE: Duration = Duration::from_millis(250);
        Self(self.0 + GRACE)
    }

    /// The same time as a `std` instant, for code without the runtime's clock.
    pub(crate) fn to_std(self) -> std::time::Instant {
        self.0.into_std()
    }

    /// Awaits `work` until the deadline.
    pub(crate) async fn run<F: Future>(self, work: F) -> Result<F::Output, Passed> {
        tokio::time::timeout_at(self.0, work)
            .await
            .map_err(|_| Passed)
    }

    /// Sleeps for `pause`. Returns false at once when the deadline would pass meanwhile.
    pub(crate) async fn pause(self, pause: Duration) -> bool {
        if pause >= self.left() {
            return false;
        }
        // The timer rounds a zero pause up to a millisecond, which would delay every get and put.
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        true
    }
}

/// The pauses between attempts, which double up to a bound. Each pause is drawn at random between half and
/// all of its length. So clients that failed together do not retry together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    attempts: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::from(Self::FIRST)
    }
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(4);
    /// The longest pause. When the pool is back after a pause of its own, it waits at most this long for its
    /// clients.
    const LONGEST: Duration = Duration::from_millis(250);

    /// A series of pauses whose first is `first` long.
    pub(crate) const fn from(first: Duration) -> Self {
        Self { first, attempts: 0 }
    }

    /// The pause before the next attempt.
    pub(crate) fn next(&mut self) -> Duration {
        let full = self
            .first
            .saturating_mul(1 << self.attempts.min(16))
            .min(Self::LONGEST);
        self.attempts = self.attempts.saturating_add(1);
        full.mul_f64(kvpool_seams::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_time_is_not_taken_for_none() {
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::from_nanos(1)), 1);
        assert_eq!(millis(Duration::from_millis(7)), 7);
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }

    #[test]
    fn pauses_grow_to_their_bound_and_keep_half_of_it() {
        let mut backoff = Backoff::default();
        let mut full = Backoff::FIRST;
        for _ in 0..40 {
            let pause = backoff.next();
            assert!(pause >= full / 2 && pause <= full, "{pause:?} for {full:?}");
            full = (full * 2).min(Backoff::LONGEST);
        }
    }

    /// Whether `left` is the time left of a deadline that was set `wait` after `begun` or a little later.
    fn is_left(left: Duration, wait: Duration, begun: Instant) -> bool {
        left <= wait && wait <= left + begun.elapsed()
    }

    #[tokio::test]
    async fn a_pause_never_outlasts_the_deadline() {
        let begun = Instant::now();
        let deadline = Deadline::after(Duration::from_secs(100));
        let pause = Duration::from_millis(20);
        assert!(deadline.pause(pause).await);
        assert!(begun.elapsed() >= pause);
        let refused = Instant::now();
        assert!(!deadline.pause(Duration::from_secs(100)).await);
        assert!(refused.elapsed() < Duration::from_secs(50), "it slept");
        assert!(is_left(deadline.left(), Duration::from_secs(100), begun));
    }

    #[tokio::test]
    async fn work_that_hangs_ends_at_the_deadline() {
        let begun = Instant::now();
        let timeout = Duration::from_millis(50);
        let deadline = Deadline::after(timeout);
        assert_eq!(
            deadline.run(std::future::pending::<()>()).await,
            Err(Passed)
        );
        assert!(begun.elapsed() >= timeout);
        assert!(deadline.has_passed());
    }

    #[test]
    fn an_attempt_gets_a_share_and_never_more_than_is_left() {
        let begun = Instant::now();
        let deadline = Deadline::after(Duration::from_secs(400));
        let is_share = |attempts, bytes, share| {
            let left = deadline.share(attempts, Length(bytes)).left();
            is_left(left, Duration::from_millis(share), begun)
        };
        assert!(is_share(4, 0, 100_000));
        assert!(is_share(0, 0, 400_000));
        // 40 GB take 200 s on a slow network, so a quarter would be too little.
        assert!(is_share(4, 40_000_000_000, 200_100));
        assert!(is_share(4, u64::MAX, 400_000));
    }

    #[test]
    fn a_call_that_leaves_a_rest_is_not_answered_too_late_to_ask_again() {
        let begun = Instant::now();
        let deadline = Deadline::after(Duration::from_secs(80));
        let left = deadline.leaving_rest().left();
        assert!(is_left(left, Duration::from_secs(70), begun));
    }

    #[test]
    fn an_endless_timeout_is_a_long_one() {
        assert!(Deadline::after(Duration::MAX).left() > Duration::from_secs(3600));
    }
}
