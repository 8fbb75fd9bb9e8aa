//! How fast the kernel gives memory that was never used.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The smallest page: a byte in each is touched.
const PAGE: usize = 4096;

/// Takes `bytes` of memory and touches every page once. Returns the time.
pub(crate) fn first_touch(bytes: u64) -> Duration {
    let begin = Instant::now();
    // Zeroes: pages that are not there until they are written.
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
