//! The eviction thread.
//!
//! A round begins when less than half of the reserve is free, or when waiting puts do not fit. The
//! reserve is the eviction ratio of the pool, below the high watermark. It serves puts while
//! nothing may be evicted. A round ends when the free room covers the whole reserve and the demands
//! of the first waiting puts.
//!
//! Eviction counts quarantined extents as future free space, except stuck ones. It also counts
//! extents that only leases hold, if these leases end before the puts give up. So no round evicts
//! again for room that an earlier round has freed. A round works in small steps, oldest block
//! first.
//!
//! A block that is loaded from a medium needs room on the node of the medium. While a reader waits
//! for such a block and the node has no room, the evictor evicts the node's oldest blocks. On a
//! draining node it evicts only blocks whose copies can be read.
//!
//! Blocks that move off a draining node take room before eviction sees them on their target. Until they
//! arrive, a block that was used later leaves only for puts that wait. Otherwise eviction would take such
//! blocks and keep the older ones that arrive. A move whose source has lost its session delays no eviction.
//!
//! A block larger than the oldest blocks needs contiguous room. For such a block the evictor evicts
//! the cheapest run of neighbours, and counts it towards the round's goal.
//!
//! In a pool with media, the evictor orders the due stores before blocks leave
//! ([`Pool::order_stores`]). A block that was put or used since then stays, since its store may not
//! have been ordered.
//!
//! ADR 0005 says why the watermark is a cap. ADR 0022 says why there is a reserve.

use super::Pool;
use super::put_queue::{QueuedDemand, counted_at_once};
use super::tiering::{Room, WantedRoom};
use crate::clock::BootInstant;
use crate::directory::{LeaseFloor, Removed, RunLimits, Tick};
use crate::placement::{ExtentIndex, Extents, Segment, Usage, share};
use crate::workers::Workers;
use kvpool_types::{Length, SegmentId};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::field::Empty;

/// The bytes after which a step gives its victims to the journal and releases all locks.
const STEP_BYTES: u64 = 8 << 20;
/// How long the evictor waits without a wake-up while no put waits.
const IDLE: Duration = Duration::from_millis(500);
/// The delay after a round without a victim. Leases expire without an event, so the evictor polls.
const RETRY: Duration = Duration::from_millis(20);
/// How long an evicted run may take to become free. After that the evictor evicts another run for
/// the same put.
const RUN_TIMEOUT: Duration = Duration::from_millis(400);
/// The shortest pause after a search that found no run. Leases end without an event, so the evictor
/// polls.
const FRUITLESS_PAUSE: Duration = Duration::from_millis(50);
/// The pause after such a search, as a multiple of the search's duration.
const FRUITLESS_SHARE: u32 = 20;
/// The longest run for a batch of blocks. A run for a single block is as long as the block.
const LONGEST_RUN: u64 = 64 << 20;
/// A lease that ends this shortly before a put gives up does not count as room for that put.
const MARGIN: Duration = Duration::from_millis(300);

/// Starts the evictor.
pub(super) fn start(pool: &Arc<Pool>, workers: Workers) -> std::io::Result<()> {
    let mut runs = Runs::default();
    workers.start(
        pool,
        "evictor",
        |pool| &pool.evictor_wake,
        IDLE,
        move |pool| {
            if pool.leads() {
                let mut orders = StoreOrders::default();
                pool.make_quota_room(&mut orders);
                pool.evict_round(&mut runs, &mut orders);
            }
            if pool.put_queue.is_empty() && pool.quotas.is_empty() {
                IDLE
            } else {
                RETRY
            }
        },
    )
}

/// The orders of stores in one step of the evictor. The evictor gives them before the first block
/// leaves. It repeats them once, when all remaining blocks were put or used since then.
#[derive(Default)]
pub(super) struct StoreOrders {
    before: Option<Tick>,
    are_repeated: bool,
}

impl StoreOrders {
    /// Blocks whose last use is before this tick may leave.
    pub(super) fn before(&mut self, pool: &Arc<Pool>) -> Tick {
        *self.before.get_or_insert_with(|| pool.order_stores())
    }

