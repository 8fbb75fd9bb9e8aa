//! Rooms that succeed: every byte of every rank is in its right place.

use crate::ranks::{Group, PAGES, Rank, soon, succeeded};
use kvpool_handoff::plan::PageLayout;
use kvpool_handoff::registration::{RankDescription, StateRegion};
use kvpool_handoff::room::{PollState, RoomId, RoomLimits};
use kvpool_handoff::session::{
    HandoffError, HandoffOptions, RankMemory, RankMemoryError, Receiving, RequestTimes, Sending,
};
use kvpool_transport::Region;
use kvpool_types::{Code, Length, Offset};
use std::time::{Duration, Instant};

struct Pair {
    prefill: Vec<Rank>,
    decode: Vec<Rank>,
    of_prefill: Group,
    of_decode: Group,
}

fn ranks(group: &Group) -> Vec<Rank> {
    let stages = u32::try_from(group.stages.len()).unwrap();
    let all = (0..stages).flat_map(|stage| (0..group.tensor).map(move |rank| (stage, rank)));
    all.map(|(stage, rank)| Rank::start(group, stage, rank))
        .collect()
}

impl Pair {
    fn start(of_prefill: Group, of_decode: Group) -> Self {
        Self {
            prefill: ranks(&of_prefill),
            decode: ranks(&of_decode),
            of_prefill,
            of_decode,
        }
    }

    fn send(&self, room: u64, pages: &[u32]) -> Vec<Sending> {
        let send = |rank: &Rank| {
            rank.fill(pages);
            let ranks = self.of_decode.tensor;
            rank.session
                .send(RoomId(room), pages.to_vec(), ranks, soon())
                .unwrap()
        };
        self.prefill.iter().map(send).collect()
    }

    fn receive(&self, room: u64, held: u32, pages: &[u32]) -> Vec<Receiving> {
        let addresses: Vec<String> = self.prefill.iter().map(Rank::address).collect();
        let receive = |rank: &Rank| {
            let prefill = (self.of_prefill.tensor, &self.of_prefill.layers());
            let of_room = (held, pages.to_vec());
            rank.session
                .receive(RoomId(room), of_room, &addresses, prefill, true, soon())
                .unwrap()
        };
        self.decode.iter().map(receive).collect()
    }
}

/// Sends the pages of a request in chunks, and the layers of each chunk one by one.
fn produce(sending: &Sending, chunk: u32) {
    let pages = sending.pages();
    for first in (0..pages).step_by(chunk as usize) {
        for layer in sending.layers() {
            let end = (first + chunk).min(pages);
            sending.produced(first..end, layer..layer + 1).unwrap();
        }
    }
    sending.finish(b"metadata of the request".to_vec()).unwrap();
}

/// Rows C9, S3, S6, S7, S13: 12 pairs of groups, with decode first and with prefill first.
#[test]
fn every_byte_of_every_layout_arrives() {
    use PageLayout::{HeadMajor, TokenMajor};
    let of = Group::of;
    let pairs = [
        (of(1, &[2], TokenMajor), of(1, &[2], TokenMajor)),
        (of(2, &[2], TokenMajor), of(1, &[2], TokenMajor)),
        (of(1, &[2], TokenMajor), of(2, &[2], TokenMajor)),
        (of(4, &[2], TokenMajor), of(2, &[2], TokenMajor)),
        (of(2, &[2], HeadMajor), of(4, &[2], HeadMajor)),
        (of(2, &[1, 2], TokenMajor), of(1, &[3], TokenMajor)),
    ];
    let from = [7, 8, 9, 3, 39, 0, 20];
    let to = [30, 31, 5, 6, 1];
    for (room, (prefill, decode)) in (1..).zip(pairs) {
        let pair = Pair::start(prefill, decode);
        let both = format!("{:?} to {:?}", pair.of_prefill, pair.of_decode);
        let decode_first = room % 2 == 0;
        let early = decode_first.then(|| pair.receive(room, 2, &to));
        let sending = pair.send(room, &from);
        let receiving = early.unwrap_or_else(|| pair.receive(room, 2, &to));
        for each in &sending {
            produce(each, 3);
        }
        for (rank, each) in pair.decode.iter().zip(&receiving) {
            let state = each.wait(soon());
            succeeded(&state);
            rank.check(2, &to)
                .unwrap_or_else(|what| panic!("{both}: {what}"));
            let aux = state.aux.unwrap();
            assert!(aux.starts_with(b"metadata of the request"));
        }
        for (rank, each) in pair.prefill.iter().zip(&sending) {
            succeeded(&each.wait(soon()));
            assert_eq!(rank.session.pinned(), 0);
        }
    }
}

