use super::*;
use crate::memory::Region;
use proptest::prelude::*;

/// CRC-64/NVME by its definition, bit by bit.
fn by_definition(bytes: &[u8]) -> u64 {
    !bytes.iter().fold(u64::MAX, |crc, byte| {
        (0..8).fold(crc ^ u64::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x9a6c_9329_ac4b_c9b5 & (crc & 1).wrapping_neg())
        })
    })
}

/// Bytes without repeated pieces.
fn bytes(length: usize) -> Vec<u8> {
    let mut state = length as u64 | 1;
    (0..length)
        .map(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            state.to_le_bytes()[7]
        })
        .collect()
}

/// Memory cut at the given offsets, each part in its own region.
fn scattered(bytes: &[u8], cuts: &[usize]) -> Vec<Slice> {
    let mut at = 0;
    let mut slices = Vec::new();
    for cut in cuts.iter().map(|cut| cut % (bytes.len() + 1)) {
        if cut > at {
            slices.push(Region::from(bytes[at..cut].to_vec()).whole());
            at = cut;
        } else {
            slices.push(Region::allocate(Length(0)).whole());
        }
    }
    slices.push(Region::from(bytes[at..].to_vec()).whole());
    slices
}

fn gathered(slices: &[Slice]) -> Vec<u8> {
    slices.iter().flat_map(Slice::to_vec).collect()
}

#[test]
fn the_published_check_value() {
    assert_eq!(checksum(b"123456789"), Checksum(0xae8b_1486_0a79_9888));
    assert_eq!(by_definition(b"123456789"), 0xae8b_1486_0a79_9888);
    assert_eq!(checksum(b""), Checksum(0));
}

#[test]
fn a_stopped_copy_writes_nothing_more() {
    let from = [Region::from(vec![7; 1 << 20]).whole()];
    let to = [Region::allocate(Length(1 << 20)).whole()];
    let mut runs = 0;
    let stopped = copy_with_sum(&from, &to, Private::Destination, || {
        runs += 1;
        runs <= 2
    });
    assert_eq!(stopped, None);
    let copied = 2 * Length(RUN).as_usize();
    let out = to[0].to_vec();
    assert!(out[..copied].iter().all(|byte| *byte == 7));
    assert!(out[copied..].iter().all(|byte| *byte == 0));
}

#[test]
fn combining_over_lengths_beyond_any_buffer() {
    let (a, b) = (Checksum(0x1234), Checksum(0x5678));
    for length in [0, 1, CHUNK, 1 << 40, u64::MAX >> 3] {
        assert_eq!(
            combine(a, b, Length(length)).0,
            crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, a.0, b.0, length)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_checksum_matches_the_definition(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert_eq!(checksum(&bytes).0, by_definition(&bytes));
    }

    #[test]
    fn combining_two_runs_is_summing_both(length in 0usize..200_000, cut in any::<prop::sample::Index>()) {
        let bytes = bytes(length);
        let (first, second) = bytes.split_at(cut.index(length + 1));
        prop_assert_eq!(
            combine(checksum(first), checksum(second), Length(second.len() as u64)),
            checksum(&bytes)
        );
    }

    #[test]
    fn chunk_sums_do_not_depend_on_the_pieces(
        length in 0usize..300_000,
        pieces in prop::collection::vec(1usize..100_000, 1..8),
    ) {
        let bytes = bytes(length);
        let mut sum = ChunkedSum::default();
        let mut rest = &bytes[..];
        for piece in pieces.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (head, tail) = rest.split_at((*piece).min(rest.len()));
            sum.update(head);
            rest = tail;
        }
        let sums = sum.finish();
        let expected: Vec<_> = bytes.chunks(Length(CHUNK).as_usize()).map(checksum).collect();
        prop_assert_eq!(sums.whole, checksum(&bytes));
        prop_assert_eq!(sums.whole, combine_chunks(Length(length as u64), &expected));
        prop_assert_eq!(sums.chunks, expected);
    }

    #[test]
    fn a_copy_gives_the_bytes_and_their_sums(
        length in 0usize..300_000,
        from_cuts in prop::collection::vec(0usize..300_000, 0..6),
        to_cuts in prop::collection::vec(0usize..300_000, 0..6),
        source in any::<bool>(),
    ) {
        let bytes = bytes(length);
        let from = scattered(&bytes, &from_cuts);
        let to = scattered(&vec![0; length], &to_cuts);
        let private = if source { Private::Source } else { Private::Destination };
        let sums = copy_with_sum(&from, &to, private, || true).unwrap();
        prop_assert_eq!(gathered(&to), &bytes[..]);
        prop_assert_eq!(&sums, &sum_shared(&Region::from(bytes.clone()).whole()));
        prop_assert_eq!(sums.whole, checksum(&bytes));
        let again = scattered(&vec![0; length], &to_cuts);
        let whole = copy_with_whole_sum(&from, &again, private, || true);
        prop_assert_eq!(gathered(&again), &bytes[..]);
        prop_assert_eq!(whole, Some(checksum(&bytes)));
    }
}
