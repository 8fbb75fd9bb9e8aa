//! Which message ends which room, and rows P8 and P10.

use super::*;

/// A process that knows the number of the room and has no part in the request.
const STRANGER: Incarnation = Incarnation(9);

fn new_desk() -> SenderDesk {
    SenderDesk::new(DeskOptions::default())
}

fn plan_for(receivers: usize) -> RoomSenderPlan {
    RoomSenderPlan {
        receivers,
        ..sender_plan()
    }
}

fn ask() -> ToSender {
    ToSender::Offer(offer())
}

fn ask_for(receiver: u32) -> ToSender {
    ToSender::Offer(RoomOffer {
        receiver,
        ..offer()
    })
}

fn poll(desk: &SenderDesk) -> Option<PollState> {
    desk.room(TAG.room).map(RoomSender::poll)
}

/// A note of the abort would end the next room of the number for 30 s.
#[test]
fn an_abort_of_an_attempt_that_did_not_ask_ends_no_room() {
    let (mut out, code) = (Vec::new(), Code::Draining);
    let abort = || ToSender::Abort { tag: TAG, code };
    let aborted = Some(ToReceiver::Aborted { tag: TAG });
    // The desk knows no room of the number.
    let mut desk = new_desk();
    assert_eq!(desk.take(at(0), STRANGER, abort(), &mut out), aborted);
    assert_eq!(desk.expect(at(1), TAG.room, 1), None);
    desk.open(at(1), sender_plan(), &mut out).unwrap();
    assert_eq!(poll(&desk), Some(PollState::Bootstrapping));
    // The room is open, first without a receiver, then with one.
    assert_eq!(desk.take(at(2), P, abort(), &mut out), aborted);
    assert_eq!(desk.take(at(3), D, ask(), &mut out), None);
    assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
    let other = Incarnation(10);
    assert_eq!(desk.take(at(4), other, abort(), &mut out), aborted);
    assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
    // The next room of the number.
    desk.handle(at(5), TAG.room, SenderEvent::Abort { code }, &mut out);
    desk.bury_if_ended(at(6), TAG.room);
    desk.open(at(7), sender_plan(), &mut out).unwrap();
    assert_eq!(poll(&desk), Some(PollState::Bootstrapping));
}

/// Until the room opens, prefill cannot tell which of the two processes is the receiver.
#[test]
fn an_abort_ends_no_room_whose_place_another_process_asked_for() {
    let (mut out, code) = (Vec::new(), Code::Draining);
    let abort = || ToSender::Abort { tag: TAG, code };
    for is_first in [true, false] {
        let mut desk = new_desk();
        let mut asks = [STRANGER, D];
        if !is_first {
            asks.reverse();
        }
        for process in asks {
            assert_eq!(desk.take(at(0), process, ask(), &mut out), None);
        }
        let may_end = desk.may_end(at(1), (STRANGER, Some(TAG)), (TAG.room, 1));
        assert!(!may_end);
        desk.take(at(1), STRANGER, abort(), &mut out);
        desk.open(at(2), sender_plan(), &mut out).unwrap();
        assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
        let of = desk
            .room(TAG.room)
            .and_then(|room| room.receiver_session(0));
        assert_eq!(of, Some(D));
    }
    // Alone in its place, the attempt speaks for the whole request of two ranks.
    let mut desk = new_desk();
    desk.take(at(0), D, ask(), &mut out);
    desk.take(at(0), P, ask_for(1), &mut out);
    assert!(desk.may_end(at(1), (D, Some(TAG)), (TAG.room, 2)));
    desk.take(at(1), D, abort(), &mut out);
    desk.open(at(2), plan_for(2), &mut out).unwrap();
    assert!(desk.take_ended().is_empty(), "P is told first");
    let failure = desk.room(TAG.room).and_then(RoomSender::failure);
    assert_eq!(failure, Some(code));
}

/// The attempt is told to ask again, and gives up. Otherwise prefill would wait for it.
#[test]
fn an_abort_of_an_attempt_that_was_held_back_ends_the_room_that_is_open() {
    let (mut out, code) = (Vec::new(), Code::Draining);
    let abort = || ToSender::Abort { tag: TAG, code };
    let mut desk = new_desk();
    desk.open(at(0), sender_plan(), &mut out).unwrap();
    desk.hold_back(at(1), D, &offer());
    desk.take(at(2), D, abort(), &mut out);
    assert_eq!(out, [SenderAction::ReleasePages]);
    assert_eq!(desk.take_ended(), [(TAG.room, RoomOutcome::Failed(code))]);
    // Another process has taken the place meanwhile.
    let mut desk = new_desk();
    desk.open(at(0), sender_plan(), &mut out).unwrap();
    desk.hold_back(at(1), D, &offer());
    desk.take(at(2), P, ask(), &mut out);
    desk.take(at(3), D, abort(), &mut out);
    assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
}

