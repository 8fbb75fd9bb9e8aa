//! Pairs of ports over which nothing came through, and for how long each is left alone.
//!
//! A pair rests by itself: others of the same link, and of the same ports, are used meanwhile.
//!
//! ADR 0030 says why pairs cool down one by one.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The first rest of a pair, and the longest.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);
/// How many pairs are remembered before those are forgotten whose rest is long over.
const REMEMBERED: usize = 1024;

/// A port here and one of a peer, by their GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pair {
    pub(super) here: [u8; 16],
    pub(super) there: [u8; 16],
}

/// The pairs that rest, or have not worked since.
#[derive(Debug, Default)]
pub(super) struct Rests(Mutex<HashMap<Pair, Rest>>);

#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    pause: Duration,
}

impl Rests {
    /// Nothing came through: the pair rests, each time for twice as long. What fails together counts once.
    pub(super) fn failed(&self, pair: Pair, now: Instant) {
        let mut rests = self.0.lock();
        if rests.len() >= REMEMBERED {
            rests.retain(|_, rest| now.saturating_duration_since(rest.until) < LONGEST);
        }
        let pause = match rests.get(&pair) {
            Some(rest) if now < rest.until => return,
            Some(rest) => (rest.pause * 2).min(LONGEST),
            None => FIRST,
        };
        let until = now + pause;
        rests.insert(pair, Rest { until, pause });
    }

    /// Something came through.
    pub(super) fn worked(&self, pair: Pair) {
        self.0.lock().remove(&pair);
    }

    /// Until when the pair rests, if it does.
    pub(super) fn until(&self, pair: Pair, now: Instant) -> Option<Instant> {
        let until = self.0.lock().get(&pair)?.until;
        (now < until).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(there: u8) -> Pair {
        Pair {
            here: [1; 16],
            there: [there; 16],
        }
    }

    #[test]
    fn a_pair_rests_alone_and_is_tried_again() {
        let (rests, now) = (Rests::default(), Instant::now());
        rests.failed(pair(2), now);
        assert_eq!(rests.until(pair(2), now), Some(now + FIRST));
        assert_eq!(rests.until(pair(3), now), None);
        assert_eq!(rests.until(pair(2), now + FIRST), None, "it is tried again");
    }

    #[test]
    fn each_failure_after_a_rest_makes_the_next_one_longer_up_to_a_bound() {
        let (rests, mut now) = (Rests::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..9 {
            rests.failed(pair(2), now);
            // Its lanes fail together.
            rests.failed(pair(2), now);
            let until = rests.until(pair(2), now).unwrap();
            pauses.push((until - now).as_secs());
            now = until;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        rests.worked(pair(2));
        rests.failed(pair(2), now);
        assert_eq!(rests.until(pair(2), now), Some(now + FIRST));
    }

    #[test]
    fn pairs_that_are_long_over_are_forgotten() {
        let (rests, now) = (Rests::default(), Instant::now());
        for number in 0..REMEMBERED {
            let mut pair = pair(0);
            pair.here[..8].copy_from_slice(&(number as u64).to_le_bytes());
            rests.failed(pair, now);
        }
        rests.failed(pair(9), now + 3 * LONGEST);
        assert_eq!(rests.0.lock().len(), 1);
    }
}
