//! The directory: every visible block, by key, in memory, with the locations of its replicas.
//!
//! ```text
//!  key ─hash─► stripe ─ lock ─► index ─► entry (100 bytes) ─┬─► queues: when to evict the block
//!                                                           └─► lineage: its parent and children
//! ```
//!
//! The directory never waits, reads no clock, and does no I/O: callers pass times and ticks. It
//! returns a block that leaves as [`Removed`], and a replica that leaves as [`Dropped`]. The caller
//! makes the removal durable and frees the extents.
//!
//! **Architecture Invariant:** a thread that locks several stripes locks them in the order of their
//! numbers. A batch of lookups locks up to 16. After the stripes the thread locks lineage or
//! interner, but not both. Callbacks run under a stripe's lock and must not call the directory.
//!
//! **Architecture Invariant:** a block with children is in no eviction queue, so no block is
//! evicted before its descendants. The block returns to a queue when its last child leaves.

mod block;
mod cell;
mod common;
mod entries;
mod entry;
mod evict;
mod evict_tenants;
mod hash;
mod interner;
mod lineage;
mod load;
mod orders;
mod publish;
mod queues;
mod remove;
mod run;
mod scan;
mod stripe;
mod stripe_order;
mod visit;

pub use block::{
    Added, BlockMut, BlockRef, Dropped, Holders, NewBlock, Published, Removal, Removed, Replicas,
    Spared, Tick, Ticks, Verdict,
};
pub use evict::Single;
pub use evict_tenants::Goal;
pub use interner::InternerLimit;
pub(crate) use load::Summary;
pub use load::{ReplicaStart, UNPLACED};
pub use publish::Link;
pub use run::{LeaseFloor, RunLimits};
pub use scan::{BadPage, StoredBlock};

pub use crate::replica::{BlockId, Copies, Replica};

use crate::accounts::{Accounts, Item};
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
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The eviction order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The least recently used block among the blocks without children in the pool.
    #[default]
    Prefix,
    /// The least recently used block, even one with children.
    Lru,
}

/// The number of durable shards of the keys. It is stored with the snapshots and cannot change.
pub const SHARDS: u32 = 64;

/// Eight stripes for each core: two threads seldom need the same stripe, and a batch of a few dozen
/// keys shares locks.
const STRIPES_PER_CORE: usize = 8;

/// Settings of a new directory.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The number of lock stripes, rounded up to a power of two, at most [`SHARDS`].
    pub stripes: usize,
    /// The most affixes of keys that the directory interns.
    pub interner: InternerLimit,
    /// The eviction order.
    pub policy: Policy,
    /// A random number that clients cannot know. It prevents keys that are chosen to collide.
    pub seed: u64,
}

impl Options {
    /// The default settings under a random `seed`: the number of stripes follows the number of
    /// cores.
    pub fn new(seed: u64) -> Self {
        let cores = kvpool_seams::cores().unwrap_or(1);
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
    next_tick: Arc<AtomicU64>,
}

impl Directory {
    /// An empty directory. Leases are stored relative to `start`.
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
            accounts: Arc::default(),
            counted_as: Item::Blocks,
        };
        let stripes = (0..1u32 << stripe_bits)
            .map(|number| Cell::new(number, stripe_bits))
            .collect();
        Self {
            common,
            stripes,
            next_tick: Arc::new(AtomicU64::new(1)),
        }
    }

    /// Makes this empty directory list the copies on media of the blocks in `memory`. Both
    /// directories share one order of uses and one set of accounts. The accounts count these
    /// entries as copies.
    pub fn as_tier_of(mut self, memory: &Self) -> Self {
        self.next_tick = Arc::clone(&memory.next_tick);
        self.common.accounts = Arc::clone(memory.accounts());
        self.common.counted_as = Item::Copies;
        self
    }

    /// Gives this empty directory the accounts of `earlier`, which is empty too.
    pub fn in_place_of(mut self, earlier: &Self) -> Self {
        self.common.accounts = Arc::clone(earlier.accounts());
        self
    }

    /// The accounts of the namespaces.
    pub const fn accounts(&self) -> &Arc<Accounts> {
        &self.common.accounts
    }

    /// The next tick, which is later than every use so far.
    pub fn next_tick(&self) -> Tick {
        Tick(self.next_tick.load(Ordering::Relaxed))
    }

    /// Reserves the ticks of a batch of `count` keys. They are later than all earlier ticks.
    pub fn ticks(&self, count: usize) -> Ticks {
        let count = count as u64;
        Ticks {
            first: self.next_tick.fetch_add(count, Ordering::Relaxed),
            count,
        }
    }

    /// The number of visible blocks.
    pub fn blocks(&self) -> u64 {
        self.stripes
            .iter()
            .map(|stripe| stripe.gauges.blocks.load(Ordering::Acquire))
            .sum()
    }

    /// The bytes of all replicas, without the rounding of extents.
    pub fn bytes(&self) -> u64 {
        self.stripes
            .iter()
            .map(|stripe| stripe.gauges.bytes.load(Ordering::Acquire))
            .sum()
    }

    /// The bytes of the extents of all replicas. The call locks each stripe while it counts.
    pub fn footprint(&self) -> u64 {
        let mut bytes = 0;
        self.each_block(|stripe, slot| bytes += stripe.footprint(slot));
        bytes
    }

    /// The durable shard of a key. It depends on the seed and the key alone.
    pub fn shard_of_key(&self, namespace: NamespaceId, key: KeyRef<'_>) -> u32 {
        let key = common::Preparer::new(&self.common, namespace).prepare(key);
        common::shard_of_hash(key.hash)
    }

    /// The number of interned pairs of affixes.
    pub fn interned(&self) -> usize {
        self.common.interner.len()
    }

    /// The number of blocks with a lineage node: each is or was a parent or a child.
    pub fn linked(&self) -> u64 {
        u64::from(self.common.lineage.lock().len())
    }

    /// The bytes of memory that the directory accounts for. The call locks each stripe for a
    /// moment.
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

    /// Locks the stripe of a block. `None` when the slot is vacant.
    fn lock_block(&self, block: BlockId) -> Option<(Locked<'_>, u32)> {
        let stripe = self.lock(self.common.stripe_of(block));
        let slot = self.common.slot_of(block);
        stripe.entries.get(slot).is_some().then_some((stripe, slot))
    }
}

#[cfg(test)]
mod tests;
