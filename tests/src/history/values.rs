//! Bytes that name their key and value, and show when they are not whole.

use super::Found;

/// The bytes before the pattern: the key and the value.
const HEAD: usize = 16;

/// The bytes of a value. Their length follows from the value, so that a mixture of two values shows
/// in the length too.
pub fn encode(key: u64, value: u64) -> Vec<u8> {
    let length = length_of(value);
    let mut bytes = Vec::with_capacity(length + 8);
    bytes.extend_from_slice(&key.to_le_bytes());
    bytes.extend_from_slice(&value.to_le_bytes());
    let mut state = key.rotate_left(32) ^ value;
    while bytes.len() < length {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The value of `key` with these bytes.
pub fn decode(key: u64, bytes: &[u8]) -> Found {
    let word = |at: usize| {
        let word = bytes.get(at..at + 8)?;
        Some(u64::from_le_bytes(word.try_into().ok()?))
    };
    match (word(0), word(8)) {
        (Some(of), Some(value)) if of == key && encode(key, value) == bytes => Found::Value(value),
        _ => Found::Torn,
    }
}

/// The length of the longest value, in bytes.
pub(super) const LONGEST: usize = HEAD + 16 * 997;

fn length_of(value: u64) -> usize {
    let steps = usize::try_from(value % 17).expect("invariant: less than 17");
    HEAD + steps * 997
}
