//! What the log and the snapshots add up to, in memory: the state that a term begins with.
//!
//! ```text
//!  store ─ load ─► Past ─ restore ─► Standby ─ lead ─► Pool       a term begins
//!                                      ▲
//!            log, as it grows ─ apply ─┘                          a standby keeps up
//! ```
//!
//! A replica grants nothing and answers nothing. It knows what is durable and not who leases what.
//!
//! **Architecture Invariant:** groups are applied in the order of the log, each once, so a replica is
//! the log's state at [`Standby::applied`].

mod apply;
mod freed_ranges;
mod loading;
mod recently_freed;
mod restore;
#[cfg(test)]
mod tests;

use crate::clock::Clock;
use crate::config::Config;
use crate::directory::{self, Directory};
use crate::membership::Members;
use crate::namespaces::Namespaces;
use crate::placement::Placement;
use crate::store::record::RecordError;
use crate::store::{LogSeq, LogState, MetadataStore, RecoveryError, recover};
use kvpool_types::Version;
use loading::Loading;
use recently_freed::RecentlyFreed;
use std::sync::Arc;

/// Everything that is durable, as far as the log has been applied.
pub struct Standby {
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
    pub(crate) recently_freed: RecentlyFreed,
    options: directory::Options,
    high_watermark: f64,
    clock: Arc<dyn Clock>,
}

impl std::fmt::Debug for Standby {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Standby")
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
    #[error("group {seq} of the metadata log cannot be read: {source}")]
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

impl Standby {
    /// Reads everything back that a store holds.
    pub async fn load(
        store: &dyn MetadataStore,
        config: &Config,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, RecoveryError> {
        let options = directory::Options {
            policy: config.eviction_policy,
            ..directory::Options::new(rand::random())
        };
        let mut loading = Loading::new(options, clock.now());
        let recovered = recover(store, directory::SHARDS, &mut loading).await?;
        loading.finish();
        let Loading {
            directory,
            seed: stored,
            versions,
            next_segment,
            namespaces,
            segments,
            dropped,
            mut left,
            ..
        } = loading;
        let seed = stored.unwrap_or(options.seed);
        let mut standby = Self {
            directory,
            namespaces: Namespaces::default(),
            members: Members::default(),
            placement: Placement::default(),
            seed,
            is_seed_stored: stored.is_some(),
            versions: Version(versions.0.max(1)),
            next_segment,
            state: recovered.state,
            recently_freed: RecentlyFreed::new(config.lease_ttl),
            options: directory::Options { seed, ..options },
            high_watermark: config.eviction_high_watermark_ratio,
            clock,
        };
        for created in namespaces.into_values() {
            standby.namespaces.insert(created.id, created.namespace);
        }
        for dropped in dropped {
            let members = &standby.members;
            members.drop_incarnation(&dropped.node, dropped.incarnation);
        }
        // By number, which is the order in which a node offers its segments.
        for segment in segments.into_values() {
            standby.add_segment(segment);
        }
        standby.allocate_extents(&mut left);
        standby.directory.order_by_version();
        standby.keep_shut(left);
        tracing::debug!(
            blocks = standby.blocks(),
            from_snapshots = recovered.from_snapshots,
            from_log = recovered.from_log,
            applied = %standby.applied(),
            "metadata loaded"
        );
        Ok(standby)
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
