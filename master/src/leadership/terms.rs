//! The state machine of a master that stands by and leads.

use super::keeper::{Keeper, usable};
use super::log::Groups;
use super::observer::{Leading, Observer};
use super::{Role, Seat, Surroundings, loading, members, watchdog};
use crate::clock::Clock;
use crate::pool::{Pool, SILENCE, StartError, TermStart};
use crate::standby::{ApplyError, Standby};
use crate::store::etcd::LeaseId;
use crate::store::{
    Campaign, Claim, ElectionStore, JournalOptions, Leader, RecoveryError, StoreError,
};
use crate::term::Term;
use crate::workers::Workers;
use kvpool_proto as proto;
use kvpool_types::{ClusterId, Epoch};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

/// The delay before a failed step is repeated.
pub(super) const RETRY: Duration = Duration::from_millis(200);
/// How long a candidate that has lost waits to hear of the winner, before it campaigns again.
const REPORT: Duration = Duration::from_secs(1);
/// The interval at which a leader checks itself.
const LOOK: Duration = Duration::from_millis(250);
/// The interval of the store's maintenance.
const MAINTAIN: Duration = Duration::from_secs(1);
/// The least time between two revocations by one standby. Without it, masters that advertise
/// unreachable addresses would depose each other for ever.
const REVOKE: Duration = Duration::from_secs(3);
/// The interval at which a candidate tries to make room in a full etcd.
const MAKE_ROOM: Duration = Duration::from_secs(2);
/// The bytes of the log read at once.
const READ_BYTES: u64 = 4 << 20;
/// The longest time for giving up a lease.
const REVOKING: Duration = Duration::from_secs(1);
/// The same for the lease of the entry in the list of masters. Only the end of the process waits for this, and the lead
/// is given up before.
const LEAVING: Duration = Duration::from_secs(3);

