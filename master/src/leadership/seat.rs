//! What this kvmaster is at the moment, for whoever serves its ports.

use super::recent_contacts::RecentContacts;
use crate::clock::Clock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::open_connections::OpenConnections;
use crate::pool::Pool;
use crate::store::LogSeq;
use crate::wait_budget::WaitBudget;
use kvpool_proto as proto;
use kvpool_types::{ClusterId, Epoch};
use parking_lot::RwLock;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A report that is older than this says nothing of the present.
const FRESH: Duration = Duration::from_secs(3);

/// What a master does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Reads the metadata, or waits for the store.
    Starting,
    /// Follows the log of whoever leads.
    Standby,
    /// Leads.
    Leader,
    /// Led, and the store has not confirmed it in time: it answers and changes nothing.
    ReadOnly,
}

impl Role {
    /// The word for it in replies, JSON and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Standby => "standby",
            Self::Leader => "leader",
            Self::ReadOnly => "read-only",
        }
    }
}

/// Who leads, as far as a master knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Where the leader is, `http://host:port`; empty while nobody is known to lead.
    pub leader: String,
    /// The latest term that is known.
    pub epoch: Epoch,
}

/// What is told of the store and of the other masters, renewed now and then.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// When it was made.
    pub at: Option<Instant>,
    /// Every master, as it last said of itself.
    pub members: Vec<proto::MasterMember>,
    /// The store's part of the reply: log, snapshots, sizes, alarms.
    pub store: proto::ClusterReply,
}

#[derive(Debug)]
struct State {
    pool: Option<Arc<Pool>>,
    known: Known,
    /// What a master without a pool is: starting or standby.
    waits_as: Role,
    reason: String,
    applied: LogSeq,
}

/// The place of one kvmaster among those of its cluster. Whoever serves asks it, for each call or
/// connection, for the pool that is led here.
pub struct Seat {
    /// The settings.
    pub config: Config,
    /// What the process counts.
    pub metrics: Arc<Metrics>,
    /// Who has turned to this master lately.
    pub contacts: RecentContacts,
    connections: Arc<OpenConnections>,
    /// For calls that wait.
    pub(crate) wait_budget: WaitBudget,
    state: RwLock<State>,
    report: RwLock<Report>,
}

impl std::fmt::Debug for Seat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seat")
            .field("state", &*self.state.read())
            .finish_non_exhaustive()
    }
}

/// Why there is no pool here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotLeading {
    /// Where the leader is; empty: not known.
    pub leader: String,
    /// The latest term that is known.
    pub epoch: Epoch,
    /// For people.
    pub reason: String,
}

impl Seat {
    /// The place of a master that has only just begun.
    pub fn new(config: Config, metrics: Arc<Metrics>, clock: Arc<dyn Clock>) -> Self {
        let most_waiting = usize::try_from(config.max_waiting.as_u64()).unwrap_or(usize::MAX);
        Self {
            wait_budget: WaitBudget::new(most_waiting),
            config,
            metrics,
            contacts: RecentContacts::new(clock),
            connections: Arc::default(),
            state: RwLock::new(State {
                pool: None,
                known: Known::default(),
                waits_as: Role::Starting,
                reason: "the metadata is being read".to_owned(),
                applied: LogSeq(0),
            }),
            report: RwLock::default(),
        }
    }

    /// The pool that is led from here, also one whose term waits to be confirmed.
    pub fn pool(&self) -> Result<Arc<Pool>, NotLeading> {
        let state = self.state.read();
        match &state.pool {
            Some(pool) if !pool.term.is_over() => Ok(Arc::clone(pool)),
            _ => Err(NotLeading {
                leader: state.known.leader.clone(),
                epoch: state.known.epoch,
                reason: state.reason.clone(),
            }),
        }
    }

    /// The framed connections, each of which belongs to the pool that was led when it began.
    pub fn connections(&self) -> Arc<OpenConnections> {
        Arc::clone(&self.connections)
    }

