//! The bytes to load, and the values that prove them.

use super::error::{Invalid, Wrong};
use super::fields::checksum;
use super::header::{Header, HeaderWrong, Order, header_bytes};
use super::store::take;
use crate::{Arena, Buffer, GRANULE};
use kvpool_transport::Slice;
use kvpool_transport::checksum::sum_shared;
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

    /// Whether the block can be read straight into this memory, behind a buffer for the header. This holds for
    /// whole blocks of whole granules, and memory that begins at a multiple of a granule.
    pub fn fits(&self, memory: &Slice) -> bool {
        let length = self.expected.length;
        self.range == (0..length)
            && length.is_multiple_of(GRANULE as u64)
            && memory.length().0 == length
            && memory.as_ptr().addr().is_multiple_of(GRANULE)
    }

    /// Takes the buffer for the header without waiting, ahead of callers that wait if `first`.
    pub fn take_header(&self, arena: &Arc<Arena>, first: bool) -> Option<Buffer> {
        let bytes = Length(self.header).as_usize();
        match first {
            true => arena.take_first(bytes),
            false => arena.take(bytes),
        }
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

    /// The header, if it is the expected block's.
    fn decode_header(&self, medium: MediumId, head: &[u8]) -> Result<Header, Wrong> {
        let header = Header::decode(head).map_err(Wrong::Header)?;
        self.expected.check(&header, medium, self.offset)?;
        Ok(header)
    }

    /// Verifies the header, and the whole block in memory. Returns the checksums of its chunks.
    pub(super) fn verify_in(
        &self,
        medium: MediumId,
        head: &[u8],
        memory: &Slice,
    ) -> Result<Vec<Checksum>, Wrong> {
        let header = self.decode_header(medium, head)?;
        // `Header::decode` has proved that its sums combine to its checksum, and `check` has compared that with the
        // block's. So equal sums prove the block.
        let sums = sum_shared(memory).chunks;
        let differs = |(ours, theirs): (&Checksum, &Checksum)| ours != theirs;
        match sums.iter().zip(&header.chunks).position(differs) {
            Some(chunk) => Err(Wrong::Chunk(chunk as u64)),
            None if sums.len() != header.chunks.len() => Err(Wrong::Chunk(sums.len() as u64)),
            None => Ok(sums),
        }
    }

    /// Verifies the header, and each chunk of the range. `proved` gets each valid chunk and its offset in the
    /// block at once, while the chunk is in the processor's cache. Returns the checksums of the chunks.
    pub(super) fn verify(
        &self,
        medium: MediumId,
        room: &Room,
        mut proved: impl FnMut(u64, &[u8]),
    ) -> Result<Vec<Checksum>, Wrong> {
        let header = self.decode_header(medium, &room.head)?;
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