/// Otherwise a process with wrong pages would end the room of another process that asked for it.
#[test]
fn an_early_offer_that_does_not_fit_ends_no_room_whose_place_another_process_has() {
    let mut out = Vec::new();
    let mut desk = new_desk();
    let short = RoomOffer {
        pages: 2,
        ..offer()
    };
    desk.take(at(0), STRANGER, ToSender::Offer(short), &mut out);
    desk.take(at(1), D, ask(), &mut out);
    let answers = desk.open(at(2), sender_plan(), &mut out).unwrap();
    let code = Code::InProgress;
    assert_eq!(answers, [(STRANGER, ToReceiver::Refuse { tag: TAG, code })]);
    assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
}

/// Rows P8, P10: a receiver that declines ends the request for all, whether prefill has named it or not.
#[test]
fn p8_a_decline_ends_the_request_before_and_after_prefill_names_it() {
    let (mut out, code) = (Vec::new(), Code::Full);
    let decline = || ToSender::Decline { tag: TAG, code };
    let refused = Some(ToReceiver::Refuse { tag: TAG, code });
    let ended = [(TAG.room, RoomOutcome::Failed(code))];
    // The process itself has asked before, and asks again.
    let mut desk = new_desk();
    assert_eq!(desk.take(at(0), D, ask(), &mut out), None);
    assert_eq!(desk.take(at(1), D, decline(), &mut out), None);
    assert_eq!(desk.take(at(2), D, ask(), &mut out), refused);
    desk.open(at(3), sender_plan(), &mut out).unwrap();
    assert_eq!(out, [SenderAction::ReleasePages], "nobody is accepted");
    assert_eq!(desk.take_ended(), ended);
    // Prefill asks first whether the room may open.
    let mut desk = new_desk();
    desk.take(at(0), P, decline(), &mut out);
    assert_eq!(desk.expect(at(1), TAG.room, 1), Some(code));
    assert!(desk.refuse(at(1), TAG.room, code).is_empty());
    assert_eq!(desk.take(at(2), D, ask(), &mut out), refused);
    assert_eq!(desk.expect(at(3), TAG.room, 1), None, "the number is free");
    // Another rank of decode has asked before.
    let mut desk = new_desk();
    desk.take(at(0), D, ask(), &mut out);
    desk.take(at(1), P, decline(), &mut out);
    out.clear();
    desk.open(at(2), plan_for(2), &mut out).unwrap();
    let abort = SenderAction::Send {
        to: 0,
        message: ToReceiver::Abort { tag: TAG, code },
    };
    assert!(out.contains(&abort) && out.contains(&SenderAction::ReleasePages));
    // The room is open, and one of its two ranks has been accepted.
    let mut desk = new_desk();
    desk.open(at(0), plan_for(2), &mut out).unwrap();
    desk.take(at(1), D, ask(), &mut out);
    out.clear();
    assert_eq!(desk.take(at(2), P, decline(), &mut out), None);
    assert_eq!(out.first(), Some(&abort));
    assert!(out.contains(&SenderAction::ReleasePages));
}

/// Each place of the request has a process that asked for it. So the declining process has none.
#[test]
fn a_decline_of_a_process_without_a_place_ends_no_request_that_has_not_opened() {
    let (mut out, code) = (Vec::new(), Code::Full);
    let decline = || ToSender::Decline { tag: TAG, code };
    for is_first in [true, false] {
        let mut desk = new_desk();
        if is_first {
            desk.take(at(0), STRANGER, decline(), &mut out);
        }
        assert_eq!(desk.take(at(1), D, ask(), &mut out), None);
        if !is_first {
            desk.take(at(2), STRANGER, decline(), &mut out);
        }
        let may_end = |receivers| desk.may_end(at(3), (STRANGER, None), (TAG.room, receivers));
        assert!(!may_end(1) && may_end(2), "a second place is left");
        assert_eq!(desk.take(at(3), D, ask(), &mut out), None, "asks again");
        desk.open(at(4), sender_plan(), &mut out).unwrap();
        assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
    }
    // The process asked for the place of another process.
    let mut desk = new_desk();
    desk.take(at(0), D, ask(), &mut out);
    desk.take(at(1), STRANGER, ask(), &mut out);
    desk.take(at(2), STRANGER, decline(), &mut out);
    assert_eq!(desk.expect(at(3), TAG.room, 1), None);
    desk.open(at(4), sender_plan(), &mut out).unwrap();
    assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
}

