//! The frames of a segment of the log.
//!
//! ```text
//!  salt u64 │ kind u32 │ length u32 │ position u64 │ epoch u64 │ CRC of the body u64 │ CRC of this head u64 │ body
//! ```
//!
//! Each use of a file has its own salt, so frames of an earlier use do not count.

use crate::store::LogSeq;
use crate::store::record::crc;
use kvpool_types::Epoch;

/// The bytes of a frame's head.
pub(super) const HEAD: usize = 48;
/// Frames begin at multiples of this.
const ALIGN: u64 = 8;

/// The meaning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A group of records.
    Group,
    /// The log was cut through this position.
    Cut,
    /// Every group through this position was durable when this frame was written, and none follows.
    /// The next frame replaces this one.
    End,
    /// The log continues in the next segment.
    Next,
}

impl Kind {
    const fn number(self) -> u32 {
        match self {
            Self::Group => 1,
            Self::Cut => 2,
            Self::End => 3,
            Self::Next => 4,
        }
    }

    const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Group),
            2 => Some(Self::Cut),
            3 => Some(Self::End),
            4 => Some(Self::Next),
            _ => None,
        }
    }
}

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    pub(super) length: u32,
    pub(super) seq: LogSeq,
    pub(super) epoch: Epoch,
    body_crc: u64,
}

impl Head {
    /// The head of a frame with this body.
    pub(super) fn of(kind: Kind, seq: LogSeq, epoch: Epoch, body: &[u8]) -> Option<Self> {
        Some(Self {
            kind,
            length: u32::try_from(body.len()).ok()?,
            seq,
            epoch,
            body_crc: crc(body),
        })
    }

    /// Writes the frame into `out`, which is cleared first.
    pub(super) fn write(&self, salt: u64, body: &[u8], out: &mut Vec<u8>) {
        out.clear();
        out.extend_from_slice(&salt.to_le_bytes());
        out.extend_from_slice(&self.kind.number().to_le_bytes());
        out.extend_from_slice(&self.length.to_le_bytes());
        out.extend_from_slice(&self.seq.0.to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
        out.extend_from_slice(&self.body_crc.to_le_bytes());
        let own = crc(out);
        out.extend_from_slice(&own.to_le_bytes());
        out.extend_from_slice(body);
    }

    /// Reads the head at the start of `bytes`; `None` without a head of this salt.
    pub(super) fn read(bytes: &[u8], salt: u64) -> Option<Self> {
        let head = bytes.get(..HEAD)?;
        let (covered, own) = head.split_at_checked(HEAD - 8)?;
        let mut words = covered.as_chunks::<8>().0.iter().copied();
        let mut word = || words.next().map(u64::from_le_bytes);
        if word()? != salt || u64::from_le_bytes(own.try_into().ok()?) != crc(covered) {
            return None;
        }
        let both = word()?.to_le_bytes();
        let (kind, length) = both.split_at_checked(4)?;
        Some(Self {
            kind: Kind::from_number(u32::from_le_bytes(kind.try_into().ok()?))?,
            length: u32::from_le_bytes(length.try_into().ok()?),
            seq: LogSeq(word()?),
            epoch: Epoch(word()?),
            body_crc: word()?,
        })
    }

    /// True if these bytes are the head's body.
    pub(super) fn holds(&self, body: &[u8]) -> bool {
        crc(body) == self.body_crc
    }

    /// The bytes from this frame's start to the next one's.
    pub(super) const fn span(&self) -> u64 {
        span(self.length as u64)
    }
}

/// The bytes of a frame with a body of `length` bytes.
pub(super) const fn span(length: u64) -> u64 {
    (HEAD as u64 + length).next_multiple_of(ALIGN)
}

/// True when any frame of this salt begins in `bytes`, which start at a frame boundary.
pub(super) fn is_any_in(bytes: &[u8], salt: u64) -> bool {
    let starts = bytes.as_chunks::<8>().0.iter().enumerate();
    starts
        .filter(|(_, word)| u64::from_le_bytes(**word) == salt)
        .any(|(at, _)| {
            bytes
                .get(at * 8..)
                .is_some_and(|rest| Head::read(rest, salt).is_some())
        })
}
