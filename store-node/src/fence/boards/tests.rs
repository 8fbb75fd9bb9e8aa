//! Cases of pin boards and their effects on a fence.

use super::super::{Census, FenceItem, Limits, SegmentIndex, Term};
use super::*;
use kvpool_transport::shm::board::{BOARD_BYTES, Pinner};
use kvpool_types::{ClientId, Grant, GrantId, GrantKey, SegmentId};
use std::os::fd::AsFd;

const INCARNATION: Incarnation = Incarnation(77);
const EPOCH: Epoch = Epoch(5);
const KEY: GrantKey = GrantKey([3; 32]);
const SEGMENT: SegmentId = SegmentId(40);
const ALICE: PeerKey = PeerKey::new(ClientId(1), 100);
/// No ticket.
const NONE: [u64; 0] = [];
const BOB: PeerKey = PeerKey::new(ClientId(2), 200);

fn term(epoch: Epoch) -> Term {
    Term {
        epoch,
        signer: KEY.signer(),
        segments: vec![SEGMENT, SegmentId(41)],
        ahead_ms: None,
        says_what_is_recorded: false,
    }
}

fn fence() -> Fence {
    let limits = Limits {
        held_per_client: Length(1000),
    };
    let mut fence = Fence::new(INCARNATION, &[Length(4096), Length(4096)], limits);
    assert!(fence.enter(term(EPOCH)).is_ok());
    fence
}

fn extent(offset: u64, length: u64) -> Extent {
    Extent {
        segment: SEGMENT,
        offset: Offset(offset),
        length: Length(length),
    }
}

/// The two ends of a connection: the board, kept while the connection lives, and the client's pinner.
fn connect(fence: &mut Fence, peer: PeerKey) -> (Arc<Board>, Arc<Pinner>) {
    let (board, fd) = Board::create(Length(u64::MAX)).unwrap();
    let board = Arc::new(board);
    let hung = fence.hang(peer, fence.incarnation(), board.clone());
    assert!(hung.is_ok());
    let pinner = Pinner::map(fd.as_fd(), BOARD_BYTES).unwrap();
    (board, Arc::new(pinner))
}

fn close(fence: &mut Fence, ticket: u64, extent: Extent) -> Vec<u64> {
    let grant = None;
    fence.fence(&[FenceItem {
        ticket,
        grant,
        before: None,
        extent,
    }]);
    fence.take_fenced()
}

fn look_again(fence: &mut Fence) -> Vec<u64> {
    fence.look_again();
    fence.take_fenced()
}

fn hold(fence: &mut Fence, peer: PeerKey, id: u64, extent: Extent) -> Code {
    let grant: Grant = KEY.sign(INCARNATION, EPOCH, GrantId(id), extent);
    let proven = fence.prove(INCARNATION, &grant).unwrap();
    fence
        .begin_hold(peer, &proven)
        .map_or_else(|refused| refused.code, |()| Code::Ok)
}

fn write(fence: &mut Fence, id: u64, extent: Extent) {
    assert_eq!(hold(fence, BOB, id, extent), Code::Ok);
    let sums = vec![kvpool_types::Checksum(1)];
    assert_eq!(fence.end_hold(BOB, GrantId(id), sums), Code::Ok);
}

#[test]
fn a_ticket_waits_for_a_pin_on_a_board_and_for_no_other_extent() {
    let mut fence = fence();
    let (_board, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, extent(64, 100)).unwrap();
    assert_eq!(close(&mut fence, 1, extent(0, 64)), [1]);
    assert_eq!(close(&mut fence, 2, extent(164, 64)), [2]);
    let elsewhere = Extent {
        segment: SegmentId(41),
        ..extent(64, 100)
    };
    assert_eq!(close(&mut fence, 3, elsewhere), [3]);
    assert!(!fence.waits_for_boards());
    assert_eq!(close(&mut fence, 4, extent(64, 100)), NONE);
    assert_eq!(close(&mut fence, 5, extent(0, 65)), NONE);
    assert_eq!(close(&mut fence, 6, extent(163, 1)), NONE);
    assert_eq!(
        close(&mut fence, 4, extent(64, 100)),
        NONE,
        "asked once more"
    );
    assert!(fence.waits_for_boards());
    assert_eq!(look_again(&mut fence), NONE);
    assert_eq!(fence.census().tickets, 3);
    drop(pin);
    let mut fenced = look_again(&mut fence);
    fenced.sort_unstable();
    assert_eq!(fenced, [4, 5, 6]);
    assert!(!fence.waits_for_boards());
    assert_eq!(look_again(&mut fence), NONE, "each is reported once");
}

