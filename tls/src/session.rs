//! A TLS connection after its handshake. The caller owns the socket.
//!
//! One thread receives while other threads send. Neither direction waits for I/O of the other: during I/O a thread
//! holds the lock of its own direction only. Records leave in the order of their encryption, because a sender holds
//! the lock on the unsent bytes until it has sent them.
//!
//! ```text
//!   blocks, frames ──fill──► records ──► unsent ──send──► socket
//!   blocks, frames ◄─take─── records ◄──────────receive── socket
//! ```

mod records;
mod unsent;

pub(crate) use records::{Agreed, Rekeys};

use parking_lot::Mutex;
use records::Records;
use std::io;
use unsent::Unsent;

/// Bytes of a block that are encrypted before they are sent. This much stays in a core's cache.
const PIECE: usize = 64 << 10;
/// The same limit for a message: one record. The peer decrypts a record while the next one is
/// encrypted.
const RECORD: usize = 16 << 10;

/// See the module's documentation.
pub struct Session {
    records: Records,
    unsent: Mutex<Unsent>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Session")
    }
}

impl Session {
    /// A session from the result of a handshake.
    pub(crate) fn agreed(agreed: Agreed) -> Result<Self, rustls::Error> {
        let session = Self::of_caller(agreed)?;
        session.widen();
        Ok(session)
    }

    /// The same with a small buffer, for a caller.
    pub(crate) fn of_caller(agreed: Agreed) -> Result<Self, rustls::Error> {
        Ok(Self {
            records: Records::new(agreed)?,
            unsent: Mutex::default(),
        })
    }

    /// Enlarges the buffer of a caller to that of other sessions. Called when its hello is
    /// accepted.
    pub fn widen(&self) {
        self.records.widen();
    }

    /// Fills `room` with at least one decrypted byte. Calls `receive` when no decrypted byte is
    /// left, and returns its errors. Returns 0 when the peer has ended the connection.
    pub fn receive(
        &self,
        room: &mut [u8],
        receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        self.receive_with(receive, |plain| {
            let count = plain.len().min(room.len());
            let (now, _) = plain.split_at(count);
            let (room, _) = room.split_at_mut(count);
            room.copy_from_slice(now);
            count
        })
    }

    /// As [`Session::receive`]: lends the decrypted bytes of one record to `take`, which returns how many of
    /// them it took. The rest stays. Returns that number, and 0 when the peer has ended the connection.
    pub fn receive_with(
        &self,
        receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
        take: impl FnOnce(&[u8]) -> usize,
    ) -> io::Result<usize> {
        self.records.receive(receive, take)
    }

    /// Whether the session has bytes that no event of the socket will announce.
    pub fn has_received(&self) -> bool {
        self.records.has_received()
    }

    /// Encrypts `plain`, and sends it after the unsent bytes. On an error the rest stays for
    /// [`Session::flush`]. The bytes of `plain` that were encrypted then count as taken.
    pub fn send(
        &self,
        plain: &[u8],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut unsent = self.unsent.lock();
        for piece in plain.chunks(RECORD) {
            self.encrypt(piece, &mut unsent)?;
            unsent.drain(&mut send)?;
        }
        Ok(())
    }

    /// Like [`Session::send`], with `length` bytes that `fill` writes in order into the buffers that it gets.
    pub fn send_filled(
        &self,
        length: usize,
        mut fill: impl FnMut(&mut [u8]),
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut unsent = self.unsent.lock();
        let mut left = length;
        while left > 0 {
            let count = left.min(PIECE);
            self.records.encrypt(count, &mut fill, &mut unsent)?;
            unsent.drain(&mut send)?;
            left -= count;
        }
        Ok(())
    }

    /// Like [`Session::send`], for a sender that must not wait. Returns the number of bytes of `plain` that were
    /// taken; a small frame is taken whole. While the socket has not accepted the earlier bytes, it takes none and
    /// fails with `WouldBlock`.
    pub fn send_some(
        &self,
        plain: &[u8],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut unsent = self.unsent.lock();
        unsent.drain(&mut send)?;
        let mut taken = 0;
        for piece in plain.chunks(RECORD) {
            self.encrypt(piece, &mut unsent)?;
            taken += piece.len();
            // The piece is encrypted whatever the error, so it must not be passed again. The next call returns the
            // error.
            if unsent.drain(&mut send).is_err() {
                break;
            }
        }
        Ok(taken)
    }

    /// Sends the unsent bytes.
    pub fn flush(&self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        self.unsent.lock().drain(&mut send)
    }

    /// Whether the socket has not accepted all bytes.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.lock().is_empty()
    }

    fn encrypt(&self, piece: &[u8], unsent: &mut Unsent) -> io::Result<()> {
        let mut rest = piece;
        let mut fill = |room: &mut [u8]| {
            let (now, later) = rest.split_at(room.len());
            room.copy_from_slice(now);
            rest = later;
        };
        self.records.encrypt(piece.len(), &mut fill, unsent)
    }
}

pub(crate) fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
