//! Buffers of one get that share bytes. After such a get the memory would not hold the block.

use crate::errors::GetError;
use kvpool_transport::Slice;

/// Refuses buffers that share bytes.
pub(crate) fn check(buffers: &[Slice]) -> Result<(), GetError> {
    let ranges = buffers
        .iter()
        .map(|slice| (slice.as_ptr().addr() as u64, slice.length().0));
    match buffers.len() > 1 && share_bytes(ranges) {
        true => Err(GetError::overlapping()),
        false => Ok(()),
    }
}

/// Whether two of the ranges share a byte. A range is an address and a length.
pub(crate) fn share_bytes(ranges: impl Iterator<Item = (u64, u64)>) -> bool {
    let mut ranges: Vec<(u64, u64)> = ranges.filter(|(_, length)| *length > 0).collect();
    ranges.sort_unstable();
    // If any two ranges share a byte, so do two neighbours in the order of addresses.
    ranges.windows(2).any(|pair| {
        matches!(pair, [(start, length), (next, _)] if start.saturating_add(*length) > *next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_share_bytes_if_any_two_of_them_do(
            ranges in prop::collection::vec((0u64..40, 0u64..8), 0..8),
        ) {
            let mut seen = std::collections::HashSet::new();
            let mut bytes = ranges.iter().flat_map(|(start, length)| *start..start + length);
            let is_shared = bytes.any(|byte| !seen.insert(byte));
            prop_assert_eq!(share_bytes(ranges.iter().copied()), is_shared);
        }
    }
}