#[test]
fn pages_that_are_not_of_the_request_stay_as_they_were() {
    let group = Group::of(1, &[2], PageLayout::TokenMajor);
    let pair = Pair::start(group.clone(), group);
    let to: Vec<u32> = (10..20).collect();
    let all: Vec<u32> = (0..PAGES).collect();
    let [decode] = pair.decode.as_slice() else {
        panic!("one rank")
    };
    decode.set(&all, 0xa5);
    let receiving = pair.receive(1, 0, &to);
    for sending in pair.send(1, &(0..10).collect::<Vec<_>>()) {
        produce(&sending, 10);
        succeeded(&sending.wait(soon()));
    }
    succeeded(&receiving[0].wait(soon()));
    decode.check(0, &to).unwrap();
    decode.set(&to, 0xa5);
    let is_whole = decode.image().iter().flatten().all(|byte| *byte == 0xa5);
    assert!(is_whole, "another page was written");
}

/// Decode holds all pages of the request, so only the metadata moves.
#[test]
fn a_request_that_is_held_whole_moves_metadata_alone() {
    let group = Group::of(1, &[1], PageLayout::HeadMajor);
    let pair = Pair::start(group.clone(), group);
    let receiving = pair.receive(1, 4, &[]);
    let sending = pair.send(1, &[1, 2, 3, 4]);
    produce(&sending[0], 4);
    let state = receiving[0].wait(soon());
    succeeded(&state);
    assert!(state.aux.unwrap().starts_with(b"metadata"));
    succeeded(&sending[0].wait(soon()));
}

