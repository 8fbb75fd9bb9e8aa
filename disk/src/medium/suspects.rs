//! Tells a bad sector from a device that fails.
//!
//! A device that is about to fail, or whose cable is loose, fails every request. Its copies must stay for its return.
//! So a failed range is only suspect. It has a bad sector if it fails again, after a read that began later has
//! succeeded.

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
    /// The failed ranges by their start: the end, and the value of `begun` at the first failure.
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
    fn the_suspects_are_bounded() {
        let suspects = Suspects::default();
        for start in 0..3 * MOST as u64 {
            suspects.note_failed(&(start..start + 1));
        }
        assert!(suspects.0.lock().failed.len() <= MOST);
    }
}