    /// Orders stores again, because no victim was found. False if they were already repeated, or if
    /// that changes nothing.
    pub(super) fn repeat(&mut self, pool: &Arc<Pool>) -> bool {
        let repeats = pool.has_media() && !self.are_repeated;
        if repeats {
            (self.before, self.are_repeated) = (Some(pool.order_stores()), true);
        }
        repeats
    }

    /// Records that blocks have left.
    const fn progressed(&mut self) {
        self.are_repeated = false;
    }
}

/// The recent evictions of runs, by segment.
#[derive(Default)]
struct Runs {
    /// The last search for a put.
    for_puts: HashMap<SegmentId, LastSearch>,
    /// The last eviction for a load.
    for_loads: HashMap<SegmentId, LoadEviction>,
    /// The last search for blocks with copies, on segments of nodes that drain.
    copied: HashMap<SegmentId, CopiedSearch>,
    /// When to examine again the blocks whose ancestors were leased.
    recall: BootInstant,
}

/// An eviction for a load that waits for room.
#[derive(Clone, Copy)]
struct LoadEviction {
    /// Until when its room may take to become free, or until when it is not repeated if it found no block.
    until: BootInstant,
    /// Whether it found blocks.
    found: bool,
    /// It took blocks that were last used before this tick.
    before: Tick,
}

impl LoadEviction {
    /// Whether its room may still become free.
    fn comes(&self, now: BootInstant) -> bool {
        self.found && now < self.until
    }
}

/// The room that one step has made.
struct Evicted {
    /// The room that the last block gives, in bytes.
    last: u64,
    /// The room that all blocks give, in bytes.
    freed: u64,
}

/// The position at which a search for blocks with copies continues, and the earliest time for it.
#[derive(Default)]
struct CopiedSearch {
    hand: Option<ExtentIndex>,
    again: BootInstant,
}

struct LastSearch {
    /// The put at the head of the queue at the time, and the number of its passes.
    put: (u64, u64),
    /// When to search again for the same pass of the same put.
    again: BootInstant,
    /// Whether a run was evicted.
    found: bool,
}

impl Runs {
    /// The last search for the put, if it is too early for the next one.
    fn pending(
        &self,
        segment: SegmentId,
        put: (u64, u64),
        now: BootInstant,
    ) -> Option<&LastSearch> {
        let last = self.for_puts.get(&segment);
        last.filter(|last| last.put == put && now < last.again)
    }
}

impl Pool {
    /// The bytes of the reserve below the high watermark.
    fn reserve_bytes(&self, usage: &Usage) -> u64 {
        share(usage.capacity, self.config.eviction_ratio).min(usage.limit)
    }

    /// True if a round is due even though no put waits.
    pub(super) fn is_low(&self, usage: &Usage) -> bool {
        usage.used_after_quarantine > usage.limit - self.reserve_bytes(usage) / 2
    }

    /// The bytes that a round must free now; zero if no round is due.
    fn eviction_goal(&self, usage: &Usage, demanded: Option<&QueuedDemand>) -> u64 {
        let demand = demanded.map_or(0, |demanded| demanded.bytes);
        let wanted = usage.used_after_quarantine.saturating_add(demand);
        let reserve = self.reserve_bytes(usage);
        if wanted <= usage.limit - reserve / 2 {
            return 0;
        }
        // Extents that only leases hold need no eviction, if the leases end in time.
        let coming = self.coming(demanded);
        wanted
            .saturating_sub(usage.limit - reserve)
            .saturating_sub(coming)
            .min(usage.used_after_quarantine)
    }

    /// The bytes that become free without eviction before the first waiting put gives up.
    fn coming(&self, demanded: Option<&QueuedDemand>) -> u64 {
        let until = demanded.map_or(BootInstant(u64::MAX), |demanded| {
            let margin = u64::try_from(MARGIN.as_millis()).unwrap_or(u64::MAX);
            BootInstant(demanded.until.0.saturating_sub(margin))
        });
        let taking = self.placement.placeable();
        self.quarantine.coming(until, |id| taking.contains(&id))
    }

