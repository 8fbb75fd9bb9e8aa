//! The bytes to load, and the values that prove them.

use super::error::{Invalid, Wrong};
use super::fields::checksum;
use super::header::{Header, HeaderWrong, Order, header_bytes};
use super::store::take;
use crate::{Arena, Buffer, GRANULE};
use kvpool_types::checksum::CHUNK;
use kvpool_types::{Checksum, Length, MediumId, Version};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The most bytes between the header and the first wanted chunk that are read along with them. To read more
/// would cost about as much as a second request.
const NEAR: u64 = 256 << 10;

/// The block that an extent holds according to the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The number of the store, if the caller knows it.
    pub order: Option<Order>,
    /// The block's version.
    pub version: Version,
    /// The block's length in bytes.
    pub length: u64,
    /// The checksum of the whole block.
    pub checksum: Checksum,
}

/// Bytes of one block to load.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub(super) offset: u64,
    pub(super) expected: Expected,
    /// The wanted range of the block, in bytes.
    pub(super) range: Range<u64>,
    /// The length of the header in bytes.
    pub(super) header: u64,
    /// The range of the extent that holds the wanted chunks; whole granules.
    pub(super) data: Range<u64>,
}

impl Wanted {
    /// The whole block at `offset`.
    ///
    /// # Errors
    ///
    /// [`Invalid`] when the expected length is 0 or too long.
    pub fn whole(offset: u64, expected: Expected) -> Result<Self, Invalid> {
        Self::part(offset, expected, 0..expected.length)
    }

    /// The bytes `range` of the block at `offset`. The load reads and verifies whole chunks.
    ///
    /// # Errors
    ///
    /// [`Invalid`] when the expected length is too long, or when the range is empty or ends after
    /// the block.
    pub fn part(offset: u64, expected: Expected, range: Range<u64>) -> Result<Self, Invalid> {
        let length = expected.length;
        let header = header_bytes(length).ok_or(Invalid::Length(length))?;
        if range.start >= range.end || range.end > length {
            let Range { start, end } = range;
            return Err(Invalid::Range { start, end });
        }
        let last = range.end.next_multiple_of(CHUNK).min(length);
        let data =
            header + range.start / CHUNK * CHUNK..header + last.next_multiple_of(GRANULE as u64);
        Ok(Self {
            offset,
            expected,
            range,
            header,
            data,
        })
    }

    fn is_near(&self) -> bool {
        self.data.start - self.header <= NEAR
    }

    /// Takes the buffers for this load from the arena. Waits for them until `until`, or not at all.
    pub fn take(&self, arena: &Arc<Arena>, until: Option<Instant>) -> Option<Room> {
        self.take_by(|bytes| take(arena, bytes, until))
    }

    /// Takes the buffers for this load without waiting, ahead of callers that wait.
    pub fn take_first(&self, arena: &Arc<Arena>) -> Option<Room> {
        self.take_by(|bytes| arena.take_first(bytes))
    }

    fn take_by(&self, take: impl Fn(usize) -> Option<Buffer>) -> Option<Room> {
        if self.is_near() {
            let head = take(Length(self.data.end).as_usize())?;
            return Some(Room { head, data: None });
        }
        // The small buffer is taken first. A load that then waits holds little memory that other
        // loads wait for.
        let head = take(Length(self.header).as_usize())?;
        let bytes = Length(self.data.end - self.data.start).as_usize();
        let data = take(bytes)?;
        Some(Room {
            head,
            data: Some(data),
        })
    }

    /// Verifies the header, and each chunk of the range. `proved` gets each valid chunk and its offset in the
    /// block at once, while the chunk is in the processor's cache. Returns the checksums of the chunks.
    pub(super) fn verify(
        &self,
        medium: MediumId,
        room: &Room,
        mut proved: impl FnMut(u64, &[u8]),
    ) -> Result<Vec<Checksum>, Wrong> {
        let header = Header::decode(&room.head).map_err(Wrong::Header)?;
        self.expected.check(&header, medium, self.offset)?;
        let first = self.range.start / CHUNK;
        let chunks = room.chunks(self).chunks(Length(CHUNK).as_usize());
        let sums = header.chunks.iter().skip(Length(first).as_usize());
        let mut verified = self.range.start / CHUNK * CHUNK;
        for ((bytes, sum), number) in chunks.zip(sums).zip(first..) {
            if checksum(bytes) != *sum {
                return Err(Wrong::Chunk(number));
            }
            proved(verified, bytes);
            verified += bytes.len() as u64;
        }
        // This guards the arithmetic above: the load never returns bytes that are not verified.
        if verified < self.range.end {
            return Err(Wrong::Chunk(verified / CHUNK));
        }
        let mut sums = header.chunks;
        let before = Length(first).as_usize().min(sums.len());
        sums.drain(..before);
        sums.truncate(Length(self.range.end.div_ceil(CHUNK) - first).as_usize());
        Ok(sums)
    }
}

impl Expected {
    /// Checks that this header is the expected block's, at this offset of this medium.
    fn check(&self, header: &Header, medium: MediumId, offset: u64) -> Result<(), Wrong> {
        if header.medium != medium {
            return Err(Wrong::Header(HeaderWrong::OtherMedium));
        }
        if header.offset != offset {
            return Err(Wrong::Misdirected {
                written_for: header.offset,
            });
        }
        if header.version != self.version || self.order.is_some_and(|o| o != header.order) {
            return Err(Wrong::Stale {
                order: header.order,
                version: header.version,
            });
        }
        if header.length != self.length || header.checksum != self.checksum {
            return Err(Wrong::Header(HeaderWrong::Disagrees));
        }
        Ok(())
    }
}

/// The buffers of one load.
#[derive(Debug)]
pub struct Room {
    /// The extent from its header on.
    pub(super) head: Buffer,
    /// The chunks of the range, if they lie far behind the header.
    pub(super) data: Option<Buffer>,
}

impl Room {
    /// The chunks of the range, without padding.
    fn chunks(&self, wanted: &Wanted) -> &[u8] {
        let (bytes, from) = match &self.data {
            Some(data) => (data, wanted.data.start),
            None => (&self.head, 0),
        };
        let end = (wanted.header + wanted.expected.length).min(wanted.data.end);
        let range = wanted.data.start - from..end - from;
        bytes
            .get(Length(range.start).as_usize()..Length(range.end).as_usize())
            .unwrap_or_default()
    }
}
