use super::*;
use proptest::prelude::*;

const SIZE: u64 = 1 << 20;

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    At(u64, u64),
    /// Allocates all free parts of a range, which may end beyond the segment.
    FreeIn(u64, u64),
    Free(usize),
    /// Frees this many extents in one call, starting at an index; some may come twice.
    FreeAll(Vec<usize>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1..SIZE / 4).prop_map(Step::Allocate),
        2 => (1..SIZE / 4 / medium::GRANULE).prop_map(|pages| Step::Allocate(pages * medium::GRANULE)),
        1 => (0..SIZE / GRANULE, 1..SIZE / 8).prop_map(|(at, length)| Step::At(at * GRANULE, length)),
        1 => (0..SIZE, 1..SIZE / 8).prop_map(|(at, length)| Step::FreeIn(at, length)),
        3 => any::<usize>().prop_map(Step::Free),
        1 => proptest::collection::vec(any::<usize>(), 1..8).prop_map(Step::FreeAll),
    ];
    proptest::collection::vec(step, 1..200)
}

/// The invariants between any two operations.
fn check(extents: &Extents, live: &[(ExtentIndex, Offset, Length)]) {
    let (mut end, mut used, mut before_free) = (0, 0, false);
    let mut found = Vec::new();
    let mut free = 0;
    for range in extents.iter() {
        assert_eq!(
            range.offset.0, end,
            "the ranges cover the segment without gaps"
        );
        assert!(range.length.0 > 0);
        end += range.length.0;
        let is_free = range.usage == Use::Free;
        assert!(!(is_free && before_free), "free neighbours are one range");
        before_free = is_free;
        if is_free {
            free += 1;
        } else {
            used += range.length.0;
            found.push((range.index, range.offset, range.length));
        }
    }
    assert_eq!(end, extents.capacity().0);
    assert_eq!(used, extents.used().0);
    assert_eq!(free, extents.free_ranges());
    assert_eq!(free, extents.longest_free().count());
    let longest = extents
        .iter()
        .filter(|r| r.usage == Use::Free)
        .map(|r| r.length)
        .max();
    assert_eq!(longest.unwrap_or_default(), extents.largest_free());
    let mut live = live.to_vec();
    live.sort_by_key(|(_, offset, _)| *offset);
    assert_eq!(found, live, "exactly what was allocated is in use");
}

fn free_map(extents: &Extents) -> Vec<(Offset, Length)> {
    extents
        .iter()
        .filter(|r| r.usage == Use::Free)
        .map(|r| (r.offset, r.length))
        .collect()
}

