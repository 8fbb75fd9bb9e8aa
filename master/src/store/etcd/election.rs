//! The election: leases, the leader's key, and the members.

use super::keys::{Keys, corrupt, decimal};
use super::write::{Term, epoch_of, floor};
use super::{BACKOFF, EtcdStore, LeaseId, Maintained, Revision, Usage};
use crate::store::election::{Campaign, Claim, ElectionStore, Groups, Leader, Leaders};
use crate::store::{LogSeq, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_etcd::kv::{Compare, KeyValue, Op, Range, Txn};
use kvpool_etcd::watch::{Watch, WatchOptions};
use kvpool_etcd::{Client, Error};
use kvpool_types::Epoch;
use std::time::Duration;
use tokio::time::Instant;

/// By how much a lease may be longer than requested. etcd counts whole seconds.
const TTL_SLACK: Duration = Duration::from_secs(1);
/// How long a candidate reads back the outcome of its claim, in request timeouts.
const READ_BACK: u32 = 4;

/// A term that this process began, and its candidate.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    pub(super) term: Term,
    /// The candidate; `None` for a term without an election.
    candidate: Option<(LeaseId, Claim)>,
}

/// The leader of a term without an election.
fn nobody() -> Claim {
    Claim {
        id: String::new(),
        address: String::new(),
        http_address: String::new(),
    }
}

fn read_leader(found: &KeyValue, floor: u64) -> Result<Leader, StoreError> {
    Ok(Leader {
        claim: serde_json::from_slice(&found.value)
            .map_err(|e| corrupt("the leader's key", &e.to_string()))?,
        epoch: epoch_of(floor, found.created),
        lease: found.lease.unwrap_or(LeaseId(0)),
    })
}

async fn find_leader(
    client: &Client,
    keys: &Keys,
) -> Result<(Revision, Option<Leader>), StoreError> {
    let read = Txn::new()
        .then(Op::get(Range::key(keys.leader())))
        .then(Op::get(Range::key(keys.epoch_floor())));
    let read = client.txn_repeatable(read).await?;
    let floor = floor(read.get(1))?;
    let leader = read.get(0).map(|found| read_leader(found, floor));
    Ok((read.revision, leader.transpose()?))
}

#[async_trait]
impl ElectionStore for EtcdStore {
    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
        self.check_open()?;
        let granted = self.client.lease_grant(ttl).await?;
        if granted.ttl < ttl || granted.ttl > ttl + TTL_SLACK {
            let _runs_out = self.client.lease_revoke(granted.id).await;
            return Err(StoreError::LeaseTtl {
                asked: ttl,
                granted: granted.ttl,
            });
        }
        Ok(granted.id)
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>, StoreError> {
        self.check_open()?;
        Ok(self.client.lease_keep_alive(lease).await?)
    }

