//! The process of a kvmaster: it stands by, is elected, leads its term, and steps down. The pool, its journal, the
//! standby and the services are the production code. The election follows `kvpool_master::leadership`, over the
//! store of the simulation instead of etcd.

use crate::clock::MachineClock;
use crate::life::Life;
use crate::net::{MasterPort, Net, master_address};
use crate::plan::{Plan, Process};
use crate::store::{Disk, Store};
use bytesize::ByteSize;
use kvpool_master::Config;
use kvpool_master::clock::Clock;
use kvpool_master::directory::Policy;
use kvpool_master::leadership::Seat;
use kvpool_master::metrics::Metrics;
use kvpool_master::overview::Watch;
use kvpool_master::pool::{Pool, TermStart};
use kvpool_master::service::{NodesService, PoolService};
use kvpool_master::standby::Standby;
use kvpool_master::store::{JournalOptions, LogSeq, MetadataStore, StoreError};
use kvpool_master::term::Term;
use kvpool_master::workers::Workers;
use kvpool_types::{ClusterId, Epoch};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

/// How often a standby looks at the log and at who leads.
const LOOK: Duration = Duration::from_millis(40);
/// How long stepping down may take.
const RETIRING: Duration = Duration::from_secs(1);
/// Bytes of the log that are read at once.
const READ_BYTES: u64 = 1 << 20;
/// How long a failed attempt waits.
const RETRY: Duration = Duration::from_millis(200);

/// One life of the process.
pub(crate) struct Master {
    pub(crate) number: usize,
    pub(crate) life: Life,
    pub(crate) clock: Arc<MachineClock>,
    pub(crate) seat: Arc<Seat>,
    net: Arc<Net>,
    store: Arc<Store>,
    elects: bool,
    /// The process is asked to end.
    retires: Notify,
    _stop: watch::Sender<bool>,
}

/// Why a term could not begin, or ended.
type Failure = String;

/// The settings of a pool that runs through its times quickly.
pub(crate) fn config(plan: &Plan) -> Config {
    Config {
        lease_ttl: Duration::from_millis(plan.lease_ms),
        max_grant_ttl: Duration::from_secs(4),
        max_wait: Duration::from_secs(5),
        heartbeat_interval: Duration::from_millis(200),
        suspect_after: Duration::from_millis(800),
        drop_after: Duration::from_secs(20),
        leader_ttl: Duration::from_millis(1_500),
        eviction_policy: match plan.evicts_by_use {
            true => Policy::Lru,
            false => Policy::Prefix,
        },
        ..Config::default()
    }
}

impl Master {
    /// Starts the process, and opens its port.
    pub(crate) fn start(
        number: usize,
        plan: &Plan,
        disk: &Arc<Disk>,
        net: &Arc<Net>,
        clock: &Arc<MachineClock>,
    ) -> anyhow::Result<Arc<Self>> {
        let life = Life::default();
        let metrics = Arc::new(Metrics::new()?);
        let clock_of_all: Arc<dyn Clock> = Arc::clone(clock) as _;
        let seat = Arc::new(Seat::new(config(plan), metrics, clock_of_all));
        let watch = Arc::new(Watch::new(Arc::clone(&seat)));
        let (stop, stopped) = watch::channel(false);
        net.open_master(
            number,
            MasterPort {
                life: life.clone(),
                seat: Arc::clone(&seat),
                pool: PoolService::new(Arc::clone(&seat), watch).without_passing(),
                nodes: NodesService::new(Arc::clone(&seat), stopped),
            },
        );
        let master = Arc::new(Self {
            number,
            store: Arc::new(Store::new(disk, number, &life)),
            life: life.clone(),
            clock: Arc::clone(clock),
            seat,
            net: Arc::clone(net),
            elects: plan.electing > 0,
            retires: Notify::new(),
            _stop: stop,
        });
        let running = Arc::clone(&master);
        tokio::spawn(async move { Box::pin(life.run(running.run())).await });
        Ok(master)
    }

    /// As at SIGTERM: a leader steps down at once. The caller ends the process.
    pub(crate) fn retire(&self) {
        self.retires.notify_one();
    }

    /// The process dies.
    pub(crate) fn kill(&self) {
        self.life.end();
        self.net.close(Process::Master(self.number));
        if let Ok(pool) = self.seat.pool() {
            // Ends its tasks, which nothing can reach any more.
            pool.quiesce();
        }
    }

