//! Rows P1 and P5 to P10, with the documents' numbers.

use super::*;
use proptest::prelude::*;

const R: Incarnation = Incarnation(1);

fn at(seconds: f64) -> Moment {
    Moment(Duration::from_secs_f64(seconds))
}

fn ledger() -> PinLedger {
    PinLedger::new(100, PinOptions::default())
}

#[test]
fn p1_the_defaults_are_the_documents() {
    let options = PinOptions::default();
    assert_eq!(options.reserve_percent, 2);
    assert_eq!(options.ttl, Duration::from_secs(360));
    assert_eq!(options.back_off, Duration::from_secs(2));
}

#[test]
fn p5_with_98_of_100_pinned_one_page_goes_and_the_next_waits_until_done() {
    let mut pins = ledger();
    assert_eq!(pins.pin(at(0.0), PullId(1), R, 98), PinOutcome::Pinned);
    assert_eq!(pins.pin(at(0.0), PullId(2), R, 1), PinOutcome::Pinned);
    assert_eq!(pins.pin(at(0.0), PullId(3), R, 1), PinOutcome::Waits);
    assert_eq!(pins.pin(at(0.0), PullId(4), R, 1), PinOutcome::Waits);
    assert!(pins.admitted().is_empty());
    assert_eq!(pins.done(at(1.0), PullId(2)), 1);
    assert_eq!(
        pins.admitted(),
        [PullId(3)],
        "98 are pinned again, so one goes"
    );
    assert_eq!(pins.done(at(1.0), PullId(1)), 98);
    assert_eq!(pins.admitted(), [PullId(4)]);
    assert_eq!(pins.pinned(), 2);
}

#[test]
fn p6_the_breaker_of_a_receiver_is_silent_for_two_seconds() {
    let mut pins = ledger();
    pins.trip(at(10.0), R);
    let until = PinOutcome::BackOff(at(12.0));
    assert_eq!(pins.pin(at(10.0), PullId(1), R, 1), until);
    assert_eq!(pins.pin(at(11.999), PullId(1), R, 1), until);
    let other = Incarnation(2);
    assert_eq!(pins.pin(at(10.5), PullId(2), other, 1), PinOutcome::Pinned);
    assert_eq!(pins.pin(at(12.0), PullId(1), R, 1), PinOutcome::Pinned);
}

#[test]
fn p5_an_open_pin_waits_as_others_and_no_breaker_holds_it_back() {
    let mut pins = ledger();
    pins.trip(at(0.0), R);
    let pinned = pins.pin_for_any(at(0.0), PullId(1), 99);
    assert_eq!(pinned, PinOutcome::Pinned);
    for pull in 2..=3 {
        let waits = pins.pin_for_any(at(0.0), PullId(pull), 1);
        assert_eq!(waits, PinOutcome::Waits);
    }
    pins.lost(at(0.5), R);
    assert_eq!((pins.pinned(), pins.waiting()), (99, 2), "it is nobody's");
    pins.give_up(at(1.0), PullId(1));
    pins.give_up(at(1.0), PullId(2));
    assert_eq!(pins.admitted(), [PullId(3)], "the other was given up");
    assert_eq!(pins.pinned(), 1);
}

#[test]
fn p6_a_request_that_waited_is_silent_too() {
    let mut pins = ledger();
    pins.pin(at(0.0), PullId(1), Incarnation(2), 99);
    assert_eq!(pins.pin(at(0.0), PullId(2), R, 1), PinOutcome::Waits);
    pins.trip(at(1.0), R);
    pins.done(at(1.5), PullId(1));
    assert!(pins.admitted().is_empty(), "the breaker is open");
    assert_eq!(
        pins.pin(at(1.6), PullId(3), Incarnation(2), 1),
        PinOutcome::Pinned
    );
    assert_eq!(pins.next_sweep(), Some(at(3.0)));
    pins.sweep(at(3.0));
    assert_eq!(pins.admitted(), [PullId(2)]);
}