    async fn revoke_lease(&self, lease: LeaseId) -> Result<(), StoreError> {
        match self.client.lease_revoke(lease).await {
            Ok(()) | Err(Error::LeaseNotFound) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        self.check_open()?;
        Ok(find_leader(&self.client, &self.keys).await?.1)
    }

    async fn campaign(&self, lease: LeaseId, claim: &Claim) -> Result<Campaign, StoreError> {
        self.check_open()?;
        let value = claim_value(claim)?;
        let txn = self
            .claim(value, Some(lease))
            .otherwise(Op::get(Range::key(self.keys.leader())))
            .otherwise(Op::get(Range::key(self.keys.epoch_floor())));
        let (epoch, created) = match self.client.txn(txn).await {
            Ok(outcome) if outcome.succeeded => {
                let floor = floor(outcome.get(2))?;
                (epoch_of(floor, outcome.revision), outcome.revision)
            }
            Ok(outcome) => {
                let found = outcome.get(0);
                let found = found.ok_or_else(|| corrupt("the leader's key", "is and is not"))?;
                let leader = read_leader(found, floor(outcome.get(1))?)?;
                if !is_ours(&leader, lease, claim) {
                    return Ok(Campaign::Lost(leader));
                }
                (leader.epoch, found.created)
            }
            Err(error @ Error::Unavailable { .. }) => {
                return self.read_back(lease, claim, error).await;
            }
            Err(error) => return Err(error.into()),
        };
        self.stand(epoch, created, Some((lease, claim.clone())));
        Ok(Campaign::Won(epoch))
    }

    async fn put_member(&self, lease: LeaseId, id: &str, member: Bytes) -> Result<(), StoreError> {
        self.check_open()?;
        let key = self.keys.member(id);
        self.client.put(key, member, Some(lease)).await?;
        Ok(())
    }

    async fn members(&self) -> Result<Vec<(String, Bytes)>, StoreError> {
        self.check_open()?;
        let found = self
            .client
            .range(Range::prefix(self.keys.members()))
            .await?;
        let mut found = found.kvs;
        found.sort_by_key(|member| member.modified);
        let member = |found: KeyValue| Some((self.keys.member_id(&found.key)?, found.value));
        Ok(found.into_iter().filter_map(member).collect())
    }

    async fn leaders(&self) -> Result<Box<dyn Leaders>, StoreError> {
        Ok(Box::new(self.watch_leader().await?))
    }

    async fn groups(&self, after: LogSeq) -> Result<Box<dyn Groups>, StoreError> {
        Ok(Box::new(self.follow(after).await?))
    }

    fn abandon(&self, epoch: Epoch) {
        self.abandon(epoch);
    }

    async fn maintain(&self, epoch: Epoch) -> Result<Maintained, StoreError> {
        self.maintain(epoch).await
    }

    async fn usage(&self) -> Result<Usage, StoreError> {
        self.usage().await
    }
}

#[async_trait]
impl Leaders for LeaderWatch {
    async fn next(&mut self) -> Result<Option<Leader>, StoreError> {
        self.next().await
    }
}

impl EtcdStore {
    /// Reads back the outcome of a claim.
    async fn read_back(
        &self,
        lease: LeaseId,
        claim: &Claim,
        mut error: Error,
    ) -> Result<Campaign, StoreError> {
        let limit = Instant::now() + self.options.request_timeout * READ_BACK;
        let mut pause = BACKOFF.0;
        while Instant::now() < limit {
            match self.client.get(self.keys.leader()).await {
                Ok(None) => break,
                Ok(Some(found)) => {
                    let read = self.client.get(self.keys.epoch_floor()).await;
                    let floor = floor(read?.as_ref())?;
                    let leader = read_leader(&found, floor)?;
                    if !is_ours(&leader, lease, claim) {
                        return Ok(Campaign::Lost(leader));
                    }
                    self.stand(leader.epoch, found.created, Some((lease, claim.clone())));
                    return Ok(Campaign::Won(leader.epoch));
                }
                Err(later) => error = later,
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
        Err(error.into())
    }

    /// The transaction that begins a term if there is no leader. Its third step reads the epoch floor.
    fn claim(&self, value: Bytes, lease: Option<LeaseId>) -> Txn {
        let key = self.keys.leader();
        let put = match lease {
            Some(lease) => Op::put_leased(key.clone(), value, lease),
            None => Op::put(key.clone(), value),
        };
        Txn::new()
            .when(Compare::absent(key))
            .then(put)
            .then(Op::put(self.keys.term(), ""))
            .then(Op::get(Range::key(self.keys.epoch_floor())))
    }

    fn stand(&self, epoch: Epoch, created: Revision, candidate: Option<(LeaseId, Claim)>) {
        let term = Term { epoch, created };
        *self.standing.lock() = Some(Standing { term, candidate });
    }

    /// Begins a term with an epoch of at least `at_least`, whichever master leads. If this process
    /// won an election before, the leader's key still names its candidate. Otherwise the key is
    /// bound to no lease. The election then has no winner until another call of this function.
    ///
    /// [`StoreError::Fenced`]: another candidate has won since, with an epoch of at least
    /// `at_least`. Its term continues.
    pub(super) async fn take_over(&self, at_least: Epoch) -> Result<Epoch, StoreError> {
        self.check_open()?;
        let standing = self.standing.lock().clone();
        let candidate = standing.as_ref().and_then(|s| s.candidate.clone());
        let (lease, value) = match &candidate {
            Some((lease, claim)) => (Some(*lease), claim_value(claim)?),
            None => (None, claim_value(&nobody())?),
        };
        let limit = Instant::now() + self.options.connect_timeout;
        loop {
            let begun = self.try_take_over(at_least, standing.as_ref(), lease, &value);
            let error = match begun.await {
                Ok(Some((epoch, created))) => {
                    self.stand(epoch, created, candidate);
                    return Ok(epoch);
                }
                // Another candidate won in between.
                Ok(None) => continue,
                Err(error) => error,
            };
            if !error.is_retryable() || Instant::now() > limit {
                return Err(error);
            }
            tokio::time::sleep(BACKOFF.1).await;
        }
    }

    async fn try_take_over(
        &self,
        at_least: Epoch,
        standing: Option<&Standing>,
        lease: Option<LeaseId>,
        value: &Bytes,
    ) -> Result<Option<(Epoch, Revision)>, StoreError> {
        let (leader, floor_key) = (self.keys.leader(), self.keys.epoch_floor());
        let read = Txn::new()
            .then(Op::get(Range::key(leader.clone())))
            .then(Op::get(Range::key(floor_key.clone())));
        let read = self.client.txn_repeatable(read).await?;
        let modified = |found: Option<&KeyValue>| found.map_or(Revision(0), |found| found.modified);
        // The new key cannot be created before the next revision.
        let next = read.revision.next();
        let mut floor = floor(read.get(1))?;
        if let Some(found) = read.get(0)
            && let Some(standing) = standing
            && let Some((lease, claim)) = &standing.candidate
        {
            let leader = read_leader(found, floor)?;
            if leader.epoch >= at_least && !is_ours(&leader, *lease, claim) {
                return Err(StoreError::Fenced {
                    asked: standing.term.epoch,
                    current: leader.epoch,
                });
            }
        }
        let mut end = Txn::new()
            .when(Compare::modified(leader.clone(), modified(read.get(0))))
            .when(Compare::modified(floor_key.clone(), modified(read.get(1))))
            .then(Op::delete(Range::key(leader)));
        let mut floor_put = modified(read.get(1));
        let raise = epoch_of(floor, next) < at_least;
        if raise {
            floor = at_least.0 - next.0.unsigned_abs();
            end = end.then(Op::put(floor_key.clone(), decimal(floor)));
        }
        let ended = self.client.txn(end).await?;
        if !ended.succeeded {
            return Ok(None);
        }
        if raise {
            floor_put = ended.revision;
        }
        let begin = self
            .claim(value.clone(), lease)
            .when(Compare::modified(floor_key, floor_put));
        let begun = self.client.txn(begin).await?;
        let created = begun.revision;
        Ok(begun.succeeded.then(|| (epoch_of(floor, created), created)))
    }

    /// Watches the leader. The first report asks etcd; this call does not.
    ///
    /// # Errors
    ///
    /// [`StoreError::Closed`] when the store was closed.
    pub async fn watch_leader(&self) -> Result<LeaderWatch, StoreError> {
        self.check_open()?;
        Ok(LeaderWatch {
            client: self.client.clone(),
            keys: self.keys.clone(),
            watch: None,
            unread: true,
            told: None,
        })
    }
}

fn is_ours(leader: &Leader, lease: LeaseId, claim: &Claim) -> bool {
    leader.lease == lease && leader.claim.id == claim.id
}

fn claim_value(claim: &Claim) -> Result<Bytes, StoreError> {
    serde_json::to_vec(claim)
        .map(Bytes::from)
        .map_err(|e| corrupt("a claim", &e.to_string()))
}

/// Reports the leader, now and at each change.
#[derive(Debug)]
pub struct LeaderWatch {
    client: Client,
    keys: Keys,
    /// The watch; `None` before it is opened, and after it broke.
    watch: Option<Watch>,
    /// Whether the key may have changed since it was last read.
    unread: bool,
    /// The last report; `None` before the first.
    told: Option<Option<Leader>>,
}

impl LeaderWatch {
    /// The leader: first the current one, then each change; `None` without a leader. Quick changes
    /// may be reported as one.
    ///
    /// After [`StoreError::Unavailable`] the caller may call this again. It then continues from the
    /// state of that time. The future may be dropped while it waits.
    pub async fn next(&mut self) -> Result<Option<Leader>, StoreError> {
        loop {
            if let (false, Some(watch)) = (self.unread, &mut self.watch) {
                let event = watch.next().await;
                self.unread = true;
                if let Err(error) = event {
                    self.watch = None;
                    if error != Error::Compacted {
                        return Err(error.into());
                    }
                }
            }
            // The event contains only the leader's key. The epoch floor is needed too, so both are
            // read.
            let (revision, leader) = find_leader(&self.client, &self.keys).await?;
            if self.watch.is_none() {
                let options = WatchOptions {
                    keys: Range::key(self.keys.leader()),
                    start: revision.next(),
                    puts_only: false,
                };
                self.watch = Some(self.client.watch(&options).await?);
            }
            self.unread = false;
            if self.told.as_ref() != Some(&leader) {
                self.told = Some(leader.clone());
                return Ok(leader);
            }
        }
    }
}