    fn evict_round(self: &Arc<Self>, runs: &mut Runs, orders: &mut StoreOrders) {
        let usage = self.placement.usage();
        let demanded = self.put_queue.demanded(counted_at_once(usage.limit));
        let goal = self.eviction_goal(&usage, demanded.as_ref());
        let started = Instant::now();
        let mut freed = 0;
        for wanted in self.take_wanted_room() {
            freed += self.make_room_for_loads(&wanted, runs, orders);
        }
        if let Some(demanded) = &demanded {
            freed += self.make_range(demanded, &usage, goal > 0, runs, orders);
        }
        if goal == 0 {
            if freed > 0 {
                // Without another goal, the evicted run was the whole round.
                let took = started.elapsed();
                self.metrics.eviction_round(freed, freed, freed, took);
            }
            return;
        }
        let round = kvpool_trace::span!("eviction round", goal_bytes = goal, freed_bytes = Empty);
        let _inside = round.enter();
        let mut last = freed;
        let urgent = demanded.map_or(0, |demanded| demanded.bytes.min(goal));
        while freed < goal && !self.is_stopping() {
            let before = orders.before(self);
            let unseen = self.replicas.oldest_unseen().unwrap_or(Tick::MAX);
            let want = |until: u64| until.saturating_sub(freed).min(STEP_BYTES);
            let mut step = self.evict_step(want(goal), before.min(unseen));
            let waits_for_moves = unseen < before && freed >= urgent;
            if step.is_none() && unseen < before && !waits_for_moves {
                step = self.evict_step(want(urgent), before);
            }
            if let Some(step) = step {
                last = step.last;
                freed += step.freed;
                orders.progressed();
            } else if waits_for_moves || !orders.repeat(self) {
                break;
            }
        }
        if freed > 0 {
            self.put_queue.progress(self.now());
            self.metrics
                .eviction_round(goal, freed, last, started.elapsed());
            round.record("freed_bytes", freed);
            tracing::debug!(goal, freed, "eviction round");
        } else if self.now() >= runs.recall {
            // Blocks that were set aside for a leased ancestor may leave now.
            let begun = Instant::now();
            self.directory.recall(std::iter::empty());
            let pause = FRUITLESS_PAUSE.max(begun.elapsed() * FRUITLESS_SHARE);
            runs.recall = self.now().after(pause);
        }
    }

    /// Evicts the oldest blocks that give room and whose last use is before a tick. `None` if there
    /// are none.
    fn evict_step(self: &Arc<Self>, goal: u64, before: Tick) -> Option<Evicted> {
        let _until_submitted = self.evicting.read();
        let takers = self.takers();
        let gives_room = |segment| takers.contains(&segment);
        let victims = self.evict(goal, before, gives_room);
        let step = Evicted {
            last: victims.last()?.footprint_on(gives_room),
            freed: footprint(&victims, gives_room),
        };
        self.submit_victims(victims);
        Some(step)
    }

