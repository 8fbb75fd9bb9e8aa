//! Pairs of ports that transferred nothing, and their cooldowns.
//!
//! Each pair cools down alone. Other pairs of the same link, and of the same ports, stay in use.
//!
//! ADR 0030 says why pairs cool down one by one.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The first cooldown of a pair, and the longest.
const FIRST_COOLDOWN: Duration = Duration::from_secs(1);
const LONGEST_COOLDOWN: Duration = Duration::from_secs(60);
/// The number of pairs above which pairs with long expired cooldowns are dropped.
const MAX_PAIRS: usize = 1024;

/// A local port and a peer's port, by their GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PortPair {
    pub(super) here: [u8; 16],
    pub(super) there: [u8; 16],
}

/// The pairs in cooldown, and the pairs that have not worked since their cooldown.
#[derive(Debug, Default)]
pub(super) struct PairCooldowns(Mutex<HashMap<PortPair, PairCooldown>>);

#[derive(Clone, Copy, Debug)]
struct PairCooldown {
    until: Instant,
    pause: Duration,
}

impl PairCooldowns {
    /// Starts a cooldown, each twice as long as the one before. Failures during a cooldown count
    /// once.
    pub(super) fn failed(&self, pair: PortPair, now: Instant) {
        let mut cooldowns = self.0.lock();
        if cooldowns.len() >= MAX_PAIRS {
            cooldowns.retain(|_, cooldown| {
                now.saturating_duration_since(cooldown.until) < LONGEST_COOLDOWN
            });
        }
        let pause = match cooldowns.get(&pair) {
            Some(cooldown) if now < cooldown.until => return,
            Some(cooldown) => (cooldown.pause * 2).min(LONGEST_COOLDOWN),
            None => FIRST_COOLDOWN,
        };
        let until = now + pause;
        cooldowns.insert(pair, PairCooldown { until, pause });
    }

    /// Ends a pair's cooldown, because data arrived.
    pub(super) fn worked(&self, pair: PortPair) {
        self.0.lock().remove(&pair);
    }

    /// The end of the pair's cooldown, if it is in one.
    pub(super) fn until(&self, pair: PortPair, now: Instant) -> Option<Instant> {
        let until = self.0.lock().get(&pair)?.until;
        (now < until).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(there: u8) -> PortPair {
        PortPair {
            here: [1; 16],
            there: [there; 16],
        }
    }

    #[test]
    fn a_pair_cools_down_alone_and_is_tried_again() {
        let (cooldowns, now) = (PairCooldowns::default(), Instant::now());
        cooldowns.failed(pair(2), now);
        assert_eq!(cooldowns.until(pair(2), now), Some(now + FIRST_COOLDOWN));
        assert_eq!(cooldowns.until(pair(3), now), None);
        assert_eq!(
            cooldowns.until(pair(2), now + FIRST_COOLDOWN),
            None,
            "it is tried again"
        );
    }

    #[test]
    fn each_failure_doubles_the_cooldown_up_to_a_bound() {
        let (cooldowns, mut now) = (PairCooldowns::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..9 {
            cooldowns.failed(pair(2), now);
            // The lanes of a pair fail together.
            cooldowns.failed(pair(2), now);
            let until = cooldowns.until(pair(2), now).unwrap();
            pauses.push((until - now).as_secs());
            now = until;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        cooldowns.worked(pair(2));
        cooldowns.failed(pair(2), now);
        assert_eq!(cooldowns.until(pair(2), now), Some(now + FIRST_COOLDOWN));
    }

    #[test]
    fn long_expired_cooldowns_are_dropped() {
        let (cooldowns, now) = (PairCooldowns::default(), Instant::now());
        for number in 0..MAX_PAIRS {
            let mut pair = pair(0);
            pair.here[..8].copy_from_slice(&(number as u64).to_le_bytes());
            cooldowns.failed(pair, now);
        }
        cooldowns.failed(pair(9), now + 3 * LONGEST_COOLDOWN);
        assert_eq!(cooldowns.0.lock().len(), 1);
    }
}
