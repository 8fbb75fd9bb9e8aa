//! Eviction of neighbouring extents: finds the cheapest run in a segment. This serves a block that is longer
//! than any free range while enough bytes are free in pieces.

use super::BlockId;
use super::Directory;
use super::block::{Removed, Tick};
use super::evict_tenants::{Precedence, is_guaranteed, precedence_of};
use super::lineage::Aftermath;
use super::queues::Rank;
use crate::clock::BootInstant;
use crate::placement::Extents;
use crate::placement::extents::{Range, Use};
use crate::replica::ExtentIndex;
use crate::slab::NONE;
use kvpool_seams::maps::HashMap;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Length, SegmentId, Setting, Version};
use std::ops::Deref;
use std::sync::atomic::Ordering;

/// The number of starting points of each kind.
const STARTS: usize = 8;
/// The number of examined ranges, over all starting points, after which the search takes the best run so far.
const MOST_RANGES: usize = 131_072;
/// The number of ranges passed under one lock of the table of extents.
const STEP_RANGES: usize = 4096;
/// A block with more descendants is never part of a run.
const LARGEST_FAMILY: usize = 64;
/// The cost of a byte of the most recent block. A byte of the oldest block costs [`OLDEST`]. In between, the
/// cost grows linearly with the tick.
const NEWEST: u64 = 1024;
const OLDEST: u64 = 256;

/// The factor of the cost of blocks whose namespace is not above a soft quota.
const WITHIN_SOFT: u64 = 16;

/// Blocks of earlier terms count as leased until a time, because this term does not know their
/// leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseFloor {
    /// The end of the last of these leases.
    pub until: BootInstant,
    /// The first version of this term.
    pub before: Version,
}

impl LeaseFloor {
    fn covers(&self, version: Version, now: BootInstant) -> bool {
        now < self.until && version < self.before
    }
}

/// The limits on the blocks of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLimits {
    /// Leases that end later than this are respected.
    pub now: BootInstant,
    /// Blocks that count as leased.
    pub floor: LeaseFloor,
    /// Blocks whose last use is at this tick or later stay.
    pub before: Tick,
}

/// A block that may be evicted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Victim {
    id: BlockId,
    version: Version,
    cost: u64,
    /// The namespace with a guaranteed share, and the bytes of the block's extents.
    of_share: Option<(NamespaceId, u64)>,
}

/// The victims that free one range, parents before children; empty for a free range.
type Price = Vec<Victim>;

impl Directory {
    /// Evicts the cheapest run of neighbouring extents of `segment` that covers `length` with the
    /// free ranges between them. It follows the rules of [`Directory::evict`].
    ///
    /// The cost counts bytes and recency. The search starts around the oldest blocks and the
    /// longest free ranges. A block leaves with all its descendants or not at all. `None` when no
    /// run was found, or when its blocks were used meanwhile. `extents` locks the segment's table,
    /// which is never locked together with a stripe.
    pub fn evict_run<T: Deref<Target = Extents>>(
        &self,
        segment: SegmentId,
        extents: impl Fn() -> T,
        length: Length,
        limits: &RunLimits,
    ) -> Option<Vec<Removed>> {
        if length.0 == 0 {
            return None;
        }
        let victims = self.plan_run(segment, extents, Extents::rounded(length), limits)?;
        let evicted = self.evict_planned(victims, limits.now);
        (!evicted.is_empty()).then_some(evicted)
    }

    /// The victims of the cheapest run, children before parents.
    pub(super) fn plan_run<T: Deref<Target = Extents>>(
        &self,
        segment: SegmentId,
        extents: impl Fn() -> T,
        length: Length,
        limits: &RunLimits,
    ) -> Option<Vec<Victim>> {
        let (oldest, oldest_tick) = self.oldest_on(segment, length);
        let starts = starts(&extents(), &oldest);
        let mut search = Search::new(self, segment, oldest_tick, limits);
        let mut best: Option<(u64, Vec<Victim>)> = None;
        let mut looked_at = 0;
        for start in starts {
            // The search always finishes the first starting point that has a run.
            if looked_at >= MOST_RANGES && best.is_some() {
                break;
            }
            let ranges = stretch(&extents, start, length);
            looked_at += ranges.len();
            search.cheapest_run(&ranges, length.0, &mut best);
        }
        best.map(|(_, victims)| victims)
    }