#[test]
fn a_ticket_that_has_waited_for_a_touch_then_waits_for_a_board() {
    let mut fence = fence();
    let block = extent(64, 100);
    write(&mut fence, 1, block);
    assert!(fence.pin(BOB, EPOCH, INCARNATION, &block).is_ok());
    let (_board, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, block).unwrap();
    assert_eq!(close(&mut fence, 1, block), NONE);
    assert_eq!(fence.unpin(BOB, INCARNATION, &block), Code::Ok);
    assert_eq!(look_again(&mut fence), NONE);
    drop(pin);
    assert_eq!(look_again(&mut fence), [1]);
}

#[test]
fn a_dead_process_pins_nothing_and_a_closed_connection_still_does() {
    let mut fence = fence();
    let (alices, alice) = connect(&mut fence, ALICE);
    let (_bobs, bob) = connect(&mut fence, BOB);
    let pin = alice.pin(EPOCH, extent(64, 100)).unwrap();
    let _bobs_pin = bob.pin(EPOCH, extent(64, 200)).unwrap();
    assert_eq!(close(&mut fence, 1, extent(64, 100)), NONE);
    fence.peer_gone(BOB);
    assert_eq!(fence.take_fenced(), NONE);
    drop(alices);
    assert_eq!(look_again(&mut fence), NONE);
    assert!(
        alice.pin(EPOCH, extent(1000, 1)).is_none(),
        "a board without a connection is closed"
    );
    assert_eq!(fence.census().boards, 1);
    fence.peer_gone(ALICE);
    assert_eq!(fence.take_fenced(), [1]);
    assert_eq!(fence.census(), Census::default());
    drop(pin);
}

#[test]
fn a_board_without_a_connection_is_forgotten_once_nothing_is_pinned_on_it() {
    let mut fence = fence();
    let (board, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, extent(64, 100)).unwrap();
    drop(board);
    let (_second, _) = connect(&mut fence, ALICE);
    assert_eq!(fence.census().boards, 2);
    assert_eq!(close(&mut fence, 1, extent(64, 100)), NONE);
    drop(pin);
    assert_eq!(look_again(&mut fence), [1]);
    assert_eq!(fence.census().boards, 1);
    assert!(pinner.pin(EPOCH, extent(64, 100)).is_none());
}

#[test]
fn a_process_without_a_connection_holds_what_it_has_pinned_or_announced() {
    let mut fence = fence();
    let (board, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, extent(64, 100)).unwrap();
    drop(board);
    assert_eq!(hold(&mut fence, BOB, 1, extent(2000, 10)), Code::Ok);
    assert_eq!(fence.still_hold(&[ALICE, BOB]), [true, true]);
    assert!(
        pinner.pin(EPOCH, extent(0, 1)).is_none(),
        "nothing is pinned after the answer"
    );
    drop(pin);
    assert_eq!(fence.end_hold(BOB, GrantId(1), Vec::new()), Code::Ok);
    assert_eq!(fence.still_hold(&[ALICE, BOB]), [false, false]);
}

