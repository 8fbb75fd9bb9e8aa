//! The layout of a block on a medium, which the master plans and the store node writes.

mod judge;

pub use judge::{Generation, Judgement, judge};

use crate::Length;

/// The unit of transfers to and from a medium, in bytes.
pub const GRANULE: u64 = 4096;
/// The bytes at the start of a medium that hold no blocks.
pub const DATA_START: u64 = 1 << 20;
/// The bytes of a block's header without the checksums of its chunks.
pub const HEADER_FIELDS: u64 = 128;

/// The bytes of the header of a block of this length, in whole granules. A header has fixed fields and one
/// checksum per chunk.
pub const fn header(length: Length) -> u64 {
    (HEADER_FIELDS + 8 * length.chunks()).next_multiple_of(GRANULE)
}

/// The bytes that a block of this length takes on a medium: its header and its data, each in whole granules.
/// `None` for a length over [`Length::MAX_BLOCK`].
pub const fn footprint(length: Length) -> Option<Length> {
    if length.0 > Length::MAX_BLOCK.0 {
        return None;
    }
    Some(Length(header(length) + length.0.next_multiple_of(GRANULE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_takes_its_header_and_its_bytes_in_whole_granules() {
        let of = |bytes| footprint(Length(bytes)).map(|length| length.0);
        assert_eq!(of(1), Some(2 * GRANULE));
        assert_eq!(of(GRANULE), Some(2 * GRANULE));
        assert_eq!(of(GRANULE + 1), Some(3 * GRANULE));
        assert_eq!(of(1 << 20), Some((1 << 20) + GRANULE));
        // 4,096 chunks of 64 KiB need 32 KiB of checksums and a granule for the fields.
        assert_eq!(of(256 << 20), Some((256 << 20) + 9 * GRANULE));
        assert_eq!(of(Length::MAX_BLOCK.0 + 1), None);
    }
}
