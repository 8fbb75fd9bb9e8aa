//! Caches where one port of a link finds the node's memory.
//!
//! A store node names its segments once, and they never change. A peer registers and deregisters memory at
//! any time, so the link asks for a range at its first use. If the range was deregistered meanwhile, the
//! peer's device refuses the access. That ends the link and its cache.

use super::work::Remote;
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{Extent, Offset, SegmentId};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of ranges above which the least recently used are dropped. A peer that registers new
/// memory for each transfer would otherwise grow the cache without bound.
const MAX_RANGES: usize = 4096;

/// Registered ranges that do not overlap.
#[derive(Default)]
pub(super) struct RangeCache {
    cached: RwLock<CachedRanges>,
    /// A logical clock that ticks at each use and each insertion.
    clock: AtomicU64,
}

#[derive(Default)]
struct CachedRanges {
    /// By segment, and by their first offset in it.
    ranges: BTreeMap<(SegmentId, u64), CachedRange>,
    /// The start ticks of transfers in progress, with counts. A range used since the oldest start
    /// is kept.
    active: BTreeMap<u64, usize>,
    /// The number of ranges that triggers the next sweep.
    sweep_at: usize,
}

struct CachedRange {
    registered: Registered,
    used: AtomicU64,
}

impl RangeCache {
    /// The ranges of segments that are registered whole.
    pub(super) fn of_segments<'a>(registered: impl Iterator<Item = &'a Registered>) -> Self {
        let range = |whole: &Registered| CachedRange {
            registered: *whole,
            used: AtomicU64::new(0),
        };
        let ranges = registered.map(|whole| ((whole.segment, 0), range(whole)));
        let cached = CachedRanges {
            ranges: ranges.collect(),
            ..CachedRanges::default()
        };
        Self {
            cached: RwLock::new(cached),
            ..Self::default()
        }
    }

    /// Starts a transfer. Ranges found or learned from now on are kept until [`RangeCache::end`] is
    /// called with the returned number.
    pub(super) fn begin(&self) -> u64 {
        let mut cached = self.cached.write();
        let begun = self.tick();
        *cached.active.entry(begun).or_default() += 1;
        begun
    }

    /// Ends a transfer.
    pub(super) fn end(&self, begun: u64) {
        let mut cached = self.cached.write();
        if let Some(count) = cached.active.get_mut(&begun) {
            *count -= 1;
            if *count == 0 {
                cached.active.remove(&begun);
            }
        }
        cached.sweep_at = 0;
    }

    /// Inserts a range of memory whose offsets are its addresses, and removes the ranges that it
    /// overlaps. False when the range exceeds the address space.
    pub(super) fn learn(&self, range: Registered) -> bool {
        let (segment, start) = (range.segment, range.address);
        let Some(end) = start.checked_add(range.length.0) else {
            return false;
        };
        let mut cached = self.cached.write();
        if cached.ranges.len() >= cached.sweep_at.max(MAX_RANGES) {
            cached.forget();
        }
        let ranges = &mut cached.ranges;
        while let Some((&key, other)) = ranges.range((segment, 0)..(segment, end)).next_back()
            && key.1.saturating_add(other.registered.length.0) > start
        {
            ranges.remove(&key);
        }
        let used = AtomicU64::new(self.tick());
        let registered = range;
        ranges.insert((segment, start), CachedRange { registered, used });
        true
    }

    /// The location of an extent; `None` when no cached range contains it.
    pub(super) fn find(&self, extent: &Extent) -> Option<Remote> {
        let Offset(offset) = extent.offset;
        let cached = self.cached.read();
        let (&(_, start), range) = cached
            .ranges
            .range((extent.segment, 0)..=(extent.segment, offset))
            .next_back()?;
        let inside = offset - start;
        let end = inside.checked_add(extent.length.0)?;
        let Registered {
            address,
            rkey,
            length,
            ..
        } = range.registered;
        if end > length.0 {
            return None;
        }
        range.used.store(self.tick(), Ordering::Relaxed);
        Some(Remote {
            address: address + inside,
            rkey,
        })
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }
}

