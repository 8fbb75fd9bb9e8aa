//! Rows P5, P6, P8 and P10 over real sessions: offers that wait for pins, and receivers that decline.

use crate::child::{self, Process};
use crate::faults::{reaches, receive};
use crate::ranks::{Group, Rank, soon, succeeded};
use kvpool_handoff::plan::PageLayout;
use kvpool_handoff::room::{PollState, RoomId};
use kvpool_handoff::session::{
    DeclineReason, HandoffOptions, PinLimits, Receiving, Sending, TransferState,
};
use kvpool_types::Code;
use std::time::{Duration, Instant};

fn group(ranks: u32) -> Group {
    Group::of(ranks, &[1], PageLayout::TokenMajor)
}

fn decode() -> Rank {
    Rank::start(&group(1), 0, 0)
}

/// Offers pages 0, 1, ... of prefill, until `deadline`.
fn offer_until(prefill: &Rank, room: u64, pages: u32, deadline: Instant) -> Sending {
    let pages: Vec<u32> = (0..pages).collect();
    prefill.fill(&pages);
    let offered = prefill.session.offer(RoomId(room), pages, 1, deadline);
    offered.unwrap()
}

fn offer(prefill: &Rank, room: u64, pages: u32) -> Sending {
    offer_until(prefill, room, pages, soon())
}

