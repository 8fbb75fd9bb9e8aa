//! Blocks that can be checked: every byte follows from the key.

use kvpool_transport::{Region, Slice};
use kvpool_types::{Key, Length};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// The bytes that belong under `key`.
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

/// Memory that holds the bytes that belong under `key`.
pub fn source(key: &Key, length: usize) -> Slice {
    Region::from(bytes_of(key, length)).whole()
}

/// Empty memory to get a block into.
pub fn target(length: usize) -> Slice {
    Region::allocate(Length(length as u64)).whole()
}

/// Whether `slice` begins with the bytes that belong under `key`.
pub fn is_right(key: &Key, slice: &Slice, length: usize) -> bool {
    let mut bytes = slice.to_vec();
    bytes.truncate(length);
    bytes == bytes_of(key, length)
}
