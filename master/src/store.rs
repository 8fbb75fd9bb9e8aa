//! The master's durable state behind one trait: a log of groups of records, and one snapshot for each shard.
//! A shard is a part of the keys.
//!
//! ```text
//!  submissions ─► journal ─► group ─► append ─► callbacks (publish, answer)     in log order
//!                    └─ capture a shard ─► put_snapshot ─► truncate_log         behind them
//!  start:  recover = snapshots + the log after each ─► the directory
//! ```
//!
//! * [`MetadataStore`] is the trait; [`EmbeddedStore`] the one for a single master, [`etcd`] the one for
//!   several, with what elects one of them.
//! * [`record`] is the codec of what is stored; a store itself sees opaque bytes.
//! * [`journal`] makes groups, appends them and keeps the log short; [`recovery`] reads them back.
//! * [`conformance`] is the suite that every store passes.
//!
//! Architecture invariant: what is visible in the directory is durable (but for commits under
//! [`journal::Ack::Memory`]), and a position is given to one group only.

pub mod conformance;
mod embedded;
mod error;
pub mod etcd;
pub mod journal;
mod log_runs;
pub mod record;
pub mod recovery;

pub use embedded::{EmbeddedOptions, EmbeddedStore, set_aside};
pub use error::{OpenError, StoreError};
pub use etcd::{EtcdOptions, EtcdStore};
pub use journal::{Ack, Journal, JournalError, JournalOptions, SnapshotSource};
pub use log_runs::LogRuns;
pub use record::Record;
pub use recovery::{LogState, Recovered, RecoveryError, Target, recover};

use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::{ClusterId, Epoch};
use std::collections::BTreeMap;
use std::fmt;

/// The position of a group in the log. The first group has 1; 0 stands before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogSeq(pub u64);

impl LogSeq {
    /// The position behind this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for LogSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A shard of the directory, counted from 0, or [`ShardIndex::SYSTEM`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardIndex(pub u32);

impl ShardIndex {
    /// What belongs to no shard of the directory: namespaces, segments, dropped incarnations.
    pub const SYSTEM: Self = Self(u32::MAX);
}

impl fmt::Display for ShardIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::SYSTEM {
            f.write_str("system")
        } else {
            write!(f, "shard {}", self.0)
        }
    }
}

/// The positions that the log holds: above `cut`, through `last`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSpan {
    /// The position through which the log has been cut.
    pub cut: LogSeq,
    /// The position of the last durable group.
    pub last: LogSeq,
}

/// Of each shard that has a snapshot: the position that it contains, and its bytes.
pub type SnapshotPositions = BTreeMap<ShardIndex, (LogSeq, u64)>;

/// A shard's contents at one position of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The last position whose records are contained.
    pub seq: LogSeq,
    /// The chunks, in the order in which they were put.
    pub chunks: Vec<Bytes>,
}

/// Durable storage of a log and of snapshots, for one writer at a time.
///
/// Every write names the epoch of the term it belongs to. It is compared with the stored one in
/// the same transaction, so that a deposed leader changes nothing. Writes are durable when they
/// return. A write that fails with [`StoreError::Unavailable`] may or may not have happened; one
/// that fails otherwise has not.
///
/// Groups have consecutive positions, which the same transaction compares. A caller may have several appends
/// in flight: none is applied before its predecessor.
///
/// Values are opaque here. A future may block its thread for the time of a disk flush. The journal therefore
/// calls the store from threads of its own.
#[async_trait]
pub trait MetadataStore: Send + Sync + 'static {
    /// The id of the pool. The first call on a new store stores `fresh` and answers it.
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError>;

    /// The epoch of the latest term; 0 before the first.
    async fn epoch(&self) -> Result<Epoch, StoreError>;

    /// Begins a term: stores and answers an epoch above every earlier one and not under
    /// `at_least`. From then on only writes under it are taken.
    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError>;

    /// Adds a group at the position behind the last.
    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError>;

    /// Does what no caller of an append has to wait for. The journal calls it once the callers have their answers.
    fn tidy_after_append(&self) {}

    /// Makes sure that the next append of `bytes` finds room, where that can be said beforehand.
    async fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        let _any = bytes;
        Ok(())
    }

    /// Which positions the log holds.
    async fn log_span(&self) -> Result<LogSpan, StoreError>;

    /// The groups behind `after` in order: as many as fit into `limit_bytes`, at least one if
    /// there is any.
    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError>;

    /// Replaces a shard's snapshot by one that contains the log through `seq`. A reader and a crash see the old
    /// or the new one, whole. It is durable when the log is cut.
    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        chunks: Vec<Bytes>,
    ) -> Result<(), StoreError>;

    /// A shard's snapshot, if one was put.
    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError>;

    /// The shards that have a snapshot, in order of their index.
    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError>;

    /// Of each shard that has a snapshot: the position that it contains, and its bytes.
    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError>;

    /// Forgets the groups through `through`. That every snapshot contains them is the caller's
    /// promise. Cutting where the log is cut already does nothing.
    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError>;

    /// The bytes that the store takes where it keeps them.
    async fn size_on_disk(&self) -> Result<u64, StoreError>;

    /// Closes the store. Later calls answer [`StoreError::Closed`].
    async fn close(&self) -> Result<(), StoreError>;
}
