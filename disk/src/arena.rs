//! Memory for I/O: one page-aligned mapping, from which buffers are taken.

// UNSAFETY: this module owns one anonymous mapping. A buffer covers a range of it that no other
// buffer covers, from `take` until its drop.
#![allow(unsafe_code, reason = "owns a mapping and lends disjoint ranges of it")]

use crate::GRANULE;
use parking_lot::{Condvar, Mutex};
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// One page-aligned mapping from which buffers are taken.
pub struct Arena {
    start: NonNull<u8>,
    size: usize,
    state: Mutex<State>,
    room: Condvar,
}

// SAFETY: the mapping is plain memory. Buffers over it are disjoint, and the state has a lock.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

#[derive(Debug, Default)]
struct State {
    /// The lengths of free ranges, by their starts. No two ranges touch.
    free: BTreeMap<usize, usize>,
    free_bytes: usize,
    next_turn: u64,
    /// Callers that wait for free bytes, in the order of their calls.
    waiting: VecDeque<u64>,
}

impl State {
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let (&start, &length) = self.free.iter().find(|(_, length)| **length >= bytes)?;
        self.free.remove(&start);
        if length > bytes {
            self.free.insert(start + bytes, length - bytes);
        }
        self.free_bytes -= bytes;
        Some(start)
    }

    fn give(&mut self, mut start: usize, mut bytes: usize) {
        self.free_bytes += bytes;
        if let Some((&before, &length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
            bytes += length;
        }
        if let Some(length) = self.free.remove(&(start + bytes)) {
            bytes += length;
        }
        self.free.insert(start, bytes);
    }
}

impl Arena {
    /// Maps an arena of `bytes` bytes, rounded up to whole granules.
    ///
    /// # Errors
    ///
    /// The error of the mapping; `InvalidInput` for zero bytes.
    pub fn new(bytes: usize) -> io::Result<Arc<Self>> {
        let size = bytes
            .checked_next_multiple_of(GRANULE)
            .filter(|size| *size > 0)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, protection, flags) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Self {
            start,
            size,
            state: Mutex::new(State {
                free: BTreeMap::from([(0, size)]),
                free_bytes: size,
                ..State::default()
            }),
            room: Condvar::new(),
        }))
    }

    /// The bytes of the mapping.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The bytes that no buffer covers, in one or more ranges.
    pub fn free(&self) -> usize {
        self.state.lock().free_bytes
    }

    /// The first byte, for a registration with the kernel.
    pub(crate) const fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Takes a buffer of `bytes` bytes, rounded up to whole granules. `None` when no free range is long
    /// enough, or when other callers wait.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<Buffer> {
        let length = Self::rounded(bytes)?;
        let mut state = self.state.lock();
        if !state.waiting.is_empty() {
            return None;
        }
        let start = state.take(length)?;
        Some(self.buffer(start, length))
    }

    /// Takes a buffer as [`take`](Self::take) does, but ahead of callers that wait.
    pub fn take_first(self: &Arc<Self>, bytes: usize) -> Option<Buffer> {
        let length = Self::rounded(bytes)?;
        let start = self.state.lock().take(length)?;
        Some(self.buffer(start, length))
    }

    /// Takes a buffer, and waits for free bytes until `until`, in the order of the calls. `None` when the
    /// time has passed, and at once for more bytes than the arena has.
    pub fn take_within(self: &Arc<Self>, bytes: usize, until: Instant) -> Option<Buffer> {
        let length = Self::rounded(bytes).filter(|length| *length <= self.size)?;
        let mut state = self.state.lock();
        let turn = state.next_turn;
        state.next_turn += 1;
        state.waiting.push_back(turn);
        loop {
            if state.waiting.front() == Some(&turn)
                && let Some(start) = state.take(length)
            {
                state.waiting.pop_front();
                // The next caller may find enough free bytes too.
                self.room.notify_all();
                return Some(self.buffer(start, length));
            }
            if self.room.wait_until(&mut state, until).timed_out() {
                state.waiting.retain(|other| *other != turn);
                self.room.notify_all();
                return None;
            }
        }
    }

    fn rounded(bytes: usize) -> Option<usize> {
        let rounded = bytes.checked_next_multiple_of(GRANULE);
        rounded.filter(|rounded| *rounded > 0)
    }

    fn buffer(self: &Arc<Self>, start: usize, length: usize) -> Buffer {
        Buffer {
            arena: Arc::clone(self),
            start,
            length,
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this size, and no buffer is left: each has a reference.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.size) };
        debug_assert!(
            unmapped.is_ok(),
            "invariant: the mapping was never unmapped"
        );
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("size", &self.size)
            .field("free", &self.free())
            .finish()
    }
}

