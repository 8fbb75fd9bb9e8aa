//! Rows S1, S3 and G18, and the refusals of both ends.

mod ends;
mod releases;

use super::*;
use crate::Moment;
use kvpool_types::{Checksum, Code, Incarnation};

const P: Incarnation = Incarnation(1);
const D: Incarnation = Incarnation(2);
const TAG: RoomTag = RoomTag {
    room: RoomId(7),
    generation: RoomGeneration(3),
};

fn at(millis: u64) -> Moment {
    Moment(Duration::from_millis(millis))
}

fn rectangle() -> PageRectangle {
    PageRectangle {
        pages: 0..4,
        layers: 0..2,
    }
}

fn receiver_plan(wants_aux: bool) -> RoomReceiverPlan {
    RoomReceiverPlan {
        tag: TAG,
        epoch: 5,
        key: RoomKey([1; 32]),
        held: 1,
        pages: 3,
        senders: vec![SenderShare {
            session: Some(P),
            rectangle: rectangle(),
            receiver: 0,
            view: 0,
            wants_aux,
        }],
        limits: RoomLimits::default(),
        deadline: at(60_000),
    }
}

fn sender_plan() -> RoomSenderPlan {
    RoomSenderPlan {
        room: TAG.room,
        rectangle: rectangle(),
        receivers: 1,
        limits: RoomLimits::default(),
        deadline: at(60_000),
        chunk_cells: 1000,
        cells_under_way: 1000,
    }
}

fn offer() -> RoomOffer {
    RoomOffer {
        tag: TAG,
        receiver: 0,
        epoch: 5,
        key: RoomKey([1; 32]),
        held: 1,
        pages: 3,
        view: 0,
        wants_aux: false,
        time_left: Duration::from_secs(60),
    }
}

fn chunk(id: u32, pages: std::ops::Range<u32>) -> RoomChunk {
    RoomChunk {
        id,
        body: ChunkBody::Pages(PageRectangle {
            pages,
            layers: 0..2,
        }),
        checksum: Checksum(u64::from(id)),
    }
}

fn take(room: &mut RoomReceiver, message: ToReceiver) -> Vec<ReceiverAction> {
    let (mut out, from) = (Vec::new(), 0);
    room.handle(at(1), ReceiverEvent::Message { from, message }, &mut out);
    out
}

fn open(wants_aux: bool) -> RoomReceiver {
    let mut out = Vec::new();
    let mut room = RoomReceiver::open(at(0), receiver_plan(wants_aux), &mut out);
    take(&mut room, ToReceiver::Accept { tag: TAG });
    room
}

fn failed_with(actions: &[ReceiverAction]) -> Option<Code> {
    actions.iter().find_map(|action| match action {
        ReceiverAction::Send {
            message: ToSender::Abort { code, .. },
            ..
        } => Some(*code),
        _ => None,
    })
}

#[test]
fn s1_polls_have_the_documents_numbers_and_combine_by_the_least() {
    use PollState::{Bootstrapping, Failed, Success, Transferring, WaitingForInput};
    let all = [
        Failed,
        Bootstrapping,
        WaitingForInput,
        Transferring,
        Success,
    ];
    assert_eq!(all.map(PollState::number), [0, 1, 2, 3, 4]);
    let combined = PollState::combined([Success, Transferring, Success]);
    assert_eq!(combined, Some(Transferring));
    assert_eq!(
        PollState::combined([Success, Failed, Success]),
        Some(Failed)
    );
    assert_eq!(PollState::combined([]), None);
    assert_eq!(RoomId(11).dp_rank(4), Some(3));
    assert_eq!(RoomId(11).dp_rank(0), None);
}