    /// Evicts the cheapest run of neighbours for the first waiting put, if the put needs contiguous
    /// room that eviction by age would not give. Returns the evicted bytes.
    fn make_range(
        self: &Arc<Self>,
        demanded: &QueuedDemand,
        usage: &Usage,
        is_full: bool,
        runs: &mut Runs,
        orders: &mut StoreOrders,
    ) -> u64 {
        let demand = &demanded.demand;
        let (length, now) = (Length(demand.largest), self.now());
        // The oldest blocks are large enough: each makes room for one block of the put. The blocks
        // that were just evicted leave quarantine soon.
        let comes = usage.used > usage.used_after_quarantine;
        if (is_full || comes) && self.directory.first_footprint() >= length.0 {
            return 0;
        }
        let counted = demand.counted(counted_at_once(usage.limit));
        // If only leases hold the room that the put needs, no run is evicted for it.
        if !is_full && usage.used_after_quarantine.saturating_add(counted) > usage.limit {
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
        // On each node the segment with the smallest shortfall; one of these nodes for each
        // replica.
        let mut ranged: Vec<_> = segments.iter().filter(has_range).cloned().collect();
        ranged.sort_by_key(|segment| segment.shortfall(length));
        let mut nodes = HashSet::new();
        ranged.retain(|segment| nodes.insert(segment.node.incarnation));
        if ranged.len() >= demand.copies {
            if is_full {
                return 0;
            }
            // The pool has room, but the segments with contiguous room are at their watermark.
            let needed = ranged.iter().take(demand.copies);
            return needed
                .map(|segment| {
                    let bytes = segment.shortfall(length);
                    self.evict_on(segment, bytes, Tick::MAX, orders)
                })
                .sum();
        }
        segments.sort_by_key(|segment| segment.shortfall(length));
        let put = (demanded.first, demanded.passes);
        for segment in segments.iter().filter(|segment| !has_range(segment)) {
            match runs.pending(segment.id, put, now) {
                // The evicted run will soon be free.
                Some(last) if last.found => return 0,
                Some(_) => continue,
                None => {}
            }
            let limits = self.run_limits(Tick::MAX, orders);
            let begun = Instant::now();
            // One run serves the blocks of a batch together where possible.
            let together = counted / demand.copies.max(1) as u64;
            let together = Length(together.min(LONGEST_RUN).max(length.0));
            let _until_submitted = self.evicting.read();
            let takers = self.takers();
            let seek = |length| {
                let extents = || segment.extents();
                self.directory
                    .evict_run(segment.id, extents, length, &limits)
            };
            let shorter = |length: Length| (length < together).then(|| seek(length)).flatten();
            let victims = seek(together).or_else(|| shorter(length));
            let pause = match victims {
                Some(_) => RUN_TIMEOUT,
                None => FRUITLESS_PAUSE.max(begun.elapsed() * FRUITLESS_SHARE),
            };
            let search = LastSearch {
                put,
                again: now.after(pause),
                found: victims.is_some(),
            };
            runs.for_puts.insert(segment.id, search);
            if let Some(victims) = victims {
                let freed = footprint(&victims, |id| takers.contains(&id));
                self.submit_victims(victims);
                return freed;
            }
        }
        0
    }

    /// Evicts blocks of a node for the loads that wait there, and returns the evicted bytes.
    fn make_room_for_loads(
        self: &Arc<Self>,
        wanted: &WantedRoom,
        runs: &mut Runs,
        orders: &mut StoreOrders,
    ) -> u64 {
        let length = wanted.largest;
        let mut segments: Vec<_> = {
            let segments = self.placement.segments();
            segments
                .iter()
                .filter(|s| Arc::ptr_eq(&s.node, &wanted.node) && s.limit() >= length.0)
                .cloned()
                .collect()
        };
        segments.sort_by_key(|segment| segment.shortfall(length));
        if wanted.node.drains() {
            return self.make_room_on_draining(wanted, &segments, runs);
        }
        if segments.is_empty() || !wanted.node.is_readable() {
            return 0;
        }
        for segment in &segments {
            // Without any block that may leave, the search would be in vain.
            let freed = match wanted.before {
                WantedRoom::NO_BLOCK => 0,
                _ => self.make_room_on(segment, wanted, runs, orders),
            };
            // The oldest blocks of the node may lie on any of its segments.
            let made = runs.for_loads.get(&segment.id);
            let was_made = made.is_some_and(|made| made.comes(self.now()));
            if freed > 0 || wanted.before == Tick::MAX || comes_on(segment, length, was_made) {
                return freed;
            }
        }
        let ids: Vec<SegmentId> = segments.iter().map(|segment| segment.id).collect();
        let next = self.next_victim_on(&ids);
        self.replicas
            .note_next_victim(&wanted.node, next, self.now());
        0
    }

    /// [`Pool::make_room_for_loads`] on one segment of a node that takes blocks.
    fn make_room_on(
        self: &Arc<Self>,
        segment: &Arc<Segment>,
        wanted: &WantedRoom,
        runs: &mut Runs,
        orders: &mut StoreOrders,
    ) -> u64 {
        let (length, used_before) = (wanted.largest, wanted.before);
        if segment.extents().largest_free() >= length {
            let bytes = wanted.bytes.0.max(Extents::rounded(length).0);
            let bytes = Length(bytes.min(segment.limit()));
            return self.evict_on(segment, segment.shortfall(bytes), used_before, orders);
        }
        let now = self.now();
        let comes = segment.used() > segment.used_after_quarantine();
        // A search among the same or fewer blocks would find as little.
        let is_early = runs.for_loads.get(&segment.id).is_some_and(|last| {
            last.comes(now) || now < last.until && !last.found && used_before <= last.before
        });
        if comes && is_early {
            return 0;
        }
        let freed = self.evict_for_load(segment, length, used_before, orders);
        let eviction = LoadEviction {
            until: now.after(RUN_TIMEOUT),
            found: freed > 0,
            before: used_before,
        };
        runs.for_loads.insert(segment.id, eviction);
        freed
    }

    /// Evicts one block that leaves a free range of this length, or neighbours that do. Returns their bytes.
    fn evict_for_load(
        self: &Arc<Self>,
        segment: &Arc<Segment>,
        length: Length,
        used_before: Tick,
        orders: &mut StoreOrders,
    ) -> u64 {
        if self.directory.first_footprint() >= length.0 {
            return self.evict_on(segment, length.0, used_before, orders);
        }
        let limits = self.run_limits(used_before, orders);
        let _until_submitted = self.evicting.read();
        let extents = || segment.extents();
        let victims = self
            .directory
            .evict_run(segment.id, extents, length, &limits)
            .unwrap_or_default();
        let freed = footprint(&victims, |id| id == segment.id);
        self.submit_victims(victims);
        freed
    }

    /// [`Pool::make_room_for_loads`] on a draining node. Eviction for puts has set the node's
    /// blocks aside. A block without a copy must stay, since the drain would lose it.
    fn make_room_on_draining(
        self: &Arc<Self>,
        wanted: &WantedRoom,
        segments: &[Arc<Segment>],
        runs: &mut Runs,
    ) -> u64 {
        if !wanted.node.is_readable() {
            return 0;
        }
        let now = self.now();
        for segment in segments {
            let length = wanted.largest;
            let shortfall =
                segment.shortfall(Length(wanted.bytes.0.max(length.0).min(segment.limit())));
            let has_piece = segment.extents().largest_free() >= length;
            let room = match has_piece {
                true => Room {
                    bytes: shortfall,
                    piece: Length(0),
                },
                false => Room {
                    bytes: shortfall,
                    piece: Extents::rounded(length),
                },
            };
            let comes = segment.used() > segment.used_after_quarantine();
            let made = runs.for_loads.get(&segment.id);
            let is_coming = comes && !has_piece && made.is_some_and(|made| made.comes(now));
            if has_piece && room.bytes == 0 || is_coming {
                return 0;
            }
            let search = runs.copied.entry(segment.id).or_default();
            if now < search.again {
                continue;
            }
            let made = self.evict_copied_on(segment, room, &mut search.hand);
            if made.bytes == 0 || !made.has_piece {
                search.again = now.after(FRUITLESS_PAUSE);
            }
            if made.bytes > 0 {
                let eviction = LoadEviction {
                    until: now.after(RUN_TIMEOUT),
                    found: true,
                    before: Tick::MAX,
                };
                runs.for_loads.insert(segment.id, eviction);
                return made.bytes;
            }
        }
        0
    }

    /// Evicts the oldest blocks of one segment, if they were last used before a tick. Returns their bytes
    /// there.
    fn evict_on(
        self: &Arc<Self>,
        segment: &Arc<Segment>,
        bytes: u64,
        used_before: Tick,
        orders: &mut StoreOrders,
    ) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let before = orders.before(self);
        let freed = self.evict_before_on(segment, bytes, before.min(used_before));
        match freed == 0 && before < used_before && orders.repeat(self) {
            true => self.evict_before_on(segment, bytes, orders.before(self).min(used_before)),
            false => freed,
        }
    }