    /// Evicts the victims that may still leave. No lock was held since they were chosen, so some may have
    /// changed.
    pub(super) fn evict_planned(&self, victims: Vec<Victim>, now: BootInstant) -> Vec<Removed> {
        let mut evicted = Vec::with_capacity(victims.len());
        let mut aftermath = Aftermath::default();
        for victim in victims {
            if let Some((mut stripe, slot)) = self.lock_block(victim.id)
                && stripe.entries.rest(slot).version == victim.version
                && !stripe.entries.at(slot).is_leased(self.common.relative(now))
                && !self.has_children(stripe.entries.rest(slot).lineage)
                && !self.keeps_share(&stripe, slot)
            {
                evicted.push(stripe.remove(slot, &self.common, &mut aftermath));
            }
        }
        self.apply_aftermath(aftermath);
        evicted
    }

    pub(super) fn has_children(&self, node: u32) -> bool {
        node != NONE && self.common.lineage.lock().has_children(node)
    }

    /// Extents on `segment` of blocks that are among the next victims, in the order of eviction. Blocks of
    /// namespaces that cannot give `length` bytes come last: a run around them would cross their guaranteed
    /// shares. Also returns the tick of the oldest ordinary block of all other namespaces, on any segment.
    fn oldest_on(&self, segment: SegmentId, length: Length) -> (Vec<ExtentIndex>, u64) {
        let accounts = self.accounts();
        let (mut found, mut oldest, mut oldest_of_all) = (Vec::new(), None, None);
        for cell in &self.stripes {
            let stripe = cell.lock();
            for rank in Rank::ALL {
                for (tick, slot) in stripe.queues.firsts(rank) {
                    let place = accounts.has_tenants().then(|| {
                        let namespace = stripe.namespace(slot, &self.common);
                        let keeps_all = is_guaranteed(accounts, namespace, length.0);
                        (keeps_all, precedence_of(accounts, namespace))
                    });
                    let may_leave = place.is_none_or(|(keeps_all, _)| !keeps_all);
                    if matches!(rank, Rank::Ordinary) {
                        let least =
                            |found: Option<u64>| Some(found.map_or(tick, |found| found.min(tick)));
                        oldest_of_all = least(oldest_of_all);
                        if may_leave {
                            oldest = least(oldest);
                        }
                    }
                    let replicas = stripe.replicas(slot);
                    if let Some(replica) = replicas.iter().find(|r| r.segment == segment) {
                        found.push((place, rank as u8, tick, replica.extent));
                    }
                }
            }
        }
        found.sort_unstable();
        let found = found.into_iter().take(STARTS);
        let extents = found.map(|(.., extent)| extent).collect();
        // If guaranteed shares keep the oldest block of every queue, ages count from the oldest kept block.
        (extents, oldest.or(oldest_of_all).unwrap_or_default())
    }
}

/// The starts of the search: the longest free ranges, and the extents of the oldest blocks.
fn starts(extents: &Extents, oldest: &[ExtentIndex]) -> Vec<Range> {
    let free = extents.longest_free().take(STARTS);
    let starts = oldest.iter().filter_map(|index| extents.range(*index));
    free.chain(starts)
        .filter(|start| start.usage != Use::Held)
        .collect()
}

/// The neighbouring ranges around a start: those that a run of `wanted` bytes over the start may
/// include, without held ranges.
fn stretch<T: Deref<Target = Extents>>(
    extents: &impl Fn() -> T,
    start: Range,
    wanted: Length,
) -> Vec<Range> {
    let mut ranges = reach(extents, start, wanted, &|extents, index| {
        extents.prev(index)
    });
    ranges.reverse();
    ranges.push(start);
    ranges.extend(reach(extents, start, wanted, &|extents, index| {
        extents.next(index)
    }));
    ranges
}

