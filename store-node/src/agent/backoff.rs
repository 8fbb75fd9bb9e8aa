//! The pauses between attempts.

use std::time::Duration;

/// The first wait is at most this long.
const FIRST: Duration = Duration::from_millis(100);

/// Pauses that double up to a cap. Each is drawn at random between half and all of its length. So the nodes
/// of a pool do not all return at the same moment.
#[derive(Debug)]
pub(super) struct Backoff {
    limit: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { limit: FIRST }
    }
}

impl Backoff {
    /// The next pause, at most `cap`.
    pub(super) fn next(&mut self, cap: Duration) -> Duration {
        let limit = self.limit.min(cap);
        self.limit = limit * 2;
        limit.mul_f64(kvpool_seams::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_try_is_soon_and_no_wait_is_long() {
        let cap = Duration::from_secs(1);
        let mut backoff = Backoff::default();
        assert!(backoff.next(cap) <= FIRST);
        for _ in 0..20 {
            backoff.next(cap);
        }
        let wait = backoff.next(cap);
        assert!(wait >= cap / 2 && wait <= cap, "{wait:?}");
        let shorter = Duration::from_millis(250);
        assert!(backoff.next(shorter) <= shorter);
    }
}