#[test]
fn p7_the_sweep_frees_what_nobody_said_done_for() {
    let mut pins = ledger();
    pins.pin(at(0.0), PullId(1), R, 5);
    pins.pin(at(1.0), PullId(2), R, 6);
    assert_eq!(pins.next_sweep(), Some(at(360.0)));
    assert!(pins.sweep(at(359.9)).is_empty());
    let (pull, pages) = (PullId(1), 5);
    assert_eq!(pins.sweep(at(360.0)), [FreedPin { pull, pages }]);
    assert_eq!(pins.pinned(), 6);
    assert_eq!(
        pins.done(at(361.0), PullId(1)),
        0,
        "a late done frees nothing"
    );
    assert_eq!(pins.pinned(), 6);
}

#[test]
fn p8_a_done_that_arrives_first_is_remembered_once() {
    let mut pins = ledger();
    assert_eq!(pins.done(at(0.0), PullId(1)), 0);
    assert_eq!(pins.pin(at(0.0), PullId(1), R, 5), PinOutcome::IsDone);
    assert_eq!(pins.pinned(), 0);
    assert_eq!(pins.pin(at(0.0), PullId(1), R, 5), PinOutcome::Pinned);
}

#[test]
fn p8_early_dones_are_bounded() {
    let options = PinOptions {
        early_dones: 2,
        ..PinOptions::default()
    };
    let mut pins = PinLedger::new(100, options);
    for pull in 1..=3 {
        pins.done(at(0.0), PullId(pull));
    }
    assert_eq!(pins.pin(at(0.0), PullId(1), R, 1), PinOutcome::Pinned);
    assert_eq!(pins.pin(at(0.0), PullId(3), R, 1), PinOutcome::IsDone);
}

#[test]
fn pages_that_the_receiver_holds_are_freed_before_done() {
    let mut pins = ledger();
    pins.pin(at(0.0), PullId(1), R, 10);
    assert_eq!(pins.pin(at(0.0), PullId(1), R, 10), PinOutcome::Repeated);
    assert_eq!(pins.unpin(at(0.0), PullId(1), 4), 4);
    assert_eq!(pins.unpin(at(0.0), PullId(1), 40), 6);
    assert_eq!(pins.done(at(0.0), PullId(1)), 0);
    assert_eq!(pins.pinned(), 0);
}

#[test]
fn a_lost_receiver_frees_its_pins_at_once() {
    let mut pins = ledger();
    pins.pin(at(0.0), PullId(1), R, 99);
    pins.pin(at(0.0), PullId(2), R, 1);
    pins.pin(at(0.0), PullId(3), Incarnation(2), 1);
    assert_eq!(pins.waiting(), 2);
    let (pull, pages) = (PullId(1), 99);
    assert_eq!(pins.lost(at(0.5), R), [FreedPin { pull, pages }]);
    assert_eq!(pins.admitted(), [PullId(3)]);
    assert_eq!((pins.pinned(), pins.waiting()), (1, 0));
}

proptest! {
    #[test]
    fn the_count_is_the_sum_of_the_pins_and_returns_to_zero(
        calls in prop::collection::vec((0u8..7, 0u128..12, 0u128..3, 0u64..60), 1..80),
    ) {
        let mut pins = ledger();
        let mut now = at(0.0);
        for (call, pull, receiver, pages) in calls {
            now = now + Duration::from_secs(pages);
            let (pull, receiver) = (PullId(pull), Incarnation(receiver));
            match call {
                0 | 1 => drop(pins.pin(now, pull, receiver, pages)),
                2 => drop(pins.done(now, pull)),
                3 => drop(pins.unpin(now, pull, pages)),
                4 => drop(pins.lost(now, receiver)),
                5 => pins.trip(now, receiver),
                _ => drop(pins.sweep(now)),
            }
            let sum: u64 = pins.pins.values().map(|pin| pin.pages).sum();
            prop_assert_eq!(pins.pinned, sum);
            let breaker = |receiver| pins.breaker(now, receiver);
            let is_shut = |of: &WaitingPin| of.receiver.and_then(breaker).is_some();
            let none_can_go = pins.is_over_limit() || pins.waiting.iter().all(is_shut);
            // Time alone closes a breaker, and the next sweep notices.
            prop_assert!(none_can_go || call != 6);
        }
        for _ in 0..20 {
            now = now + Duration::from_secs(361);
            pins.sweep(now);
        }
        prop_assert_eq!((pins.pinned(), pins.waiting()), (0, 0));
    }
}
