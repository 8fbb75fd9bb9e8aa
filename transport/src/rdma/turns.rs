//! Decides which operation posts its next work request, and whether the window admits the request.

use std::collections::VecDeque;

/// The bytes that an operation posts in one turn.
const TURN_BYTES: u64 = 1 << 20;

/// The work requests that an operation posts in one turn.
const TURN_WORKS: u32 = 16;

/// The operations with work to post, in round-robin order. A new operation waits for one turn of each other
/// operation, whatever the sizes.
#[derive(Debug, Default)]
pub(super) struct Turns {
    queue: VecDeque<u64>,
    bytes: u64,
    works: u32,
}

/// The work that a queue pair has in flight, and its limits.
#[derive(Debug)]
pub(super) struct Window {
    depth: u32,
    bytes: u64,
    posted: u32,
    in_flight: u64,
}

impl Turns {
    /// Appends an operation.
    pub(super) fn enter(&mut self, operation: u64) {
        self.queue.push_back(operation);
    }

    /// The operation whose turn it is.
    pub(super) fn current(&self) -> Option<u64> {
        self.queue.front().copied()
    }

    /// Counts a work request of the current operation, and ends its turn when due.
    pub(super) fn took(&mut self, length: u32, has_more: bool) {
        self.bytes += u64::from(length);
        self.works += 1;
        let is_over = self.bytes >= TURN_BYTES || self.works >= TURN_WORKS;
        if has_more && !is_over {
            return;
        }
        (self.bytes, self.works) = (0, 0);
        if let Some(current) = self.queue.pop_front()
            && has_more
        {
            self.queue.push_back(current);
        }
    }

    /// Removes all operations.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Window {
    pub(super) fn new(depth: u32, bytes: u64) -> Self {
        Self {
            depth,
            bytes,
            posted: 0,
            in_flight: 0,
        }
    }

    /// Whether a work request may be posted now. A request larger than the window is posted alone.
    pub(super) fn admits(&self, length: u32) -> bool {
        let fits = self.in_flight == 0 || self.in_flight + u64::from(length) <= self.bytes;
        self.posted < self.depth && fits
    }

    pub(super) fn enter(&mut self, length: u32) {
        self.posted += 1;
        self.in_flight += u64::from(length);
    }

    pub(super) fn leave(&mut self, length: u32) {
        self.posted -= 1;
        self.in_flight -= u64::from(length);
    }

    /// Whether this much unsignalled work needs a completion. Without one, the end of the work is unknown and
    /// its space in the queue is not reused.
    pub(super) fn wants_signal(&self, works: u32, bytes: u64) -> bool {
        works >= self.depth / 4 || bytes >= self.bytes / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_small_operation_waits_for_one_turn_of_a_huge_one() {
        let mut turns = Turns::default();
        turns.enter(1);
        turns.took(4096, true);
        turns.enter(2);
        let mut before = 0;
        while turns.current() == Some(1) {
            before += 1;
            turns.took(4096, true);
        }
        assert!(before < TURN_WORKS);
        assert_eq!(turns.current(), Some(2));
        turns.took(4096, false);
        assert_eq!(turns.current(), Some(1));
    }

    #[test]
    fn a_window_never_overflows_and_always_admits_something() {
        let mut window = Window::new(4, 100);
        assert!(window.admits(1000));
        window.enter(1000);
        assert!(!window.admits(1));
        window.leave(1000);
        for _ in 0..4 {
            assert!(window.admits(25));
            window.enter(25);
        }
        assert!(!window.admits(0));
    }

    proptest! {
        #[test]
        fn every_operation_gets_all_its_work_in_fair_shares(
            works in prop::collection::vec(prop::collection::vec(1_u32..3_000_000, 1..60), 1..8)
        ) {
            let mut turns = Turns::default();
            let mut left: BTreeMap<u64, VecDeque<u32>> = BTreeMap::new();
            for (number, lengths) in works.iter().enumerate() {
                turns.enter(number as u64);
                left.insert(number as u64, lengths.iter().copied().collect());
            }
            let mut sent: BTreeMap<u64, u64> = left.keys().map(|key| (*key, 0)).collect();
            let mut turn: (u64, u64, u32) = (u64::MAX, 0, 0);
            while let Some(current) = turns.current() {
                let mine = left.get_mut(&current).unwrap();
                let length = mine.pop_front().unwrap();
                if turn.0 != current {
                    turn = (current, 0, 0);
                }
                // While others wait, a turn ends at its limit of bytes or works.
                let others = left.iter().any(|(key, works)| *key != current && !works.is_empty());
                prop_assert!(!others || (turn.1 < TURN_BYTES && turn.2 < TURN_WORKS));
                turn = (current, turn.1 + u64::from(length), turn.2 + 1);
                *sent.get_mut(&current).unwrap() += u64::from(length);
                let has_more = !left[&current].is_empty();
                turns.took(length, has_more);
            }
            for (number, lengths) in works.iter().enumerate() {
                let total: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
                prop_assert_eq!(sent[&(number as u64)], total);
            }
        }
    }
}