    fn evict_before_on(self: &Arc<Self>, segment: &Arc<Segment>, bytes: u64, before: Tick) -> u64 {
        let here = |id| id == segment.id;
        let _until_submitted = self.evicting.read();
        let victims = self.evict(bytes, before, here);
        // Blocks on other segments were set aside only because they make no room here.
        let takers = self.takers();
        let elsewhere = takers.into_iter().filter(|id| !here(*id));
        self.directory.recall(elsewhere);
        let freed = footprint(&victims, here);
        self.submit_victims(victims);
        freed
    }

    /// The last use of the block that eviction takes next on the segments of one node. `None` while it takes none
    /// there, or takes blocks in another order because leases of the last term may run.
    fn next_victim_on(&self, segments: &[SegmentId]) -> Option<Tick> {
        let now = self.now();
        if now < self.lease_floor {
            return None;
        }
        let here = |id: SegmentId| segments.contains(&id);
        // No block was used before this tick. So none leaves, and those that make no room here are set aside.
        let none = self.directory.evict_before(Tick::default(), 1, now, here);
        debug_assert!(none.is_empty(), "invariant: no block is older than all");
        let next = self.directory.first_tick(now);
        let elsewhere = self.takers().into_iter().filter(|id| !here(*id));
        self.directory.recall(elsewhere);
        next
    }

