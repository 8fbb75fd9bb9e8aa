//! The names of the keys, and the encoding of small values.
//!
//! Numbers in names are hexadecimal with a fixed width, so that etcd's order by name is the order by number.

use crate::store::{LogSeq, ShardIndex, StoreError};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use kvpool_etcd::discover;
use kvpool_etcd::kv::Range;
use kvpool_types::Epoch;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The names of one cluster's keys.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    root: Arc<str>,
}

impl Keys {
    pub(super) fn new(cluster: &str) -> Self {
        Self {
            root: discover::root(cluster).into(),
        }
    }

    pub(super) fn root(&self) -> &str {
        &self.root
    }

    fn name(&self, rest: &str) -> String {
        format!("{}{rest}", self.root)
    }

    pub(super) fn format(&self) -> String {
        self.name("format")
    }

    pub(super) fn cluster_id(&self) -> String {
        self.name("cluster_id")
    }

    pub(super) fn epoch_floor(&self) -> String {
        self.name("epoch_floor")
    }

    pub(super) fn leader(&self) -> String {
        self.name(discover::LEADER)
    }

    /// The key of the present term. It is put together with the leader's key, but not deleted with
    /// it.
    pub(super) fn term(&self) -> String {
        self.name("term")
    }

    pub(super) fn members(&self) -> String {
        self.name(discover::MEMBERS)
    }

    pub(super) fn member(&self, id: &str) -> String {
        format!("{}{id}", self.members())
    }

    pub(super) fn member_id(&self, key: &[u8]) -> Option<String> {
        let id = key.strip_prefix(self.members().as_bytes())?;
        String::from_utf8(id.to_vec()).ok()
    }

    pub(super) fn last(&self) -> String {
        self.name("last")
    }

    pub(super) fn log(&self, seq: LogSeq) -> String {
        format!("{}log/{:016x}", self.root, seq.0)
    }

    /// The log from a position on.
    pub(super) fn log_from(&self, seq: LogSeq) -> Range {
        Range::between(self.log(seq), self.name("log0"))
    }

    /// The log through a position.
    pub(super) fn log_through(&self, seq: LogSeq) -> Range {
        match seq.0.checked_add(1) {
            Some(end) => Range::between(self.log(LogSeq(0)), self.log(LogSeq(end))),
            None => self.log_from(LogSeq(0)),
        }
    }

    pub(super) fn log_seq(&self, key: &[u8]) -> Option<LogSeq> {
        let rest = key.strip_prefix(self.root.as_bytes())?;
        number(rest.strip_prefix(b"log/")?, 16).map(LogSeq)
    }

    /// One piece of a group that is too large for one value.
    pub(super) fn piece(&self, seq: LogSeq, number: u32) -> String {
        format!("{}piece/{:016x}/{number:04x}", self.root, seq.0)
    }

    /// The pieces of the groups through a position.
    pub(super) fn pieces_through(&self, seq: LogSeq) -> Range {
        Range::between(
            self.name("piece/"),
            format!("{}piece/{:016x}0", self.root, seq.0),
        )
    }

    pub(super) fn pointer(&self, shard: ShardIndex) -> String {
        format!("{}snapshot/{:08x}", self.root, shard.0)
    }

    pub(super) fn pointers(&self) -> Range {
        Range::prefix(self.name("snapshot/"))
    }

    pub(super) fn pointer_shard(&self, key: &[u8]) -> Option<ShardIndex> {
        let rest = key.strip_prefix(self.root.as_bytes())?;
        let shard = number(rest.strip_prefix(b"snapshot/")?, 8)?;
        u32::try_from(shard).ok().map(ShardIndex)
    }

    pub(super) fn part(&self, shard: ShardIndex, generation: u64, number: u32) -> String {
        format!(
            "{}part/{:08x}/{generation:016x}/{number:04x}",
            self.root, shard.0
        )
    }

    /// The parts of one snapshot, from number `number` on.
    pub(super) fn parts_from(&self, shard: ShardIndex, generation: u64, number: u32) -> Range {
        Range::between(
            self.part(shard, generation, number),
            self.behind_parts(shard, generation),
        )
    }

    /// The parts of a shard's snapshots of generations before one.
    pub(super) fn parts_before(&self, shard: ShardIndex, generation: u64) -> Range {
        Range::between(
            format!("{}part/{:08x}/", self.root, shard.0),
            self.part(shard, generation, 0),
        )
    }

    /// The ranges of parts that belong to none of the given snapshots. `kept` must be sorted.
    pub(super) fn parts_but(&self, kept: &[(ShardIndex, u64)]) -> Vec<Range> {
        let mut start = self.name("part/");
        let mut ranges = Vec::with_capacity(kept.len() + 1);
        for (shard, generation) in kept {
            ranges.push(Range::between(start, self.part(*shard, *generation, 0)));
            start = self.behind_parts(*shard, *generation);
        }
        ranges.push(Range::between(start, self.name("part0")));
        ranges
    }

    fn behind_parts(&self, shard: ShardIndex, generation: u64) -> String {
        format!("{}part/{:08x}/{generation:016x}0", self.root, shard.0)
    }
}

fn number(text: &[u8], width: usize) -> Option<u64> {
    let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != width || !text.iter().all(is_hex) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()
}

/// A number as a decimal value, so that people can read it.
pub(super) fn decimal(number: u64) -> String {
    number.to_string()
}

