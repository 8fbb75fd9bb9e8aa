//! The state that all stripes of a directory share, and the preparation of keys for a lookup.

use super::entry::MAX_LEASE;
use super::hash::Seed;
use super::interner::{Interner, NOT_INTERNED};
use super::lineage::Lineage;
use super::orders::COMMON;
use super::{BlockId, Policy, SHARDS};
use crate::accounts::{Accounts, Item};
use crate::clock::BootInstant;
use kvpool_types::KeyRef;
use kvpool_types::ids::NamespaceId;
use parking_lot::Mutex;
use std::sync::Arc;

/// The state that all stripes of a directory share. Lock order: stripes by number, then one of these locks.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) seed: Seed,
    pub(super) interner: Interner,
    pub(super) lineage: Mutex<Lineage>,
    pub(super) policy: Policy,
    pub(super) start: BootInstant,
    /// The number of low bits of a block's id that name its stripe.
    pub(super) stripe_bits: u32,
    pub(super) accounts: Arc<Accounts>,
    /// The item as which the accounts count a block of this directory.
    pub(super) counted_as: Item,
}

impl Common {
    /// A time as leases store it: milliseconds after the directory's start.
    #[inline]
    pub(super) fn relative(&self, moment: BootInstant) -> u64 {
        moment.0.saturating_sub(self.start.0).min(MAX_LEASE)
    }

    /// The time stored as `relative`; zero stands for no time.
    pub(super) fn absolute(&self, relative: u64) -> BootInstant {
        if relative == 0 {
            BootInstant(0)
        } else {
            BootInstant(self.start.0 + relative)
        }
    }

    /// The order of eviction of a namespace's blocks.
    #[inline]
    pub(super) fn order_of(&self, namespace: NamespaceId) -> u32 {
        // Copies have no tenant orders: they leave with their zones.
        let tenant = match self.counted_as {
            Item::Blocks => self.accounts.tenant(namespace),
            _ => None,
        };
        tenant.map_or(COMMON, |tenant| tenant.order)
    }

    /// Counts a block that is added to a namespace, with the bytes of its extents.
    pub(super) fn count_added(&self, namespace: NamespaceId, bytes: u64) {
        let account = self.accounts.of(namespace);
        account.add(self.counted_as, 1);
        if self.counted_as == Item::Blocks {
            account.add(Item::Resident, bytes);
        }
    }

    /// Counts that the extents of a namespace's block have `after` bytes instead of `before`. The block stays
    /// counted in between.
    pub(super) fn count_changed(&self, namespace: NamespaceId, before: u64, after: u64) {
        let account = self.accounts.of(namespace);
        if self.counted_as != Item::Blocks {
            return;
        }
        match after.checked_sub(before) {
            Some(more) => account.add(Item::Resident, more),
            None => account.take_off(Item::Resident, before - after),
        }
    }

    /// Reverses [`Common::count_added`].
    pub(super) fn count_removed(&self, namespace: NamespaceId, bytes: u64) {
        let account = self.accounts.of(namespace);
        account.take_off(self.counted_as, 1);
        if self.counted_as == Item::Blocks {
            account.take_off(Item::Resident, bytes);
        }
    }

    #[inline]
    pub(super) fn stripe_of_hash(&self, hash: u64) -> usize {
        self.stripe_of_shard(shard_of_hash(hash))
    }

    /// A shard lies in one stripe, and a stripe consists of whole shards.
    #[inline]
    pub(super) fn stripe_of_shard(&self, shard: u32) -> usize {
        shard as usize & ((1 << self.stripe_bits) - 1)
    }

    pub(super) fn stripe_of(&self, block: BlockId) -> usize {
        (block.0 & ((1 << self.stripe_bits) - 1)) as usize
    }

    pub(super) fn slot_of(&self, block: BlockId) -> u32 {
        block.0 >> self.stripe_bits
    }
}

/// The durable shard of a key with this hash.
#[inline]
pub(super) fn shard_of_hash(hash: u64) -> u32 {
    ((hash >> 32) as u32) % SHARDS
}

/// A key with its hash and its number in the interner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prepared<'k> {
    pub(super) namespace: NamespaceId,
    pub(super) key: KeyRef<'k>,
    pub(super) hash: u64,
    /// The interner's number for the affixes of a digest. [`NOT_INTERNED`] for text keys and for
    /// affixes that are not interned.
    pub(super) affixes: u32,
}

/// Prepares keys of one namespace. It caches the lookup of keys without affixes, and of the last
/// affixes seen, which most keys of a batch share.
pub(super) struct Preparer<'d, 'k> {
    common: &'d Common,
    namespace: NamespaceId,
    bare: Option<(u64, u32)>,
    last: Option<(&'k str, &'k str, u64, u32)>,
}

impl<'d, 'k> Preparer<'d, 'k> {
    pub(super) fn new(common: &'d Common, namespace: NamespaceId) -> Self {
        Self {
            common,
            namespace,
            bare: None,
            last: None,
        }
    }

    #[inline]
    pub(super) fn prepare(&mut self, key: KeyRef<'k>) -> Prepared<'k> {
        let (namespace, seed) = (self.namespace, &self.common.seed);
        let (hash, affixes) = match key {
            KeyRef::Text(text) => (seed.text(namespace, text), NOT_INTERNED),
            KeyRef::Digest {
                prefix,
                suffix,
                digest,
            } => {
                let (affixes_hash, affixes) = self.intern_lookup(prefix, suffix);
                (seed.digest(affixes_hash, digest), affixes)
            }
        };
        Prepared {
            namespace,
            key,
            hash,
            affixes,
        }
    }

    /// The hash of a digest's affixes, and their number in the interner.
    #[inline]
    fn intern_lookup(&mut self, prefix: &'k str, suffix: &'k str) -> (u64, u32) {
        let find = || {
            let affixes_hash = self.common.seed.affixes(self.namespace, prefix, suffix);
            let found = self
                .common
                .interner
                .find(self.namespace, prefix, suffix, affixes_hash);
            (affixes_hash, found.unwrap_or(NOT_INTERNED))
        };
        // Nearly all keys have no affixes, so this case skips the comparison.
        if prefix.is_empty() && suffix.is_empty() {
            return *self.bare.get_or_insert_with(find);
        }
        match self.last {
            Some((p, s, affixes_hash, affixes)) if p == prefix && s == suffix => {
                (affixes_hash, affixes)
            }
            _ => {
                let (affixes_hash, affixes) = find();
                self.last = Some((prefix, suffix, affixes_hash, affixes));
                (affixes_hash, affixes)
            }
        }
    }
}
