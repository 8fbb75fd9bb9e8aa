//! The caller's identity and the highest epoch seen. Every request carries both, and every reply may raise
//! the epoch.

use crate::cache::Locations;
use crate::counters::Counting;
use bytes::Bytes;
use kvpool_proto::Caller;
use kvpool_types::Epoch;
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The caller's identity and the highest epoch seen.
#[derive(Debug)]
pub(super) struct Known {
    /// The identity; its `epoch` field is not used.
    caller: RwLock<Caller>,
    epoch: AtomicU64,
    locations: Arc<Locations>,
    counting: Arc<Counting>,
}

/// The error text for a master of another pool than the pool that the client joined.
pub(super) const ANOTHER_POOL: &str = "is of another pool than this client joined: its data directory or its \
                                       etcd was replaced, or the address leads elsewhere now; \
                                       connect anew, or restart this process";

impl Known {
    /// A caller that knows no term yet.
    pub(super) const fn new(
        caller: Caller,
        locations: Arc<Locations>,
        counting: Arc<Counting>,
    ) -> Self {
        Self {
            caller: RwLock::new(caller),
            epoch: AtomicU64::new(0),
            locations,
            counting,
        }
    }

    /// The highest epoch seen.
    pub(super) fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// The caller's part of a request, under `epoch` or else the highest epoch seen.
    pub(super) fn caller(&self, epoch: Option<Epoch>) -> Caller {
        let mut caller = self.caller.read().clone();
        caller.epoch = epoch.unwrap_or_else(|| self.epoch()).0;
        if let Some(trace) = kvpool_trace::current() {
            caller.trace = Bytes::copy_from_slice(&trace.to_bytes());
        }
        caller
    }

    /// Records the pool's id. Later requests carry it.
    pub(super) fn join(&self, cluster: Bytes) {
        self.caller.write().cluster_id = cluster;
    }

    /// Whether `cluster` is not the pool that the client belongs to.
    pub(super) fn is_of_another(&self, cluster: &Bytes) -> bool {
        let caller = self.caller.read();
        !caller.cluster_id.is_empty() && !cluster.is_empty() && caller.cluster_id != cluster
    }

    /// Records an epoch that the master at `address` named. An error has the highest epoch seen, which is
    /// above it. A new highest epoch drops every cached location.
    pub(super) fn hear(&self, epoch: Epoch, address: &str) -> Result<(), Epoch> {
        let before = Epoch(self.epoch.fetch_max(epoch.0, Ordering::AcqRel));
        if epoch < before {
            return Err(before);
        }
        if epoch > before {
            Counting::one(&self.counting.epochs_seen);
            self.locations.purge_all();
            tracing::info!(%epoch, %before, master = address, "new term: the master's epoch changed");
        }
        Ok(())
    }
}
