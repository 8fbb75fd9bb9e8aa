//! The two ranges of memory that one read fills.

// UNSAFETY: a list of addresses for the kernel. The memory is the request's own until its completion.
#![allow(unsafe_code, reason = "system calls take raw addresses")]

use crate::Buffer;
use kvpool_transport::Slice;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};

/// The ranges that are still to be filled.
pub(crate) struct ScatterList {
    parts: [libc::iovec; 2],
    /// The first part that is not full.
    first: usize,
}

// SAFETY: the addresses are those of memory that any thread may use: a buffer and a slice.
unsafe impl Send for ScatterList {}

impl Default for ScatterList {
    fn default() -> Self {
        let none = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            parts: [none; 2],
            first: 2,
        }
    }
}

impl ScatterList {
    /// The bytes of the buffer and the memory after the first `done`.
    pub(crate) fn new(buffer: &mut Buffer, memory: &Slice, done: usize) -> Self {
        let length = memory.length().as_usize();
        let in_memory = done.saturating_sub(buffer.len()).min(length);
        let in_buffer = done.min(buffer.len());
        let part = |start: *mut u8, length: usize, done: usize| libc::iovec {
            iov_base: start.wrapping_add(done).cast(),
            iov_len: length - done,
        };
        Self {
            first: usize::from(in_buffer == buffer.len()),
            parts: [
                part(buffer.address(), buffer.len(), in_buffer),
                part(memory.as_ptr(), length, in_memory),
            ],
        }
    }

    /// The list for the kernel, and its length. It is valid until this value moves. If the list is too long for
    /// one call, the kernel reads less.
    pub(crate) fn list(&self) -> (*const libc::iovec, u32) {
        let rest = self.parts.get(self.first..).unwrap_or_default();
        let count = u32::try_from(rest.len()).unwrap_or_default();
        (rest.as_ptr(), count)
    }
}

/// Reads from a file into a buffer, and then into memory, without the first `done` bytes of both. `offset` belongs
/// to the buffer's first byte. Returns the number of bytes.
pub(crate) fn read(
    file: &OwnedFd,
    offset: u64,
    (buffer, memory): (&mut Buffer, &Slice),
    done: usize,
) -> Result<usize, Errno> {
    let parts = ScatterList::new(buffer, memory, done);
    let (list, count) = parts.list();
    let offset = offset + done as u64;
    let (offset, count) = (offset.cast_signed(), count.cast_signed());
    // SAFETY: the list has `count` entries. The caller lends the memory that they name.
    let read = unsafe { libc::preadv(file.as_raw_fd(), list, count, offset) };
    usize::try_from(read).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}
