//! What a store offers to several masters that elect a leader among them.

use super::etcd::{LeaseId, Maintained, Usage};
use super::{LogSeq, MetadataStore, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::Epoch;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a master that leads says of itself.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Which life of which master it is: no two have the same.
    pub id: String,
    /// Where it serves the pool, `http://host:port`.
    pub address: String,
    /// Where it serves its metrics and probes.
    pub http_address: String,
}

/// The leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its own description of itself.
    pub claim: Claim,
    /// The epoch of its term.
    pub epoch: Epoch,
    /// The lease that its key is bound to; 0 where a term was begun without one.
    pub lease: LeaseId,
}

/// How a campaign ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Campaign {
    /// A new term has begun, with this epoch.
    Won(Epoch),
    /// Somebody leads.
    Lost(Leader),
}

/// A store that elects the leader: the master whose key exists, as long as the key's lease lives. Only the
/// latest leader writes.
#[async_trait]
pub trait ElectionStore: MetadataStore {
    /// Asks for a lease. It has to be renewed within `ttl`, or else it ends with its keys.
    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId, StoreError>;

    /// Renews a lease once: its time from when the store answered, or `None` if it is gone.
    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>, StoreError>;

    /// Ends a lease and deletes its keys. A lease that is gone already is no error.
    async fn revoke_lease(&self, lease: LeaseId) -> Result<(), StoreError>;

    /// The current leader.
    async fn leader(&self) -> Result<Option<Leader>, StoreError>;

    /// Tries once to become the leader, as long as the lease lives.
    ///
    /// When it is not known whether that worked it is looked up. An error leaves it open: the key may
    /// still be put, and another campaign with this lease then finds that it has won.
    async fn campaign(&self, lease: LeaseId, claim: &Claim) -> Result<Campaign, StoreError>;

    /// Watches the leader.
    async fn leaders(&self) -> Result<Box<dyn Leaders>, StoreError>;

    /// Follows the log behind `after`. The watch fails if a group is cut before it was delivered.
    async fn groups(&self, after: LogSeq) -> Result<Box<dyn Groups>, StoreError>;

    /// Announces a master as long as the lease lives. `member` is JSON with at least an `address`.
    async fn put_member(&self, lease: LeaseId, id: &str, member: Bytes) -> Result<(), StoreError>;

    /// The masters that are announced, by id.
    async fn members(&self) -> Result<Vec<(String, Bytes)>, StoreError>;

    /// Ends a term for this process: pending and later writes of it and of earlier ones answer
    /// [`StoreError::Unavailable`]. A request in flight may still take effect until another term begins.
    fn abandon(&self, epoch: Epoch);

    /// Does the maintenance that is due. The leader calls it every few seconds. A candidate calls it with epoch
    /// 0 when [`StoreError::NoSpace`] keeps it from becoming the leader.
    async fn maintain(&self, epoch: Epoch) -> Result<Maintained, StoreError>;

    /// How much the store holds, and what alarms are up.
    async fn usage(&self) -> Result<Usage, StoreError>;
}

/// The leader as it changes.
#[async_trait]
pub trait Leaders: Send {
    /// The leader: at first the current one, then each change; `None` without a leader. Changes in quick
    /// succession may be reported as one.
    ///
    /// After [`StoreError::Unavailable`] it may be called again and continues from the state of that time. The
    /// future may be dropped while it waits.
    async fn next(&mut self) -> Result<Option<Leader>, StoreError>;
}

/// The groups of the log, in order and without a gap.
#[async_trait]
pub trait Groups: Send {
    /// The next group, once it is durable. The future may be dropped while it waits.
    ///
    /// [`StoreError::OutsideLog`]: it has been cut away, and only snapshots contain it. After
    /// [`StoreError::Unavailable`] this may be called again, and goes on where it was.
    async fn next(&mut self) -> Result<(LogSeq, Bytes), StoreError>;
}
