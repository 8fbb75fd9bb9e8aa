//! The master's work, apart from how it is asked for it: every operation on the pool as a method of
//! [`Pool`], and the threads that evict and expire.
//!
//! ```text
//!  service ─► Pool ─┬─ reserve ──► Reservations, Placement
//!                   ├─ commit ───► Journal ──(durable)──► Directory
//!                   ├─ read ─────► Directory (leases, recency)
//!                   ├─ remove ───► Directory ──► Journal ──(durable)──► Quarantine
//!                   ├─ nodes ────► Members, Placement, Quarantine
//!                   └─ evictor, caretaker (threads)
//! ```
//!
//! Lock order: the table of segments, then what clients found wrong, then reservations, then directory
//! shards in the order of their numbers, then their lineage; the extents of one segment last, and with no
//! shard held. The table is locked for reading once at a time by a thread: one who waits to change it goes
//! before those who come to read.

mod caretaker;
mod commit;
mod evictor;
mod fresh;
mod nodes;
mod put_queue;
mod read;
mod registration;
mod remove;
mod reserve;
mod segment_ids;
mod snapshot;
mod sweep;
mod term_start;

pub use caretaker::Presence;
pub use commit::{CommitItem, Written};
pub use nodes::RegisterError;
pub use read::{Bitmap, Described, DescribedReplica, Found, Holder, Leased, Listed, Page};
pub use remove::{Removal, RemoveReport};
pub use reserve::{Granted, ReserveOptions};
pub use term_start::{StartError, TermStart};

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
use crate::store::{LogSeq, MetadataStore, StoreError};
use crate::term::Term;
use crate::writers::Writers;
use kvpool_types::{ClusterId, Epoch, Extent, GrantId, Length, Offset, SegmentId, Version};
use parking_lot::{Mutex, RwLock};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// How long a new term waits with its answers for the nodes of the last one.
const NODE_RETURN_WAIT: Duration = Duration::from_secs(2);

/// One term of one kvmaster: everything that its operations share.
pub struct Pool {
    /// The settings it runs with.
    pub config: Config,
    /// The pool's id.
    pub cluster: ClusterId,
    /// This term.
    pub epoch: Epoch,
    /// How long it lasts.
    pub term: Arc<Term>,
    /// What the process counts.
    pub metrics: Arc<Metrics>,
    /// The store nodes.
    pub members: Members,
    /// Their segments.
    pub placement: Placement,
    clock: Arc<dyn Clock>,
    started: BootInstant,
    directory: Directory,
    namespaces: Namespaces,
    namespace_creation: tokio::sync::Mutex<()>,
    registration: tokio::sync::Mutex<()>,
    reservations: Reservations,
    /// The clients whose puts end when they are gone.
    pub writers: Writers,
    quarantine: Quarantine,
    journal: std::sync::OnceLock<Journal>,
    /// Until then every block counts as leased: leases of the term before may live.
    lease_floor: BootInstant,
    /// Versions from here on were granted in this term.
    first_version: Version,
    next_version: AtomicU64,
    /// Versions from here on may not be given before more have been set aside durably.
    versions_until: AtomicU64,
    /// The secret of the directory's hashes.
    seed: u64,
    store: Arc<dyn MetadataStore>,
    segment_ids: segment_ids::SegmentIds,
    /// Replicas that a client found wrong and whose node has not checked them again.
    hidden: RwLock<HashSet<(SegmentId, Offset)>>,
    /// Told when a node's state changes, and at the end.
    changed: Notify,
    put_queue: put_queue::PutQueue,
    fresh: fresh::Fresh,
    evictor_wake: EvictorWake,
    stopping: AtomicBool,
    /// Set when a node knows a later term than this one.
    superseded: Mutex<Option<Epoch>>,
    superseded_told: Notify,
    /// Whether the nodes that the last term knew have had their time to come back.
    nodes_returned: AtomicBool,
    nodes_returned_told: Notify,
    /// Held for reading from when blocks leave the directory until that has been submitted to the log.
    evicting: RwLock<()>,
    /// The segments that took blocks when the evictor last looked.
    takers: Mutex<HashSet<SegmentId>>,
    /// The blocks of dropped nodes that are still in the directory.
    sweeps: Mutex<VecDeque<sweep::Sweep>>,
    /// Whether the term lasted when that was last looked at.
    leading: AtomicBool,
    lapse_told: Notify,
    /// When a client last called this master itself.
    heard_client: AtomicU64,
}

/// Wakes the evictor.
#[derive(Debug, Default)]
struct EvictorWake {
    lock: Mutex<bool>,
    wake: parking_lot::Condvar,
}

impl EvictorWake {
    fn wake(&self) {
        *self.lock.lock() = true;
        self.wake.notify_one();
    }

    /// Waits until woken or for `limit`.
    fn wait(&self, limit: Duration) {
        let mut woken = self.lock.lock();
        if !*woken {
            self.wake.wait_for(&mut woken, limit);
        }
        *woken = false;
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("cluster", &self.cluster)
            .field("epoch", &self.epoch)
            .finish()
    }
}

/// The extents of a block, or of a put, that is no more.
#[derive(Clone, Copy)]
struct FreedReplicas<'a> {
    replicas: &'a [Replica],
    version: Version,
    length: Length,
    /// When the last lease on them ends.
    not_before: BootInstant,
}

impl Pool {
    fn now(&self) -> BootInstant {
        self.clock.now()
    }

    /// Whether this master may grant, lease and change anything now.
    pub fn leads(&self) -> bool {
        self.term.leads(self.now())
    }

    /// Ends once the term is past its deadline, or over: what waits for the store need not wait here.
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

    /// How long the term lasts if nobody renews it; `None` without a deadline.
    pub fn term_left(&self) -> Option<Duration> {
        self.term.left(self.now())
    }

