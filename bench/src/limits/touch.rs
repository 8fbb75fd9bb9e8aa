//! The first touch of fresh memory.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The smallest page size.
const PAGE: usize = 4096;

/// Allocates `bytes` and touches every page once. Returns the time.
pub(crate) fn first_touch(bytes: u64) -> Duration {
    let begin = Instant::now();
    // Zeroes: the kernel maps these pages at the first write.
    let mut memory = vec![0u8; usize::try_from(bytes).unwrap_or(PAGE)];
    for page in memory.chunks_mut(PAGE) {
        if let Some(byte) = page.first_mut() {
            *byte = 1;
        }
    }
    let took = begin.elapsed();
    black_box(&memory);
    took
}
