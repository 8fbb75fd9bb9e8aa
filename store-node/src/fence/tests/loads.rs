//! Loads whose records may not be durable, and the time until which they are named.

use super::*;

/// A fence whose master reports which loads are recorded.
fn fence() -> Fence {
    let mut fence = unwelcomed();
    fence.enter(saying(EPOCH.0)).unwrap();
    fence
}

/// A term whose master reports which loads are recorded.
fn saying(epoch: u64) -> Term {
    Term {
        says_what_is_recorded: true,
        ..term(epoch)
    }
}

/// Writes a block of version 3 as a load does.
fn load(fence: &mut Fence, id: u64, block: Extent) {
    assert_eq!(write(fence, &grant(id, block)), Code::Ok);
    fence.is_load_of(&block, GrantId(id), Version(3));
}

#[test]
fn a_load_is_named_until_its_master_says_that_its_record_is_durable() {
    let mut fence = fence();
    let (first, second) = (extent(0, 64), extent(64, 64));
    load(&mut fence, 7, first);
    load(&mut fence, 9, second);
    // Neither a put nor a pull is named.
    assert_eq!(write(&mut fence, &grant(8, extent(128, 64))), Code::Ok);
    fence.is_copy_of(&extent(128, 64), GrantId(8), Version(2));
    assert_eq!(fence.loaded(), [first, second]);
    fence.loads_recorded(GrantId(9));
    assert_eq!(fence.loaded(), [second]);
    // A late answer has no effect.
    fence.loads_recorded(GrantId(2));
    assert_eq!(fence.loaded(), [second]);
    fence.loads_recorded(GrantId(10));
    assert_eq!(fence.loaded(), []);
}

#[test]
fn a_load_of_an_earlier_term_is_named_whatever_the_next_master_says() {
    let mut fence = fence();
    let (early, late) = (extent(0, 64), extent(64, 64));
    load(&mut fence, 7, early);
    load(&mut fence, 9, late);
    fence.loads_recorded(GrantId(8));
    fence.enter(saying(6)).unwrap();
    fence.loads_recorded(GrantId(100));
    assert_eq!(fence.loaded(), [late], "its term's master did not say so");
    fence.enter(saying(7)).unwrap();
    assert_eq!(fence.loaded(), [late]);
}

#[test]
fn a_load_is_forgotten_with_its_extent_and_with_its_life() {
    let mut fence = fence();
    let (fenced, kept) = (extent(0, 64), extent(64, 64));
    load(&mut fence, 7, fenced);
    load(&mut fence, 9, kept);
    fence.enter(saying(6)).unwrap();
    assert_eq!(close(&mut fence, 70, 0, fenced), [70]);
    assert_eq!(fence.loaded(), [kept]);
    assert!(fence.renew(Incarnation(78)).is_empty());
    assert_eq!(fence.loaded(), []);
}

#[test]
fn a_load_is_forgotten_with_its_record_whatever_takes_the_extent() {
    let mut fence = fence();
    let (fenced, received, copied) = (extent(0, 64), extent(64, 64), extent(128, 64));
    for (id, block) in [(7, fenced), (8, received), (9, copied)] {
        load(&mut fence, id, block);
    }
    fence.enter(saying(6)).unwrap();
    assert_eq!(fence.loaded(), [fenced, received, copied]);
    let grant = |id, block| KEY.sign(INCARNATION, Epoch(6), GrantId(id), block);
    assert_eq!(close(&mut fence, 70, 0, fenced), [70]);
    assert_eq!(fence.loaded(), [received, copied]);
    // A write that is given up leaves mixed bytes.
    let span = receive(&mut fence, &grant(10, received)).unwrap();
    fence.end_receive(span, None);
    assert_eq!(fence.loaded(), [copied]);
    let written = write_now(&mut fence, &grant(11, copied), &sums());
    assert_eq!((written, fence.loaded()), (Code::Ok, vec![]));
}

#[test]
fn a_load_is_named_beside_one_of_a_later_term_with_the_same_grant_id() {
    let mut fence = fence();
    let (early, late) = (extent(0, 64), extent(64, 64));
    load(&mut fence, 7, early);
    fence.enter(saying(6)).unwrap();
    let newer = KEY.sign(INCARNATION, Epoch(6), GrantId(7), late);
    assert_eq!(write(&mut fence, &newer), Code::Ok);
    fence.is_load_of(&late, GrantId(7), Version(3));
    assert_eq!(fence.loaded(), [early, late]);
    fence.loads_recorded(GrantId(8));
    assert_eq!(fence.loaded(), [early]);
}

#[test]
fn a_load_of_a_master_that_never_says_what_is_recorded_is_not_named() {
    let mut fence = unwelcomed();
    fence.enter(term(EPOCH.0)).unwrap();
    load(&mut fence, 7, extent(0, 64));
    fence.enter(saying(6)).unwrap();
    assert_eq!(fence.loaded(), []);
}

#[test]
fn a_load_that_another_write_replaced_is_not_named() {
    let mut fence = fence();
    let block = extent(0, 64);
    assert_eq!(write(&mut fence, &grant(7, block)), Code::Ok);
    fence.is_load_of(&block, GrantId(6), Version(3));
    assert_eq!(fence.loaded(), [], "grant 6 wrote nothing that is there");
}
