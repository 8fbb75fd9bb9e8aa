//! Handshakes on sockets of threads: a client's by a deadline, a server's without waiting.

use crate::client::ClientTls;
use crate::session::{Session, invalid};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConfig, ServerConnection};
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes that a caller may send for its handshake. A client's certificates fit many times.
const MOST_BYTES: usize = 64 << 10;

/// A socket as reader and writer.
struct Socket<'a>(BorrowedFd<'a>, RecvFlags);

impl Read for Socket<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let (_, count) = rustix::net::recv(self.0, room, self.1)?;
        Ok(count)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut flags = SendFlags::NOSIGNAL;
        if self.1.contains(RecvFlags::DONTWAIT) {
            flags |= SendFlags::DONTWAIT;
        }
        Ok(rustix::net::send(self.0, bytes, flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The client's handshake for frames on a connected blocking socket, by `deadline`. Changes the
/// socket's timeouts.
///
/// # Errors
///
/// `TimedOut` past the deadline; `InvalidData` when the server is not trusted or speaks no TLS.
pub fn connect_socket(
    tls: &ClientTls,
    name: ServerName<'static>,
    socket: BorrowedFd<'_>,
    deadline: Instant,
) -> io::Result<Session> {
    let mut connection = ClientConnection::new(tls.frames(), name).map_err(invalid)?;
    let mut stream = Socket(socket, RecvFlags::empty());
    while connection.is_handshaking() || connection.wants_write() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // The kernel takes a limit of zero as no limit.
        let limit = Some(left.max(Duration::from_millis(1)));
        set_socket_timeout(socket, Timeout::Recv, limit)?;
        set_socket_timeout(socket, Timeout::Send, limit)?;
        let moved = if connection.wants_write() {
            connection.write_tls(&mut stream)
        } else {
            connection.read_tls(&mut stream)
        };
        match moved {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error),
        }
        if let Err(error) = connection.process_new_packets() {
            // The server learns why, if it still reads.
            while connection.wants_write() && connection.write_tls(&mut stream).is_ok() {}
            return Err(invalid(error));
        }
    }
    Ok(Session::new(connection))
}

/// A server's handshake, driven by the events of its socket.
pub struct ServerHandshake {
    connection: ServerConnection,
    received: usize,
}

impl ServerHandshake {
    /// Begins one. Fails only on a configuration that cannot be.
    pub fn begin(config: Arc<ServerConfig>) -> io::Result<Self> {
        Ok(Self {
            connection: ServerConnection::new(config).map_err(invalid)?,
            received: 0,
        })
    }

    /// Goes on with what has arrived, without waiting. True when the handshake is complete.
    ///
    /// # Errors
    ///
    /// The peer has gone, speaks no TLS, is not trusted, or has sent more than 64 KiB. The peer is
    /// told by an alert.
    pub fn advance(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let mut stream = Socket(socket, RecvFlags::DONTWAIT);
        loop {
            while self.connection.wants_write() {
                // A new socket has room for a flight; one without is given up.
                if self.connection.write_tls(&mut stream)? == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
            }
            if !self.connection.is_handshaking() {
                return Ok(true);
            }
            match self.connection.read_tls(&mut stream) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            let judged = self.connection.process_new_packets();
            if let Err(error) = judged {
                while self.connection.wants_write()
                    && self.connection.write_tls(&mut stream).is_ok()
                {}
                return Err(invalid(error));
            }
            if self.received > MOST_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the handshake is too long",
                ));
            }
        }
    }

    /// The session of a complete handshake. Its buffer is small until [`Session::widen`].
    pub fn finish(self) -> Session {
        Session::of_caller(self.connection)
    }
}
