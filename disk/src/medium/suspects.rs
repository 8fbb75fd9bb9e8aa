//! Tells a bad sector from a device that fails.
//!
//! A device that is about to fail, or whose cable is loose, fails every request. Its copies must stay for its return.
//! So a failed range is only suspect. It has a bad sector if a later request fails there too, and another later
//! request of the same kind has succeeded meanwhile. The overlap of the two failures is bad, since blocks of other
//! lengths are written there later.
//!
//! Reads prove nothing about writes, and writes nothing about reads. A disk whose pool of blocks is used up still
//! reads what it has.

use super::Shared;
use super::copies::PLACES;
use super::error::Wrong;
use crate::{Arena, GRANULE, IoError, Op, Request};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The most ranges that are suspect at a time. Beyond it all are forgotten.
const MOST: usize = 4096;
/// The ranges that failed, and what was read since.
#[derive(Debug, Default)]
pub(super) struct Suspects(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of the request that began last.
    begun: u64,
    /// The highest number of a read that succeeded.
    read: u64,
    /// The highest number of a write that succeeded.
    written: u64,
    /// The failed ranges by their start: the end, and the value of `begun` at the first failure. None overlaps another.
    failed: BTreeMap<u64, (u64, u64)>,
    probing: Probing,
}

/// Whether the superblocks are being read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Probing {
    #[default]
    Idle,
    Running,
    /// A range failed after these reads began, so they say nothing about it. Others follow.
    Again,
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

impl Suspects {
    /// Numbers a request that begins.
    pub(super) fn begin(&self) -> u64 {
        let mut state = self.0.lock();
        state.begun += 1;
        state.begun
    }

    /// A request with this number succeeded.
    pub(super) fn note_success(&self, number: u64, range: &Range<u64>, access: Access) {
        let mut state = self.0.lock();
        let last = state.last_success(access);
        *last = number.max(*last);
        state.forget(range);
    }

    /// Whether a probe is to begin now. While one runs, another one follows it.
    fn begin_probe(&self) -> bool {
        let mut state = self.0.lock();
        let is_idle = state.probing == Probing::Idle;
        state.probing = match is_idle {
            true => Probing::Running,
            false => Probing::Again,
        };
        is_idle
    }

    /// A probe has ended. Returns whether another one follows.
    fn end_probe(&self) -> bool {
        std::mem::take(&mut self.0.lock().probing) == Probing::Again
    }

    /// The range of a request failed. Returns the parts with a bad sector.
    pub(super) fn note_failed(
        &self,
        number: u64,
        range: &Range<u64>,
        access: Access,
    ) -> Vec<Range<u64>> {
        let mut state = self.0.lock();
        let mut known = state.overlapping(range);
        let (begun, succeeded) = (state.begun, *state.last_success(access));
        // Requests that began before the failure may fail for the same passing reason.
        let is_proved = |since: u64| number > since && succeeded > since;
        let bad = known.iter().filter(|(_, since)| is_proved(*since));
        let bad = bad
            .map(|(part, _)| part.start.max(range.start)..part.end.min(range.end))
            .collect();
        if state.failed.len() >= MOST {
            state.failed.clear();
            known.clear();
        }
        // What is suspect already stays so since its own failure.
        let mut start = range.start;
        for (suspect, _) in known {
            state.add(start..suspect.start, begun);
            start = suspect.end;
        }
        state.add(start..range.end, begun);
        bad
    }
}

impl State {
    const fn last_success(&mut self, access: Access) -> &mut u64 {
        match access {
            Access::Read => &mut self.read,
            Access::Write => &mut self.written,
        }
    }

    /// The suspect ranges that overlap this one, in order, each with the value of `begun` at its failure.
    fn overlapping(&self, range: &Range<u64>) -> Vec<(Range<u64>, u64)> {
        let before = self.failed.range(..range.start).next_back();
        let all = before.into_iter().chain(self.failed.range(range.clone()));
        let all = all.map(|(start, (end, since))| (*start..*end, *since));
        all.filter(|(suspect, _)| range.start < suspect.end)
            .collect()
    }

    /// Makes a range suspect, unless it is empty. Beyond the most ranges it is forgotten.
    fn add(&mut self, range: Range<u64>, since: u64) {
        if !range.is_empty() && self.failed.len() < MOST {
            self.failed.insert(range.start, (range.end, since));
        }
    }

