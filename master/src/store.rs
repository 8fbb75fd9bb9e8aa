//! The master's durable state behind one trait: a log of groups of records, and one snapshot for
//! each shard. A shard is one of the durable parts of the keys.
//!
//! ```text
//!  submissions ─► journal ─► group ─► append ─► callbacks (publish, answer)     in log order
//!                    └─ capture a shard ─► put_snapshot ─► truncate_log         behind them
//!  start:  recover = snapshots + the log after each ─► the directory
//! ```
//!
//! * [`MetadataStore`] is the trait. [`EmbeddedStore`] serves a single master; [`etcd`] serves
//!   several masters and elects one of them, as [`ElectionStore`].
//! * [`record`] is the codec of the stored bytes, which are opaque to a store.
//! * [`journal`] makes groups, appends them and keeps the log short; [`recovery`] reads them.
//! * [`conformance`] is the suite that every store passes.
//!
//! **Architecture Invariant:** a visible block is durable (except for commits under
//! [`journal::Ack::Memory`]), and a position is given to one group only.

pub mod conformance;
mod election;
mod embedded;
mod error;
pub mod etcd;
pub mod journal;
mod log_runs;
pub mod record;
pub mod recovery;

pub use election::{Campaign, Claim, ElectionStore, Groups, Leader, Leaders};
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
use std::time::Duration;

/// The position of a group in the log. The first group has 1; 0 is the position before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogSeq(pub u64);

impl LogSeq {
    /// The next position.
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

/// A shard, counted from 0, or [`ShardIndex::SYSTEM`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardIndex(pub u32);

impl ShardIndex {
    /// The shard of the records without a key: namespaces, segments, dropped incarnations.
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

/// The positions in the log: above `cut`, through `last`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogSpan {
    /// The position through which the log was cut.
    pub cut: LogSeq,
    /// The position of the last durable group.
    pub last: LogSeq,
}

/// Why writes to a store wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stalled {
    /// How long writes have failed without a success in between.
    pub waited: Duration,
    /// Whether the store is full. [`ElectionStore::maintain`] then tries to make space.
    pub no_space: bool,
    /// The store's last error.
    pub reason: String,
}

impl fmt::Display for Stalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.waited.as_secs();
        write!(f, "no write has succeeded for {seconds} s: {}", self.reason)
    }
}

/// For each shard with a snapshot: the snapshot's position and bytes.
pub type SnapshotPositions = BTreeMap<ShardIndex, (LogSeq, u64)>;

/// A shard's contents at one position of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The position through which the snapshot contains the log.
    pub seq: LogSeq,
    /// The chunks, in the order of the put.
    pub chunks: Vec<Bytes>,
}

/// Durable storage of a log and of snapshots, for one writer at a time.
///
/// Every write names the epoch of its term. The store compares it with the stored epoch in the same
/// transaction, so a deposed leader changes nothing. A write is durable when it returns. After
/// [`StoreError::Unavailable`] the outcome of a write is unknown; after any other error nothing was
/// written.
///
/// Groups have consecutive positions, which the same transaction compares. A caller may have
/// several appends in flight; none is applied before its predecessor.
///
/// Values are opaque here. A future may block its thread for the time of a disk flush, also that of
/// another call. So the journal calls the store from its own threads, or from one that is lent to it.
/// Callers on a runtime that serves use a blocking thread, except with a store that never blocks.
#[async_trait]
pub trait MetadataStore: Send + Sync + 'static {
    /// The id of the pool. The first call on a new store stores `fresh` and returns it.
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError>;

    /// The epoch of the latest term; 0 before the first.
    async fn epoch(&self) -> Result<Epoch, StoreError>;

    /// Begins a term: stores and returns an epoch above every earlier one and at least `at_least`.
    /// From then on only writes under this epoch succeed.
    ///
    /// [`StoreError::Fenced`]: this process won an election, but another leader has replaced it,
    /// with an epoch of at least `at_least`. Nothing was changed.
    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError>;

    /// Appends a group at the next position.
    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError>;

    /// Does the work after an append that no caller waits for. The journal calls it after the
    /// callers have their answers.
    fn tidy_after_append(&self) {}

    /// Makes room for the next append of `bytes`, if the store can know its free space.
    async fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        let _any = bytes;
        Ok(())
    }

    /// True while an append waits until the store has space again. Later appends wait behind it.
    fn is_full(&self) -> bool {
        false
    }

    /// Why writes of this process wait; `None` while they do not.
    fn stalled(&self) -> Option<Stalled> {
        None
    }

    /// The positions in the log.
    async fn log_span(&self) -> Result<LogSpan, StoreError>;

    /// The groups after `after` in order: as many as fit into `limit_bytes`, and at least one if
    /// there is one.
    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError>;

    /// Replaces a shard's snapshot by a new one that contains the log through `seq`. A reader or a
    /// crash sees the whole old snapshot or the whole new one. The new one is durable before the
    /// log is cut.
    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        chunks: Vec<Bytes>,
    ) -> Result<(), StoreError>;

    /// A shard's snapshot; `None` without one.
    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError>;

    /// The shards with a snapshot, in order.
    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError>;

    /// For each shard with a snapshot: the snapshot's position and bytes.
    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError>;

    /// Removes the groups through `through`. The caller ensures that every snapshot contains them.
    /// A cut at or before the current cut changes nothing.
    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError>;

    /// The bytes that the store occupies.
    async fn size_on_disk(&self) -> Result<u64, StoreError>;

    /// Closes the store. Later calls fail with [`StoreError::Closed`].
    async fn close(&self) -> Result<(), StoreError>;
}