#[test]
fn a_receiver_goes_through_the_states_and_succeeds_after_fence_and_verification() {
    let mut out = Vec::new();
    let mut room = RoomReceiver::open(at(0), receiver_plan(false), &mut out);
    assert_eq!(room.poll(), PollState::Bootstrapping);
    take(&mut room, ToReceiver::Accept { tag: TAG });
    assert_eq!(room.poll(), PollState::WaitingForInput);
    let first = chunk(0, 1..3);
    take(
        &mut room,
        ToReceiver::Chunk {
            tag: TAG,
            chunk: first.clone(),
        },
    );
    assert_eq!(room.poll(), PollState::Transferring);
    let last = chunk(1, 3..4);
    let root = RoomRoot::of(TAG, [&first, &last].into_iter());
    let done = ToReceiver::Done {
        tag: TAG,
        chunks: 2,
        root,
    };
    let lacks = ToSender::Lacks {
        tag: TAG,
        chunks: vec![1],
    };
    let asked = ReceiverAction::Send {
        to: 0,
        message: lacks,
    };
    assert_eq!(take(&mut room, done), [asked]);
    let closing = take(
        &mut room,
        ToReceiver::Chunk {
            tag: TAG,
            chunk: last.clone(),
        },
    );
    assert_eq!(closing, [ReceiverAction::CloseRoom]);
    assert_eq!(
        room.poll(),
        PollState::Transferring,
        "nothing is sure before the fence"
    );
    let mut out = Vec::new();
    room.handle(at(2), ReceiverEvent::Fenced, &mut out);
    assert_eq!(out, [ReceiverAction::Verify(vec![(0, first), (0, last)])]);
    let (is_equal, is_own_room) = (true, true);
    let verified = ReceiverEvent::Verified {
        is_equal,
        is_own_room,
    };
    out.clear();
    room.handle(at(3), verified, &mut out);
    let complete = ToSender::Complete { tag: TAG };
    assert_eq!(
        out,
        [ReceiverAction::Send {
            to: 0,
            message: complete
        }]
    );
    assert_eq!(room.poll(), PollState::Success);
}

#[test]
fn s3_an_aux_slot_of_another_room_fails_the_room() {
    let mut room = open(true);
    let pages = chunk(0, 1..4);
    let aux = RoomChunk {
        id: 1,
        body: ChunkBody::Aux,
        checksum: Checksum(9),
    };
    let root = RoomRoot::of(TAG, [&pages, &aux].into_iter());
    take(
        &mut room,
        ToReceiver::Chunk {
            tag: TAG,
            chunk: pages,
        },
    );
    take(
        &mut room,
        ToReceiver::Chunk {
            tag: TAG,
            chunk: aux,
        },
    );
    take(
        &mut room,
        ToReceiver::Done {
            tag: TAG,
            chunks: 2,
            root,
        },
    );
    let mut out = Vec::new();
    room.handle(at(2), ReceiverEvent::Fenced, &mut out);
    out.clear();
    let (is_equal, is_own_room) = (true, false);
    let verified = ReceiverEvent::Verified {
        is_equal,
        is_own_room,
    };
    room.handle(at(3), verified, &mut out);
    assert_eq!(failed_with(&out), Some(Code::ChecksumMismatch));
    assert!(out.contains(&ReceiverAction::ReleasePages));
    assert_eq!(room.poll(), PollState::Failed);
}

#[test]
fn chunks_that_make_no_sense_fail_the_room() {
    let outside = [chunk(0, 0..2), chunk(0, 3..5), chunk(u32::MAX, 1..2)];
    for chunk in outside {
        let mut room = open(false);
        let out = take(&mut room, ToReceiver::Chunk { tag: TAG, chunk });
        assert_eq!(failed_with(&out), Some(Code::Malformed));
    }
    // A page that comes in two chunks, a chunk that changes, and metadata that the receiver did not ask for.
    let aux = RoomChunk {
        body: ChunkBody::Aux,
        ..chunk(1, 1..2)
    };
    for second in [chunk(1, 2..4), chunk(0, 1..2), aux] {
        let mut room = open(false);
        let message = |chunk| ToReceiver::Chunk { tag: TAG, chunk };
        assert!(take(&mut room, message(chunk(0, 1..3))).is_empty());
        assert!(
            take(&mut room, message(chunk(0, 1..3))).is_empty(),
            "a repeated message"
        );
        let out = take(&mut room, message(second));
        assert_eq!(failed_with(&out), Some(Code::Malformed));
    }
}

