//! Duplicate keys in a batch. Each distinct key is requested once, and every item gets its own outcome.

use kvpool_seams::maps::{HashMap, MapHasher};
use kvpool_types::Key;

/// The distinct keys of a batch, and the distinct key of each item.
#[derive(Debug)]
pub(crate) struct Distinct {
    /// The first item of each distinct key, in order.
    pub(crate) firsts: Vec<usize>,
    /// For each item, the index of its key in `firsts`.
    pub(crate) of_item: Vec<usize>,
}

impl Distinct {
    pub(crate) fn of<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Self {
        let keys = keys.into_iter();
        let mut seen: HashMap<&Key, usize> =
            HashMap::with_capacity_and_hasher(keys.size_hint().0, MapHasher::default());
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
