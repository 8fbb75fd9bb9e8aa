//! How long to wait before the next try.

use std::time::Duration;

/// The first wait is at most this long.
const FIRST: Duration = Duration::from_millis(100);
/// No wait is longer than this.
const CAP: Duration = Duration::from_secs(1);

/// Waits that double up to a cap, each cut by chance to between half and all of it, so that the
/// nodes of a pool do not all come back at the same moment.
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
    /// The next wait.
    pub(super) fn next(&mut self) -> Duration {
        let wait = self.limit.mul_f64(rand::random_range(0.5..=1.0));
        self.limit = (self.limit * 2).min(CAP);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_try_is_soon_and_no_wait_is_long() {
        let mut backoff = Backoff::default();
        assert!(backoff.next() <= FIRST);
        for _ in 0..20 {
            backoff.next();
        }
        let wait = backoff.next();
        assert!(wait >= CAP / 2 && wait <= CAP, "{wait:?}");
    }
}