    /// For how long nobody has confirmed the term beyond its deadline.
    pub fn overdue(&self) -> Duration {
        self.term.overdue(self.now())
    }

    /// Notes that a client has called this master itself.
    pub fn heard_client(&self) {
        self.heard_client.store(self.now().0, Ordering::Relaxed);
    }

    /// How long ago a client called this master itself, or since the term began.
    pub fn client_silence(&self) -> Duration {
        let heard = BootInstant(self.heard_client.load(Ordering::Relaxed));
        self.now().since(heard)
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

    /// How long this term has lasted.
    pub fn uptime_ms(&self) -> u64 {
        self.now().0.saturating_sub(self.started.0)
    }

    /// How many milliseconds ago `then` was.
    pub fn age_ms(&self, then: BootInstant) -> u64 {
        self.now().0.saturating_sub(then.0)
    }

    /// The names of all namespaces.
    pub fn namespace_names(&self) -> Vec<String> {
        self.namespaces.names()
    }

    /// How many blocks are visible.
    pub fn blocks(&self) -> u64 {
        self.directory.blocks()
    }

    /// How many puts are under way.
    pub fn reservations(&self) -> usize {
        self.reservations.len()
    }

    /// Waits until every node that the last term knew has come back, or has had the time to: what is
    /// asked before would miss blocks that are there.
    pub async fn nodes_returned(&self) {
        while !self.nodes_returned.load(Ordering::Acquire) {
            let mut told = std::pin::pin!(self.nodes_returned_told.notified());
            told.as_mut().enable();
            if !self.nodes_returned.load(Ordering::Acquire) {
                told.await;
            }
        }
    }

    /// Whether [`Pool::nodes_returned`] would return at once.
    pub fn have_nodes_returned(&self) -> bool {
        self.nodes_returned.load(Ordering::Acquire)
    }

    /// Looks whether the wait for nodes is over.
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

    /// Whether durable writes still succeed.
    pub fn healthy(&self) -> Result<(), String> {
        self.journal().healthy().map_err(|error| error.to_string())
    }

    /// Whether the log takes records now. While the store is full it does not, and gets go on.
    pub fn has_room(&self) -> Result<(), crate::store::JournalError> {
        self.journal().has_room()
    }

    /// Ends when a node has been found that knows a later term than this one. The next term has to be
    /// above it.
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

    /// Stores a later term than this one, so that the next start is above it.
    pub async fn give_way(&self, later: Epoch) -> Result<Epoch, StoreError> {
        self.store.begin_epoch(later).await
    }

    /// The position of the last group of the log.
    pub fn log_position(&self) -> LogSeq {
        self.journal().position()
    }

    /// Lets nothing wait any more: puts that wait for room are answered, the threads end.
    pub fn quiesce(&self) {
        self.stopping.store(true, Ordering::Release);
        self.evictor_wake.wake();
        self.put_queue.wake_all();
        self.changed.notify_waiters();
        self.nodes_returned.store(true, Ordering::Release);
        self.nodes_returned_told.notify_waiters();
    }

    /// Ends the term here: nothing is answered any more, sessions of nodes end, and what waits for the
    /// log is told that it may not be there.
    pub async fn retire(&self) {
        self.term.end();
        self.quiesce();
        for node in self.members.all() {
            node.hang_up();
        }
        self.journal().close().await;
        self.lapse();
    }

    /// Tells whoever still waits for the store that it will not be told here.
    pub fn lapse(&self) {
        self.leading.store(false, Ordering::Release);
        self.lapse_told.notify_waiters();
    }

    /// Makes durable what is queued and closes the store.
    pub async fn stop(&self) {
        self.quiesce();
        self.journal().close().await;
        if let Err(error) = self.store.close().await {
            tracing::warn!(%error, "the metadata store was not closed cleanly");
        }
    }

    /// Every counter and gauge by its short name.
    pub fn counters(&self) -> std::collections::HashMap<String, u64> {
        let mut counters = self.metrics.snapshot();
        // Those are sampled for Prometheus; whoever asks here is given them as they are now.
        for sampled in ["used_bytes", "capacity_bytes", "quarantine_bytes"] {
            counters.remove(sampled);
        }
        counters.insert("directory_bytes".into(), self.directory.memory_bytes());
        counters.insert("live_bytes".into(), self.directory.bytes());
        counters
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Whether what lies on a segment may be handed out now.
    fn is_reachable(&self, segments: &crate::placement::Segments<'_>, id: SegmentId) -> bool {
        segments
            .get(id)
            .is_some_and(|segment| segment.node.is_readable())
    }

    fn is_hidden(&self, hidden: &HashSet<(SegmentId, Offset)>, replica: &Replica) -> bool {
        !hidden.is_empty() && hidden.contains(&(replica.segment, replica.offset))
    }

    /// What a block that has left the directory leaves behind.
    fn left<'r>(&self, removed: &'r Removed) -> FreedReplicas<'r> {
        let floor = self.lease_floor_of(removed.version);
        FreedReplicas {
            replicas: &removed.replicas,
            version: removed.version,
            length: removed.length,
            not_before: removed.lease_until.max(floor),
        }
    }

    /// Blocks of earlier terms may have leases that this term does not know.
    fn lease_floor_of(&self, version: Version) -> BootInstant {
        if version < self.first_version {
            self.lease_floor
        } else {
            BootInstant(0)
        }
    }

    /// What becomes of extents that nothing is to use any more. They count as quarantined from now on;
    /// give them to [`Pool::free`] once their leaving is durable.
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

    /// Lets go of extents whose leaving is durable.
    fn free(&self, freed: Vec<Freed>) {
        if !freed.is_empty() {
            self.quarantine.take(freed, self.now());
        }
    }
}
