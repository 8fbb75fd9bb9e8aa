//! Events in the order of their time, and the random choices about messages.

use kvpool_handoff::Moment;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::time::Duration;

/// The probabilities of faults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chances {
    pub(crate) drop: f64,
    pub(crate) repeat: f64,
    pub(crate) slow: f64,
    pub(crate) write_fails: f64,
    pub(crate) late_write: f64,
    pub(crate) flipped: f64,
    pub(crate) crash: f64,
    pub(crate) broken_link: f64,
    pub(crate) abort: f64,
    /// The probability that one rank of decode declines a request. Only worlds about declines set it.
    pub(crate) decline: f64,
}

impl Chances {
    pub(crate) const NONE: Self = Self {
        drop: 0.0,
        repeat: 0.0,
        slow: 0.0,
        write_fails: 0.0,
        late_write: 0.0,
        flipped: 0.0,
        crash: 0.0,
        broken_link: 0.0,
        abort: 0.0,
        decline: 0.0,
    };

    /// Most worlds are mild, so that rooms succeed; some are harsh.
    pub(crate) fn draw(chance: &mut StdRng) -> Self {
        let harsh = [0.0, 0.3, 1.0, 3.0][chance.random_range(0..4)];
        Self {
            drop: 0.05 * harsh,
            repeat: 0.1 * harsh,
            slow: 0.05 * harsh,
            write_fails: 0.05 * harsh,
            late_write: 0.05 * harsh,
            flipped: 0.03 * harsh,
            crash: 0.1 * harsh,
            broken_link: 0.2 * harsh,
            abort: 0.05 * harsh,
            decline: 0.0,
        }
    }
}

/// Pending events.
pub(crate) struct Queue<E> {
    pub(crate) now: Moment,
    pub(crate) chance: StdRng,
    pub(crate) chances: Chances,
    events: BTreeMap<(Moment, u64), E>,
    count: u64,
}

impl<E: Clone> Queue<E> {
    pub(crate) fn new(seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        Self {
            now: Moment::default(),
            chances: Chances::draw(&mut chance),
            chance,
            events: BTreeMap::new(),
            count: 0,
        }
    }

    pub(crate) fn at(&mut self, at: Moment, event: E) {
        self.count += 1;
        self.events.insert((at.max(self.now), self.count), event);
    }

    pub(crate) fn after(&mut self, delay: Duration, event: E) {
        self.at(self.now + delay, event);
    }

    pub(crate) fn next(&mut self) -> Option<E> {
        let ((at, _), event) = self.events.pop_first()?;
        self.now = at;
        Some(event)
    }

    pub(crate) fn happens(&mut self, chance: f64) -> bool {
        self.chance.random_bool(chance.min(1.0))
    }

    /// A random time between `from` and `to` milliseconds.
    pub(crate) fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.chance.random_range(from * 1000..=to * 1000))
    }

    /// The time that a packet takes. Different times reorder packets.
    pub(crate) fn delay(&mut self) -> Duration {
        match self.happens(self.chances.slow) {
            true => self.millis(50, 6000),
            false => self.millis(0, 20),
        }
    }

    /// Sends a message: lost, once, or twice.
    pub(crate) fn transmit(&mut self, event: E) {
        if self.happens(self.chances.drop) {
            return;
        }
        if self.happens(self.chances.repeat) {
            let delay = self.delay();
            self.after(delay, event.clone());
        }
        let delay = self.delay();
        self.after(delay, event);
    }
}
