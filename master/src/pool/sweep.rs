//! Taking the blocks of dropped nodes out of the directory.
//!
//! A node that is dropped has no segments from that moment on, so nothing hands its blocks out. Their entries
//! leave the directory afterwards, in steps, on the caretaker's thread: a node may have millions of them, and no
//! call waits for that.

use super::Pool;
use crate::placement::Segment;
use kvpool_types::{Incarnation, NodeName};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many places of a segment's table one step looks at.
const STEP: u32 = 4096;

/// What is left to be taken out of one dropped incarnation.
#[derive(Debug)]
pub(super) struct Sweep {
    node: NodeName,
    incarnation: Incarnation,
    segments: VecDeque<Arc<Segment>>,
    /// The place in the first segment's table that comes next.
    place: u32,
    /// Blocks that went with their last copy.
    lost: u64,
}

impl Sweep {
    pub(super) fn new(
        node: NodeName,
        incarnation: Incarnation,
        segments: impl IntoIterator<Item = Arc<Segment>>,
    ) -> Self {
        Self {
            node,
            incarnation,
            segments: segments.into_iter().collect(),
            place: 0,
            lost: 0,
        }
    }
}

impl Pool {
    /// Takes blocks of dropped nodes out for about `budget`; false when none is left.
    pub(super) fn sweep(&self, budget: Duration) -> bool {
        let begun = Instant::now();
        loop {
            // Only the caretaker takes from here, so the first one is the same after the step.
            let Some(mut sweep) = self.sweeps.lock().pop_front() else {
                return false;
            };
            if self.sweep_step(&mut sweep) {
                self.sweeps.lock().push_front(sweep);
            } else {
                tracing::warn!(node = %sweep.node, incarnation = %sweep.incarnation, blocks_lost = sweep.lost,
                    "the blocks of a dropped node are out of the directory");
            }
            if begun.elapsed() >= budget {
                return true;
            }
        }
    }

    /// Whether something is left of it.
    fn sweep_step(&self, sweep: &mut Sweep) -> bool {
        let Some(segment) = sweep.segments.front() else {
            return false;
        };
        let (dropped, next) =
            self.directory
                .drop_segment(segment.id, || segment.extents(), sweep.place, STEP);
        let lost = dropped.iter().filter(|d| d.removed.is_some()).count() as u64;
        sweep.lost += lost;
        self.metrics.blocks_lost(lost);
        sweep.place = next.unwrap_or(0);
        if next.is_none() {
            sweep.segments.pop_front();
        }
        !sweep.segments.is_empty()
    }
}