/// The ranges on one side of a start. The lock of the table is released from time to time.
fn reach<T: Deref<Target = Extents>>(
    extents: &impl Fn() -> T,
    start: Range,
    wanted: Length,
    step: &dyn Fn(&Extents, ExtentIndex) -> Option<Range>,
) -> Vec<Range> {
    let (mut ranges, mut last, mut bytes) = (Vec::new(), start, 0);
    loop {
        let table = extents();
        // The table may have changed between two locks.
        if table.range(last.index) != Some(last) {
            return ranges;
        }
        for _ in 0..STEP_RANGES {
            // The last range makes the run long enough.
            if bytes >= wanted.0 {
                return ranges;
            }
            match step(&table, last.index) {
                Some(range) if range.usage != Use::Held => {
                    bytes += range.length.0;
                    ranges.push(range);
                    last = range;
                }
                _ => return ranges,
            }
        }
    }
}

/// The state of one search: the cost of each range and block found so far.
struct Search<'d> {
    directory: &'d Directory,
    segment: SegmentId,
    limits: &'d RunLimits,
    oldest_tick: u64,
    /// The ticks from the oldest block to the most recent one. Ages count from the oldest block,
    /// because all ticks are high in a pool that has run for long.
    span: u64,
    prices: HashMap<ExtentIndex, Option<Price>>,
}

impl<'d> Search<'d> {
    fn new(
        directory: &'d Directory,
        segment: SegmentId,
        oldest_tick: u64,
        limits: &'d RunLimits,
    ) -> Self {
        let newest_tick = directory.next_tick.load(Ordering::Relaxed);
        Self {
            directory,
            segment,
            limits,
            oldest_tick,
            span: newest_tick.saturating_sub(oldest_tick).max(1),
            prices: HashMap::default(),
        }
    }

    /// Slides a window over the ranges. The window always begins as late as `wanted` bytes allow.
    fn cheapest_run(
        &mut self,
        ranges: &[Range],
        wanted: u64,
        best: &mut Option<(u64, Vec<Victim>)>,
    ) {
        let mut window = Window::default();
        let mut first = 0;
        for (last, range) in ranges.iter().enumerate() {
            let Some(price) = self.price(range) else {
                window = Window::default();
                first = last + 1;
                continue;
            };
            window.add(range, &price);
            while let Some(front) = ranges.get(first)
                && window.bytes - front.length.0 >= wanted
            {
                let price = self.price(front).unwrap_or_default();
                window.subtract(front, &price);
                first += 1;
            }
            let cheaper = best.as_ref().is_none_or(|(cost, _)| window.cost < *cost);
            if window.bytes >= wanted && cheaper && self.leaves_shares(&window) {
                let run = ranges.get(first..=last).unwrap_or_default();
                let mut victims: Vec<Victim> = Vec::new();
                for range in run {
                    victims.extend(self.price(range).unwrap_or_default());
                }
                *best = Some((window.cost, children_first(victims)));
            }
        }
    }

    /// True when every namespace has its guaranteed share also without all victims of a run.
    fn leaves_shares(&self, window: &Window) -> bool {
        let accounts = self.directory.accounts();
        let mut taken = window.of_shares.iter();
        !taken.any(|(namespace, bytes)| is_guaranteed(accounts, *namespace, *bytes))
    }

    /// The victims that free a range; `None` when it cannot be freed.
    fn price(&mut self, range: &Range) -> Option<Price> {
        let block = match range.usage {
            Use::Free => return Some(Vec::new()),
            Use::Held => return None,
            Use::Block(block) => block,
        };
        if let Some(price) = self.prices.get(&range.index) {
            return price.clone();
        }
        let price = self.price_of_block(block, range.index);
        self.prices.insert(range.index, price.clone());
        price
    }

    fn price_of_block(&self, block: BlockId, extent: ExtentIndex) -> Option<Price> {
        let node = {
            let (stripe, slot) = self.directory.lock_block(block)?;
            let here = |r: &super::Replica| r.segment == self.segment && r.extent == extent;
            stripe.replicas(slot).iter().find(|replica| here(replica))?;
            stripe.entries.rest(slot).lineage
        };
        let family = if node == NONE {
            vec![block]
        } else {
            self.directory
                .common
                .lineage
                .lock()
                .family(block, node, LARGEST_FAMILY)?
        };
        family
            .into_iter()
            .map(|member| self.victim(member))
            .collect()
    }

