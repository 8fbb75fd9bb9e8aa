//! Copies into memory that is not read again soon.
//!
//! An ordinary store first fetches the cache line that it overwrites. A copy to uncached memory
//! therefore moves three bytes for every two. Streaming stores write whole lines past the caches.
//! This pays for the large side of a put, the node's segment, and for the pages of a hand-off.

// UNSAFETY: vector loads and stores through raw pointers, on ranges that the caller guarantees.
#![allow(unsafe_code, reason = "streaming stores have no safe form")]

/// The least size in bytes of blocks whose copies bypass the caches. They would only evict useful cache
/// lines.
pub(crate) const STREAMED: u64 = 256 << 10;

/// Copies `length` bytes. Other threads are guaranteed to see them only after [`fence`].
///
/// # Safety
///
/// `from` is readable and `to` writable for `length` bytes, and the two ranges do not overlap.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has the instructions; the caller guarantees the ranges.
        unsafe { x86::copy(from, to, length) };
        return;
    }
    // SAFETY: the caller guarantees the ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) };
}

/// Orders the copies before it ahead of all later stores.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has the instruction; it touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};

    const LINE: usize = 64;
    const VECTOR: usize = 32;

    /// # Safety
    ///
    /// As for [`super::copy`], on a processor with AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
        // Ordinary stores up to the first line boundary of the target.
        let head = to.align_offset(LINE).min(length);
        let lines = (length - head) / LINE;
        let body = head + lines * LINE;
        // SAFETY: `head` is at most `length`.
        unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
        for line in 0..lines {
            let at = head + line * LINE;
            // SAFETY: the line lies inside both ranges and starts on a line boundary of the target,
            // so both stores are aligned.
            unsafe { copy_line(from.wrapping_add(at), to.wrapping_add(at)) };
        }
        let (from, to) = (from.wrapping_add(body), to.wrapping_add(body));
        // SAFETY: the remainder starts inside both ranges and ends where they end.
        unsafe { std::ptr::copy_nonoverlapping(from, to, length - body) };
    }

    /// # Safety
    ///
    /// Both pointers are valid for one line, and `to` is aligned to a line.
    #[target_feature(enable = "avx")]
    unsafe fn copy_line(from: *const u8, to: *mut u8) {
        let (from, to) = (from.cast::<__m256i>(), to.cast::<__m256i>());
        let (from_high, to_high) = (from.wrapping_add(1), to.wrapping_add(1));
        const { assert!(LINE == 2 * VECTOR) };
        // SAFETY: the first half of the line.
        let low = unsafe { _mm256_loadu_si256(from) };
        // SAFETY: the second half.
        let high = unsafe { _mm256_loadu_si256(from_high) };
        // SAFETY: the first half, aligned.
        unsafe { _mm256_stream_si256(to, low) };
        // SAFETY: the second half, aligned.
        unsafe { _mm256_stream_si256(to_high, high) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_exactly() {
        let source: Vec<u8> = (0..1000u32).map(|at| (at * 7 % 251) as u8).collect();
        for from in [0, 1, 31, 63] {
            for to in [0, 1, 17, 32, 63, 64] {
                for length in [0, 1, 31, 63, 64, 65, 127, 128, 200, 700] {
                    let mut target = vec![0xee; 1000];
                    // SAFETY: both vectors are longer than the copy, and distinct.
                    unsafe {
                        copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), length);
                    }
                    fence();
                    assert_eq!(target[to..to + length], source[from..from + length]);
                    assert!(target[..to].iter().all(|byte| *byte == 0xee));
                    assert!(target[to + length..].iter().all(|byte| *byte == 0xee));
                }
            }
        }
    }
}
