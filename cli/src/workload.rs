//! The work of the workers: requests, each with a prompt whose KV is needed.

pub(crate) mod chat;
pub(crate) mod trace;

use kvpool_types::chain::Chain;
use kvpool_types::key::Digest;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::num::NonZeroUsize;
use std::time::Duration;

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The arrival, counted from the first request.
    pub(crate) at: Duration,
    /// The tokens of its prompt.
    pub(crate) tokens: u64,
    /// The prompt.
    pub(crate) prompt: Prompt,
}

/// The prompt of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Prompt {
    /// Runs of tokens in order.
    Spans(Vec<Span>),
    /// The ids of a trace's blocks. An id names a block together with all blocks before it.
    Ids(Vec<u64>),
}

/// A run of tokens. The same seed gives the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Span {
    /// The seed of the tokens.
    pub(crate) seed: u64,
    /// The number of tokens.
    pub(crate) tokens: u32,
}

/// The number of different tokens, similar to real vocabularies.
const VOCABULARY: u64 = 128_000;

impl Span {
    fn draw(&self) -> impl Iterator<Item = u32> {
        let mut random = Random::new(self.seed);
        (0..self.tokens).map(move |_| {
            u32::try_from(random.below(VOCABULARY)).expect("invariant: the vocabulary fits 32 bits")
        })
    }
}

impl Prompt {
    /// The number of full blocks of `block_tokens` tokens.
    pub(crate) fn blocks(&self, block_tokens: NonZeroUsize) -> u64 {
        match self {
            Self::Spans(spans) => {
                let tokens: u64 = spans.iter().map(|span| u64::from(span.tokens)).sum();
                tokens / block_tokens.get() as u64
            }
            Self::Ids(ids) => ids.len() as u64,
        }
    }

    /// The digests of the prompt's full blocks, first block first, under the namespace's `seed`.
    pub(crate) fn digests(&self, seed: Digest, block_tokens: NonZeroUsize) -> Vec<Digest> {
        match self {
            Self::Spans(spans) => {
                let tokens: Vec<u32> = spans.iter().flat_map(Span::draw).collect();
                let mut chain = Chain::new(seed, block_tokens);
                tokens
                    .chunks_exact(block_tokens.get())
                    .map(|block| {
                        chain.push(block);
                        *chain.last()
                    })
                    .collect()
            }
            Self::Ids(ids) => ids.iter().map(|id| id_digest(&seed, *id)).collect(),
        }
    }
}

/// The digest of a trace's block. The id names the whole prefix, so no other id is hashed.
fn id_digest(seed: &Digest, id: u64) -> Digest {
    let mut hash = Sha256::new();
    hash.update(seed);
    hash.update(id.to_le_bytes());
    hash.finalize().into()
}

/// The generator splitmix64. Its numbers are the same on every machine and in every version.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not zero.
    pub(crate) const fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A number from `low` to `high`, both included.
    pub(crate) const fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: Digest = [9; 32];
    const SIXTEEN: NonZeroUsize = NonZeroUsize::new(16).unwrap();

    #[test]
    fn equal_prefixes_have_equal_digests_and_no_more() {
        let system = Span {
            seed: 1,
            tokens: 48,
        };
        let prompt = |seed| Prompt::Spans(vec![system, Span { seed, tokens: 40 }]);
        let (a, b) = (
            prompt(2).digests(SEED, SIXTEEN),
            prompt(3).digests(SEED, SIXTEEN),
        );
        assert_eq!(a.len(), 5, "88 tokens fill five blocks of 16");
        assert_eq!(prompt(2).blocks(SIXTEEN), 5);
        assert_eq!(a[..3], b[..3]);
        assert_ne!(a[3], b[3]);
        assert_ne!(a[0], prompt(2).digests([8; 32], SIXTEEN)[0]);
    }

    #[test]
    fn a_longer_span_begins_like_a_shorter_one() {
        let of = |tokens| Prompt::Spans(vec![Span { seed: 5, tokens }]).digests(SEED, SIXTEEN);
        assert_eq!(of(32)[..], of(64)[..2]);
    }

    #[test]
    fn trace_ids_name_blocks_by_themselves() {
        let of = |ids: &[u64]| Prompt::Ids(ids.to_vec()).digests(SEED, SIXTEEN);
        assert_eq!(of(&[0, 7])[1], of(&[3, 7])[1]);
        assert_ne!(of(&[0])[0], of(&[1])[0]);
        // SHA-256 of 32 bytes 0x09 and eight zero bytes, by Python's hashlib.
        let hex: String = of(&[0])[0].iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            "ddb14b31e762beb9890a5245053dc54444a30665a47197e4e49005e9a7f29471"
        );
    }

    #[test]
    fn random_numbers_are_splitmix64() {
        // The first outputs for the seed 1234567, as published with the algorithm.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
        for _ in 0..1000 {
            assert!((3..=5).contains(&random.between(3, 5)));
        }
    }
}
