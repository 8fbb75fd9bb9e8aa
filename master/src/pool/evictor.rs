//! The thread that makes room.
//!
//! A round begins when waiting puts do not fit under the high watermark. Its goal is to bring what is
//! used, the waiting puts included, down to the high watermark less the eviction ratio; what is in
//! quarantine (and not stuck there) counts as freed already, so that no round takes again what an
//! earlier one has taken. It works in small steps, oldest block first, and stops at the goal.

use super::Pool;
use crate::directory::Removed;
use crate::placement::{Segment, share};
use kvpool_types::SegmentId;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The bytes after which a step hands its victims to the journal and lets go of all locks.
const STEP_BYTES: u64 = 8 << 20;
/// How soon a round that found nothing to evict is tried again: leases run out without a call.
const RETRY: Duration = Duration::from_millis(20);

/// Starts the thread.
pub(super) fn start(pool: &Arc<Pool>) -> std::io::Result<()> {
    let pool = Arc::clone(pool);
    std::thread::Builder::new()
        .name("evictor".into())
        .spawn(move || run(&pool))?;
    Ok(())
}

fn run(pool: &Arc<Pool>) {
    while !pool.is_stopping() {
        let patience = if pool.demand.waiting.load(Ordering::Acquire) > 0 {
            RETRY
        } else {
            Duration::from_millis(500)
        };
        pool.demand.wait(patience);
        if pool.demand.bytes.load(Ordering::Acquire) > 0 && !pool.is_stopping() && pool.leads() {
            pool.evict_round();
        }
    }
}

impl Pool {
    /// How many bytes a round has to free now; zero when none is needed.
    fn eviction_goal(&self) -> u64 {
        let usage = self.placement.usage();
        let demand = self.demand.bytes.load(Ordering::Acquire);
        let settled = usage.settled;
        if settled + demand <= usage.limit {
            return 0;
        }
        let down_to =
            usage.limit - share(usage.capacity, self.config.eviction_ratio).min(usage.limit);
        (settled + demand - down_to).min(settled)
    }

    fn evict_round(self: &Arc<Self>) {
        let goal = self.eviction_goal();
        if goal == 0 {
            self.make_range();
            return;
        }
        let started = std::time::Instant::now();
        let (mut freed, mut last) = (0, 0);
        while freed < goal && !self.is_stopping() {
            let want = (goal - freed).min(STEP_BYTES);
            let _until_submitted = self.evicting.read();
            let placeable = self.takers();
            let gives_room = |segment| placeable.contains(&segment);
            let victims = self.evict(want, gives_room);
            let Some(latest) = victims.last() else { break };
            last = latest.footprint_on(gives_room);
            freed += victims
                .iter()
                .map(|v| v.footprint_on(gives_room))
                .sum::<u64>();
            self.submit_victims(victims);
        }
        self.metrics
            .eviction_round(goal, freed, last, started.elapsed());
        tracing::debug!(goal, freed, "eviction round");
    }

    /// There is room, but not in one piece: evicts the cheapest run of neighbours that gives one.
    fn make_range(self: &Arc<Self>) {
        let length = self.demand.largest.swap(0, Ordering::AcqRel);
        if length == 0 {
            return;
        }
        let segments: Vec<_> = {
            let segments = self.placement.segments();
            segments
                .iter()
                .filter(|s| s.node.is_placeable())
                .cloned()
                .collect()
        };
        if segments.is_empty() {
            return;
        }
        let length = kvpool_types::Length(length);
        // The quarantine of a segment becomes free without another eviction.
        let shortfall =
            |segment: &Segment| (segment.settled() + length.0).saturating_sub(segment.limit());
        let mut least = u64::MAX;
        for segment in &segments {
            let over = shortfall(segment);
            least = least.min(over);
            if over > 0 {
                continue;
            }
            if segment.extents().largest_free() >= length || segment.settled() < segment.used() {
                return;
            }
            let _until_submitted = self.evicting.read();
            let run = self.directory.evict_run(
                segment.id,
                || segment.extents(),
                length,
                self.now(),
                self.lease_floor,
            );
            if let Some(victims) = run {
                self.submit_victims(victims);
                return;
            }
        }
        // There is room in the pool but in no single segment, or nothing can be taken in one piece.
        let want = if least == 0 { length.0 } else { least };
        let _until_submitted = self.evicting.read();
        let takers = self.takers();
        let victims = self.evict(want, |id| takers.contains(&id));
        self.submit_victims(victims);
    }

    /// The segments that take blocks now. What eviction set aside on one that took none when this was
    /// last asked is recalled. Only the evictor asks.
    fn takers(&self) -> HashSet<SegmentId> {
        let now = self.placement.placeable();
        let before = std::mem::replace(&mut *self.takers.lock(), now.clone());
        if now != before {
            self.directory.recall(now.difference(&before).copied());
        }
        now
    }

    fn evict(&self, goal: u64, gives_room: impl Fn(SegmentId) -> bool) -> Vec<Removed> {
        let now = self.now();
        self.directory
            .evict(goal, now, self.lease_floor, gives_room)
    }

    fn submit_victims(self: &Arc<Self>, victims: Vec<Removed>) {
        if !victims.is_empty() {
            let bytes = victims.iter().map(Removed::footprint).sum();
            self.metrics.evicted(victims.len(), bytes);
            self.submit_left(&victims);
        }
    }
}
