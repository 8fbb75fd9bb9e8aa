//! Cases of admitted and refused requests.

mod loads;
mod neighbours;
mod rights;

use super::*;
use kvpool_types::wire::data::ReadItem;
use kvpool_types::{ClientId, Grant, GrantKey};
use std::sync::atomic::{AtomicU32, Ordering};

const INCARNATION: Incarnation = Incarnation(77);
const EPOCH: Epoch = Epoch(5);
const KEY: GrantKey = GrantKey([3; 32]);
const SEGMENT: SegmentId = SegmentId(40);
const ALICE: PeerKey = PeerKey::new(ClientId(1), 100);
const BOB: PeerKey = PeerKey::new(ClientId(2), 200);

#[derive(Default)]
struct Aborted(AtomicU32);

impl Abort for Aborted {
    fn abort(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn term(epoch: u64) -> Term {
    Term {
        epoch: Epoch(epoch),
        signer: KEY.signer(),
        segments: vec![SEGMENT, SegmentId(41)],
        ahead_ms: None,
        says_what_is_recorded: false,
    }
}

fn unwelcomed() -> Fence {
    let limits = Limits {
        held_per_client: Length(1000),
    };
    Fence::new(INCARNATION, &[Length(4096), Length(4096)], limits)
}

fn fence() -> Fence {
    let mut fence = unwelcomed();
    assert!(fence.enter(term(EPOCH.0)).unwrap().is_empty());
    fence
}

fn extent(offset: u64, length: u64) -> Extent {
    Extent {
        segment: SEGMENT,
        offset: Offset(offset),
        length: Length(length),
    }
}

fn grant(id: u64, extent: Extent) -> Grant {
    KEY.sign(INCARNATION, EPOCH, GrantId(id), extent)
}

fn code<T>(outcome: Result<T, Refused>) -> Code {
    outcome.map_or_else(|refused| refused.code, |_| Code::Ok)
}

fn receive(fence: &mut Fence, grant: &Grant) -> Result<Span, Refused> {
    let proven = fence.prove(INCARNATION, grant)?;
    fence.begin_receive(&proven, Arc::new(Aborted::default()))
}

fn hold(fence: &mut Fence, peer: PeerKey, grant: &Grant) -> Code {
    let proven = match fence.prove(INCARNATION, grant) {
        Ok(proven) => proven,
        Err(refused) => return refused.code,
    };
    code(fence.begin_hold(peer, &proven))
}

fn write(fence: &mut Fence, grant: &Grant) -> Code {
    match receive(fence, grant) {
        Ok(span) => fence.end_receive(span, Some(sums())),
        Err(refused) => refused.code,
    }
}

fn sums() -> Vec<Checksum> {
    vec![Checksum(9)]
}

fn read(fence: &Fence, extent: Extent) -> Code {
    let item = ReadItem {
        extent,
        from: Offset(0),
        length: extent.length,
        right: None,
    };
    code(fence.read(fence.epoch(), fence.incarnation(), &item))
}

fn close(fence: &mut Fence, ticket: u64, grant: u64, extent: Extent) -> Vec<u64> {
    close_before(fence, ticket, grant, 0, extent)
}

fn close_before(
    fence: &mut Fence,
    ticket: u64,
    grant: u64,
    before: u64,
    extent: Extent,
) -> Vec<u64> {
    let item = FenceItem {
        ticket,
        grant: (grant != 0).then_some(GrantId(grant)),
        before: (before != 0).then_some(GrantId(before)),
        extent,
    };
    fence.fence(&[item]);
    fence.take_fenced()
}

#[test]
fn what_is_written_whole_can_be_read_and_nothing_else() {
    let mut fence = fence();
    let block = extent(64, 100);
    assert_eq!(read(&fence, block), Code::Missing);
    let span = receive(&mut fence, &grant(1, block)).unwrap();
    assert_eq!(read(&fence, block), Code::Missing);
    assert_eq!(fence.end_receive(span, Some(sums())), Code::Ok);
    assert_eq!(read(&fence, block), Code::Ok);
    assert_eq!(fence.sums(EPOCH, INCARNATION, &block), Ok(sums()));
    for other in [
        extent(64, 99),
        extent(64, 101),
        extent(65, 99),
        extent(0, 4096),
    ] {
        assert_eq!(read(&fence, other), Code::Missing, "{other}");
    }
    for (from, length) in [(0, 101), (100, 1), (u64::MAX, 2), (1, 100)] {
        let item = ReadItem {
            extent: block,
            from: Offset(from),
            length: Length(length),
            right: None,
        };
        assert_eq!(
            code(fence.read(EPOCH, INCARNATION, &item)),
            Code::OutOfRange
        );
    }
    let item = ReadItem {
        extent: block,
        from: Offset(10),
        length: Length(20),
        right: None,
    };
    let span = fence.read(EPOCH, INCARNATION, &item).unwrap();
    assert_eq!((span.range.start, span.range.end), (Offset(74), Offset(94)));
}

#[test]
fn a_write_given_up_leaves_nothing_and_may_be_tried_again() {
    let mut fence = fence();
    let block = extent(0, 100);
    let span = receive(&mut fence, &grant(1, block)).unwrap();
    fence.end_receive(span, None);
    assert_eq!(read(&fence, block), Code::Missing);
    assert_eq!(hold(&mut fence, ALICE, &grant(1, block)), Code::Ok);
    assert_eq!(fence.end_hold(ALICE, GrantId(1), Vec::new()), Code::Ok);
    assert_eq!(read(&fence, block), Code::Missing);
    assert_eq!(write(&mut fence, &grant(1, block)), Code::Ok);
}

#[test]
fn a_wrong_number_of_checksums_is_no_block() {
    let mut fence = fence();
    let block = extent(0, 100);
    let span = receive(&mut fence, &grant(1, block)).unwrap();
    let two = vec![Checksum(1), Checksum(2)];
    assert_eq!(fence.end_receive(span, Some(two)), Code::InvalidArgument);
    assert_eq!(read(&fence, block), Code::Missing);
}

#[test]
fn another_incarnation_is_refused() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(write(&mut fence, &grant(1, block)), Code::Ok);
    let other = Incarnation(78);
    let signed = KEY.sign(other, EPOCH, GrantId(2), extent(200, 10));
    assert_eq!(code(fence.prove(other, &signed)), Code::WrongIncarnation);
    let item = ReadItem {
        extent: block,
        from: Offset(0),
        length: Length(1),
        right: None,
    };
    assert_eq!(
        code(fence.read(EPOCH, other, &item)),
        Code::WrongIncarnation
    );
    assert_eq!(
        code(fence.sums(EPOCH, other, &block)),
        Code::WrongIncarnation
    );
    assert_eq!(
        code(fence.pin(ALICE, EPOCH, other, &block)),
        Code::WrongIncarnation
    );
    // The grant was proved in time, but admitted too late.
    let proven = fence
        .prove(INCARNATION, &grant(3, extent(300, 10)))
        .unwrap();
    fence.renew(other);
    assert!(fence.enter(term(EPOCH.0)).is_ok());
    assert_eq!(
        code(fence.begin_receive(&proven, Arc::new(Aborted::default()))),
        Code::WrongIncarnation
    );
}

#[test]
fn another_epoch_is_refused() {
    let mut fence = fence();
    let block = extent(0, 100);
    for epoch in [Epoch(4), Epoch(6)] {
        let grant = KEY.sign(INCARNATION, epoch, GrantId(1), block);
        assert_eq!(code(fence.prove(INCARNATION, &grant)), Code::StaleEpoch);
    }
    assert_eq!(write(&mut fence, &grant(1, block)), Code::Ok);
    let proven = fence
        .prove(INCARNATION, &grant(2, extent(200, 10)))
        .unwrap();
    assert!(fence.enter(term(6)).is_ok());
    assert_eq!(
        code(fence.begin_receive(&proven, Arc::new(Aborted::default()))),
        Code::StaleEpoch
    );
    let item = ReadItem {
        extent: block,
        from: Offset(0),
        length: Length(1),
        right: None,
    };
    assert_eq!(
        code(fence.read(EPOCH, INCARNATION, &item)),
        Code::StaleEpoch
    );
    assert_eq!(
        code(fence.pin(ALICE, EPOCH, INCARNATION, &block)),
        Code::StaleEpoch
    );
    assert_eq!(read(&fence, block), Code::Ok, "blocks outlive epochs");
}

#[test]
fn nothing_is_admitted_before_a_welcome() {
    let mut fence = unwelcomed();
    let grant = KEY.sign(INCARNATION, Epoch(0), GrantId(1), extent(0, 10));
    assert_eq!(write(&mut fence, &grant), Code::StaleEpoch);
    assert_eq!(read(&fence, extent(0, 10)), Code::OutOfRange);
}

#[test]
fn a_forged_grant_is_refused() {
    let mut fence = fence();
    let good = grant(1, extent(0, 100));
    let longer = Grant {
        extent: extent(0, 200),
        ..good
    };
    assert_eq!(write(&mut fence, &longer), Code::GrantRefused);
    let other_key = GrantKey([4; 32]).sign(INCARNATION, EPOCH, GrantId(1), extent(0, 100));
    assert_eq!(hold(&mut fence, ALICE, &other_key), Code::GrantRefused);
    assert_eq!(write(&mut fence, &good), Code::Ok);
}

#[test]
fn ranges_outside_their_segment_are_refused() {
    let mut fence = fence();
    for bad in [
        extent(4000, 97),
        extent(4096, 1),
        extent(0, 0),
        extent(u64::MAX, 2),
        Extent {
            segment: SegmentId(1),
            ..extent(0, 10)
        },
    ] {
        assert_eq!(write(&mut fence, &grant(1, bad)), Code::OutOfRange, "{bad}");
        assert_eq!(read(&fence, bad), Code::OutOfRange, "{bad}");
    }
    assert_eq!(write(&mut fence, &grant(1, extent(4000, 96))), Code::Ok);
}

#[test]
fn a_grant_is_good_for_one_write() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(write(&mut fence, &grant(5, block)), Code::Ok);
    assert_eq!(write(&mut fence, &grant(5, block)), Code::AlreadyWritten);
    assert_eq!(
        hold(&mut fence, BOB, &grant(5, block)),
        Code::AlreadyWritten
    );
    // A correct master never does this in one epoch: an older and a newer grant cover the same bytes.
    assert_eq!(
        write(&mut fence, &grant(4, extent(50, 100))),
        Code::GrantEnded
    );
    assert_eq!(
        write(&mut fence, &grant(6, extent(50, 100))),
        Code::AlreadyWritten
    );
}

