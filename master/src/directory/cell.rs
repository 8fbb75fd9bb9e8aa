//! A shard behind its lock, and what is known of it without locking.

use super::queues::Rank;
use super::shard::Shard;
use parking_lot::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

/// What is known of a shard without locking it. It lags behind by no more than the lock is held.
#[derive(Debug)]
pub(super) struct Gauges {
    oldest: [AtomicU64; 3],
    timer: AtomicU64,
    pub(super) blocks: AtomicU64,
    pub(super) bytes: AtomicU64,
}

/// In a gauge: there is none.
pub(super) const NEVER: u64 = u64::MAX;

impl Gauges {
    /// The tick of the first block to be evicted of a rank, or [`NEVER`].
    pub(super) fn oldest(&self, rank: Rank) -> u64 {
        let [orphans, ordinary, soft] = &self.oldest;
        let gauge = match rank {
            Rank::Orphans => orphans,
            Rank::Ordinary => ordinary,
            Rank::Soft => soft,
        };
        gauge.load(Ordering::Acquire)
    }

    /// When the next timer runs out, or [`NEVER`].
    pub(super) fn timer(&self) -> u64 {
        self.timer.load(Ordering::Acquire)
    }

    fn publish(&self, shard: &Shard) {
        for (gauge, rank) in self.oldest.iter().zip(Rank::ALL) {
            let oldest = shard.queues.first(rank);
            gauge.store(oldest.map_or(NEVER, |(tick, _)| tick), Ordering::Release);
        }
        self.timer.store(
            shard.queues.next_timer().unwrap_or(NEVER),
            Ordering::Release,
        );
        self.blocks
            .store(u64::from(shard.entries.len()), Ordering::Release);
        self.bytes.store(shard.bytes, Ordering::Release);
    }
}

/// A shard behind its lock. Aligned, so that the gauges of two shards share no cache line.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Cell {
    shard: Mutex<Shard>,
    pub(super) gauges: Gauges,
}

impl Cell {
    pub(super) fn new(number: u32, bits: u32) -> Self {
        let never = || AtomicU64::new(NEVER);
        Self {
            shard: Mutex::new(Shard::new(number, bits)),
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
            shard: self.shard.lock(),
            gauges: &self.gauges,
        }
    }
}

impl Cell {
    /// Locks the shard for one who changes nothing.
    pub(super) fn lock_to_look(&self) -> impl Deref<Target = Shard> + '_ {
        self.shard.lock()
    }
}

/// A locked shard, which brings its gauges up to date when it is let go.
pub(super) struct Locked<'a> {
    shard: MutexGuard<'a, Shard>,
    gauges: &'a Gauges,
}

impl Deref for Locked<'_> {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        &self.shard
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        &mut self.shard
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.gauges.publish(&self.shard);
    }
}
