//! The start of a term: what earlier lives made durable, read back into the directory.
//!
//! Segments come back with their nodes unreported: nothing on them is handed out or granted until
//! the node has registered in this term, which closes every grant of earlier ones.

use super::{Demand, Pool, caretaker, evictor, snapshot};
use crate::clock::{Clock, Millis};
use crate::config::Config;
use crate::directory::{self, Copies, Directory, NewBlock, Replica};
use crate::membership::{Members, Node};
use crate::metrics::Metrics;
use crate::namespaces::Namespaces;
use crate::placement::quarantine::Quarantine;
use crate::placement::{Placement, Segment};
use crate::reservations::Reservations;
use crate::store::journal::{Ack, Journal, JournalOptions};
use crate::store::record::{self, Commit, Record};
use crate::store::{MetadataStore, RecoveryError, ShardIndex, StoreError, recover};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{ClusterId, Code, Epoch, GrantKey, Key, SegmentId, Version};
use parking_lot::{Mutex, RwLock};
use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How many versions a term sets aside at a time.
const VERSION_WINDOW: u64 = 1 << 40;
/// How many recovered blocks are published at once.
const BATCH: usize = 4096;

/// Why a term could not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The store does not answer.
    #[error("the metadata store: {0}")]
    Store(#[from] StoreError),
    /// What it holds cannot be read back.
    #[error("the metadata cannot be recovered: {0}")]
    Recovery(#[from] RecoveryError),
    /// The log takes nothing.
    #[error("the metadata log: {0}")]
    Log(Code),
    /// The metrics clash.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(#[from] std::io::Error),
    /// The journal cannot be started.
    #[error(transparent)]
    Journal(#[from] crate::store::journal::StartError),
}

/// What the records of earlier lives add up to.
#[derive(Default)]
struct Past {
    seed: OnceCell<u64>,
    versions: Version,
    namespaces: Vec<record::Namespace>,
    segments: BTreeMap<SegmentId, record::Segment>,
    next_segment: u32,
    dropped: Vec<record::IncarnationDropped>,
    blocks: HashMap<(NamespaceId, Key), Commit>,
}

impl Past {
    fn apply(&mut self, record: Record) {
        match record {
            Record::Seed(secret) => {
                // There is one such record; a second would be a repetition of it.
                let _same = self.seed.set(secret.seed);
            }
            Record::VersionsGranted(granted) => self.versions = self.versions.max(granted.until),
            Record::Namespace(created) => self.namespaces.push(created),
            Record::Segment(segment) => {
                self.next_segment = self.next_segment.max(segment.id.0 + 1);
                self.segments.insert(segment.id, segment);
            }
            Record::SegmentGone(gone) => {
                self.segments.remove(&gone.id);
            }
            Record::IncarnationDropped(dropped) => self.dropped.push(dropped),
            Record::Commit(commit) => {
                self.blocks
                    .insert((commit.namespace, commit.key.clone()), commit);
            }
            Record::Remove(removed) => {
                let place = (removed.namespace, removed.key);
                if self
                    .blocks
                    .get(&place)
                    .is_some_and(|b| b.version == removed.version)
                {
                    self.blocks.remove(&place);
                }
            }
            Record::ReplicaGone(gone) => {
                if let Some(block) = self.blocks.get_mut(&(gone.namespace, gone.key))
                    && block.version == gone.version
                {
                    block
                        .replicas
                        .retain(|(segment, _)| *segment != gone.segment);
                }
            }
        }
    }
}

impl Pool {
    /// Begins a term over a store: above every earlier one, with every block that they made durable.
    pub async fn start(
        config: Config,
        store: Arc<dyn MetadataStore>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, StartError> {
        let cluster = store.cluster_id(ClusterId(rand::random())).await?;
        let epoch = store.begin_epoch(Epoch(1)).await?;
        let options = directory::Options::new(0);
        let past = RefCell::new(Past::default());
        let shards = u32::try_from(options.shards).unwrap_or(u32::MAX);
        // System records come first, so the secret is known before any key is asked for.
        let cutter = OnceCell::new();
        let shard_of = |namespace, key: &Key| {
            let seed = past.borrow().seed.get().copied().unwrap_or_default();
            let directory: &Directory = cutter
                .get_or_init(|| Directory::new(directory::Options { seed, ..options }, Millis(0)));
            let shard = directory.shard_of_key(namespace, key.as_ref());
            ShardIndex(u32::try_from(shard).unwrap_or(u32::MAX))
        };
        let recovered = recover(&*store, shards, shard_of, |record| {
            past.borrow_mut().apply(record)
        })
        .await?;
        let past = past.into_inner();
        let now = clock.now();
        let seed = past.seed.get().copied();
        let options = directory::Options {
            seed: seed.unwrap_or_else(rand::random),
            policy: config.eviction_policy,
            ..options
        };
        let first_version = Version(past.versions.0.max(1));
        let pool = Arc::new(Self {
            cluster,
            epoch,
            metrics: Metrics::new()?,
            members: Members::default(),
            placement: Placement::default(),
            started: now,
            directory: Directory::new(options, now),
            seed: options.seed,
            namespaces: Namespaces::default(),
            namespace_creation: tokio::sync::Mutex::default(),
            registration: tokio::sync::Mutex::default(),
            reservations: Reservations::default(),
            quarantine: Quarantine::default(),
            journal: std::sync::OnceLock::new(),
            lease_floor: if past.blocks.is_empty() {
                Millis(0)
            } else {
                now.after(config.lease_ttl)
            },
            first_version,
            next_version: AtomicU64::new(first_version.0),
            versions_until: AtomicU64::new(first_version.0 + VERSION_WINDOW),
            next_segment: AtomicU32::new(past.next_segment.max(1)),
            hidden: RwLock::default(),
            changed: tokio::sync::Notify::new(),
            demand: Demand::default(),
            stopping: AtomicBool::new(false),
            superseded: Mutex::default(),
            superseded_told: tokio::sync::Notify::new(),
            settled: AtomicBool::new(false),
            settled_told: tokio::sync::Notify::new(),
            store: Arc::clone(&store),
            clock,
            config,
        });
        let blocks = pool.restore(past);
        pool.settle();
        let source = Arc::new(snapshot::Source(Arc::downgrade(&pool)));
        let journal = Journal::start(
            store,
            epoch,
            &recovered.state,
            source,
            JournalOptions::default(),
        )?;
        let _first = pool.journal.set(journal);
        let mut records = vec![Record::VersionsGranted(record::VersionsGranted {
            until: Version(pool.versions_until.load(Ordering::Acquire)),
        })];
        if seed.is_none() {
            records.push(Record::Seed(record::Seed { seed: options.seed }));
        }
        pool.log(records, || {}).await.map_err(StartError::Log)?;
        evictor::start(&pool)?;
        caretaker::start(&pool)?;
        tracing::info!(
            %cluster,
            %epoch,
            blocks,
            from_snapshots = recovered.from_snapshots,
            from_log = recovered.from_log,
            took_ms = pool.uptime_ms(),
            "term begins"
        );
        Ok(pool)
    }

    /// Fills the empty pool with what earlier lives left; the number of blocks.
    fn restore(&self, past: Past) -> usize {
        let now = self.now();
        for created in past.namespaces {
            self.namespaces.insert(created.id, created.namespace);
        }
        for dropped in past.dropped {
            self.members
                .drop_incarnation(&dropped.node, dropped.incarnation);
        }
        // By number, which is the order in which a node offers its segments.
        for segment in past.segments.into_values() {
            let node = match self.members.get(&segment.node) {
                Some(node) if node.incarnation == segment.incarnation => node,
                _ => {
                    let key = GrantKey(rand::random());
                    let node = Arc::new(Node::new(segment.node, segment.incarnation, key, now));
                    self.members.insert(Arc::clone(&node));
                    node
                }
            };
            node.add_segment(segment.id);
            let high = self.config.eviction_high_watermark_ratio;
            self.placement
                .insert(Arc::new(Segment::new(segment.id, node, segment.size, high)));
        }
        let mut blocks: Vec<Commit> = past.blocks.into_values().collect();
        // In the order in which they were granted, so that parents come before their children and
        // what was written last counts as used last.
        blocks.sort_unstable_by_key(|block| block.version);
        let mut lost: HashSet<SegmentId> = HashSet::new();
        for batch in blocks.chunks(BATCH) {
            self.restore_batch(batch, &mut lost);
        }
        blocks.len()
    }

    fn restore_batch(&self, batch: &[Commit], lost: &mut HashSet<SegmentId>) {
        let ticks = self.directory.ticks(batch.len());
        let mut placed = Vec::with_capacity(batch.len());
        for (at, block) in batch.iter().enumerate() {
            let segments = self.placement.segments();
            let mut replicas = Copies::new();
            for (id, offset) in &block.replicas {
                let Some(segment) = segments.get(*id) else {
                    lost.insert(*id);
                    continue;
                };
                match segment.allocate_at(*offset, block.length) {
                    Some(extent) => {
                        replicas.push(Replica {
                            segment: *id,
                            extent,
                            offset: *offset,
                        });
                    }
                    None => tracing::error!(
                        key = %block.key,
                        segment = %id,
                        %offset,
                        "two blocks were recovered in one place: the later one is left out"
                    ),
                }
            }
            if !replicas.is_empty() {
                placed.push(NewBlock {
                    namespace: block.namespace,
                    key: block.key.clone(),
                    version: block.version,
                    length: block.length,
                    checksum: block.checksum,
                    replicas,
                    parent: block.parent.clone(),
                    soft_pin_until: None,
                    hard_pin: block.hard_pin,
                    tick: ticks.of(batch.len() - 1 - at),
                });
            }
        }
        let published = self.directory.publish(&placed);
        let owned = published
            .iter()
            .zip(&placed)
            .flat_map(|(published, block)| {
                let id = published.id;
                block.replicas.iter().filter_map(move |r| Some((r, id?)))
            });
        self.placement.segments().set_owners(owned);
    }

    /// Sets more versions aside before those at hand run out.
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
