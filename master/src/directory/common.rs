//! What the shards of a directory share, and keys made ready to be looked up in one.

use super::entry::MAX_LEASE;
use super::hash::Seed;
use super::lineage::Lineage;
use super::spaces::{NO_SPACE, Spaces};
use super::{BlockId, PARTS, Policy};
use crate::clock::Millis;
use kvpool_types::KeyRef;
use kvpool_types::ids::NamespaceId;
use parking_lot::Mutex;

/// What the shards of a directory share. Lock order: shards in the order of their numbers, then one of these.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) seed: Seed,
    pub(super) spaces: Spaces,
    pub(super) lineage: Mutex<Lineage>,
    pub(super) policy: Policy,
    pub(super) start: Millis,
    /// The low bits of a block's id that name its shard.
    pub(super) shard_bits: u32,
}

impl Common {
    /// A moment as leases are stored: in milliseconds after the directory's start.
    #[inline]
    pub(super) fn relative(&self, moment: Millis) -> u64 {
        moment.0.saturating_sub(self.start.0).min(MAX_LEASE)
    }

    /// The moment that is stored as `relative`; zero stands for none.
    pub(super) fn absolute(&self, relative: u64) -> Millis {
        if relative == 0 {
            Millis(0)
        } else {
            Millis(self.start.0 + relative)
        }
    }

    #[inline]
    pub(super) fn shard_of_hash(&self, hash: u64) -> usize {
        self.shard_of_part(part_of_hash(hash))
    }

    /// A part is in one shard, and a shard is some whole parts.
    #[inline]
    pub(super) fn shard_of_part(&self, part: u32) -> usize {
        part as usize & ((1 << self.shard_bits) - 1)
    }

    pub(super) fn shard_of(&self, block: BlockId) -> usize {
        (block.0 & ((1 << self.shard_bits) - 1)) as usize
    }

    pub(super) fn slot_of(&self, block: BlockId) -> u32 {
        block.0 >> self.shard_bits
    }
}

/// The part of snapshots that a key of this hash is in.
#[inline]
pub(super) fn part_of_hash(hash: u64) -> u32 {
    ((hash >> 32) as u32) % PARTS
}

/// A key ready to be looked up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prepared<'k> {
    pub(super) namespace: NamespaceId,
    pub(super) key: KeyRef<'k>,
    pub(super) hash: u64,
    /// The space of a digest; [`NO_SPACE`] for strings and where affixes are not interned.
    pub(super) space: u32,
}

/// Makes keys of one namespace ready. Remembers what it found of keys without affixes, and of the
/// affixes last seen, which most keys of a batch share.
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
        let (hash, space) = match key {
            KeyRef::Text(text) => (seed.text(namespace, text), NO_SPACE),
            KeyRef::Digest {
                prefix,
                suffix,
                digest,
            } => {
                let (affixes, space) = self.space(prefix, suffix);
                (seed.digest(affixes, digest), space)
            }
        };
        Prepared {
            namespace,
            key,
            hash,
            space,
        }
    }

    /// The hash of a digest's affixes, and their space.
    #[inline]
    fn space(&mut self, prefix: &'k str, suffix: &'k str) -> (u64, u32) {
        let find = || {
            let affixes = self.common.seed.affixes(self.namespace, prefix, suffix);
            let found = self
                .common
                .spaces
                .find(self.namespace, prefix, suffix, affixes);
            (affixes, found.unwrap_or(NO_SPACE))
        };
        // Without affixes there is nothing to compare, and nearly all keys are such.
        if prefix.is_empty() && suffix.is_empty() {
            return *self.bare.get_or_insert_with(find);
        }
        match self.last {
            Some((p, s, affixes, space)) if p == prefix && s == suffix => (affixes, space),
            _ => {
                let (affixes, space) = find();
                self.last = Some((prefix, suffix, affixes, space));
                (affixes, space)
            }
        }
    }
}
