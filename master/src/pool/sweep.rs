//! Removes the blocks of dropped nodes from the directory.
//!
//! A dropped node has no segments from the moment of its drop, so no lookup returns its blocks. The
//! caretaker's thread removes their entries afterwards, in steps. A node may have millions of
//! blocks, and no call waits for the sweep.

use super::Pool;
use crate::directory::Dropped;
use crate::membership::StoreNode;
use crate::placement::Segment;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, SegmentId, Version};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The number of slots of a segment's table that one step examines.
const STEP: u32 = 4096;

/// The remaining blocks of one dropped incarnation.
#[derive(Debug)]
pub(super) struct Sweep {
    node: Arc<StoreNode>,
    segments: VecDeque<Arc<Segment>>,
    /// The next slot in the first segment's table.
    place: u32,
    /// The number of blocks that left with their last replica.
    lost: u64,
}

impl Sweep {
    pub(super) fn new(
        node: Arc<StoreNode>,
        segments: impl IntoIterator<Item = Arc<Segment>>,
    ) -> Self {
        Self {
            node,
            segments: segments.into_iter().collect(),
            place: 0,
            lost: 0,
        }
    }
}

impl Pool {
    /// Removes blocks of dropped nodes for about `budget`; false when none is left.
    pub(super) fn sweep(&self, budget: Duration) -> bool {
        let begun = Instant::now();
        loop {
            // Only the caretaker takes from the front, so after the step the front is still this
            // sweep's place.
            let Some(mut sweep) = self.sweeps.lock().pop_front() else {
                return false;
            };
            if self.sweep_step(&mut sweep) {
                self.sweeps.lock().push_front(sweep);
            } else {
                log_end(&sweep);
            }
            if begun.elapsed() >= budget {
                return true;
            }
        }
    }

    /// Removes a replica whose node was dropped before it was published.
    pub(super) fn sweep_late(
        &self,
        namespace: NamespaceId,
        key: &Key,
        version: Version,
        segment: SegmentId,
    ) {
        let dropped = self
            .directory
            .drop_replica(namespace, key.as_ref(), version, segment);
        if let Some(dropped) = dropped.filter(|dropped| dropped.removed.is_some()) {
            // Its earlier node may have left just before.
            self.note_swept(version);
            self.note_leased(version, dropped.lease_until);
        }
    }

    /// True when the sweep has blocks left.
    fn sweep_step(&self, sweep: &mut Sweep) -> bool {
        let Some(segment) = sweep.segments.front() else {
            return false;
        };
        // Before a load can bring the block to another extent, where these leases are not counted. Also before a task
        // finds the block missing, and takes it for removed.
        let leaves = |dropped: &Dropped| {
            if dropped.removed.is_some() {
                self.note_swept(dropped.version);
                self.note_leased(dropped.version, dropped.lease_until);
            }
        };
        let extents = || segment.extents();
        let (dropped, next) =
            self.directory
                .drop_segment(segment.id, extents, sweep.place, STEP, leaves);
        let is_lost = |dropped: &&Dropped| {
            let Dropped {
                namespace,
                key,
                version,
                removed,
                ..
            } = dropped;
            removed.is_some() && !self.is_on_medium(*namespace, key, *version)
        };
        let lost = dropped.iter().filter(is_lost).count() as u64;
        sweep.lost += lost;
        sweep.node.departure.add_lost(lost);
        self.metrics.blocks_lost(lost);
        sweep.place = next.unwrap_or(0);
        if next.is_none() {
            sweep.segments.pop_front();
        }
        !sweep.segments.is_empty()
    }
}

/// No warning for a node that left in order and whose blocks have copies elsewhere.
fn log_end(sweep: &Sweep) {
    let Sweep { node, lost, .. } = sweep;
    let (node, incarnation) = (&node.name, node.incarnation);
    const TEXT: &str = "blocks of the dropped node removed from the directory";
    if *lost > 0 {
        tracing::warn!(%node, %incarnation, blocks_lost = *lost, "{TEXT}");
    } else {
        tracing::info!(%node, %incarnation, blocks_lost = 0, "{TEXT}");
    }
}
