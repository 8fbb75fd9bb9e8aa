//! Faults that go on for a while, such as the stop of a process.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// How often what waits for the end of a fault looks again: all faults may end before their time.
const LOOK: Duration = Duration::from_millis(20);

/// When each fault ends.
#[derive(Debug)]
pub(crate) struct Spans<K>(Mutex<BTreeMap<K, Instant>>);

impl<K> Default for Spans<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord> Spans<K> {
    /// Lets a fault go on for a while at least. An earlier one may go on for longer.
    pub(crate) fn begin(&self, of: K, wait: Duration) {
        let until = Instant::now() + wait;
        let mut ends = self.0.lock();
        let end = ends.entry(of).or_insert(until);
        *end = until.max(*end);
    }

    /// Ends all of them.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    fn end_of(&self, of: &K) -> Option<Instant> {
        let end = self.0.lock().get(of).copied();
        end.filter(|end| Instant::now() < *end)
    }

    /// Whether it goes on.
    pub(crate) fn lasts(&self, of: &K) -> bool {
        self.end_of(of).is_some()
    }

    /// Returns once it has ended.
    pub(crate) async fn ended(&self, of: &K) {
        while let Some(end) = self.end_of(of) {
            sleep_until(end.min(Instant::now() + LOOK)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_shorter_fault_does_not_end_a_longer_one() {
        let (spans, begun) = (Spans::default(), Instant::now());
        spans.begin(1, Duration::from_secs(3));
        spans.begin(1, Duration::from_secs(1));
        assert!(spans.lasts(&1) && !spans.lasts(&2));
        spans.ended(&1).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(3));
        spans.begin(1, Duration::from_secs(3));
        spans.clear();
        assert!(!spans.lasts(&1));
    }
}
