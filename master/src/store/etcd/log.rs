//! The log: a key for each group, and a key with the last position.

use super::keys::{Entry, Keys, corrupt, decimal, from_decimal};
use super::write::{WhenFull, Written, settled};
use super::{EtcdStore, STEP_BYTES};
use crate::store::{LogSeq, LogSpan, StoreError};
use bytes::{Bytes, BytesMut};
use kvpool_etcd::kv::{Compare, KeyValue, Op, Range, Txn};
use kvpool_etcd::{Client, Error};
use kvpool_types::Epoch;

/// The most groups that one transaction deletes.
const CUT_GROUPS: u64 = 1024;
/// The number of groups in one read: while their sizes are not known, and at most. Large groups may
/// follow small ones.
const READ_GROUPS: (u32, u32) = (8, 64);
/// The bytes that one read should return.
const READ_BYTES: u64 = 2 << 20;
/// The most pieces or parts, each of up to [`STEP_BYTES`], in one read.
const READ_PIECES: u32 = 8;

/// The positions that the log holds.
pub(super) async fn span(client: &Client, keys: &Keys) -> Result<LogSpan, StoreError> {
    let read = Txn::new()
        .then(Op::get(Range::key(keys.last())))
        .then(Op::get(keys.log_from(LogSeq(0)).limit(1).keys_only()));
    let read = client.txn_repeatable(read).await?;
    let last = position(read.get(0))?;
    let cut = match read.get(1) {
        Some(first) => LogSeq(seq_of(keys, first)?.0.saturating_sub(1)),
        // A log without groups has been cut through its end.
        None => last,
    };
    Ok(LogSpan { cut, last })
}

/// The value of the key of the last position.
pub(super) fn position(last: Option<&KeyValue>) -> Result<LogSeq, StoreError> {
    let last = last.ok_or_else(|| corrupt("the last position", "is missing"))?;
    from_decimal("the last position", &last.value).map(LogSeq)
}

pub(super) fn seq_of(keys: &Keys, found: &KeyValue) -> Result<LogSeq, StoreError> {
    keys.log_seq(&found.key).ok_or_else(|| {
        corrupt(
            &String::from_utf8_lossy(&found.key),
            "is no name of a group",
        )
    })
}

/// The number of groups, pieces or parts that a read requests. For groups it is estimated from the sizes of earlier
/// groups.
#[derive(Debug)]
pub(super) struct ReadSize(u32);

impl ReadSize {
    pub(super) fn new() -> Self {
        Self(READ_GROUPS.0)
    }

    pub(super) fn of_pieces() -> Self {
        Self(READ_PIECES)
    }

    pub(super) fn count(&self) -> u32 {
        self.0
    }

    pub(super) fn learn(&mut self, read: &[KeyValue]) {
        let bytes: u64 = read.iter().map(|found| found.value.len() as u64).sum();
        let one = bytes / (read.len().max(1) as u64) + 1;
        let fit = u32::try_from(READ_BYTES / one).unwrap_or(READ_GROUPS.1);
        self.0 = fit.clamp(1, READ_GROUPS.1);
    }

    /// Requests fewer after a failed read, whose answer may have been too large for the time limit. Returns false
    /// when the read requested one.
    pub(super) fn shrink(&mut self) -> bool {
        let was = self.0;
        self.0 = (was / 8).max(1);
        was > 1
    }
}

/// The groups behind `after`, as for [`crate::store::MetadataStore::read_log`].
pub(super) async fn read(
    client: &Client,
    keys: &Keys,
    after: LogSeq,
    limit_bytes: u64,
) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
    let mut groups: Vec<(LogSeq, Bytes)> = Vec::new();
    let mut left = limit_bytes;
    let mut size = ReadSize::new();
    let mut next = LogSeq(after.0.saturating_add(1));
    loop {
        let range = keys.log_from(next).limit(size.count());
        let read = match client.range(range).await {
            Err(_) if size.shrink() => continue,
            read => read?,
        };
        size.learn(&read.kvs);
        for found in read.kvs {
            let seq = seq_of(keys, &found)?;
            // A concurrent cut leaves a gap. Another call reads the rest.
            if !groups.is_empty() && seq != next {
                return Ok(groups);
            }
            let Some(group) = group(client, keys, seq, found.value).await? else {
                return Ok(groups);
            };
            let bytes = group.len() as u64;
            if !groups.is_empty() && bytes > left {
                return Ok(groups);
            }
            left = left.saturating_sub(bytes);
            groups.push((seq, group));
            next = LogSeq(seq.0.saturating_add(1));
        }
        if !read.more || left == 0 {
            return Ok(groups);
        }
    }
}

