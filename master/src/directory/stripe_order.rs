//! The keys of one batch, sorted by stripe.

use super::Directory;
use super::common::Prepared;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use std::cell::Cell;

/// One prepared key of a batch, without the fields that the batch has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Item {
    pub(super) hash: u64,
    /// The key's index in the batch.
    pub(super) index: u32,
    pub(super) affixes: u32,
}

impl Item {
    /// The key as a stripe looks it up.
    #[inline]
    pub(super) fn prepared<'k>(
        &self,
        namespace: NamespaceId,
        keys: &'k KeyBatch<'_>,
    ) -> Prepared<'k> {
        Prepared {
            namespace,
            key: keys
                .get(self.index as usize)
                .expect("invariant: indexes are of this batch"),
            hash: self.hash,
            affixes: self.affixes,
        }
    }
}

/// A thread's memory for sorting batches, which is kept between batches. Otherwise each large batch would
/// take fresh pages from the kernel.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    given: Vec<Item>,
    sorted: Vec<Item>,
    /// The end of each stripe's items.
    ends: Vec<u32>,
    /// The slot found for each sorted item.
    pub(super) slots: Vec<u32>,
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Scratch memory, which returns to its thread on drop.
pub(super) struct Borrowed(Option<Box<Scratch>>);

impl Borrowed {
    pub(super) fn take() -> Self {
        Self(Some(SCRATCH.take().unwrap_or_default()))
    }

    pub(super) fn get(&mut self) -> &mut Scratch {
        self.0
            .as_mut()
            .expect("invariant: it is there until this is dropped")
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        SCRATCH.set(self.0.take());
    }
}

impl Scratch {
    /// Sorts a batch by stripe, each stripe's items from last to first.
    pub(super) fn sort(&mut self, directory: &Directory, items: impl Iterator<Item = Item>) {
        let stripe_of = |item: &Item| directory.common.stripe_of_hash(item.hash);
        self.ends.clear();
        self.ends.resize(directory.stripes.len(), 0);
        self.given.clear();
        for item in items {
            *slot(&mut self.ends, stripe_of(&item)) += 1;
            self.given.push(item);
        }
        // A counting sort: `ends` first holds where each stripe's items begin. Placing the items
        // moves each value to where they end.
        let mut total = 0;
        for end in &mut self.ends {
            total += std::mem::replace(end, total);
        }
        self.sorted.resize(self.given.len(), Item::default());
        for item in self.given.iter().rev() {
            let end = slot(&mut self.ends, stripe_of(item));
            *slot(&mut self.sorted, *end as usize) = *item;
            *end += 1;
        }
    }

    /// Each stripe with items, its items, and the slots found for them.
    pub(super) fn groups(&mut self) -> impl Iterator<Item = (usize, &[Item], &mut [u32])> {
        self.slots.resize(self.sorted.len(), crate::slab::NONE);
        let (mut items, mut slots) = (self.sorted.as_slice(), self.slots.as_mut_slice());
        let mut begin = 0;
        self.ends
            .iter()
            .enumerate()
            .filter_map(move |(stripe, end)| {
                let count = (*end - std::mem::replace(&mut begin, *end)) as usize;
                let (group, others) = items.split_at(count);
                let (found, more) = std::mem::take(&mut slots).split_at_mut(count);
                (items, slots) = (others, more);
                (count > 0).then_some((stripe, group, found))
            })
    }
}

#[inline]
fn slot<T>(items: &mut [T], index: usize) -> &mut T {
    items
        .get_mut(index)
        .expect("invariant: indexes are of this batch")
}
