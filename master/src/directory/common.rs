//! What the shards of a directory share, and keys made ready to be looked up in one.

use super::entry::MAX_LEASE;
use super::hash::Seed;
use super::lineage::Lineage;
use super::spaces::{NO_SPACE, Spaces};
use super::{BlockId, Policy};
use crate::clock::Millis;
use kvpool_types::KeyRef;
use kvpool_types::ids::NamespaceId;
use parking_lot::Mutex;

/// What the shards of a directory share. Lock order: one shard, then one of these.
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

    pub(super) fn shard_of_hash(&self, hash: u64) -> usize {
        let mask = (1u64 << self.shard_bits) - 1;
        #[allow(
            clippy::cast_possible_truncation,
            reason = "there are at most 2^16 shards"
        )]
        {
            ((hash >> 32) & mask) as usize
        }
    }

    pub(super) fn shard_of(&self, block: BlockId) -> usize {
        (block.0 & ((1 << self.shard_bits) - 1)) as usize
    }

    pub(super) fn slot_of(&self, block: BlockId) -> u32 {
        block.0 >> self.shard_bits
    }
}

/// A key ready to be looked up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prepared<'k> {
    pub(super) namespace: NamespaceId,
    pub(super) key: KeyRef<'k>,
    pub(super) hash: u64,
    /// The hash of a digest's affixes.
    pub(super) affixes: u64,
    /// The space of a digest; [`NO_SPACE`] for strings and where affixes are not interned.
    pub(super) space: u32,
}

/// Makes keys of one namespace ready; remembers the affixes last seen, which most keys of a batch
/// share.
pub(super) struct Preparer<'d, 'k> {
    common: &'d Common,
    namespace: NamespaceId,
    last: Option<(&'k str, &'k str, u64, u32)>,
}

impl<'d, 'k> Preparer<'d, 'k> {
    pub(super) fn new(common: &'d Common, namespace: NamespaceId) -> Self {
        Self {
            common,
            namespace,
            last: None,
        }
    }

    pub(super) fn prepare(&mut self, key: KeyRef<'k>) -> Prepared<'k> {
        let (namespace, seed) = (self.namespace, &self.common.seed);
        match key {
            KeyRef::Text(text) => {
                let hash = seed.text(namespace, text);
                Prepared {
                    namespace,
                    key,
                    hash,
                    affixes: 0,
                    space: NO_SPACE,
                }
            }
            KeyRef::Digest {
                prefix,
                suffix,
                digest,
            } => {
                let (affixes, space) = match self.last {
                    Some((p, s, affixes, space)) if p == prefix && s == suffix => (affixes, space),
                    _ => {
                        let affixes = seed.affixes(namespace, prefix, suffix);
                        let found = self.common.spaces.find(namespace, prefix, suffix, affixes);
                        let space = found.unwrap_or(NO_SPACE);
                        self.last = Some((prefix, suffix, affixes, space));
                        (affixes, space)
                    }
                };
                Prepared {
                    namespace,
                    key,
                    hash: seed.digest(affixes, digest),
                    affixes,
                    space,
                }
            }
        }
    }
}
