//! What the log and the snapshots add up to, in memory: the state that a term begins with.
//!
//! ```text
//!  store ─ load ─► Past ─ restore ─► Replica ─ lead ─► Pool       a term begins
//!                                      ▲
//!            log, as it grows ─ apply ─┘                          a standby keeps up
//! ```
//!
//! A replica grants nothing and answers nothing. It knows what is durable and not who leases what.
//!
//! **Architecture Invariant:** groups are applied in the order of the log, each once, so a replica is
//! the log's state at [`Replica::applied`].

mod apply;
mod freed;
mod past;
mod restore;
#[cfg(test)]
mod tests;

use crate::clock::{Clock, Millis};
use crate::config::Config;
use crate::directory::{self, Directory};
use crate::membership::Members;
use crate::namespaces::Namespaces;
use crate::placement::Placement;
use crate::store::record::RecordError;
use crate::store::{LogSeq, LogState, MetadataStore, RecoveryError, ShardIndex, recover};
use freed::LatelyFreed;
use kvpool_types::{Key, Version};
use past::Past;
use std::cell::{OnceCell, RefCell};
use std::sync::Arc;

/// Everything that is durable, as far as the log has been applied.
pub struct Replica {
    pub(crate) directory: Directory,
    pub(crate) namespaces: Namespaces,
    pub(crate) members: Members,
    pub(crate) placement: Placement,
    /// The secret of the directory's hashes.
    pub(crate) seed: u64,
    /// Whether that secret is in the log.
    pub(crate) is_seed_stored: bool,
    /// Versions below it may have been granted.
    pub(crate) versions: Version,
    /// The number that the next new segment gets.
    pub(crate) next_segment: u32,
    /// Where the log and the snapshots stand.
    pub(crate) state: LogState,
    /// What was freed so short a time ago that leases of the leader may protect it.
    pub(crate) lately: LatelyFreed,
    options: directory::Options,
    high_watermark: f64,
    clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica")
            .field("applied", &self.applied())
            .field("blocks", &self.blocks())
            .finish_non_exhaustive()
    }
}

/// Why a replica cannot go on with a group of the log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// It does not follow the last one.
    #[error("group {found} does not follow group {applied}, the last one applied")]
    Gap {
        /// The group.
        found: LogSeq,
        /// The last one that was applied.
        applied: LogSeq,
    },
    /// It cannot be read.
    #[error("group {seq} of the metadata log is damaged: {source}")]
    Damaged {
        /// The group.
        seq: LogSeq,
        /// What is wrong with it.
        source: RecordError,
    },
    /// The secret of the directory's hashes was made anew while blocks are there.
    #[error("group {seq} changes the directory's secret, and blocks are there")]
    Reseeded {
        /// The group.
        seq: LogSeq,
    },
}

impl Replica {
    /// Reads everything back that a store holds.
    pub async fn load(
        store: &dyn MetadataStore,
        config: &Config,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, RecoveryError> {
        let options = directory::Options {
            policy: config.eviction_policy,
            ..directory::Options::new(0)
        };
        let past = RefCell::new(Past::default());
        // System records come first, so the secret is known before any key is asked for.
        let cutter = OnceCell::new();
        let shard_of = |namespace, key: &Key| {
            let seed = past.borrow().seed.get().copied().unwrap_or_default();
            let directory: &Directory = cutter
                .get_or_init(|| Directory::new(directory::Options { seed, ..options }, Millis(0)));
            ShardIndex(directory.part_of_key(namespace, key.as_ref()))
        };
        let recovered = recover(store, directory::PARTS, shard_of, |record| {
            past.borrow_mut().apply(record);
        })
        .await?;
        let past = past.into_inner();
        let stored = past.seed.get().copied();
        let seed = stored.unwrap_or_else(rand::random);
        let options = directory::Options { seed, ..options };
        let mut replica = Self {
            directory: Directory::new(options, clock.now()),
            namespaces: Namespaces::default(),
            members: Members::default(),
            placement: Placement::default(),
            seed,
            is_seed_stored: stored.is_some(),
            versions: Version(past.versions.0.max(1)),
            next_segment: past.next_segment.max(1),
            state: recovered.state,
            lately: LatelyFreed::new(config.lease_ttl),
            options,
            high_watermark: config.eviction_high_watermark_ratio,
            clock,
        };
        replica.restore(past);
        tracing::debug!(
            blocks = replica.blocks(),
            from_snapshots = recovered.from_snapshots,
            from_log = recovered.from_log,
            applied = %replica.applied(),
            "metadata loaded"
        );
        Ok(replica)
    }

    /// The last group of the log that is contained.
    pub const fn applied(&self) -> LogSeq {
        self.state.span.last
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> u64 {
        self.directory.blocks()
    }
}
