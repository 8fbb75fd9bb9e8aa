//! Keys in the encoding of the messages to the master.

use crate::message_limits::{MessageLimits, cost};
use bytes::Bytes;
use kvpool_types::wire::keys::{Packer, pack, unpack};
use kvpool_types::{Key, KeyRef};

/// Keys in order, encoded as messages carry them. [`crate::Client::packer`] makes an empty value. A caller
/// whose keys are texts or digests packs them one by one and needs no [`Key`] for each.
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
        if self.limits.is_full(self.count, self.bytes, cost) {
            self.close();
        }
        self.open.push(key);
        self.count += 1;
        self.bytes = self.bytes.saturating_add(cost);
    }

    /// Splits the keys into runs, one for each message.
    pub(crate) fn runs(mut self) -> Vec<PackedRun> {
        if self.count > 0 {
            self.close();
        }
        self.full
    }

    fn close(&mut self) {
        let open = std::mem::take(&mut self.open);
        self.full.push(PackedRun {
            keys: open.finish().into(),
            count: std::mem::take(&mut self.count),
        });
        self.bytes = 0;
    }
}

/// Encoded keys of a lease. A lease is only sent back, so its keys need not be decoded.
#[derive(Clone, Debug, Default)]
pub(crate) struct Packed {
    bytes: Bytes,
    count: usize,
}

impl Packed {
    /// Selects, from `packed` with `count` keys, the keys at the positions for which `holds` is true.
    pub(crate) fn select(packed: &Bytes, count: usize, holds: impl Fn(usize) -> bool) -> Self {
        if (0..count).all(&holds) {
            return Self {
                bytes: packed.clone(),
                count,
            };
        }
        let mut kept = Packer::default();
        let mut kept_count = 0;
        // This client packed the keys itself, so they can be decoded.
        let keys = unpack(packed).map_while(Result::ok);
        for (_, key) in keys.enumerate().filter(|(at, _)| holds(*at)) {
            kept.push(key);
            kept_count += 1;
        }
        Self {
            bytes: kept.finish().into(),
            count: kept_count,
        }
    }

    /// Encodes keys.
    pub(crate) fn of<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Self {
        let mut count = 0;
        let bytes = pack(keys.into_iter().inspect(|_| count += 1)).into();
        Self { bytes, count }
    }

    /// The decoded keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Key> {
        // This client packed the keys itself, so they can be decoded.
        unpack(&self.bytes)
            .map_while(Result::ok)
            .map(|key| key.to_key())
    }

    /// The keys at the positions for which `holds` is true.
    pub(crate) fn retain(&self, holds: impl Fn(usize) -> bool) -> Self {
        Self::select(&self.bytes, self.count, holds)
    }

    /// The encoded keys.
    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// The number of keys.
    pub(crate) const fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no keys.
    pub(crate) const fn is_empty(&self) -> bool {
        self.count == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Key;
    use kvpool_types::wire::keys::pack;
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
}