fn pull(decode: &Rank, prefill: &Rank, room: u64, pages: &[u32]) -> Receiving {
    let (from, layers) = ([prefill.address()], group(1).layers());
    let of_room = (0, pages.to_vec());
    decode
        .session
        .receive(RoomId(room), of_room, &from, (1, &layers), false, soon())
        .unwrap()
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let until = soon();
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn failed_with(state: &TransferState, code: Code) {
    assert_eq!(
        (state.poll, state.failure),
        (PollState::Failed, Some(code)),
        "{state:?}"
    );
    assert!(state.is_released);
}

/// Row P5 with the documents' numbers: 100 pages and a reserve of 2 %.
#[test]
fn p5_with_98_of_100_pages_pinned_one_offer_goes_and_the_next_waits() {
    let pins = PinLimits {
        pages: Some(100),
        ..PinLimits::default()
    };
    assert_eq!(pins.reserve_percent, 2);
    let options = HandoffOptions {
        pins,
        ..HandoffOptions::default()
    };
    let prefill = Rank::start_with(&group(1), 0, 0, options);
    let decode = decode();
    let are = |pinned, waiting| {
        let session = &prefill.session;
        (session.pinned(), session.waiting_offers()) == (pinned, waiting)
    };
    let offers: Vec<Sending> = (1..=49).map(|room| offer(&prefill, room, 2)).collect();
    eventually("98 pages are pinned", || are(98, 0));
    let last = offer(&prefill, 50, 1);
    eventually("99 pages are pinned", || are(99, 0));
    let waits = offer(&prefill, 51, 1);
    eventually("an offer waits", || are(99, 1));
    let asks = pull(&decode, &prefill, 51, &[30]);
    std::thread::sleep(Duration::from_millis(800));
    assert_eq!(waits.state().poll, PollState::Bootstrapping);
    assert_eq!(asks.state().poll, PollState::Bootstrapping);
    assert!(are(99, 1));
    // Decode has two pages now, so their pins end and the waiting offer opens its room.
    succeeded(&pull(&decode, &prefill, 1, &[8, 9]).wait(soon()));
    succeeded(&asks.wait(soon()));
    decode.check(0, &[8, 9]).unwrap();
    decode.check(0, &[30]).unwrap();
    succeeded(&waits.wait(soon()));
    succeeded(&offers[0].wait(soon()));
    eventually("97 pages are pinned", || are(97, 0));
    // An offer that waits until its deadline fails at both ends. An offer that is given up ends at once.
    let more = offer(&prefill, 52, 2);
    eventually("99 pages are pinned", || are(99, 0));
    let deadline = Instant::now() + Duration::from_secs(3);
    let late = offer_until(&prefill, 53, 1, deadline);
    let dropped = offer(&prefill, 54, 1);
    eventually("two offers wait", || are(99, 2));
    let asks = pull(&decode, &prefill, 53, &[31]);
    dropped.abort();
    failed_with(&dropped.wait(soon()), Code::Draining);
    failed_with(&late.wait(soon()), Code::Full);
    failed_with(&asks.wait(soon()), Code::Full);
    assert!(are(99, 0));
    // Offers that end without decode free their pins too.
    drop((offers, last, more));
    eventually("no page is pinned", || are(0, 0));
    assert!(prefill.session.close());
}

/// A rank on which one offer of two pages holds all pins, so that the next offer waits.
fn with_two_pins(group: &Group) -> Rank {
    with_two_pins_and(group, PinLimits::default().back_off)
}

fn with_two_pins_and(group: &Group, back_off: Duration) -> Rank {
    let pins = PinLimits {
        pages: Some(2),
        back_off,
        ..PinLimits::default()
    };
    let options = HandoffOptions {
        pins,
        ..HandoffOptions::default()
    };
    Rank::start_with(group, 0, 0, options)
}

/// Otherwise its pages would later be pinned for no process, until the offer's deadline.
#[test]
fn an_offer_that_waits_ends_when_its_receiver_gives_up() {
    let (prefill, decode) = (with_two_pins(&group(1)), decode());
    let first = offer(&prefill, 1, 2);
    let waits = offer(&prefill, 2, 1);
    eventually("an offer waits", || prefill.session.waiting_offers() == 1);
    let asks = pull(&decode, &prefill, 2, &[5]);
    asks.abort();
    failed_with(&asks.wait(soon()), Code::Draining);
    failed_with(&waits.wait(soon()), Code::Draining);
    assert_eq!(prefill.session.waiting_offers(), 0);
    // Then comes the next attempt at the same request.
    let again = offer(&prefill, 2, 1);
    eventually("an offer waits", || prefill.session.waiting_offers() == 1);
    let asks = pull(&decode, &prefill, 2, &[5]);
    succeeded(&pull(&decode, &prefill, 1, &[8, 9]).wait(soon()));
    succeeded(&first.wait(soon()));
    succeeded(&asks.wait(soon()));
    succeeded(&again.wait(soon()));
    assert_eq!(prefill.session.pinned(), 0);
}

/// Returns when prefill has all of decode's messages: letters arrive in order.
fn all_is_told(decode: &Rank, prefill: &Rank, unused: u64) {
    let marker = offer(prefill, unused, 1);
    let from = [prefill.address()];
    let declined = (decode.session).decline(RoomId(unused), &from, DeclineReason::NotWanted);
    declined.unwrap();
    failed_with(&marker.wait(soon()), Code::Draining);
}

/// Each process of the group knows the number of the room, and may ask for the room.
#[test]
fn a_process_without_a_place_in_it_ends_no_offer_that_waits() {
    let (prefill, decode, other) = (with_two_pins(&group(1)), decode(), decode());
    let pins = offer(&prefill, 1, 2);
    let waits = offer(&prefill, 2, 1);
    eventually("an offer waits", || prefill.session.waiting_offers() == 1);
    let asks = pull(&decode, &prefill, 2, &[5]);
    all_is_told(&decode, &prefill, 10);
    let from = [prefill.address()];
    for reason in [DeclineReason::NotWanted, DeclineReason::NoPages] {
        other.session.decline(RoomId(2), &from, reason).unwrap();
    }
    let second = pull(&other, &prefill, 2, &[5]);
    second.abort();
    failed_with(&second.wait(soon()), Code::Draining);
    all_is_told(&other, &prefill, 11);
    assert_eq!(prefill.session.waiting_offers(), 1);
    assert_eq!(waits.state().poll, PollState::Bootstrapping);
    succeeded(&pull(&decode, &prefill, 1, &[8, 9]).wait(soon()));
    succeeded(&asks.wait(soon()));
    succeeded(&waits.wait(soon()));
    succeeded(&pins.wait(soon()));
    assert_eq!(prefill.session.pinned(), 0);
}

/// Another process asks for the same place, so the offer continues for that process.
#[test]
fn a_process_that_declined_has_no_place_in_an_offer_that_goes_on() {
    let (prefill, first, second) = (with_two_pins(&group(1)), decode(), decode());
    let pins = offer(&prefill, 1, 2);
    let waits = offer(&prefill, 2, 1);
    eventually("an offer waits", || prefill.session.waiting_offers() == 1);
    let declined = pull(&first, &prefill, 2, &[5]);
    all_is_told(&first, &prefill, 10);
    let asks = pull(&second, &prefill, 2, &[5]);
    all_is_told(&second, &prefill, 11);
    let from = [prefill.address()];
    let said = (first.session).decline(RoomId(2), &from, DeclineReason::NotWanted);
    said.unwrap();
    all_is_told(&first, &prefill, 12);
    assert_eq!(prefill.session.waiting_offers(), 1);
    succeeded(&pull(&second, &prefill, 1, &[8, 9]).wait(soon()));
    succeeded(&asks.wait(soon()));
    succeeded(&waits.wait(soon()));
    succeeded(&pins.wait(soon()));
    assert_eq!(declined.wait(soon()).poll, PollState::Failed);
}

/// Prefill answers the attempt with Busy, so the end of the first offer does not reach the attempt.
#[test]
fn an_offer_that_waits_outlives_the_abort_of_an_attempt_at_an_earlier_one() {
    let prefill = with_two_pins_and(&group(1), Duration::from_secs(600));
    let decode = decode();
    let pins = offer(&prefill, 1, 2);
    let first = offer(&prefill, 2, 1);
    eventually("an offer waits", || prefill.session.waiting_offers() == 1);
    let from = [prefill.address()];
    let declined = (decode.session).decline(RoomId(9), &from, DeclineReason::NoPages);
    declined.unwrap();
    let asks = pull(&decode, &prefill, 2, &[5]);
    all_is_told(&decode, &prefill, 10);
    first.abort();
    failed_with(&first.wait(soon()), Code::Draining);
    let again = offer(&prefill, 2, 1);
    eventually("an offer waits", || prefill.session.waiting_offers() == 1);
    asks.abort();
    failed_with(&asks.wait(soon()), Code::Draining);
    all_is_told(&decode, &prefill, 11);
    assert_eq!(prefill.session.waiting_offers(), 1);
    // An attempt at this offer that is answered with Busy may abort it.
    let asks = pull(&decode, &prefill, 2, &[5]);
    asks.abort();
    failed_with(&again.wait(soon()), Code::Draining);
    drop(pins);
}

/// An offer that waits also ends when decode is lost. Another decode process that asks for the offer keeps it
/// alive. The requests have no pages, since at most one room receives into a page of decode.
fn offers_whose_receivers_are_lost(lose: impl Fn(&mut Process)) {
    let prefill = with_two_pins(&child::group());
    let pins = offer(&prefill, 1, 2);
    let [shared, alone] = [2, 3].map(|room| offer(&prefill, room, 0));
    eventually("two offers wait", || prefill.session.waiting_offers() == 2);
    let mut child = Process::start();
    for room in [2, 3, 4] {
        child.tell(&format!("receive {room} 0 {}", prefill.address()));
    }
    let lives = Rank::start(&child::group(), 0, 0);
    let asks = [2, 5].map(|room| receive(&lives, room, 0, &prefill.address()));
    // Letters arrive in order. So prefill has all requests of a process once it has accepted the last one.
    let markers = [4, 5].map(|room| {
        let marker = prefill.session.send(RoomId(room), vec![], 1, soon());
        marker.unwrap()
    });
    eventually("the last request of the child is accepted", || {
        markers[0].state().poll == PollState::WaitingForInput
    });
    reaches(&asks[1], PollState::WaitingForInput);
    lose(&mut child);
    failed_with(&alone.wait(soon()), Code::Unreachable);
    assert_eq!(shared.state().poll, PollState::Bootstrapping);
    assert_eq!(asks[0].state().poll, PollState::Bootstrapping);
    assert_eq!(prefill.session.waiting_offers(), 1);
    drop(pins);
}

#[test]
fn an_offer_that_waits_ends_when_all_that_asked_for_it_are_killed() {
    offers_whose_receivers_are_lost(Process::kill);
}

/// The connections of a stopped process stay, and nothing answers on them.
#[test]
fn an_offer_that_waits_ends_when_all_that_asked_for_it_are_stopped() {
    offers_whose_receivers_are_lost(|child| child.stop());
}

/// A reserve is a share of the limit. So without a limit no offer waits.
#[test]
fn a_reserve_without_a_limit_lets_no_offer_wait() {
    let pins = PinLimits {
        reserve_percent: 100,
        ..PinLimits::default()
    };
    let options = HandoffOptions {
        pins,
        ..HandoffOptions::default()
    };
    let prefill = Rank::start_with(&group(1), 0, 0, options);
    let offers = [1, 2].map(|room| offer(&prefill, room, 2));
    eventually("both offers are pinned", || prefill.session.pinned() == 4);
    assert_eq!(prefill.session.waiting_offers(), 0);
    drop(offers);
}

/// Row P6: prefill does not serve a receiver without pages for 2.0 s. It serves other receivers.
#[test]
fn p6_a_receiver_without_pages_is_silent_for_two_seconds() {
    let prefill = Rank::start(&group(1), 0, 0);
    let (short, other) = (decode(), decode());
    let offers = [1, 2, 3].map(|room| offer(&prefill, room, 2));
    let begun = Instant::now();
    let from = [prefill.address()];
    let declined = (short.session).decline(RoomId(1), &from, DeclineReason::NoPages);
    declined.unwrap();
    failed_with(&offers[0].wait(soon()), Code::Full);
    let silent = pull(&short, &prefill, 2, &[5, 6]);
    succeeded(&pull(&other, &prefill, 3, &[5, 6]).wait(soon()));
    succeeded(&silent.wait(soon()));
    assert!(begun.elapsed() >= PinLimits::default().back_off);
    short.check(0, &[5, 6]).unwrap();
    succeeded(&offers[1].wait(soon()));
    succeeded(&offers[2].wait(soon()));
    assert_eq!(prefill.session.pinned(), 0);
}

/// Row P8: decode declines a request before prefill offers it.
#[test]
fn p8_an_offer_that_decode_declined_before_ends_at_once() {
    let (prefill, decode) = (Rank::start(&group(1), 0, 0), decode());
    let from = [prefill.address()];
    let declined = (decode.session).decline(RoomId(1), &from, DeclineReason::NotWanted);
    declined.unwrap();
    // Letters arrive in order. So prefill has the decline once this request has succeeded.
    let marker = offer(&prefill, 2, 1);
    succeeded(&pull(&decode, &prefill, 2, &[4]).wait(soon()));
    succeeded(&marker.wait(soon()));
    let early = offer(&prefill, 1, 3);
    failed_with(&early.wait(soon()), Code::Draining);
    assert_eq!(prefill.session.pinned(), 0);
    // One decline ends one offer.
    let again = offer(&prefill, 1, 3);
    succeeded(&pull(&decode, &prefill, 1, &[4, 5, 6]).wait(soon()));
    succeeded(&again.wait(soon()));
}

/// Row P10: one rank of decode has no pages. The other rank's request is undone, and prefill learns the reason.
#[test]
fn p10_a_rank_without_pages_undoes_the_request_of_all_ranks() {
    let prefill = Rank::start(&group(1), 0, 0);
    let ranks = [0, 1].map(|rank| Rank::start(&group(2), 0, rank));
    let send = |room| {
        prefill.fill(&[0, 1, 2]);
        let pages = vec![0, 1, 2];
        let sending = prefill.session.send(RoomId(room), pages, 2, soon());
        sending.unwrap()
    };
    let sending = send(1);
    let first = pull(&ranks[0], &prefill, 1, &[7, 8, 9]);
    eventually("the first rank is accepted", || {
        first.state().poll == PollState::WaitingForInput
    });
    let from = [prefill.address()];
    let declined = (ranks[1].session).decline(RoomId(1), &from, DeclineReason::NoPages);
    declined.unwrap();
    failed_with(&first.wait(soon()), Code::Full);
    failed_with(&sending.wait(soon()), Code::Full);
    assert_eq!(prefill.session.pinned(), 0);
    // The same pages serve the next request.
    let sending = send(2);
    let both = ranks
        .each_ref()
        .map(|rank| pull(rank, &prefill, 2, &[7, 8, 9]));
    sending.produced(0..3, sending.layers()).unwrap();
    sending.finish(Vec::new()).unwrap();
    for (rank, receiving) in ranks.iter().zip(&both) {
        succeeded(&receiving.wait(soon()));
        rank.check(0, &[7, 8, 9]).unwrap();
    }
    succeeded(&sending.wait(soon()));
}