#[test]
fn a_root_that_differs_fails_the_room() {
    let mut room = open(false);
    let all = chunk(0, 1..4);
    take(
        &mut room,
        ToReceiver::Chunk {
            tag: TAG,
            chunk: all,
        },
    );
    let root = RoomRoot([0; 32]);
    let out = take(
        &mut room,
        ToReceiver::Done {
            tag: TAG,
            chunks: 1,
            root,
        },
    );
    assert_eq!(failed_with(&out), Some(Code::ChecksumMismatch));
}

#[test]
fn aborted_follows_the_fence() {
    let mut room = open(false);
    let code = Code::Draining;
    let out = take(&mut room, ToReceiver::Abort { tag: TAG, code });
    let aborted = ReceiverAction::Send {
        to: 0,
        message: ToSender::Aborted { tag: TAG },
    };
    assert!(out.contains(&ReceiverAction::CloseRoom) && !out.contains(&aborted));
    assert_eq!((room.poll(), room.holds_pages()), (PollState::Failed, true));
    let mut out = Vec::new();
    room.handle(at(900_000), ReceiverEvent::Tick, &mut out);
    assert!(
        room.holds_pages(),
        "no deadline frees pages that may be written"
    );
    out.clear();
    room.handle(at(900_001), ReceiverEvent::Fenced, &mut out);
    assert_eq!(out, [ReceiverAction::ReleasePages, aborted]);
}

#[test]
fn a_dead_sender_is_known_within_the_grace_and_a_new_life_at_once() {
    let mut room = open(false);
    let mut out = Vec::new();
    room.handle(at(100), ReceiverEvent::LinkBroken { from: 0 }, &mut out);
    assert_eq!(room.next_wake(), Some(at(700)));
    room.handle(at(700), ReceiverEvent::Tick, &mut out);
    assert_eq!(failed_with(&out), Some(Code::Unreachable));
    let mut other = open(false);
    out.clear();
    let session = Incarnation(99);
    other.handle(
        at(100),
        ReceiverEvent::LinkUp { from: 0, session },
        &mut out,
    );
    assert_eq!(out, [ReceiverAction::CloseRoom], "nobody is left to tell");
    assert_eq!(other.poll(), PollState::Failed);
}

#[test]
fn g18_decode_may_ask_before_prefill_knows_the_room() {
    let mut desk = SenderDesk::new(DeskOptions::default());
    let mut out = Vec::new();
    assert_eq!(
        desk.take(at(0), D, ToSender::Offer(offer()), &mut out),
        None
    );
    assert!(out.is_empty(), "prefill waits");
    let asked = |now| desk.asked(now).collect::<Vec<_>>();
    assert_eq!(asked(at(5)), [(TAG.room, D)]);
    assert!(asked(at(30_000)).is_empty(), "not repeated for 30 s");
    desk.open(at(5), sender_plan(), &mut out).unwrap();
    let accept = ToReceiver::Accept { tag: TAG };
    assert_eq!(
        out,
        [SenderAction::Send {
            to: 0,
            message: accept
        }]
    );
    assert_eq!(
        desk.open(at(5), sender_plan(), &mut out),
        Err(Code::InProgress)
    );
}

#[test]
fn an_offer_that_was_aborted_revives_nothing() {
    let mut desk = SenderDesk::new(DeskOptions::default());
    let (mut out, code) = (Vec::new(), Code::Draining);
    let abort = ToSender::Abort { tag: TAG, code };
    let aborted = Some(ToReceiver::Aborted { tag: TAG });
    assert!(!desk.has_ended(D, TAG));
    assert_eq!(desk.take(at(0), D, abort, &mut out), aborted);
    assert!(desk.has_ended(D, TAG) && !desk.has_ended(P, TAG));
    // The offer was sent before the abort, and arrives after it.
    let late = desk.take(at(1), D, ToSender::Offer(offer()), &mut out);
    assert_eq!(late, Some(ToReceiver::Refuse { tag: TAG, code }));
    desk.open(at(5), sender_plan(), &mut out).unwrap();
    assert!(out.is_empty(), "nothing is sent or written");
}

