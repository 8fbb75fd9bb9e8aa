//! The keys of token blocks: chained SHA-256 digests.
//!
//! ```text
//! digest[-1] = the namespace's seed
//! digest[i]  = SHA-256(digest[i-1] || tokens of block i, each as 32 bits little-endian)
//! ```
//!
//! A digest names its block and all blocks before it. So two requests share keys exactly as far as
//! they share tokens. Only full blocks have keys.

use crate::key::{Digest, Key};
use sha2::{Digest as _, Sha256};
use std::num::NonZeroUsize;

/// A chain of block keys that grows with the tokens of a request.
#[derive(Clone, Debug)]
pub struct Chain {
    block_tokens: NonZeroUsize,
    last: Digest,
    /// The hash state of the partial block: it has absorbed `last` and the tokens since.
    hasher: Sha256,
    pending: usize,
}

impl Chain {
    /// A chain whose blocks have `block_tokens` tokens. `seed` is [`crate::namespace::Namespace::seed`]. To
    /// continue a chain, `seed` is the digest of its last full block.
    pub fn new(seed: Digest, block_tokens: NonZeroUsize) -> Self {
        Self {
            block_tokens,
            last: seed,
            hasher: Sha256::new_with_prefix(seed),
            pending: 0,
        }
    }

    /// Appends tokens. Returns the keys of the blocks that they completed, in order.
    pub fn push(&mut self, mut tokens: &[u32]) -> Vec<Key> {
        let mut keys = Vec::with_capacity((self.pending + tokens.len()) / self.block_tokens);
        while !tokens.is_empty() {
            let room = self.block_tokens.get() - self.pending;
            let (head, tail) = tokens.split_at(room.min(tokens.len()));
            update_with_tokens(&mut self.hasher, head);
            self.pending += head.len();
            if self.pending == self.block_tokens.get() {
                self.last = self.hasher.finalize_reset().into();
                self.hasher.update(self.last);
                self.pending = 0;
                keys.push(Key::from_digest(self.last));
            }
            tokens = tail;
        }
        keys
    }

    /// The digest of the last full block, or the seed before the first.
    pub const fn last(&self) -> &Digest {
        &self.last
    }

    /// The number of tokens in the partial block.
    pub const fn pending(&self) -> usize {
        self.pending
    }
}

/// The keys of all full blocks of `tokens`.
pub fn chain_keys(seed: Digest, block_tokens: NonZeroUsize, tokens: &[u32]) -> Vec<Key> {
    Chain::new(seed, block_tokens).push(tokens)
}

