//! A TLS connection after its handshake, over a socket that somebody else owns.
//!
//! One thread receives while others send. Neither direction waits for the other's socket: no lock is held
//! during I/O but that of the own direction. Records leave in the order in which they were encrypted, since
//! a sender holds the lock on what is unsent until it is sent.
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

/// The bytes of blocks that are encrypted before they are sent: what stays in a core's cache.
const PIECE: usize = 64 << 10;
/// The same of a message: one record. The peer decrypts it while the next one is encrypted.
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
    /// A session of what a handshake agreed on.
    pub(crate) fn agreed(agreed: Agreed) -> Result<Self, rustls::Error> {
        let session = Self::of_caller(agreed)?;
        session.widen();
        Ok(session)
    }

    /// The same with a small buffer, for a peer that has yet to say who it is.
    pub(crate) fn of_caller(agreed: Agreed) -> Result<Self, rustls::Error> {
        Ok(Self {
            records: Records::new(agreed)?,
            unsent: Mutex::default(),
        })
    }

    /// Makes the buffer of a caller as large as that of any other session: it has said who it is.
    pub fn widen(&self) {
        self.records.widen();
    }

    /// Fills `room` with at least one decrypted byte. `receive` is called when none is left from
    /// before; its errors are returned. Returns 0 when the peer has ended the connection.
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

    /// Whether bytes are at hand that no event of the socket will announce.
    pub fn has_received(&self) -> bool {
        self.records.has_received()
    }

    /// Encrypts `plain`, and sends it and what was unsent before. On an error the rest stays for
    /// [`Session::flush`]; what of `plain` was encrypted then counts as taken.
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

    /// As [`Session::send`] of `length` bytes that `fill` writes, in order, into each room that it is given.
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

    /// As [`Session::send`], for a sender that must not wait. Returns the bytes of `plain` that were taken, all
    /// of them for a small frame. Fails with `WouldBlock`, and takes none, while the socket has not taken
    /// what was unsent before.
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
            // Whatever stops it, the piece is encrypted, and must not be given again. The next call meets the error.
            if unsent.drain(&mut send).is_err() {
                break;
            }
        }
        Ok(taken)
    }

    /// Sends what is unsent.
    pub fn flush(&self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        self.unsent.lock().drain(&mut send)
    }

    /// Whether a socket has yet to take some bytes.
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