/// Why a master stopped standing by without a lead.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("metadata store: {0}")]
    Store(#[from] StoreError),
    #[error("the metadata cannot be loaded: {0}")]
    Load(#[from] RecoveryError),
    #[error("the log cannot be followed: {0}")]
    Apply(#[from] ApplyError),
    #[error("the term could not begin: {0}")]
    Start(#[from] StartError),
    #[error("the term did not begin within {}", humantime::format_duration(*.0))]
    Slow(Duration),
    #[error("etcd no longer knows this master's lease")]
    LeaseLost,
    #[error("a thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
    #[error("the thread that loads the metadata panicked")]
    Fault,
}

impl Failure {
    /// True when this master cannot read the stored metadata. The next attempt loads all of it
    /// again and will most likely fail too.
    const fn is_of_what_is_stored(&self) -> bool {
        match self {
            Self::Load(error) => !error.is_retryable(),
            Self::Apply(error) => !matches!(error, ApplyError::Gap { .. }),
            Self::Fault => true,
            _ => false,
        }
    }
}

/// The delay between consecutive failures, doubled each time.
struct RetryBackoff(Duration);

impl RetryBackoff {
    const MOST: Duration = Duration::from_secs(60);

    const fn new() -> Self {
        Self(RETRY)
    }

    /// The delay after a failure; `went_well` is the time of success before it.
    fn failed(&mut self, went_well: Duration) -> Duration {
        if went_well > Self::MOST * 2 {
            self.0 = RETRY;
        }
        let wait = self.0;
        self.0 = (wait * 2).min(Self::MOST);
        wait
    }
}

/// A won election.
struct Elected {
    lease: LeaseId,
    term: Arc<Term>,
    keeper: Keeper,
}

/// The task's state before it has a store.
#[derive(Clone)]
pub(super) struct Stand {
    pub(super) seat: Arc<Seat>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) surroundings: Arc<dyn Surroundings>,
    /// The journal options of each term. The journal's workers also renew the lease.
    pub(super) journal: JournalOptions,
    pub(super) claim: Claim,
    pub(super) stopped: watch::Receiver<bool>,
}

/// The task's state with an open store.
pub(super) struct Run {
    pub(super) stand: Stand,
    pub(super) store: Arc<dyn ElectionStore>,
    pub(super) cluster: ClusterId,
    pub(super) observer: Observer,
    pub(super) revoked: Option<Instant>,
}

impl Run {
    /// Stands by and leads in turns, until the master stops.
    pub(super) async fn run(&mut self) {
        let mut stopped = self.stand.stopped.clone();
        let (stop_telling, stops) = oneshot::channel();
        let mut telling = tokio::spawn(members::tell(
            Arc::clone(&self.stand.seat),
            Arc::clone(&self.store),
            self.stand.claim.clone(),
            self.cluster,
            stops,
        ));
        let mut backoff = RetryBackoff::new();
        loop {
            let began = Instant::now();
            let led = tokio::select! {
                biased;
                () = told(&mut stopped) => break,
                led = self.stand_by() => led,
            };
            match led {
                Ok((elected, pool)) => {
                    let why = self.hold(&elected, &pool).await;
                    self.step_down(elected, &pool, why).await;
                }
                Err(error) => {
                    let wait = match &error {
                        // A failed load may take long. Its duration does not count as success.
                        Failure::Load(_) | Failure::Fault if error.is_of_what_is_stored() => {
                            backoff.failed(Duration::ZERO)
                        }
                        error if error.is_of_what_is_stored() => backoff.failed(began.elapsed()),
                        _ => RETRY,
                    };
                    let retry = humantime::format_duration(wait);
                    tracing::warn!(%error, %retry, "standby failed, reloading the metadata");
                    self.stand
                        .seat
                        .wait(format!("{error}; next try in {retry}"));
                    tokio::select! {
                        biased;
                        () = told(&mut stopped) => break,
                        () = self.watching(sleep(wait)) => {}
                    }
                }
            }
            if *stopped.borrow() {
                break;
            }
        }
        // The other masters list this master no longer.
        let is_told = stop_telling.send(()).is_ok();
        if !is_told || timeout(LEAVING, &mut telling).await.is_err() {
            telling.abort();
        }
    }

    /// Loads the metadata, follows the log, and campaigns whenever nobody leads. Returns after a
    /// won election, when the term has begun.
    async fn stand_by(&mut self) -> Result<(Elected, Arc<Pool>), Failure> {
        let mut standby = self.watching(self.load()).await?;
        self.stand.seat.follow(standby.applied());
        let mut leading = self.observer.view();
        let mut groups = Groups::follow(&self.store, standby.applied());
        loop {
            let now = leading.borrow_and_update().clone();
            let mut has_lost = false;
            self.note(&now);
            match &now {
                Leading::Nobody => {
                    match self.campaign().await {
                        Ok(Some(elected)) => {
                            drop(groups);
                            return self.begin(elected, standby).await;
                        }
                        // The watch will report the winner, unless the winner's term ends before
                        // the watch reads it.
                        Ok(None) => has_lost = true,
                        Err(error) => {
                            tracing::warn!(%error, "campaign failed, retrying");
                            self.stand.seat.wait(error.to_string());
                            if matches!(error, Failure::Store(StoreError::NoSpace)) {
                                self.make_room().await;
                            }
                            sleep(RETRY).await;
                            continue;
                        }
                    }
                }
                // An earlier election of this same master left this entry.
                Leading::By(leader) if leader.claim.id == self.stand.claim.id => {
                    self.revoke(leader.lease).await;
                    sleep(Duration::from_millis(50)).await;
                }
                Leading::By(_) | Leading::Unknown => {}
            }
            let surroundings = Arc::clone(&self.stand.surroundings);
            let refused = async {
                match &now {
                    Leading::By(leader) => {
                        watchdog::refuses(&*surroundings, &leader.claim.address).await;
                    }
                    _ => std::future::pending().await,
                }
            };
            let mut refused = std::pin::pin!(refused);
            let unreported = async {
                match has_lost {
                    true => sleep(REPORT).await,
                    false => std::future::pending().await,
                }
            };
            let mut unreported = std::pin::pin!(unreported);
            loop {
                // `select!` also polls the observer, so a log that grows all the time delays no
                // change of the leader.
                tokio::select! {
                    biased;
                    changed = leading.changed() => {
                        // The observer lives as long as this task.
                        let _changed = changed;
                        break;
                    }
                    () = &mut refused => {
                        if let Leading::By(leader) = &now {
                            self.depose(leader).await;
                        }
                        break;
                    }
                    () = &mut unreported => break,
                    group = groups.next() => {
                        let (seq, group) = group?;
                        standby.apply(seq, &group)?;
                        standby.forget(groups.cut());
                        self.stand.seat.follow(seq);
                    }
                }
            }
        }
    }

    async fn load(&self) -> Result<Standby, Failure> {
        let (store, config) = (Arc::clone(&self.store), self.stand.seat.config.clone());
        let clock = Arc::clone(&self.stand.clock);
        let load = Box::pin(async move { Standby::load(&*store, &config, clock).await });
        match self.stand.journal.workers {
            Workers::Threads => Ok(loading::beside(load).await.ok_or(Failure::Fault)??),
            Workers::Tasks => Ok(load.await?),
        }
    }

    /// Does `work`, which may take long. Meanwhile the seat names each leader, so that clients
    /// find it.
    async fn watching<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        let mut leading = self.observer.view();
        loop {
            if let Some((leader, epoch)) = self.named(&leading.borrow_and_update()) {
                self.stand.seat.learn_beside(leader, epoch);
            }
            tokio::select! {
                biased;
                done = &mut work => return done,
                changed = leading.changed() => {
                    // The observer lives as long as this task.
                    let _changed = changed;
                }
            }
        }
    }

    /// Reports the leader to the seat. While this master leads, the seat changes only when this
    /// master's term ends.
    fn note(&self, leading: &Leading) {
        if let Some((leader, epoch)) = self.named(leading) {
            self.stand.seat.learn(leader, epoch);
        }
    }

    /// The leader's address, empty for none, and the latest epoch. `None` while the store has not
    /// answered. A master that leads no more does not name itself.
    fn named<'l>(&self, leading: &'l Leading) -> Option<(&'l str, Epoch)> {
        match leading {
            Leading::Unknown => None,
            Leading::By(leader) if leader.claim.id != self.stand.claim.id => {
                Some((leader.claim.address.as_str(), leader.epoch))
            }
            Leading::By(_) | Leading::Nobody => Some(("", self.stand.seat.known().epoch)),
        }
    }

    /// Revokes the lease of a leader whose address refuses connections. If that leader still runs,
    /// the store refuses its writes from then on.
    async fn depose(&mut self, leader: &Leader) {
        if self.revoked.is_some_and(|then| then.elapsed() < REVOKE) {
            sleep(RETRY).await;
            return;
        }
        tracing::warn!(
            leader = leader.claim.address,
            epoch = %leader.epoch,
            "leader refuses connections, revoking its lease"
        );
        self.revoked = Some(Instant::now());
        self.revoke(leader.lease).await;
    }

    async fn revoke(&self, lease: LeaseId) {
        match timeout(REVOKING, self.store.revoke_lease(lease)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "lease not revoked, it will expire"),
            Err(_) => tracing::warn!("lease not revoked in time, it will expire"),
        }
    }

    /// Makes room in a full etcd, which grants no lease. A leader does this while it leads; without
    /// a leader, a candidate must.
    async fn make_room(&self) {
        match self.store.maintain(Epoch(0)).await {
            Ok(done) => tracing::info!(?done, "etcd full: maintenance done"),
            Err(error) => tracing::warn!(%error, "etcd full: maintenance failed"),
        }
        // etcd keeps some seconds of history before it allows compaction.
        sleep(MAKE_ROOM).await;
    }

    /// One attempt to be elected.
    async fn campaign(&self) -> Result<Option<Elected>, Failure> {
        let ttl = self.stand.seat.config.leader_ttl;
        let asked = self.stand.clock.now();
        let lease = self.store.grant_lease(ttl).await?;
        match self.store.campaign(lease, &self.stand.claim).await? {
            Campaign::Won(epoch) => {
                let term = Arc::new(Term::until(epoch, asked.after(usable(ttl))));
                let keeper = Keeper::start(
                    Arc::clone(&self.stand.surroundings),
                    lease,
                    ttl,
                    Arc::clone(&term),
                    Arc::clone(&self.stand.clock),
                    self.stand.journal.workers,
                )?;
                tracing::info!(%epoch, "elected");
                Ok(Some(Elected {
                    lease,
                    term,
                    keeper,
                }))
            }
            Campaign::Lost(_) => {
                self.revoke(lease).await;
                Ok(None)
            }
        }
    }

    /// Applies the rest of the last leader's log and begins the term.
    async fn begin(
        &self,
        elected: Elected,
        standby: Standby,
    ) -> Result<(Elected, Arc<Pool>), Failure> {
        let backoff = self.stand.seat.config.leader_ttl * 3;
        let begun = tokio::select! {
            biased;
            begun = timeout(backoff, self.promote(&elected, standby)) => {
                begun.unwrap_or(Err(Failure::Slow(backoff)))
            }
            () = elected.keeper.lost() => Err(Failure::LeaseLost),
        };
        match begun {
            Ok(pool) => {
                self.stand
                    .seat
                    .lead(Arc::clone(&pool), &self.stand.claim.address);
                Ok((elected, pool))
            }
            Err(error) => {
                elected.term.end();
                self.store.abandon(elected.term.epoch);
                self.revoke(elected.lease).await;
                Err(error)
            }
        }
    }

    async fn promote(&self, elected: &Elected, mut standby: Standby) -> Result<Arc<Pool>, Failure> {
        let began = Instant::now();
        // No other master can append from here on, so this is the end of the log.
        let span = self.store.log_span().await?;
        if standby.applied() < span.cut {
            standby = loading::anew(standby, self.load()).await?;
        }
        while standby.applied() < span.last {
            let groups = self.store.read_log(standby.applied(), READ_BYTES).await?;
            if groups.is_empty() {
                return Err(StoreError::Corrupt {
                    reason: format!("the log ends before group {}", span.last),
                }
                .into());
            }
            for (seq, group) in groups {
                standby.apply(seq, &group)?;
            }
        }
        standby.note(span.cut, self.store.snapshot_positions().await?);
        let start = TermStart {
            config: self.stand.seat.config.clone(),
            cluster: self.cluster,
            store: Arc::clone(&self.store) as _,
            journal: self.stand.journal.clone(),
            clock: Arc::clone(&self.stand.clock),
            metrics: Arc::clone(&self.stand.seat.metrics),
        };
        let pool = Pool::lead(start, standby, Arc::clone(&elected.term)).await?;
        let took_ms = began.elapsed().as_millis();
        tracing::info!(epoch = %pool.epoch, blocks = pool.blocks(), took_ms, "promoted");
        Ok(pool)
    }

    /// Leads until there is a reason to stop.
    async fn hold(&self, elected: &Elected, pool: &Arc<Pool>) -> String {
        let mut stopped = self.stand.stopped.clone();
        let mut leading = self.observer.view();
        // While etcd is unavailable, this master sends nodes away, and it cannot ask standbys for
        // their contacts.
        let mut leads_since = Instant::now();
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let tending = tokio::spawn(tend(Arc::clone(&self.store), Arc::clone(&elected.term)));
        let why = loop {
            tokio::select! {
                biased;
                () = told(&mut stopped) => break "kvmaster is stopping".to_owned(),
                () = elected.keeper.lost() => break Failure::LeaseLost.to_string(),
                later = pool.superseded() => break match pool.give_way(later).await {
                    Ok(_) => format!("a node reported the later epoch {later}"),
                    Err(error) => format!("a node reported the later epoch {later}, and {error}"),
                },
                _ = leading.changed() => {
                    let now = leading.borrow_and_update().clone();
                    let is_other = match &now {
                        Leading::By(leader) => leader.epoch > pool.epoch,
                        // The watch may still report the state before this election.
                        Leading::Nobody => !self.still_leads(pool).await,
                        Leading::Unknown => false,
                    };
                    if is_other {
                        self.note(&now);
                        break "another master was elected, or its lease was revoked".to_owned();
                    }
                }
                _ = looks.tick() => {
                    if let Err(error) = pool.healthy() {
                        break error;
                    }
                    if !pool.leads() {
                        leads_since = Instant::now();
                    }
                    if leads_since.elapsed() >= SILENCE * 2 && self.is_cut_off(pool) {
                        break "fewer than half of the nodes and no client reach this master".to_owned();
                    }
                }
            }
        };
        tending.abort();
        why
    }

    /// True when etcd names this term's leader, or when etcd does not answer.
    async fn still_leads(&self, pool: &Pool) -> bool {
        match self.store.leader().await {
            Ok(Some(leader)) => leader.epoch == pool.epoch,
            Ok(None) => false,
            Err(_) => true,
        }
    }

    /// True when this master has heard no client and fewer than half of the nodes for a while, but
    /// a standby has heard some of them.
    fn is_cut_off(&self, pool: &Pool) -> bool {
        if !pool.hears_few() {
            return false;
        }
        let others = self.stand.seat.others(&self.stand.claim.address);
        others.iter().any(is_asked_instead)
    }

    async fn step_down(&self, elected: Elected, pool: &Arc<Pool>, why: String) {
        tracing::warn!(epoch = %pool.epoch, why, "stepping down");
        let is_stopping = *self.stand.stopped.borrow();
        elected.term.end();
        if !is_stopping {
            // Waiting appends may or may not be in the log; the next leader reads the log. This
            // term may write nothing any more. So another master may lead before all waiting
            // callers here have their answer.
            self.store.abandon(pool.epoch);
            self.revoke(elected.lease).await;
        }
        self.stand.seat.step_down(why);
        if timeout(REVOKING, pool.retire()).await.is_err() {
            self.store.abandon(pool.epoch);
            pool.lapse();
        }
        if is_stopping {
            self.revoke(elected.lease).await;
        }
        drop(elected);
    }
}

