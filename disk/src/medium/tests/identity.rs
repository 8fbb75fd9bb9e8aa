//! Foreign, damaged, old and cloned media: each is refused with its own error, or judged as new.

use super::corruption::{LENGTHS, Rig, SIZE, blocks, medium};
use super::device::Device;
use super::rig::{self, CLUSTER};
use crate::medium::Judgement::{self, Accept, New};
use crate::medium::{Formatted, Generation, Opened, StoreNumber, Wanted, judge};
use crate::{Arena, Engine, GRANULE};
use kvpool_types::{ClusterId, MediumId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::sync::Arc;

/// All bytes of a device, and a device with these bytes.
fn image(engine: &Arc<dyn Engine>, arena: &Arc<Arena>) -> Vec<u8> {
    rig::peek(engine, arena, 0..SIZE)
}

fn device(image: Vec<u8>) -> Arc<dyn Engine> {
    Device::new(image)
}

fn refusal(engine: &Arc<dyn Engine>, arena: &Arc<Arena>) -> &'static str {
    match Formatted::open(Arc::clone(engine), Arc::clone(arena)) {
        Ok(Opened::Blank) => "blank",
        Ok(Opened::Formatted(_)) => "formatted",
        Err(refused) => refused.kind(),
    }
}

#[test]
fn damaged_superblocks_are_refused_by_name_and_one_of_two_is_enough() {
    let arena = Arena::new(8 << 20).unwrap();
    let (engine, _) = medium(&arena, 1);
    let good = image(&engine, &arena);
    let mut random = StdRng::seed_from_u64(37);
    let mut counts = BTreeMap::<_, u64>::new();
    for _ in 0..400 {
        let step = GRANULE;
        for damaged in [&[0][..], &[1], &[0, 1]] {
            let mut bytes = good[..2 * step].to_vec();
            for copy in damaged {
                // The damage is behind the magic.
                bytes[copy * step + random.random_range(8..step)] ^= 1 << random.random_range(0..8);
            }
            rig::poke(&engine, &arena, 0, &bytes);
            let wanted = if damaged.len() == 2 {
                "damaged"
            } else {
                "formatted"
            };
            assert_eq!(refusal(&engine, &arena), wanted);
            *counts.entry(wanted).or_default() += 1;
        }
        let mut bytes = vec![0; 2 * step];
        random.fill(&mut bytes[..]);
        rig::poke(&engine, &arena, 0, &bytes);
        assert_eq!(refusal(&engine, &arena), "foreign");
        *counts.entry("foreign").or_default() += 1;
    }
    println!("superblocks: {counts:?}");
    let mut partition = vec![0; usize::try_from(SIZE).unwrap()];
    assert_eq!(refusal(&device(partition.clone()), &arena), "blank");
    // The superblock of a file system is further behind.
    partition[(64 << 10) + 64] = 1;
    assert_eq!(refusal(&device(partition), &arena), "foreign");
    let cut = good[..good.len() - GRANULE].to_vec();
    assert_eq!(refusal(&device(cut), &arena), "shrunk");
    assert_eq!(refusal(&device(vec![0; 8192]), &arena), "too_small");
    assert_eq!(refusal(&device(good), &arena), "formatted");
}

#[test]
fn another_clusters_medium_is_refused_by_name_until_it_is_formatted() {
    let arena = Arena::new(8 << 20).unwrap();
    let (engine, _) = medium(&arena, 1);
    let ours = ClusterId(0xdead);
    let refused = rig::opened(&engine, &arena)
        .attach(ours, Generation(2))
        .unwrap_err();
    assert_eq!(refused.kind(), "other_cluster");
    assert!(refused.to_string().contains("reset in --ssd"));
    assert_eq!(
        rig::opened(&engine, &arena).superblock().generation,
        Generation(1)
    );
    Formatted::format(Arc::clone(&engine), Arc::clone(&arena), ours, MediumId(9)).unwrap();
    rig::opened(&engine, &arena)
        .attach(ours, Generation(1))
        .unwrap();
}

