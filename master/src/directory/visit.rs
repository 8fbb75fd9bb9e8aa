//! Lookup of a batch of keys.

use super::Directory;
use super::block::{BlockMut, BlockRef};
use super::cell::Locked;
use super::common::{Prepared, Preparer};
use super::stripe::Stripe;
use super::stripe_order::{Borrowed, Item};
use crate::replica::BlockId;
use crate::slab::NONE;
use kvpool_types::Version;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use smallvec::SmallVec;
use std::ops::Deref;

/// The largest batch that is not sorted: one lock per key costs less than sorting by stripe.
const SMALL: usize = 16;
/// The number of keys looked up together, which locks as many stripes at once. A core can wait for
/// about as many reads at the same time. Every caller locks stripes in the order of their numbers.
const WAVE: usize = 16;

impl Directory {
    /// Passes each key's block, or `None`, with the key's index to `f`, under the lock of its
    /// stripe. Each stripe is locked once, and its keys come from last to first. With few keys each
    /// key locks for itself, and all come from last to first. A repeated key is passed repeatedly.
    pub fn visit<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        mut f: impl FnMut(usize, Option<BlockMut<'_>>),
    ) {
        let keys = keys.into();
        let common = &self.common;
        let mut call = |stripe: &mut Stripe, index, slot| {
            let block = (slot != NONE).then_some(BlockMut {
                common,
                stripe,
                slot,
            });
            f(index, block);
        };
        if keys.len() <= SMALL {
            self.one_by_one(namespace, &keys, |stripe, index, key| {
                let slot = stripe.find(key).unwrap_or(NONE);
                call(stripe, index, slot);
            });
            return;
        }
        let mut scratch = Borrowed::take();
        let scratch = scratch.get();
        scratch.sort(self, self.items(namespace, &keys));
        let mut groups = scratch.groups().peekable();
        let mut wave = SmallVec::<[_; WAVE]>::new();
        while groups.peek().is_some() {
            let mut count = 0;
            while count < WAVE
                && let Some((stripe, group, slots)) = groups.next()
            {
                count += group.len();
                wave.push((self.lock(stripe), group, slots));
            }
            look_up(namespace, &keys, &mut wave);
            for (stripe, _, slots) in &wave {
                prefetch_neighbours(stripe, slots);
            }
            for (stripe, group, slots) in &mut wave {
                for (item, slot) in group.iter().zip(slots.iter()) {
                    call(stripe, item.index as usize, *slot);
                }
            }
            wave.clear();
        }
    }

