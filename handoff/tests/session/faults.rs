//! Peers that die, stop, stay silent or give up. The other end learns of it in time, and its pages are free.

use crate::child::{Process, group};
use crate::ranks::{Group, Rank, soon, succeeded};
use kvpool_handoff::plan::PageLayout;
use kvpool_handoff::room::{PollState, RoomId};
use kvpool_handoff::session::{HandoffError, HandoffOptions, Receiving, Sending};
use kvpool_types::Code;
use std::time::{Duration, Instant};

fn decode() -> Rank {
    Rank::start(&group(), 0, 0)
}

pub(crate) fn receive(rank: &Rank, room: u64, pages: u32, from: &str) -> Receiving {
    let layers = group().layers();
    let pages = (0, (0..pages).collect());
    let from = [from.to_owned()];
    rank.session
        .receive(RoomId(room), pages, &from, (1, &layers), false, soon())
        .unwrap()
}

pub(crate) fn reaches(receiving: &Receiving, poll: PollState) {
    let until = soon();
    while receiving.state().poll != poll {
        assert!(Instant::now() < until, "{:?}", receiving.state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The time until the transfer has failed and its pages are free.
fn fails_after(receiving: &Receiving, begin: Instant) -> Duration {
    let state = receiving.wait(soon());
    assert_eq!(state.poll, PollState::Failed);
    assert!(state.is_released);
    begin.elapsed()
}

#[test]
fn prefill_that_is_killed_is_noticed_within_a_second() {
    let rank = decode();
    // Three times of the kill: before the offer, before the first byte, and within the request.
    for step in 0..3 {
        let mut prefill = Process::start();
        let address = prefill.address.clone();
        if step == 0 {
            prefill.kill();
        }
        let receiving = receive(&rank, step, 10, &address);
        if step > 0 {
            prefill.tell(&format!("send {step} 10"));
            reaches(&receiving, PollState::WaitingForInput);
        }
        if step > 1 {
            prefill.tell("produce 0 4");
            reaches(&receiving, PollState::Transferring);
        }
        let begin = Instant::now();
        prefill.kill();
        let took = fails_after(&receiving, begin);
        assert!(took < Duration::from_millis(1500), "step {step}: {took:?}");
    }
}

#[test]
fn prefill_that_is_stopped_is_noticed_within_four_seconds() {
    let rank = decode();
    let mut prefill = Process::start();
    let receiving = receive(&rank, 1, 10, &prefill.address);
    prefill.tell("send 1 10");
    prefill.tell("produce 0 4");
    reaches(&receiving, PollState::Transferring);
    let begin = Instant::now();
    prefill.stop();
    let took = fails_after(&receiving, begin);
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// The letter gets no answer, and decode waits two seconds for it.
#[test]
fn a_letter_to_a_stopped_peer_does_not_delay_the_notice() {
    let rank = decode();
    let mut prefill = Process::start();
    let receiving = receive(&rank, 1, 10, &prefill.address);
    prefill.tell("send 1 10");
    prefill.tell("produce 0 4");
    reaches(&receiving, PollState::Transferring);
    let begin = Instant::now();
    prefill.stop();
    // Before the third missed ping. Pings leave every 0.9 s.
    std::thread::sleep(Duration::from_millis(2500));
    // The offer of another room is the letter.
    let (layers, from) = (group().layers(), [prefill.address.clone()]);
    let pages = (0, vec![20, 21]);
    let late = rank
        .session
        .receive(RoomId(2), pages, &from, (1, &layers), false, soon())
        .unwrap();
    let took = fails_after(&receiving, begin);
    assert!(took < Duration::from_millis(4500), "{took:?}");
    drop(late);
}

#[test]
fn decode_that_is_killed_leaves_no_pin() {
    let prefill = decode();
    let mut child = Process::start();
    child.tell(&format!("receive 1 10 {}", prefill.address()));
    prefill.fill(&(0..10).collect::<Vec<_>>());
    let pages = (0..10).collect();
    let sending = prefill.session.send(RoomId(1), pages, 1, soon()).unwrap();
    sending.produced(0..4, 0..2).unwrap();
    let until = soon();
    while sending.state().poll != PollState::Transferring {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(prefill.session.pinned(), 10);
    let begin = Instant::now();
    child.kill();
    let state = sending.wait(soon());
    assert_eq!(
        (state.poll, prefill.session.pinned()),
        (PollState::Failed, 0)
    );
    let took = begin.elapsed();
    assert!(took < Duration::from_millis(1500), "{took:?}");
}

/// Decode never asks for the room. Its pages are free at the room's deadline.
#[test]
fn a_room_that_nobody_asks_for_ends_at_its_deadline() {
    let prefill = decode();
    let deadline = Instant::now() + Duration::from_millis(300);
    let sending = prefill
        .session
        .send(RoomId(1), vec![1, 2], 1, deadline)
        .unwrap();
    let state = sending.wait(soon());
    assert_eq!(state.failure, Some(Code::DeadlineExceeded));
    assert_eq!(prefill.session.pinned(), 0);
}

#[test]
fn either_end_that_gives_up_ends_both() {
    let (prefill, decode) = (decode(), decode());
    for (room, by_decode) in [(1, true), (2, false)] {
        let receiving = receive(&decode, room, 4, &prefill.address());
        let pages = (0..4).collect();
        let sending: Sending = prefill
            .session
            .send(RoomId(room), pages, 1, soon())
            .unwrap();
        sending.produced(0..2, 0..2).unwrap();
        reaches(&receiving, PollState::Transferring);
        if by_decode {
            receiving.abort();
        } else {
            sending.abort();
        }
        for state in [receiving.wait(soon()), sending.wait(soon())] {
            assert_eq!(
                (state.poll, state.failure),
                (PollState::Failed, Some(Code::Draining))
            );
            assert!(state.is_released);
        }
    }
    // Dropping a handle aborts its request.
    let receiving = receive(&decode, 3, 4, &prefill.address());
    let sending = prefill
        .session
        .send(RoomId(3), vec![0, 1, 2, 3], 1, soon())
        .unwrap();
    reaches(&receiving, PollState::WaitingForInput);
    drop(sending);
    assert_eq!(receiving.wait(soon()).poll, PollState::Failed);
    assert_eq!(prefill.session.pinned(), 0);
}

/// Sends and receives one page, and compares it.
pub(crate) fn exchange(prefill: &Rank, decode: &Rank, room: u64) {
    prefill.fill(&[0]);
    let receiving = receive(decode, room, 1, &prefill.address());
    let sending = prefill.session.send(RoomId(room), vec![0], 1, soon());
    let sending = sending.unwrap();
    sending.produced(0..1, 0..2).unwrap();
    sending.finish(Vec::new()).unwrap();
    succeeded(&receiving.wait(soon()));
    succeeded(&sending.wait(soon()));
    decode.check(0, &[0]).unwrap();
}

/// A process that restarts at its old address is a new incarnation, and rooms with it succeed at once.
#[test]
fn a_process_that_starts_anew_at_its_address_is_reached() {
    let (mut prefill, mut decode) = (decode(), decode());
    exchange(&prefill, &decode, 1);
    for room in 2..5 {
        let old = if room % 2 == 0 {
            &mut prefill
        } else {
            &mut decode
        };
        let address = old.address();
        assert!(old.session.close());
        *old = decode_at(&address, HandoffOptions::default());
        exchange(&prefill, &decode, room);
    }
}

fn decode_at(listen: &str, options: HandoffOptions) -> Rank {
    Rank::start_at(listen, &group(), (0, 0), options)
}

#[test]
fn a_pause_longer_than_the_idle_time_breaks_nothing() {
    let idle = |millis| HandoffOptions {
        idle: Duration::from_millis(millis),
        ..HandoffOptions::default()
    };
    // Prefill drops its connection to decode, and decode keeps its own.
    let prefill = decode_at("127.0.0.1:0", idle(50));
    let decode = decode_at("127.0.0.1:0", idle(60_000));
    for room in 1..4 {
        exchange(&prefill, &decode, room);
        exchange(&decode, &prefill, room);
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Two ends that mean different requests learn of it at once.
#[test]
fn numbers_of_pages_that_differ_fail_both_ends_at_once() {
    let (prefill, decode) = (decode(), decode());
    let begin = Instant::now();
    let receiving = receive(&decode, 1, 3, &prefill.address());
    let sending = prefill
        .session
        .send(RoomId(1), vec![0, 1], 1, soon())
        .unwrap();
    for state in [receiving.wait(soon()), sending.wait(soon())] {
        assert_eq!(state.failure, Some(Code::OutOfRange));
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
}

/// The same rule for decode that asks before prefill knows the room.
#[test]
fn an_early_offer_with_another_number_of_pages_fails_both_ends_at_once() {
    let (prefill, decode) = (decode(), decode());
    let (layers, from) = (group().layers(), [prefill.address()]);
    let receive = |room, pages: Vec<u32>| {
        let pages = (0, pages);
        let receiving =
            decode
                .session
                .receive(RoomId(room), pages, &from, (1, &layers), false, soon());
        receiving.unwrap()
    };
    let receiving = receive(1, vec![0, 1, 2]);
    // Letters between two processes keep their order. So prefill has the first offer once it has the second.
    let second = receive(2, vec![3, 4]);
    let sending = prefill.session.send(RoomId(2), vec![0, 1], 1, soon());
    let sending = sending.unwrap();
    reaches(&second, PollState::WaitingForInput);
    let begin = Instant::now();
    let odd = prefill.session.send(RoomId(1), vec![2, 3], 1, soon());
    let odd = odd.unwrap();
    for state in [receiving.wait(soon()), odd.wait(soon())] {
        assert_eq!(state.failure, Some(Code::OutOfRange));
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
    drop((second, sending));
}

/// A page belongs to one room at a time, so no two rooms receive into the same memory.
#[test]
fn a_page_is_received_into_once() {
    let (prefill, decode) = (decode(), decode());
    let layers = group().layers();
    let from = [prefill.address()];
    let receive = |room, pages: Vec<u32>| {
        let prefill = (1, &layers);
        decode
            .session
            .receive(RoomId(room), (0, pages), &from, prefill, false, soon())
    };
    assert_eq!(
        receive(1, vec![5, 6, 5]).err(),
        Some(HandoffError::PageTwice(5))
    );
    let first = receive(1, vec![5, 6]).unwrap();
    let second = receive(2, vec![7, 6]).unwrap().wait(soon());
    assert_eq!(second.failure, Some(Code::InProgress));
    assert!(second.is_released);
    first.abort();
    assert!(first.wait(soon()).is_released);
    let third = receive(3, vec![7, 6]).unwrap();
    assert_ne!(third.state().poll, PollState::Failed);
}

/// The same request may go to another decode process as soon as the first one has died.
#[test]
fn the_number_of_a_room_is_free_when_its_receiver_has_died() {
    let prefill = decode();
    let mut child = Process::start();
    child.tell(&format!("receive 1 4 {}", prefill.address()));
    let sending = prefill
        .session
        .send(RoomId(1), vec![0, 1, 2, 3], 1, soon())
        .unwrap();
    let until = soon();
    while sending.state().poll != PollState::WaitingForInput {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill();
    assert_eq!(sending.wait(soon()).poll, PollState::Failed);
    exchange(&prefill, &decode(), 1);
}

/// Row S12: with a failure probability every room ends alike at both ends, and pins return to 0.
#[test]
fn s12_rooms_that_fail_at_random_end_alike_on_all_ranks() {
    let failing = |rank, ranks| {
        let options = HandoffOptions {
            failure_probability: 0.1,
            ..HandoffOptions::default()
        };
        Rank::start_with(
            &Group::of(ranks, &[2], PageLayout::TokenMajor),
            0,
            rank,
            options,
        )
    };
    let prefill = [failing(0, 2), failing(1, 2)];
    let decode = failing(0, 1);
    let addresses = prefill.each_ref().map(Rank::address);
    let layers = group().layers();
    let (mut successes, mut failures) = (0, 0);
    for room in 0..500 {
        let pages: Vec<u32> = vec![room % 10, 20 + room % 10];
        let id = RoomId(room.into());
        let of_room = (0, pages.clone());
        let receiving = decode
            .session
            .receive(id, of_room, &addresses, (2, &layers), true, soon());
        let receiving = receiving.unwrap();
        let sending = prefill.each_ref().map(|rank| {
            rank.fill(&pages);
            let sending = rank.session.send(id, pages.clone(), 1, soon()).unwrap();
            sending.produced(0..2, 0..2).unwrap();
            sending.finish(Vec::new()).unwrap();
            sending
        });
        let state = receiving.wait(soon());
        match state.poll {
            PollState::Success => {
                succeeded(&state);
                decode.check(0, &pages).unwrap();
                successes += 1;
            }
            _ => failures += 1,
        }
        for each in &sending {
            let of_sender = each.wait(soon());
            assert!(of_sender.is_released);
            if state.poll == PollState::Success {
                // A sender may be told to fail after its bytes were right at the receiver.
                continue;
            }
            assert_eq!(of_sender.poll, PollState::Failed, "room {room}: {state:?}");
        }
    }
    assert!(
        successes > 250 && failures > 20,
        "{successes} and {failures}"
    );
    for rank in &prefill {
        assert_eq!(rank.session.pinned(), 0);
    }
}

/// The handle of an ended request must not affect the next request with its number.
#[test]
fn a_handle_of_an_ended_request_is_silent_about_the_next_one_of_its_number() {
    let prefill = decode();
    let mut child = Process::start();
    child.tell(&format!("receive 1 2 {}", prefill.address()));
    let first = prefill.session.send(RoomId(1), vec![0, 1], 1, soon());
    let first = first.unwrap();
    sends(&first, PollState::WaitingForInput);
    child.kill();
    assert_eq!(first.wait(soon()).poll, PollState::Failed);
    let decode = decode();
    let receiving = receive(&decode, 1, 2, &prefill.address());
    let second = prefill.session.send(RoomId(1), vec![2, 3], 1, soon());
    let second = second.unwrap();
    sends(&second, PollState::WaitingForInput);
    // These pages belong to the second request now, which has not computed them.
    first.produced(0..2, 0..2).unwrap();
    first.finish(Vec::new()).unwrap();
    first.abort();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(second.state().poll, PollState::WaitingForInput);
    prefill.fill(&[2, 3]);
    second.produced(0..2, 0..2).unwrap();
    second.finish(Vec::new()).unwrap();
    succeeded(&receiving.wait(soon()));
    succeeded(&second.wait(soon()));
    decode.check(0, &[0, 1]).unwrap();
}

fn sends(sending: &Sending, poll: PollState) {
    let until = soon();
    while sending.state().poll != poll {
        assert!(Instant::now() < until, "{:?}", sending.state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Small writes take another path than large ones. They end with the link too.
#[test]
fn decode_that_is_stopped_leaves_no_pin_of_a_small_write() {
    let prefill = decode();
    let mut child = Process::start();
    child.tell(&format!("receive 1 4 {}", prefill.address()));
    prefill.fill(&[0, 1, 2, 3]);
    let sending = prefill.session.send(RoomId(1), vec![0, 1, 2, 3], 1, soon());
    let sending = sending.unwrap();
    sends(&sending, PollState::WaitingForInput);
    let begin = Instant::now();
    child.stop();
    sending.produced(0..4, 0..2).unwrap();
    sending.finish(Vec::new()).unwrap();
    let state = sending.wait(soon());
    assert_eq!(
        (state.poll, state.is_released, prefill.session.pinned()),
        (PollState::Failed, true, 0)
    );
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
    assert!(prefill.session.close());
}

/// The number of connections of this process to a peer's port that have not ended.
fn connections_to(address: &str) -> usize {
    let port: u16 = address.rsplit(':').next().unwrap().parse().unwrap();
    let port = format!(":{port:04X}");
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let is_open = |line: &&str| {
        let mut words = line.split_whitespace().skip(2);
        let (remote, state) = (words.next().unwrap(), words.next().unwrap());
        // Established, or closed only by the peer.
        remote.ends_with(&port) && (state == "01" || state == "08")
    };
    table.lines().skip(1).filter(is_open).count()
}

#[test]
fn a_peer_that_nothing_uses_has_no_connections() {
    let options = HandoffOptions {
        idle: Duration::from_millis(50),
        ..HandoffOptions::default()
    };
    let prefill = decode_at("127.0.0.1:0", options);
    let mut child = Process::start();
    child.tell(&format!("receive 1 1 {}", prefill.address()));
    prefill.fill(&[0]);
    let sending = prefill.session.send(RoomId(1), vec![0], 1, soon()).unwrap();
    sending.produced(0..1, 0..2).unwrap();
    sending.finish(Vec::new()).unwrap();
    succeeded(&sending.wait(soon()));
    assert!(connections_to(&child.address) > 0);
    let until = soon();
    while connections_to(&child.address) > 0 {
        assert!(Instant::now() < until, "they stay");
        std::thread::sleep(Duration::from_millis(20));
    }
    // A later request reaches the peer again.
    exchange(&prefill, &decode(), 2);
}

#[test]
fn a_session_that_closes_opens_no_room_more() {
    let prefill = decode();
    let mut child = Process::start();
    child.tell(&format!("receive 1 4 {}", prefill.address()));
    let open = prefill.session.send(RoomId(1), vec![0, 1, 2, 3], 1, soon());
    let open = open.unwrap();
    sends(&open, PollState::WaitingForInput);
    // A request in progress, so that the end takes a while.
    child.stop();
    open.produced(0..2, 0..2).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| prefill.session.close());
        std::thread::sleep(Duration::from_millis(100));
        for room in 2..4 {
            let begin = Instant::now();
            // The session may have ended.
            let Ok(late) = prefill.session.send(RoomId(room), vec![7], 1, soon()) else {
                continue;
            };
            let state = late.wait(soon());
            assert_eq!(
                (state.poll, state.is_released, state.failure),
                (PollState::Failed, true, Some(Code::Draining))
            );
            assert!(begin.elapsed() < Duration::from_secs(1));
        }
        closing.join().unwrap();
    });
}