#[test]
fn one_writes_at_a_time() {
    let mut fence = fence();
    let span = receive(&mut fence, &grant(1, extent(0, 100))).unwrap();
    for overlapping in [extent(0, 100), extent(99, 1), extent(50, 500)] {
        let grant = grant(2, overlapping);
        assert_eq!(write(&mut fence, &grant), Code::InProgress);
        assert_eq!(hold(&mut fence, ALICE, &grant), Code::InProgress);
    }
    assert_eq!(
        hold(&mut fence, ALICE, &grant(3, extent(100, 50))),
        Code::Ok
    );
    assert_eq!(
        write(&mut fence, &grant(4, extent(149, 9))),
        Code::InProgress
    );
    assert_eq!(fence.end_receive(span, Some(sums())), Code::Ok);
}

#[test]
fn a_closed_grant_is_refused_for_ever() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(close(&mut fence, 1, 10, block), [1]);
    assert_eq!(write(&mut fence, &grant(10, block)), Code::GrantEnded);
    assert_eq!(hold(&mut fence, ALICE, &grant(10, block)), Code::GrantEnded);
    // The extent is granted again, and later divided in another way.
    assert_eq!(write(&mut fence, &grant(11, block)), Code::Ok);
    assert_eq!(write(&mut fence, &grant(10, block)), Code::GrantEnded);
    assert_eq!(close(&mut fence, 2, 11, block), [2]);
    assert_eq!(read(&fence, block), Code::Missing);
    assert_eq!(write(&mut fence, &grant(12, extent(50, 200))), Code::Ok);
    for old in [10, 11] {
        assert_eq!(write(&mut fence, &grant(old, block)), Code::GrantEnded);
    }
    assert_eq!(write(&mut fence, &grant(13, extent(0, 50))), Code::Ok);
}

