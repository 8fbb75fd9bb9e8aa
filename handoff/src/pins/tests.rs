//! Rows P1, P5 and P6, with the documents' numbers.

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
    assert_eq!(options.back_off, Duration::from_secs(2));
}

#[test]
fn p5_with_98_of_100_pinned_one_page_goes_and_the_next_waits_until_done() {
    let mut pins = ledger();
    assert_eq!(pins.pin(RoomId(1), 98), PinOutcome::Pinned);
    assert_eq!(pins.pin(RoomId(2), 1), PinOutcome::Pinned);
    assert_eq!(pins.pin(RoomId(3), 1), PinOutcome::Waits);
    assert_eq!(pins.pin(RoomId(4), 1), PinOutcome::Waits);
    assert!(pins.admitted().is_empty());
    assert_eq!(pins.free(RoomId(2)), 1);
    assert_eq!(
        pins.admitted(),
        [RoomId(3)],
        "98 are pinned again, so one goes"
    );
    assert_eq!(pins.free(RoomId(1)), 98);
    assert_eq!(pins.admitted(), [RoomId(4)]);
    assert_eq!(pins.pinned(), 2);
}

#[test]
fn p5_a_request_that_is_given_up_while_it_waits_is_not_admitted() {
    let mut pins = ledger();
    assert_eq!(pins.pin(RoomId(1), 99), PinOutcome::Pinned);
    for room in 2..=3 {
        assert_eq!(pins.pin(RoomId(room), 1), PinOutcome::Waits);
    }
    assert_eq!(pins.free(RoomId(2)), 0, "it had no pin");
    assert_eq!(pins.free(RoomId(1)), 99);
    assert_eq!(pins.admitted(), [RoomId(3)]);
    assert_eq!((pins.pinned(), pins.waiting()), (1, 0));
}

#[test]
fn p6_the_breaker_of_a_receiver_is_open_for_two_seconds() {
    let mut pins = ledger();
    let (other, until) = (Incarnation(2), Some(at(12.0)));
    pins.trip(at(10.0), R);
    assert_eq!(pins.breaker(at(10.0), R), until);
    assert_eq!(pins.breaker(at(11.999), R), until);
    assert_eq!(pins.breaker(at(10.5), other), None);
    assert_eq!(pins.breaker(at(12.0), R), None);
    // A closed breaker takes no memory once another breaker opens.
    pins.trip(at(12.0), other);
    assert_eq!(pins.breakers.len(), 1);
    pins.forget(other);
    assert_eq!(pins.breaker(at(12.0), other), None);
}

#[test]
fn pages_are_freed_once() {
    let mut pins = ledger();
    assert_eq!(pins.pin(RoomId(1), 10), PinOutcome::Pinned);
    assert_eq!(pins.pin(RoomId(1), 10), PinOutcome::Repeated);
    assert_eq!(pins.free(RoomId(1)), 10);
    assert_eq!(pins.free(RoomId(1)), 0);
    assert_eq!(pins.pinned(), 0);
}

proptest! {
    #[test]
    fn the_count_is_the_sum_of_the_pins_and_returns_to_zero(
        calls in prop::collection::vec((any::<bool>(), 0u64..12, 0u64..60), 1..80),
    ) {
        let mut pins = ledger();
        for (is_pin, room, pages) in calls {
            match is_pin {
                true => drop(pins.pin(RoomId(room), pages)),
                false => drop(pins.free(RoomId(room))),
            }
            let sum: u64 = pins.pins.values().sum();
            prop_assert_eq!(pins.pinned, sum);
            prop_assert!(pins.is_over_limit() || pins.waiting.is_empty());
        }
        for room in 0..12 {
            pins.free(RoomId(room));
        }
        prop_assert_eq!((pins.pinned(), pins.waiting()), (0, 0));
    }
}