/// The number of a room gives no right to end it: every registered process may know the number.
#[test]
fn a_decline_of_a_process_that_receives_nothing_ends_no_open_room() {
    let (mut out, code) = (Vec::new(), Code::Full);
    let mut desk = new_desk();
    desk.open(at(0), sender_plan(), &mut out).unwrap();
    desk.take(at(1), D, ask(), &mut out);
    out.clear();
    let decline = || ToSender::Decline { tag: TAG, code };
    assert_eq!(desk.take(at(2), P, decline(), &mut out), None);
    assert!(out.is_empty(), "{out:?}");
    let waits = desk.room(TAG.room).map(RoomSender::poll);
    assert_eq!(waits, Some(PollState::WaitingForInput));
    // The receiver itself may decline.
    assert_eq!(desk.take(at(3), D, decline(), &mut out), None);
    assert!(out.contains(&SenderAction::ReleasePages));
}

/// Each rank of decode may decline the same request.
#[test]
fn a_second_decline_of_a_request_leaves_the_next_one_of_its_number_alone() {
    let (mut out, code) = (Vec::new(), Code::Full);
    let mut desk = new_desk();
    desk.open(at(0), sender_plan(), &mut out).unwrap();
    let decline = || ToSender::Decline { tag: TAG, code };
    desk.take(at(1), D, decline(), &mut out);
    assert_eq!(desk.take_ended(), [(TAG.room, RoomOutcome::Failed(code))]);
    desk.take(at(2), P, decline(), &mut out);
    assert_eq!(desk.expect(at(3), TAG.room, 1), None);
    // Without an ended request, a decline is kept for the next one.
    desk.take(at(4), P, decline(), &mut out);
    assert_eq!(desk.expect(at(5), TAG.room, 1), Some(code));
}

/// The declines of one process take bounded memory.
#[test]
fn p8_early_declines_are_bounded() {
    let options = DeskOptions {
        early_offers: 2,
        ..DeskOptions::default()
    };
    let (mut desk, mut out) = (SenderDesk::new(options), Vec::new());
    let decline = |room| {
        let tag = RoomTag {
            room: RoomId(room),
            ..TAG
        };
        let code = Code::Full;
        ToSender::Decline { tag, code }
    };
    for room in 1..=3 {
        desk.take(at(0), D, decline(room), &mut out);
    }
    assert_eq!(desk.expect(at(1), RoomId(2), 1), Some(Code::Full));
    assert_eq!(desk.expect(at(1), RoomId(3), 1), None, "two are kept");
    desk.take(at(2), D, decline(4), &mut out);
    assert_eq!(desk.expect(at(30_002), RoomId(4), 1), None, "for 30 s");
}

fn tag_of(room: u64) -> RoomTag {
    RoomTag {
        room: RoomId(room),
        ..TAG
    }
}

/// Every registered process may decline any number, and ask for any.
#[test]
fn the_notes_of_one_process_push_out_none_of_a_process_that_has_few() {
    let options = DeskOptions {
        early_offers: 3,
        ..DeskOptions::default()
    };
    let (mut desk, mut out, code) = (SenderDesk::new(options), Vec::new(), Code::Full);
    let decline = |room| ToSender::Decline {
        tag: tag_of(room),
        code,
    };
    for room in 1..=3 {
        desk.take(at(room), STRANGER, decline(room), &mut out);
    }
    desk.take(at(4), D, decline(4), &mut out);
    desk.take(at(5), STRANGER, decline(5), &mut out);
    assert_eq!(desk.expect(at(6), RoomId(1), 1), None, "the oldest goes");
    assert_eq!(desk.expect(at(6), RoomId(2), 1), Some(code));
    assert_eq!(desk.expect(at(6), RoomId(4), 1), Some(code));
    // Offers.
    let ask_in = |room| {
        ToSender::Offer(RoomOffer {
            tag: tag_of(room),
            ..offer()
        })
    };
    let is_busy = |answer: Option<ToReceiver>| matches!(answer, Some(ToReceiver::Busy { .. }));
    for room in 11..=13 {
        let answer = desk.take(at(room), STRANGER, ask_in(room), &mut out);
        assert_eq!(answer, None);
    }
    assert_eq!(desk.take(at(14), D, ask_in(14), &mut out), None);
    assert!(is_busy(desk.take(at(15), STRANGER, ask_in(11), &mut out)));
    assert_eq!(desk.take(at(16), D, ask_in(14), &mut out), None);
    // Attempts that are held back: three of the stranger. The receiver's attempt takes the place of the oldest.
    for room in 16..=18 {
        assert!(is_busy(desk.take(
            at(room),
            STRANGER,
            ask_in(room),
            &mut out
        )));
    }
    let held = RoomOffer {
        tag: tag_of(19),
        ..offer()
    };
    desk.hold_back(at(19), D, &held);
    assert!(is_busy(desk.take(at(20), STRANGER, ask_in(20), &mut out)));
    let abort = ToSender::Abort {
        tag: held.tag,
        code,
    };
    desk.take(at(21), D, abort, &mut out);
    assert_eq!(desk.expect(at(22), RoomId(19), 1), Some(code));
}