#[test]
fn pins_of_another_term_do_not_count_and_old_ones_are_named() {
    let mut fence = fence();
    let (_board, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, extent(64, 100)).unwrap();
    let late = pinner.publish(extent(200, 100)).unwrap();
    assert!(fence.enter(term(Epoch(6))).is_ok());
    assert!(!late.counts(EPOCH));
    assert!(pinner.pin(EPOCH, extent(300, 1)).is_none());
    drop(late);
    let again = pinner.pin(Epoch(6), extent(64, 100)).unwrap();
    assert_eq!(fence.held(), [extent(64, 100)], "each extent once");

    // In another incarnation the extents are no longer pinned. The earlier pins are still named and delay
    // tickets.
    fence.renew(Incarnation(78));
    assert!(pinner.pin(Epoch(6), extent(64, 100)).is_none());
    let renumbered = Term {
        segments: vec![SegmentId(90), SegmentId(91)],
        ..term(Epoch(6))
    };
    assert!(fence.enter(renumbered).is_ok());
    assert!(pinner.pin(Epoch(6), extent(64, 100)).is_none());
    let moved = Extent {
        segment: SegmentId(90),
        ..extent(64, 100)
    };
    assert_eq!(fence.held(), [moved]);
    assert_eq!(close(&mut fence, 9, moved), NONE);
    drop((pin, again));
    assert_eq!(look_again(&mut fence), [9]);
}

#[test]
fn a_pin_of_a_former_pool_stays_on_its_memory_when_another_pool_gives_the_number_to_other_memory() {
    let mut fence = fence();
    let block = extent(1000, 100);
    write(&mut fence, 1, block);
    assert!(fence.pin(BOB, EPOCH, INCARNATION, &block).is_ok());
    let (_board, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, extent(0, 100)).unwrap();
    let life = Incarnation(78);
    fence.renew(life);
    let (first, second) = (SegmentId(39), SEGMENT);
    let renumbered = Term {
        segments: vec![first, second],
        ..term(EPOCH)
    };
    assert!(fence.enter(renumbered).is_ok());

    let named = |extent: Extent, segment| Extent { segment, ..extent };
    let mut held = fence.held();
    held.sort_unstable_by_key(|extent| extent.offset);
    let expected = [extent(0, 100), block].map(|extent| named(extent, first));
    assert_eq!(held, expected);
    let mut number = 1;
    let mut hold = |fence: &mut Fence, extent: Extent| {
        number += 1;
        let grant = KEY.sign(life, EPOCH, GrantId(number), extent);
        let proven = fence.prove(life, &grant).unwrap();
        let begun = fence.begin_hold(ALICE, &proven);
        begun.map_or_else(|refused| refused.code, |()| Code::Ok)
    };
    for pinned in [extent(0, 100), block] {
        let code = hold(&mut fence, named(pinned, first));
        assert_eq!(code, Code::InProgress);
        assert_eq!(hold(&mut fence, named(pinned, second)), Code::Ok);
    }
    drop(pin);
    assert_eq!(fence.unpin(BOB, INCARNATION, &block), Code::Ok);
    for freed in [extent(0, 100), block] {
        assert_eq!(hold(&mut fence, named(freed, first)), Code::Ok);
    }
}

#[test]
fn a_board_is_hung_up_for_the_present_life_alone() {
    let mut fence = fence();
    let (board, _) = Board::create(Length(0)).unwrap();
    let board = Arc::new(board);
    let other = fence.hang(ALICE, Incarnation(1), board.clone());
    assert_eq!(other.unwrap_err().code, Code::WrongIncarnation);
    let (_kept, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, extent(0, 1)).unwrap();
    fence.drain();
    let refused = fence.hang(ALICE, INCARNATION, board);
    assert_eq!(refused.unwrap_err().code, Code::Draining);
    assert!(pinner.pin(EPOCH, extent(0, 1)).is_none());
    // The drain waits for the touches that the census counts.
    assert_eq!(fence.census().pins, 1);
    assert!(fence.enter(term(Epoch(6))).is_ok());
    assert!(pinner.pin(Epoch(6), extent(0, 1)).is_none());
    drop(pin);
    assert_eq!(fence.census().pins, 0);
}

