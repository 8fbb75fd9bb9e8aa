//! The superblock: the pool of the medium, its generation, and its bad ranges.
//!
//! ```text
//! granule 0, granule 1   two copies of
//!   magic 8 | format 4 | flags 4 | cluster 16 | medium 16 | generation 8 | size 8 | sequence 8
//!   | bad ranges 4 | zero 4 | (start 8, end 8) for each | zeros | CRC-64/NVME 8
//! ```
//!
//! Integers are little-endian. Magic, format and CRC have the same offsets in every format.

use super::bad_ranges::BadRanges;
use super::fields::{self, Fields};
use crate::GRANULE;
use kvpool_types::medium::Generation;
use kvpool_types::{ClusterId, MediumId};

/// The format that this release writes.
pub const FORMAT: u32 = 1;

const MAGIC: [u8; 8] = *b"KVPOOLSB";
const CLEAN: u32 = 1;

/// The content of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The pool that the medium belongs to.
    pub cluster: ClusterId,
    /// The medium's id.
    pub medium: MediumId,
    /// The generation of the last attach; 0 before the first.
    pub generation: Generation,
    /// Whether the last detach succeeded after all writes were flushed.
    pub clean: bool,
    /// The size of the device in bytes when the superblock was written.
    pub size: u64,
    /// The sequence number of this superblock. The copy with the highest number is valid.
    pub sequence: u64,
    /// The ranges that must not be used.
    pub bad: BadRanges,
}

/// Why one copy has no usable superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// All bytes are zero.
    Zeros,
    /// The bytes are not a superblock of kvpool.
    Foreign,
    /// A superblock of a later format.
    NewerFormat(u32),
    /// A superblock of kvpool whose bytes are damaged.
    Damaged,
    /// The device could not read the copy.
    Failed,
}

impl Superblock {
    /// The superblock as one granule of bytes.
    pub fn encode(&self) -> Vec<u8> {
        let bad = self.bad.as_slice();
        let count = u32::try_from(bad.len()).unwrap_or(u32::MAX);
        let mut out = Vec::with_capacity(GRANULE);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&(if self.clean { CLEAN } else { 0 }).to_le_bytes());
        out.extend_from_slice(&self.cluster.to_bytes());
        out.extend_from_slice(&self.medium.0.to_le_bytes());
        out.extend_from_slice(&self.generation.0.to_le_bytes());
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&count.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        for range in bad {
            out.extend_from_slice(&range.start.to_le_bytes());
            out.extend_from_slice(&range.end.to_le_bytes());
        }
        fields::close(out, GRANULE)
    }

    /// Decodes one copy.
    ///
    /// # Errors
    ///
    /// [`Unreadable`] when the copy is blank, foreign, damaged, or of a later format.
    pub fn decode(granule: &[u8]) -> Result<Self, Unreadable> {
        if granule.iter().all(|byte| *byte == 0) {
            return Err(Unreadable::Zeros);
        }
        if !granule.starts_with(&MAGIC) {
            return Err(Unreadable::Foreign);
        }
        let intact = fields::open(granule).ok_or(Unreadable::Damaged)?;
        let mut fields = Fields(intact);
        let head = fields.bytes::<{ MAGIC.len() }>().zip(fields.u32());
        match head {
            Some((_, format)) if format > FORMAT => Err(Unreadable::NewerFormat(format)),
            Some((_, FORMAT)) => Self::read(fields).ok_or(Unreadable::Damaged),
            _ => Err(Unreadable::Damaged),
        }
    }

    fn read(mut fields: Fields<'_>) -> Option<Self> {
        let flags = fields.u32().filter(|flags| flags & !CLEAN == 0)?;
        let cluster = ClusterId(fields.u128()?);
        let medium = MediumId(fields.u128()?);
        let generation = Generation(fields.u64()?);
        let (size, sequence) = (fields.u64()?, fields.u64()?);
        let count = fields.u32()?;
        fields.u32()?;
        let bad = (0..count)
            .map(|_| Some(fields.u64()?..fields.u64()?))
            .collect::<Option<Vec<_>>>()?;
        Some(Self {
            cluster,
            medium,
            generation,
            clean: flags == CLEAN,
            size,
            sequence,
            bad: BadRanges::from_sorted(bad)?,
        })
    }
}
