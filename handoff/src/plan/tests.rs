//! Rows G19, G20, S6, S7 and S13, over examples and over random layouts.

#![expect(
    clippy::cast_possible_truncation,
    reason = "the regions of these tests are small"
)]

use super::*;
use proptest::prelude::*;

fn heads(layout: PageLayout, tokens: u32, heads: u32, bytes: u32) -> StateShape {
    StateShape::of_heads(layout, tokens, heads, bytes).unwrap()
}

fn pairs(of: &[(u32, u32)]) -> Vec<PagePair> {
    let pair = |(source, target): &(u32, u32)| PagePair {
        source: *source,
        target: *target,
    };
    of.iter().map(pair).collect()
}

fn ranks_of(slices: &[RankSlice]) -> Vec<u32> {
    slices.iter().map(|slice| slice.source).collect()
}

#[test]
fn g19_a_decode_rank_pulls_from_the_ranks_that_hold_its_heads() {
    let shape = heads(PageLayout::TokenMajor, 16, 128, 256);
    let d0 = sources_of(&shape, 0, 4, 2).unwrap();
    let d1 = sources_of(&shape, 1, 4, 2).unwrap();
    assert_eq!((ranks_of(&d0), ranks_of(&d1)), (vec![0, 1], vec![2, 3]));
    assert!(
        d0.iter()
            .all(|slice| slice.parts == 32 && slice.source_part == 0)
    );
    assert_eq!([d0[0].target_part, d0[1].target_part], [0, 32]);
}

#[test]
fn g20_contiguous_runs_merge_to_two_operations() {
    for layout in [PageLayout::TokenMajor, PageLayout::HeadMajor] {
        let shape = heads(layout, 16, 8, 128);
        let slice = &sources_of(&shape, 0, 1, 1).unwrap()[0];
        let pages = pairs(&[(5, 2), (6, 3), (7, 4), (12, 8), (13, 9)]);
        let rows = rows(&shape, slice, (1, 1), &pages, (14, 10)).unwrap();
        let page = 16 * 8 * 128;
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.source / page, row.target / page, row.bytes() / page))
            .collect();
        assert_eq!(found, [(5, 2, 3), (12, 8, 2)]);
        assert!(rows.iter().all(|row| row.count == 1));
    }
}

#[test]
fn neighbouring_pages_of_a_token_major_slice_are_one_strided_row() {
    let shape = heads(PageLayout::TokenMajor, 16, 8, 128);
    let slice = &sources_of(&shape, 0, 2, 1).unwrap()[0];
    let rows = rows(
        &shape,
        slice,
        (2, 1),
        &pairs(&[(0, 4), (1, 5), (3, 6)]),
        (4, 8),
    )
    .unwrap();
    let counts: Vec<u64> = rows.iter().map(|row| row.count).collect();
    assert_eq!(counts, [32, 16]);
    assert_eq!((rows[0].length, rows[0].target_stride), (512, 1024));
}

#[test]
fn s7_mla_is_read_from_one_rank_and_the_readers_use_all_ranks() {
    let shape = StateShape::whole(StateRule::OneSource, 1152 * 64).unwrap();
    let sources = |target, from, to| ranks_of(&sources_of(&shape, target, from, to).unwrap());
    assert_eq!([sources(0, 4, 2), sources(1, 4, 2)], [[0], [2]]);
    assert_eq!([sources(0, 2, 4), sources(3, 2, 4)], [[0], [1]]);
    assert_eq!(sources(0, 8, 1), [0]);
}

#[test]
fn s4_a_copied_state_needs_equal_ranks() {
    let shape = StateShape::whole(StateRule::Copy, 4096).unwrap();
    assert_eq!(ranks_of(&sources_of(&shape, 1, 2, 2).unwrap()), [1]);
    let refused = sources_of(&shape, 0, 2, 1);
    let (sources, targets) = (2, 1);
    assert_eq!(
        refused,
        Err(PlanError::CopiedAcrossRanks { sources, targets })
    );
}

