//! Scans: every intact extent is found, damage is reported, and a step reads a bounded part.

use super::device::Device;
use super::rig::{self, Block, CLUSTER, STEP};
use crate::medium::{DATA_START, Formatted, Found, Generation, Medium, Scan, Step};
use crate::{Arena, Engine, GRANULE};
use kvpool_types::MediumId;
use proptest::prelude::*;
use std::sync::Arc;

const SIZE: u64 = DATA_START + (2 << 20);

fn medium(arena: &Arc<Arena>) -> (Arc<dyn Engine>, Medium) {
    let engine: Arc<dyn Engine> = Device::blank(SIZE);
    let made = Formatted::format(Arc::clone(&engine), Arc::clone(arena), CLUSTER, MediumId(1));
    let medium = made.unwrap().attach(CLUSTER, Generation(1)).unwrap();
    (engine, medium)
}

/// Everything that the scan finds; it must end after as many steps as there are granules.
fn all(mut scan: Scan) -> Vec<Found> {
    let mut found = vec![];
    for _ in 0..2 * SIZE / STEP {
        match scan.step() {
            Step::Read => {}
            Step::Found(one) => found.push(*one),
            Step::End => return found,
        }
    }
    panic!("the scan does not end");
}

fn intact(found: &[Found]) -> Vec<(u64, u64)> {
    let good = found.iter().filter(|found| found.verdict.is_ok());
    good.map(|found| (found.offset, found.header.as_ref().unwrap().number.0))
        .collect()
}

/// Blocks one after the other, with gaps of whole granules.
fn lay(lengths: &[(usize, u64)]) -> Vec<Block> {
    let mut next = DATA_START;
    let mut blocks = vec![];
    for (number, (length, gap)) in (1..).zip(lengths) {
        let block = Block::new(next + gap * STEP, number, number, *length);
        next = block.range().end;
        if next > SIZE {
            break;
        }
        blocks.push(block);
    }
    blocks
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_scan_finds_every_intact_extent_and_names_the_damaged_one(
        lengths in prop::collection::vec((1..300_000usize, 0..3u64), 1..20),
        damaged: prop::sample::Index, at: prop::sample::Index,
    ) {
        let arena = Arena::new(8 << 20).unwrap();
        let (engine, medium) = medium(&arena);
        let blocks = lay(&lengths);
        for block in &blocks {
            rig::store(&medium, &arena, block).unwrap();
        }
        let places = |blocks: &[Block]| -> Vec<_> {
            blocks.iter().map(|b| (b.stamp.offset, b.stamp.number.0)).collect()
        };
        let found = all(medium.scan(DATA_START..SIZE).unwrap());
        prop_assert_eq!(found.len(), blocks.len());
        prop_assert_eq!(intact(&found), places(&blocks));

        let victim = damaged.index(blocks.len());
        let range = blocks[victim].range();
        let mut bytes = rig::peek(&engine, &arena, range.clone());
        let data = bytes.len() - blocks[victim].bytes.len().next_multiple_of(GRANULE);
        let at = at.index(data + blocks[victim].bytes.len());
        bytes[at] ^= 1;
        rig::poke(&engine, &arena, range.start, &bytes);
        let found = all(medium.scan(DATA_START..SIZE).unwrap());
        let mut rest = blocks.clone();
        rest.remove(victim);
        prop_assert_eq!(intact(&found), places(&rest));
        // Without its magic, an extent cannot be found.
        let wrong: Vec<_> = found.iter().filter(|found| found.verdict.is_err()).collect();
        if at >= 8 {
            prop_assert_eq!(wrong.len(), 1);
            prop_assert_eq!(wrong[0].offset, range.start);
        }
    }
}