#[test]
fn early_offers_are_bounded_and_expire() {
    let options = DeskOptions {
        early_offers: 1,
        ..DeskOptions::default()
    };
    let mut desk = SenderDesk::new(options);
    let mut out = Vec::new();
    let of = |room| {
        let tag = RoomTag {
            room: RoomId(room),
            ..TAG
        };
        ToSender::Offer(RoomOffer { tag, ..offer() })
    };
    assert_eq!(desk.take(at(0), D, of(7), &mut out), None);
    let busy = desk.take(at(0), D, of(8), &mut out);
    assert!(matches!(busy, Some(ToReceiver::Busy { .. })));
    assert_eq!(desk.take(at(30_001), D, of(8), &mut out), None);
}

/// Decode may name a request long after prefill gave it up.
#[test]
fn a_room_that_was_given_up_is_remembered_as_long_as_it_would_have_waited() {
    let code = Code::Draining;
    let refused = Some(ToReceiver::Refuse { tag: TAG, code });
    for (asked_at, answer) in [(100_000, refused), (300_002, None)] {
        let mut out = Vec::new();
        let mut desk = SenderDesk::new(DeskOptions::default());
        let limits = RoomLimits::default().with_patience(Some(Duration::from_secs(300)));
        let plan = RoomSenderPlan {
            limits,
            deadline: at(600_000),
            ..sender_plan()
        };
        desk.open(at(0), plan, &mut out).unwrap();
        desk.handle(at(1), TAG.room, SenderEvent::Abort { code }, &mut out);
        let got = desk.take(at(asked_at), D, ToSender::Offer(offer()), &mut out);
        assert_eq!(got, answer, "at {asked_at} ms");
    }
}

#[test]
fn page_lists_that_do_not_fit_the_request_are_refused() {
    let short = RoomOffer {
        pages: 2,
        ..offer()
    };
    let beyond = RoomOffer {
        held: 5,
        pages: 0,
        ..offer()
    };
    let stranger = RoomOffer {
        receiver: 1,
        ..offer()
    };
    for odd in [short, beyond, stranger] {
        let mut desk = SenderDesk::new(DeskOptions::default());
        let mut out = Vec::new();
        desk.open(at(0), sender_plan(), &mut out).unwrap();
        let answer = desk.take(at(0), D, ToSender::Offer(odd), &mut out);
        let code = Code::OutOfRange;
        let message = ToReceiver::Refuse { tag: TAG, code };
        let is = |action: &SenderAction| matches!(action, SenderAction::Send { message: sent, .. } if *sent == message);
        assert!(answer == Some(message.clone()) || out.iter().any(is));
    }
}

/// Decode without an answer would wait for its whole patience.
#[test]
fn an_early_offer_that_does_not_fit_is_refused_when_its_room_opens() {
    let short = RoomOffer {
        pages: 2,
        ..offer()
    };
    let beyond = RoomOffer {
        held: 5,
        pages: 0,
        ..offer()
    };
    let code = Code::OutOfRange;
    let refuse = ToReceiver::Refuse { tag: TAG, code };
    for odd in [short.clone(), beyond] {
        let mut desk = SenderDesk::new(DeskOptions::default());
        let mut out = Vec::new();
        let answer = desk.take(at(0), D, ToSender::Offer(odd), &mut out);
        assert_eq!(answer, None, "nobody knows the room");
        let answers = desk.open(at(5), sender_plan(), &mut out).unwrap();
        assert_eq!(answers, [(D, refuse.clone())]);
        assert_eq!(out, [SenderAction::ReleasePages]);
        assert_eq!(desk.take_ended(), [(TAG.room, RoomOutcome::Failed(code))]);
    }
    // The other receiver's offer comes later.
    let mut desk = SenderDesk::new(DeskOptions::default());
    let mut out = Vec::new();
    desk.take(at(0), D, ToSender::Offer(short), &mut out);
    let plan = RoomSenderPlan {
        receivers: 2,
        ..sender_plan()
    };
    assert_eq!(desk.open(at(5), plan, &mut out).unwrap().len(), 1);
    let other = RoomOffer {
        receiver: 1,
        ..offer()
    };
    let answer = desk.take(at(6), P, ToSender::Offer(other), &mut out);
    assert_eq!(answer, Some(refuse.clone()));
    // A receiver that the room does not have ends no room.
    let mut desk = SenderDesk::new(DeskOptions::default());
    let mut out = Vec::new();
    let stranger = RoomOffer {
        receiver: 1,
        ..offer()
    };
    desk.take(at(0), D, ToSender::Offer(stranger), &mut out);
    let answers = desk.open(at(5), sender_plan(), &mut out).unwrap();
    assert_eq!(answers, [(D, refuse)]);
    let waits = desk.room(TAG.room).map(RoomSender::poll);
    assert_eq!(waits, Some(PollState::Bootstrapping));
}

