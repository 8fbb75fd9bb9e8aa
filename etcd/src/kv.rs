//! Reads keys, and changes them in transactions.

use crate::client::{Client, Repeat};
use crate::error::Error;
use crate::generated::{self, compare, request_op, response_op};
use crate::lease::LeaseId;
use bytes::Bytes;
use std::fmt;
use tonic::Response;

/// A point in etcd's history: the number of the transaction that wrote it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub i64);

impl Revision {
    /// The next revision.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A key with its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyValue {
    /// The key.
    pub key: Bytes,
    /// Its value.
    pub value: Bytes,
    /// The revision that created the key, after its last deletion.
    pub created: Revision,
    /// The revision that put the value.
    pub modified: Revision,
    /// The lease whose end deletes the key, if any.
    pub lease: Option<LeaseId>,
}

impl From<generated::KeyValue> for KeyValue {
    fn from(kv: generated::KeyValue) -> Self {
        Self {
            key: kv.key,
            value: kv.value,
            created: Revision(kv.create_revision),
            modified: Revision(kv.mod_revision),
            lease: (kv.lease != 0).then_some(LeaseId(kv.lease)),
        }
    }
}

/// Which keys are read or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    start: Bytes,
    end: Bytes,
    limit: i64,
    keys_only: bool,
}

impl Range {
    /// One key.
    pub fn key(key: impl Into<Bytes>) -> Self {
        Self::of(key.into(), Bytes::new())
    }

    /// All keys that begin with `prefix`.
    pub fn prefix(prefix: impl Into<Bytes>) -> Self {
        let prefix = prefix.into();
        let end = behind(&prefix);
        Self::of(prefix, end)
    }

    /// The keys from `start` up to but not including `end`.
    pub fn between(start: impl Into<Bytes>, end: impl Into<Bytes>) -> Self {
        Self::of(start.into(), end.into())
    }

    fn of(start: Bytes, end: Bytes) -> Self {
        Self {
            start,
            end,
            limit: 0,
            keys_only: false,
        }
    }

    /// Limits the range to its first `limit` keys.
    #[must_use]
    pub fn limit(mut self, limit: u32) -> Self {
        self.limit = limit.into();
        self
    }

    /// Returns the keys without their values.
    #[must_use]
    pub fn keys_only(mut self) -> Self {
        self.keys_only = true;
        self
    }

    /// Whether the range contains a key.
    pub fn contains(&self, key: &[u8]) -> bool {
        match &self.end[..] {
            [] => key == self.start,
            [0] => key >= &self.start[..],
            end => key >= &self.start[..] && key < end,
        }
    }

    pub(crate) fn bounds(&self) -> (Bytes, Bytes) {
        (self.start.clone(), self.end.clone())
    }

    fn request(self) -> generated::RangeRequest {
        generated::RangeRequest {
            key: self.start,
            range_end: self.end,
            limit: self.limit,
            keys_only: self.keys_only,
            ..generated::RangeRequest::default()
        }
    }

    fn deletion(self) -> generated::DeleteRangeRequest {
        generated::DeleteRangeRequest {
            key: self.start,
            range_end: self.end,
        }
    }
}

/// The end of the range of keys that begin with `prefix`. If no key follows them, this is etcd's value for "to the
/// end".
fn behind(prefix: &[u8]) -> Bytes {
    match prefix.iter().rposition(|byte| *byte != u8::MAX) {
        Some(last) => {
            let mut end = prefix[..=last].to_vec();
            end[last] += 1;
            end.into()
        }
        None => Bytes::from_static(&[0]),
    }
}

/// The result of a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranged {
    /// The revision of the store at the read.
    pub revision: Revision,
    /// The keys, in order.
    pub kvs: Vec<KeyValue>,
    /// Whether the limit cut the result short.
    pub more: bool,
}

impl Ranged {
    /// The only key, or the first.
    pub fn first(&self) -> Option<&KeyValue> {
        self.kvs.first()
    }
}