#[test]
fn a_written_block_that_is_fenced_closes_its_own_grant() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(write(&mut fence, &grant(10, block)), Code::Ok);
    assert_eq!(close(&mut fence, 1, 0, block), [1]);
    assert_eq!(write(&mut fence, &grant(10, block)), Code::GrantEnded);
}

/// The master repeats a ticket in a new session, then hears the answer of the old one, and grants the extent again.
#[test]
fn a_ticket_that_comes_again_leaves_the_next_block_alone() {
    let mut fence = fence();
    let (old, next, beside) = (extent(0, 200), extent(0, 100), extent(128, 60));
    assert_eq!(write(&mut fence, &grant(8, old)), Code::Ok);
    assert_eq!(close_before(&mut fence, 3, 8, 9, old), [3]);
    assert_eq!(read(&fence, old), Code::Missing);
    // One extent is written, the other is being written.
    assert_eq!(write(&mut fence, &grant(13, next)), Code::Ok);
    let writing = receive(&mut fence, &grant(14, beside)).unwrap();
    assert_eq!(close_before(&mut fence, 3, 8, 9, old), [3]);
    assert_eq!(read(&fence, next), Code::Ok);
    assert_eq!(fence.end_receive(writing, Some(sums())), Code::Ok);
    assert_eq!(read(&fence, beside), Code::Ok);
    // The extents' own tickets close them.
    assert_eq!(close_before(&mut fence, 4, 13, 15, next), [4]);
    assert_eq!(close_before(&mut fence, 5, 14, 15, beside), [5]);
    assert_eq!(read(&fence, next), Code::Missing);
    assert_eq!(read(&fence, beside), Code::Missing);
}