#[test]
fn tombstones_are_bounded_and_still_refuse_older_generations() {
    let mut tombstones = Tombstones::new(2);
    let tag = |generation| RoomTag {
        generation: RoomGeneration(generation),
        ..TAG
    };
    for generation in 1..=4 {
        tombstones.bury(D, tag(generation), RoomOutcome::Success);
    }
    assert_eq!(tombstones.outcome(D, tag(1)), None, "forgotten by name");
    for generation in 1..=4 {
        assert!(!tombstones.admits(D, tag(generation)));
    }
    assert!(tombstones.admits(D, tag(5)) && tombstones.admits(P, tag(1)));
}

/// A process may end rooms at any rate. It must not make the desk refuse a slower room of another process.
#[test]
fn the_tombstones_of_one_receiver_push_out_none_of_a_receiver_that_has_few() {
    let mut tombstones = Tombstones::new(4);
    let tag = |room, generation| RoomTag {
        room: RoomId(room),
        generation: RoomGeneration(generation),
    };
    tombstones.bury(P, tag(1, 5), RoomOutcome::Success);
    for generation in 1..100 {
        tombstones.bury(D, tag(generation, generation), RoomOutcome::Success);
    }
    let known = tombstones.outcome(P, tag(1, 5));
    assert_eq!(known, Some(RoomOutcome::Success));
    assert!(tombstones.admits(P, tag(2, 4)), "it is only slow");
    assert_eq!(tombstones.outcome(D, tag(96, 96)), None, "four are kept");
    assert!(tombstones.outcome(D, tag(97, 97)).is_some());
    // The first receiver has less than its share, and may add a tombstone.
    tombstones.bury(P, tag(3, 6), RoomOutcome::Success);
    assert!(tombstones.outcome(P, tag(1, 5)).is_some());
    assert_eq!(tombstones.outcome(D, tag(97, 97)), None);
}

#[test]
fn an_attempt_below_one_of_its_room_that_ended_is_stale() {
    let mut tombstones = Tombstones::new(10);
    let tag = |room, generation| RoomTag {
        room: RoomId(room),
        generation: RoomGeneration(generation),
    };
    tombstones.bury(D, tag(1, 5), RoomOutcome::Success);
    for (room, generation, is_admitted) in [(1, 4, false), (1, 5, false), (1, 6, true)] {
        assert_eq!(tombstones.admits(D, tag(room, generation)), is_admitted);
    }
    // A lower attempt at another room, or of another receiver, is admitted.
    assert!(tombstones.admits(D, tag(2, 4)) && tombstones.admits(P, tag(1, 4)));
}