#[test]
fn a_newer_extent_inside_the_remains_of_an_older_one_is_found() {
    let arena = Arena::new(8 << 20).unwrap();
    let (_, medium) = medium(&arena);
    let older = Block::new(DATA_START, 1, 1, 500_000);
    let newer = Block::new(DATA_START + 10 * STEP, 2, 2, 50_000);
    rig::store(&medium, &arena, &older).unwrap();
    rig::store(&medium, &arena, &newer).unwrap();
    let found = all(medium.scan(DATA_START..SIZE).unwrap());
    assert_eq!(intact(&found), [(newer.stamp.offset, 2)]);
    assert_eq!(found[0].verdict.as_ref().unwrap_err().kind(), "chunk");
}

#[test]
fn a_scan_names_what_belongs_elsewhere() {
    let arena = Arena::new(8 << 20).unwrap();
    let (engine, medium) = medium(&arena);
    let block = Block::new(DATA_START, 1, 1, 5000);
    rig::store(&medium, &arena, &block).unwrap();
    let bytes = rig::peek(&engine, &arena, block.range());
    let elsewhere = DATA_START + 100 * STEP;
    rig::poke(&engine, &arena, elsewhere, &bytes);
    let kinds = |found: &[Found]| -> Vec<_> {
        let kind = |found: &Found| {
            (
                found.offset,
                found.verdict.as_ref().map_err(|w| w.kind()).err(),
            )
        };
        found.iter().map(kind).collect()
    };
    let found = all(medium.scan(DATA_START..SIZE).unwrap());
    assert_eq!(
        kinds(&found),
        [(DATA_START, None), (elsewhere, Some("misdirected"))]
    );
    let (engine, arena) = (engine, Arc::clone(&arena));
    let again = Formatted::format(engine, arena, CLUSTER, MediumId(2)).unwrap();
    let found = all(again.scan(DATA_START..SIZE).unwrap());
    let old = Some("other_medium");
    assert_eq!(kinds(&found), [(DATA_START, old), (elsewhere, old)]);
}

#[test]
fn a_scan_keeps_to_its_range_and_gives_its_room_back() {
    let arena = Arena::new(1 << 20).unwrap();
    let (_, medium) = medium(&arena);
    for n in 0..4 {
        let block = Block::new(DATA_START + n * 10 * STEP, n, n, 30_000);
        rig::store(&medium, &arena, &block).unwrap();
    }
    let range = DATA_START + 10 * STEP..DATA_START + 30 * STEP;
    let free = arena.free();
    assert_eq!(intact(&all(medium.scan(range).unwrap())).len(), 2);
    assert_eq!(arena.free(), free);
    assert!(all(medium.scan(0..0).unwrap()).is_empty());
    assert!(all(medium.scan(SIZE - 1..u64::MAX).unwrap()).is_empty());
    assert!(all(medium.scan(u64::MAX - 1..u64::MAX).unwrap()).is_empty());
}

#[test]
fn a_scan_reports_what_the_device_does_not_read_and_goes_on() {
    let arena = Arena::new(8 << 20).unwrap();
    let device = Device::blank(SIZE);
    let engine = Arc::clone(&device) as Arc<dyn Engine>;
    let made = Formatted::format(engine, Arc::clone(&arena), CLUSTER, MediumId(1)).unwrap();
    let medium = made.attach(CLUSTER, Generation(1)).unwrap();
    let blocks = lay(&[(5000, 0), (600_000, 0), (5000, 100)]);
    for block in &blocks {
        rig::store(&medium, &arena, block).unwrap();
    }
    // The damage is in the data of the second block, behind the first window.
    device.bad.lock().push(blocks[1].stamp.offset + 400_000);
    let found = all(medium.scan(DATA_START..SIZE).unwrap());
    assert_eq!(
        intact(&found),
        [(blocks[0].stamp.offset, 1), (blocks[2].stamp.offset, 3)]
    );
    let unread = found
        .iter()
        .find(|found| found.header.is_some() && found.verdict.is_err());
    assert_eq!(unread.unwrap().offset, blocks[1].stamp.offset);
    let kinds = found
        .iter()
        .filter_map(|found| found.verdict.as_ref().err());
    assert!(kinds.clone().count() >= 1 && kinds.map(|w| w.kind()).all(|kind| kind == "io"));
}
