use super::*;
use kvpool_types::{Epoch, Extent, SegmentId};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const EPOCH: Epoch = Epoch(7);

fn board(allowance: u64) -> (Board, Arc<Pinner>) {
    let (board, fd) = Board::create(Length(allowance)).unwrap();
    let pinner = Pinner::map(fd.as_fd(), BOARD_BYTES).unwrap();
    (board, Arc::new(pinner))
}

fn extent(at: u64) -> Extent {
    Extent {
        segment: SegmentId(3),
        offset: Offset(at << 12),
        length: Length(4096),
    }
}

fn seen(board: &Board) -> Vec<Extent> {
    let mut seen = Vec::new();
    board.look(|extent| seen.push(extent));
    seen
}

#[test]
fn a_pin_is_seen_from_when_it_is_taken_until_it_is_dropped() {
    let (board, pinner) = board(u64::MAX);
    board.open(EPOCH);
    assert_eq!(seen(&board), []);
    let first = pinner.pin(EPOCH, extent(1)).unwrap();
    let second = pinner.pin(EPOCH, extent(2)).unwrap();
    let again = pinner.pin(EPOCH, extent(1)).unwrap();
    assert_eq!(seen(&board), [extent(1), extent(2), extent(1)]);
    drop(first);
    assert_eq!(seen(&board), [extent(2), extent(1)]);
    let third = pinner.pin(EPOCH, extent(3)).unwrap();
    assert_eq!(
        seen(&board),
        [extent(3), extent(2), extent(1)],
        "the lowest slot"
    );
    drop((second, again, third));
    assert_eq!(seen(&board), []);
}

#[test]
fn pins_count_in_one_epoch_and_on_an_open_board() {
    let (board, pinner) = board(u64::MAX);
    assert!(pinner.pin(EPOCH, extent(1)).is_none());
    assert!(
        pinner.pin(Epoch(0), extent(1)).is_none(),
        "closed is no epoch"
    );
    board.open(EPOCH);
    let pin = pinner.pin(EPOCH, extent(1)).unwrap();
    for other in [Epoch(6), Epoch(8), Epoch(0)] {
        assert!(pinner.pin(other, extent(2)).is_none());
    }
    assert_eq!(seen(&board), [extent(1)], "what failed was undone");
    board.close();
    assert!(pinner.pin(EPOCH, extent(2)).is_none());
    assert_eq!(seen(&board), [extent(1)], "what was pinned before stays");
    drop(pin);
    assert_eq!(seen(&board), []);
}

#[test]
fn a_pin_overtaken_by_a_new_generation_fails() {
    let (board, pinner) = board(u64::MAX);
    board.open(EPOCH);
    let pin = pinner.publish(extent(1)).unwrap();
    board.open(Epoch(8));
    // The node sees the pin until the client notices.
    assert_eq!(seen(&board), [extent(1)]);
    assert!(!pin.counts(EPOCH));
    drop(pin);
    assert_eq!(seen(&board), []);
    assert!(pinner.pin(EPOCH, extent(1)).is_none());
    assert!(pinner.pin(Epoch(8), extent(1)).is_some());
}

#[test]
fn a_full_board_pins_no_more() {
    let (board, pinner) = board(u64::MAX);
    board.open(EPOCH);
    let mut pins: Vec<_> = (0..SLOTS as u64)
        .map(|at| pinner.pin(EPOCH, extent(at)).unwrap())
        .collect();
    assert!(pinner.pin(EPOCH, extent(999)).is_none());
    assert_eq!(seen(&board).len(), SLOTS);
    drop(pins.swap_remove(100));
    let last = pinner.pin(EPOCH, extent(999)).unwrap();
    assert_eq!(seen(&board)[100], extent(999));
    drop((pins, last));
    assert_eq!(seen(&board), []);
}

#[test]
fn pins_stay_within_the_allowance() {
    let (board, pinner) = board(3 * 4096 - 1);
    board.open(EPOCH);
    let first = pinner.pin(EPOCH, extent(1)).unwrap();
    let _second = pinner.pin(EPOCH, extent(2)).unwrap();
    assert!(pinner.pin(EPOCH, extent(3)).is_none());
    drop(first);
    let endless = Extent {
        length: Length(u64::MAX),
        ..extent(1)
    };
    assert!(pinner.pin(EPOCH, endless).is_none());
    assert!(
        pinner.pin(EPOCH, extent(3)).is_some(),
        "failures cost nothing"
    );
}

#[test]
fn invalid_slots_are_ignored() {
    let (board, pinner) = board(u64::MAX);
    board.open(EPOCH);
    pinner.words.reach().store(u64::MAX, Ordering::SeqCst);
    for (slot, state) in [(0, CLAIMED), (1, 99), (2, u64::MAX), (SLOTS - 1, PINNED)] {
        pinner.words.slot(slot).state.store(state, Ordering::SeqCst);
    }
    let nothing = Extent {
        segment: SegmentId(0),
        offset: Offset(0),
        length: Length(0),
    };
    assert_eq!(seen(&board), [nothing]);
    let wild = pinner.words.slot(SLOTS - 1).segment;
    wild.store(u64::MAX, Ordering::SeqCst);
    assert_eq!(seen(&board), []);
}

#[test]
fn a_board_with_another_layout_is_refused() {
    let (board, fd) = Board::create(Length(0)).unwrap();
    let shorter = Pinner::map(fd.as_fd(), Length(4096));
    assert_eq!(shorter.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    board.0.layout().store(LAYOUT + 1, Ordering::SeqCst);
    let other = Pinner::map(fd.as_fd(), BOARD_BYTES);
    assert_eq!(other.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
}

/// Two threads race: one pins; the other changes the generation and then reads the board. In no
/// round may the pin count while the read missed it.
#[test]
fn a_pin_that_counts_is_seen_by_the_read_after_the_change() {
    const ROUNDS: u64 = 20_000;
    let (board, pinner) = board(u64::MAX);
    // Only the last slot is free, and the reach covers no slot. So the claim is slow and the read
    // is fast, and the change falls between any two steps of a pin.
    for slot in 0..SLOTS - 1 {
        pinner
            .words
            .slot(slot)
            .state
            .store(CLAIMED, Ordering::SeqCst);
    }
    let barrier = std::sync::Barrier::new(2);
    let mut outcomes = [0u64; 2];
    std::thread::scope(|scope| {
        let pinning = scope.spawn(|| {
            (1..=ROUNDS)
                .map(|round| {
                    barrier.wait();
                    let pin = pinner.pin(Epoch(round * 2), extent(round));
                    barrier.wait();
                    barrier.wait();
                    pin.is_some()
                })
                .collect::<Vec<_>>()
        });
        let mut looks = Vec::new();
        for round in 1..=ROUNDS {
            board.open(Epoch(round * 2));
            pinner.words.reach().store(0, Ordering::SeqCst);
            barrier.wait();
            for _ in 0..round % 64 {
                std::hint::spin_loop();
            }
            board.open(Epoch(round * 2 + 1));
            let found = seen(&board);
            // Only now may the pin be dropped.
            barrier.wait();
            looks.push(found.contains(&extent(round)));
            barrier.wait();
        }
        for (pinned, looked) in pinning.join().unwrap().into_iter().zip(looks) {
            assert!(!pinned || looked);
            outcomes[usize::from(pinned)] += 1;
        }
    });
    assert!(
        outcomes.iter().all(|times| *times > 0),
        "no race: {outcomes:?}"
    );
}
