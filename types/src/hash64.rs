//! The 64-bit hash of a block chain, for key formats that use it.
//!
//! ```text
//! hash[-1] = 0
//! hash[i]  = first 8 bytes, big-endian, of SHA-256(hash[i-1] big-endian || tokens of block i, each as
//!            a signed 32-bit number little-endian)
//! ```
//!
//! The hash has no seed, and with billions of blocks 64 bits collide by accident. kvpool's own keys
//! are those of [`crate::chain`].

use sha2::{Digest as _, Sha256};
use std::num::NonZeroUsize;

/// The hash of a block of `tokens` that follows the block with the hash `previous` (0 for the first
/// block).
pub fn next(previous: u64, tokens: &[i32]) -> u64 {
    let mut hasher = Sha256::new_with_prefix(previous.to_be_bytes());
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    let digest: [u8; 32] = hasher.finalize().into();
    let (head, _) = digest
        .split_first_chunk()
        .expect("invariant: a SHA-256 has more than 8 bytes");
    u64::from_be_bytes(*head)
}

/// The hashes of all full blocks of `block_tokens` tokens.
pub fn chain(block_tokens: NonZeroUsize, tokens: &[i32]) -> Vec<u64> {
    tokens
        .chunks_exact(block_tokens.get())
        .scan(0, |previous, block| {
            *previous = next(*previous, block);
            Some(*previous)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python 3:
    /// ```python
    /// def next(p, ts): return int.from_bytes(hashlib.sha256(
    ///     struct.pack('>Q', p) + struct.pack(f'<{len(ts)}i', *ts)).digest()[:8], 'big')
    /// p = 0
    /// for b in range(3):
    ///     p = next(p, range(4 * b, 4 * b + 4)); print(f'{p:016x}')
    /// ```
    #[test]
    fn hashes_match_hashlib() {
        let tokens: Vec<i32> = (0..15).collect();
        assert_eq!(
            chain(NonZeroUsize::new(4).unwrap(), &tokens),
            [
                0xae56_c35b_a13d_8d3a,
                0x2708_1d93_2164_b401,
                0xbafe_7d9d_a790_7b30
            ]
        );
        // next(0, [-1, -2**31])
        assert_eq!(next(0, &[-1, i32::MIN]), 0x20d4_9a76_9574_819a);
    }
}
