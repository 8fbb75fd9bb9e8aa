//! Reads and writes the two copies of the superblock.

use super::error::MediumRefused;
use super::superblock::{Superblock, Unreadable};
use crate::{Arena, Buffer, Completion, Engine, GRANULE, IoError, Op, Request};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Instant;

/// The offsets of the copies in bytes.
pub(super) const PLACES: [u64; 2] = [0, GRANULE as u64];

/// Runs one request and waits for it, at most until `until` if that is given. After that the engine keeps the
/// request's buffer. Never call this on the engine's own thread.
pub(super) fn perform(
    engine: &dyn Engine,
    op: Op,
    offset: u64,
    until: Option<Instant>,
) -> (Option<Buffer>, Result<(), IoError>) {
    let (sender, receiver) = sync_channel(1);
    engine.submit(Request {
        op,
        offset,
        done: Box::new(move |completion| {
            // The receiver may have stopped waiting. Then no task needs the completion.
            let _ = sender.send(completion);
        }),
    });
    let answer = match until {
        None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
        Some(until) => receiver.recv_timeout(until.saturating_duration_since(Instant::now())),
    };
    let failure = match answer {
        Ok(Completion { buffer, result, .. }) => return (buffer, result),
        Err(RecvTimeoutError::Timeout) => io::ErrorKind::TimedOut.into(),
        Err(RecvTimeoutError::Disconnected) => io::Error::other("the engine dropped a request"),
    };
    (None, Err(IoError::System(failure)))
}

/// The two copies on one device.
#[derive(Debug)]
pub(super) struct Copies {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) arena: Arc<Arena>,
    /// The sequence number of each copy; 0 for an unreadable copy.
    sequences: [u64; 2],
    /// Whether each offset was read and holds no superblock.
    empty: [bool; 2],
    /// When requests are given up.
    pub(super) until: Option<Instant>,
}

impl Copies {
    /// Reads both copies. Returns the content of each.
    pub(super) fn read(
        engine: Arc<dyn Engine>,
        arena: Arc<Arena>,
        until: Option<Instant>,
    ) -> Result<(Self, [Result<Superblock, Unreadable>; 2]), MediumRefused> {
        let mut copies = Self {
            engine,
            arena,
            sequences: [0; 2],
            empty: [false; 2],
            until,
        };
        let [front, back] = PLACES;
        let found = [copies.read_one(front)?, copies.read_one(back)?];
        for (sequence, copy) in copies.sequences.iter_mut().zip(&found) {
            *sequence = copy.as_ref().map_or(0, |superblock| superblock.sequence);
        }
        copies.empty = [0, 1].map(|at| says_nothing(&found[at]));
        Ok((copies, found))
    }

    fn read_one(&self, place: u64) -> Result<Result<Superblock, Unreadable>, MediumRefused> {
        let buffer = self.arena.take(GRANULE).ok_or(MediumRefused::NoRoom)?;
        match perform(&*self.engine, Op::Read(buffer), place, self.until) {
            (Some(buffer), Ok(())) => Ok(Superblock::decode(&buffer)),
            // The other copy may be readable.
            (_, Ok(()) | Err(IoError::Medium(_))) => Ok(Err(Unreadable::Failed)),
            (_, Err(error)) => Err(MediumRefused::Io(error)),
        }
    }

    /// Gives the superblock the next sequence number. Writes it over the older copy, flushes, and then writes
    /// it over the other copy.
    ///
    /// A copy that cannot be written is logged and tolerated. There are two exceptions. The only valid
    /// superblock is not overwritten while the other offset can be read and holds none. After a failed flush
    /// the content of the first copy is unknown, so the other copy is not overwritten either.
    pub(super) fn write(&mut self, superblock: &mut Superblock) -> Result<(), MediumRefused> {
        self.write_over(superblock, true)
    }

