//! Looking up a batch of keys.

use super::Directory;
use super::block::BlockMut;
use super::cell::Locked;
use super::common::{Prepared, Preparer};
use kvpool_types::KeyRef;
use kvpool_types::ids::NamespaceId;

/// Up to here locking a shard for each key costs less than sorting the keys by shard.
const SMALL: usize = 64;

impl Directory {
    /// Hands each key's block, or `None`, with the key's index to `f`, under the lock of its shard.
    /// Each shard is locked once, and its keys come from last to first; with few keys, each locks
    /// for itself, and all come from last to first. A key that comes twice is handed over twice.
    pub fn visit(
        &self,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        mut f: impl FnMut(usize, Option<BlockMut<'_>>),
    ) {
        let mut call = |shard: &mut Locked<'_>, index, slot| match slot {
            Some(slot) => f(
                index,
                Some(BlockMut {
                    common: &self.common,
                    shard,
                    slot,
                }),
            ),
            None => f(index, None),
        };
        let mut preparer = Preparer::new(&self.common, namespace);
        if keys.len() <= SMALL {
            for (index, key) in keys.iter().enumerate().rev() {
                let key = preparer.prepare(*key);
                let mut shard = self.lock(self.common.shard_of_hash(key.hash));
                let slot = shard.find(&key);
                call(&mut shard, index, slot);
            }
            return;
        }
        let prepared: Vec<Prepared<'_>> = keys.iter().map(|key| preparer.prepare(*key)).collect();
        let mut slots = Vec::new();
        self.grouped(
            prepared.len(),
            |index| self.common.shard_of_hash(at(&prepared, index).hash),
            |shard, group| {
                // In a large pool nearly every look is at memory that no cache holds. All keys of a
                // shard are looked up first, and their neighbours in the list looked at, so that
                // these waits overlap; one key after the other, each would be waited out alone.
                slots.clear();
                slots.extend(group.iter().map(|index| shard.find(at(&prepared, *index))));
                shard.look_at_neighbours(&slots);
                for (index, slot) in group.iter().zip(&slots) {
                    call(shard, *index, *slot);
                }
            },
        );
    }

    /// Calls `f` with each key's shard, locked.
    pub(super) fn each<'k>(
        &self,
        namespace: NamespaceId,
        keys: &[KeyRef<'k>],
        mut f: impl FnMut(&mut Locked<'_>, usize, &Prepared<'k>),
    ) {
        let mut preparer = Preparer::new(&self.common, namespace);
        if keys.len() <= SMALL {
            for (index, key) in keys.iter().enumerate().rev() {
                let key = preparer.prepare(*key);
                let shard = self.common.shard_of_hash(key.hash);
                f(&mut self.lock(shard), index, &key);
            }
            return;
        }
        let prepared: Vec<Prepared<'k>> = keys.iter().map(|key| preparer.prepare(*key)).collect();
        let shard_of = |key: &Prepared<'_>| self.common.shard_of_hash(key.hash);
        self.grouped(
            prepared.len(),
            |index| shard_of(at(&prepared, index)),
            |shard, group| {
                for index in group {
                    f(shard, *index, at(&prepared, *index));
                }
            },
        );
    }

    /// Calls `f` with each shard, locked once, and those of `count` indexes that belong to it, from
    /// last to first.
    pub(super) fn grouped(
        &self,
        count: usize,
        shard_of: impl Fn(usize) -> usize,
        mut f: impl FnMut(&mut Locked<'_>, &[usize]),
    ) {
        // A counting sort: `ends` holds where each shard's indexes end, and moves down to where they
        // begin while they are put in place.
        let mut ends = vec![0usize; self.shards.len()];
        for index in 0..count {
            *slot(&mut ends, shard_of(index)) += 1;
        }
        let mut total = 0;
        for end in &mut ends {
            total += *end;
            *end = total;
        }
        let mut order = vec![0usize; count];
        for index in 0..count {
            let end = slot(&mut ends, shard_of(index));
            *end -= 1;
            *slot(&mut order, *end) = index;
        }
        let mut rest = order.as_slice();
        while let Some(first) = rest.first() {
            let shard = shard_of(*first);
            let run = rest
                .iter()
                .take_while(|index| shard_of(**index) == shard)
                .count();
            let (group, others) = rest.split_at(run);
            f(&mut self.lock(shard), group);
            rest = others;
        }
    }
}

fn at<T>(items: &[T], index: usize) -> &T {
    items
        .get(index)
        .expect("invariant: indexes are of this batch")
}

fn slot(items: &mut [usize], index: usize) -> &mut usize {
    items
        .get_mut(index)
        .expect("invariant: indexes are of this batch")
}