/// Otherwise the attempt has a place in the next room of the number, whose receiver is another process.
#[test]
fn an_attempt_that_was_held_back_and_is_served_then_asks_no_more() {
    let (mut desk, mut out, code) = (new_desk(), Vec::new(), Code::Full);
    desk.open(at(0), sender_plan(), &mut out).unwrap();
    desk.hold_back(at(1), D, &offer());
    assert_eq!(desk.take(at(2), D, ask(), &mut out), None);
    for event in [SenderEvent::Produced(rectangle()), SenderEvent::ProducedAll] {
        desk.handle(at(3), TAG.room, event, &mut out);
    }
    let writes: Vec<(usize, u32)> = (out.iter())
        .filter_map(|action| match action {
            SenderAction::Write { to, id, .. } => Some((*to, *id)),
            _ => None,
        })
        .collect();
    for (to, id) in writes {
        let outcome = Ok(Checksum(1));
        let written = SenderEvent::Written { to, id, outcome };
        desk.handle(at(4), TAG.room, written, &mut out);
    }
    desk.take(at(5), D, ToSender::Complete { tag: TAG }, &mut out);
    assert_eq!(desk.take_ended(), [(TAG.room, RoomOutcome::Success)]);
    desk.take(at(6), P, ToSender::Decline { tag: TAG, code }, &mut out);
    assert_eq!(desk.expect(at(7), TAG.room, 1), Some(code));
}

/// The breaker of the process is open, so its attempt was told to ask again later.
#[test]
fn a_process_that_declined_and_gives_up_an_attempt_has_declined_still() {
    let (mut desk, mut out, code) = (new_desk(), Vec::new(), Code::Full);
    desk.take(at(0), D, ToSender::Decline { tag: TAG, code }, &mut out);
    desk.hold_back(at(1), D, &offer());
    let abort = ToSender::Abort {
        tag: TAG,
        code: Code::Draining,
    };
    desk.take(at(2), D, abort, &mut out);
    let tag = RoomTag {
        generation: RoomGeneration(4),
        ..TAG
    };
    let again = ToSender::Offer(RoomOffer { tag, ..offer() });
    let refused = Some(ToReceiver::Refuse { tag, code });
    assert_eq!(desk.take(at(3), D, again, &mut out), refused);
    assert_eq!(desk.expect(at(4), TAG.room, 1), Some(code));
}

/// The abort of the first attempt was lost with a connection, and is repeated after the second attempt has asked.
#[test]
fn an_abort_of_an_earlier_attempt_ends_no_room_that_its_process_asks_for_again() {
    let (mut out, code) = (Vec::new(), Code::Draining);
    let abort = || ToSender::Abort { tag: TAG, code };
    let tag = RoomTag {
        generation: RoomGeneration(4),
        ..TAG
    };
    let again = RoomOffer { tag, ..offer() };
    let mut desk = new_desk();
    desk.take(at(0), D, ask(), &mut out);
    desk.take(at(1), D, ToSender::Offer(again.clone()), &mut out);
    desk.take(at(2), D, abort(), &mut out);
    assert_eq!(desk.expect(at(3), TAG.room, 1), None);
    desk.open(at(4), sender_plan(), &mut out).unwrap();
    assert_eq!(poll(&desk), Some(PollState::WaitingForInput));
    // The second attempt was told to ask later.
    let mut desk = new_desk();
    desk.take(at(0), D, ask(), &mut out);
    desk.take(at(1), D, abort(), &mut out);
    desk.hold_back(at(2), D, &again);
    desk.open(at(3), sender_plan(), &mut out).unwrap();
    assert_eq!(poll(&desk), Some(PollState::Bootstrapping));
}

