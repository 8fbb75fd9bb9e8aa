//! The block to load, and the values that prove it.

use super::error::{Invalid, Wrong};
use super::fields::checksum;
use super::header::{Header, HeaderWrong, StoreNumber, footprint, header_bytes};
use super::store::take;
use crate::{Arena, Buffer, GRANULE};
use kvpool_transport::Slice;
use kvpool_transport::checksum::sum_shared;
use kvpool_types::checksum::CHUNK;
use kvpool_types::{Checksum, Length, MediumId, Version};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The block that an extent holds according to the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The number of the store, if the caller knows it.
    pub number: Option<StoreNumber>,
    /// The block's version.
    pub version: Version,
    /// The block's length in bytes.
    pub length: u64,
    /// The checksum of the whole block.
    pub checksum: Checksum,
}

/// One block to load.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub(super) offset: u64,
    pub(super) expected: Expected,
    /// The length of the header in bytes.
    pub(super) header: u64,
    /// The length of the extent in bytes: header, data and padding.
    pub(super) footprint: u64,
}

impl Wanted {
    /// The block at `offset`.
    ///
    /// # Errors
    ///
    /// [`Invalid::Length`] when the expected length is 0 or too long.
    pub fn new(offset: u64, expected: Expected) -> Result<Self, Invalid> {
        let invalid = Invalid::Length(expected.length);
        Ok(Self {
            offset,
            expected,
            header: header_bytes(expected.length).ok_or(invalid)?,
            footprint: footprint(expected.length).ok_or(invalid)?,
        })
    }

    /// Whether the block can be read straight into this memory, behind a buffer for the header. This holds for
    /// blocks of whole granules, and memory that begins at a multiple of a granule.
    pub fn fits(&self, memory: &Slice) -> bool {
        let length = self.expected.length;
        length.is_multiple_of(GRANULE as u64)
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

    /// Takes the buffer for a load into the arena. Waits for it until `until`, or not at all.
    pub fn take(&self, arena: &Arc<Arena>, until: Option<Instant>) -> Option<Buffer> {
        take(arena, Length(self.footprint).as_usize(), until)
    }

    /// Takes the buffer for a load into the arena without waiting, ahead of callers that wait.
    pub fn take_first(&self, arena: &Arc<Arena>) -> Option<Buffer> {
        arena.take_first(Length(self.footprint).as_usize())
    }

    /// The range of the block's bytes in its extent.
    pub(super) fn block(&self) -> Range<usize> {
        let end = self.header + self.expected.length;
        Length(self.header).as_usize()..Length(end).as_usize()
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

    /// Verifies the header, and each chunk of the extent. `proved` gets each valid chunk and its offset in the
    /// block at once, while the chunk is in the processor's cache. Returns the checksums of the chunks.
    pub(super) fn verify(
        &self,
        medium: MediumId,
        extent: &[u8],
        mut proved: impl FnMut(u64, &[u8]),
    ) -> Result<Vec<Checksum>, Wrong> {
        let header = self.decode_header(medium, extent)?;
        let block = extent.get(self.block()).unwrap_or_default();
        let chunks = block.chunks(Length(CHUNK).as_usize());
        let mut verified = 0;
        for ((bytes, sum), number) in chunks.zip(&header.chunks).zip(0..) {
            if checksum(bytes) != *sum {
                return Err(Wrong::Chunk(number));
            }
            proved(verified, bytes);
            verified += bytes.len() as u64;
        }
        // This guards the arithmetic above: the load never returns bytes that are not verified.
        if verified < self.expected.length {
            return Err(Wrong::Chunk(verified / CHUNK));
        }
        Ok(header.chunks)
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
        if header.version != self.version || self.number.is_some_and(|n| n != header.number) {
            return Err(Wrong::Stale {
                number: header.number,
                version: header.version,
            });
        }
        if header.length != self.length || header.checksum != self.checksum {
            return Err(Wrong::Header(HeaderWrong::Disagrees));
        }
        Ok(())
    }
}
