//! Keys packed as the messages to the master carry them.

use crate::batch::{MessageLimits, cost};
use bytes::Bytes;
use kvpool_types::KeyRef;
use kvpool_types::wire::keys::Packer;

/// The most keys that are asked for by one message where several may be asked side by side: enough for
/// a message to cost little, few enough for both ends and several connections to be busy at once.
pub(crate) const RUN_KEYS: usize = 2048;

/// Keys in order, packed for the questions that take them: made by [`crate::Client::packer`]. Who has
/// keys as texts or digests of its own packs them one by one, without an object for each.
#[derive(Debug)]
pub struct PackedKeys {
    limits: MessageLimits,
    full: Vec<PackedRun>,
    open: Packer,
    count: usize,
    bytes: usize,
}

/// The keys of one message.
#[derive(Debug)]
pub(crate) struct PackedRun {
    pub(crate) keys: Bytes,
    pub(crate) count: usize,
    /// What [`cost`] makes of them.
    bytes: usize,
}

impl PackedKeys {
    pub(crate) fn new(limits: MessageLimits) -> Self {
        Self {
            limits,
            full: Vec::new(),
            open: Packer::default(),
            count: 0,
            bytes: 0,
        }
    }

    /// Appends a key.
    #[inline]
    pub fn push(&mut self, key: KeyRef<'_>) {
        let cost = cost(key);
        if self.count >= RUN_KEYS || self.limits.is_full(self.count, self.bytes, cost) {
            self.close();
        }
        self.open.push(key);
        self.count += 1;
        self.bytes = self.bytes.saturating_add(cost);
    }

    /// What goes into a message each, where messages may go side by side.
    pub(crate) fn runs(mut self) -> Vec<PackedRun> {
        if self.count > 0 {
            self.close();
        }
        self.full
    }

    /// What goes into a message each, where one waits for the other: as few as the limits allow.
    pub(crate) fn messages(self) -> Vec<PackedRun> {
        let limits = self.limits;
        let mut runs = self.runs().into_iter().peekable();
        let mut messages = Vec::with_capacity(1);
        while let Some(mut message) = runs.next() {
            let mut joined = Vec::new();
            let fits = |message: &PackedRun, next: &PackedRun| {
                message.count + next.count <= limits.keys
                    && message.bytes.saturating_add(next.bytes) <= limits.bytes
            };
            while let Some(next) = runs.next_if(|next| fits(&message, next)) {
                if joined.is_empty() {
                    joined.extend_from_slice(&message.keys);
                }
                // Packed keys are runs one behind the other: so are those of two batches.
                joined.extend_from_slice(&next.keys);
                message.count += next.count;
                message.bytes += next.bytes;
            }
            if !joined.is_empty() {
                message.keys = joined.into();
            }
            messages.push(message);
        }
        messages
    }

    fn close(&mut self) {
        let open = std::mem::take(&mut self.open);
        self.full.push(PackedRun {
            keys: open.finish().into(),
            count: std::mem::take(&mut self.count),
            bytes: std::mem::take(&mut self.bytes),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Key;
    use kvpool_types::wire::keys::{pack, unpack};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_packed_one_by_one_are_cut_and_packed_as_a_batch_is(
            texts in prop::collection::vec("[a-z]{1,40}", 0..100),
            most in 1usize..20,
            bytes in 1usize..2000,
        ) {
            let limits = MessageLimits { keys: most, bytes };
            let keys: Vec<Key> = texts.iter().map(|text| Key::parse(text).unwrap()).collect();
            let mut packed = PackedKeys::new(limits);
            keys.iter().for_each(|key| packed.push(key.as_ref()));
            let runs: Vec<_> = packed.runs().into_iter().map(|run| (run.keys, run.count)).collect();
            let cut = limits.split_keys(&keys).into_iter();
            let expected: Vec<_> =
                cut.map(|run| (Bytes::from(pack(&keys[run.clone()])), run.len())).collect();
            prop_assert_eq!(runs, expected);
        }
    }

    #[test]
    fn large_batches_go_side_by_side_in_parts_or_one_after_the_other_whole() {
        let keys: Vec<Key> = (0..5000u32)
            .map(|n| Key::parse(&format!("k{n}")).unwrap())
            .collect();
        let packed = |limits| {
            let mut packed = PackedKeys::new(limits);
            keys.iter().for_each(|key| packed.push(key.as_ref()));
            packed
        };
        let counts = |runs: &[PackedRun]| runs.iter().map(|run| run.count).collect::<Vec<_>>();
        let read = |runs: &[PackedRun]| {
            let of_run = |run: &PackedRun| {
                let keys = unpack(&run.keys).map(|key| key.unwrap().to_key());
                keys.collect::<Vec<_>>()
            };
            runs.iter().flat_map(of_run).collect::<Vec<_>>()
        };
        let wide = MessageLimits {
            keys: 1 << 20,
            bytes: 1 << 30,
        };
        let runs = packed(wide).runs();
        assert_eq!(counts(&runs), [2048, 2048, 904]);
        assert_eq!(read(&runs), keys);
        let messages = packed(wide).messages();
        assert_eq!(counts(&messages), [5000]);
        assert_eq!(read(&messages), keys);
        let narrow = MessageLimits { keys: 4500, ..wide };
        let messages = packed(narrow).messages();
        assert_eq!(counts(&messages), [4096, 904]);
        assert_eq!(read(&messages), keys);
        let cost_of_3000 = keys.iter().take(3000).map(|key| cost(key.as_ref())).sum();
        let tight = MessageLimits {
            bytes: cost_of_3000,
            ..wide
        };
        assert_eq!(counts(&packed(tight).messages()), [2048, 2952]);
    }
}
