//! The thread that makes room.
//!
//! A round begins when less than half of the reserve is free, or when waiting puts do not fit. The reserve is the
//! eviction ratio of the pool, below the high watermark: it carries puts while nothing may be evicted. The goal of a
//! round is that the reserve is free beside the demands of the first puts in line. Quarantine counts as freed, unless
//! it is stuck; and what leases alone hold shut counts too, where they end before the puts give up. So no round takes
//! again what an earlier one has taken. A round works in small steps, oldest block first, and stops at the goal.
//!
//! A block that is larger than the oldest ones needs room in one piece. For that the cheapest run of neighbours goes,
//! and it counts towards the goal.
//!
//! ADR 0005 says why the watermark is a cap, ADR 0022 why there is a reserve.

use super::Pool;
use super::put_queue::{QueuedDemand, counted_at_once};
use crate::clock::BootInstant;
use crate::directory::{LeaseFloor, Removed};
use crate::placement::{Segment, Usage, share};
use kvpool_types::{Length, SegmentId};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// The bytes after which a step hands its victims to the journal and lets go of all locks.
const STEP_BYTES: u64 = 8 << 20;
/// How soon a round that found nothing to evict is tried again: leases run out without a call.
const RETRY: Duration = Duration::from_millis(20);
/// For how long a run that was evicted is waited for before another one goes for the same put.
const RUN_PATIENCE: Duration = Duration::from_millis(400);
/// The longest run for a batch of blocks; one for a single block is as long as that.
const LONGEST_RUN: u64 = 64 << 20;
/// Leases that end so shortly before a put gives up do not count as room for it.
const MARGIN: Duration = Duration::from_millis(300);

/// Starts the thread.
pub(super) fn start(pool: &Arc<Pool>) -> std::io::Result<()> {
    let pool = Arc::clone(pool);
    std::thread::Builder::new()
        .name("evictor".into())
        .spawn(move || run(&pool))?;
    Ok(())
}

fn run(pool: &Arc<Pool>) {
    let mut runs = Runs::default();
    while !pool.is_stopping() {
        let patience = if pool.put_queue.is_empty() {
            Duration::from_millis(500)
        } else {
            RETRY
        };
        pool.evictor_wake.wait(patience);
        if !pool.is_stopping() && pool.leads() {
            pool.evict_round(&mut runs);
        }
    }
}

/// The last run that was sought on each segment: for which put, and when.
#[derive(Default)]
struct Runs(HashMap<SegmentId, (u64, BootInstant)>);

impl Runs {
    /// Whether a run for the put is to be sought on a segment now.
    fn is_due(&self, segment: SegmentId, put: u64, now: BootInstant) -> bool {
        let last = self.0.get(&segment);
        last.is_none_or(|(other, since)| *other != put || now.since(*since) >= RUN_PATIENCE)
    }
}

impl Pool {
    /// The bytes below the high watermark that eviction keeps free.
    fn reserve_bytes(&self, usage: &Usage) -> u64 {
        share(usage.capacity, self.config.eviction_ratio).min(usage.limit)
    }

    /// Whether a round of eviction is due though nobody waits.
    pub(super) fn is_low(&self, usage: &Usage) -> bool {
        usage.used_after_quarantine > usage.limit - self.reserve_bytes(usage) / 2
    }

    /// How many bytes a round has to free now; zero when none is needed.
    fn eviction_goal(&self, usage: &Usage, demanded: Option<&QueuedDemand>) -> u64 {
        let demand = demanded.map_or(0, |demanded| demanded.bytes);
        let wanted = usage.used_after_quarantine.saturating_add(demand);
        let reserve = self.reserve_bytes(usage);
        if wanted <= usage.limit - reserve / 2 {
            return 0;
        }
        // What leases alone hold shut needs no eviction, if they end in time.
        let coming = self.coming(demanded);
        wanted
            .saturating_sub(usage.limit - reserve)
            .saturating_sub(coming)
            .min(usage.used_after_quarantine)
    }

    /// The bytes that become free without eviction before the first of the waiting puts gives up.
    fn coming(&self, demanded: Option<&QueuedDemand>) -> u64 {
        let until = demanded.map_or(BootInstant(u64::MAX), |demanded| {
            let margin = u64::try_from(MARGIN.as_millis()).unwrap_or(u64::MAX);
            BootInstant(demanded.until.0.saturating_sub(margin))
        });
        let taking = self.placement.placeable();
        self.quarantine.coming(until, |id| taking.contains(&id))
    }

