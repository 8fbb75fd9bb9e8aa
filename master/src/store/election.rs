//! The operations of a store that several masters use to elect a leader.

use super::etcd::{LeaseId, Maintained, Usage};
use super::{LogSeq, MetadataStore, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::Epoch;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A candidate's description of itself.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The id of this run of this master. No two runs have the same id.
    pub id: String,
    /// The address at which the master serves the pool, `http://host:port`.
    pub address: String,
    /// The address at which it serves HTTP: metrics and probes.
    pub http_address: String,
}

/// The leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The leader's description of itself.
    pub claim: Claim,
    /// The epoch of its term.
    pub epoch: Epoch,
    /// The lease to which the leader's key is bound; 0 for a term that began without a lease.
    pub lease: LeaseId,
}

/// The outcome of a campaign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Campaign {
    /// A new term has begun, with this epoch.
    Won(Epoch),
    /// Another master leads.
    Lost(Leader),
}

/// A store that elects the leader. The leader is the master whose key exists, and the key exists as long as
/// its lease. Only the latest leader can write.
#[async_trait]
pub trait ElectionStore: MetadataStore {
    /// Requests a lease. The lease expires with its keys unless it is renewed within `ttl`.
    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId, StoreError>;

    /// Renews a lease once. Returns its time from the store's answer, or `None` if the lease is gone.
    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>, StoreError>;

    /// Ends a lease and deletes its keys. Ending a lease that is gone is not an error.
    async fn revoke_lease(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// The current leader.
    async fn leader(&self) -> Result<Option<Leader>, StoreError>;

    /// Tries once to become the leader. The leadership lasts as long as the lease.
    ///
    /// If the outcome is unknown, it is read back. After an error the outcome is still open: the
    /// key may yet be put. Another campaign with this lease then finds that it has won.
    async fn campaign(&self, lease: LeaseId, claim: &Claim) -> Result<Campaign, StoreError>;

    /// Watches the leader.
    async fn leaders(&self) -> Result<Box<dyn Leaders>, StoreError>;

    /// Follows the log after position `after`. The watch fails if a group is cut before it was
    /// delivered.
    async fn groups(&self, after: LogSeq) -> Result<Box<dyn Groups>, StoreError>;

    /// Announces a master as long as the lease lives. `member` is JSON with at least an `address`.
    async fn put_member(&self, lease: LeaseId, id: &str, member: Bytes) -> Result<(), StoreError>;

    /// The masters that are announced, each with its id. The one that was announced last comes last.
    async fn members(&self) -> Result<Vec<(String, Bytes)>, StoreError>;

    /// Ends a term for this process. Pending and later writes of this term and of earlier terms get
    /// [`StoreError::Unavailable`]. A request in flight may still take effect until another term
    /// begins.
    fn abandon(&self, epoch: Epoch);

    /// Does the maintenance that is due. The leader calls this every few seconds. A candidate calls
    /// it with epoch 0 if [`StoreError::NoSpace`] keeps it from becoming the leader.
    async fn maintain(&self, epoch: Epoch) -> Result<Maintained, StoreError>;

    /// The bytes in the store, and its active alarms.
    async fn usage(&self) -> Result<Usage, StoreError>;
}

/// The leader as it changes.
#[async_trait]
pub trait Leaders: Send {
    /// The leader: first the current one, then each change; `None` without a leader. Quick changes
    /// may be reported as one.
    ///
    /// After [`StoreError::Unavailable`] the caller may call this again. It then continues from the
    /// state of that time. The future may be dropped while it waits.
    async fn next(&mut self) -> Result<Option<Leader>, StoreError>;
}

/// The groups of the log, in order and without a gap.
#[async_trait]
pub trait Groups: Send {
    /// The next group, once it is durable. The future may be dropped while it waits.
    ///
    /// [`StoreError::OutsideLog`]: the group has been cut, and only snapshots contain it. After
    /// [`StoreError::Unavailable`] the caller may call this again. It then continues at the same
    /// position.
    async fn next(&mut self) -> Result<(LogSeq, Bytes), StoreError>;
}
