//! The master's operations on the pool as methods of [`Pool`], independent of the protocol of the
//! call, and the threads for eviction and expiry.
//!
//! ```text
//!  service ─► Pool ─┬─ reserve ──► Reservations, Placement
//!                   ├─ commit ───► Journal ──(durable)──► Directory
//!                   ├─ read ─────► Directory (leases, recency)
//!                   ├─ remove ───► Directory ──► Journal ──(durable)──► Quarantine
//!                   ├─ nodes ────► Members, Placement, Quarantine
//!                   ├─ replicas ─► tasks ─► pulls from node to node
//!                   └─ evictor, mover, caretaker (threads)
//! ```
//!
//! Lock order:
//!
//! 1. `tending` (stores are being ordered), and after it `evicting` (blocks leave the directory, and
//!    their removal is not submitted yet);
//! 2. `queueing` (the blocks of a put become visible, and are queued for their copies);
//! 3. the table of segments;
//! 4. the hidden replicas;
//! 5. the reservations;
//! 6. one of: the keys whose removal is being logged, the queues of blocks for media
//!    (`demotions`), the media that no node has (`absent`);
//! 7. the traffic of media;
//! 8. the room that loads wait for (`wanted_room`), and after it the queue for quotas;
//! 9. the hard quotas of one namespace, and after them the pulls;
//! 10. the keys that media admitted (in `admission`);
//! 11. stripes of the directory in the order of their numbers, then their lineage;
//! 12. the extents of one segment, with no stripe locked.
//!
//! A thread that holds the lock of the replicas found intact takes no other lock. The same holds
//! for the locks of refused puts, and of transfers whose records the log refused (`refused`). It
//! also holds for those of the next victims of nodes (`next_victims`), and of the budgets and lost
//! keys of `admission`. A thread that holds the lock of the waiting puts (`put_queue`) locks only
//! the extents of segments. A thread that holds the lock of the blocks that were leased for a
//! waiting lookup locks only stripes.
//!
//! A thread takes the read lock of the table of segments only once at a time. A waiting writer goes
//! before new readers, so a second read lock of the same thread would deadlock.

pub mod audit;
mod caretaker;
mod commit;
mod evictor;
mod failed_puts;
mod inspect;
mod nodes;
mod overview;
mod proven;
mod put_queue;
mod quotas;
mod read;
mod recent_puts;
mod registration;
mod remove;
mod replicas;
mod reserve;
mod segment_ids;
mod silence;
mod snapshot;
mod sweep;
mod tenancy;
mod term_start;
mod tiering;

pub use caretaker::Presence;
pub use commit::{CommitItem, Written};
pub use inspect::{Described, DescribedReplica, Listed, Page};
pub use nodes::RegisterError;
pub use read::{Bitmap, Found, Holder, LeaseOf, Leased};
pub use remove::{Removal, RemoveReport};
pub use replicas::{Blocks, Change, TaskId, TaskRefused, TaskState, TaskView, Wish};
pub use reserve::{Granted, ReserveOptions};
pub use silence::SILENCE;
pub use tenancy::{NamespaceRefused, NamespaceView};
pub use term_start::{StartError, TermStart};
pub use tiering::{Detached, MEDIUM_STATES, MOST_MEDIA, MediumView, OfferedMedium};

use crate::clock::{BootInstant, Clock};
use crate::config::{CommitAck, Config};
use crate::directory::{Directory, Removed, Replica};
use crate::membership::{Members, NodeState, StoreNode};
use crate::metrics::Metrics;
use crate::namespaces::Namespaces;
use crate::placement::Placement;
use crate::placement::quarantine::{Freed, Quarantine};
use crate::reservations::Reservations;
use crate::store::journal::{Ack, Journal};
use crate::store::{LogSeq, MetadataStore, Record, Stalled, StoreError};
use crate::term::Term;
use crate::tier::Tier;
use crate::workers::Wake;
use crate::writers::Writers;
use kvpool_types::{ClusterId, Epoch, Extent, GrantId, Length, Offset, SegmentId, Version};
use parking_lot::{Mutex, RwLock};
use proven::Proven;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// How long a new term delays its answers until the nodes of the last term return.
const NODE_RETURN_WAIT: Duration = Duration::from_secs(2);
/// A store that takes no write for this long is reported. A new leader of etcd takes less.
const STALL_TOLD: Duration = Duration::from_secs(5);

/// The location of a replica, and its block's version. A new block may be at this location before
/// the node has re-verified the replica.
type HiddenReplica = (SegmentId, Offset, Version);