    fn victim(&self, id: BlockId) -> Option<Victim> {
        let (stripe, slot) = self.directory.lock_block(id)?;
        let entry = stripe.entries.at(slot);
        let RunLimits { now, floor, before } = *self.limits;
        let leased = entry.is_leased(self.directory.common.relative(now));
        let version = stripe.entries.rest(slot).version;
        let is_later = entry.tick() >= before.0;
        let stays = leased || is_later || entry.is_hard_pinned() || floor.covers(version, now);
        if stays || self.directory.keeps_share(&stripe, slot) {
            return None;
        }
        // A soft-pinned block costs as much as a block that was just used; a root costs least.
        let age = match (entry.is_soft_pinned(), entry.has_lost_parent()) {
            (true, _) => self.span,
            (false, true) => 0,
            (false, false) => entry.tick().saturating_sub(self.oldest_tick).min(self.span),
        };
        let scaled = u128::from(NEWEST - OLDEST) * u128::from(age) / u128::from(self.span);
        let weight = OLDEST + u64::try_from(scaled).unwrap_or(NEWEST);
        let mut cost = stripe.weight(slot).saturating_mul(weight);
        let mut of_share = None;
        let accounts = self.directory.accounts();
        if accounts.has_tenants() {
            let namespace = stripe.namespace(slot, &self.directory.common);
            cost = cost.saturating_mul(scale(precedence_of(accounts, namespace)));
            let tenant = accounts.tenant(namespace);
            let share = tenant.and_then(|tenant| tenant.get(Setting::Guaranteed));
            of_share = share.map(|_| (namespace, stripe.footprint(slot)));
        }
        Some(Victim {
            id,
            version,
            cost,
            of_share,
        })
    }
}

/// The factor of the cost of a namespace's blocks. Blocks that are evicted early cost less.
fn scale((is_within_soft, priority): Precedence) -> u64 {
    let quota = if is_within_soft { WITHIN_SOFT } else { 1 };
    quota.saturating_mul(priority.saturating_add(1))
}

/// The ranges of a candidate run. A block in several families counts once.
#[derive(Default)]
struct Window {
    bytes: u64,
    cost: u64,
    uses: HashMap<BlockId, u32>,
    /// The bytes of the victims of each namespace with a guaranteed share.
    of_shares: HashMap<NamespaceId, u64>,
}

impl Window {
    fn add(&mut self, range: &Range, price: &Price) {
        self.bytes += range.length.0;
        for victim in price {
            let uses = self.uses.entry(victim.id).or_insert(0);
            if *uses == 0 {
                self.cost = self.cost.saturating_add(victim.cost);
                if let Some((namespace, bytes)) = victim.of_share {
                    *self.of_shares.entry(namespace).or_default() += bytes;
                }
            }
            *uses += 1;
        }
    }

    fn subtract(&mut self, range: &Range, price: &Price) {
        self.bytes -= range.length.0;
        for victim in price {
            if let Some(uses) = self.uses.get_mut(&victim.id) {
                *uses -= 1;
                if *uses == 0 {
                    self.uses.remove(&victim.id);
                    self.cost = self.cost.saturating_sub(victim.cost);
                    self.forget_share(victim);
                }
            }
        }
    }
}

impl Window {
    fn forget_share(&mut self, victim: &Victim) {
        let Some((namespace, bytes)) = victim.of_share else {
            return;
        };
        if let Some(taken) = self.of_shares.get_mut(&namespace) {
            *taken = taken.saturating_sub(bytes);
            if *taken == 0 {
                self.of_shares.remove(&namespace);
            }
        }
    }
}

/// Each victim once, children before parents. Every family lists parents before children. So a
/// block's last mention comes after the last mention of its ancestors.
fn children_first(victims: Vec<Victim>) -> Vec<Victim> {
    let mut seen = kvpool_seams::maps::HashSet::default();
    victims
        .into_iter()
        .rev()
        .filter(|victim| seen.insert(victim.id))
        .collect()
}