/// A copy has a grant of its own. It is fenced under the lower number of its block's version.
#[test]
fn a_ticket_closes_every_grant_before_it_also_one_that_it_does_not_name() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(write(&mut fence, &grant(20, block)), Code::Ok);
    assert_eq!(close_before(&mut fence, 1, 8, 21, block), [1]);
    assert_eq!(read(&fence, block), Code::Missing);
    assert_eq!(write(&mut fence, &grant(20, block)), Code::GrantEnded);
}

/// Grants of an earlier term are closed, whatever their numbers. Tickets wait for processes that hold one.
#[test]
fn a_ticket_waits_for_a_hold_of_an_earlier_term_whatever_its_number() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(hold(&mut fence, ALICE, &grant(1_000, block)), Code::Ok);
    assert!(fence.enter(term(EPOCH.0 + 1)).is_ok());
    assert!(close_before(&mut fence, 1, 0, 5, block).is_empty());
    fence.peer_gone(ALICE);
    assert_eq!(fence.take_fenced(), [1]);
}

#[test]
fn a_receive_is_aborted_and_waited_for() {
    let mut fence = fence();
    let block = extent(0, 100);
    let aborted = Arc::new(Aborted::default());
    let proven = fence.prove(INCARNATION, &grant(1, block)).unwrap();
    let span = fence
        .begin_receive(&proven, Arc::clone(&aborted) as _)
        .unwrap();
    let item = FenceItem {
        ticket: 7,
        grant: Some(GrantId(1)),
        before: None,
        extent: block,
    };
    for abort in fence.fence(&[item]) {
        abort.abort();
    }
    assert_eq!(aborted.0.load(Ordering::Relaxed), 1);
    assert!(fence.take_fenced().is_empty());
    // All bytes had arrived before the abort, but they do not count.
    assert_eq!(fence.end_receive(span, Some(sums())), Code::GrantEnded);
    assert_eq!(fence.take_fenced(), [7]);
    assert_eq!(read(&fence, block), Code::Missing);
}

