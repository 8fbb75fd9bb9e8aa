//! Tells a bad sector from a device that fails.
//!
//! A device that is about to fail, or whose cable is loose, fails every request. Its copies must stay for its return.
//! So a failed range is only suspect. It has a bad sector if it fails again, after a read that began later has
//! succeeded.

use super::Shared;
use super::error::Wrong;
use crate::{Arena, GRANULE, IoError, Op, Request};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The most ranges that are suspect at a time. Beyond it all are forgotten.
const MOST: usize = 4096;
/// The range that is read to see whether the device answers: both superblocks. They were written, so the device must
/// read them.
const PROBE: Range<u64> = 0..2 * GRANULE as u64;

/// The ranges that failed, and what was read since.
#[derive(Debug, Default)]
pub(super) struct Suspects(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The number of the read that began last.
    begun: u64,
    /// The highest number of a read that succeeded.
    succeeded: u64,
    /// The failed ranges by their start: the end, and the value of `begun` at the first failure.
    failed: BTreeMap<u64, (u64, u64)>,
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

    /// A range failed. Returns whether it has a bad sector.
    pub(super) fn note_failed(&self, range: &Range<u64>) -> bool {
        let mut state = self.0.lock();
        let State {
            begun,
            succeeded,
            failed,
        } = &mut *state;
        if let Some((end, since)) = failed.get(&range.start).copied()
            && end == range.end
        {
            return *succeeded > since;
        }
        if failed.len() >= MOST {
            failed.clear();
        }
        failed.insert(range.start, (range.end, *begun));
        false
    }
}

impl State {
    /// Ends the suspicion of every range inside this one.
    fn forget(&mut self, range: &Range<u64>) {
        if self.failed.is_empty() {
            return;
        }
        let inside = self.failed.range(range.clone());
        let inside = inside.filter(|(_, (end, _))| *end <= range.end);
        let inside: Vec<u64> = inside.map(|(start, _)| *start).collect();
        for start in inside {
            self.failed.remove(&start);
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

    /// Reads the superblocks without waiting, to see whether the device answers. Without this read, a bad sector would
    /// stay suspect while no other range is read.
    fn probe(self: &Arc<Self>) {
        // Loads may wait for each byte of the common arena.
        let buffer = Arena::new(GRANULE * 2).ok();
        let buffer = buffer.and_then(|arena| arena.take(GRANULE * 2));
        let engine = self.engine.upgrade();
        let (Some(engine), Some(buffer), Some(flight)) = (engine, buffer, self.flights.begin())
        else {
            return;
        };
        let number = self.suspects.begin();
        let shared = Arc::clone(self);
        engine.submit(Request {
            op: Op::Read(buffer),
            offset: PROBE.start,
            done: Box::new(move |completion| {
                if completion.result.is_ok() {
                    shared.suspects.note_read(number, &PROBE);
                }
                drop(flight);
            }),
        });
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
    fn the_suspects_are_bounded() {
        let suspects = Suspects::default();
        for start in 0..3 * MOST as u64 {
            suspects.note_failed(&(start..start + 1));
        }
        assert!(suspects.0.lock().failed.len() <= MOST);
    }
}