    /// Passes the block in a slot to `f`, if it has this version.
    pub fn read_block<R>(
        &self,
        id: BlockId,
        version: Version,
        f: impl FnOnce(BlockRef<'_>) -> R,
    ) -> Option<R> {
        let (stripe, slot) = self.lock_block(id)?;
        let block = BlockRef {
            common: &self.common,
            stripe: &stripe,
            slot,
        };
        (block.version() == version).then(|| f(block))
    }

    /// The version of the block in a slot.
    pub fn version_of(&self, id: BlockId) -> Option<Version> {
        let (stripe, slot) = self.lock_block(id)?;
        Some(stripe.entries.rest(slot).version)
    }

    /// Counts the leading blocks of a chain that are present and `wanted`, and passes only these to
    /// `f`, as [`Directory::visit`] does. A block that leaves after it was found ends the chain
    /// there. Some blocks behind it may have been passed already.
    pub fn visit_leading<'k>(
        &self,
        namespace: NamespaceId,
        chain: impl Into<KeyBatch<'k>>,
        wanted: impl Fn(&BlockRef<'_>) -> bool,
        mut f: impl FnMut(usize, BlockMut<'_>),
    ) -> usize {
        let keys = chain.into();
        let common = &self.common;
        let is_wanted = |stripe: &Stripe, slot| {
            let block = BlockRef {
                common,
                stripe,
                slot,
            };
            slot != NONE && wanted(&block)
        };
        let mut scratch = Borrowed::take();
        let scratch = scratch.get();
        scratch.sort(self, self.items(namespace, &keys));
        let mut found = keys.len();
        for (stripe, group, slots) in scratch.groups() {
            // This lookup changes nothing, so the gauges need no update.
            let mut looked = [(self.cell(stripe).lock_read(), group, slots)];
            look_up(namespace, &keys, &mut looked);
            let [(stripe, group, slots)] = looked;
            for (item, slot) in group.iter().zip(slots) {
                if !is_wanted(&stripe, *slot) {
                    found = found.min(item.index as usize);
                }
            }
        }
        let mut leading = found;
        for (stripe, group, slots) in scratch.groups() {
            let index = |item: &Item| item.index as usize;
            // Items come from last to first, so the items beyond the leading blocks come first.
            let beyond = group.partition_point(|item| index(item) >= found);
            let (Some(group), Some(slots)) = (group.get(beyond..), slots.get_mut(beyond..)) else {
                continue;
            };
            if group.is_empty() {
                continue;
            }
            let mut stripe = self.lock(stripe);
            let stripe: &mut Stripe = &mut stripe;
            // The first pass found where the blocks were. Blocks that have moved since are looked up again.
            for (item, slot) in group.iter().zip(slots.iter_mut()) {
                let key = item.prepared(namespace, &keys);
                if !stripe.is(*slot, &key) {
                    *slot = stripe.find(&key).unwrap_or(NONE);
                }
            }
            prefetch_neighbours(stripe, slots);
            for (item, slot) in group.iter().zip(slots) {
                if is_wanted(stripe, *slot) {
                    let block = BlockMut {
                        common,
                        stripe,
                        slot: *slot,
                    };
                    f(index(item), block);
                } else {
                    leading = leading.min(index(item));
                }
            }
        }
        leading
    }

    /// Calls `f` with the locked stripe of each key.
    pub(super) fn each<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        mut f: impl FnMut(&mut Locked<'_>, usize, &Prepared<'_>),
    ) {
        let keys = keys.into();
        if keys.len() <= SMALL {
            self.one_by_one(namespace, &keys, f);
            return;
        }
        let mut scratch = Borrowed::take();
        let scratch = scratch.get();
        scratch.sort(self, self.items(namespace, &keys));
        for (stripe, group, _) in scratch.groups() {
            let mut stripe = self.lock(stripe);
            for item in group {
                let key = item.prepared(namespace, &keys);
                f(&mut stripe, item.index as usize, &key);
            }
        }
    }

    /// Calls `f` with the stripe of each key, locked for this key alone, from last to first.
    fn one_by_one(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        mut f: impl FnMut(&mut Locked<'_>, usize, &Prepared<'_>),
    ) {
        let mut preparer = Preparer::new(&self.common, namespace);
        for (index, key) in keys.iter().enumerate().rev() {
            let key = preparer.prepare(key);
            let stripe = self.common.stripe_of_hash(key.hash);
            f(&mut self.lock(stripe), index, &key);
        }
    }

    fn items<'a>(
        &'a self,
        namespace: NamespaceId,
        keys: &'a KeyBatch<'_>,
    ) -> impl Iterator<Item = Item> + 'a {
        let mut preparer = Preparer::new(&self.common, namespace);
        (0u32..).zip(keys.iter()).map(move |(index, key)| {
            let Prepared { hash, affixes, .. } = preparer.prepare(key);
            Item {
                hash,
                index,
                affixes,
            }
        })
    }
}

/// Finds the slots of keys in some locked stripes, [`NONE`] for absent keys.
///
/// In a large pool nearly every lookup reads memory that no cache holds. So the function first asks
/// the index for all keys, then reads every block once to prefetch it, and only then compares. The
/// waits for memory overlap; key by key they would add up.
#[inline]
fn look_up<S: Deref<Target = Stripe>>(
    namespace: NamespaceId,
    keys: &KeyBatch<'_>,
    wave: &mut [(S, &[Item], &mut [u32])],
) {
    for (stripe, group, slots) in wave.iter_mut() {
        for (item, slot) in group.iter().zip(slots.iter_mut()) {
            *slot = stripe.candidate(item.hash).unwrap_or(NONE);
        }
    }
    let mut read = 0;
    for (stripe, _, slots) in wave.iter() {
        read = slots
            .iter()
            .fold(read, |read, slot| read ^ stripe.entries.read(*slot));
    }
    std::hint::black_box(read);
    for (stripe, group, slots) in wave.iter_mut() {
        for (item, slot) in group.iter().zip(slots.iter_mut()) {
            let key = item.prepared(namespace, keys);
            // The first candidate of the index is nearly always the block, or the block is absent.
            if *slot != NONE && !stripe.is(*slot, &key) {
                *slot = stripe.find(&key).unwrap_or(NONE);
            }
        }
    }
}

/// Prefetches the links beside those of each slot, for the moves in the list that follow.
#[inline]
fn prefetch_neighbours(stripe: &Stripe, slots: &[u32]) {
    let mut seen = 0;
    for slot in slots.iter().filter(|slot| **slot != NONE) {
        let links = stripe.entries.links(*slot);
        for neighbour in [links.prev, links.next] {
            if neighbour != NONE {
                seen ^= stripe.entries.links(neighbour).next;
            }
        }
    }
    std::hint::black_box(seen);
}
