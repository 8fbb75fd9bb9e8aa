//! The checksum that travels with every block: a CRC-64 whose parts can be combined.

mod combine;

pub use combine::{combine, combine_chunks};

use std::fmt;

/// The bytes of one checksummed chunk of a block (64 KiB). The last chunk may be shorter.
pub const CHUNK: u64 = 64 << 10;

/// A checksum of a run of bytes, under the algorithm agreed at hello.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Checksum(pub u64);

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The checksum algorithm. Its number is stored in metadata and sent at hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChecksumAlgorithm {
    /// CRC-64/NVME: reflected polynomial 0x9a6c9329ac4bc9b5, initial value and final xor all ones.
    Crc64Nvme = 1,
}

impl ChecksumAlgorithm {
    /// The algorithm with this wire number.
    pub const fn from_wire(raw: u8) -> Option<Self> {
        match raw {
            1 => Some(Self::Crc64Nvme),
            _ => None,
        }
    }
}
