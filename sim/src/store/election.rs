//! The election at the store of the simulation: leases, the leader's key, the members, and two watches.

use super::{LOOK, State, Store};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_master::store::etcd::{LeaseId, Maintained, Usage};
use kvpool_master::store::{
    Campaign, Claim, ElectionStore, Groups, Leader, Leaders, LogSeq, StoreError,
};
use kvpool_types::Epoch;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Groups of the log that are read at once.
const GROUPS: usize = 16;
/// How long a candidate asks what became of its claim, as with etcd.
const READ_BACK: Duration = Duration::from_secs(4);
/// In how many of 1000 changes of the leader a watch sees it late, and how late in microseconds. What
/// happens meanwhile it does not see.
const LATE: u64 = 200;
const LATEST: u64 = 3_000_000;
/// The lease of a term that was begun without an election.
const NO_LEASE: LeaseId = LeaseId(0);

impl State {
    fn lives(&self, lease: LeaseId) -> bool {
        if lease == NO_LEASE {
            return true;
        }
        let ends = self.leases.get(&lease.0);
        ends.is_some_and(|(ends, _)| Instant::now() < *ends)
    }

    /// The leader while its lease runs.
    pub(super) fn leader(&mut self) -> Option<Leader> {
        let leader = self.leader.take();
        self.leader = leader.filter(|leader| self.lives(leader.lease));
        self.leader.clone()
    }

    fn campaign(&mut self, lease: LeaseId, claim: &Claim) -> Result<Campaign, StoreError> {
        match self.leader() {
            Some(leader) => Ok(outcome(leader, lease, claim)),
            None => self
                .take_over(Epoch(0), Some(&(lease, claim.clone())))
                .map(Campaign::Won),
        }
    }

    /// Begins a term with an epoch of at least `at_least`, whoever leads. Without a candidate its key has no
    /// lease. A candidate changes nothing where another one has won with such an epoch.
    pub(super) fn take_over(
        &mut self,
        at_least: Epoch,
        candidate: Option<&(LeaseId, Claim)>,
    ) -> Result<Epoch, StoreError> {
        if let Some((lease, claim)) = candidate
            && let Some(leader) = self.leader()
            && leader.epoch >= at_least
            && !is_its(&leader, *lease, claim)
        {
            return Err(StoreError::Fenced {
                asked: at_least,
                current: leader.epoch,
            });
        }
        let (lease, claim) = match candidate {
            Some((lease, claim)) => (*lease, claim.clone()),
            None => (NO_LEASE, nobody()),
        };
        if !self.lives(lease) {
            return Err(StoreError::LeaseGone);
        }
        let epoch = Epoch(self.epoch.0 + 1).max(at_least);
        self.epoch = epoch;
        self.leader = Some(Leader {
            claim,
            epoch,
            lease,
        });
        Ok(epoch)
    }
}

fn nobody() -> Claim {
    Claim {
        id: String::new(),
        address: String::new(),
        http_address: String::new(),
    }
}

fn is_its(leader: &Leader, lease: LeaseId, claim: &Claim) -> bool {
    leader.lease == lease && leader.claim.id == claim.id
}

/// How a campaign ended after which `leader` leads.
fn outcome(leader: Leader, lease: LeaseId, claim: &Claim) -> Campaign {
    if is_its(&leader, lease, claim) {
        Campaign::Won(leader.epoch)
    } else {
        Campaign::Lost(leader)
    }
}

impl Store {
    /// Finds out what became of a claim.
    async fn read_back(
        &self,
        lease: LeaseId,
        claim: &Claim,
        mut error: StoreError,
    ) -> Result<Campaign, StoreError> {
        let limit = Instant::now() + READ_BACK;
        while Instant::now() < limit {
            match self.leader().await {
                Ok(None) => break,
                Ok(Some(leader)) => return Ok(outcome(leader, lease, claim)),
                Err(later) => error = later,
            }
            sleep(LOOK).await;
        }
        Err(error)
    }
}

#[async_trait]
impl ElectionStore for Store {
    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
        self.had_room().await?;
        self.ask(move |state| {
            let next = state.leases.keys().next_back().map_or(1, |last| last + 1);
            state.leases.insert(next, (Instant::now() + ttl, ttl));
            LeaseId(next)
        })
        .await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>, StoreError> {
        self.ask(move |state| {
            let lives = state.lives(lease);
            let (ends, ttl) = state.leases.get_mut(&lease.0).filter(|_| lives)?;
            *ends = Instant::now() + *ttl;
            Some(*ttl)
        })
        .await
    }