#[test]
fn a_room_that_never_opened_refuses_those_that_asked_for_it() {
    let (mut out, code) = (Vec::new(), Code::Full);
    let mut desk = new_desk();
    assert_eq!(desk.expect(at(0), TAG.room, 1), None);
    desk.take(at(0), D, ask(), &mut out);
    let refused = ToReceiver::Refuse { tag: TAG, code };
    assert_eq!(desk.refuse(at(1), TAG.room, code), [(D, refused.clone())]);
    let again = desk.take(at(2), D, ask(), &mut out);
    assert_eq!(again, Some(refused));
    // Decode gave the request up at the same time. This must not end the next room of the number.
    let abort = ToSender::Abort { tag: TAG, code };
    let aborted = Some(ToReceiver::Aborted { tag: TAG });
    assert_eq!(desk.take(at(3), D, abort, &mut out), aborted);
    assert_eq!(desk.expect(at(4), TAG.room, 1), None);
    assert!(out.is_empty());
}

#[test]
fn a_late_abort_of_an_attempt_that_was_held_back_ends_no_later_room() {
    let (mut out, code) = (Vec::new(), Code::Full);
    let late = |desk: &mut SenderDesk| {
        let mut out = Vec::new();
        assert_eq!(desk.expect(at(5), TAG.room, 1), None, "offered again");
        let abort = ToSender::Abort { tag: TAG, code };
        let aborted = Some(ToReceiver::Aborted { tag: TAG });
        assert!(desk.has_ended(D, TAG));
        assert_eq!(desk.take(at(6), D, abort, &mut out), aborted);
        desk.open(at(7), sender_plan(), &mut out).unwrap();
        assert!(out.is_empty(), "{out:?}");
    };
    // First the room ends before it opens.
    let mut desk = new_desk();
    desk.hold_back(at(0), D, &offer());
    assert!(!desk.has_ended(D, TAG), "it may ask again");
    assert!(desk.refuse(at(1), TAG.room, code).is_empty());
    late(&mut desk);
    // Then the room was open.
    let mut desk = new_desk();
    desk.open(at(0), sender_plan(), &mut out).unwrap();
    desk.hold_back(at(1), D, &offer());
    desk.handle(at(2), TAG.room, SenderEvent::Abort { code }, &mut out);
    late(&mut desk);
}

/// A side that names a room which the other side gave up learns of it at once, and may try again.
#[test]
fn a_room_that_was_given_up_early_fails_the_other_side_at_once() {
    let mut out = Vec::new();
    let mut desk = new_desk();
    // Prefill gives up before decode offers.
    desk.open(at(0), sender_plan(), &mut out).unwrap();
    let code = Code::Draining;
    desk.handle(at(1), TAG.room, SenderEvent::Abort { code }, &mut out);
    assert!(desk.room(TAG.room).is_none());
    let refused = desk.take(at(2), D, ask(), &mut out);
    assert_eq!(refused, Some(ToReceiver::Refuse { tag: TAG, code }));
    // Prefill tries again: the room is open.
    desk.open(at(3), sender_plan(), &mut out).unwrap();
    assert_eq!(desk.take(at(4), D, ask(), &mut out), None);
    let waits = desk.room(TAG.room).map(RoomSender::poll);
    assert_eq!(waits, Some(PollState::WaitingForInput));
    // Decode gives up before prefill opens.
    let mut desk = new_desk();
    let abort = || ToSender::Abort { tag: TAG, code };
    desk.take(at(0), D, ask(), &mut out);
    let answer = desk.take(at(0), D, abort(), &mut out);
    assert_eq!(answer, Some(ToReceiver::Aborted { tag: TAG }));
    desk.open(at(1), sender_plan(), &mut out).unwrap();
    assert!(desk.room(TAG.room).is_none());
    assert_eq!(desk.take_ended(), [(TAG.room, RoomOutcome::Failed(code))]);
    // Decode gives up, and tries again before prefill opens.
    let mut desk = new_desk();
    desk.take(at(0), D, ask(), &mut out);
    desk.take(at(0), D, abort(), &mut out);
    let tag = RoomTag {
        generation: RoomGeneration(4),
        ..TAG
    };
    let again = ToSender::Offer(RoomOffer { tag, ..offer() });
    assert_eq!(desk.take(at(1), D, again, &mut out), None);
    desk.open(at(2), sender_plan(), &mut out).unwrap();
    let waits = desk.room(TAG.room).map(RoomSender::poll);
    assert_eq!(waits, Some(PollState::WaitingForInput));
}