    /// What this master is.
    pub fn role(&self) -> Role {
        match self.pool() {
            Ok(pool) if pool.leads() => Role::Leader,
            Ok(_) => Role::ReadOnly,
            Err(_) => self.state.read().waits_as,
        }
    }

    /// Who leads, as far as is known here.
    pub fn known(&self) -> Known {
        self.state.read().known.clone()
    }

    /// Why it is what it is; empty when there is nothing to say.
    pub fn reason(&self) -> String {
        self.state.read().reason.clone()
    }

    /// Takes a pool's lead. `address` is where others reach this master, as `http://host:port`; empty
    /// when that is not known.
    pub fn lead(&self, pool: Arc<Pool>, address: &str) {
        self.metrics.term_begun();
        let mut state = self.state.write();
        state.known = Known {
            leader: address.to_owned(),
            epoch: pool.epoch,
        };
        state.reason.clear();
        state.pool = Some(pool);
    }

    /// Lets go of the pool, if one was led, and returns it.
    pub fn step_down(&self, reason: impl Into<String>) -> Option<Arc<Pool>> {
        let mut state = self.state.write();
        state.reason = reason.into();
        state.waits_as = Role::Starting;
        state.known.leader.clear();
        let pool = state.pool.take();
        drop(state);
        self.connections.end_present();
        pool
    }

    /// Notes that the log is followed, and how far.
    pub fn follow(&self, applied: LogSeq) {
        let mut state = self.state.write();
        state.waits_as = Role::Standby;
        state.applied = applied;
    }

    /// Notes that the log is not followed, and why.
    pub fn wait(&self, reason: impl Into<String>) {
        let mut state = self.state.write();
        state.waits_as = Role::Starting;
        state.reason = reason.into();
    }

    /// Notes who leads. The latest term that was known stays known.
    pub fn learn(&self, leader: &str, epoch: Epoch) {
        let mut state = self.state.write();
        state.known = Known {
            leader: leader.to_owned(),
            epoch: epoch.max(state.known.epoch),
        };
        state.reason = if leader.is_empty() {
            "no master leads at the moment".to_owned()
        } else {
            format!("this master is a standby; {leader} leads")
        };
    }

    /// The last group of the log that was applied here.
    fn applied(&self) -> LogSeq {
        self.state.read().applied
    }

    /// The last group that is known here: of the log that is followed, or of the one that is written.
    pub fn position(&self) -> LogSeq {
        self.pool()
            .map_or_else(|_| self.applied(), |pool| pool.log_position())
    }

    /// The other masters, as they said of themselves a moment ago; nothing when that is longer ago.
    pub(super) fn others(&self, own_address: &str) -> Vec<proto::MasterMember> {
        let report = self.report.read();
        if report.at.is_none_or(|at| at.elapsed() > FRESH) {
            return Vec::new();
        }
        let others = report.members.iter();
        let others = others.filter(|member| member.address != own_address);
        others.cloned().collect()
    }

    /// Renews what is told of the store and the other masters.
    pub fn set_report(&self, report: Report) {
        *self.report.write() = report;
        self.metrics
            .watch_standing(&self.describe(), self.position().0);
    }

    /// The answer to who leads and how the store is, from memory: it is asked for when little works.
    pub fn describe(&self) -> proto::ClusterReply {
        let Report { members, store, .. } = self.report.read().clone();
        let known = self.known();
        let pool = self.pool().ok();
        let role = self.role();
        let left = pool.as_ref().and_then(|pool| pool.term_left());
        let cluster: Option<ClusterId> = pool.as_ref().map(|pool| pool.cluster);
        proto::ClusterReply {
            epoch: known.epoch.0,
            cluster_id: cluster.map_or(store.cluster_id, |id| {
                bytes::Bytes::copy_from_slice(&id.to_bytes())
            }),
            leader: known.leader,
            role: role.label().to_owned(),
            reason: self.reason(),
            members,
            term_left_ms: left.map_or(0, |left| {
                u64::try_from(left.as_millis()).unwrap_or(u64::MAX)
            }),
            ..store
        }
    }
}
