//! The header in front of an extent's data.
//!
//! ```text
//! header, whole granules                                     data, padded with zeros to a granule
//!   magic 8 | medium 16 | offset 8 | number 8 | version 8 | length 8 | checksum 8
//!   | zeros to 120 | checksum of each 64 KiB chunk 8 | zeros | CRC-64/NVME 8
//! ```
//!
//! One granule holds the header of a block of up to 31 MiB. The header of 1 GiB takes 33 granules.

use super::fields::{self, Fields};
use crate::GRANULE;
use kvpool_types::checksum::combine_chunks;
use kvpool_types::{Checksum, Length, MediumId, Version, medium};

const MAGIC: [u8; 8] = *b"KVPOOLEX";
/// The bytes before the checksums of the chunks. The last of these bytes are zero, for later fields.
const FIXED: usize = 120;
// The master plans extents with these sizes.
const _: () = assert!(medium::GRANULE == GRANULE as u64);
const _: () = assert!(medium::HEADER_FIELDS == (FIXED + fields::CRC) as u64);

/// The number of a store. The master numbers stores in order. Of two extents at the same offset, the extent
/// with the higher number was written later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreNumber(pub u64);

/// The header of an extent on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The medium for which the extent was written.
    pub medium: MediumId,
    /// The offset for which the extent was written, in bytes from the medium's start.
    pub offset: u64,
    /// The number of the store.
    pub number: StoreNumber,
    /// The block's version.
    pub version: Version,
    /// The block's bytes, without padding: 1 to [`Length::MAX_BLOCK`].
    pub length: u64,
    /// The checksum of the whole block.
    pub checksum: Checksum,
    /// The checksum of each chunk of the block.
    pub chunks: Vec<Checksum>,
}

/// Why bytes are not a valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeaderWrong {
    /// The bytes do not start as a header.
    Magic,
    /// The length is 0, over [`Length::MAX_BLOCK`], or its header is longer than the bytes that were read.
    Length,
    /// The header's own CRC does not match.
    Crc,
    /// The checksums of the chunks do not combine to the block's checksum.
    Sums,
    /// The extent was written for another medium, or before this one was formatted.
    OtherMedium,
    /// The extent has the expected version, with another length or checksum.
    Disagrees,
}

/// The bytes of the header of a block of `length` bytes; `None` for a length that cannot be stored.
pub fn header_bytes(length: u64) -> Option<u64> {
    (1..=Length::MAX_BLOCK.0)
        .contains(&length)
        .then(|| medium::header(Length(length)))
}

/// The bytes on the disk of a block of `length` bytes: header, data and padding. `None` for a
/// length that cannot be stored.
pub fn footprint(length: u64) -> Option<u64> {
    header_bytes(length)?;
    medium::footprint(Length(length)).map(|footprint| footprint.0)
}

impl Header {
    /// The encoded header in whole granules. `None` for a length that cannot be stored.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let size = usize::try_from(header_bytes(self.length)?).ok()?;
        if self.chunks.len() as u64 != Length(self.length).chunks() {
            return None;
        }
        let mut out = Vec::with_capacity(size);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.medium.0.to_le_bytes());
        for field in [
            self.offset,
            self.number.0,
            self.version.0,
            self.length,
            self.checksum.0,
        ] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        out.resize(FIXED, 0);
        for chunk in &self.chunks {
            out.extend_from_slice(&chunk.0.to_le_bytes());
        }
        Some(fields::close(out, size))
    }

    /// Decodes the header at the start of `bytes`, which may be longer.
    ///
    /// # Errors
    ///
    /// [`HeaderWrong`] names the first check that failed.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderWrong> {
        let size = Self::announced(bytes)?;
        let header = bytes.get(..size).ok_or(HeaderWrong::Length)?;
        let intact = fields::open(header).ok_or(HeaderWrong::Crc)?;
        let header = Self::read(Fields(intact)).ok_or(HeaderWrong::Crc)?;
        if combine_chunks(Length(header.length), &header.chunks) != header.checksum {
            return Err(HeaderWrong::Sums);
        }
        Ok(header)
    }

    /// The length of the header that starts here, computed from its length field. Only the magic and that
    /// field are checked.
    pub(super) fn announced(bytes: &[u8]) -> Result<usize, HeaderWrong> {
        if !bytes.starts_with(&MAGIC) {
            return Err(HeaderWrong::Magic);
        }
        let mut length = Fields(bytes.get(48..).ok_or(HeaderWrong::Length)?);
        length
            .u64()
            .and_then(header_bytes)
            .and_then(|size| usize::try_from(size).ok())
            .ok_or(HeaderWrong::Length)
    }

    fn read(mut fields: Fields<'_>) -> Option<Self> {
        fields.bytes::<{ MAGIC.len() }>()?;
        let medium = MediumId(fields.u128()?);
        let (offset, number) = (fields.u64()?, StoreNumber(fields.u64()?));
        let (version, length) = (Version(fields.u64()?), fields.u64()?);
        let checksum = Checksum(fields.u64()?);
        fields.bytes::<{ FIXED - 64 }>()?;
        let chunks = (0..Length(length).chunks())
            .map(|_| fields.u64().map(Checksum))
            .collect::<Option<Vec<_>>>()?;
        Some(Self {
            medium,
            offset,
            number,
            version,
            length,
            checksum,
            chunks,
        })
    }
}