#[test]
fn there_are_no_more_boards_than_can_be_looked_at() {
    let mut fence = fence();
    let mut board = || {
        let (board, _) = Board::create(Length(0)).unwrap();
        let board = Arc::new(board);
        (board.clone(), fence.hang(ALICE, INCARNATION, board))
    };
    let mut kept: Vec<_> = (0..MOST_BOARDS).map(|_| board()).collect();
    assert!(kept.iter().all(|(_, hung)| hung.is_ok()));
    assert_eq!(board().1.unwrap_err().code, Code::TooManyHeld);
    // The end of a connection makes space for another board.
    kept.pop();
    assert!(board().1.is_ok());
}

#[test]
fn what_lies_in_no_segment_pins_nothing() {
    let mut fence = fence();
    let (_board, pinner) = connect(&mut fence, ALICE);
    let nonsense = [
        extent(0, 0),
        extent(0, 4097),
        extent(4096, 1),
        extent(u64::MAX, 1),
        extent(1, u64::MAX),
        Extent {
            segment: SegmentId(42),
            ..extent(0, 1)
        },
    ];
    let _pins: Vec<_> = nonsense
        .iter()
        .filter_map(|extent| pinner.publish(*extent))
        .collect();
    assert_eq!(fence.held(), []);
    assert_eq!(fence.census().pins, 0);
    assert_eq!(close(&mut fence, 1, extent(0, 4096)), [1]);
}

#[test]
fn writes_are_kept_off_what_a_board_pins() {
    let mut fence = fence();
    let (_board, pinner) = connect(&mut fence, ALICE);
    let pin = pinner.pin(EPOCH, extent(64, 100)).unwrap();
    assert_eq!(hold(&mut fence, BOB, 1, extent(100, 10)), Code::InProgress);
    assert_eq!(hold(&mut fence, BOB, 2, extent(164, 10)), Code::Ok);
    drop(pin);
    assert_eq!(hold(&mut fence, BOB, 1, extent(100, 10)), Code::Ok);
}

#[test]
fn what_a_board_pins_counts_in_what_its_client_holds_and_is_never_overlooked() {
    let mut fence = fence();
    let block = extent(2000, 100);
    write(&mut fence, 1, block);
    let (_board, pinner) = connect(&mut fence, ALICE);
    let first = pinner.pin(EPOCH, extent(0, 900)).unwrap();
    assert_eq!(fence.census().held, Length(900));
    assert_eq!(
        hold(&mut fence, ALICE, 2, extent(3000, 101)),
        Code::TooManyHeld
    );
    assert_eq!(hold(&mut fence, ALICE, 2, extent(3000, 100)), Code::Ok);
    let refused = fence.pin(ALICE, EPOCH, INCARNATION, &block);
    assert_eq!(refused.unwrap_err().code, Code::TooManyHeld);
    assert!(fence.pin(BOB, EPOCH, INCARNATION, &block).is_ok());
    assert_eq!(fence.census().over_cap, 0);
    // The node sees a client that exceeds its limit, and also what the client has pinned.
    let second = pinner.pin(EPOCH, extent(1000, 1)).unwrap();
    assert_eq!(fence.census().over_cap, 1);
    assert_eq!(close(&mut fence, 1, extent(1000, 1)), NONE);
    drop((first, second));
    assert_eq!(fence.census().over_cap, 0);
}

#[test]
fn ranges_that_overlap_are_looked_up_as_one() {
    let span = |start, end| Span {
        segment: SegmentIndex(1),
        range: Range {
            start: Offset(start),
            end: Offset(end),
        },
    };
    let spans = vec![
        span(50, 60),
        span(0, 40),
        span(10, 20),
        span(35, 45),
        span(80, 81),
    ];
    let pinned = Pinned::new(spans, 2);
    for (start, end, touched) in [
        (0, 1, true),
        (44, 50, true),
        (45, 50, false),
        (60, 80, false),
        (59, 61, true),
        (79, 90, true),
        (81, 90, false),
    ] {
        assert_eq!(pinned.touches(span(start, end)), touched, "{start}..{end}");
    }
    let elsewhere = Span {
        segment: SegmentIndex(0),
        ..span(0, 100)
    };
    assert!(!pinned.touches(elsewhere));
}