/// Completes when the master must stop.
pub(super) async fn told(stopped: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped, which also means stop.
    let _stopped = stopped.wait_for(|stopped| *stopped).await;
}

/// Keeps the store small while the term lasts.
async fn tend(store: Arc<dyn ElectionStore>, term: Arc<Term>) {
    let mut times = interval(MAINTAIN);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !term.is_over() {
        times.tick().await;
        match store.maintain(term.epoch).await {
            Ok(done) => tracing::debug!(?done, "metadata store maintained"),
            Err(error) => tracing::warn!(%error, "metadata store maintenance failed"),
        }
    }
}

/// True if nodes or clients contact this master although it does not lead. The entry of a dead
/// leader stays for a while and lists that leader's nodes and clients. The role in such an entry is
/// read-only if the leader's term had lapsed before.
fn is_asked_instead(member: &proto::MasterMember) -> bool {
    let has_led = [Role::Leader, Role::ReadOnly].map(Role::label);
    !has_led.contains(&member.role.as_str()) && member.heard_clients + member.heard_nodes > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_of_a_leader_that_is_gone_deposes_nobody() {
        let member = |role: Role, heard_nodes| proto::MasterMember {
            role: role.label().to_owned(),
            heard_nodes,
            ..Default::default()
        };
        assert!(is_asked_instead(&member(Role::Standby, 1)));
        assert!(!is_asked_instead(&member(Role::Standby, 0)));
        assert!(!is_asked_instead(&member(Role::Leader, 3)));
        assert!(!is_asked_instead(&member(Role::ReadOnly, 3)));
    }
}