/// The group in a log entry; `None` if it was cut before all of it was read.
pub(super) async fn group(
    client: &Client,
    keys: &Keys,
    seq: LogSeq,
    value: Bytes,
) -> Result<Option<Bytes>, StoreError> {
    let count = match Entry::read(seq, value)? {
        (_, Entry::Whole(group)) => return Ok(Some(group)),
        (_, Entry::Pieces(count)) => count,
    };
    let mut group = BytesMut::new();
    let mut number = 0;
    let mut size = ReadSize::of_pieces();
    while number < count {
        let end = number.saturating_add(size.count()).min(count);
        let range = Range::between(keys.piece(seq, number), keys.piece(seq, end));
        let pieces = match client.range(range).await {
            Err(Error::Unavailable { .. }) if size.shrink() => continue,
            read => read?.kvs,
        };
        if pieces.len() as u64 != u64::from(end - number) {
            // The pieces are deleted together with the group's own key.
            return match client.get(keys.log(seq)).await? {
                None => Ok(None),
                Some(_) => Err(corrupt(&format!("group {seq} of the log"), "lacks a piece")),
            };
        }
        pieces
            .iter()
            .for_each(|piece| group.extend_from_slice(&piece.value));
        number = end;
    }
    Ok(Some(group.freeze()))
}

impl EtcdStore {
    pub(super) async fn append_group(
        &self,
        epoch: Epoch,
        seq: LogSeq,
        group: Bytes,
    ) -> Result<(), StoreError> {
        let term = self.term(epoch).await?;
        let Some(before) = seq.0.checked_sub(1) else {
            let last = span(&self.client, &self.keys).await?.last;
            return Err(StoreError::Gap { asked: seq, last });
        };
        let base = || {
            self.fenced(term)
                .when(Compare::value(self.keys.last(), decimal(before)))
                .otherwise(Op::get(Range::key(self.keys.last())))
        };
        // Pieces that no entry names do no harm. The next write of this position overwrites them, and a cut
        // of the log deletes them.
        let mut pieces = 0;
        if group.len() > STEP_BYTES {
            for piece in group.chunks(STEP_BYTES) {
                let piece = group.slice_ref(piece);
                let bytes = piece.len() as u64;
                let put = base().then(Op::put(self.keys.piece(seq, pieces), piece));
                match self.write(term, put, bytes, WhenFull::Wait).await? {
                    Written::Done => {}
                    Written::Refused(answer) => {
                        let last = position(answer.get(0))?;
                        return Err(StoreError::Gap { asked: seq, last });
                    }
                    Written::Deposed(current, _) => {
                        return Err(StoreError::Fenced {
                            asked: epoch,
                            current,
                        });
                    }
                }
                pieces += 1;
            }
        }
        let entry = match pieces {
            0 => Entry::Whole(group),
            pieces => Entry::Pieces(pieces),
        };
        let value = entry.write(epoch);
        let append = base()
            .then(Op::put(self.keys.log(seq), value.clone()))
            .then(Op::put(self.keys.last(), decimal(seq.0)))
            .otherwise(Op::get(Range::key(self.keys.log(seq))));
        let bytes = value.len() as u64;
        let (answer, otherwise) = match self.write(term, append, bytes, WhenFull::Wait).await? {
            Written::Done => return Ok(()),
            Written::Refused(answer) => {
                let last = position(answer.get(0))?;
                (answer, StoreError::Gap { asked: seq, last })
            }
            Written::Deposed(current, answer) => (
                answer,
                StoreError::Fenced {
                    asked: epoch,
                    current,
                },
            ),
        };
        if !answer.uncertain || position(answer.get(0))? < seq {
            return Err(otherwise);
        }
        // An earlier attempt without an answer may have put this very group.
        match answer.get(1) {
            Some(found) if found.value == value => Ok(()),
            Some(_) => Err(otherwise),
            None => Err(StoreError::Unavailable {
                reason: format!("group {seq} has been cut away before its fate was known"),
            }),
        }
    }

    pub(super) async fn cut(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        let term = self.term(epoch).await?;
        let LogSpan { mut cut, last } = span(&self.client, &self.keys).await?;
        if through > last {
            return Err(StoreError::OutsideLog {
                asked: through,
                cut,
                last,
            });
        }
        while cut < through {
            cut = LogSeq(through.0.min(cut.0.saturating_add(CUT_GROUPS)));
            let step = self
                .fenced(term)
                .then(Op::delete(self.keys.log_through(cut)))
                .then(Op::delete(self.keys.pieces_through(cut)));
            // A deletion needs no space.
            settled(epoch, self.write(term, step, 0, WhenFull::Fail).await?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer has a time limit of a second, and etcd bounds only the number of groups in it.
    #[test]
    fn large_groups_behind_small_ones_fit_one_answer() {
        let mut size = ReadSize::new();
        let of = |bytes| KeyValue {
            value: Bytes::from(vec![0; bytes]),
            ..KeyValue::default()
        };
        size.learn(&[of(100), of(100)]);
        assert!(u64::from(size.count()) * 225_000 < 16 << 20, "{size:?}");
        size.learn(&[of(1 << 20)]);
        assert_eq!(size.count(), 1);
        assert!(!size.shrink());
        size.learn(&[of(100)]);
        assert!(size.shrink() && size.shrink() && !size.shrink());
        assert_eq!(size.count(), 1);
    }
}