/// One term of one kvmaster: the state that its operations share.
pub struct Pool {
    /// The settings of this master.
    pub config: Config,
    /// The pool's id.
    pub cluster: ClusterId,
    /// The epoch of this term.
    pub epoch: Epoch,
    /// The term: its deadline and its end.
    pub term: Arc<Term>,
    /// The metrics of the process.
    pub metrics: Arc<Metrics>,
    /// The store nodes.
    pub members: Members,
    /// The segments of the store nodes.
    pub placement: Placement,
    clock: Arc<dyn Clock>,
    started: BootInstant,
    directory: Directory,
    tier: Tier,
    tiering: tiering::Tiering,
    replicas: replicas::Replicas,
    namespaces: Namespaces,
    /// Held while a namespace is created.
    namespace_creation: Arc<tokio::sync::Mutex<()>>,
    /// Held while settings of a namespace change, and while a deletion begins.
    namespace_changes: Arc<tokio::sync::Mutex<()>>,
    /// Held while a namespace is deleted.
    namespace_deletion: Arc<tokio::sync::Mutex<()>>,
    registration: tokio::sync::Mutex<()>,
    reservations: Reservations,
    /// The clients whose open puts end when their last connection ends.
    pub writers: Writers,
    quarantine: Quarantine,
    journal: std::sync::OnceLock<Journal>,
    /// Until this time every block of an earlier term counts as leased: leases of the last term may
    /// still run.
    lease_floor: BootInstant,
    /// The first version of this term.
    first_version: Version,
    next_version: AtomicU64,
    /// A version from here on needs another durable reservation of versions first.
    versions_until: AtomicU64,
    /// The secret of the directory's hashes.
    seed: u64,
    store: Arc<dyn MetadataStore>,
    segment_ids: segment_ids::SegmentIds,
    /// Replicas that a client reported with a wrong checksum and whose node has not re-verified
    /// them yet.
    hidden: RwLock<HashSet<HiddenReplica>>,
    /// The replicas that their nodes recently found intact.
    proven: Mutex<Proven>,
    /// Notified when a node's state changes, and at the term's end.
    changed: Notify,
    put_queue: put_queue::PutQueue,
    quotas: quotas::QuotaQueue,
    recent_puts: recent_puts::RecentPuts,
    failed_puts: failed_puts::FailedPuts,
    evictor_wake: Wake,
    /// For the caretaker, which polls: no event wakes it.
    caretaker_wake: Wake,
    stopping: AtomicBool,
    /// Set when a node knows a later term than this one.
    superseded: Mutex<Option<Epoch>>,
    superseded_told: Notify,
    /// True when the nodes of the last term have returned, or their time to return is over.
    nodes_returned: AtomicBool,
    nodes_returned_told: Notify,
    /// Read-locked from the moment blocks leave the directory until their removal is submitted to
    /// the log.
    evicting: RwLock<()>,
    /// The segments that took blocks when the evictor last asked.
    takers: Mutex<HashSet<SegmentId>>,
    /// The blocks of dropped nodes that are still in the directory.
    sweeps: Mutex<VecDeque<sweep::Sweep>>,
    /// True if the term was within its deadline at the last check.
    leading: AtomicBool,
    lapse_told: Notify,
    /// The time of the caretaker's last check.
    tended: AtomicU64,
    /// The time of the last direct call from a client.
    heard_client: AtomicU64,
    /// The time since which the master hears neither a client nor a node;
    /// [`silence::HEARS_SOMEBODY`] while it hears one.
    hears_nobody_since: AtomicU64,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("cluster", &self.cluster)
            .field("epoch", &self.epoch)
            .finish()
    }
}

/// The extents of a block that was removed, or of a put that ended.
#[derive(Clone, Copy)]
struct FreedReplicas<'a> {
    replicas: &'a [Replica],
    version: Version,
    length: Length,
    /// The end of the last lease on the extents.
    not_before: BootInstant,
}

impl Pool {
    /// The master's clock.
    pub(crate) fn now(&self) -> BootInstant {
        self.clock.now()
    }

    /// True while this master may grant, lease and change anything.
    pub fn leads(&self) -> bool {
        self.term.leads(self.now())
    }

    /// Completes when the term is past its deadline or has ended. A call that waits for the store
    /// then stops waiting.
    async fn lapsed(&self) {
        loop {
            let mut told = std::pin::pin!(self.lapse_told.notified());
            told.as_mut().enable();
            if !self.leading.load(Ordering::Acquire) {
                return;
            }
            told.await;
        }
    }

    /// The time until the term's deadline; `None` without a deadline.
    pub fn term_left(&self) -> Option<Duration> {
        self.term.left(self.now())
    }

    /// The time since the term's deadline passed.
    pub fn overdue(&self) -> Duration {
        self.term.overdue(self.now())
    }

    fn journal(&self) -> &Journal {
        self.journal
            .get()
            .expect("invariant: the journal is set before the pool is shared")
    }

