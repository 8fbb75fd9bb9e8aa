//! Blocks with checkable content: every byte follows from the key.

use kvpool_client::{Client, GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Key, Length};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// The bytes of the block under `key`.
pub fn bytes_of(key: &Key, length: usize) -> Vec<u8> {
    let mut state = seed(key);
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        // splitmix64: every word differs, so torn and shifted blocks show.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        out.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
    }
    out.truncate(length);
    out
}

fn seed(key: &Key) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.to_string().hash(&mut hasher);
    hasher.finish()
}

/// A digest key by number.
pub fn key(number: u64) -> Key {
    let mut digest = [0x5a; 32];
    digest[..8].copy_from_slice(&number.to_le_bytes());
    digest[8..16].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    Key::from_digest(digest)
}

/// Memory with the bytes of the block under `key`.
pub fn source(key: &Key, length: usize) -> Slice {
    Region::from(bytes_of(key, length)).whole()
}

/// Empty memory that receives a block.
pub fn target(length: usize) -> Slice {
    Region::allocate(Length(length as u64)).whole()
}

/// Whether `slice` begins with the bytes of the block under `key`.
pub fn is_right(key: &Key, slice: &Slice, length: usize) -> bool {
    let mut bytes = slice.to_vec();
    bytes.truncate(length);
    bytes == bytes_of(key, length)
}

/// Puts the blocks `numbers` in one batch, each `length` bytes long. Fails unless all are stored or
/// present.
pub async fn put_all(
    client: &Client,
    numbers: std::ops::Range<u64>,
    length: usize,
) -> anyhow::Result<()> {
    let puts = numbers.map(|number| {
        let key = key(number);
        PutBlock::new(key.clone(), source(&key, length))
    });
    for outcome in client
        .batch_put(puts.collect(), &PutOptions::default())
        .await
    {
        outcome?;
    }
    Ok(())
}

/// The result of a check of many blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// The number of blocks with the right bytes.
    pub right: usize,
    /// The number of blocks with wrong bytes.
    pub wrong: usize,
    /// The number of absent blocks.
    pub missed: usize,
    /// The number of blocks whose get failed.
    pub failed: usize,
}

/// Gets blocks `numbers` of `length` bytes and checks every byte.
pub async fn check_all(client: &Client, numbers: std::ops::Range<u64>, length: usize) -> Tally {
    let options = GetOptions {
        release: true,
        ..GetOptions::default()
    };
    check_all_by(client, numbers, length, &options).await
}

/// [`check_all`] with these options.
pub async fn check_all_by(
    client: &Client,
    numbers: std::ops::Range<u64>,
    length: usize,
    options: &GetOptions,
) -> Tally {
    let mut tally = Tally::default();
    let numbers: Vec<u64> = numbers.collect();
    for batch in numbers.chunks(64) {
        let targets: Vec<Slice> = batch.iter().map(|_| target(length)).collect();
        let gets = batch
            .iter()
            .zip(&targets)
            .map(|(n, t)| GetBlock::new(key(*n), t.clone()));
        let outcomes = client.batch_get(gets.collect(), options).await;
        for ((number, target), outcome) in batch.iter().zip(&targets).zip(outcomes) {
            match outcome {
                Ok(GetOutcome::Hit { .. }) if is_right(&key(*number), target, length) => {
                    tally.right += 1;
                }
                Ok(GetOutcome::Hit { .. }) => tally.wrong += 1,
                Ok(GetOutcome::Miss) => tally.missed += 1,
                Err(_) => tally.failed += 1,
            }
        }
    }
    tally
}
