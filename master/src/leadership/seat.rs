//! The current role of this kvmaster, for the code behind its ports.

use super::recent_contacts::RecentContacts;
use crate::clock::Clock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::open_connections::OpenConnections;
use crate::pool::Pool;
use crate::service::rights::Guard;
use crate::store::LogSeq;
use crate::wait_budget::WaitBudget;
use kvpool_daemon::tls::Tls;
use kvpool_proto as proto;
use kvpool_types::{ClusterId, Epoch};
use parking_lot::RwLock;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The age at which a report no longer describes the present.
const FRESH: Duration = Duration::from_secs(3);

/// The role of a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Loads the metadata, or waits for the store.
    Starting,
    /// Follows the leader's log.
    Standby,
    /// Leads.
    Leader,
    /// Past its term's deadline: it answers reads and changes nothing.
    ReadOnly,
}

impl Role {
    /// The role's name in replies, JSON and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Standby => "standby",
            Self::Leader => "leader",
            Self::ReadOnly => "read-only",
        }
    }
}

/// The leader, as far as a master knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The leader's address `http://host:port`; empty without a known leader.
    pub leader: String,
    /// The latest known epoch.
    pub epoch: Epoch,
}

/// The state of the store and of all masters, refreshed regularly.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The time of the report.
    pub at: Option<Instant>,
    /// Every master's last published state.
    pub members: Vec<proto::MasterMember>,
    /// The store's part of the reply: log, snapshots, sizes, alarms.
    pub store: proto::ClusterReply,
}

#[derive(Debug)]
struct State {
    pool: Option<Arc<Pool>>,
    known: Known,
    /// The role of a master without a pool: starting or standby.
    waits_as: Role,
    reason: String,
    applied: LogSeq,
}

impl State {
    fn name_leader(&mut self, leader: &str, epoch: Epoch) {
        self.known = Known {
            leader: leader.to_owned(),
            epoch: epoch.max(self.known.epoch),
        };
    }
}

/// The seat of one kvmaster: its role in the cluster. The code behind the ports asks it, for each
/// call or connection, for the pool that this master leads.
pub struct Seat {
    /// The settings.
    pub config: Config,
    /// The metrics of the process.
    pub metrics: Arc<Metrics>,
    /// Judges the tokens of callers.
    pub guard: Guard,
    /// The certificates of the ports.
    tls: Tls,
    /// The nodes and clients that contacted this master recently.
    pub contacts: RecentContacts,
    connections: Arc<OpenConnections>,
    /// The memory for waiting calls.
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

/// Why this master leads no pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotLeading {
    /// The leader's address; empty when unknown.
    pub leader: String,
    /// The latest known epoch.
    pub epoch: Epoch,
    /// The reason, for people.
    pub reason: String,
}

