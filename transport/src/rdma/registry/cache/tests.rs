use super::*;
use kvpool_types::Length;

/// Stands for a registration. A second clone means that it is in use.
type Handle = Arc<u32>;

const MIB: usize = 1 << 20;

fn region(mib: usize) -> Region {
    Region::allocate(Length((mib * MIB) as u64))
}

fn start(region: &Region) -> usize {
    region.whole().as_ptr().addr()
}

fn is_idle(handle: &Handle) -> bool {
    Arc::strong_count(handle) == 1
}

#[test]
fn only_covered_ranges_are_found() {
    let region = region(4);
    let at = start(&region);
    let mut cache = Intervals::new();
    cache.insert(&region, at, at + MIB, Arc::new(1));
    assert_eq!(cache.find(&region, at + 10, at + MIB).as_deref(), Some(&1));
    assert!(cache.find(&region, at + 10, at + MIB + 1).is_none());
    assert!(cache.find(&region, at + 2 * MIB, at + 3 * MIB).is_none());
}

#[test]
fn overlapping_registrations_become_one() {
    let region = region(32);
    let at = start(&region);
    let mut cache = Intervals::new();
    cache.insert(&region, at, at + 3 * MIB, Arc::new(1));
    cache.insert(&region, at + 8 * MIB, at + 12 * MIB, Arc::new(2));
    let (from, to) = cache.widen(&region, at + 2 * MIB, at + 10 * MIB);
    assert!(from == at && to >= at + 12 * MIB);
    let dropped = cache.insert(&region, from, to, Arc::new(3));
    assert_eq!(dropped.len(), 2);
    assert_eq!(cache.entries.len(), 1);
    assert_eq!(cache.bytes, (to - from) as u64);
    assert_eq!(
        cache.find(&region, at + MIB, at + 11 * MIB).as_deref(),
        Some(&3)
    );
}

#[test]
fn a_registration_stays_inside_its_region() {
    let region = region(5);
    let at = start(&region);
    let cache: Intervals<Handle> = Intervals::new();
    let (from, to) = cache.widen(&region, at + 100, at + 5 * MIB - 7);
    assert!(from >= at && from <= at + 100);
    assert!(to >= at + 5 * MIB - 7 && to <= at + 5 * MIB);
}

#[test]
fn memory_at_the_same_address_in_another_region_is_not_found() {
    // The same bytes under two regions, as when an address is freed and mapped again.
    let first = region(1);
    let at = start(&first);
    let keep: Arc<dyn std::any::Any + Send + Sync> = Arc::new(first.clone());
    let pointer = std::ptr::NonNull::new(first.whole().as_ptr()).unwrap();
    // SAFETY: the keeper holds the region that owns the bytes.
    let second = unsafe { Region::from_raw(pointer, Length(MIB as u64), keep) };
    let mut cache = Intervals::new();
    cache.insert(&first, at, at + MIB, Arc::new(1));
    assert!(cache.find(&second, at, at + MIB).is_none());
    assert!(cache.find(&first, at, at + MIB).is_some());
}

#[test]
fn dropped_regions_leave_the_cache_and_never_match() {
    let mut cache = Intervals::new();
    let mut reused = 0;
    let mut last = 0;
    for number in 0..50_u32 {
        let region = region(1);
        let at = start(&region);
        reused += u32::from(at == last);
        last = at;
        assert!(cache.find(&region, at, at + MIB).is_none());
        cache.insert(&region, at, at + MIB, Arc::new(number));
    }
    assert!(reused > 0, "the allocator gave no address out again");
    assert_eq!(cache.stale().len(), 50);
    assert_eq!((cache.entries.len(), cache.bytes), (0, 0));
}

#[test]
fn the_least_recently_used_goes_first_and_nothing_in_use() {
    let region = region(16);
    let at = start(&region);
    let mut cache = Intervals::new();
    let used: Handle = Arc::new(0);
    cache.insert(&region, at, at + MIB, used.clone());
    for i in 1..4_usize {
        let from = at + i * 2 * MIB;
        cache.insert(
            &region,
            from,
            from + MIB,
            Arc::new(u32::try_from(i).unwrap()),
        );
    }
    cache.find(&region, at + 2 * MIB, at + 3 * MIB).unwrap();
    let dropped: Vec<u32> = cache
        .evict(2, u64::MAX, is_idle)
        .iter()
        .map(|it| **it)
        .collect();
    assert_eq!(dropped, [2, 3]);
    let dropped: Vec<u32> = cache
        .evict(0, u64::MAX, is_idle)
        .iter()
        .map(|it| **it)
        .collect();
    assert_eq!(dropped, [1]);
    assert_eq!(cache.entries.len(), 1);
    assert_eq!(cache.bytes, MIB as u64);
}

#[test]
fn bytes_are_bounded_too() {
    let region = region(16);
    let at = start(&region);
    let mut cache = Intervals::new();
    for i in 0..4_usize {
        let from = at + i * 2 * MIB;
        cache.insert(&region, from, from + MIB, Arc::new(0_u32));
    }
    cache.evict(100, 2 * MIB as u64, is_idle);
    assert_eq!(cache.bytes, 2 * MIB as u64);
}
