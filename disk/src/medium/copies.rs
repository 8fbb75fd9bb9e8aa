//! Reading and writing the two copies of the superblock.

use super::error::MediumRefused;
use super::superblock::{Superblock, Unreadable};
use crate::{Arena, Buffer, Completion, Engine, GRANULE, IoError, Op, Request};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Instant;

/// The places of the copies, in bytes.
const PLACES: [u64; 2] = [0, GRANULE as u64];

/// Runs one request and waits for it, until `until` where that is given. The engine keeps the
/// buffer of a request that takes longer. Never call it on the engine's own thread.
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
            // The receiver lives until the answer comes.
            let _ = sender.send(completion);
        }),
    });
    let answer = match until {
        None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
        Some(until) => receiver.recv_timeout(until.saturating_duration_since(Instant::now())),
    };
    let failure = match answer {
        Ok(Completion { buffer, result }) => return (buffer, result),
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
    /// The sequence number in each copy; 0 where the copy says nothing.
    sequences: [u64; 2],
    /// When requests are given up.
    pub(super) until: Option<Instant>,
}

impl Copies {
    /// Reads both copies. Gives what each of them says.
    pub(super) fn read(
        engine: Arc<dyn Engine>,
        arena: Arc<Arena>,
    ) -> Result<(Self, [Result<Superblock, Unreadable>; 2]), MediumRefused> {
        let mut copies = Self {
            engine,
            arena,
            sequences: [0; 2],
            until: None,
        };
        let [front, back] = PLACES;
        let found = [copies.read_one(front)?, copies.read_one(back)?];
        for (sequence, copy) in copies.sequences.iter_mut().zip(&found) {
            *sequence = copy.as_ref().map_or(0, |superblock| superblock.sequence);
        }
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

    /// Numbers the superblock and writes it over the older copy, flushes, and then over the other
    /// one. A power cut at any time leaves one copy whole: the former superblock or this one.
    ///
    /// One copy that can no longer be written is logged and tolerated. The other one stays as it is, and the write
    /// fails, where it may be the only whole one: after a flush that failed, and beside a copy that holds no superblock.
    pub(super) fn write(&mut self, superblock: &mut Superblock) -> Result<(), MediumRefused> {
        let ([first, second], [front, back]) = (self.sequences, PLACES);
        superblock.sequence = first.max(second).saturating_add(1);
        let order = if first <= second {
            [front, back]
        } else {
            [back, front]
        };
        let bytes = superblock.encode();
        let mut failure = None;
        let mut written = false;
        for place in order {
            if let Err(error) = self.write_one(place, &bytes) {
                tracing::warn!(%error, place, "a copy of the superblock was not written");
                // A bad sector stays bad: without the other place no superblock would ever be written.
                if !matches!(self.read_one(place)?, Ok(_) | Err(Unreadable::Failed)) {
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
            for (sequence, _) in self
                .sequences
                .iter_mut()
                .zip(PLACES)
                .filter(|(_, p)| *p == place)
            {
                *sequence = superblock.sequence;
            }
        }
        // A first superblock is written twice, or one damaged copy beside zeros would say nothing.
        let is_first = first.max(second) == 0;
        failure.filter(|_| is_first || !written).map_or(Ok(()), Err)
    }

    fn write_one(&self, place: u64, bytes: &[u8]) -> Result<(), MediumRefused> {
        let mut buffer = self.arena.take(GRANULE).ok_or(MediumRefused::NoRoom)?;
        for (to, from) in buffer.iter_mut().zip(bytes) {
            *to = *from;
        }
        let (_, written) = perform(&*self.engine, Op::Write(buffer), place, self.until);
        written.map_err(MediumRefused::Io)
    }

    /// Makes all writes that were answered outlive a power cut.
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

/// The superblock to believe; `None` where both copies are zero. So it is where one is zero and the other damaged: a
/// format that failed after its first write, before anything could be stored.
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