#[test]
fn a_hold_is_waited_for_until_its_end_or_its_process_death() {
    let mut fence = fence();
    assert_eq!(hold(&mut fence, ALICE, &grant(1, extent(0, 100))), Code::Ok);
    assert_eq!(hold(&mut fence, BOB, &grant(2, extent(100, 100))), Code::Ok);
    assert!(close(&mut fence, 7, 1, extent(0, 100)).is_empty());
    assert!(close(&mut fence, 8, 2, extent(100, 100)).is_empty());
    assert_eq!(
        fence.end_hold(BOB, GrantId(1), sums()),
        Code::GrantEnded,
        "another's hold is not ended"
    );
    assert!(fence.take_fenced().is_empty());
    assert_eq!(fence.end_hold(ALICE, GrantId(1), sums()), Code::GrantEnded);
    assert_eq!(fence.take_fenced(), [7]);
    fence.peer_gone(BOB);
    assert_eq!(fence.take_fenced(), [8]);
    assert_eq!(fence.census().held, Length(0));
}

#[test]
fn a_pin_is_waited_for_and_counts() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(write(&mut fence, &grant(1, block)), Code::Ok);
    for peer in [ALICE, ALICE, BOB] {
        assert!(fence.pin(peer, EPOCH, INCARNATION, &block).is_ok());
    }
    assert!(close(&mut fence, 7, 1, block).is_empty());
    assert_eq!(
        code(fence.pin(BOB, EPOCH, INCARNATION, &block)),
        Code::Missing
    );
    assert_eq!(fence.unpin(ALICE, INCARNATION, &block), Code::Ok);
    fence.peer_gone(BOB);
    assert_eq!(fence.unpin(BOB, INCARNATION, &block), Code::Missing);
    assert!(fence.take_fenced().is_empty());
    assert_eq!(
        write(&mut fence, &grant(2, extent(50, 100))),
        Code::InProgress,
        "nobody writes under a view"
    );
    assert_eq!(fence.unpin(ALICE, INCARNATION, &block), Code::Ok);
    assert_eq!(fence.take_fenced(), [7]);
    assert_eq!(fence.census().pins, 0);
}

#[test]
fn a_ticket_over_several_touches_waits_for_the_last() {
    let mut fence = fence();
    let spans = [0, 1000, 2000].map(|at| receive(&mut fence, &grant(at + 1, extent(at, 10))));
    assert!(close(&mut fence, 7, 0, extent(0, 4096)).is_empty());
    assert!(
        close(&mut fence, 7, 0, extent(0, 4096)).is_empty(),
        "repeated"
    );
    for (at, span) in spans.into_iter().enumerate() {
        fence.end_receive(span.unwrap(), None);
        let expected: &[u64] = if at == 2 { &[7] } else { &[] };
        assert_eq!(fence.take_fenced(), expected);
    }
}

#[test]
fn a_new_epoch_closes_every_older_grant_and_reports_what_is_held() {
    let mut fence = fence();
    let [held, pinned, received] = [extent(0, 100), extent(100, 100), extent(200, 100)];
    assert_eq!(hold(&mut fence, ALICE, &grant(1, held)), Code::Ok);
    assert_eq!(write(&mut fence, &grant(2, pinned)), Code::Ok);
    assert!(fence.pin(BOB, EPOCH, INCARNATION, &pinned).is_ok());
    let span = receive(&mut fence, &grant(3, received)).unwrap();
    assert!(close(&mut fence, 7, 1, held).is_empty());

    assert_eq!(fence.enter(term(6)).unwrap().len(), 1, "the receive");
    assert_eq!(fence.held(), [held, pinned]);
    assert_eq!(fence.end_receive(span, Some(sums())), Code::GrantEnded);
    assert_eq!(fence.end_hold(ALICE, GrantId(1), sums()), Code::GrantEnded);
    assert!(
        fence.take_fenced().is_empty(),
        "tickets end with their term"
    );
    assert_eq!(fence.held(), [pinned]);
    assert!(close(&mut fence, 7, 0, pinned).is_empty());
    assert_eq!(fence.unpin(BOB, INCARNATION, &pinned), Code::Ok);
    assert_eq!(fence.take_fenced(), [7]);
}

#[test]
fn entering_the_same_epoch_again_changes_nothing() {
    let mut fence = fence();
    let block = extent(0, 100);
    let span = receive(&mut fence, &grant(1, block)).unwrap();
    assert!(close(&mut fence, 7, 9, extent(50, 10)).is_empty());
    assert!(fence.enter(term(EPOCH.0)).unwrap().is_empty());
    assert_eq!(
        write(&mut fence, &grant(9, extent(50, 10))),
        Code::GrantEnded
    );
    fence.end_receive(span, None);
    assert_eq!(fence.take_fenced(), [7]);
}

