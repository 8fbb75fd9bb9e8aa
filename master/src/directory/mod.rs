//! Which block lies where: every visible block, by key, in memory.
//!
//! ```text
//!  key ─hash─► shard ─ lock ─► index ─► entry (96 bytes) ─┬─► queues: when it is to be evicted
//!                                                         └─► lineage: what it is evicted after
//! ```
//!
//! Nothing here waits, reads a clock, or does I/O: times and ticks are handed in. What leaves is
//! returned as [`Removed`] or [`Dropped`]; making that durable and freeing the extents is the
//! caller's part.
//!
//! **Architecture Invariant:** a thread that locks several shards at a time (a batch of lookups locks up
//! to 16) takes them in the order of their numbers, and after them at most one of lineage and spaces.
//! Callbacks run under a shard's lock and must not call the directory.
//!
//! **Architecture Invariant:** a block with children waits in no eviction queue, so nothing can be
//! evicted before its descendants. It comes back when its last child goes.

mod batch;
mod block;
mod cell;
mod common;
mod entries;
mod entry;
mod evict;
mod hash;
mod lineage;
mod load;
mod publish;
mod queues;
mod remove;
mod run;
mod scan;
mod shard;
pub(crate) mod slab;
mod spaces;
mod visit;

pub use block::{
    BlockId, BlockMut, BlockRef, Copies, Dropped, NewBlock, Published, Removal, Removed, Replica,
    Replicas, Tick, Ticks, Verdict,
};
pub use evict::Single;
pub use load::{Place, UNPLACED};
pub use publish::Link;
pub use run::Floor;
pub use scan::{BadPage, Record};
pub use spaces::SpacesLimit;

use crate::clock::Millis;
use cell::{Cell, Locked};
use common::Common;
use hash::Seed;
use kvpool_types::KeyRef;
use kvpool_types::ids::NamespaceId;
use lineage::Lineage;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use spaces::Spaces;
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
pub const PARTS: u32 = 64;

/// So many shards for each core: its threads seldom meet in one, and a batch of a few dozen keys has
/// no lock to take for each.
const SHARDS_PER_CORE: usize = 8;

/// How a directory is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How many shards; rounded up to a power of two, at most [`PARTS`].
    pub shards: usize,
    /// How much of keys' affixes may be interned.
    pub spaces: SpacesLimit,
    /// Which blocks are evicted first.
    pub policy: Policy,
    /// A random number that clients cannot know, against keys made to collide.
    pub seed: u64,
}

impl Options {
    /// The usual settings under a random `seed`: as many shards as suit this machine.
    pub fn new(seed: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            shards: cores.saturating_mul(SHARDS_PER_CORE),
            spaces: SpacesLimit::default(),
            policy: Policy::default(),
            seed,
        }
    }
}

/// Every visible block.
#[derive(Debug)]
pub struct Directory {
    common: Common,
    shards: Box<[Cell]>,
    next_tick: AtomicU64,
}

impl Directory {
    /// An empty directory whose time begins at `start`.
    pub fn new(options: Options, start: Millis) -> Self {
        let shards = options.shards.clamp(1, PARTS as usize).next_power_of_two();
        let shard_bits = shards.trailing_zeros();
        let seed = Seed::new(options.seed);
        let common = Common {
            seed,
            spaces: Spaces::new(options.spaces, seed),
            lineage: Mutex::new(Lineage::default()),
            policy: options.policy,
            start,
            shard_bits,
        };
        let shards = (0..1u32 << shard_bits)
            .map(|number| Cell::new(number, shard_bits))
            .collect();
        Self {
            common,
            shards,
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
        self.shards
            .iter()
            .map(|shard| shard.gauges.blocks.load(Ordering::Acquire))
            .sum()
    }

    /// The bytes of all replicas of all blocks, without the rounding of extents.
    pub fn bytes(&self) -> u64 {
        self.shards
            .iter()
            .map(|shard| shard.gauges.bytes.load(Ordering::Acquire))
            .sum()
    }

    /// The number of the snapshots' part that a key belongs to. It depends on the seed alone.
    pub fn part_of_key(&self, namespace: NamespaceId, key: KeyRef<'_>) -> u32 {
        let key = common::Preparer::new(&self.common, namespace).prepare(key);
        common::part_of_hash(key.hash)
    }

    /// How many pairs of affixes are interned.
    pub fn interned(&self) -> usize {
        self.common.spaces.len()
    }

    /// How many blocks are, or were, a parent or a child of another.
    pub fn linked(&self) -> u64 {
        u64::from(self.common.lineage.lock().len())
    }

    /// The bytes of memory that the directory accounts for; locks each shard for a moment.
    pub fn memory_bytes(&self) -> u64 {
        let fixed = (size_of::<Cell>() * self.shards.len()) as u64;
        let shards: u64 = self
            .shards
            .iter()
            .map(|shard| shard.lock().memory_bytes())
            .sum();
        let lineage = self.common.lineage.lock().memory_bytes();
        fixed + shards + lineage + self.common.spaces.memory_bytes()
    }

    fn cell(&self, shard: usize) -> &Cell {
        self.shards
            .get(shard)
            .expect("invariant: shard numbers are masked")
    }

    fn lock(&self, shard: usize) -> Locked<'_> {
        self.cell(shard).lock()
    }

    /// Locks the shard of a block that may have left.
    fn lock_block(&self, block: BlockId) -> Option<(Locked<'_>, u32)> {
        let shard = self.lock(self.common.shard_of(block));
        let slot = self.common.slot_of(block);
        shard.entries.get(slot).is_some().then_some((shard, slot))
    }
}

#[cfg(test)]
mod tests;
