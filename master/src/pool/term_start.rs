//! The start of a term: a pool over the durable metadata.
//!
//! A stored segment is in the state unreported until its node registers in this term. Until then
//! nothing on it is readable or grantable. The registration closes every grant of earlier terms.

use super::segment_ids::SegmentIds;
use super::{Pool, caretaker, evictor, replicas, snapshot, tiering};
use crate::clock::Clock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::placement::quarantine::{Freed, Quarantine};
use crate::reservations::Reservations;
use crate::standby::Standby;
use crate::store::journal::{Ack, Journal, JournalOptions};
use crate::store::record::{self, Record};
use crate::store::{MetadataStore, RecoveryError, StoreError};
use crate::term::Term;
use crate::workers::{Wake, Workers};
use crate::writers::Writers;
use kvpool_types::{ClusterId, Code, Epoch, Extent, Version};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The number of versions that a term reserves at a time.
const VERSION_WINDOW: u64 = 1 << 40;

/// Why a term could not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The store failed.
    #[error("metadata store: {0}")]
    Store(#[from] StoreError),
    /// The stored metadata cannot be read.
    #[error("the metadata cannot be recovered: {0}")]
    Recovery(#[from] RecoveryError),
    /// The log takes no records.
    #[error("metadata log: {0}")]
    Log(Code),
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
    /// The journal cannot be started.
    #[error(transparent)]
    Journal(#[from] crate::store::journal::StartError),
}

/// Starts one worker of a term.
type StartWorker = fn(&Arc<Pool>, Workers) -> std::io::Result<()>;

const WORKERS: [StartWorker; 4] = [
    evictor::start,
    caretaker::start,
    tiering::start,
    replicas::start,
];

/// Starts the workers. If one cannot start, the workers before it end. Otherwise each would keep
/// the pool alive.
fn start_workers(
    pool: &Arc<Pool>,
    workers: Workers,
    starts: &[StartWorker],
) -> std::io::Result<()> {
    let mut starts = starts.iter();
    let begun = starts.try_for_each(|start| start(pool, workers));
    begun.inspect_err(|_| pool.quiesce())
}

/// The parameters of a term, apart from the durable metadata.
#[derive(Clone)]
pub struct TermStart {
    /// The settings.
    pub config: Config,
    /// The pool's id.
    pub cluster: ClusterId,
    /// The store of the log and the snapshots.
    pub store: Arc<dyn MetadataStore>,
    /// Options of the journal: groups, snapshots and cuts. The term's other work runs on the same workers.
    pub journal: JournalOptions,
    /// The clock of leases and grants.
    pub clock: Arc<dyn Clock>,
    /// The metrics of the process, over all its terms.
    pub metrics: Arc<Metrics>,
}

impl Pool {
    /// Begins a term on a store with a single master. Its epoch is above every earlier one, and it
    /// has all durable blocks.
    ///
    /// # Errors
    ///
    /// [`StartError`] when the store failed, when its metadata cannot be read, or when a thread
    /// cannot be started.
    pub async fn start(
        config: Config,
        store: Arc<dyn MetadataStore>,
        clock: Arc<dyn Clock>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, StartError> {
        let cluster = store.cluster_id(ClusterId(kvpool_seams::random())).await?;
        let epoch = store.begin_epoch(Epoch(1)).await?;
        let standby = Standby::load(&*store, &config, Arc::clone(&clock)).await?;
        let start = TermStart {
            config,
            cluster,
            store,
            journal: JournalOptions::default(),
            clock,
            metrics,
        };
        Self::lead(start, standby, Arc::new(Term::unlimited(epoch))).await
    }

    /// Begins `term` with a standby's state, which must contain all durable records. Returns when
    /// the term may grant room.
    ///
    /// # Errors
    ///
    /// [`StartError`] when the log refuses the first records, or when a thread cannot be started.
    pub async fn lead(
        start: TermStart,
        mut standby: Standby,
        term: Arc<Term>,
    ) -> Result<Arc<Self>, StartError> {
        let TermStart {
            config,
            cluster,
            store,
            journal,
            clock,
            metrics,
        } = start;
        standby.sweep_all();
        let (now, workers) = (clock.now(), journal.workers);
        let epoch = term.epoch;
        let Standby {
            directory,
            tier,
            namespaces,
            members,
            placement,
            seed,
            is_seed_stored,
            versions: first_version,
            next_segment,
            state,
            mut recently_freed,
            ..
        } = standby;
        // A standby has not heard the nodes, so their silence counts from now.
        for node in members.all() {
            node.wait_from(now);
        }
        let recently_freed = recently_freed.take();
        tier.begin_term();
        let blocks = directory.blocks() + tier.directory().blocks();
        let lease_floor = if blocks == 0 && recently_freed.is_empty() {
            crate::clock::BootInstant(0)
        } else {
            now.after(config.lease_ttl)
        };
        let reservations = Reservations::new(Arc::clone(directory.accounts()));
        let pool = Arc::new(Self {
            cluster,
            epoch,
            term,
            metrics,
            members,
            placement,
            started: now,
            directory,
            tier,
            tiering: super::tiering::Tiering::new(workers),
            replicas: replicas::Replicas::new(config.replica_bandwidth.0, workers),
            seed,
            namespaces,
            namespace_creation: Arc::default(),
            namespace_changes: Arc::default(),
            namespace_deletion: Arc::default(),
            registration: tokio::sync::Mutex::default(),
            reservations,
            writers: Writers::default(),
            quarantine: Quarantine::default(),
            journal: std::sync::OnceLock::new(),
            lease_floor,
            first_version,
            next_version: AtomicU64::new(first_version.0),
            versions_until: AtomicU64::new(first_version.0 + VERSION_WINDOW),
            segment_ids: SegmentIds::new(next_segment),
            hidden: RwLock::default(),
            proven: Mutex::default(),
            changed: tokio::sync::Notify::new(),
            put_queue: super::put_queue::PutQueue::default(),
            quotas: super::quotas::QuotaQueue::default(),
            recent_puts: super::recent_puts::RecentPuts::default(),
            failed_puts: super::failed_puts::FailedPuts::default(),
            evictor_wake: Wake::new(workers),
            caretaker_wake: Wake::new(workers),
            stopping: AtomicBool::new(false),
            superseded: Mutex::default(),
            superseded_told: tokio::sync::Notify::new(),
            nodes_returned: AtomicBool::new(false),
            nodes_returned_told: tokio::sync::Notify::new(),
            evicting: RwLock::default(),
            takers: parking_lot::Mutex::default(),
            sweeps: parking_lot::Mutex::default(),
            leading: AtomicBool::new(true),
            lapse_told: tokio::sync::Notify::new(),
            tended: AtomicU64::new(now.0),
            heard_client: AtomicU64::new(now.0),
            hears_nobody_since: AtomicU64::new(super::silence::HEARS_SOMEBODY),
            store: Arc::clone(&store),
            clock,
            config,
        });
        let freed = recently_freed.into_iter().map(|left| Freed {
            extent: Extent {
                segment: left.segment.id,
                offset: left.offset,
                length: left.length,
            },
            segment: left.segment,
            index: left.index,
            grant: None,
            before: pool.next_grant(),
            not_before: lease_floor,
            since: now,
            stuck: false,
        });
        pool.free(freed.collect());
        pool.check_nodes_returned();
        let source = Arc::new(snapshot::Source(Arc::downgrade(&pool)));
        let journal = Journal::start(store, epoch, &state, source, journal)?;
        let _first = pool.journal.set(journal);
        pool.log_first_records(is_seed_stored).await?;
        start_workers(&pool, workers, &WORKERS)?;
        tracing::info!(
            %cluster,
            %epoch,
            blocks = pool.blocks(),
            log = %state.span.last,
            took_ms = pool.uptime_ms(),
            "term begins"
        );
        Ok(pool)
    }

    /// Logs the numbers that this term reserves, and the seed unless an earlier term stored it. A
    /// full log takes no records. If the seed is stored, the term then begins without reserved
    /// numbers.
    async fn log_first_records(&self, is_seed_stored: bool) -> Result<(), StartError> {
        let until = Version(self.versions_until.load(Ordering::Acquire));
        let mut records = vec![
            Record::VersionsGranted(record::VersionsGranted { until }),
            self.segment_ids.record(),
        ];
        if !is_seed_stored {
            let seed = self.seed;
            records.push(Record::Seed(record::Seed { seed }));
        }
        match self.log(records, || {}).await {
            // Such a term serves gets. Puts and new nodes reserve numbers once the store has room.
            Err(Code::StoreFull) if is_seed_stored => self.reserve_nothing(),
            logged => logged.map_err(StartError::Log)?,
        }
        Ok(())
    }

    /// Takes back the reservations of this term, because they could not be logged.
    fn reserve_nothing(&self) {
        let first = self.first_version.0;
        self.versions_until.store(first, Ordering::Release);
        self.segment_ids.reserve_nothing();
    }

    /// Reserves more versions before the available ones run out.
    pub(super) fn top_up_versions(self: &Arc<Self>) {
        let until = self.versions_until.load(Ordering::Acquire);
        let next = self.next_version.load(Ordering::Acquire);
        if until.saturating_sub(next) > VERSION_WINDOW / 2 {
            return;
        }
        let further = until + VERSION_WINDOW;
        let record = Record::VersionsGranted(record::VersionsGranted {
            until: Version(further),
        });
        let pool = Arc::clone(self);
        self.journal()
            .submit_now(vec![record], Ack::Durable, move |durable| {
                if durable.is_ok() {
                    pool.versions_until.fetch_max(further, Ordering::AcqRel);
                }
            });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootClock;
    use crate::store::{EmbeddedOptions, EmbeddedStore};
    use std::time::{Duration, Instant};

    /// Starting a term is retried, and memory has no room for the pools of earlier attempts.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_pool_whose_workers_cannot_all_start_goes() {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let begun = Pool::start(
            Config::default(),
            Arc::new(store),
            Arc::new(BootClock),
            Arc::new(Metrics::new().unwrap()),
        );
        let pool = begun.await.unwrap();
        let weak = Arc::downgrade(&pool);
        let refused: StartWorker = |_, _| Err(std::io::Error::other("no more threads"));
        let starts = [evictor::start as StartWorker, refused];
        assert!(start_workers(&pool, Workers::Threads, &starts).is_err());
        drop(pool);
        let left = Instant::now();
        while weak.strong_count() > 0 {
            assert!(left.elapsed() < Duration::from_secs(5), "a worker holds it");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