    fn ack(&self) -> Ack {
        match self.config.commit_ack {
            CommitAck::Durable => Ack::Durable,
            CommitAck::Memory => Ack::Memory,
        }
    }

    /// The age of this term in milliseconds.
    pub fn uptime_ms(&self) -> u64 {
        self.now().0.saturating_sub(self.started.0)
    }

    /// The milliseconds since `then`.
    pub fn age_ms(&self, then: BootInstant) -> u64 {
        self.now().0.saturating_sub(then.0)
    }

    /// The names of all namespaces.
    pub fn namespace_names(&self) -> Vec<String> {
        self.namespaces.names()
    }

    /// The number of visible blocks.
    pub fn blocks(&self) -> u64 {
        self.directory.blocks()
    }

    /// The number of open puts.
    pub fn reservations(&self) -> usize {
        self.reservations.len()
    }

    /// Waits until every node of the last term has returned, or its time to return is over. An
    /// earlier answer would miss blocks on these nodes.
    pub async fn nodes_returned(&self) {
        while !self.nodes_returned.load(Ordering::Acquire) {
            let mut told = std::pin::pin!(self.nodes_returned_told.notified());
            told.as_mut().enable();
            if !self.nodes_returned.load(Ordering::Acquire) {
                told.await;
            }
        }
    }

    /// True when [`Pool::nodes_returned`] would return at once.
    pub fn have_nodes_returned(&self) -> bool {
        self.nodes_returned.load(Ordering::Acquire)
    }

    /// Checks whether the wait for nodes is over.
    fn check_nodes_returned(&self) {
        if self.nodes_returned.load(Ordering::Acquire) {
            return;
        }
        let waits = |node: &Arc<StoreNode>| node.state() == NodeState::Unreported;
        let wait = NODE_RETURN_WAIT.min(self.config.suspect_after);
        if self.now().since(self.started) >= wait || !self.members.all().iter().any(waits) {
            self.nodes_returned.store(true, Ordering::Release);
            self.nodes_returned_told.notify_waiters();
        }
    }

    /// An error if durable writes no longer succeed.
    pub fn healthy(&self) -> Result<(), String> {
        self.journal().healthy().map_err(|error| error.to_string())
    }

    /// An error while the log takes no records, because the store is full. Gets continue.
    pub fn has_room(&self) -> Result<(), crate::store::JournalError> {
        self.journal().has_room()
    }

    /// Why the store has taken no write for 5 s or longer. Puts wait meanwhile, and gets continue.
    pub fn stalled(&self) -> Option<Stalled> {
        let stalled = self.store.stalled();
        stalled.filter(|stalled| stalled.waited >= STALL_TOLD)
    }

    /// False while the store would refuse a record, or would wait for space. A load, a store or a
    /// pull that began now could not be recorded.
    fn takes_records(&self) -> bool {
        self.has_room().is_ok() && !self.store.is_full()
    }

    /// Completes when a node proves a later term. The next term's epoch must be above the returned
    /// one.
    pub async fn superseded(&self) -> Epoch {
        loop {
            let told = self.superseded_told.notified();
            let known = *self.superseded.lock();
            match known {
                Some(epoch) => break epoch,
                None => told.await,
            }
        }
    }

    /// Stores an epoch later than this term's, so that the next term is above it.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the store did not store the epoch.
    pub async fn give_way(&self, later: Epoch) -> Result<Epoch, StoreError> {
        self.store.begin_epoch(later).await
    }

    /// The position of the last group of the log.
    pub fn log_position(&self) -> LogSeq {
        self.journal().position()
    }

    /// Ends all waits: puts that wait for room get their answer, and the threads end.
    pub fn quiesce(&self) {
        self.stopping.store(true, Ordering::Release);
        self.evictor_wake.wake();
        self.put_queue.wake_all();
        self.changed.notify_waiters();
        self.tiering.wake_lookups();
        self.nodes_returned.store(true, Ordering::Release);
        self.nodes_returned_told.notify_waiters();
    }

    /// Ends the term: calls are refused, sessions of nodes end, and waiters on the log learn that
    /// the outcome is unknown.
    pub async fn retire(&self) {
        self.term.end();
        self.quiesce();
        for node in self.members.all() {
            node.end_session(self.now());
        }
        self.journal().close().await;
        self.lapse();
    }

    /// Ends all waits for the store. The waiting calls learn that the outcome is unknown.
    pub fn lapse(&self) {
        self.leading.store(false, Ordering::Release);
        self.lapse_told.notify_waiters();
        self.tiering.wake_lookups();
    }

    /// Makes the queued records durable and closes the store.
    pub async fn stop(&self) {
        self.quiesce();
        self.journal().close().await;
        if let Err(error) = self.store.close().await {
            tracing::warn!(%error, "metadata store not closed cleanly");
        }
    }

