//! The process of a kvmaster: it stands by, is elected, leads its term, and steps down. The pool, its journal, the
//! standby, the services and the election are the production code. The store of the simulation stands for etcd.

use crate::clock::MachineClock;
use crate::life::Life;
use crate::net::{MasterPort, Net, master_address};
use crate::plan::{Plan, Process};
use crate::store::{Disk, Store};
use async_trait::async_trait;
use bytesize::ByteSize;
use kvpool_master::Config;
use kvpool_master::clock::Clock;
use kvpool_master::directory::Policy;
use kvpool_master::leadership::{Candidate, Seat, Surroundings};
use kvpool_master::metrics::Metrics;
use kvpool_master::overview::Watch;
use kvpool_master::pool::{Pool, TermStart};
use kvpool_master::service::{NodesService, PoolService};
use kvpool_master::standby::Standby;
use kvpool_master::store::{
    Claim, ElectionStore, JournalOptions, MetadataStore, OpenError, StoreError,
};
use kvpool_master::term::Term;
use kvpool_master::workers::Workers;
use kvpool_types::{ClusterId, Epoch};
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

/// How often a master is looked at.
const LOOK: Duration = Duration::from_millis(40);
/// How long stepping down may take.
const RETIRING: Duration = Duration::from_secs(1);
/// How long a failed attempt waits.
const RETRY: Duration = Duration::from_millis(200);

/// One life of the process.
pub(crate) struct Master {
    pub(crate) number: usize,
    pub(crate) life: Life,
    pub(crate) clock: Arc<MachineClock>,
    pub(crate) seat: Arc<Seat>,
    net: Arc<Net>,
    disk: Arc<Disk>,
    store: Arc<Store>,
    elects: bool,
    /// The process is asked to end.
    retires: Notify,
    has_retired: AtomicBool,
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
        drop_after: Duration::from_millis(plan.drop_ms),
        ssd_drop_after: plan
            .ssd_drop_ms
            .map_or(Config::default().ssd_drop_after, Duration::from_millis),
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
            disk: Arc::clone(disk),
            store: Arc::new(Store::new(disk, number, &life)),
            life: life.clone(),
            clock: Arc::clone(clock),
            seat,
            net: Arc::clone(net),
            elects: plan.electing > 0,
            retires: Notify::new(),
            has_retired: AtomicBool::new(false),
            _stop: stop,
        });
        let running = Arc::clone(&master);
        tokio::spawn(async move { Box::pin(life.run(running.run())).await });
        Ok(master)
    }

    /// As at SIGTERM: a leader steps down at once. The caller ends the process.
    pub(crate) fn retire(&self) {
        self.has_retired.store(true, Ordering::Release);
        self.retires.notify_one();
    }

    /// Whether the process runs, and was not asked to end.
    pub(crate) fn stands(&self) -> bool {
        !self.life.is_over() && !self.has_retired.load(Ordering::Acquire)
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
                true => self.stand().await,
                false => self.lead_alone().await,
            };
            if let Err(why) = ended {
                self.note(format_args!("{why}"));
                self.seat.wait(why);
            }
            if self.has_retired.load(Ordering::Acquire) {
                return;
            }
            sleep(RETRY).await;
        }
    }

    fn term_start(&self, cluster: ClusterId, plain: JournalOptions) -> TermStart {
        TermStart {
            config: self.seat.config.clone(),
            cluster,
            store: Arc::clone(&self.store) as _,
            journal: journal(plain),
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
        self.seat.step_down(why);
        if timeout(RETIRING, pool.retire()).await.is_err() {
            pool.lapse();
        }
    }

    /// One of several masters, until it is asked to end.
    async fn stand(&self) -> Result<(), Failure> {
        self.cluster().await.map_err(|error| error.to_string())?;
        let claim = Claim {
            id: format!("{:032x}", kvpool_seams::random::<u128>()),
            address: master_address(self.number),
            http_address: String::new(),
        };
        let surroundings = Around {
            number: self.number,
            life: self.life.clone(),
            net: Arc::clone(&self.net),
            disk: Arc::clone(&self.disk),
        };
        let candidate = Mortal(Candidate::stand(
            Arc::clone(&self.seat),
            Arc::clone(&self.clock) as _,
            claim,
            Arc::new(surroundings),
            journal(JournalOptions::default()),
            None,
        ));
        tokio::select! {
            biased;
            () = self.retires.notified() => {}
            never = self.tell_roles() => match never {},
        }
        self.note("is asked to end");
        candidate.0.stop().await;
        Err("it has ended".to_owned())
    }

    /// Writes into the trace what the master is.
    async fn tell_roles(&self) -> Infallible {
        let mut told = String::new();
        loop {
            let role = match self.seat.pool() {
                Ok(pool) => format!("leads in epoch {}", pool.epoch),
                Err(why) => why.reason,
            };
            if role != told {
                self.note(&role);
                told = role;
            }
            sleep(LOOK).await;
        }
    }
}

/// A candidate that dies with its process.
struct Mortal(Candidate);

impl Drop for Mortal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a candidate reaches.
#[derive(Debug)]
struct Around {
    number: usize,
    life: Life,
    net: Arc<Net>,
    disk: Arc<Disk>,
}

#[async_trait]
impl Surroundings for Around {
    async fn open(&self) -> Result<Arc<dyn ElectionStore>, OpenError> {
        self.life.check().await;
        Ok(Arc::new(Store::new(&self.disk, self.number, &self.life)))
    }

    async fn meet(&self, address: &str) -> io::Result<()> {
        self.life.check().await;
        self.net.meet(self.number, address).await
    }
}

/// Small, so that snapshots and cuts happen all the time.
fn journal(plain: JournalOptions) -> JournalOptions {
    JournalOptions {
        workers: Workers::Tasks,
        appends_aside: true,
        log_bytes: ByteSize::kib(8),
        capture_bytes: ByteSize::kib(4),
        log_ratio: 1,
        ..plain
    }
}
