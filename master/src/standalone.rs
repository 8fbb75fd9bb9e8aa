//! The start of a master that alone uses its store.

use crate::clock::Clock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::pool::{Pool, StartError};
use crate::store::{
    EmbeddedOptions, EmbeddedStore, OpenError, RecoveryError, StoreError, set_aside,
};
use std::sync::Arc;

/// Why a standalone master could not begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BeginError {
    /// The store cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The term cannot begin.
    #[error(transparent)]
    Start(StartError),
}

/// Opens the store of `config` and begins a term over it. A damaged store is set aside if the
/// configuration says so.
pub(crate) async fn begin(
    config: Config,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
) -> Result<(Arc<EmbeddedStore>, Arc<Pool>), BeginError> {
    let directory = config.data_dir.clone();
    let accepts = config.accept_empty_store;
    match try_once(config.clone(), Arc::clone(&clock), Arc::clone(&metrics)).await {
        Err(BeginError::Open(damage)) if damage.is_damage() && accepts => {
            let moved_to = set_aside(&directory)?;
            tracing::warn!(
                error = %damage, moved_to = %moved_to.display(),
                "damaged metadata set aside (--accept-empty-store), starting an empty pool"
            );
            try_once(config, clock, metrics).await
        }
        begun => begun,
    }
}

async fn try_once(
    config: Config,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
) -> Result<(Arc<EmbeddedStore>, Arc<Pool>), BeginError> {
    let directory = config.data_dir.clone();
    let store = Arc::new(EmbeddedStore::open(&EmbeddedOptions {
        cache: config.store_cache,
        ..EmbeddedOptions::new(&directory)
    })?);
    let begun = Pool::start(config, Arc::clone(&store) as _, clock, metrics).await;
    let pool = begun.map_err(|error| match damage(&error) {
        Some(reason) => BeginError::Open(OpenError::Damaged {
            directory: directory.display().to_string(),
            reason,
        }),
        None => BeginError::Start(error),
    })?;
    Ok((store, pool))
}

/// The damage of the stored metadata; `None` for other errors.
fn damage(error: &StartError) -> Option<String> {
    match error {
        StartError::Recovery(
            damage @ (RecoveryError::DamagedGroup { .. }
            | RecoveryError::DamagedSnapshot { .. }
            | RecoveryError::LostGroups { .. }
            | RecoveryError::Store(StoreError::Corrupt { .. })),
        ) => Some(damage.to_string()),
        StartError::Store(StoreError::Corrupt { reason }) => Some(reason.clone()),
        _ => None,
    }
}