impl Seat {
    /// The seat of a starting master.
    pub fn new(config: Config, metrics: Arc<Metrics>, clock: Arc<dyn Clock>) -> Self {
        let most_waiting = usize::try_from(config.max_waiting.as_u64()).unwrap_or(usize::MAX);
        Self {
            wait_budget: WaitBudget::new(most_waiting),
            config,
            metrics,
            guard: Guard::default(),
            tls: Tls::default(),
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

    /// Sets the guard that judges the callers of this seat.
    #[must_use]
    pub fn guarded(self, guard: Guard) -> Self {
        Self { guard, ..self }
    }

    /// Sets the certificates of the ports.
    #[must_use]
    pub fn certified(self, tls: Tls) -> Self {
        Self { tls, ..self }
    }

    /// The problems of this master's files of keys, policy and certificates, one sentence each.
    pub fn problems(&self) -> Vec<String> {
        let of_tokens = self.guard.problem();
        of_tokens.into_iter().chain(self.tls.problem()).collect()
    }

    /// The pool that this master leads, even while its term waits for a renewal.
    ///
    /// # Errors
    ///
    /// [`NotLeading`] names the leader and the reason.
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

    /// The framed connections. Each belongs to the pool that was led when it began.
    pub fn connections(&self) -> Arc<OpenConnections> {
        Arc::clone(&self.connections)
    }

    /// The role of this master.
    pub fn role(&self) -> Role {
        match self.pool() {
            Ok(pool) if pool.leads() => Role::Leader,
            Ok(_) => Role::ReadOnly,
            Err(_) => self.state.read().waits_as,
        }
    }

    /// The answer of `/readyz`.
    ///
    /// # Errors
    ///
    /// The reason why this master should get no calls, for people.
    pub fn ready(&self) -> Result<(), String> {
        match self.role() {
            Role::Leader => self.pool().map_or(Ok(()), |pool| {
                pool.healthy()?;
                // A full store is not a failure of health: gets continue, and a restart would not help.
                pool.has_room().map_err(|error| error.to_string())?;
                let stalled = pool.stalled();
                stalled.map_or(Ok(()), |stalled| Err(stalled.to_string()))
            }),
            Role::Standby => Ok(()),
            Role::ReadOnly => Err("read-only: the leader lease was not renewed in time".to_owned()),
            Role::Starting => Err(self.reason()),
        }
    }

    /// The leader, as far as this master knows.
    pub fn known(&self) -> Known {
        self.state.read().known.clone()
    }

    /// The reason for the role; empty for none.
    pub fn reason(&self) -> String {
        self.state.read().reason.clone()
    }

    /// Takes the lead of a pool. `address` is this master's `http://host:port` for other machines;
    /// empty when unknown.
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

    /// Gives up the pool, if any, and returns it. A leader of a later epoch stays known.
    pub fn step_down(&self, reason: impl Into<String>) -> Option<Arc<Pool>> {
        let mut state = self.state.write();
        state.reason = reason.into();
        state.waits_as = Role::Starting;
        let pool = state.pool.take();
        let epoch = state.known.epoch;
        if pool.as_ref().is_none_or(|pool| epoch <= pool.epoch) {
            state.known.leader.clear();
        }
        drop(state);
        self.connections.end_present();
        pool
    }

    /// Records that the master follows the log, and its position.
    pub fn follow(&self, applied: LogSeq) {
        let mut state = self.state.write();
        state.waits_as = Role::Standby;
        state.applied = applied;
    }

    /// Records that the master does not follow the log, and the reason.
    pub fn wait(&self, reason: impl Into<String>) {
        let mut state = self.state.write();
        state.waits_as = Role::Starting;
        state.reason = reason.into();
    }

    /// Records the leader. The latest known epoch never decreases.
    pub fn learn(&self, leader: &str, epoch: Epoch) {
        let mut state = self.state.write();
        state.name_leader(leader, epoch);
        state.reason = if leader.is_empty() {
            "no master leads at the moment".to_owned()
        } else {
            format!("this master is a standby; {leader} leads")
        };
    }

    /// [`Seat::learn`] for a master that does not follow the log. The reason for that stays.
    pub(super) fn learn_beside(&self, leader: &str, epoch: Epoch) {
        self.state.write().name_leader(leader, epoch);
    }

    /// The last applied group of the log.
    fn applied(&self) -> LogSeq {
        self.state.read().applied
    }

    /// The last known group, of the followed log or of this master's own.
    pub fn position(&self) -> LogSeq {
        self.pool()
            .map_or_else(|_| self.applied(), |pool| pool.log_position())
    }

    /// The other masters' last published states; empty when the report is old.
    pub(super) fn others(&self, own_address: &str) -> Vec<proto::MasterMember> {
        let report = self.report.read();
        if report.at.is_none_or(|at| at.elapsed() > FRESH) {
            return Vec::new();
        }
        let others = report.members.iter();
        let others = others.filter(|member| member.address != own_address);
        others.cloned().collect()
    }

    /// Replaces the report of the store and the other masters.
    pub fn set_report(&self, report: Report) {
        *self.report.write() = report;
        self.refresh_gauges();
    }

    /// Sets the gauges of this master's role and of its store to their present values.
    pub fn refresh_gauges(&self) {
        self.metrics
            .watch_standing(&self.describe(), self.position().0);
    }

    /// The reply about the leader and the store. It comes from memory: operators ask for it during
    /// outages.
    pub fn describe(&self) -> proto::ClusterReply {
        let Report {
            mut members,
            mut store,
            ..
        } = self.report.read().clone();
        let known = self.known();
        let pool = self.pool().ok();
        // etcd reports its own alarms.
        if let Some(Err(full)) = pool.as_ref().map(|pool| pool.has_room())
            && store.alarms.is_empty()
        {
            store.alarms.push(full.told());
        }
        // An etcd that is full says so itself.
        if let Some(stalled) = pool.as_ref().and_then(|pool| pool.stalled())
            && store.alarms.is_empty()
        {
            store.alarms.push(stalled.to_string());
        }
        note_the_gone(&mut members, &known.leader);
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

/// The role of a master whose entry outlived its process or its term, in replies and JSON.
const GONE: &str = "gone";

/// Marks the entries of masters that claim the lead while `leader` has it. A dead leader's entry
/// stays until its lease expires.
fn note_the_gone(members: &mut [proto::MasterMember], leader: &str) {
    let leading = [Role::Leader, Role::ReadOnly].map(Role::label);
    for member in members {
        let claims = leading.contains(&member.role.as_str());
        if claims && !leader.is_empty() && member.address != leader {
            GONE.clone_into(&mut member.role);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootClock;
    use crate::store::{EmbeddedOptions, EmbeddedStore};

    /// Clients of a replaced leader go to the next one at once.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_leader_that_steps_down_still_names_the_one_that_replaced_it() {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let clock: Arc<dyn Clock> = Arc::new(BootClock);
        let begun = Pool::start(
            Config::default(),
            Arc::new(store),
            Arc::clone(&clock),
            Arc::clone(&metrics),
        );
        let pool = begun.await.unwrap();
        let seat = Seat::new(Config::default(), metrics, clock);
        seat.lead(Arc::clone(&pool), "http://a:1");
        assert!(seat.step_down("it is cut off").is_some());
        assert_eq!(seat.known().leader, "", "this master leads no longer");
        seat.lead(Arc::clone(&pool), "http://a:1");
        seat.learn("http://b:1", Epoch(pool.epoch.0 + 1));
        assert!(seat.step_down("another master was elected").is_some());
        assert_eq!(seat.known().leader, "http://b:1");
        assert_eq!(seat.reason(), "another master was elected");
        pool.stop().await;
    }

    #[test]
    fn a_leader_that_another_one_replaced_is_listed_as_gone() {
        let member = |address: &str, role: Role| proto::MasterMember {
            address: address.to_owned(),
            role: role.label().to_owned(),
            ..Default::default()
        };
        let listed = |leader: &str| {
            let mut members = [
                member("http://a:1", Role::Leader),
                member("http://b:1", Role::Leader),
                member("http://c:1", Role::ReadOnly),
                member("http://d:1", Role::Standby),
            ];
            note_the_gone(&mut members, leader);
            members.map(|member| member.role)
        };
        assert_eq!(listed("http://b:1"), ["gone", "leader", "gone", "standby"]);
        assert_eq!(
            listed("http://c:1"),
            ["gone", "gone", "read-only", "standby"]
        );
        let unknown = ["leader", "leader", "read-only", "standby"];
        assert_eq!(listed(""), unknown, "nobody leads");
    }
}