#[test]
fn a_block_of_an_older_epoch_is_gone_once_a_write_over_it_begins() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(write(&mut fence, &grant(1, block)), Code::Ok);
    assert!(fence.enter(term(6)).is_ok());
    let newer = KEY.sign(INCARNATION, Epoch(6), GrantId(2), extent(90, 50));
    let span = receive(&mut fence, &newer).unwrap();
    assert_eq!(read(&fence, block), Code::Missing);
    assert_eq!(fence.end_receive(span, Some(sums())), Code::Ok);
}

#[test]
fn terms_that_cannot_be_are_refused() {
    let mut fence = fence();
    assert!(matches!(
        fence.enter(term(4)),
        Err(TermError::Deposed { .. })
    ));
    let short = Term {
        segments: vec![SEGMENT],
        ..term(6)
    };
    assert!(matches!(
        fence.enter(short),
        Err(TermError::SegmentCount { .. })
    ));
    let renumbered = Term {
        segments: vec![SEGMENT, SegmentId(42)],
        ..term(6)
    };
    assert_eq!(fence.enter(renumbered).err(), Some(TermError::Renumbered));
    assert_eq!(fence.epoch(), EPOCH);
}

#[test]
fn a_new_incarnation_knows_no_block_but_still_who_holds_its_memory() {
    let mut fence = fence();
    let [block, other] = [extent(0, 100), extent(100, 100)];
    assert_eq!(write(&mut fence, &grant(1, block)), Code::Ok);
    assert!(fence.pin(ALICE, EPOCH, INCARNATION, &block).is_ok());
    assert_eq!(write(&mut fence, &grant(2, other)), Code::Ok);

    let life = Incarnation(78);
    fence.renew(life);
    assert_eq!((fence.epoch(), fence.census().records), (Epoch(0), 0));
    let again = Term {
        segments: vec![SegmentId(50), SegmentId(51)],
        ..term(5)
    };
    assert!(fence.enter(again).is_ok());
    let moved = |extent: Extent| Extent {
        segment: SegmentId(50),
        ..extent
    };
    assert_eq!(fence.held(), [moved(block)]);
    let proven = |fence: &Fence, extent| {
        let grant = KEY.sign(life, EPOCH, GrantId(1), moved(extent));
        fence.prove(life, &grant).unwrap()
    };
    let over = proven(&fence, block);
    assert_eq!(code(fence.begin_hold(BOB, &over)), Code::InProgress);
    let beside = proven(&fence, other);
    assert_eq!(code(fence.begin_hold(BOB, &beside)), Code::Ok);
    assert_eq!(
        fence.unpin(ALICE, INCARNATION, &block),
        Code::Ok,
        "under the old number"
    );
    assert_eq!(fence.held(), [moved(other)]);
}

#[test]
fn a_client_holds_no_more_than_it_may() {
    let mut fence = fence();
    assert_eq!(hold(&mut fence, ALICE, &grant(1, extent(0, 600))), Code::Ok);
    let second = grant(2, extent(600, 500));
    assert_eq!(hold(&mut fence, ALICE, &second), Code::TooManyHeld);
    assert_eq!(hold(&mut fence, BOB, &second), Code::Ok);
    assert_eq!(fence.end_hold(BOB, GrantId(2), sums()), Code::Ok);
    assert_eq!(
        code(fence.pin(ALICE, EPOCH, INCARNATION, &second.extent)),
        Code::TooManyHeld
    );
    assert_eq!(fence.end_hold(ALICE, GrantId(1), sums()), Code::Ok);
    // An extent counts once, however often it is pinned.
    for _ in 0..9 {
        assert!(fence.pin(ALICE, EPOCH, INCARNATION, &second.extent).is_ok());
    }
    assert_eq!(fence.census().held, Length(500));
}

