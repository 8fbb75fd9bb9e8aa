//! Everything that chance decides, from one seed.

use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

/// One stream of chance. Streams of one seed do not depend on each other, so a plan with fewer faults keeps the
/// others as they are.
#[derive(Debug)]
pub(crate) struct Dice(Mutex<ChaCha8Rng>);

impl Dice {
    /// The stream `number` of `seed`.
    pub(crate) fn new(seed: u64, number: u64) -> Self {
        Self(Mutex::new(generator(seed, number)))
    }

    /// A number below `end`; 0 for an `end` of 0.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.0.lock().random_range(0..end.max(1))
    }

    /// An index below `end`.
    pub(crate) fn index(&self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap_or(0)
    }

    /// A number from `least` to `most`.
    pub(crate) fn between(&self, least: u64, most: u64) -> u64 {
        self.0.lock().random_range(least..=most.max(least))
    }

    /// True in `permille` of 1000 cases.
    pub(crate) fn chance(&self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// A time in microseconds, from `least` to `most`.
    pub(crate) fn micros(&self, least: u64, most: u64) -> Duration {
        Duration::from_micros(self.between(least, most))
    }
}

/// The generator of a stream.
pub(crate) fn generator(seed: u64, number: u64) -> ChaCha8Rng {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    generator.set_stream(number);
    generator
}