    /// Ends the suspicion of every byte of this range.
    fn forget(&mut self, range: &Range<u64>) {
        if self.failed.is_empty() {
            return;
        }
        for (suspect, since) in self.overlapping(range) {
            self.failed.remove(&suspect.start);
            self.add(suspect.start..range.start, since);
            self.add(range.end..suspect.end, since);
        }
    }
}

impl Shared {
    /// Judges the end of a read of `range`. Marks the parts with a bad sector.
    pub(super) fn judge_read(
        self: &Arc<Self>,
        number: u64,
        range: &Range<u64>,
        result: Result<(), IoError>,
    ) -> Result<(), Wrong> {
        let is_bad = self.judge(number, range, Access::Read, &result);
        result.map_err(|error| match error {
            IoError::Medium(_) if is_bad => Wrong::BadSector(error),
            IoError::Medium(_) => {
                self.probe();
                Wrong::Io(error)
            }
            error => Wrong::Io(error),
        })
    }

    /// Judges the end of a request. Marks the parts with a bad sector, and returns whether there are any.
    pub(super) fn judge(
        &self,
        number: u64,
        range: &Range<u64>,
        access: Access,
        result: &Result<(), IoError>,
    ) -> bool {
        match result {
            Ok(()) => self.suspects.note_success(number, range, access),
            Err(IoError::Medium(_)) => {
                let bad = self.suspects.note_failed(number, range, access);
                let is_bad = !bad.is_empty();
                for part in bad {
                    self.mark_bad(part);
                }
                return is_bad;
            }
            Err(_) => {}
        }
        false
    }

    /// Reads the superblocks without waiting, to see whether the device answers. Without these reads, a bad sector
    /// would stay suspect while no other range is read. One superblock may be in a bad sector, so each is read alone.
    fn probe(self: &Arc<Self>) {
        let Some(engine) = self.engine.upgrade() else {
            return;
        };
        if !self.suspects.begin_probe() {
            return;
        }
        let probe = Arc::new(Probe(Arc::clone(self)));
        for place in PLACES {
            // Loads may wait for each byte of the common arena.
            let buffer = Arena::new(GRANULE).ok();
            let buffer = buffer.and_then(|arena| arena.take(GRANULE));
            let (Some(buffer), Some(flight)) = (buffer, self.flights.begin()) else {
                return;
            };
            let number = self.suspects.begin();
            let probe = Arc::clone(&probe);
            engine.submit(Request {
                op: Op::Read(buffer),
                offset: place,
                done: Box::new(move |completion| {
                    if completion.result.is_ok() {
                        let range = place..place + GRANULE as u64;
                        probe.0.suspects.note_success(number, &range, Access::Read);
                    }
                    drop(probe);
                    drop(flight);
                }),
            });
        }
    }
}

/// The reads of one probe. It ends when all of them have ended.
struct Probe(Arc<Shared>);

