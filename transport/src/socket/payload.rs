//! Receives a large payload with few wake-ups.

// UNSAFETY: sets a socket option that the libraries lack, from a number on the stack.
#![allow(unsafe_code, reason = "SO_RCVLOWAT")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The bytes of a large payload that must arrive before the receiver is woken.
const SLEEP_BYTES: u32 = 96 << 10;

/// The smallest large payload, in bytes.
const LARGE: u64 = 4 * SLEEP_BYTES as u64;

/// A payload being received. While much of it is left, its receiver is woken seldom.
pub(crate) struct LargePayload<'a> {
    socket: BorrowedFd<'a>,
    left: u64,
    sleeps_long: bool,
}

impl<'a> LargePayload<'a> {
    /// A payload of `left` bytes. A small payload is received as usual.
    pub(crate) fn new(socket: BorrowedFd<'a>, left: u64) -> Self {
        Self {
            socket,
            left,
            sleeps_long: left >= LARGE && set(socket, SLEEP_BYTES),
        }
    }

    /// Records that one call received `bytes`.
    pub(crate) fn received(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
        if self.left < 2 * u64::from(SLEEP_BYTES) {
            self.wake_early();
        }
    }

    fn wake_early(&mut self) {
        if std::mem::take(&mut self.sleeps_long) {
            set(self.socket, 1);
        }
    }
}

impl Drop for LargePayload<'_> {
    fn drop(&mut self) {
        self.wake_early();
    }
}

fn set(socket: BorrowedFd<'_>, bytes: u32) -> bool {
    let set = set_least_received(socket, bytes);
    if let Err(error) = &set {
        tracing::debug!(%error, "setting SO_RCVLOWAT failed: every packet wakes the receiver");
    }
    set.is_ok()
}

/// Keeps a receiver asleep until this many bytes have arrived, or the connection ends. Otherwise
/// every packet of a large payload wakes it. A receiver that waits for fewer bytes must reset the
/// option first, or it sleeps on.
fn set_least_received(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let size = libc::socklen_t::try_from(size_of_val(&bytes))
        .expect("invariant: an int is a few bytes long");
    // SAFETY: the option is an int, which lives during the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const bytes).cast(),
            size,
        )
    };
    if set == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