impl From<generated::RangeResponse> for Ranged {
    fn from(answer: generated::RangeResponse) -> Self {
        Self {
            revision: revision(answer.header.as_ref()),
            kvs: answer.kvs.into_iter().map(Into::into).collect(),
            more: answer.more,
        }
    }
}

pub(crate) fn revision(header: Option<&generated::ResponseHeader>) -> Revision {
    Revision(header.map_or(0, |header| header.revision))
}

/// A comparison of a transaction.
#[derive(Clone, Debug)]
pub struct Compare(generated::Compare);

impl Compare {
    /// Whether the key was created at a revision. 0: whether it is absent.
    pub fn created(key: impl Into<Bytes>, revision: Revision) -> Self {
        let operand = compare::Operand::CreateRevision(revision.0);
        Self::of(compare::Target::Create, key.into(), operand)
    }

    /// Whether the key is absent.
    pub fn absent(key: impl Into<Bytes>) -> Self {
        Self::created(key, Revision(0))
    }

    /// Whether the key exists.
    pub fn present(key: impl Into<Bytes>) -> Self {
        let mut compare = Self::absent(key);
        compare.0.result = compare::Result::NotEqual.into();
        compare
    }

    /// Whether the key's value was put at a revision. 0: whether it is absent.
    pub fn modified(key: impl Into<Bytes>, revision: Revision) -> Self {
        let operand = compare::Operand::ModRevision(revision.0);
        Self::of(compare::Target::Mod, key.into(), operand)
    }

    /// Whether the key has a value.
    pub fn value(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        let operand = compare::Operand::Value(value.into());
        Self::of(compare::Target::Value, key.into(), operand)
    }

    fn of(target: compare::Target, key: Bytes, operand: compare::Operand) -> Self {
        Self(generated::Compare {
            result: compare::Result::Equal.into(),
            target: target.into(),
            key,
            operand: Some(operand),
        })
    }
}

/// A step of a transaction.
#[derive(Clone, Debug)]
pub struct Op(generated::RequestOp);

impl Op {
    /// Puts a value.
    pub fn put(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self::put_with(key.into(), value.into(), None)
    }

    /// Puts a value that is deleted when the lease ends.
    pub fn put_leased(key: impl Into<Bytes>, value: impl Into<Bytes>, lease: LeaseId) -> Self {
        Self::put_with(key.into(), value.into(), Some(lease))
    }

    fn put_with(key: Bytes, value: Bytes, lease: Option<LeaseId>) -> Self {
        Self::of(request_op::Request::Put(put_request(key, value, lease)))
    }

    /// Reads.
    pub fn get(range: Range) -> Self {
        Self::of(request_op::Request::Range(range.request()))
    }

    /// Deletes.
    pub fn delete(range: Range) -> Self {
        Self::of(request_op::Request::DeleteRange(range.deletion()))
    }

    fn of(request: request_op::Request) -> Self {
        Self(generated::RequestOp {
            request: Some(request),
        })
    }
}

fn put_request(key: Bytes, value: Bytes, lease: Option<LeaseId>) -> generated::PutRequest {
    generated::PutRequest {
        key,
        value,
        lease: lease.map_or(0, |lease| lease.0),
    }
}

/// A transaction. If all comparisons hold, etcd executes one list of steps, else the other list.
#[derive(Clone, Debug, Default)]
pub struct Txn(generated::TxnRequest);

impl Txn {
    /// A transaction without comparisons and steps.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a comparison.
    #[must_use]
    pub fn when(mut self, compare: Compare) -> Self {
        self.0.compare.push(compare.0);
        self
    }

    /// Adds a step that runs if all comparisons hold.
    #[must_use]
    pub fn then(mut self, op: Op) -> Self {
        self.0.success.push(op.0);
        self
    }

    /// Adds a step that runs if a comparison fails.
    #[must_use]
    pub fn otherwise(mut self, op: Op) -> Self {
        self.0.failure.push(op.0);
        self
    }
}