/// Row S1: a caller sees the polls 1, 2, 3 and 4, in this order.
#[test]
fn s1_polls_rise() {
    let group = Group::of(1, &[1], PageLayout::TokenMajor);
    let pair = Pair::start(group.clone(), group);
    let receiving = pair.receive(1, 0, &[5, 6]);
    assert_eq!(receiving[0].state().poll, PollState::Bootstrapping);
    let sending = pair.send(1, &[1, 2]);
    let reaches = |poll| {
        let until = soon();
        while receiving[0].state().poll != poll {
            assert!(Instant::now() < until, "{:?}", receiving[0].state());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    reaches(PollState::WaitingForInput);
    sending[0].produced(0..1, 0..1).unwrap();
    reaches(PollState::Transferring);
    sending[0].produced(1..2, 0..1).unwrap();
    sending[0].finish(Vec::new()).unwrap();
    reaches(PollState::Success);
}

#[test]
fn bad_calls_are_refused_and_change_nothing() {
    let group = Group::of(2, &[1, 1], PageLayout::TokenMajor);
    let rank = Rank::start(&group, 0, 0);
    let here = rank.address();
    let send = |pages: Vec<u32>, ranks| rank.session.send(RoomId(1), pages, ranks, soon()).err();
    assert_eq!(send(vec![PAGES], 2), Some(HandoffError::NoSuchPage));
    assert!(matches!(send(vec![0], 3), Some(HandoffError::Plan(_))));
    assert_eq!(rank.session.pinned(), 0);
    let receive = |pages: Vec<u32>, addresses: &[String], sources| {
        let prefill = (sources, &group.layers());
        rank.session
            .receive(RoomId(1), (0, pages), addresses, prefill, false, soon())
            .err()
    };
    let all = vec![here.clone(), here.clone(), here.clone(), here];
    assert_eq!(
        receive(vec![PAGES], &all, 2),
        Some(HandoffError::NoSuchPage)
    );
    assert!(matches!(
        receive(vec![0], &all[..0], 2),
        Some(HandoffError::Plan(_))
    ));
    assert!(matches!(
        receive(vec![0], &all, 3),
        Some(HandoffError::Plan(_))
    ));
    let sending = rank.session.send(RoomId(1), vec![1, 2], 2, soon()).unwrap();
    assert_eq!(send(vec![3], 2), Some(HandoffError::Repeated(1)));
    assert!(matches!(
        sending.produced(0..3, 0..1),
        Err(HandoffError::OutOfRange(..))
    ));
    assert!(matches!(
        sending.produced(0..1, 0..2),
        Err(HandoffError::OutOfRange(..))
    ));
    let unfinished = HandoffError::NotComputed { named: 0, all: 2 };
    assert_eq!(sending.finish(Vec::new()), Err(unfinished));
    sending.produced(0..2, 0..1).unwrap();
    assert!(matches!(
        sending.finish(vec![0; 1 << 20]),
        Err(HandoffError::LongAux(..))
    ));
    assert!(rank.session.close());
    assert_eq!(
        send(vec![3], 2),
        Some(HandoffError::Repeated(1))
            .filter(|_| false)
            .or(Some(HandoffError::Closed))
    );
    let state = sending.state();
    assert_eq!(
        (state.poll, state.failure),
        (PollState::Failed, Some(Code::Draining))
    );
    assert!(state.is_released);
}

/// Rows P3, P4: decode asks for offered pages later than a room would wait.
#[test]
fn p4_an_offer_waits_for_decode_and_its_pins_end_with_done() {
    let group = Group::of(2, &[1], PageLayout::TokenMajor);
    let limits = RoomLimits {
        bootstrapping: Duration::from_millis(100),
        ..RoomLimits::default()
    };
    let start = |rank| {
        let options = HandoffOptions {
            limits,
            ..HandoffOptions::default()
        };
        Rank::start_with(&group, 0, rank, options)
    };
    let (prefill, decode) = (
        [start(0), start(1)],
        Rank::start(&Group::of(1, &[1], PageLayout::TokenMajor), 0, 0),
    );
    let offered = prefill.each_ref().map(|rank| {
        rank.fill(&[4, 5, 6]);
        rank.session
            .offer(RoomId(1), vec![4, 5, 6], 1, soon())
            .unwrap()
    });
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(prefill[0].session.pinned(), 3);
    let addresses = prefill.each_ref().map(Rank::address);
    let of_room = (1, vec![8, 9]);
    let layers = group.layers();
    let receiving =
        decode
            .session
            .receive(RoomId(1), of_room, &addresses, (2, &layers), false, soon());
    succeeded(&receiving.unwrap().wait(soon()));
    decode.check(1, &[8, 9]).unwrap();
    for (rank, offered) in prefill.iter().zip(&offered) {
        succeeded(&offered.wait(soon()));
        assert_eq!(rank.session.pinned(), 0);
    }
    // Row P7: an offer that decode never asks for ends at its deadline.
    let deadline = Instant::now() + Duration::from_millis(200);
    let forgotten = prefill[0]
        .session
        .offer(RoomId(2), vec![1], 1, deadline)
        .unwrap();
    assert_eq!(forgotten.wait(soon()).failure, Some(Code::DeadlineExceeded));
    assert_eq!(prefill[0].session.pinned(), 0);
}

/// With patience, an end waits for the other end's room as long as its caller allows, in both orders.
#[test]
fn a_patient_end_waits_for_the_other_beyond_the_limit_of_a_room() {
    let group = Group::of(1, &[1], PageLayout::TokenMajor);
    let start = || {
        let limits = RoomLimits {
            bootstrapping: Duration::from_millis(300),
            ..RoomLimits::default()
        };
        let options = HandoffOptions {
            limits,
            ..HandoffOptions::default()
        };
        Rank::start_with(&group, 0, 0, options)
    };
    let (prefill, decode) = (start(), start());
    prefill.fill(&[4, 5, 6]);
    let times = || RequestTimes::patient(Instant::now() + Duration::from_secs(5));
    let layers = group.layers();
    let send = |room| {
        let sending = prefill.session.send(room, vec![4, 5, 6], 1, times());
        sending.unwrap()
    };
    let receive = |room, times: RequestTimes| {
        let (of_room, from) = ((0, vec![7, 8, 9]), [prefill.address()]);
        let receiving = (decode.session).receive(room, of_room, &from, (1, &layers), true, times);
        receiving.unwrap()
    };
    for (room, decode_first) in [(RoomId(1), true), (RoomId(2), false)] {
        let late = || std::thread::sleep(Duration::from_secs(1));
        let (sending, receiving) = if decode_first {
            let receiving = receive(room, times());
            late();
            (send(room), receiving)
        } else {
            let sending = send(room);
            late();
            (sending, receive(room, times()))
        };
        produce(&sending, 3);
        succeeded(&receiving.wait(soon()));
        succeeded(&sending.wait(soon()));
        decode.check(0, &[7, 8, 9]).unwrap();
        decode.set(&[7, 8, 9], 0);
    }
    // Without patience the limit of a room counts. A deadline also ends an end with patience.
    let begun = Instant::now();
    let limited = receive(RoomId(3), soon().into());
    assert_eq!(limited.wait(soon()).failure, Some(Code::DeadlineExceeded));
    let short = RequestTimes::patient(Instant::now() + Duration::from_millis(400));
    let ended = receive(RoomId(4), short).wait(soon());
    assert_eq!(ended.failure, Some(Code::DeadlineExceeded));
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn memory_that_does_not_fit_its_description_is_refused() {
    let rank = Rank::start(&Group::of(1, &[2], PageLayout::TokenMajor), 0, 0);
    let good = rank.session.memory().description().clone();
    let memory = Region::allocate(Length(1 << 20)).whole();
    let bytes = |state: &StateRegion| state.shape.page_bytes(1).unwrap() * u64::from(state.pages);
    let refused = |change: &dyn Fn(&mut RankDescription), shared: bool| {
        let mut odd = good.clone();
        change(&mut odd);
        let own = |state: &StateRegion| match shared {
            true => memory.slice(Offset(0), Length(bytes(state))).unwrap(),
            false => Region::allocate(Length(bytes(state))).whole(),
        };
        let memories = odd.states.iter().map(own).collect();
        RankMemory::new(odd, memories).err()
    };
    assert_eq!(refused(&|_| {}, false), None);
    let overlap = refused(&|_| {}, true);
    assert!(matches!(overlap, Some(RankMemoryError::Overlap { .. })));
    let other = refused(&|odd| odd.states[0].layer = 2, false);
    assert!(matches!(other, Some(RankMemoryError::OtherLayer { .. })));
    let empty = refused(&|odd| odd.page_tokens = 0, false);
    assert!(matches!(empty, Some(RankMemoryError::Unfit { .. })));
    let twice = refused(
        &|odd| odd.states[1].name = odd.states[0].name.clone(),
        false,
    );
    assert!(matches!(twice, Some(RankMemoryError::Twice { .. })));
}

/// Hundreds of rooms at once, in both directions of two processes.
#[test]
fn many_rooms_at_once() {
    let group = Group::of(1, &[2], PageLayout::TokenMajor);
    let pair = Pair::start(group.clone(), group);
    let rooms = 1..=u64::from(PAGES / 2);
    let mut all = Vec::new();
    for room in rooms {
        let first = u32::try_from(room - 1).unwrap() * 2;
        let pages = [first, first + 1];
        let receiving = pair.receive(room, 0, &pages);
        let sending = pair.send(room, &pages);
        all.push((pages, receiving, sending));
    }
    for (_, _, sending) in &all {
        produce(&sending[0], 1);
    }
    for (pages, receiving, sending) in &all {
        succeeded(&receiving[0].wait(soon()));
        succeeded(&sending[0].wait(soon()));
        pair.decode[0].check(0, pages).unwrap();
    }
    assert_eq!(pair.prefill[0].session.pinned(), 0);
}
