//! Which block lies where: every visible block, by key, in memory.
//!
//! ```text
//!  key ─hash─► stripe ─ lock ─► index ─► entry (96 bytes) ─┬─► queues: when it is to be evicted
//!                                                         └─► lineage: what it is evicted after
//! ```
//!
//! Nothing here waits, reads a clock, or does I/O: times and ticks are handed in. What leaves is
//! returned as [`Removed`] or [`Dropped`]; making that durable and freeing the extents is the
//! caller's part.
//!
//! **Architecture Invariant:** a thread that locks several stripes at a time (a batch of lookups locks up
//! to 16) takes them in the order of their numbers, and after them at most one of lineage and spaces.
//! Callbacks run under a stripe's lock and must not call the directory.
//!
//! **Architecture Invariant:** a block with children waits in no eviction queue, so nothing can be
//! evicted before its descendants. It comes back when its last child goes.

mod block;
mod cell;
mod common;
mod entries;
mod entry;
mod evict;
mod hash;
mod interner;
mod lineage;
mod load;
mod publish;
mod queues;
mod remove;
mod run;
mod scan;
mod stripe;
mod stripe_order;
mod visit;

pub use block::{
    BlockMut, BlockRef, Dropped, NewBlock, Published, Removal, Removed, Replicas, Tick, Ticks,
    Verdict,
};
pub use evict::Single;
pub use interner::InternerLimit;
pub use load::{ReplicaStart, UNPLACED};
pub use publish::Link;
pub use run::LeaseFloor;
pub use scan::{BadPage, StoredBlock};

pub use crate::replica::{BlockId, Copies, Replica};

use crate::clock::BootInstant;
use cell::{Cell, Locked};
use common::Common;
use hash::Seed;
use interner::Interner;
use kvpool_types::KeyRef;
use kvpool_types::ids::NamespaceId;
use lineage::Lineage;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// Which blocks are evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The least recently used of those that no other block follows in its chain.
    #[default]
    Prefix,
    /// The least recently used, whatever follows it.
    Lru,
}

/// How many parts snapshots keep the blocks of a pool in. It is stored with them, and cannot change.
pub const SHARDS: u32 = 64;

/// So many stripes for each core: its threads seldom meet in one, and a batch of a few dozen keys has
/// no lock to take for each.
const STRIPES_PER_CORE: usize = 8;

/// How a directory is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many stripes; rounded up to a power of two, at most [`SHARDS`].
    pub stripes: usize,
    /// How much of keys' affixes may be interned.
    pub interner: InternerLimit,
    /// Which blocks are evicted first.
    pub policy: Policy,
    /// A random number that clients cannot know, against keys made to collide.
    pub seed: u64,
}

impl Options {
    /// The usual settings under a random `seed`: as many stripes as suit this machine.
    pub fn new(seed: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            stripes: cores.saturating_mul(STRIPES_PER_CORE),
            interner: InternerLimit::default(),
            policy: Policy::default(),
            seed,
        }
    }
}

/// Every visible block.
#[derive(Debug)]
pub struct Directory {
    common: Common,
    stripes: Box<[Cell]>,
    next_tick: AtomicU64,
}

impl Directory {
    /// An empty directory whose time begins at `start`.
    pub fn new(options: Options, start: BootInstant) -> Self {
        let stripes = options
            .stripes
            .clamp(1, SHARDS as usize)
            .next_power_of_two();
        let stripe_bits = stripes.trailing_zeros();
        let seed = Seed::new(options.seed);
        let common = Common {
            seed,
            interner: Interner::new(options.interner, seed),
            lineage: Mutex::new(Lineage::default()),
            policy: options.policy,
            start,
            stripe_bits,
        };
        let stripes = (0..1u32 << stripe_bits)
            .map(|number| Cell::new(number, stripe_bits))
            .collect();
        Self {
            common,
            stripes,
            next_tick: AtomicU64::new(1),
        }
    }

    /// Takes the ticks of a batch of `count` keys: later than all taken before.
    pub fn ticks(&self, count: usize) -> Ticks {
        let count = count as u64;
        Ticks {
            first: self.next_tick.fetch_add(count, Ordering::Relaxed),
            count,
        }
    }

    /// How many blocks are visible.
    pub fn blocks(&self) -> u64 {
        self.stripes
            .iter()
            .map(|stripe| stripe.gauges.blocks.load(Ordering::Acquire))
            .sum()
    }

    /// The bytes of all replicas of all blocks, without the rounding of extents.
    pub fn bytes(&self) -> u64 {
        self.stripes
            .iter()
            .map(|stripe| stripe.gauges.bytes.load(Ordering::Acquire))
            .sum()
    }

    /// The number of the snapshots' part that a key belongs to. It depends on the seed alone.
    pub fn shard_of_key(&self, namespace: NamespaceId, key: KeyRef<'_>) -> u32 {
        let key = common::Preparer::new(&self.common, namespace).prepare(key);
        common::shard_of_hash(key.hash)
    }

    /// How many pairs of affixes are interned.
    pub fn interned(&self) -> usize {
        self.common.interner.len()
    }

    /// How many blocks are, or were, a parent or a child of another.
    pub fn linked(&self) -> u64 {
        u64::from(self.common.lineage.lock().len())
    }

    /// The bytes of memory that the directory accounts for; locks each stripe for a moment.
    pub fn memory_bytes(&self) -> u64 {
        let fixed = (size_of::<Cell>() * self.stripes.len()) as u64;
        let stripes: u64 = self
            .stripes
            .iter()
            .map(|stripe| stripe.lock().memory_bytes())
            .sum();
        let lineage = self.common.lineage.lock().memory_bytes();
        fixed + stripes + lineage + self.common.interner.memory_bytes()
    }

    fn cell(&self, stripe: usize) -> &Cell {
        self.stripes
            .get(stripe)
            .expect("invariant: stripe numbers are masked")
    }

    fn lock(&self, stripe: usize) -> Locked<'_> {
        self.cell(stripe).lock()
    }

    /// Locks the stripe of a block that may have left.
    fn lock_block(&self, block: BlockId) -> Option<(Locked<'_>, u32)> {
        let stripe = self.lock(self.common.stripe_of(block));
        let slot = self.common.slot_of(block);
        stripe.entries.get(slot).is_some().then_some((stripe, slot))
    }
}

#[cfg(test)]
mod tests;