/// A range of an arena with one holder. Until it is filled, it has the bytes of an earlier holder.
pub struct Buffer {
    arena: Arc<Arena>,
    start: usize,
    length: usize,
}

impl Buffer {
    /// The address of the first byte.
    pub(crate) fn address(&mut self) -> *mut u8 {
        // SAFETY: the start lies inside the mapping.
        unsafe { self.arena.start.as_ptr().add(self.start) }
    }

    /// Whether the buffer belongs to this arena.
    pub(crate) fn is_of(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the start lies inside the mapping.
        let first = unsafe { self.arena.start.as_ptr().add(self.start) };
        // SAFETY: the range is mapped and initialised (by the kernel, with zeros, at first), and no
        // other buffer covers it.
        unsafe { std::slice::from_raw_parts(first, self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let first = self.address();
        // SAFETY: as in `deref`; the buffer is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(first, self.length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.state.lock().give(self.start, self.length);
        self.arena.room.notify_all();
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes at {})", self.length, self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn an_arena_without_bytes_is_refused_and_more_than_it_has_is_not_waited_for() {
        assert!(Arena::new(0).is_err());
        let arena = Arena::new(2 * GRANULE).unwrap();
        let later = Instant::now() + Duration::from_secs(60);
        assert!(arena.take_within(3 * GRANULE, later).is_none());
        assert!(arena.take_within(0, later).is_none() && arena.take(0).is_none());
        assert!(arena.take_within(usize::MAX, later).is_none());
    }

    #[test]
    fn who_waits_for_much_is_not_passed_by_who_needs_little() {
        let arena = Arena::new(4 * GRANULE).unwrap();
        let mut held: Vec<Buffer> = (0..4).map(|_| arena.take(GRANULE).unwrap()).collect();
        std::thread::scope(|scope| {
            let large = scope.spawn(|| {
                let later = Instant::now() + Duration::from_secs(60);
                arena.take_within(4 * GRANULE, later).is_some()
            });
            while arena.state.lock().waiting.is_empty() {
                std::thread::yield_now();
            }
            drop(held.pop());
            assert!(arena.take(GRANULE).is_none(), "the large one is first");
            assert!(arena.take_first(GRANULE).is_some(), "but not before those");
            let soon = Instant::now() + Duration::from_millis(20);
            assert!(arena.take_within(GRANULE, soon).is_none());
            held.clear();
            assert!(large.join().unwrap());
        });
        assert_eq!(arena.free(), arena.size());
        assert!(arena.take(4 * GRANULE).is_some());
    }

    proptest! {
        #[test]
        fn buffers_never_share_a_byte_and_all_room_comes_back(
            steps in prop::collection::vec((any::<bool>(), 1usize..5 * GRANULE), 1..100),
        ) {
            let arena = Arena::new(16 * GRANULE).unwrap();
            let mut held: Vec<(Buffer, u8)> = Vec::new();
            for ((takes, bytes), mark) in steps.into_iter().zip(1u8..) {
                if takes {
                    if let Some(mut buffer) = arena.take(bytes) {
                        prop_assert_eq!(buffer.len(), bytes.next_multiple_of(GRANULE));
                        buffer.fill(mark);
                        held.push((buffer, mark));
                    }
                } else if !held.is_empty() {
                    held.swap_remove(bytes % held.len());
                }
                for (buffer, mark) in &held {
                    prop_assert!(buffer.iter().all(|byte| byte == mark));
                }
                let taken: usize = held.iter().map(|(buffer, _)| buffer.len()).sum();
                prop_assert_eq!(arena.free(), arena.size() - taken);
            }
            held.clear();
            prop_assert!(arena.take(arena.size()).is_some(), "the free ranges joined");
        }
    }
}