/// Reads [`decimal`].
pub(super) fn from_decimal(what: &str, value: &[u8]) -> Result<u64, StoreError> {
    let text = std::str::from_utf8(value).ok();
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| corrupt(what, "is no number"))
}

pub(super) fn corrupt(what: &str, wrong: &str) -> StoreError {
    StoreError::Corrupt {
        reason: format!("{what} {wrong}"),
    }
}

/// The value of a shard's pointer key, which names the parts of its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pointer {
    /// The last position of the log that the snapshot contains.
    pub(super) seq: u64,
    /// The generation of its parts.
    pub(super) generation: u64,
    /// The number of its parts.
    pub(super) parts: u32,
    /// The bytes of all parts.
    pub(super) bytes: u64,
}

impl Pointer {
    pub(super) fn read(shard: ShardIndex, value: &[u8]) -> Result<Self, StoreError> {
        serde_json::from_slice(value).map_err(|e| {
            corrupt(
                &format!("the pointer to the snapshot of {shard}"),
                &e.to_string(),
            )
        })
    }
}

const WHOLE: u8 = 0;
const PIECES: u8 = 1;
const HEAD_BYTES: usize = 1 + 8;

/// The value of a log's key: `u8:form u64:epoch` and then the group, or `u32:pieces` (little-endian).
///
/// The epoch makes the value unique to one leader. A leader that finds the value it tried to put knows that it
/// put the value itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// The group itself.
    Whole(Bytes),
    /// The number of pieces of the group.
    Pieces(u32),
}

impl Entry {
    pub(super) fn write(&self, epoch: Epoch) -> Bytes {
        let (form, body) = match self {
            Self::Whole(group) => (WHOLE, group.clone()),
            Self::Pieces(count) => (PIECES, Bytes::copy_from_slice(&count.to_le_bytes())),
        };
        let mut value = BytesMut::with_capacity(HEAD_BYTES + body.len());
        value.put_u8(form);
        value.put_u64_le(epoch.0);
        value.put(body);
        value.freeze()
    }

    pub(super) fn read(seq: LogSeq, mut value: Bytes) -> Result<(Epoch, Self), StoreError> {
        let wrong = |wrong| corrupt(&format!("group {seq} of the log"), wrong);
        if value.len() < HEAD_BYTES {
            return Err(wrong("is too short"));
        }
        let form = value.get_u8();
        let epoch = Epoch(value.get_u64_le());
        match form {
            WHOLE => Ok((epoch, Self::Whole(value))),
            PIECES if value.len() == 4 => Ok((epoch, Self::Pieces(value.get_u32_le()))),
            _ => Err(wrong("has a form that is not known")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn names_are_in_the_order_of_their_numbers(a: u64, b: u64, shard: u32) {
            let keys = Keys::new("c");
            let (seq_a, seq_b) = (LogSeq(a), LogSeq(b));
            prop_assert_eq!(keys.log(seq_a).cmp(&keys.log(seq_b)), a.cmp(&b));
            prop_assert_eq!(keys.log_seq(keys.log(seq_a).as_bytes()), Some(seq_a));
            let shard = ShardIndex(shard);
            prop_assert_eq!(keys.pointer_shard(keys.pointer(shard).as_bytes()), Some(shard));
            prop_assert_eq!(keys.part(shard, a, 0).cmp(&keys.part(shard, b, 0)), a.cmp(&b));
            prop_assert_eq!(keys.log_seq(keys.pointer(shard).as_bytes()), None);
        }

        #[test]
        fn entries_are_read_as_they_were_written(
            epoch: u64,
            pieces: u32,
            group in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            for entry in [Entry::Whole(group.into()), Entry::Pieces(pieces)] {
                let value = entry.write(Epoch(epoch));
                prop_assert_eq!(Entry::read(LogSeq(1), value).unwrap(), (Epoch(epoch), entry));
            }
        }

        #[test]
        fn no_bytes_make_reading_panic(value in prop::collection::vec(any::<u8>(), 0..40)) {
            let keys = Keys::new("c");
            let _any = Entry::read(LogSeq(1), value.clone().into());
            let _any = Pointer::read(ShardIndex(1), &value);
            let _any = (keys.log_seq(&value), keys.pointer_shard(&value));
        }
    }

    #[test]
    fn ranges_end_where_they_say() {
        let keys = Keys::new("c");
        let in_range = |range: &Range, key: &str| range.contains(key.as_bytes());
        let cut = keys.log_through(LogSeq(0xff));
        assert!(
            in_range(&cut, &keys.log(LogSeq(0xff))) && !in_range(&cut, &keys.log(LogSeq(0x100)))
        );
        let cut = keys.pieces_through(LogSeq(0xff));
        assert!(in_range(&cut, &keys.piece(LogSeq(0xff), u32::MAX)));
        assert!(!in_range(&cut, &keys.piece(LogSeq(0x100), 0)));
        let kept = [(ShardIndex(3), 5), (ShardIndex::SYSTEM, 1)];
        let swept = keys.parts_but(&kept);
        let is_swept = |shard, generation, part| {
            let key = keys.part(ShardIndex(shard), generation, part);
            swept.iter().any(|range| in_range(range, &key))
        };
        assert!(is_swept(2, 5, 0) && is_swept(3, 4, 9) && is_swept(3, 6, 0) && is_swept(9, 1, 1));
        assert!(is_swept(u32::MAX, 0, 0) && is_swept(u32::MAX, 2, 0));
        assert!(!is_swept(3, 5, 0) && !is_swept(3, 5, 0xffff) && !is_swept(u32::MAX, 1, 7));
    }
}
