//! Tells a bad sector from a device that fails.
//!
//! A device that is about to fail, or whose cable is loose, fails every request. Its copies must stay for its return.
//! So a failed range is only suspect. A range that overlaps it has a bad sector if it fails after a read that began
//! later has succeeded. The overlap is enough, since blocks of other lengths are written there later.

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
    /// The number of the read that began last.
    begun: u64,
    /// The highest number of a read that succeeded.
    succeeded: u64,
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

impl Suspects {
    /// Numbers a read that begins.
    pub(super) fn begin(&self) -> u64 {
        let mut state = self.0.lock();
        state.begun += 1;
        state.begun
    }

    /// A read with this number succeeded.
    fn note_read(&self, number: u64, range: &Range<u64>) {
        let mut state = self.0.lock();
        state.succeeded = state.succeeded.max(number);
        state.forget(range);
    }

    /// A write succeeded. It shows that its own range is good. A device that fails may still take writes, so it shows
    /// nothing about other ranges.
    pub(super) fn note_written(&self, range: &Range<u64>) {
        self.0.lock().forget(range);
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

    /// A range failed. Returns whether it has a bad sector.
    pub(super) fn note_failed(&self, range: &Range<u64>) -> bool {
        let mut state = self.0.lock();
        let mut known = state.overlapping(range);
        let (begun, succeeded) = (state.begun, state.succeeded);
        if known.iter().any(|(_, since)| succeeded > *since) {
            return true;
        }
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
        false
    }
}

impl State {
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
    /// Judges the end of a read of `range`. Marks a range with a bad sector.
    pub(super) fn judge_read(
        self: &Arc<Self>,
        number: u64,
        range: Range<u64>,
        result: Result<(), IoError>,
    ) -> Result<(), Wrong> {
        match result {
            Ok(()) => {
                self.suspects.note_read(number, &range);
                Ok(())
            }
            Err(error @ IoError::Medium(_)) => match self.suspects.note_failed(&range) {
                true => {
                    self.mark_bad(range);
                    Err(Wrong::BadSector(error))
                }
                false => {
                    self.probe();
                    Err(Wrong::Io(error))
                }
            },
            Err(error) => Err(Wrong::Io(error)),
        }
    }

    /// Reads the superblocks without waiting, to see whether the device answers. Without these reads, a bad sector
    /// would stay suspect while no other range is read. One superblock may be in a bad sector, so each is read alone.
    pub(super) fn probe(self: &Arc<Self>) {
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
                        probe.0.suspects.note_read(number, &range);
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

    #[test]
    fn a_range_has_a_bad_sector_when_it_fails_again_after_a_later_read() {
        let suspects = Suspects::default();
        let before = suspects.begin();
        assert!(!suspects.note_failed(&FIRST));
        // This read began before the failure, so it may be from before the device failed.
        suspects.note_read(before, &SECOND);
        assert!(!suspects.note_failed(&FIRST));
        suspects.note_written(&SECOND);
        assert!(!suspects.note_failed(&FIRST));
        suspects.note_read(suspects.begin(), &SECOND);
        assert!(suspects.note_failed(&FIRST));
        assert!(suspects.note_failed(&FIRST), "and stays bad");
        assert!(!suspects.note_failed(&SECOND), "a first failure");
    }

    #[test]
    fn a_range_that_was_read_or_written_is_not_suspect() {
        let suspects = Suspects::default();
        for is_read in [true, false] {
            assert!(!suspects.note_failed(&FIRST));
            let whole = FIRST.start..SECOND.end;
            match is_read {
                true => suspects.note_read(suspects.begin(), &whole),
                false => suspects.note_written(&whole),
            }
            suspects.note_read(suspects.begin(), &SECOND);
        }
        assert!(!suspects.note_failed(&FIRST));
        suspects.note_read(suspects.begin(), &(FIRST.start..FIRST.end - 4096));
        assert!(suspects.note_failed(&FIRST), "a part of it was read");
    }

    #[test]
    fn a_range_that_overlaps_a_suspect_one_is_judged_by_its_failure() {
        for range in [4096..12288, 12288..20480, 4096..20480, 8192..12288] {
            let suspects = Suspects::default();
            assert!(!suspects.note_failed(&FIRST));
            assert!(!suspects.note_failed(&range), "no read succeeded since");
            suspects.note_read(suspects.begin(), &(32768..36864));
            assert!(suspects.note_failed(&range), "{range:?}");
            assert!(suspects.note_failed(&FIRST), "{range:?}");
            assert!(!suspects.note_failed(&(20480..32768)), "it only adjoins");
        }
    }

    #[test]
    fn a_part_that_failed_later_is_suspect_since_its_own_failure() {
        let suspects = Suspects::default();
        assert!(!suspects.note_failed(&FIRST));
        let between = suspects.begin();
        assert!(!suspects.note_failed(&(12288..20480)));
        suspects.note_read(between, &(32768..36864));
        assert!(!suspects.note_failed(&(16384..20480)));
        assert!(suspects.note_failed(&(12288..16384)));
    }

    #[test]
    fn a_part_that_was_written_is_not_suspect_and_the_rest_is() {
        let suspects = Suspects::default();
        assert!(!suspects.note_failed(&FIRST));
        suspects.note_written(&(4096..12288));
        suspects.note_read(suspects.begin(), &SECOND);
        assert!(!suspects.note_failed(&(4096..12288)));
        assert!(suspects.note_failed(&(12288..16384)));
    }

    #[test]
    fn the_suspects_are_bounded() {
        let suspects = Suspects::default();
        for start in 0..3 * MOST as u64 {
            suspects.note_failed(&(start..start + 1));
        }
        assert!(suspects.0.lock().failed.len() <= MOST);
        // Each write makes two ranges of one.
        suspects.note_failed(&(0..10 * MOST as u64));
        for start in 0..4 * MOST as u64 {
            suspects.note_written(&(2 * start + 1..2 * start + 2));
        }
        assert!(suspects.0.lock().failed.len() <= MOST);
    }
}
