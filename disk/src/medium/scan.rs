//! Scans a range of a medium for extents, in bounded steps.

use super::DATA_START;
use super::copies::perform;
use super::error::Wrong;
use super::fields::checksum;
use super::header::{Header, HeaderWrong, footprint, header_bytes};
use crate::{Arena, Buffer, Engine, GRANULE, IoError, Op};
use kvpool_types::checksum::CHUNK;
use kvpool_types::{Length, MediumId};
use std::ops::Range;
use std::sync::Arc;

/// The bytes that one step reads. They hold the longest header, or a chunk.
const WINDOW: u64 = 256 << 10;
const STEP: u64 = GRANULE as u64;

/// The result of a scan at one granule.
#[derive(Debug)]
pub struct Found {
    /// The offset, in bytes from the medium's start.
    pub offset: u64,
    /// The header, if one could be read.
    pub header: Option<Header>,
    /// Whether the header and every chunk are valid.
    pub verdict: Result<(), Wrong>,
}

/// The result of one step.
#[derive(Debug)]
pub enum Step {
    /// Bytes were read; they prove nothing yet.
    Read,
    /// An extent, intact or damaged, or a range that could not be read.
    Found(Box<Found>),
    /// The end of the range was reached.
    End,
}

/// Scans a range from front to back. A step makes at most one request of 256 KiB and blocks on it, so the
/// caller sets the pace.
///
/// After an intact extent, the scan continues at the extent's end. Otherwise it continues at the next
/// granule, since a newer extent may lie inside the remains of an older one. Extents that are stored during
/// the scan may appear damaged.
#[derive(Debug)]
pub struct Scan {
    engine: Arc<dyn Engine>,
    medium: MediumId,
    /// The size of the device in bytes, in whole granules.
    size: u64,
    /// The offset of the next granule to read.
    at: u64,
    /// The scan looks for headers before this offset.
    end: u64,
    window: Option<Buffer>,
    /// The range of the medium whose bytes the window holds.
    held: Range<u64>,
    /// The extent whose chunks are being verified, and the next chunk.
    checking: Option<(Header, u64)>,
}

impl Scan {
    /// A scan of the granules of `range`; `None` when the arena has no room for the window.
    pub(super) fn new(
        engine: Arc<dyn Engine>,
        arena: &Arc<Arena>,
        medium: MediumId,
        range: Range<u64>,
    ) -> Option<Self> {
        let size = engine.size() / STEP * STEP;
        let window = arena.take(Length(WINDOW.min(size)).as_usize())?;
        Some(Self {
            engine,
            medium,
            size,
            at: range.start.min(size).max(DATA_START).next_multiple_of(STEP),
            end: range.end.min(size),
            window: Some(window),
            held: 0..0,
            checking: None,
        })
    }

    /// The offset that the scan has reached, in bytes from the medium's start.
    pub const fn position(&self) -> u64 {
        self.at
    }

    /// Continues the scan, with at most one request.
    pub fn step(&mut self) -> Step {
        while self.checking.is_some() || self.at < self.end {
            let looked = match self.checking.take() {
                Some((header, chunk)) => self.check(header, chunk),
                None => self.look(),
            };
            match looked {
                Looked::Nothing => {}
                Looked::Found(found) => return Step::Found(Box::new(found)),
                Looked::Needs(at) => match self.read(at) {
                    Ok(()) => return Step::Read,
                    Err(error) => return Step::Found(Box::new(self.unreadable(at, error))),
                },
            }
        }
        Step::End
    }

    /// Looks for a header at the next granule.
    fn look(&mut self) -> Looked {
        let at = self.at;
        let Some(first) = self.bytes(at, STEP) else {
            return Looked::Needs(at);
        };
        let size = match Header::announced(first) {
            Err(HeaderWrong::Magic) => {
                self.at += STEP;
                return Looked::Nothing;
            }
            Err(wrong) => return self.found(None, Err(Wrong::Header(wrong))),
            Ok(size) => size as u64,
        };
        if at + size > self.size {
            return self.found(None, Err(Wrong::Header(HeaderWrong::Length)));
        }
        let Some(bytes) = self.bytes(at, size) else {
            return Looked::Needs(at);
        };
        match Header::decode(bytes) {
            Err(wrong) => self.found(None, Err(Wrong::Header(wrong))),
            Ok(header) if header.medium != self.medium => {
                let wrong = Wrong::Header(HeaderWrong::OtherMedium);
                self.found(Some(header), Err(wrong))
            }
            Ok(header) if header.offset != at => {
                let written_for = header.offset;
                self.found(Some(header), Err(Wrong::Misdirected { written_for }))
            }
            Ok(header) => self.check(header, 0),
        }
    }

    /// Verifies the chunks from number `next` on that the window holds.
    fn check(&mut self, header: Header, mut next: u64) -> Looked {
        let data = self.at + header_bytes(header.length).unwrap_or(STEP);
        while let Some(sum) = header.chunks.get(Length(next).as_usize()) {
            let from = data + next * CHUNK;
            let length = CHUNK.min(header.length.saturating_sub(next * CHUNK));
            if from + length > self.size {
                return self.found(Some(header), Err(Wrong::Chunk(next)));
            }
            let Some(bytes) = self.bytes(from, length) else {
                self.checking = Some((header, next));
                return Looked::Needs(from);
            };
            if checksum(bytes) != *sum {
                return self.found(Some(header), Err(Wrong::Chunk(next)));
            }
            next += 1;
        }
        self.found(Some(header), Ok(()))
    }

    /// Reports the extent at the present granule and moves on.
    fn found(&mut self, header: Option<Header>, verdict: Result<(), Wrong>) -> Looked {
        let offset = self.at;
        let length = header.as_ref().filter(|_| verdict.is_ok());
        self.at += length.and_then(|h| footprint(h.length)).unwrap_or(STEP);
        Looked::Found(Found {
            offset,
            header,
            verdict,
        })
    }

    /// Reports a window that the device cannot read, and continues behind it.
    fn unreadable(&mut self, at: u64, error: IoError) -> Found {
        let offset = self.at;
        let header = self.checking.take().map(|(header, _)| header);
        self.at = if header.is_some() {
            offset + STEP
        } else {
            at + WINDOW
        };
        Found {
            offset,
            header,
            verdict: Err(Wrong::Io(error)),
        }
    }

    /// The bytes `at..at + length` of the medium, if the window holds all of them.
    fn bytes(&self, at: u64, length: u64) -> Option<&[u8]> {
        let from = at.checked_sub(self.held.start)?;
        let window = self
            .window
            .as_ref()
            .filter(|_| at + length <= self.held.end)?;
        window.get(Length(from).as_usize()..Length(from + length).as_usize())
    }

    /// Fills the window from `at` on. Near the end of the device, the window ends at the device's end.
    fn read(&mut self, at: u64) -> Result<(), IoError> {
        self.held = 0..0;
        let lost = || IoError::System(std::io::Error::other("the scan has lost its buffer"));
        let window = self.window.take().ok_or_else(lost)?;
        let size = window.len() as u64;
        let start = at.min(self.size.saturating_sub(size));
        let (window, result) = perform(&*self.engine, Op::Read(window), start, None);
        self.window = window;
        result?;
        self.held = start..start + size;
        Ok(())
    }
}

/// The result of looking at the bytes in the window.
enum Looked {
    Nothing,
    Found(Found),
    /// The window must be filled from here on.
    Needs(u64),
}