    /// Every counter and gauge by its short name.
    pub fn counters(&self) -> std::collections::HashMap<String, u64> {
        let mut counters = self.metrics.snapshot();
        // These gauges are samples for Prometheus. The reply has the current values instead.
        for sampled in ["used_bytes", "capacity_bytes", "quarantine_bytes"] {
            counters.remove(sampled);
        }
        counters.insert("directory_bytes".into(), self.directory.memory_bytes());
        counters.insert("live_bytes".into(), self.directory.bytes());
        let (shares, excess) = self.guaranteed();
        counters.insert("guaranteed_bytes".into(), shares);
        counters.insert("guaranteed_excess_bytes".into(), excess);
        counters
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// True when the blocks on a segment may be read now.
    fn is_reachable(&self, segments: &crate::placement::Segments<'_>, id: SegmentId) -> bool {
        segments
            .get(id)
            .is_some_and(|segment| segment.node.is_readable())
    }

    /// Whether the replica of this version is hidden.
    fn is_hidden(
        &self,
        hidden: &HashSet<HiddenReplica>,
        replica: &Replica,
        version: Version,
    ) -> bool {
        !hidden.is_empty() && hidden.contains(&(replica.segment, replica.offset, version))
    }

    /// The extents of a block that has left the directory.
    fn left<'r>(&self, removed: &'r Removed) -> FreedReplicas<'r> {
        let floor = self.lease_floor_of(removed.version);
        FreedReplicas {
            replicas: &removed.replicas,
            version: removed.version,
            length: removed.length,
            not_before: removed.lease_until.max(floor),
        }
    }

    /// Records that memory has lost a leased block. A load may bring the block back to another
    /// extent. These leases do not protect that extent, and its holders do not count them.
    fn note_leased(&self, version: Version, lease_until: BootInstant) {
        if self.has_media() && lease_until > self.now() {
            let moved = &self.quarantine.moved;
            let leaving = moved.leaves(version, lease_until);
            moved.left(leaving, lease_until);
        }
    }

    /// The end of the leases that an earlier term may have granted on a block. This term does not
    /// know these leases.
    fn lease_floor_of(&self, version: Version) -> BootInstant {
        if version < self.first_version {
            self.lease_floor
        } else {
            BootInstant(0)
        }
    }

    /// The id of the next grant. Ids are given after room is taken. So every grant on an extent
    /// that is freed now has a lower id, and every later grant there has this id or a higher one.
    fn next_grant(&self) -> GrantId {
        GrantId(self.next_version.load(Ordering::Acquire))
    }

    /// Moves extents to the quarantine's accounts. Pass the result to [`Pool::free`] when the
    /// removal is durable.
    fn freed<'r>(&self, left: impl Iterator<Item = FreedReplicas<'r>>) -> Vec<Freed> {
        let since = self.now();
        let segments = self.placement.segments();
        let freed: Vec<Freed> = left
            .flat_map(|left| left.replicas.iter().map(move |replica| (left, replica)))
            .filter_map(|(left, replica)| {
                Some(Freed {
                    segment: Arc::clone(segments.get(replica.segment)?),
                    index: replica.extent,
                    extent: Extent {
                        segment: replica.segment,
                        offset: replica.offset,
                        length: left.length,
                    },
                    grant: (left.version >= self.first_version).then_some(GrantId(left.version.0)),
                    before: self.next_grant(),
                    not_before: left.not_before,
                    since,
                    stuck: false,
                })
            })
            .collect();
        for items in freed.chunk_by(|one, next| Arc::ptr_eq(&one.segment, &next.segment)) {
            if let Some(first) = items.first() {
                first
                    .segment
                    .quarantine(items.iter().map(|item| item.index));
            }
        }
        freed
    }

    /// Logs records of extents that blocks have left, and passes the extents to the quarantine once
    /// the records are durable.
    fn free_once_logged(self: &Arc<Self>, mut records: Vec<Record>, freed: Vec<Freed>) {
        let now = self.now();
        let leased = freed.iter().filter(|item| item.not_before > now);
        let leased: Vec<_> = leased.map(|item| (item.extent, item.not_before)).collect();
        let extents = leased.iter().map(|(extent, _)| *extent);
        records.extend(snapshot::leased_ranges(extents.collect()));
        // A snapshot may be written before these records, so the quarantine knows the leased
        // extents first.
        let number = self.quarantine.leaves(leased);
        let pool = Arc::clone(self);
        self.journal()
            .insist(records, Ack::Durable, move |durable| {
                if durable.is_ok() {
                    pool.free(freed);
                }
                pool.quarantine.has_left(number);
            });
    }

    /// Gives extents to the quarantine after their removal is durable.
    fn free(&self, freed: Vec<Freed>) {
        if !freed.is_empty() {
            self.quarantine.take(freed, self.now());
        }
    }
}
