//! A seeded random generator that threads use without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

/// A SplitMix64 generator (Steele, Lea and Flood 2014): a counter, and a function that mixes its
/// value.
#[derive(Debug)]
pub(super) struct Draws(AtomicU64);

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

impl Draws {
    pub(super) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    fn next(&self) -> u64 {
        let mut mixed = self
            .0
            .fetch_add(GAMMA, Ordering::Relaxed)
            .wrapping_add(GAMMA);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number from the exponential distribution of rate 1, above zero.
    pub(super) fn exponential(&self) -> f64 {
        // An f64 holds 53 bits. The added half keeps the value off zero and one.
        let unit = ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        -unit.ln()
    }
}

impl Default for Draws {
    /// A generator with a random seed.
    fn default() -> Self {
        Self::new(kvpool_seams::random())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_the_published_generator() {
        let draws = Draws::new(1_234_567);
        let drawn: Vec<u64> = (0..3).map(|_| draws.next()).collect();
        let known = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!(drawn, known);
    }

    #[test]
    fn exponential_numbers_have_mean_one() {
        let draws = Draws::new(1);
        let mean = (0..10_000).map(|_| draws.exponential()).sum::<f64>() / 10_000.0;
        assert!((0.95..1.05).contains(&mean), "{mean}");
    }
}