#[test]
fn an_impossible_plan_is_refused_by_name() {
    let shape = heads(PageLayout::HeadMajor, 16, 6, 128);
    let (sources, targets) = (3, 2);
    let odd = sources_of(&shape, 0, sources, targets);
    assert_eq!(odd, Err(PlanError::Indivisible { sources, targets }));
    let (parts, ranks) = (6, 4);
    let uneven = sources_of(&shape, 0, 4, 2);
    assert_eq!(uneven, Err(PlanError::UnevenParts { parts, ranks }));
    let (rank, ranks) = (2, 2);
    let absent = sources_of(&shape, 2, 2, 2);
    assert_eq!(absent, Err(PlanError::NoSuchRank { rank, ranks }));
    assert!(sources_of(&shape, 0, 0, 2).is_err() && sources_of(&shape, 0, 2, 0).is_err());
    let slice = &sources_of(&shape, 0, 1, 1).unwrap()[0];
    let outside = rows(&shape, slice, (1, 1), &pairs(&[(3, 0)]), (3, 3));
    assert_eq!(outside, Err(PlanError::NoSuchPage { page: 3, pages: 3 }));
    assert_eq!(
        StateShape::of_heads(PageLayout::TokenMajor, 0, 1, 1),
        Err(PlanError::Unfit)
    );
    assert_eq!(StateShape::sliced(&[u32::MAX; 4], 1), Err(PlanError::Unfit));
    assert!(StateShape::sliced(&[2, 3], 2).is_err());
}

#[test]
fn s13_decode_has_as_many_stages_as_prefill_or_one() {
    let prefill = Stages::new(&[3, 3, 2]).unwrap();
    let one = Stages::new(&[8]).unwrap();
    let all = prefill.sources_of(0, &one).unwrap();
    assert_eq!(all, [(0, 0..3), (1, 3..6), (2, 6..8)]);
    assert_eq!(prefill.sources_of(2, &prefill).unwrap(), [(2, 6..8)]);
    let two = Stages::new(&[4, 4]).unwrap();
    let refused = prefill.sources_of(0, &two);
    assert_eq!(
        refused,
        Err(PlanError::Stages {
            prefill: 3,
            decode: 2
        })
    );
    assert!(prefill.sources_of(0, &Stages::new(&[7]).unwrap()).is_err());
    assert!(prefill.sources_of(3, &prefill).is_err());
    assert!(Stages::new(&[2, 0]).is_err() && Stages::new(&[]).is_err());
}

#[test]
fn s6_chunks_are_whole_pages_and_the_last_carries_the_remainder() {
    let mut chunker = PageChunker::new(16, 1).unwrap();
    let chunk = |pages, is_last| Some(PageChunk { pages, is_last });
    assert_eq!(chunker.next(15, false), None);
    assert_eq!(chunker.next(40, false), chunk(1..2, false));
    assert_eq!(chunker.next(47, false), None);
    assert_eq!(chunker.next(100, true), chunk(2..7, true));
    assert_eq!(chunker.next(100, true), None);
    let mut short = PageChunker::new(16, 0).unwrap();
    assert_eq!(short.next(16, false), chunk(0..1, false));
    assert_eq!(
        short.next(16, true),
        chunk(1..1, true),
        "it carries metadata alone"
    );
    assert!(PageChunker::new(0, 0).is_none());
}

/// The regions of all ranks of one side.
type Regions = Vec<Vec<u8>>;

fn regions(shape: &StateShape, ranks: u32, pages: u32) -> Regions {
    let bytes = shape.page_bytes(ranks).unwrap() * u64::from(pages);
    vec![vec![0; bytes as usize]; ranks as usize]
}

/// Moves pages from all source ranks to all target ranks. Counts how often each byte is written.
fn moved(
    shape: &StateShape,
    from: &Regions,
    to: u32,
    pages: &[PagePair],
    (source_pages, target_pages): (u32, u32),
) -> (Regions, Regions) {
    let sources = from.len() as u32;
    let mut bytes = regions(shape, to, target_pages);
    let mut writes = bytes.clone();
    for source in 0..sources {
        for slice in targets_of(shape, source, sources, to).unwrap() {
            let sizes = (source_pages, target_pages);
            for row in rows(shape, &slice, (sources, to), pages, sizes).unwrap() {
                for (at, into) in row.runs() {
                    for byte in 0..row.length {
                        let (at, into) = ((at + byte) as usize, (into + byte) as usize);
                        let target = slice.target as usize;
                        bytes[target][into] = from[source as usize][at];
                        writes[target][into] += 1;
                    }
                }
            }
        }
    }
    (bytes, writes)
}

