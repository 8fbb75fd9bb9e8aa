//! The state that the masters of one pool share: the metadata store, the clock, and the nodes.

use super::Nodes;
use kvpool_master::Config;
use kvpool_master::clock::{BootClock, BootInstant, Clock};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{Pool, TermStart};
use kvpool_master::standby::Standby;
use kvpool_master::store::journal::JournalOptions;
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore, MetadataStore};
use kvpool_master::term::Term;
use kvpool_types::{ClusterId, Epoch};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long a term lasts unless the test ends it: longer than any test.
const TERM: Duration = Duration::from_secs(3600);

/// The settings of a pool.
pub(crate) struct Setup {
    pub(crate) config: Config,
    pub(crate) id: ClusterId,
    /// The epoch of the first term.
    pub(crate) epoch: u64,
    /// Whether the nodes register with the client's host id.
    pub(crate) is_near: bool,
    /// The bytes of the single segment of each node. Only written blocks take memory.
    pub(crate) segment_bytes: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            config: Config {
                lease_ttl: Duration::from_secs(60),
                // The nodes send one heartbeat per term.
                suspect_after: 10 * TERM,
                drop_after: 20 * TERM,
                ..Config::default()
            },
            id: ClusterId(5),
            epoch: 1,
            is_near: false,
            segment_bytes: 1 << 30,
        }
    }
}

/// The machine's clock, which a test can move forward.
#[derive(Default)]
struct MovedClock(AtomicU64);

impl Clock for MovedClock {
    fn now(&self) -> BootInstant {
        BootInstant(BootClock.now().0 + self.0.load(Ordering::Acquire))
    }
}

/// The state that the masters of one pool share.
pub(crate) struct Cluster {
    pub(crate) nodes: Nodes,
    pub(super) setup: Setup,
    store: Arc<EmbeddedStore>,
    clock: Arc<MovedClock>,
    _directory: tempfile::TempDir,
}

impl Cluster {
    /// A pool without a leader.
    pub(crate) async fn start(setup: Setup) -> Arc<Self> {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        store.cluster_id(setup.id).await.unwrap();
        if setup.epoch > 1 {
            store.begin_epoch(Epoch(setup.epoch - 1)).await.unwrap();
        }
        Arc::new(Self {
            nodes: Nodes::default(),
            setup,
            store: Arc::new(store),
            clock: Arc::default(),
            _directory: directory,
        })
    }

    /// Begins the next term, and registers the nodes in it.
    pub(super) async fn begin_term(&self) -> Arc<Pool> {
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let epoch = self.store.begin_epoch(Epoch(1)).await.unwrap();
        let config = self.setup.config.clone();
        let standby = Standby::load(&*self.store, &config, Arc::clone(&clock));
        let standby = standby.await.unwrap();
        let term = Arc::new(Term::until(epoch, clock.now().after(TERM)));
        let start = TermStart {
            config,
            cluster: self.setup.id,
            store: Arc::clone(&self.store) as _,
            journal: JournalOptions::default(),
            clock,
            metrics: Arc::new(Metrics::new().unwrap()),
        };
        let pool = Pool::lead(start, standby, term).await.unwrap();
        self.nodes.register(&pool, &self.setup).await;
        pool
    }

    /// The epoch of the latest term.
    pub(super) async fn epoch(&self) -> Epoch {
        self.store.epoch().await.unwrap()
    }

    /// Moves the clock past the end of the term. The leader may not lead until the term is confirmed.
    pub(crate) fn outlast_term(&self) {
        let by = u64::try_from(2 * TERM.as_millis()).unwrap();
        self.clock.0.fetch_add(by, Ordering::AcqRel);
    }

    /// Confirms the term of `pool` again.
    pub(crate) fn confirm_term(&self, pool: &Pool) {
        pool.term.renew(self.clock.now().after(TERM));
    }

    pub(super) fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock) as _
    }
}
