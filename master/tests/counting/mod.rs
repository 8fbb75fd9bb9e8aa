//! An allocator that counts the allocated bytes and their peak.

#![allow(dead_code, reason = "each test file uses a part of it")]

// UNSAFETY: the allocator passes every call to the system's allocator and only counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The bytes that glibc uses for an allocation: a header, and steps of 16 bytes.
const fn taken(bytes: usize) -> usize {
    (bytes + 8).next_multiple_of(16)
}

// SAFETY: every call is passed on unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let bytes = taken(layout.size());
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

/// The bytes allocated now.
pub(crate) fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// The peak of allocated bytes since the last call.
pub(crate) fn take_peak() -> usize {
    PEAK.swap(live(), Ordering::Relaxed)
}