proptest! {
    #[test]
    fn extents_never_overlap_and_free_ones_join(steps in steps()) {
        let mut extents = Extents::new(Length(SIZE));
        let mut live: Vec<(ExtentIndex, Offset, Length)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(length) => {
                    let fits = extents.largest_free().0 >= Extents::rounded(Length(length)).0;
                    let got = extents.allocate(Length(length));
                    prop_assert_eq!(got.is_some(), fits);
                    if let Some((index, offset)) = got {
                        live.push((index, offset, Extents::rounded(Length(length))));
                    }
                }
                Step::At(offset, length) => {
                    let rounded = Extents::rounded(Length(length)).0;
                    let clear = offset + rounded <= SIZE
                        && live.iter().all(|(_, o, l)| o.0 + l.0 <= offset || offset + rounded <= o.0);
                    let got = extents.allocate_at(Offset(offset), Length(length));
                    prop_assert_eq!(got.is_some(), clear);
                    if let Some(index) = got {
                        live.push((index, Offset(offset), Length(rounded)));
                    }
                }
                Step::FreeIn(offset, length) => {
                    let first = offset / GRANULE * GRANULE;
                    let end = (offset + length).next_multiple_of(GRANULE).min(SIZE);
                    for (index, at) in extents.allocate_free_in(Offset(offset), Length(length)) {
                        let part = extents.length(index);
                        prop_assert!(first <= at.0 && at.0 + part.0 <= end);
                        live.push((index, at, part));
                    }
                    let free = free_map(&extents);
                    let is_outside = |(at, length): &(Offset, Length)| at.0 + length.0 <= first || end <= at.0;
                    prop_assert!(free.iter().all(is_outside), "a part of the range is still free");
                }
                Step::Free(pick) if !live.is_empty() => {
                    let (index, _, length) = live.swap_remove(pick % live.len());
                    prop_assert_eq!(extents.free(index), length);
                }
                Step::FreeAll(picks) if !live.is_empty() => {
                    let picked: Vec<ExtentIndex> =
                        picks.iter().map(|pick| live[pick % live.len()].0).collect();
                    let gone = |index: &ExtentIndex| picked.contains(index);
                    let bytes = live.iter().filter(|(index, ..)| gone(index));
                    let bytes = bytes.map(|(_, _, length)| length.0).sum();
                    prop_assert_eq!(extents.free_all(picked.iter().copied()), Length(bytes));
                    live.retain(|(index, ..)| !gone(index));
                }
                Step::Free(_) | Step::FreeAll(_) => {}
            }
            check(&extents, &live);
        }
        for (index, ..) in live.drain(..) {
            extents.free(index);
        }
        check(&extents, &live);
        prop_assert_eq!(extents.largest_free(), extents.capacity());
        prop_assert_eq!(extents.free_ranges(), 1);
    }

    #[test]
    fn rebuilding_in_any_order_gives_the_same_free_ranges(
        steps in steps(),
        order in proptest::collection::vec(any::<u64>(), 200),
    ) {
        let mut first = Extents::new(Length(SIZE));
        let mut live = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(length) | Step::At(_, length) | Step::FreeIn(_, length) => {
                    if let Some((index, offset)) = first.allocate(Length(length)) {
                        live.push((index, offset, Length(length)));
                    }
                }
                Step::Free(pick) if !live.is_empty() => {
                    let (index, ..) = live.swap_remove(pick % live.len());
                    first.free(index);
                }
                Step::Free(_) | Step::FreeAll(_) => {}
            }
        }
        let mut shuffled: Vec<_> = live.iter().zip(&order).collect();
        shuffled.sort_by_key(|(_, key)| **key);
        let mut second = Extents::new(Length(SIZE));
        for ((_, offset, length), _) in shuffled {
            prop_assert!(second.allocate_at(*offset, *length).is_some());
        }
        prop_assert_eq!(free_map(&first), free_map(&second));
        prop_assert_eq!(first.used(), second.used());
    }
}

/// A disk writes straight into whole pages.
#[test]
fn whole_pages_begin_at_a_page_if_a_free_range_has_room_for_that() {
    const LEAST: u64 = 32 << 10;
    let mut extents = Extents::new(Length(1 << 20));
    let mut place = |length| extents.allocate(Length(length)).map(|(_, at)| at.0);
    assert_eq!(place(100), Some(0));
    assert_eq!(place(LEAST), Some(4096), "not behind the odd block");
    assert_eq!(place(640), Some(128), "the gap takes what fits");
    assert_eq!(place(100), Some(768));
    // A gap behind this block would be an eighth of it.
    assert_eq!(place(LEAST - 4096), Some(4096 + LEAST));
    assert_eq!(place(64), Some(896));
    // One granule short of a page and the least extent.
    let mut extents = Extents::new(Length(4096 + LEAST - GRANULE));
    let mut place = |length| extents.allocate(Length(length)).map(|(_, at)| at.0);
    assert_eq!(place(GRANULE), Some(0));
    assert_eq!(place(LEAST), Some(GRANULE), "better there than nowhere");
}