    fn note(&self, what: impl std::fmt::Display) {
        self.net.trace.note(Process::Master(self.number), what);
    }

    async fn run(&self) {
        loop {
            let ended = match self.elects {
                true => self.stand_and_lead().await,
                false => self.lead_alone().await,
            };
            if let Err(why) = ended {
                self.note(format_args!("{why}"));
                self.seat.wait(why);
            }
            sleep(RETRY).await;
        }
    }

    fn term_start(&self, cluster: ClusterId, plain: JournalOptions) -> TermStart {
        TermStart {
            config: self.seat.config.clone(),
            cluster,
            store: Arc::clone(&self.store) as _,
            journal: JournalOptions {
                workers: Workers::Tasks,
                appends_aside: true,
                // Small, so that snapshots and cuts happen all the time.
                log_bytes: ByteSize::kib(8),
                capture_bytes: ByteSize::kib(4),
                log_ratio: 1,
                ..plain
            },
            clock: Arc::clone(&self.clock) as _,
            metrics: Arc::clone(&self.seat.metrics),
        }
    }

    async fn cluster(&self) -> Result<ClusterId, StoreError> {
        let fresh = ClusterId(kvpool_seams::random());
        let cluster = self.store.cluster_id(fresh).await?;
        *self.net.cluster.lock() = Some(cluster);
        Ok(cluster)
    }

    /// The only master of its store: as `Pool::start`.
    async fn lead_alone(&self) -> Result<(), Failure> {
        let cluster = self.cluster().await.map_err(|error| error.to_string())?;
        let epoch = self.store.begin_epoch(Epoch(1)).await;
        let epoch = epoch.map_err(|error| error.to_string())?;
        let standby = self.load().await?;
        let start = self.term_start(cluster, JournalOptions::default());
        let term = Arc::new(Term::unlimited(epoch));
        let pool = Pool::lead(start, standby, term).await;
        let pool = pool.map_err(|error| error.to_string())?;
        self.begin(&pool);
        let why = loop {
            if let Err(why) = pool.healthy() {
                break why;
            }
            tokio::select! {
                biased;
                later = pool.superseded() => {
                    let _known = pool.give_way(later).await;
                    break format!("a node knows the later epoch {later}");
                }
                () = self.retires.notified() => break "it is asked to end".to_owned(),
                () = sleep(LOOK) => {}
            }
        };
        self.step_down(&pool, &why).await;
        Err(why)
    }

    async fn load(&self) -> Result<Standby, Failure> {
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let standby = Standby::load(&*self.store, &self.seat.config, clock).await;
        standby.map_err(|error| error.to_string())
    }

    fn begin(&self, pool: &Arc<Pool>) {
        self.note(format_args!(
            "leads in epoch {} with {} blocks",
            pool.epoch,
            pool.blocks()
        ));
        self.seat
            .lead(Arc::clone(pool), &master_address(self.number));
    }

    async fn step_down(&self, pool: &Arc<Pool>, why: &str) {
        self.note(format_args!("steps down from epoch {}: {why}", pool.epoch));
        pool.term.end();
        if self.elects {
            let resigned = timeout(RETIRING, self.store.resign(pool.epoch)).await;
            if !matches!(resigned, Ok(Ok(()))) {
                self.note("has not said so to the store");
            }
        }
        self.seat.step_down(why);
        if timeout(RETIRING, pool.retire()).await.is_err() {
            pool.lapse();
        }
    }