/// The result of a transaction.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The revision of the store after the transaction. If the transaction changed a key, this is
    /// its own revision.
    pub revision: Revision,
    /// Whether all comparisons held.
    pub succeeded: bool,
    /// The result of each executed step; empty for a step that does not read.
    answers: Vec<Ranged>,
}

impl Outcome {
    /// The result of a read step. Steps of the executed list count from 0.
    pub fn read(&self, step: usize) -> &[KeyValue] {
        self.answers.get(step).map_or(&[], |read| &read.kvs)
    }

    /// The first key that a step read.
    pub fn get(&self, step: usize) -> Option<&KeyValue> {
        self.read(step).first()
    }

    /// Whether a limit cut the result of a step short.
    pub fn more(&self, step: usize) -> bool {
        self.answers.get(step).is_some_and(|read| read.more)
    }
}

impl From<generated::TxnResponse> for Outcome {
    fn from(answer: generated::TxnResponse) -> Self {
        let read = |op: generated::ResponseOp| match op.response {
            Some(response_op::Response::Range(range)) => range.into(),
            _ => Ranged::default(),
        };
        Self {
            revision: revision(answer.header.as_ref()),
            succeeded: answer.succeeded,
            answers: answer.responses.into_iter().map(read).collect(),
        }
    }
}

impl Client {
    /// Reads keys. The result includes the writes of every call that ended earlier.
    pub async fn range(&self, range: Range) -> Result<Ranged, Error> {
        let message = range.request();
        let answer = self
            .call(Repeat::Every, |link| {
                let request = link.request(message.clone());
                async move { link.kv().range(request).await }
            })
            .await?;
        Ok(answer.into_inner().into())
    }

    /// Reads one key.
    pub async fn get(&self, key: impl Into<Bytes>) -> Result<Option<KeyValue>, Error> {
        Ok(self.range(Range::key(key)).await?.kvs.into_iter().next())
    }

    /// Runs a transaction at one endpoint, once. After [`Error::Unavailable`] its outcome is unknown: it may have
    /// run, or may still run.
    pub async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        self.run(txn, Repeat::Once).await
    }

    /// Runs a transaction that is the same done twice as done once, at every endpoint in turn until one
    /// answers.
    pub async fn txn_repeatable(&self, txn: Txn) -> Result<Outcome, Error> {
        self.run(txn, Repeat::Every).await
    }

    async fn run(&self, txn: Txn, repeat: Repeat) -> Result<Outcome, Error> {
        let answer = self
            .call(repeat, |link| {
                let request = link.request(txn.0.clone());
                async move { link.kv().txn(request).await }
            })
            .await?;
        Ok(answer.into_inner().into())
    }

    /// Puts a value, whether the key exists or not. The put may be repeated.
    pub async fn put(
        &self,
        key: impl Into<Bytes>,
        value: impl Into<Bytes>,
        lease: Option<LeaseId>,
    ) -> Result<Revision, Error> {
        let message = put_request(key.into(), value.into(), lease);
        let answer = self
            .call(Repeat::Every, |link| {
                let request = link.request(message.clone());
                async move { link.kv().put(request).await.map(Response::into_inner) }
            })
            .await?;
        Ok(revision(answer.header.as_ref()))
    }

    /// Deletes keys; how many there were. They may be deleted more than once.
    pub async fn delete(&self, range: Range) -> Result<u64, Error> {
        let message = range.deletion();
        let answer = self
            .call(Repeat::Every, |link| {
                let request = link.request(message.clone());
                async move { link.kv().delete_range(request).await }
            })
            .await?;
        Ok(answer.into_inner().deleted.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_behind_all_that_begin_with_it() {
        assert_eq!(behind(b"/a/"), &b"/a0"[..]);
        assert_eq!(behind(b"a\xff\xff"), &b"b"[..]);
        assert_eq!(behind(b"\xff"), &b"\0"[..]);
        assert_eq!(behind(b""), &b"\0"[..]);
    }
}
