//! Which part a master of several plays, and what it says of it.

use super::master::{Master, coded};
use kvpool_proto::{Caller, ClusterReply, MasterMember};
use kvpool_types::{ClusterId, Code};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tonic::Status;

/// What is one master's own; what it knows of the pool is shared.
#[derive(Debug, Default)]
pub(crate) struct Own {
    pub(crate) role: Role,
    /// Where clients reach it.
    pub(crate) address: String,
    /// The masters that it names to clients.
    pub(crate) members: Vec<String>,
    /// The epoch that it takes for the latest; `None`: the pool's.
    pub(crate) epoch: Option<u64>,
    /// Whether it is of a version that does not know the call.
    pub(crate) is_older: bool,
    /// What it answers to a greeting, as bytes; `None`: what the others do.
    pub(crate) hello: Option<Vec<u8>>,
    /// How long it takes to say who leads.
    pub(crate) slow: Duration,
    /// How often each method was called here.
    pub(crate) calls: HashMap<&'static str, usize>,
}

/// The part that a master plays.
#[derive(Clone, Debug, Default)]
pub(crate) enum Role {
    #[default]
    Leader,
    /// It answers what changes nothing, without leases; the rest is refused with these words.
    ReadOnly(String),
    /// It names this leader, or none, and passes calls on to that master, where it reaches one.
    Standby {
        leader: String,
        reaches: Option<Arc<Master>>,
    },
}

impl Role {
    /// One that knows of no leader.
    pub(crate) fn standby() -> Self {
        Self::naming("")
    }

    /// One that names a leader and does not reach it.
    pub(crate) fn naming(leader: &str) -> Self {
        Self::Standby {
            leader: leader.to_owned(),
            reaches: None,
        }
    }
}

impl Own {
    /// Whom a call is for: `None` for this master itself.
    pub(super) fn passes_on(
        &self,
        caller: Option<&Caller>,
        changes: bool,
    ) -> Result<Option<Arc<Master>>, Status> {
        let forward = caller.is_some_and(|caller| caller.forward);
        match &self.role {
            Role::ReadOnly(why) if changes => Err(told(Code::NotLeader, why)),
            Role::Leader | Role::ReadOnly(_) => Ok(None),
            Role::Standby { reaches, .. } if forward => {
                let leader = reaches.clone().map(Some);
                leader.ok_or_else(|| coded(Code::Unreachable))
            }
            Role::Standby { .. } => Err(coded(Code::NotLeader)),
        }
    }

    pub(super) fn cluster(&self, epoch: u64) -> Result<ClusterReply, Status> {
        if self.is_older {
            return Err(Status::unimplemented("no such call"));
        }
        let (role, leader) = match &self.role {
            Role::Leader => ("leader", &self.address),
            Role::ReadOnly(_) => ("read-only", &self.address),
            Role::Standby { leader, .. } => ("standby", leader),
        };
        let members = self.members.iter().map(|address| MasterMember {
            address: address.clone(),
            ..MasterMember::default()
        });
        Ok(ClusterReply {
            epoch: self.epoch.unwrap_or(epoch),
            cluster_id: ClusterId(5).to_bytes().to_vec().into(),
            leader: leader.clone(),
            role: role.to_owned(),
            members: members.collect(),
            ..ClusterReply::default()
        })
    }
}

fn told(code: Code, why: &str) -> Status {
    let mut status = Status::failed_precondition(why);
    *status.metadata_mut() = coded(code).metadata().clone();
    status
}