    /// [`Copies::write`], where `keeps` says whether the former superblock must survive a failure.
    pub(super) fn write_over(
        &mut self,
        superblock: &mut Superblock,
        keeps: bool,
    ) -> Result<(), MediumRefused> {
        let [first, second] = self.sequences;
        superblock.sequence = first.max(second).saturating_add(1);
        let order = if first <= second { [0, 1] } else { [1, 0] };
        let bytes = superblock.encode();
        let mut failure = None;
        let mut written = false;
        for at in order {
            let place = PLACES[at];
            if let Err(error) = self.write_one(place, &bytes) {
                tracing::warn!(%error, place, "a copy of the superblock was not written");
                if keeps && !written && self.holds_none(at) {
                    return Err(error);
                }
                failure = Some(error);
                continue;
            }
            match self.flush() {
                Ok(()) => written = true,
                Err(error) if written => {
                    tracing::warn!(%error, place, "a copy of the superblock was not flushed");
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.sequences[at] = superblock.sequence;
            self.empty[at] = false;
        }
        // Both copies of a first superblock must be written. Otherwise a damaged copy beside zeros would
        // count as blank.
        let is_first = first.max(second) == 0;
        failure.filter(|_| is_first || !written).map_or(Ok(()), Err)
    }

    /// Whether an offset whose write failed can be read, and holds no superblock. A bad sector cannot be
    /// read. Then the other copy is overwritten, since no superblock could ever be written otherwise.
    fn holds_none(&mut self, at: usize) -> bool {
        let found = self.read_one(PLACES[at]);
        self.empty[at] |= found.as_ref().is_ok_and(says_nothing);
        self.empty[at] || found.is_err()
    }

    fn write_one(&self, place: u64, bytes: &[u8]) -> Result<(), MediumRefused> {
        let mut buffer = self.arena.take(GRANULE).ok_or(MediumRefused::NoRoom)?;
        for (to, from) in buffer.iter_mut().zip(bytes) {
            *to = *from;
        }
        let (_, written) = perform(&*self.engine, Op::Write(buffer), place, self.until);
        written.map_err(MediumRefused::Io)
    }

    /// Makes all completed writes survive a power cut.
    pub(super) fn flush(&self) -> Result<(), MediumRefused> {
        perform(&*self.engine, Op::Flush, 0, self.until)
            .1
            .map_err(MediumRefused::Io)
    }

    /// Whether all bytes of `range` are zero.
    pub(super) fn is_zero(&self, range: std::ops::Range<u64>) -> Result<bool, MediumRefused> {
        let mut at = range.start;
        while at < range.end {
            let buffer = self.arena.take(GRANULE).ok_or(MediumRefused::NoRoom)?;
            let (buffer, read) = perform(&*self.engine, Op::Read(buffer), at, self.until);
            read.map_err(MediumRefused::Io)?;
            if buffer.is_none_or(|buffer| buffer.iter().any(|byte| *byte != 0)) {
                return Ok(false);
            }
            at += GRANULE as u64;
        }
        Ok(true)
    }
}

/// Whether an offset was read and holds no superblock.
fn says_nothing(found: &Result<Superblock, Unreadable>) -> bool {
    !matches!(found, Ok(_) | Err(Unreadable::Failed))
}

/// The valid superblock with the higher sequence number; `None` for a blank device. A device with one zero
/// copy and one damaged copy counts as blank: its format failed after the first write, before any store.
pub(super) fn newest(
    copies: [Result<Superblock, Unreadable>; 2],
) -> Result<Option<Superblock>, MediumRefused> {
    let newer = copies.iter().find_map(|copy| match copy {
        Err(Unreadable::NewerFormat(format)) => Some(*format),
        _ => None,
    });
    if let Some(format) = newer {
        return Err(MediumRefused::NewerFormat(format));
    }
    let any = |wanted| {
        copies
            .iter()
            .any(|copy| copy.as_ref().err() == Some(&wanted))
    };
    let is_begun = any(Unreadable::Zeros) && any(Unreadable::Damaged);
    let damaged = any(Unreadable::Damaged) || any(Unreadable::Failed);
    let foreign = any(Unreadable::Foreign);
    let valid = copies.into_iter().flatten().max_by_key(|s| s.sequence);
    match valid {
        Some(superblock) => Ok(Some(superblock)),
        None if is_begun => Ok(None),
        None if damaged => Err(MediumRefused::Damaged),
        None if foreign => Err(MediumRefused::Foreign),
        None => Ok(None),
    }
}