    fn evict_round(self: &Arc<Self>, runs: &mut Runs) {
        let usage = self.placement.usage();
        let demanded = self.put_queue.demanded(counted_at_once(usage.limit));
        let goal = self.eviction_goal(&usage, demanded.as_ref());
        let mut freed = 0;
        if let Some(demanded) = &demanded {
            freed += self.make_range(demanded, &usage, goal > 0, runs);
        }
        if goal == 0 {
            return;
        }
        let started = std::time::Instant::now();
        let mut last = freed;
        while freed < goal && !self.is_stopping() {
            let want = (goal - freed).min(STEP_BYTES);
            let _until_submitted = self.evicting.read();
            let takers = self.takers();
            let gives_room = |segment| takers.contains(&segment);
            let victims = self.evict(want, gives_room);
            let Some(latest) = victims.last() else { break };
            last = latest.footprint_on(gives_room);
            freed += footprint(&victims, gives_room);
            self.submit_victims(victims);
        }
        if freed > 0 {
            self.put_queue.progress(self.now());
            self.metrics
                .eviction_round(goal, freed, last, started.elapsed());
            tracing::debug!(goal, freed, "eviction round");
        }
    }

    /// Evicts the cheapest run of neighbours, if the first put in line needs room in one piece and eviction by age
    /// would not give it. Returns the bytes that it evicted.
    fn make_range(
        self: &Arc<Self>,
        demanded: &QueuedDemand,
        usage: &Usage,
        is_full: bool,
        runs: &mut Runs,
    ) -> u64 {
        let demand = &demanded.demand;
        let (length, now) = (Length(demand.largest), self.now());
        // The oldest blocks go one by one, and each gives room for one of its size.
        if is_full && self.directory.first_footprint() >= length.0 {
            return 0;
        }
        // Its bytes are to come from what leases hold shut.
        if !is_full && usage.used_after_quarantine.saturating_add(demand.bytes) > usage.limit {
            return 0;
        }
        let mut segments: Vec<_> = {
            let segments = self.placement.segments();
            segments
                .iter()
                .filter(|s| s.node.is_placeable() && s.limit() >= length.0)
                .cloned()
                .collect()
        };
        let has_range = |segment: &&Arc<Segment>| segment.extents().largest_free() >= length;
        // On each node the segment that lacks the least; of these, as many as there are to be copies.
        let mut ranged: Vec<_> = segments.iter().filter(has_range).cloned().collect();
        ranged.sort_by_key(|segment| segment.shortfall(length));
        let mut nodes = HashSet::new();
        ranged.retain(|segment| nodes.insert(Arc::as_ptr(&segment.node)));
        if ranged.len() >= demand.copies {
            if is_full {
                return 0;
            }
            // There is room in the pool, but not below the watermark of segments that have it in one piece.
            let needed = ranged.iter().take(demand.copies);
            return needed
                .map(|segment| self.evict_on(segment, segment.shortfall(length)))
                .sum();
        }
        segments.sort_by_key(|segment| segment.shortfall(length));
        let floor = self.floor();
        for segment in segments.iter().filter(|segment| !has_range(segment)) {
            if !runs.is_due(segment.id, demanded.first, now) {
                return 0;
            }
            runs.0.insert(segment.id, (demanded.first, now));
            // The blocks of a batch lie together where that is possible.
            let counted = demand.counted(counted_at_once(usage.limit));
            let together = counted / demand.copies.max(1) as u64;
            let together = Length(together.min(LONGEST_RUN).max(length.0));
            let _until_submitted = self.evicting.read();
            let takers = self.takers();
            let seek = |length| {
                let extents = || segment.extents();
                self.directory
                    .evict_run(segment.id, extents, length, now, floor)
            };
            let shorter = |length: Length| (length < together).then(|| seek(length)).flatten();
            if let Some(victims) = seek(together).or_else(|| shorter(length)) {
                let freed = footprint(&victims, |id| takers.contains(&id));
                self.submit_victims(victims);
                return freed;
            }
        }
        0
    }

    /// Evicts the oldest blocks of one segment; returns their bytes there.
    fn evict_on(self: &Arc<Self>, segment: &Arc<Segment>, bytes: u64) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let here = |id| id == segment.id;
        let _until_submitted = self.evicting.read();
        let victims = self.evict(bytes, here);
        // Blocks elsewhere were set aside only because they gave no room here.
        let takers = self.takers();
        let elsewhere = takers.into_iter().filter(|id| !here(*id));
        self.directory.recall(elsewhere);
        let freed = footprint(&victims, here);
        self.submit_victims(victims);
        freed
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

    /// Before the floor blocks of earlier terms count as leased.
    fn floor(&self) -> LeaseFloor {
        LeaseFloor {
            until: self.lease_floor,
            before: self.first_version,
        }
    }

    fn evict(&self, goal: u64, gives_room: impl Fn(SegmentId) -> bool) -> Vec<Removed> {
        let now = self.now();
        if now >= self.lease_floor {
            self.fresh.forget();
            return self.directory.evict(goal, now, gives_room);
        }
        self.fresh.evict(&self.directory, goal, now, gives_room)
    }

    fn submit_victims(self: &Arc<Self>, victims: Vec<Removed>) {
        if !victims.is_empty() {
            let bytes = victims.iter().map(Removed::footprint).sum();
            self.metrics.evicted(victims.len(), bytes);
            self.submit_left(&victims);
        }
    }
}

fn footprint(victims: &[Removed], gives_room: impl Fn(SegmentId) -> bool) -> u64 {
    let bytes = victims.iter().map(|v| v.footprint_on(&gives_room));
    bytes.sum()
}
