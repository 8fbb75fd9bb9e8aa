//! The limits of one message, and how a batch that exceeds them is split into several messages.

use kvpool_types::{Key, KeyRef};
use std::ops::Range;

/// An upper estimate of the bytes of one key's entry besides the key: lengths, versions, checksums and tags.
const ITEM_OVERHEAD: usize = 96;

/// The limits of one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessageLimits {
    /// The most keys of a message; at least 1.
    pub(crate) keys: usize,
    /// The approximate most bytes of a message.
    pub(crate) bytes: usize,
}

impl MessageLimits {
    /// Splits the items into runs, each of which fits one message. `costs` are the bytes of the items. An
    /// item that alone exceeds the limit gets its own run; the receiver decides whether to refuse it.
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

    /// Whether a message that holds `items` items of `bytes` bytes has no room for an item of `cost` bytes.
    #[inline]
    pub(crate) fn is_full(&self, items: usize, bytes: usize, cost: usize) -> bool {
        items > 0 && (items >= self.keys || bytes.saturating_add(cost) > self.bytes)
    }

    /// [`MessageLimits::split`] for items that are only keys.
    pub(crate) fn split_keys(&self, keys: &[Key]) -> Vec<Range<usize>> {
        self.split(keys.iter().map(|key| cost(key.as_ref())))
    }
}

/// An upper estimate of the bytes that one key's whole entry takes in a message.
#[inline]
pub(crate) fn cost(key: KeyRef<'_>) -> usize {
    key.text_len() + ITEM_OVERHEAD
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
            // Each run is full: the first item of the next run would not have fitted.
            for pair in runs.windows(2) {
                let with_next: usize = costs[pair[0].start..=pair[1].start].iter().sum();
                prop_assert!(pair[0].len() == keys || with_next > bytes);
            }
        }
    }
}
