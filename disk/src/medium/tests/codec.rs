//! Encoding, decoding and the list of bad ranges.

use crate::GRANULE;
use crate::medium::fields::checksum;
use crate::medium::{
    BadRanges, Generation, Header, HeaderWrong, MAX_BAD_RANGES, StoreNumber, Superblock,
    Unreadable, footprint, header_bytes,
};
use kvpool_types::checksum::{CHUNK, combine_chunks};
use kvpool_types::{Checksum, ClusterId, Length, MediumId, Version};
use proptest::collection::vec;
use proptest::prelude::*;

const STEP: u64 = GRANULE as u64;
const MAX_BLOCK: u64 = Length::MAX_BLOCK.0;

fn bad_ranges() -> impl Strategy<Value = BadRanges> {
    vec((0..1u64 << 20, 1..1u64 << 16), 0..300).prop_map(|ranges| {
        let mut bad = BadRanges::default();
        for (start, length) in ranges {
            bad.add(start * 512..start * 512 + length);
        }
        bad
    })
}

prop_compose! {
    fn superblocks()(
        cluster: u128, medium: u128, generation: u64, clean: bool, size: u64, sequence: u64,
        bad in bad_ranges(),
    ) -> Superblock {
        Superblock {
            cluster: ClusterId(cluster),
            medium: MediumId(medium),
            generation: Generation(generation),
            clean,
            size,
            sequence,
            bad,
        }
    }
}