fn shapes() -> impl Strategy<Value = StateShape> {
    let layout = prop_oneof![Just(PageLayout::TokenMajor), Just(PageLayout::HeadMajor)];
    let of_heads = (layout, 1u32..5, 0u32..4, 1u32..4)
        .prop_map(|(layout, tokens, heads, bytes)| self::heads(layout, tokens, 1 << heads, bytes));
    let opaque = (1u32..4, 1u32..4, 0u32..4, 1u32..4).prop_map(|(first, second, along, bytes)| {
        StateShape::sliced(&[first, second, 1 << along, bytes], 2).unwrap()
    });
    let mla = (1u64..64).prop_map(|bytes| StateShape::whole(StateRule::OneSource, bytes).unwrap());
    prop_oneof![3 => of_heads, 1 => opaque, 1 => mla]
}

/// Distinct source pages and distinct target pages.
fn page_lists() -> impl Strategy<Value = Vec<PagePair>> {
    let list = || Just((0u32..8).collect::<Vec<u32>>()).prop_shuffle();
    (list(), list(), 1usize..8).prop_map(|(sources, targets, count)| {
        let both = sources.into_iter().zip(targets).take(count);
        both.map(|(source, target)| PagePair { source, target })
            .collect()
    })
}

/// The bytes of source ranks. Ranks that hold the same part hold the same bytes.
fn source_regions(shape: &StateShape, ranks: u32, pages: u32) -> Regions {
    let mut all = regions(shape, ranks, pages);
    let parts = shape.parts_of(ranks).unwrap();
    for (rank, region) in (0..).zip(&mut all) {
        let first = shape.first_part(rank, ranks);
        for (at, byte) in (0u64..).zip(region) {
            let (run, inner) = (at / shape.part_bytes, at % shape.part_bytes);
            let value = (first + run % parts, run / parts, inner);
            *byte = (value.0 * 89 + value.1 * 31 + value.2 * 7 + 1) as u8;
        }
    }
    all
}

/// A peer may register any shape, so the products of its numbers must not wrap.
#[test]
fn a_state_of_a_huge_number_of_parts_has_as_many_sources_as_a_small_one() {
    let shape = StateShape::new(StateRule::Slice, 1, (1 << 62) - 8, 1).unwrap();
    let slices = sources_of(&shape, 1, 8, 2).unwrap();
    assert_eq!(ranks_of(&slices), [4, 5, 6, 7]);
    let parts: u64 = slices.iter().map(|slice| slice.parts).sum();
    assert_eq!(parts, (1 << 61) - 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn s7_every_target_byte_is_written_exactly_once(
        shape in shapes(), from in 0u32..4, to in 0u32..4, pages in page_lists(),
    ) {
        let source = source_regions(&shape, 1 << from, 8);
        let (_, writes) = moved(&shape, &source, 1 << to, &pages, (8, 8));
        for region in writes {
            let page = region.len() / 8;
            for (at, count) in region.iter().enumerate() {
                let is_target = pages.iter().any(|pair| pair.target as usize == at / page);
                prop_assert_eq!(*count, u8::from(is_target), "byte {}", at);
            }
        }
    }

    #[test]
    fn s7_there_and_back_is_the_identity(
        shape in shapes(), from in 0u32..4, to in 0u32..4, pages in page_lists(),
    ) {
        let source = source_regions(&shape, 1 << from, 8);
        let (there, _) = moved(&shape, &source, 1 << to, &pages, (8, 8));
        let home: Vec<PagePair> = pages
            .iter()
            .map(|pair| PagePair { source: pair.target, target: pair.source })
            .collect();
        let (back, _) = moved(&shape, &there, 1 << from, &home, (8, 8));
        for (was, is) in source.iter().zip(&back) {
            let page = was.len() / 8;
            for pair in &pages {
                let range = pair.source as usize * page..(pair.source as usize + 1) * page;
                prop_assert_eq!(&was[range.clone()], &is[range]);
            }
        }
    }

    #[test]
    fn g20_merged_rows_never_merge_further(
        shape in shapes(), from in 0u32..3, to in 0u32..3, pages in page_lists(),
    ) {
        let (from, to) = (1 << from, 1 << to);
        for slice in sources_of(&shape, 0, from, to).unwrap() {
            let made = rows(&shape, &slice, (from, to), &pages, (8, 8)).unwrap();
            let bytes: u64 = made.iter().map(StridedRow::bytes).sum();
            let page = shape.outer * slice.parts * shape.part_bytes;
            prop_assert_eq!(bytes, page * pages.len() as u64);
            for pair in made.windows(2) {
                let is_next = pair[0].source + pair[0].length == pair[1].source
                    && pair[0].target + pair[0].length == pair[1].target;
                let both = pair[0].is_contiguous() && pair[1].is_contiguous();
                prop_assert!(!(both && is_next), "{:?}", pair);
            }
        }
    }
}
