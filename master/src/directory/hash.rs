//! Hashes of keys under a secret seed. Clients choose digests and texts; the seed prevents keys
//! that are chosen to collide in one stripe or one bucket.

use kvpool_types::ids::NamespaceId;
use kvpool_types::key::Digest;

/// The secret of one directory's hashes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seed([u64; 4]);

impl Seed {
    /// Derives the words of the secret from one random number (SplitMix64).
    pub(super) fn new(random: u64) -> Self {
        let mut state = random;
        Self(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = state;
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^ (word >> 31)
        }))
    }

    /// The hash of the affixes of a digest. A key's hash is the same whether its affixes are
    /// interned or not.
    pub(super) fn affixes(&self, namespace: NamespaceId, prefix: &str, suffix: &str) -> u64 {
        let [_, _, _, last] = self.0;
        let state = fold(
            u64::from(namespace.0) ^ last,
            prefix.len() as u64 ^ 0x5555_5555_5555_5555,
        );
        self.bytes(self.bytes(state, prefix.as_bytes()), suffix.as_bytes())
    }

    /// The hash of a digest key; `affixes` is the hash of its affixes.
    #[inline]
    pub(super) fn digest(&self, affixes: u64, digest: &Digest) -> u64 {
        let [k0, k1, k2, k3] = self.0;
        let [a, b, c, d] = words(digest);
        fold(fold(a ^ k0, b ^ k1) ^ affixes, fold(c ^ k2, d ^ k3) ^ k0)
    }

    /// The hash of a text key.
    pub(super) fn text(&self, namespace: NamespaceId, text: &str) -> u64 {
        let [_, _, first, _] = self.0;
        self.bytes(
            fold(u64::from(namespace.0) ^ first, text.len() as u64),
            text.as_bytes(),
        )
    }

    fn bytes(&self, start: u64, bytes: &[u8]) -> u64 {
        let [k0, k1, ..] = self.0;
        let mut state = start ^ k0;
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            for (to, from) in word.iter_mut().zip(part) {
                *to = *from;
            }
            state = fold(state ^ u64::from_le_bytes(word), k1) ^ state.rotate_left(23);
        }
        fold(state, k1 ^ bytes.len() as u64)
    }
}

/// Compares two digests word by word: the library call for comparing memory costs more than the
/// comparison.
#[inline]
pub(super) fn same(one: &Digest, other: &Digest) -> bool {
    let [a, b, c, d] = words(one);
    let [e, f, g, h] = words(other);
    (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h) == 0
}

#[inline]
fn words(digest: &Digest) -> [u64; 4] {
    let (parts, _) = digest.as_chunks::<8>();
    let mut words = [0; 4];
    for (word, part) in words.iter_mut().zip(parts) {
        *word = u64::from_le_bytes(*part);
    }
    words
}

/// Multiplies to 128 bits and folds both halves together.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    #[allow(
        clippy::cast_possible_truncation,
        reason = "the halves are taken one by one"
    )]
    {
        product as u64 ^ (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_part_of_a_key_counts() {
        let seed = Seed::new(1);
        let base = seed.affixes(NamespaceId(1), "ab", "c");
        let mut hashes = HashSet::from([
            seed.digest(base, &[0; 32]),
            seed.digest(seed.affixes(NamespaceId(2), "ab", "c"), &[0; 32]),
            seed.digest(seed.affixes(NamespaceId(1), "a", "bc"), &[0; 32]),
            seed.digest(seed.affixes(NamespaceId(1), "", ""), &[0; 32]),
            Seed::new(2).digest(base, &[0; 32]),
            seed.text(NamespaceId(1), "abc"),
            seed.text(NamespaceId(2), "abc"),
            seed.text(NamespaceId(1), "abc\0"),
        ]);
        for byte in 0..32 {
            let mut digest = [0; 32];
            digest[byte] = 1;
            hashes.insert(seed.digest(base, &digest));
        }
        assert_eq!(hashes.len(), 40);
    }

    #[test]
    fn hashes_spread_over_stripes_and_buckets() {
        let seed = Seed::new(3);
        let base = seed.affixes(NamespaceId(0), "", "");
        for shift in [0, 32, 57] {
            let mut counts = [0u32; 64];
            for n in 0..64_000u64 {
                let mut digest = [0; 32];
                digest[..8].copy_from_slice(&n.to_le_bytes());
                let bits = (seed.digest(base, &digest) >> shift) % 64;
                counts[usize::try_from(bits).unwrap()] += 1;
            }
            assert!(
                counts.iter().all(|n| (800..1200).contains(n)),
                "{shift}: {counts:?}"
            );
        }
    }
}
