//! Batches: cutting what is too large for one message, and serving duplicates once.

use hashbrown::HashMap;
use kvpool_types::{Key, KeyRef};
use std::ops::Range;

/// The bytes that one key takes in a message beside its own: its share of lengths, versions,
/// checksums and tags, taken generously.
const ITEM_OVERHEAD: usize = 96;

/// The limits of one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessageLimits {
    /// The most keys; at least 1.
    pub(crate) keys: usize,
    /// About the most bytes.
    pub(crate) bytes: usize,
}

impl MessageLimits {
    /// Cuts `costs.len()` items into runs that fit a message each. An item over the limit by itself
    /// still gets a run of its own: refusing it is the receiver's word.
    pub(crate) fn split(&self, costs: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
        let mut runs = Vec::new();
        let mut open = 0..0;
        let mut bytes = 0usize;
        for cost in costs {
            if self.is_full(open.len(), bytes, cost) {
                runs.push(open.clone());
                open = open.end..open.end;
                bytes = 0;
            }
            open.end += 1;
            bytes = bytes.saturating_add(cost);
        }
        if !open.is_empty() {
            runs.push(open);
        }
        runs
    }

    /// Whether a message with so many items of so many bytes takes no item of such a cost.
    #[inline]
    pub(crate) fn is_full(&self, items: usize, bytes: usize, cost: usize) -> bool {
        items > 0 && (items >= self.keys || bytes.saturating_add(cost) > self.bytes)
    }

    /// The same for plain keys.
    pub(crate) fn split_keys(&self, keys: &[Key]) -> Vec<Range<usize>> {
        self.split(keys.iter().map(|key| cost(key.as_ref())))
    }
}

/// About the bytes that one key takes in a message, all that goes with it included.
#[inline]
pub(crate) fn cost(key: KeyRef<'_>) -> usize {
    key.text_len() + ITEM_OVERHEAD
}

/// The distinct keys of a batch, and which of them each item means.
#[derive(Debug)]
pub(crate) struct Distinct {
    /// The first item of each distinct key, in order.
    pub(crate) firsts: Vec<usize>,
    /// For each item, the position in `firsts` of its key.
    pub(crate) of_item: Vec<usize>,
}

impl Distinct {
    /// Finds the distinct ones of `keys`.
    pub(crate) fn of<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Self {
        let keys = keys.into_iter();
        let mut seen: HashMap<&Key, usize> = HashMap::with_capacity(keys.size_hint().0);
        let mut firsts = Vec::with_capacity(keys.size_hint().0);
        let mut of_item = Vec::with_capacity(keys.size_hint().0);
        for (item, key) in keys.enumerate() {
            of_item.push(*seen.entry(key).or_insert_with(|| {
                firsts.push(item);
                firsts.len() - 1
            }));
        }
        Self { firsts, of_item }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_cover_all_items_in_order_and_fit(
            costs in prop::collection::vec(1usize..200, 0..300),
            keys in 1usize..40,
            bytes in 1usize..2000,
        ) {
            let limits = MessageLimits { keys, bytes };
            let runs = limits.split(costs.iter().copied());
            let mut next = 0;
            for run in &runs {
                prop_assert_eq!(run.start, next);
                prop_assert!(!run.is_empty() && run.len() <= keys);
                let sum: usize = costs[run.clone()].iter().sum();
                prop_assert!(sum <= bytes || run.len() == 1);
                next = run.end;
            }
            prop_assert_eq!(next, costs.len());
            // No run could have taken the first item of the next one.
            for pair in runs.windows(2) {
                let with_next: usize = costs[pair[0].start..=pair[1].start].iter().sum();
                prop_assert!(pair[0].len() == keys || with_next > bytes);
            }
        }

        #[test]
        fn every_item_means_the_first_one_of_its_key(names in prop::collection::vec(0u8..20, 0..100)) {
            let keys: Vec<Key> = names.iter().map(|n| Key::parse(&format!("k{n}")).unwrap()).collect();
            let distinct = Distinct::of(&keys);
            prop_assert_eq!(distinct.of_item.len(), keys.len());
            for (item, slot) in distinct.of_item.iter().enumerate() {
                let first = distinct.firsts[*slot];
                prop_assert_eq!(&keys[first], &keys[item]);
                prop_assert_eq!(keys.iter().position(|key| key == &keys[item]), Some(first));
            }
        }
    }
}
