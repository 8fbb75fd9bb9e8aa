//! A TLS connection after its handshake, over a socket that somebody else owns.
//!
//! One thread receives while others send. Neither direction waits for the other's socket: the lock on
//! the connection is held only while bytes are encrypted or decrypted. Records leave in the order in
//! which they were encrypted, since a sender holds the lock on what is unsent until it is sent.

use parking_lot::Mutex;
use rustls::Connection;
use std::io::{self, Read, Write};

/// The bytes that are received at a time: four records.
const RECEIVED: usize = 64 << 10;
/// The same from a peer that has yet to say who it is. Anybody can be one, so it costs little memory.
const RECEIVED_OF_CALLER: usize = 4 << 10;
/// The plaintext that is encrypted before it is sent: what stays in a core's cache.
pub(crate) const PIECE: usize = 64 << 10;

/// See the module's documentation.
pub struct Session {
    connection: Mutex<Connection>,
    incoming: Mutex<Incoming>,
    unsent: Mutex<Unsent>,
}

/// Ciphertext that has arrived.
struct Incoming {
    bytes: Box<[u8]>,
    /// The part that is not decrypted yet.
    start: usize,
    end: usize,
}

/// Ciphertext that no socket has taken.
#[derive(Default)]
struct Unsent {
    bytes: Vec<u8>,
    sent: usize,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Session")
    }
}

impl Session {
    /// Takes over a connection whose handshake is complete.
    pub fn new(connection: impl Into<Connection>) -> Self {
        Self::with_room(connection.into(), RECEIVED)
    }

    /// The same with a small buffer, for a peer that has yet to say who it is.
    pub(crate) fn of_caller(connection: impl Into<Connection>) -> Self {
        Self::with_room(connection.into(), RECEIVED_OF_CALLER)
    }

    fn with_room(mut connection: Connection, room: usize) -> Self {
        // Senders bound what they encrypt at a time.
        connection.set_buffer_limit(None);
        Self {
            connection: Mutex::new(connection),
            incoming: Mutex::new(Incoming {
                bytes: vec![0; room].into_boxed_slice(),
                start: 0,
                end: 0,
            }),
            unsent: Mutex::default(),
        }
    }

    /// Makes the buffer of a caller as large as that of any other session: it has said who it is.
    pub fn widen(&self) {
        let mut incoming = self.incoming.lock();
        let mut bytes = std::mem::take(&mut incoming.bytes).into_vec();
        bytes.resize(RECEIVED, 0);
        incoming.bytes = bytes.into_boxed_slice();
    }

    /// Fills `room` with at least one decrypted byte. `receive` is called when none is left from
    /// before; its errors are returned. Returns 0 when the peer has ended the connection.
    pub fn receive(
        &self,
        room: &mut [u8],
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut incoming = self.incoming.lock();
        loop {
            let got = self.decrypt(&mut incoming, room)?;
            if let Some(count) = got {
                return Ok(count);
            }
            let count = receive(&mut incoming.bytes)?;
            if count == 0 {
                return Ok(0);
            }
            (incoming.start, incoming.end) = (0, count);
        }
    }

    /// Whether bytes are at hand that no event of the socket will announce.
    pub fn has_received(&self) -> bool {
        let incoming = self.incoming.lock();
        let state = self.connection.lock().process_new_packets();
        incoming.start < incoming.end
            || state.map_or(true, |state| state.plaintext_bytes_to_read() > 0)
    }

    /// Decrypts until there is plaintext; `None` when more must be received first.
    fn decrypt(&self, incoming: &mut Incoming, room: &mut [u8]) -> io::Result<Option<usize>> {
        let mut connection = self.connection.lock();
        loop {
            match connection.reader().read(room) {
                Ok(count) => return Ok(Some(count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let Incoming { bytes, start, end } = incoming;
            let Some(mut rest) = bytes.get(*start..*end).filter(|rest| !rest.is_empty()) else {
                return Ok(None);
            };
            *start += connection.read_tls(&mut rest)?;
            connection.process_new_packets().map_err(invalid)?;
        }
    }

    /// Encrypts `plain`, and sends it and what was unsent before. On an error the rest stays for
    /// [`Session::flush`]; `plain` then counts as taken.
    pub fn send(
        &self,
        plain: &[u8],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut unsent = self.unsent.lock();
        for piece in plain.chunks(PIECE) {
            self.encrypt(piece, &mut unsent)?;
            unsent.drain(&mut send)?;
        }
        Ok(())
    }

    /// As [`Session::send`] of at most one piece, for a sender that must not wait. Returns the bytes of
    /// `plain` that were taken, all of it for a small frame. Fails with `WouldBlock`, and takes none,
    /// while the socket has not taken what was unsent before.
    pub fn send_some(
        &self,
        plain: &[u8],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut unsent = self.unsent.lock();
        unsent.drain(&mut send)?;
        let piece = plain.get(..PIECE).unwrap_or(plain);
        self.encrypt(piece, &mut unsent)?;
        match unsent.drain(&mut send) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(piece.len()),
        }
    }

    /// Sends what is unsent.
    pub fn flush(&self, mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        self.unsent.lock().drain(&mut send)
    }

    /// Whether a socket has yet to take some bytes.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.lock().bytes.is_empty()
    }

    fn encrypt(&self, piece: &[u8], unsent: &mut Unsent) -> io::Result<()> {
        let mut connection = self.connection.lock();
        connection.writer().write_all(piece)?;
        while connection.wants_write() {
            connection.write_tls(&mut unsent.bytes)?;
        }
        Ok(())
    }
}

impl Unsent {
    fn drain(&mut self, send: &mut impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
        while let Some(rest) = self.bytes.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match send(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(())
    }
}

pub(crate) fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