#[test]
fn a_medium_that_is_formatted_again_gives_none_of_its_former_blocks() {
    let mut rig = Rig::new();
    let (engine, arena) = (Arc::clone(&rig.engine), Arc::clone(&rig.arena));
    let id = MediumId(3);
    rig.medium = Formatted::format(engine, arena, CLUSTER, id)
        .unwrap()
        .attach(CLUSTER, Generation(1))
        .unwrap();
    assert!((0..LENGTHS.len()).all(|n| rig.kind(n) == "other_medium"));
}

/// Opens an image as the master would. Returns the judgement by its generation, and the blocks that it gives.
fn judged(bytes: Vec<u8>, rig: &mut Rig, attached: Generation) -> Judgement {
    let engine = device(bytes);
    let formatted = rig::opened(&engine, &rig.arena);
    let offered = formatted.superblock().generation;
    rig.medium = formatted.attach(CLUSTER, attached.next()).unwrap();
    judge(Some(offered), attached, None)
}

#[test]
fn rolled_back_and_cloned_images_are_new_and_never_give_wrong_bytes() {
    let mut rig = Rig::new();
    let attached = Generation(1);
    let before = image(&rig.engine, &rig.arena);

    // Stores happened after the image was taken, in the same generation. So the image is accepted, and each
    // lost store is a miss.
    let newer = blocks(4);
    for block in &newer {
        rig::store(&rig.medium, &rig.arena, block).unwrap();
    }
    let old = std::mem::replace(&mut rig.blocks, newer);
    assert_eq!(judged(before.clone(), &mut rig, attached), Accept);
    assert!((0..LENGTHS.len()).all(|n| rig.kind(n) == "stale"));

    // The image is older than one more attach, so it is rolled back.
    assert_eq!(judged(before.clone(), &mut rig, Generation(2)), New);

    // A clone that another node attached twice is ahead of the master. The master's own medium is accepted as
    // before.
    let clone = device(before.clone());
    for generation in [2, 3] {
        let theirs = rig::opened(&clone, &rig.arena);
        theirs.attach(CLUSTER, Generation(generation)).unwrap();
    }
    let clone = image(&clone, &rig.arena);
    assert_eq!(judged(clone, &mut rig, attached), New);
    rig.blocks = old;
    assert_eq!(judged(before, &mut rig, attached), Accept);
    assert!(rig.all_intact());
}

#[test]
fn the_number_of_the_store_may_be_unknown() {
    let rig = Rig::new();
    let block = &rig.blocks[2];
    let mut expected = block.expected();
    expected.number = None;
    let wanted = Wanted::new(block.stamp.offset, expected).unwrap();
    assert!(rig::load(&rig.medium, &rig.arena, wanted).unwrap() == *block.bytes);
    expected.number = Some(StoreNumber(1));
    let wanted = Wanted::new(block.stamp.offset, expected).unwrap();
    let wrong = rig::load(&rig.medium, &rig.arena, wanted).unwrap_err();
    assert_eq!(wrong.kind(), "stale");
}

#[test]
fn an_erased_medium_is_blank_and_its_extents_are_not_believed() {
    let arena = Arena::new(8 << 20).unwrap();
    let (engine, _) = medium(&arena, 1);
    assert_eq!(refusal(&engine, &arena), "formatted");
    crate::medium::erase(&*engine, &arena).unwrap();
    assert_eq!(refusal(&engine, &arena), "blank");
    let id = MediumId(99);
    let fresh = Formatted::format(Arc::clone(&engine), Arc::clone(&arena), CLUSTER, id).unwrap();
    let mut scan = fresh.scan(0..SIZE).unwrap();
    loop {
        match scan.step() {
            crate::medium::Step::Read => {}
            crate::medium::Step::Found(found) => assert!(found.verdict.is_err(), "{found:?}"),
            crate::medium::Step::End => break,
        }
    }
}