/// A Lacks that names a chunk several times makes the sender send the chunk once.
#[test]
fn a_chunk_that_is_named_often_is_sent_again_once() {
    let mut room = RoomSender::open(at(0), sender_plan());
    let mut out = Vec::new();
    let mut happens = |event| {
        out.clear();
        room.handle(at(1), event, &mut out);
        out.clone()
    };
    let says = |message| SenderEvent::Message {
        from: 0,
        session: D,
        message,
    };
    happens(says(ToSender::Offer(offer())));
    let actions = happens(SenderEvent::Produced(rectangle()));
    let written = actions.iter().find_map(|action| match action {
        SenderAction::Write { id, .. } => Some(*id),
        _ => None,
    });
    let id = written.unwrap();
    happens(SenderEvent::Written {
        to: 0,
        id,
        outcome: Ok(Checksum(1)),
    });
    let lacks = ToSender::Lacks {
        tag: TAG,
        chunks: vec![id; 1 << 20],
    };
    let again = happens(says(lacks));
    let sent = again.iter().filter(|action| {
        let SenderAction::Send { message, .. } = action else {
            return false;
        };
        matches!(message, ToReceiver::Chunk { .. })
    });
    assert_eq!(sent.count(), 1, "{} actions", again.len());
}

#[test]
fn a_rectangle_splits_into_layers_and_then_into_pages() {
    let split = |pages, layers, cells| {
        let whole = PageRectangle { pages, layers };
        let pieces = whole.split(cells);
        assert!(pieces.iter().all(|piece| piece.cells() <= cells.max(1)));
        let sum: u64 = pieces.iter().map(PageRectangle::cells).sum();
        assert_eq!(sum, whole.cells());
        let pieces = pieces.into_iter();
        pieces
            .map(|piece| (piece.pages, piece.layers))
            .collect::<Vec<_>>()
    };
    assert_eq!(split(3..7, 1..3, 8), [(3..7, 1..3)]);
    assert_eq!(split(3..7, 1..3, 7), [(3..7, 1..2), (3..7, 2..3)]);
    assert_eq!(
        split(3..7, 1..3, 3),
        [(3..6, 1..2), (6..7, 1..2), (3..6, 2..3), (6..7, 2..3)]
    );
    assert_eq!(
        split(0..2, 0..5, 4),
        [(0..2, 0..2), (0..2, 2..4), (0..2, 4..5)]
    );
    assert_eq!(split(0..2, 0..1, 0).len(), 2);
    assert_eq!(split(0..1 << 30, 0..2, u64::MAX).len(), 1);
}

/// The end of a write starts the chunks that wait, not the clock.
#[test]
fn so_many_cells_go_at_a_time_and_the_end_of_a_write_starts_the_next() {
    let plan = RoomSenderPlan {
        chunk_cells: 2,
        cells_under_way: 4,
        ..sender_plan()
    };
    let (mut sender, mut out) = (RoomSender::open(at(0), plan), Vec::new());
    let message = ToSender::Offer(offer());
    let offered = SenderEvent::Message {
        from: 0,
        session: D,
        message,
    };
    sender.handle(at(1), offered, &mut out);
    let started = |out: &mut Vec<SenderAction>| {
        let ids = out.drain(..).filter_map(|action| match action {
            SenderAction::Write { id, .. } => Some(id),
            _ => None,
        });
        ids.collect::<Vec<u32>>()
    };
    // Three pages of each of two layers: chunks of 2, 1, 2 and 1 cells.
    sender.handle(at(2), SenderEvent::Produced(rectangle()), &mut out);
    assert_eq!(started(&mut out), [0, 1, 3]);
    assert!(sender.next_wake() > Some(at(2)));
    sender.handle(at(3), SenderEvent::Tick, &mut out);
    assert!(started(&mut out).is_empty());
    let written = |id, outcome| SenderEvent::Written { to: 0, id, outcome };
    // A write that failed starts again later. Its room is too small for the chunk that waits.
    sender.handle(at(4), written(1, Err(Code::Unreachable)), &mut out);
    let again = at(4) + RoomLimits::default().retry;
    assert_eq!(sender.next_wake(), Some(again));
    sender.handle(at(5), written(0, Ok(Checksum(1))), &mut out);
    assert_eq!(started(&mut out), [2]);
    sender.handle(again, SenderEvent::Tick, &mut out);
    assert_eq!(started(&mut out), [1]);
}