    /// Follows the log until nobody leads, then stands for election.
    async fn stand_and_lead(&self) -> Result<(), Failure> {
        let fail = |error: StoreError| error.to_string();
        let cluster = self.cluster().await.map_err(fail)?;
        let ttl = self.seat.config.leader_ttl;
        let mut standby = self.load().await?;
        let (epoch, term) = loop {
            self.seat.follow(standby.applied());
            match self.store.leader().await.map_err(fail)? {
                // A leftover of an earlier life of this master.
                Some(leader) if leader.master == self.number => {
                    self.store.resign(leader.epoch).await.map_err(fail)?;
                }
                Some(leader) => {
                    self.seat
                        .learn(&master_address(leader.master), leader.epoch);
                }
                None => {
                    self.seat.learn("", self.seat.known().epoch);
                    let asked = self.clock.now();
                    if let Some(epoch) = self.store.campaign(ttl).await.map_err(fail)? {
                        let term = Term::until(epoch, asked.after(usable(ttl)));
                        break (epoch, Arc::new(term));
                    }
                }
            }
            self.follow(&mut standby).await?;
            sleep(LOOK).await;
        };
        self.note(format_args!("is elected for epoch {epoch}"));
        let keeping = async {
            loop {
                sleep(ttl / 4).await;
                let asked = self.clock.now();
                match timeout(ttl / 3, self.store.keep_alive(epoch, ttl)).await {
                    Ok(Ok(true)) => term.renew(asked.after(usable(ttl))),
                    Ok(Ok(false)) => return "the store knows its lease no more".to_owned(),
                    Ok(Err(_)) | Err(_) => {}
                }
            }
        };
        let leading = async {
            let promoted = timeout(ttl * 3, self.promote(standby, cluster, &term)).await;
            let pool = match promoted {
                Ok(Ok(pool)) => pool,
                Ok(Err(why)) => return (None, why),
                Err(_) => return (None, "it took too long to begin the term".to_owned()),
            };
            self.begin(&pool);
            loop {
                if let Err(why) = pool.healthy() {
                    return (Some(pool), why);
                }
                if let Ok(Ok(Some(leader))) = timeout(LOOK * 4, self.store.leader()).await
                    && leader.epoch > epoch
                {
                    return (Some(pool), format!("m{} was elected", leader.master));
                }
                tokio::select! {
                    biased;
                    later = pool.superseded() => {
                        let _known = pool.give_way(later).await;
                        return (Some(pool), format!("a node knows the later epoch {later}"));
                    }
                    () = self.retires.notified() => {
                        return (Some(pool), "it is asked to end".to_owned());
                    }
                    () = sleep(LOOK) => {}
                }
            }
        };
        let (pool, why) = tokio::select! {
            biased;
            why = keeping => (self.seat.pool().ok(), why),
            ended = leading => ended,
        };
        match pool {
            Some(pool) => self.step_down(&pool, &why).await,
            None => {
                term.end();
                let _told = timeout(RETIRING, self.store.resign(epoch)).await;
            }
        }
        Err(why)
    }

    /// Applies what the log has behind the standby.
    async fn follow(&self, standby: &mut Standby) -> Result<(), Failure> {
        let fail = |error: StoreError| error.to_string();
        let groups = self.store.read_log(standby.applied(), READ_BYTES).await;
        for (seq, group) in groups.map_err(fail)? {
            let applied = standby.apply(seq, &group);
            applied.map_err(|error| error.to_string())?;
        }
        let span = self.store.log_span().await.map_err(fail)?;
        if standby.applied() < span.cut {
            return Err("the log was cut before this standby had read it".to_owned());
        }
        standby.forget(span.cut.min(standby.applied()));
        Ok(())
    }

    async fn promote(
        &self,
        mut standby: Standby,
        cluster: ClusterId,
        term: &Arc<Term>,
    ) -> Result<Arc<Pool>, Failure> {
        let fail = |error: StoreError| error.to_string();
        let begun = Instant::now();
        let span = self.store.log_span().await.map_err(fail)?;
        if standby.applied() < span.cut {
            standby = self.load().await?;
        }
        while standby.applied() < span.last {
            let groups = self.store.read_log(standby.applied(), READ_BYTES).await;
            let groups: Vec<(LogSeq, bytes::Bytes)> = groups.map_err(fail)?;
            if groups.is_empty() {
                return Err(format!("the log ends before group {}", span.last));
            }
            for (seq, group) in groups {
                let applied = standby.apply(seq, &group);
                applied.map_err(|error| error.to_string())?;
            }
        }
        let positions = self.store.snapshot_positions().await.map_err(fail)?;
        standby.note(span.cut, positions);
        let start = self.term_start(cluster, JournalOptions::default());
        let pool = Pool::lead(start, standby, Arc::clone(term)).await;
        let pool = pool.map_err(|error| error.to_string())?;
        self.note(format_args!(
            "is promoted within {} ms",
            begun.elapsed().as_millis()
        ));
        Ok(pool)
    }
}

/// The part of a lease that its holder may use.
fn usable(ttl: Duration) -> Duration {
    ttl * 9 / 10
}