impl CachedRanges {
    /// Drops down to three quarters of the maximum, least recently used first. Keeps every range
    /// that a transfer in progress has used.
    fn forget(&mut self) {
        let needed = self.active.keys().next().copied().unwrap_or(u64::MAX);
        let mut over: Vec<(u64, (SegmentId, u64))> = self
            .ranges
            .iter()
            .map(|(key, range)| (range.used.load(Ordering::Relaxed), *key))
            .filter(|(used, _)| *used < needed)
            .collect();
        over.sort_unstable();
        let surplus = self.ranges.len().saturating_sub(MAX_RANGES / 4 * 3);
        for (_, key) in over.into_iter().take(surplus) {
            self.ranges.remove(&key);
        }
        // Transfers in progress may keep more than the maximum. The threshold then grows, so that
        // each sweep costs no more than the insertions since the last one.
        self.sweep_at = self.ranges.len() + self.ranges.len() / 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Length;

    const MEMORY: SegmentId = SegmentId(0);

    fn range(address: u64, length: u64, rkey: u32) -> Registered {
        Registered {
            rail: 0,
            segment: MEMORY,
            address,
            length: Length(length),
            rkey,
        }
    }

    fn found(cache: &RangeCache, offset: u64, length: u64) -> Option<(u64, u32)> {
        let extent = Extent {
            segment: MEMORY,
            offset: Offset(offset),
            length: Length(length),
        };
        let found = cache.find(&extent);
        found.map(|remote| (remote.address, remote.rkey))
    }

    #[test]
    fn segment_offsets_are_relative_to_the_first_byte() {
        let other = Registered {
            segment: SegmentId(9),
            ..range(0x9000, 100, 3)
        };
        let cache = RangeCache::of_segments([range(0x5000, 100, 2), other].iter());
        assert_eq!(found(&cache, 10, 90), Some((0x500a, 2)));
        assert_eq!(found(&cache, 10, 91), None);
        assert_eq!(found(&cache, 0, u64::MAX), None);
        assert_eq!(found(&cache, u64::MAX, 2), None);
    }

    #[test]
    fn a_range_is_found_by_its_own_addresses_only() {
        let cache = RangeCache::default();
        assert_eq!(found(&cache, 0x1000, 1), None);
        assert!(cache.learn(range(0x1000, 0x100, 1)));
        assert!(cache.learn(range(0x1100, 0x100, 2)));
        assert_eq!(found(&cache, 0x1000, 0x100), Some((0x1000, 1)));
        assert_eq!(found(&cache, 0x11ff, 1), Some((0x11ff, 2)));
        for (from, length) in [(0xfff, 1), (0xfff, 2), (0x10ff, 2), (0x1200, 1)] {
            assert_eq!(found(&cache, from, length), None, "{length} at {from:#x}");
        }
        assert!(!cache.learn(range(u64::MAX, 2, 3)));
    }

    #[test]
    fn a_learned_range_replaces_the_ranges_it_overlaps() {
        let cache = RangeCache::default();
        for (number, address) in [(1, 0x1000), (2, 0x1100), (3, 0x1200), (4, 0x1300)] {
            cache.learn(range(address, 0x100, number));
        }
        // As when memory was freed and larger memory was registered at its address.
        cache.learn(range(0x1080, 0x200, 5));
        assert_eq!(found(&cache, 0x1080, 0x200), Some((0x1080, 5)));
        assert_eq!(found(&cache, 0x1000, 1), None);
        assert_eq!(found(&cache, 0x1280, 1), None);
        assert_eq!(found(&cache, 0x1300, 0x100), Some((0x1300, 4)));
    }

    /// Inserts ranges of 16 bytes by their number.
    fn learn(cache: &RangeCache, numbers: std::ops::Range<u64>) {
        for number in numbers {
            assert!(cache.learn(range(number * 16, 16, 1)));
        }
    }

    fn cached(cache: &RangeCache, number: u64) -> bool {
        found(cache, number * 16, 16).is_some()
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_recent_ranges() {
        let cache = RangeCache::default();
        let remembered = MAX_RANGES as u64;
        learn(&cache, 0..remembered);
        assert!(cached(&cache, 0), "it is used again");
        learn(&cache, remembered..remembered + 1);
        assert!(cached(&cache, 0) && cached(&cache, remembered));
        assert!(!cached(&cache, 1), "it was used longest ago");
        assert!(cached(&cache, remembered / 2));
        learn(&cache, 0..20 * remembered);
        assert!(cache.cached.read().ranges.len() <= MAX_RANGES);
    }

    #[test]
    fn a_transfer_with_more_ranges_than_the_cache_holds_finds_all() {
        let cache = RangeCache::default();
        let remembered = MAX_RANGES as u64;
        learn(&cache, 0..remembered);
        let begun = cache.begin();
        let other = cache.begin();
        let all = 5 * remembered..9 * remembered;
        learn(&cache, all.clone());
        assert!(all.clone().all(|number| cached(&cache, number)));
        assert!(!cached(&cache, 0), "nobody needed it");
        cache.end(other);
        learn(&cache, 20 * remembered..21 * remembered);
        assert!(all.clone().all(|number| cached(&cache, number)));
        cache.end(begun);
        learn(&cache, 30 * remembered..31 * remembered);
        assert!(cache.cached.read().ranges.len() <= MAX_RANGES);
        assert!(cache.cached.read().active.is_empty());
    }
}