#[test]
fn one_block_over_the_cap_is_held_alone() {
    let mut fence = fence();
    let large = grant(1, extent(0, 1_500));
    assert_eq!(hold(&mut fence, ALICE, &large), Code::Ok);
    let beside = grant(2, extent(1_500, 1));
    assert_eq!(hold(&mut fence, ALICE, &beside), Code::TooManyHeld);
    assert_eq!(fence.end_hold(ALICE, GrantId(1), sums()), Code::Ok);
    assert!(fence.pin(ALICE, EPOCH, INCARNATION, &large.extent).is_ok());
    assert_eq!(hold(&mut fence, ALICE, &beside), Code::TooManyHeld);
    assert_eq!(fence.unpin(ALICE, INCARNATION, &large.extent), Code::Ok);
    assert_eq!(hold(&mut fence, ALICE, &beside), Code::Ok);
}

#[test]
fn two_holds_of_one_number_are_not_mixed_up() {
    let mut fence = fence();
    assert_eq!(hold(&mut fence, ALICE, &grant(1, extent(0, 100))), Code::Ok);
    assert!(fence.enter(term(6)).is_ok());
    let newer = KEY.sign(INCARNATION, Epoch(6), GrantId(1), extent(200, 100));
    assert_eq!(hold(&mut fence, ALICE, &newer), Code::InProgress);
    assert_eq!(fence.end_hold(ALICE, GrantId(1), sums()), Code::GrantEnded);
    assert_eq!(hold(&mut fence, ALICE, &newer), Code::Ok);
}

#[test]
fn a_draining_node_takes_nothing_new_and_lets_the_rest_end() {
    let mut fence = fence();
    let block = extent(0, 100);
    assert_eq!(write(&mut fence, &grant(1, block)), Code::Ok);
    let span = receive(&mut fence, &grant(2, extent(100, 100))).unwrap();
    fence.drain();
    assert_eq!(write(&mut fence, &grant(3, extent(300, 9))), Code::Draining);
    assert_eq!(
        hold(&mut fence, BOB, &grant(3, extent(300, 9))),
        Code::Draining
    );
    assert_eq!(
        code(fence.pin(BOB, EPOCH, INCARNATION, &block)),
        Code::Draining
    );
    assert_eq!(read(&fence, block), Code::Ok);
    assert_eq!(fence.end_receive(span, Some(sums())), Code::Ok);
}

/// Writes a block at once, as small blocks are written.
fn write_now(fence: &mut Fence, grant: &Grant, sums: &[Checksum]) -> Code {
    let proven = match fence.prove(INCARNATION, grant) {
        Ok(proven) => proven,
        Err(refused) => return refused.code,
    };
    let written = fence
        .admit_now(&proven)
        .and_then(|span| fence.record_now(span, grant.id, sums.iter().copied()));
    code(written)
}

#[test]
fn a_write_at_once_is_judged_like_any_other() {
    let mut fence = fence();
    let block = extent(0, 100);
    let forged = Grant {
        mac: [0; 16],
        ..grant(1, block)
    };
    assert_eq!(write_now(&mut fence, &forged, &sums()), Code::GrantRefused);
    assert_eq!(
        write_now(&mut fence, &grant(1, block), &[]),
        Code::InvalidArgument
    );
    assert_eq!(read(&fence, block), Code::Missing);
    assert_eq!(write_now(&mut fence, &grant(1, block), &sums()), Code::Ok);
    assert_eq!(read(&fence, block), Code::Ok);
    assert_eq!(fence.sums(EPOCH, INCARNATION, &block), Ok(sums()));
    assert_eq!(
        write_now(&mut fence, &grant(1, block), &sums()),
        Code::AlreadyWritten
    );
    // A fenced grant stays refused, a touch keeps the ticket waiting, and no state is left behind.
    assert_eq!(close(&mut fence, 7, 1, block), [7]);
    assert_eq!(
        write_now(&mut fence, &grant(1, block), &sums()),
        Code::GrantEnded
    );
    assert_eq!(hold(&mut fence, ALICE, &grant(2, block)), Code::Ok);
    assert_eq!(
        write_now(&mut fence, &grant(3, block), &sums()),
        Code::InProgress
    );
    fence.end_hold(ALICE, GrantId(2), Vec::new());
    assert_eq!(write_now(&mut fence, &grant(3, block), &sums()), Code::Ok);
    assert_eq!(close(&mut fence, 8, 3, block), [8]);
    assert_eq!(fence.census().records, 0);
}
