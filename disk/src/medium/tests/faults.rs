//! Devices that fail: bad sectors, lost flushes, requests that do not end.

use super::device::{Device, Held};
use super::rig::{self, Block, CLUSTER, STEP};
use crate::medium::{
    Arrival, DATA_START, DetachError, Expected, Formatted, Generation, Invalid, Medium, Opened,
    Staged, StoreError, Wanted, Wrong,
};
use crate::{Arena, Engine, GRANULE, IoError};
use kvpool_types::{Checksum, Length, MediumId, Version};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SIZE: u64 = DATA_START + (1 << 20);

struct Rig {
    device: Arc<Device>,
    engine: Arc<dyn Engine>,
    arena: Arc<Arena>,
    medium: Medium,
}

fn rig() -> Rig {
    let device = Device::blank(SIZE);
    let engine = Arc::clone(&device) as Arc<dyn Engine>;
    let arena = Arena::new(4 << 20).unwrap();
    let id = MediumId(rand::random());
    let made = Formatted::format(Arc::clone(&engine), Arc::clone(&arena), CLUSTER, id).unwrap();
    Rig {
        device,
        engine,
        arena,
        medium: made.attach(CLUSTER, Generation(1)).unwrap(),
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn a_bad_sector_is_never_used_again_and_outlives_a_detach_and_a_format() {
    let rig = rig();
    let (good, bad) = (
        Block::new(DATA_START, 1, 1, 9000),
        Block::new(DATA_START + 10 * STEP, 2, 2, 9000),
    );
    for block in [&good, &bad] {
        rig::store(&rig.medium, &rig.arena, block).unwrap();
    }
    rig.device.bad.lock().push(bad.stamp.offset + STEP + 5);
    let load = |block: &Block| rig::load_block(&rig.medium, &rig.arena, block);
    let wrong = load(&bad).unwrap_err();
    assert!(matches!(wrong, Wrong::Io(IoError::Medium(_))));
    assert!(rig.medium.bad_ranges().as_slice().is_empty());
    load(&good).unwrap();
    let wrong = load(&bad).unwrap_err();
    assert!(matches!(wrong, Wrong::BadSector(IoError::Medium(_))));
    assert_eq!(rig.medium.bad_ranges().as_slice(), [bad.range()]);
    let again = rig::store(&rig.medium, &rig.arena, &bad);
    assert!(matches!(
        again,
        Err(StoreError::Invalid(Invalid::BadRange(_)))
    ));

    let written = |rig: &Rig| rig::opened(&rig.engine, &rig.arena).superblock().clone();
    assert!(written(&rig).bad.as_slice().is_empty());
    rig.medium.detach(soon()).unwrap();
    let kept = written(&rig);
    assert_eq!(
        (kept.bad.as_slice(), kept.clean),
        (&[bad.range()][..], true)
    );
    let (engine, arena) = (Arc::clone(&rig.engine), Arc::clone(&rig.arena));
    let again = Formatted::format(engine, arena, CLUSTER, MediumId(2)).unwrap();
    assert_eq!(again.superblock().bad.as_slice(), [bad.range()]);
}

#[test]
fn a_second_store_into_a_bad_sector_fails_and_marks_it() {
    let rig = rig();
    let (good, block) = (
        Block::new(DATA_START + 10 * STEP, 1, 1, 9000),
        Block::new(DATA_START, 2, 2, 9000),
    );
    rig::store(&rig.medium, &rig.arena, &good).unwrap();
    rig.device.bad.lock().push(DATA_START);
    let failed = rig::store(&rig.medium, &rig.arena, &block);
    assert!(matches!(failed, Err(StoreError::Io(_))));
    assert!(rig.medium.bad_ranges().as_slice().is_empty());
    rig::load_block(&rig.medium, &rig.arena, &good).unwrap();
    let failed = rig::store(&rig.medium, &rig.arena, &block);
    assert!(matches!(failed, Err(StoreError::Io(_))));
    // A disk that takes no writes may still be read.
    assert!(rig.medium.bad_ranges().as_slice().is_empty());
    rig::store(&rig.medium, &rig.arena, &good).unwrap();
    let failed = rig::store(&rig.medium, &rig.arena, &block);
    assert!(matches!(failed, Err(StoreError::Io(_))));
    assert_eq!(rig.medium.bad_ranges().as_slice(), [block.range()]);
}

/// The next round of writes has other extents.
#[test]
fn a_store_over_a_part_of_a_failed_one_finds_the_bad_sector() {
    let rig = rig();
    let (first, next) = (
        Block::new(DATA_START, 1, 1, 9000),
        Block::new(DATA_START + STEP, 2, 2, 20_000),
    );
    let good = Block::new(DATA_START + 10 * STEP, 3, 3, 9000);
    rig.device.bad.lock().push(DATA_START + 2 * STEP);
    for block in [&first, &next] {
        assert!(rig.medium.bad_ranges().as_slice().is_empty());
        let failed = rig::store(&rig.medium, &rig.arena, block);
        assert!(matches!(failed, Err(StoreError::Io(IoError::Medium(_)))));
        rig::store(&rig.medium, &rig.arena, &good).unwrap();
    }
    let twice = next.range().start..first.range().end;
    assert_eq!(rig.medium.bad_ranges().as_slice(), [twice]);
}

/// The medium itself looks whether the device reads anything.
#[test]
fn a_bad_sector_is_found_while_nothing_else_is_read() {
    let rig = rig();
    let bad = Block::new(DATA_START, 1, 1, 9000);
    rig::store(&rig.medium, &rig.arena, &bad).unwrap();
    rig.device.bad.lock().push(DATA_START);
    let load = || rig::load_block(&rig.medium, &rig.arena, &bad).unwrap_err();
    assert!(matches!(load(), Wrong::Io(_)));
    assert!(matches!(load(), Wrong::BadSector(_)));
}

#[test]
fn a_bad_sector_is_found_beside_a_superblock_that_cannot_be_read() {
    for slot in 0..2 {
        let rig = rig();
        let bad = Block::new(DATA_START, 1, 1, 9000);
        rig::store(&rig.medium, &rig.arena, &bad).unwrap();
        *rig.device.bad.lock() = vec![slot * STEP, DATA_START];
        let load = || rig::load_block(&rig.medium, &rig.arena, &bad).unwrap_err();
        assert!(matches!(load(), Wrong::Io(_)));
        assert!(matches!(load(), Wrong::BadSector(_)));
    }
}

/// A failing device gets two further requests at a time, however many requests it fails.
#[test]
fn the_reads_of_superblocks_after_failures_are_bounded() {
    let rig = rig();
    rig.device.holds.store(true, Ordering::SeqCst);
    let failed = || Err::<(), _>(IoError::Medium(std::io::Error::other("bad sector")));
    let end_all = |outcome: &dyn Fn() -> Result<(), IoError>| {
        let held = std::mem::take(&mut *rig.device.held.lock());
        let offsets: Vec<u64> = held.iter().map(|Held(request)| request.offset).collect();
        for Held(request) in held {
            request.end(outcome());
        }
        offsets
    };
    let blocks = [0, 10, 20].map(|at| Block::new(DATA_START + at * STEP, at + 1, at + 1, 9000));
    let load = |block: &Block| {
        let wanted = Wanted::new(block.stamp.offset, block.expected()).unwrap();
        let buffer = wanted.take(&rig.arena, None).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let report = move |arrival: Arrival| sender.send(arrival.verify().unwrap_err()).unwrap();
        rig.medium.load_into_arena(wanted, buffer, report);
        receiver
    };
    let first: Vec<_> = blocks.iter().map(load).collect();
    assert_eq!(end_all(&failed).len(), 3);
    for ended in first {
        assert!(matches!(ended.recv().unwrap(), Wrong::Io(_)));
    }
    // Others follow, because two blocks failed after the first reads had begun.
    for _ in 0..2 {
        assert_eq!(end_all(&|| Ok(())), [0, STEP]);
    }
    assert!(rig.device.held.lock().is_empty());
    let second: Vec<_> = blocks.iter().map(load).collect();
    assert_eq!(end_all(&failed).len(), 3);
    for ended in second {
        assert!(matches!(ended.recv().unwrap(), Wrong::BadSector(_)));
    }
    assert!(rig.device.held.lock().is_empty());
}

#[test]
fn a_device_that_fails_every_request_has_no_bad_ranges_when_it_is_back() {
    let rig = rig();
    let blocks = [0, 10, 20].map(|at| Block::new(DATA_START + at * STEP, at + 1, at + 1, 9000));
    let (kept, late) = blocks.split_at(2);
    for block in kept {
        rig::store(&rig.medium, &rig.arena, block).unwrap();
        rig::load_block(&rig.medium, &rig.arena, block).unwrap();
    }
    *rig.device.bad.lock() = (0..SIZE).step_by(GRANULE).collect();
    for block in [kept, kept, kept].concat() {
        let wrong = rig::load_block(&rig.medium, &rig.arena, &block).unwrap_err();
        assert!(matches!(wrong, Wrong::Io(IoError::Medium(_))));
        let failed = rig::store(&rig.medium, &rig.arena, &late[0]);
        assert!(matches!(failed, Err(StoreError::Io(_))));
    }
    rig.device.bad.lock().clear();
    assert!(rig.medium.bad_ranges().as_slice().is_empty());
    for block in kept {
        rig::load_block(&rig.medium, &rig.arena, block).unwrap();
    }
    rig::store(&rig.medium, &rig.arena, &late[0]).unwrap();
}

#[test]
fn one_superblock_in_a_bad_sector_is_tolerated_and_two_are_not() {
    for slot in 0..2 {
        let rig = rig();
        rig.device.bad.lock().push(slot * STEP);
        let attached = rig::opened(&rig.engine, &rig.arena).attach(CLUSTER, Generation(2));
        attached.unwrap().detach(soon()).unwrap();
        let found = rig::opened(&rig.engine, &rig.arena).superblock().clone();
        assert_eq!((found.generation, found.clean), (Generation(2), true));
        rig.device.bad.lock().push((1 - slot) * STEP);
        let open = Formatted::open(Arc::clone(&rig.engine), Arc::clone(&rig.arena));
        assert_eq!(open.unwrap_err().kind(), "damaged");
    }
}

#[test]
fn a_superblock_goes_over_the_older_copy_first() {
    for older in 0..2 {
        let rig = rig();
        let mut superblock = rig::opened(&rig.engine, &rig.arena).superblock().clone();
        superblock.sequence -= 1;
        rig::poke(&rig.engine, &rig.arena, older * STEP, &superblock.encode());
        rig.device.written.lock().clear();
        let attached = rig::opened(&rig.engine, &rig.arena).attach(CLUSTER, Generation(2));
        attached.unwrap();
        assert_eq!(
            *rig.device.written.lock(),
            [older * STEP, (1 - older) * STEP]
        );
    }
}

#[test]
fn a_detach_from_a_device_that_hangs_ends_at_its_deadline() {
    let rig = rig();
    rig.device.holds.store(true, Ordering::SeqCst);
    let hung = rig
        .medium
        .detach(Instant::now() + Duration::from_millis(20));
    assert!(matches!(hung, Err(DetachError::Superblock(_))));
}

#[test]
fn a_device_that_hangs_is_given_up_at_the_deadline() {
    let rig = rig();
    let formatted = rig::opened(&rig.engine, &rig.arena);
    rig.device.holds.store(true, Ordering::SeqCst);
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    let device = || (Arc::clone(&rig.engine), Arc::clone(&rig.arena));
    let (engine, arena) = device();
    assert!(
        Formatted::open_until(engine, arena, soon())
            .unwrap_err()
            .may_pass()
    );
    let (engine, arena) = device();
    let formatted_anew = Formatted::format_until(engine, arena, CLUSTER, MediumId(2), soon());
    assert!(formatted_anew.unwrap_err().may_pass());
    let attached = formatted.attach_until(CLUSTER, Generation(2), soon());
    assert!(attached.unwrap_err().may_pass());
}

#[test]
fn after_a_failed_flush_the_medium_is_never_marked_clean() {
    let rig = rig();
    rig.device.flush_fails.store(true, Ordering::SeqCst);
    assert!(rig::flush(&rig.medium).is_err());
    rig.device.flush_fails.store(false, Ordering::SeqCst);
    rig::flush(&rig.medium).unwrap();
    let refused = rig.medium.detach(soon());
    assert!(matches!(refused, Err(DetachError::FlushFailed)));
    assert!(!rig::opened(&rig.engine, &rig.arena).superblock().clean);
}

#[test]
fn a_device_whose_first_format_failed_is_blank() {
    let device = Device::blank(SIZE);
    let engine = Arc::clone(&device) as Arc<dyn Engine>;
    let arena = Arena::new(4 << 20).unwrap();
    let (id, new) = (MediumId(7), || (Arc::clone(&engine), Arc::clone(&arena)));
    device.flush_fails.store(true, Ordering::SeqCst);
    let (of, with) = new();
    assert!(Formatted::format(of, with, CLUSTER, id).is_err());
    device.flush_fails.store(false, Ordering::SeqCst);
    // Only a part of the written bytes is on the device.
    let mut front = rig::peek(&engine, &arena, 0..STEP);
    assert!(front.iter().any(|byte| *byte != 0));
    front[100..].fill(0);
    rig::poke(&engine, &arena, 0, &front);
    let (of, with) = new();
    assert!(matches!(Formatted::open(of, with), Ok(Opened::Blank)));
    // If the device cannot read the copy, its content is unknown.
    device.bad.lock().push(100);
    let (of, with) = new();
    assert_eq!(Formatted::open(of, with).unwrap_err().kind(), "damaged");
}

#[test]
fn after_a_failed_flush_the_other_copy_of_the_superblock_stays() {
    let Rig { device, medium, .. } = rig();
    medium.detach(soon()).unwrap();
    device.written.lock().clear();
    device.flush_fails.store(true, Ordering::SeqCst);
    let engine = Arc::clone(&device) as Arc<dyn Engine>;
    let formatted = rig::opened(&engine, &Arena::new(4 << 20).unwrap());
    assert!(formatted.attach(CLUSTER, Generation(2)).is_err());
    assert_eq!(device.written.lock().len(), 1, "what it wrote may be torn");
}

#[test]
fn the_only_whole_superblock_is_not_written_over_while_the_other_place_takes_none() {
    for torn in 0..2 {
        let rig = rig();
        // A power cut during a write left the beginning of a superblock.
        let mut copy = rig::peek(&rig.engine, &rig.arena, torn * STEP..(torn + 1) * STEP);
        copy[20..].fill(0);
        rig::poke(&rig.engine, &rig.arena, torn * STEP, &copy);
        let before = rig::opened(&rig.engine, &rig.arena).superblock().clone();
        rig.device.stuck.lock().push(torn * STEP);
        rig.device.written.lock().clear();
        let attached = rig::opened(&rig.engine, &rig.arena).attach(CLUSTER, Generation(2));
        assert!(attached.is_err());
        assert_eq!(*rig.device.written.lock(), [torn * STEP]);
        assert_eq!(*rig::opened(&rig.engine, &rig.arena).superblock(), before);
        // Once the offset accepts writes, both copies are valid again.
        rig.device.stuck.lock().clear();
        let attached = rig::opened(&rig.engine, &rig.arena).attach(CLUSTER, Generation(2));
        attached.unwrap();
        assert_eq!(
            *rig.device.written.lock(),
            [torn, torn, 1 - torn].map(|at| at * STEP)
        );
    }
}

#[test]
fn a_superblock_is_written_where_only_the_newer_place_takes_none() {
    for newer in 0..2 {
        let rig = rig();
        let mut superblock = rig::opened(&rig.engine, &rig.arena).superblock().clone();
        superblock.sequence += 1;
        rig::poke(&rig.engine, &rig.arena, newer * STEP, &superblock.encode());
        rig.device.stuck.lock().push(newer * STEP);
        let attached = rig::opened(&rig.engine, &rig.arena).attach(CLUSTER, Generation(2));
        attached.unwrap();
        let found = rig::opened(&rig.engine, &rig.arena).superblock().clone();
        assert_eq!(found.generation, Generation(2));
    }
}

#[test]
fn a_format_that_may_lose_everything_takes_the_one_place_that_there_is() {
    let rig = rig();
    rig::poke(&rig.engine, &rig.arena, 0, &[7; GRANULE]);
    rig.device.stuck.lock().push(0);
    let (engine, arena) = (Arc::clone(&rig.engine), Arc::clone(&rig.arena));
    let formatted = Formatted::format(engine, arena, CLUSTER, MediumId(8)).unwrap();
    assert_eq!(formatted.superblock().medium, MediumId(8));
    assert_eq!(
        rig::opened(&rig.engine, &rig.arena).superblock().medium,
        MediumId(8)
    );
}

#[test]
fn a_detach_waits_for_what_is_in_flight_and_refuses_new_work() {
    let rig = rig();
    let block = Block::new(DATA_START, 1, 1, 9000);
    rig.device.holds.store(true, Ordering::SeqCst);
    let stored = rig::submit(&rig.medium, &rig.arena, &block);
    let now = Instant::now();
    assert!(matches!(rig.medium.detach(now), Err(DetachError::Busy(1))));
    let refused = rig::store(&rig.medium, &rig.arena, &block);
    assert!(matches!(
        refused,
        Err(StoreError::Invalid(Invalid::Detached))
    ));
    assert!(rig::flush(&rig.medium).is_err());
    let refused = rig::load_block(&rig.medium, &rig.arena, &block).unwrap_err();
    assert!(matches!(refused, Wrong::Invalid(Invalid::Detached)));
    rig.device.holds.store(false, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let detached = scope.spawn(|| rig.medium.detach(soon()));
        let held: Vec<_> = std::mem::take(&mut *rig.device.held.lock());
        held.into_iter()
            .for_each(|Held(request)| rig.device.submit(request));
        detached.join().unwrap().unwrap();
    });
    stored.recv().unwrap().unwrap();
    assert!(rig::opened(&rig.engine, &rig.arena).superblock().clean);
}

#[test]
fn a_store_of_other_bytes_than_the_checksum_says_writes_nothing() {
    let rig = rig();
    let mut block = Block::new(DATA_START, 1, 1, 9000);
    let before = rig::peek(&rig.engine, &rig.arena, block.range());
    block.stamp.checksum = Checksum(block.stamp.checksum.0 ^ 1);
    let refused = rig::store(&rig.medium, &rig.arena, &block);
    assert!(matches!(
        refused,
        Err(StoreError::Invalid(Invalid::Checksum))
    ));
    assert_eq!(rig::peek(&rig.engine, &rig.arena, block.range()), before);
}

#[test]
fn padding_holds_no_bytes_of_other_blocks() {
    let rig = rig();
    let block = Block::new(DATA_START, 1, 1, 5000);
    rig.arena.take(64 << 10).unwrap().fill(0xab);
    rig::store(&rig.medium, &rig.arena, &block).unwrap();
    let bytes = rig::peek(&rig.engine, &rig.arena, block.range());
    assert!(bytes[4096 + 5000..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_block_that_disagrees_with_the_directory_is_refused() {
    let rig = rig();
    let block = Block::new(DATA_START, 1, 1, 9000);
    rig::store(&rig.medium, &rig.arena, &block).unwrap();
    let good = block.expected();
    let kind = |expected: Expected| {
        let wanted = Wanted::new(DATA_START, expected).unwrap();
        rig::load(&rig.medium, &rig.arena, wanted)
            .unwrap_err()
            .kind()
    };
    let checksum = Checksum(good.checksum.0 ^ 1);
    assert_eq!(kind(Expected { checksum, ..good }), "disagrees");
    assert_eq!(
        kind(Expected {
            length: 8999,
            ..good
        }),
        "disagrees"
    );
    let version = Version(2);
    assert_eq!(kind(Expected { version, ..good }), "stale");
}

#[test]
fn places_outside_the_mediums_data_are_refused() {
    let rig = rig();
    let kept = rig::peek(&rig.engine, &rig.arena, 0..DATA_START);
    for offset in [
        0,
        STEP,
        DATA_START - STEP,
        DATA_START + 1,
        SIZE - STEP,
        SIZE,
        u64::MAX - 4095,
    ] {
        let block = Block::new(offset, 1, 1, 100);
        let stored = rig::store(&rig.medium, &rig.arena, &block);
        assert!(
            matches!(stored, Err(StoreError::Invalid(Invalid::Place(_)))),
            "{offset}"
        );
        let wanted = Wanted::new(offset, block.expected()).unwrap();
        let wrong = rig::load(&rig.medium, &rig.arena, wanted).unwrap_err();
        assert_eq!(wrong.kind(), "invalid");
    }
    assert_eq!(rig::peek(&rig.engine, &rig.arena, 0..DATA_START), kept);
    assert!(Staged::take(&rig.arena, 0, None).is_err());
    assert!(Staged::take(&rig.arena, Length::MAX_BLOCK.0 + 1, None).is_err());
    assert!(matches!(
        Staged::take(&rig.arena, Length::MAX_BLOCK.0, None),
        Ok(None)
    ));
}
