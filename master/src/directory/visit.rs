//! Looking up a batch of keys.

use super::Directory;
use super::block::{BlockMut, BlockRef};
use super::cell::Locked;
use super::common::{Prepared, Preparer};
use super::stripe::Stripe;
use super::stripe_order::{Borrowed, Item};
use crate::slab::NONE;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use smallvec::SmallVec;
use std::ops::Deref;

/// Up to here locking a stripe for each key costs less than sorting the keys by stripe.
const SMALL: usize = 16;
/// So many keys are looked up together, though that takes the locks of as many stripes at a time: about
/// as many reads as a core waits for at once. Stripes are locked in the order of their numbers, by
/// everyone who locks several.
const WAVE: usize = 16;

impl Directory {
    /// Hands each key's block, or `None`, with the key's index to `f`, under the lock of its stripe.
    /// Each stripe is locked once, and its keys come from last to first; with few keys, each locks
    /// for itself, and all come from last to first. A key that comes twice is handed over twice.
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
                look_at_neighbours(stripe, slots);
            }
            for (stripe, group, slots) in &mut wave {
                for (item, slot) in group.iter().zip(slots.iter()) {
                    call(stripe, item.index as usize, *slot);
                }
            }
            wave.clear();
        }
    }

    /// Finds how many leading blocks of a chain are there and are `wanted`, and hands these, and no
    /// others, to `f`, as [`Directory::visit`] does. A block that goes, or is no longer wanted, after
    /// it was found ends the chain where it was, though some behind it may have been handed over.
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
            // Nothing is changed here, so the stripe's gauges need not be brought up to date.
            let mut looked = [(self.cell(stripe).lock_to_look(), group, slots)];
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
            // From last to first: what is beyond the leading blocks comes before all that is not.
            let beyond = group.partition_point(|item| index(item) >= found);
            let (Some(group), Some(slots)) = (group.get(beyond..), slots.get_mut(beyond..)) else {
                continue;
            };
            if group.is_empty() {
                continue;
            }
            let mut stripe = self.lock(stripe);
            let stripe: &mut Stripe = &mut stripe;
            // The look before says where the blocks were. Those that have moved are looked up again.
            for (item, slot) in group.iter().zip(slots.iter_mut()) {
                let key = item.prepared(namespace, &keys);
                if !stripe.is(*slot, &key) {
                    *slot = stripe.find(&key).unwrap_or(NONE);
                }
            }
            look_at_neighbours(stripe, slots);
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

    /// Calls `f` with each key's stripe, locked.
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

    /// Calls `f` with each key's stripe, locked for this key alone, from last to first.
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

/// Finds the slots of the blocks of the keys of some stripes, [`NONE`] for those that are not there.
///
/// In a large pool nearly every look is at memory that no cache holds. The index is asked for all
/// keys before any block is looked at, and every block is read, for nothing but to have it in the
/// processor's caches, before any is compared: so many waits overlap. One key after the other, each
/// would be waited out alone.
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
            // What the index names first is nearly always the block, or there is none.
            if *slot != NONE && !stripe.is(*slot, &key) {
                *slot = stripe.find(&key).unwrap_or(NONE);
            }
        }
    }
}

/// Reads the links beside those of each slot, for nothing but to have them in the processor's caches
/// when the blocks are moved in the list.
#[inline]
fn look_at_neighbours(stripe: &Stripe, slots: &[u32]) {
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