impl Drop for Probe {
    fn drop(&mut self) {
        if self.0.suspects.end_probe() {
            self.0.probe();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Range<u64> = 8192..16384;
    const SECOND: Range<u64> = 16384..32768;

    /// Whether a read of this range, which begins and fails now, finds a bad sector.
    fn fails(suspects: &Suspects, range: Range<u64>) -> bool {
        let number = suspects.begin();
        !suspects
            .note_failed(number, &range, Access::Read)
            .is_empty()
    }

    fn read(suspects: &Suspects, range: Range<u64>) {
        suspects.note_success(suspects.begin(), &range, Access::Read);
    }

    fn written(suspects: &Suspects, range: Range<u64>) {
        suspects.note_success(suspects.begin(), &range, Access::Write);
    }

    #[test]
    fn a_range_has_a_bad_sector_when_it_fails_again_after_a_later_read() {
        let suspects = Suspects::default();
        let failing = suspects.begin();
        let before = suspects.begin();
        let bad = suspects.note_failed(failing, &FIRST, Access::Read);
        assert_eq!(bad, [], "a first failure");
        // This read began before the failure, so it may be from before the device failed.
        suspects.note_success(before, &SECOND, Access::Read);
        assert!(!fails(&suspects, FIRST));
        written(&suspects, SECOND);
        assert!(!fails(&suspects, FIRST));
        read(&suspects, SECOND);
        assert!(fails(&suspects, FIRST));
        assert!(fails(&suspects, FIRST), "and stays bad");
        assert!(!fails(&suspects, SECOND), "a first failure");
    }

    #[test]
    fn a_range_that_was_read_or_written_is_not_suspect() {
        let suspects = Suspects::default();
        for is_read in [true, false] {
            assert!(!fails(&suspects, FIRST));
            let whole = FIRST.start..SECOND.end;
            match is_read {
                true => read(&suspects, whole),
                false => written(&suspects, whole),
            }
            read(&suspects, SECOND);
        }
        assert!(!fails(&suspects, FIRST));
        read(&suspects, FIRST.start..FIRST.end - 4096);
        assert!(fails(&suspects, FIRST), "a part of it was read");
    }

    #[test]
    fn a_range_that_overlaps_a_suspect_one_is_judged_by_its_failure() {
        for range in [4096..12288, 12288..20480, 4096..20480, 8192..12288] {
            let suspects = Suspects::default();
            assert!(!fails(&suspects, FIRST));
            assert!(!fails(&suspects, range.clone()), "no read succeeded since");
            read(&suspects, 32768..36864);
            assert!(fails(&suspects, range.clone()), "{range:?}");
            assert!(fails(&suspects, FIRST), "{range:?}");
            assert!(!fails(&suspects, 20480..32768), "it only adjoins");
        }
    }

    /// A device may lose a moment's requests, and be well before the last of them has failed.
    #[test]
    fn a_request_that_began_before_the_first_failure_proves_nothing() {
        let suspects = Suspects::default();
        let (first, second) = (suspects.begin(), suspects.begin());
        let failed = |number| suspects.note_failed(number, &FIRST, Access::Read);
        assert!(failed(first).is_empty());
        read(&suspects, SECOND);
        assert!(failed(second).is_empty());
        assert_eq!(failed(suspects.begin()), [FIRST]);
    }

    #[test]
    fn a_write_that_fails_is_judged_by_writes() {
        let suspects = Suspects::default();
        let failed = || suspects.note_failed(suspects.begin(), &FIRST, Access::Write);
        assert!(failed().is_empty());
        read(&suspects, SECOND);
        assert!(failed().is_empty());
        written(&suspects, SECOND);
        assert_eq!(failed(), [FIRST]);
    }

    #[test]
    fn only_what_failed_twice_is_bad() {
        let suspects = Suspects::default();
        assert!(!fails(&suspects, FIRST));
        read(&suspects, 32768..36864);
        let number = suspects.begin();
        let twice = 12288..FIRST.end;
        let bad = suspects.note_failed(number, &(twice.start..20480), Access::Read);
        assert_eq!(bad, [twice]);
        assert!(!fails(&suspects, 16384..20480), "it failed once");
    }

    #[test]
    fn a_part_that_failed_later_is_suspect_since_its_own_failure() {
        let suspects = Suspects::default();
        assert!(!fails(&suspects, FIRST));
        let between = suspects.begin();
        assert!(!fails(&suspects, 12288..20480));
        suspects.note_success(between, &(32768..36864), Access::Read);
        assert!(!fails(&suspects, 16384..20480));
        assert!(fails(&suspects, 12288..16384));
    }

    #[test]
    fn a_part_that_was_written_is_not_suspect_and_the_rest_is() {
        let suspects = Suspects::default();
        assert!(!fails(&suspects, FIRST));
        written(&suspects, 4096..12288);
        read(&suspects, SECOND);
        assert!(!fails(&suspects, 4096..12288));
        assert!(fails(&suspects, 12288..16384));
    }

    #[test]
    fn the_suspects_are_bounded() {
        let suspects = Suspects::default();
        for start in 0..3 * MOST as u64 {
            fails(&suspects, start..start + 1);
        }
        assert!(suspects.0.lock().failed.len() <= MOST);
        // Each write makes two ranges of one.
        fails(&suspects, 0..10 * MOST as u64);
        for start in 0..4 * MOST as u64 {
            written(&suspects, 2 * start + 1..2 * start + 2);
        }
        assert!(suspects.0.lock().failed.len() <= MOST);
    }
}