prop_compose! {
    fn headers()(
        medium: u128, offset: u64, number: u64, version: u64,
        length in prop_oneof![1..MAX_BLOCK + 1, 1..4 * CHUNK, Just(MAX_BLOCK)],
        seed: u64,
    ) -> Header {
        let chunks: Vec<_> = (0..Length(length).chunks())
            .map(|n| Checksum(seed.rotate_left(7) ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
            .collect();
        Header {
            medium: MediumId(medium),
            offset,
            number: StoreNumber(number),
            version: Version(version),
            length,
            checksum: combine_chunks(Length(length), &chunks),
            chunks,
        }
    }
}

proptest! {
    #[test]
    fn a_superblock_reads_as_it_was_written(superblock in superblocks()) {
        let bytes = superblock.encode();
        prop_assert_eq!(bytes.len(), GRANULE);
        prop_assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    }

    #[test]
    fn a_superblock_with_a_flipped_bit_says_nothing(
        superblock in superblocks(), bit in 0..GRANULE * 8,
    ) {
        let mut bytes = superblock.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let wanted = if bit < 64 { Unreadable::Foreign } else { Unreadable::Damaged };
        prop_assert_eq!(Superblock::decode(&bytes), Err(wanted));
    }

    #[test]
    fn a_superblock_of_a_later_format_is_named(
        superblock in superblocks(), format in 2..=u32::MAX,
    ) {
        let mut bytes = superblock.encode();
        bytes[8..12].copy_from_slice(&format.to_le_bytes());
        let crc = checksum(&bytes[..GRANULE - 8]).0;
        bytes[GRANULE - 8..].copy_from_slice(&crc.to_le_bytes());
        prop_assert_eq!(Superblock::decode(&bytes), Err(Unreadable::NewerFormat(format)));
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(
        mut bytes in vec(any::<u8>(), 0..2 * GRANULE), superblock: bool, header: bool,
    ) {
        for (magic, wanted) in [(b"KVPOOLSB", superblock), (b"KVPOOLEX", header)] {
            if wanted && bytes.len() >= magic.len() {
                bytes[..magic.len()].copy_from_slice(magic);
            }
        }
        prop_assert!(Superblock::decode(&bytes).is_err());
        prop_assert!(Header::decode(&bytes).is_err());
    }

    #[test]
    fn a_superblock_with_any_fields_and_a_matching_crc_is_read_without_a_panic(
        superblock in superblocks(), at in 12..GRANULE - 16, noise: u64,
    ) {
        let mut bytes = superblock.encode();
        bytes[at..at + 8].copy_from_slice(&noise.to_le_bytes());
        let crc = checksum(&bytes[..GRANULE - 8]).0;
        bytes[GRANULE - 8..].copy_from_slice(&crc.to_le_bytes());
        if let Ok(read) = Superblock::decode(&bytes) {
            prop_assert!(read.bad.as_slice().len() <= MAX_BAD_RANGES);
        }
    }

    #[test]
    fn a_header_reads_as_it_was_written(header in headers(), behind in 0..3usize) {
        let mut bytes = header.encode().unwrap();
        prop_assert_eq!(bytes.len() as u64, header_bytes(header.length).unwrap());
        bytes.resize(bytes.len() + behind * GRANULE, 0xa5);
        prop_assert_eq!(Header::decode(&bytes), Ok(header));
    }

    #[test]
    fn a_header_with_a_flipped_bit_is_wrong(header in headers(), place: prop::sample::Index) {
        let mut bytes = header.encode().unwrap();
        let bit = place.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        let wrong = Header::decode(&bytes).unwrap_err();
        match bit / 8 {
            0..8 => prop_assert_eq!(wrong, HeaderWrong::Magic),
            48..56 => prop_assert!(matches!(wrong, HeaderWrong::Length | HeaderWrong::Crc)),
            _ => prop_assert_eq!(wrong, HeaderWrong::Crc),
        }
    }

    #[test]
    fn a_cut_header_is_wrong(header in headers(), keep: prop::sample::Index) {
        let bytes = header.encode().unwrap();
        prop_assert!(Header::decode(&bytes[..keep.index(bytes.len())]).is_err());
    }

    #[test]
    fn a_header_whose_sums_are_of_another_block_is_wrong(mut header in headers(), noise in 1u64..) {
        header.checksum.0 ^= noise;
        prop_assert_eq!(Header::decode(&header.encode().unwrap()), Err(HeaderWrong::Sums));
    }

    #[test]
    fn a_footprint_is_whole_granules_and_holds_the_block(length in 1..=MAX_BLOCK) {
        let footprint = footprint(length).unwrap();
        let sums = Length(length).chunks() * 8;
        prop_assert_eq!(footprint % STEP, 0);
        prop_assert!(footprint >= length + sums + 128);
        prop_assert!(footprint < length + sums + 128 + 2 * STEP);
    }

    #[test]
    fn a_bad_range_is_never_forgotten(
        ranges in vec((0..1u64 << 30, 1..1u64 << 15), 1..600),
    ) {
        let mut bad = BadRanges::default();
        for (start, length) in &ranges {
            bad.add(*start..start + length);
        }
        for (start, length) in &ranges {
            let inside = |r: &std::ops::Range<u64>| r.start <= *start && start + length <= r.end;
            prop_assert!(bad.as_slice().iter().any(inside));
            prop_assert!(bad.touches(&(start + length - 1..start + length)));
            prop_assert!(!bad.clone().add(*start..start + length));
        }
        let list = bad.as_slice();
        prop_assert!(list.len() <= MAX_BAD_RANGES);
        prop_assert!(list.windows(2).all(|pair| pair[0].end < pair[1].start));
        prop_assert!(list.iter().all(|r| r.start % STEP == 0 && r.end % STEP == 0));
        prop_assert_eq!(BadRanges::from_sorted(list.to_vec()), Some(bad));
    }

    #[test]
    fn a_short_list_of_bad_ranges_covers_nothing_more(
        granules in vec(0..4096u64, 1..60),
    ) {
        let mut bad = BadRanges::default();
        for granule in &granules {
            bad.add(granule * STEP + 7..granule * STEP + 8);
        }
        for granule in 0..4096u64 {
            let touched = bad.touches(&(granule * STEP..(granule + 1) * STEP));
            prop_assert_eq!(touched, granules.contains(&granule));
        }
    }
}

#[test]
fn lengths_that_cannot_be_stored_have_no_footprint() {
    assert_eq!(footprint(0), None);
    assert_eq!(footprint(MAX_BLOCK + 1), None);
    assert_eq!(footprint(u64::MAX), None);
    assert_eq!(footprint(1), Some(2 * STEP));
    assert_eq!(footprint(1 << 20), Some((1 << 20) + STEP));
    assert_eq!(footprint(256 << 20), Some((256 << 20) + 9 * STEP));
    assert_eq!(footprint(MAX_BLOCK), Some(MAX_BLOCK + 33 * STEP));
}

#[test]
fn a_bad_range_at_the_end_of_all_offsets_does_not_overflow() {
    let mut bad = BadRanges::default();
    assert!(bad.add(u64::MAX - 2 * STEP..u64::MAX));
    assert!(!bad.add(5..5));
    assert_eq!(bad.as_slice().len(), 1);
}