/// Gaps before small blocks would stay unused.
#[test]
fn small_blocks_of_whole_pages_leave_no_gaps() {
    let mut extents = Extents::new(Length(1 << 20));
    for number in 0..60 {
        let length = [4096, 8192, 12288][number % 3];
        extents.allocate(Length(length + GRANULE)).unwrap();
        extents.allocate(Length(length)).unwrap();
    }
    assert_eq!(extents.free_ranges(), 1);
}

#[test]
fn the_best_fit_is_taken() {
    let mut extents = Extents::new(Length(64 * 100));
    let all: Vec<_> = (0..10)
        .map(|_| extents.allocate(Length(640)).unwrap())
        .collect();
    extents.free(all[1].0);
    extents.free(all[2].0);
    extents.free(all[5].0);
    extents.free(all[8].0);
    assert_eq!(
        extents.allocate(Length(640)).unwrap().1,
        all[5].1,
        "not the longer hole before it"
    );
    assert_eq!(extents.allocate(Length(641)).unwrap().1, all[1].1);
}

#[test]
fn offsets_beyond_four_tebibytes_work() {
    let size = 9 << 40;
    let mut extents = Extents::new(Length(size));
    let far = Offset((8 << 40) + 4096);
    let index = extents.allocate_at(far, Length(100)).unwrap();
    assert_eq!(extents.range(index).unwrap().offset, far);
    assert_eq!(extents.length(index), Length(128));
    assert_eq!(extents.free_ranges(), 2);
    assert_eq!(extents.largest_free(), Length(far.0));
    extents.free(index);
    assert_eq!(extents.largest_free(), Length(size));
}

#[test]
fn impossible_allocations_are_refused() {
    let mut extents = Extents::new(Length(6400));
    assert!(extents.allocate(Length(0)).is_none());
    assert!(extents.allocate(Length(6401)).is_none());
    assert!(extents.allocate(Length(u64::MAX)).is_none());
    assert!(extents.allocate_at(Offset(1), Length(64)).is_none());
    assert!(extents.allocate_at(Offset(6400), Length(1)).is_none());
    assert!(extents.allocate_at(Offset(64), Length(u64::MAX)).is_none());
    assert!(
        extents
            .allocate_free_in(Offset(6400), Length(u64::MAX))
            .is_empty()
    );
    assert!(extents.allocate_free_in(Offset(64), Length(0)).is_empty());
    assert_eq!(extents.used(), Length(0));
    assert!(Extents::new(Length(63)).allocate(Length(1)).is_none());
}

#[test]
fn a_freed_extent_is_not_freed_twice_and_takes_no_owner() {
    let mut extents = Extents::new(Length(6400));
    let (index, _) = extents.allocate(Length(64)).unwrap();
    extents.set_owner(index, BlockId(7));
    assert_eq!(extents.owner(index), Some(BlockId(7)));
    extents.clear_owner(index);
    assert_eq!(extents.owner(index), None);
    assert_eq!(extents.free(index), Length(64));
    assert_eq!(extents.free(index), Length(0));
    extents.set_owner(index, BlockId(7));
    assert_eq!(extents.owner(index), None);
    assert_eq!(extents.length(index), Length(0));
    assert_eq!(extents.largest_free(), Length(6400));
}

#[test]
fn owners_are_paged_once_each_while_extents_come_and_go() {
    let mut extents = Extents::new(Length(64 * 100));
    let kept: Vec<_> = (0..50)
        .map(|n| {
            let (index, _) = extents.allocate(Length(64)).unwrap();
            extents.set_owner(index, BlockId(n));
            index
        })
        .collect();
    let mut seen = Vec::new();
    let mut from = Some(0);
    while let Some(place) = from {
        let (owned, next) = extents.owners(place, 7);
        for (index, block) in owned {
            assert_eq!(kept[block.0 as usize], index);
            seen.push(block.0);
            if block.0 % 3 == 0 {
                extents.free(index);
            }
        }
        from = next;
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..50).collect::<Vec<_>>());
}

#[test]
fn a_node_is_small() {
    assert_eq!(size_of::<ExtentNode>(), 24);
}