fn update_with_tokens(hasher: &mut Sha256, tokens: &[u32]) {
    // Buffered, because the hasher takes long inputs several times faster than 4 bytes at a time.
    const TOKENS: usize = 256;
    const BYTES: usize = size_of::<u32>();
    let mut buffer = [0; TOKENS * BYTES];
    for tokens in tokens.chunks(TOKENS) {
        let bytes = &mut buffer[..tokens.len() * BYTES];
        for (bytes, token) in bytes.chunks_exact_mut(BYTES).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::Namespace;
    use proptest::prelude::*;

    fn blocks_of(tokens: usize) -> NonZeroUsize {
        NonZeroUsize::new(tokens).unwrap()
    }

    fn texts(keys: &[Key]) -> Vec<String> {
        keys.iter().map(Key::to_string).collect()
    }

    /// Python 3, from `d = seed('llama-3-8b', 'bf16', '0/2', 'pepper')` (see the namespace's test):
    /// ```python
    /// for b in range(3):
    ///     d = hashlib.sha256(d + struct.pack('<4I', *range(4 * b, 4 * b + 4))).digest(); print(d.hex())
    /// ```
    #[test]
    fn keys_match_hashlib() {
        let seed = Namespace {
            model: "llama-3-8b".into(),
            dtype: "bf16".into(),
            parallel_rank: "0/2".into(),
            salt: "pepper".into(),
            ..Namespace::default()
        }
        .seed();
        // Two surplus tokens are in no full block and change nothing.
        let tokens: Vec<u32> = (0..14).collect();
        assert_eq!(
            texts(&chain_keys(seed, blocks_of(4), &tokens)),
            [
                "50934d1e28f03471877d6b9bf1c5810e853254626ee56a1355024d1e22178175",
                "7e8eb45cece8a1b770aa38dfe94a89328154e48fc6430f84f5656816ea5ad7a7",
                "811c7d59053eaaf74a6fe97a749019be519ea75c002390456b29cc380d3780d8",
            ]
        );
    }

    #[test]
    fn single_tokens_and_long_blocks_are_hashed_whole() {
        // hashlib.sha256(bytes(32) + struct.pack('<1I', 0xffffffff)).hexdigest()
        assert_eq!(
            texts(&chain_keys([0; 32], blocks_of(1), &[u32::MAX])),
            ["890ed82cf09f22243bdc4252e4d79c8a9810c1391f455dce37a7b732eb0a0e4f"]
        );
        // hashlib.sha256(bytes(32) + struct.pack('<512I', *range(512))).hexdigest()
        let tokens: Vec<u32> = (0..512).collect();
        assert_eq!(
            texts(&chain_keys([0; 32], blocks_of(512), &tokens)),
            ["b2ad9c3499e002230338bed731c34ae22eae320811b7aeff160d8b5cd7ac6eca"]
        );
    }

    #[test]
    fn a_partial_block_has_no_key() {
        let mut chain = Chain::new([7; 32], blocks_of(3));
        assert!(chain.push(&[1, 2]).is_empty());
        assert_eq!((chain.pending(), chain.last()), (2, &[7; 32]));
        assert_eq!(chain.push(&[3, 4]).len(), 1);
        assert_eq!(chain.pending(), 1);
    }

    proptest! {
        #[test]
        fn keys_do_not_depend_on_the_pieces_of_the_tokens(
            tokens in prop::collection::vec(any::<u32>(), 0..700),
            cuts in prop::collection::vec(0usize..700, 0..6),
            block in 1usize..300,
        ) {
            let seed = [3; 32];
            let whole = chain_keys(seed, blocks_of(block), &tokens);
            prop_assert_eq!(whole.len(), tokens.len() / block);

            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
            cuts.push(tokens.len());
            cuts.sort_unstable();
            let mut chain = Chain::new(seed, blocks_of(block));
            let mut pieces = Vec::new();
            let mut from = 0;
            for cut in cuts {
                pieces.extend(chain.push(&tokens[from..cut]));
                from = cut;
            }
            prop_assert_eq!(&pieces, &whole);
            prop_assert_eq!(chain.pending(), tokens.len() % block);

            // Continuing after any block gives the keys that follow it.
            let half = whole.len() / 2;
            if half > 0 {
                let mut first = Chain::new(seed, blocks_of(block));
                first.push(&tokens[..half * block]);
                let rest = chain_keys(*first.last(), blocks_of(block), &tokens[half * block..]);
                prop_assert_eq!(&rest[..], &whole[half..]);
            }
        }

        #[test]
        fn keys_are_shared_exactly_as_far_as_the_tokens_are(
            tokens in prop::collection::vec(any::<u32>(), 1..64),
            at in any::<prop::sample::Index>(),
            block in 1usize..8,
        ) {
            let mut other = tokens.clone();
            let at = at.index(tokens.len());
            other[at] ^= 1;
            let left = chain_keys([0; 32], blocks_of(block), &tokens);
            let right = chain_keys([0; 32], blocks_of(block), &other);
            let shared = left.iter().zip(&right).take_while(|(l, r)| l == r).count();
            prop_assert_eq!(shared, (at / block).min(left.len()));
            prop_assert!(left.iter().skip(shared).all(|key| !right.contains(key)));
        }
    }
}
