//! A session whose records rustls keeps: of any version of TLS, and of a handshake on the runtime.

use super::invalid;
use super::unsent::Unsent;
use parking_lot::Mutex;
use rustls::Connection;
use std::io::{self, BufRead, Write};

/// The bytes that are received at a time: four records.
const RECEIVED: usize = 64 << 10;

/// The lock on the connection is held only while bytes are encrypted or decrypted.
pub(super) struct Buffered {
    connection: Mutex<Connection>,
    incoming: Mutex<Incoming>,
}

/// Ciphertext that has arrived.
struct Incoming {
    bytes: Box<[u8]>,
    /// The part that is not decrypted yet.
    start: usize,
    end: usize,
}

impl Buffered {
    pub(super) fn new(mut connection: Connection) -> Self {
        // Senders bound what they encrypt at a time.
        connection.set_buffer_limit(None);
        Self {
            connection: Mutex::new(connection),
            incoming: Mutex::new(Incoming {
                bytes: vec![0; RECEIVED].into_boxed_slice(),
                start: 0,
                end: 0,
            }),
        }
    }

    pub(super) fn receive(
        &self,
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
        take: impl FnOnce(&[u8]) -> usize,
    ) -> io::Result<usize> {
        let mut incoming = self.incoming.lock();
        loop {
            if self.decrypt(&mut incoming)? {
                let mut connection = self.connection.lock();
                let mut reader = connection.reader();
                let count = take(reader.fill_buf()?);
                reader.consume(count);
                return Ok(count);
            }
            let count = receive(&mut incoming.bytes)?;
            if count == 0 {
                return Ok(0);
            }
            (incoming.start, incoming.end) = (0, count);
        }
    }

    pub(super) fn has_received(&self) -> bool {
        let incoming = self.incoming.lock();
        let state = self.connection.lock().process_new_packets();
        incoming.start < incoming.end
            || state.map_or(true, |state| state.plaintext_bytes_to_read() > 0)
    }

    pub(super) fn encrypt(&self, plain: &[u8], unsent: &mut Unsent) -> io::Result<()> {
        let mut connection = self.connection.lock();
        connection.writer().write_all(plain)?;
        while connection.wants_write() {
            connection.write_tls(unsent)?;
        }
        Ok(())
    }

    /// Decrypts until there is plaintext, or the end of it. False when more must be received first.
    fn decrypt(&self, incoming: &mut Incoming) -> io::Result<bool> {
        let mut connection = self.connection.lock();
        loop {
            match connection.reader().fill_buf() {
                Ok(_) => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let Incoming { bytes, start, end } = incoming;
            let Some(mut rest) = bytes.get(*start..*end).filter(|rest| !rest.is_empty()) else {
                return Ok(false);
            };
            *start += connection.read_tls(&mut rest)?;
            connection.process_new_packets().map_err(invalid)?;
        }
    }
}