    async fn revoke_lease(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.ask(move |state| {
            if let Some((ends, _)) = state.leases.get_mut(&lease.0) {
                *ends = Instant::now();
            }
        })
        .await
    }

    async fn leader(&self) -> Result<Option<Leader>, StoreError> {
        self.ask(State::leader).await
    }

    async fn campaign(&self, lease: LeaseId, claim: &Claim) -> Result<Campaign, StoreError> {
        self.had_room().await?;
        let its = claim.clone();
        let store = self.clone();
        let claimed = async move {
            store
                .write_now(move |state| state.campaign(lease, &its))
                .await
        };
        let ended = match self.answered(claimed).await {
            Err(error) if error.is_retryable() => self.read_back(lease, claim, error).await?,
            ended => ended?,
        };
        match ended {
            Campaign::Won(_) => *self.candidate.lock() = Some((lease, claim.clone())),
            Campaign::Lost(_) => {
                let late = self.disk.ambushes.loses();
                self.disk.hide_leaders(self.master, late);
            }
        }
        Ok(ended)
    }

    async fn leaders(&self) -> Result<Box<dyn Leaders>, StoreError> {
        Ok(Box::new(LeadersSeen {
            store: self.clone(),
            told: None,
        }))
    }

    async fn groups(&self, after: LogSeq) -> Result<Box<dyn Groups>, StoreError> {
        Ok(Box::new(GroupsRead {
            store: self.clone(),
            after,
            found: Vec::new(),
        }))
    }

    async fn put_member(&self, lease: LeaseId, id: &str, member: Bytes) -> Result<(), StoreError> {
        self.had_room().await?;
        let id = id.to_owned();
        let put = self.ask(move |state| match state.lives(lease) {
            true => {
                state.members.retain(|(known, ..)| *known != id);
                state.members.push((id, lease, member));
                Ok(())
            }
            false => Err(StoreError::LeaseGone),
        });
        put.await?
    }

    async fn members(&self) -> Result<Vec<(String, Bytes)>, StoreError> {
        self.ask(|state| {
            let mut members = std::mem::take(&mut state.members);
            members.retain(|(_, lease, _)| state.lives(*lease));
            state.members = members;
            let members = state.members.iter();
            members
                .map(|(id, _, member)| (id.clone(), member.clone()))
                .collect()
        })
        .await
    }

    fn abandon(&self, epoch: Epoch) {
        self.abandoned
            .send_modify(|until| *until = Some(epoch).max(*until));
    }

    async fn maintain(&self, _: Epoch) -> Result<Maintained, StoreError> {
        Ok(Maintained::default())
    }

    async fn usage(&self) -> Result<Usage, StoreError> {
        Ok(Usage::default())
    }
}

/// The leader, looked at all the time.
#[derive(Debug)]
struct LeadersSeen {
    store: Store,
    told: Option<Option<Leader>>,
}

#[async_trait]
impl Leaders for LeadersSeen {
    async fn next(&mut self) -> Result<Option<Leader>, StoreError> {
        let disk = &self.store.disk;
        let mut is_late = false;
        loop {
            disk.unseen.ended(&self.store.master).await;
            let leader = self.store.leader().await?;
            if self.told.as_ref() != Some(&leader) {
                if self.told.is_some() && !is_late && disk.watches.chance(LATE) {
                    is_late = true;
                    disk.hide_leaders(self.store.master, disk.watches.micros(1_000, LATEST));
                    continue;
                }
                self.told = Some(leader.clone());
                return Ok(leader);
            }
            sleep(LOOK).await;
        }
    }
}

/// The log, read all the time.
#[derive(Debug)]
struct GroupsRead {
    store: Store,
    after: LogSeq,
    /// What was read and not told, the next one last.
    found: Vec<(LogSeq, Bytes)>,
}

#[async_trait]
impl Groups for GroupsRead {
    async fn next(&mut self) -> Result<(LogSeq, Bytes), StoreError> {
        loop {
            if let Some((seq, group)) = self.found.pop() {
                self.after = seq;
                return Ok((seq, group));
            }
            let after = self.after;
            let read = self.store.ask(move |state| {
                state.is_in_log(after)?;
                let groups = state.log.range(after.next()..).take(GROUPS);
                let groups = groups.map(|(seq, group)| (*seq, group.clone()));
                Ok::<Vec<_>, StoreError>(groups.collect())
            });
            self.found = read.await??;
            self.found.reverse();
            if self.found.is_empty() {
                sleep(LOOK).await;
            }
        }
    }
}
