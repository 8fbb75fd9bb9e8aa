//! The standby: the state that the log and the snapshots describe, in memory. A term begins from it.
//!
//! ```text
//!  store ─ load ─► Loading ─ restore ─► Standby ─ lead ─► Pool       a term begins
//!                                         ▲
//!               log, as it grows ─ apply ─┘                          a standby follows
//! ```
//!
//! A standby grants nothing and answers no lookup. It knows the durable metadata but no leases.
//!
//! **Architecture Invariant:** groups are applied in the order of the log, each once. So a standby
//! is the log's state at [`Standby::applied`].

mod apply;
mod audit;
mod freed_ranges;
mod loading;
mod recently_freed;
mod restore;
mod sweeps;
#[cfg(test)]
mod tests;

use crate::clock::Clock;
use crate::config::Config;
use crate::directory::{self, Directory};
use crate::membership::Members;
use crate::namespaces::Namespaces;
use crate::placement::Placement;
use crate::store::record::{Record, RecordError};
use crate::store::{LogSeq, LogState, MetadataStore, RecoveryError, recover};
use crate::tier::Tier;
use kvpool_types::{NamespaceSettings, Version};
use loading::Loading;
use recently_freed::RecentlyFreed;
use std::sync::Arc;
use sweeps::Sweeps;

/// The durable metadata up to the last applied group of the log.
pub struct Standby {
    pub(crate) directory: Directory,
    pub(crate) tier: Tier,
    pub(crate) namespaces: Namespaces,
    pub(crate) members: Members,
    pub(crate) placement: Placement,
    /// The secret seed of the directory's hashes.
    pub(crate) seed: u64,
    /// Whether the log contains the seed.
    pub(crate) is_seed_stored: bool,
    /// Versions below this one may have been granted.
    pub(crate) versions: Version,
    /// The id of the next new segment.
    pub(crate) next_segment: u32,
    /// The positions of the log and the snapshots.
    pub(crate) state: LogState,
    /// Extents freed so recently that the leader's leases may protect them.
    pub(crate) recently_freed: RecentlyFreed,
    sweeps: Sweeps,
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

/// Why a standby cannot apply a group of the log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The group does not follow the last one.
    #[error("group {found} does not follow group {applied}, the last one applied")]
    Gap {
        /// The group.
        found: LogSeq,
        /// The last applied group.
        applied: LogSeq,
    },
    /// The group cannot be read.
    #[error("group {seq} of the metadata log cannot be read: {source}")]
    Damaged {
        /// The group.
        seq: LogSeq,
        /// The reason.
        source: RecordError,
    },
    /// The group changes the seed of the directory's hashes although blocks are present.
    #[error("group {seq} changes the directory's secret although blocks are present")]
    Reseeded {
        /// The group.
        seq: LogSeq,
    },
}

impl Standby {
    /// Loads the metadata from a store.
    ///
    /// # Errors
    ///
    /// [`RecoveryError`] when the store failed, or when the metadata cannot be read whole.
    pub async fn load(
        store: &dyn MetadataStore,
        config: &Config,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, RecoveryError> {
        let options = directory::Options {
            policy: config.eviction_policy,
            ..directory::Options::new(kvpool_seams::random())
        };
        let mut loading = Loading::new(options, clock.now());
        let recovered = recover(store, directory::SHARDS, &mut loading).await?;
        loading.finish();
        let Loading {
            directory,
            tier,
            media,
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
            tier,
            namespaces,
            members: Members::default(),
            placement: Placement::default(),
            seed,
            is_seed_stored: stored.is_some(),
            versions: Version(versions.0.max(1)),
            next_segment,
            state: recovered.state,
            recently_freed: RecentlyFreed::new(config.lease_ttl),
            sweeps: Sweeps::default(),
            options: directory::Options { seed, ..options },
            high_watermark: config.eviction_high_watermark_ratio,
            clock,
        };
        for (id, settings) in standby.namespaces.with_settings() {
            standby.directory.accounts().set(id, &settings);
        }
        if standby.directory.accounts().has_tenants() {
            standby.directory.reorder();
        }
        for dropped in dropped {
            let members = &standby.members;
            members.drop_incarnation(&dropped.node, dropped.incarnation);
        }
        // Sorted by id, which is the order in which a node offers its segments.
        for segment in segments.into_values() {
            standby.add_segment(segment);
        }
        for medium in media.into_values() {
            standby.set_medium(medium);
        }
        standby.tier.place_staged();
        let absent = standby.allocate_extents(&mut left);
        standby.sweeps.keep_places(absent);
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

    /// Applies changed settings of namespaces to the accounts.
    fn set_accounts(&self, record: &Record) {
        let accounts = self.directory.accounts();
        match record {
            Record::NamespaceSet(set) if accounts.set(set.id, &set.settings) => {
                self.directory.reorder_of(set.id);
            }
            Record::NamespaceGone(gone) => {
                accounts.set(gone.id, &NamespaceSettings::default());
            }
            _ => {}
        }
    }

    /// The last applied group of the log.
    pub const fn applied(&self) -> LogSeq {
        self.state.span.last
    }

    /// The number of blocks.
    pub fn blocks(&self) -> u64 {
        self.directory.blocks()
    }
}