    /// The segments that take blocks now. Blocks that eviction set aside on a segment that takes
    /// blocks again are recalled. Only the evictor calls this.
    fn takers(&self) -> HashSet<SegmentId> {
        let now = self.placement.placeable();
        let before = std::mem::replace(&mut *self.takers.lock(), now.clone());
        if now != before {
            self.directory.recall(now.difference(&before).copied());
        }
        now
    }

    /// The limits for a run now of blocks that were last used before a tick. Before the lease floor, blocks of
    /// earlier terms count as leased.
    fn run_limits(self: &Arc<Self>, used_before: Tick, orders: &mut StoreOrders) -> RunLimits {
        RunLimits {
            before: orders.before(self).min(used_before),
            now: self.now(),
            floor: LeaseFloor {
                until: self.lease_floor,
                before: self.first_version,
            },
        }
    }

    fn evict(
        &self,
        goal: u64,
        before: Tick,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Vec<Removed> {
        let now = self.now();
        if now >= self.lease_floor {
            self.recent_puts.forget();
            return self.directory.evict_before(before, goal, now, gives_room);
        }
        self.recent_puts
            .evict(&self.directory, before, goal, now, gives_room)
    }

    pub(super) fn submit_victims(self: &Arc<Self>, victims: Vec<Removed>) {
        if !victims.is_empty() {
            let bytes = victims.iter().map(Removed::footprint).sum();
            self.metrics.evicted(victims.len(), bytes);
            self.note_left_memory(&victims);
            self.submit_left(&victims);
        }
    }
}

/// Whether a segment has room for a block now, or will have it once its quarantine ends. No eviction is due then.
/// `was_made`: an eviction has made a range for it, which may still be in quarantine.
fn comes_on(segment: &Segment, length: Length, was_made: bool) -> bool {
    let comes = segment.used() > segment.used_after_quarantine();
    let rounded = Extents::rounded(length);
    let largest = segment.extents().largest_free();
    let fits = largest >= rounded && segment.shortfall(rounded) == 0;
    segment.gives_room(length) || comes && (was_made || fits)
}

fn footprint(victims: &[Removed], gives_room: impl Fn(SegmentId) -> bool) -> u64 {
    let bytes = victims.iter().map(|v| v.footprint_on(&gives_room));
    bytes.sum()
}
