//! The bytes of a block in place of computed KV. The block's digest determines them, so any process can
//! verify a block.
//!
//! The bytes begin with the digest itself: blocks of at least 32 bytes with different digests differ.
//! Each further 64 bytes are the next states of eight xorshift generators, which compilers turn into
//! vector instructions.

use kvpool_types::key::Digest;

/// The bytes generated at a time: few enough to stay in the first-level cache.
pub(crate) const CHUNK: usize = 4096;
const LANES: usize = 8;
const WORD: usize = size_of::<u64>();

/// Passes the block's `length` bytes to `write` in parts, each with its offset in the block.
pub fn fill(digest: &Digest, length: u64, mut write: impl FnMut(u64, &[u8])) {
    let mut stream = Stream::of(digest);
    let mut chunk = [0; CHUNK];
    for (offset, count) in parts(length) {
        stream.next(&mut chunk);
        write(offset, &chunk[..count]);
    }
}

/// Compares a block's `length` bytes with the bytes of `digest`. `read` copies a part of the block from an
/// offset. Returns the offset of the first byte that differs.
pub fn first_wrong(
    digest: &Digest,
    length: u64,
    mut read: impl FnMut(u64, &mut [u8]),
) -> Option<u64> {
    let mut stream = Stream::of(digest);
    let mut expected = [0; CHUNK];
    let mut found = [0; CHUNK];
    for (offset, count) in parts(length) {
        stream.next(&mut expected);
        let (expected, found) = (&expected[..count], &mut found[..count]);
        read(offset, found);
        if expected != found {
            let at = expected.iter().zip(&*found).position(|(a, b)| a != b);
            return Some(offset + at.unwrap_or(0) as u64);
        }
    }
    None
}

/// The offsets and sizes of a block's parts. Invariant: no size is above [`CHUNK`].
fn parts(length: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..length).step_by(CHUNK).map(move |offset| {
        let left = length - offset;
        let count = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
        (offset, count)
    })
}

struct Stream {
    lanes: [u64; LANES],
}

impl Stream {
    fn of(digest: &Digest) -> Self {
        let mut lanes = [0; LANES];
        let (head, tail) = lanes.split_at_mut(LANES / 2);
        for ((first, second), word) in head.iter_mut().zip(tail).zip(digest.chunks_exact(WORD)) {
            *first = word
                .iter()
                .rev()
                .fold(0, |value, byte| value << 8 | u64::from(*byte));
            *second = first.rotate_left(29) ^ 0x9e37_79b9_7f4a_7c15;
        }
        Self { lanes }
    }

    fn next(&mut self, out: &mut [u8; CHUNK]) {
        for row in out.chunks_exact_mut(LANES * WORD) {
            for (lane, bytes) in self.lanes.iter_mut().zip(row.chunks_exact_mut(WORD)) {
                bytes.copy_from_slice(&lane.to_le_bytes());
                let mut x = *lane;
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                // Zero is the only state that xorshift never leaves, so a constant replaces it.
                *lane = if x == 0 { 0x2545_f491_4f6c_dd1d } else { x };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(digest: &Digest, length: u64) -> Vec<u8> {
        let mut out = Vec::new();
        fill(digest, length, |offset, part| {
            assert_eq!(offset, out.len() as u64);
            out.extend_from_slice(part);
        });
        assert_eq!(out.len() as u64, length);
        out
    }

    fn check(digest: &Digest, block: &[u8]) -> Option<u64> {
        first_wrong(digest, block.len() as u64, |offset, part| {
            let from = usize::try_from(offset).unwrap();
            part.copy_from_slice(&block[from..from + part.len()]);
        })
    }

    #[test]
    fn a_block_checks_against_its_own_digest_only() {
        let digest = [7; 32];
        for length in [1, 31, 64, 4095, 4096, 4097, 70_000] {
            assert_eq!(check(&digest, &bytes(&digest, length)), None, "{length}");
        }
        let mut other = digest;
        other[31] ^= 1;
        assert_eq!(check(&other, &bytes(&digest, 10_000)), Some(31));
    }

    #[test]
    fn every_flipped_byte_is_found_where_it_is() {
        let digest = std::array::from_fn(|i| u8::try_from(i * 5).unwrap());
        let right = bytes(&digest, 9_001);
        for at in [0, 1, 4095, 4096, 8191, 9_000] {
            let mut wrong = right.clone();
            wrong[at] ^= 0x10;
            assert_eq!(check(&digest, &wrong), Some(at as u64));
        }
    }

    #[test]
    fn a_block_moved_within_itself_is_wrong() {
        let digest = [3; 32];
        let mut block = bytes(&digest, 16_384);
        block.rotate_left(4096);
        assert_eq!(check(&digest, &block), Some(0));
        assert_ne!(
            bytes(&[0; 32], 8192)[..4096],
            bytes(&[0; 32], 8192)[4096..],
            "the all-zero digest has a stream too"
        );
    }
}
