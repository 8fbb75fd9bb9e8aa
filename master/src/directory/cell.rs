//! A stripe behind its lock, with gauges that are readable without the lock.

use super::queues::Rank;
use super::stripe::Stripe;
use parking_lot::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

/// Gauges of a stripe, readable without its lock. They are stale at most while the lock is held.
#[derive(Debug)]
pub(super) struct Gauges {
    oldest: [AtomicU64; 3],
    timer: AtomicU64,
    pub(super) blocks: AtomicU64,
    pub(super) bytes: AtomicU64,
}

/// The value of a gauge without an entry.
pub(super) const NEVER: u64 = u64::MAX;

impl Gauges {
    /// The tick of the next victim of a rank, or [`NEVER`].
    pub(super) fn oldest(&self, rank: Rank) -> u64 {
        let [roots, ordinary, soft] = &self.oldest;
        let gauge = match rank {
            Rank::Roots => roots,
            Rank::Ordinary => ordinary,
            Rank::Soft => soft,
        };
        gauge.load(Ordering::Acquire)
    }

    /// The end of the next timer, or [`NEVER`].
    pub(super) fn timer(&self) -> u64 {
        self.timer.load(Ordering::Acquire)
    }

    fn publish(&self, stripe: &Stripe) {
        for (gauge, rank) in self.oldest.iter().zip(Rank::ALL) {
            let oldest = stripe.queues.first(rank);
            gauge.store(oldest.map_or(NEVER, |(tick, _)| tick), Ordering::Release);
        }
        self.timer.store(
            stripe.queues.next_timer().unwrap_or(NEVER),
            Ordering::Release,
        );
        self.blocks
            .store(u64::from(stripe.entries.len()), Ordering::Release);
        self.bytes.store(stripe.bytes, Ordering::Release);
    }
}

/// A stripe behind its lock. The alignment keeps the gauges of two stripes on different cache
/// lines.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Cell {
    stripe: Mutex<Stripe>,
    pub(super) gauges: Gauges,
}

impl Cell {
    pub(super) fn new(number: u32, bits: u32) -> Self {
        let never = || AtomicU64::new(NEVER);
        Self {
            stripe: Mutex::new(Stripe::new(number, bits)),
            gauges: Gauges {
                oldest: [never(), never(), never()],
                timer: never(),
                blocks: AtomicU64::new(0),
                bytes: AtomicU64::new(0),
            },
        }
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        Locked {
            stripe: self.stripe.lock(),
            gauges: &self.gauges,
        }
    }
}

impl Cell {
    /// Locks the stripe for reading. The gauges are not updated afterwards.
    pub(super) fn lock_read(&self) -> impl Deref<Target = Stripe> + '_ {
        self.stripe.lock()
    }
}

/// A locked stripe. Its gauges are updated before the lock is released.
pub(super) struct Locked<'a> {
    stripe: MutexGuard<'a, Stripe>,
    gauges: &'a Gauges,
}

impl Deref for Locked<'_> {
    type Target = Stripe;

    fn deref(&self) -> &Stripe {
        &self.stripe
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Stripe {
        &mut self.stripe
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.gauges.publish(&self.stripe);
    }
}
