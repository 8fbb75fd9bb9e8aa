//! Handshakes on blocking sockets: by a deadline for a client, without waiting for a server.

mod steps;
#[cfg(test)]
pub(crate) mod tests;

use crate::client::ClientTls;
use crate::frames::too_long;
use crate::session::{Session, invalid};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};
use rustls::ServerConfig;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
pub(crate) use steps::{Next, Side, Steps};

/// The most bytes that a caller may send for its handshake. A client's certificates fit many times.
pub(crate) const MOST_BYTES: usize = 64 << 10;

/// The bytes that are received at a time.
const RECEIVED: usize = 4 << 10;

/// Sends once. Bytes that the socket does not accept stay here. Receives once otherwise. Returns the bytes that
/// arrived.
fn move_bytes<S: Side>(
    steps: &mut Steps<S>,
    socket: BorrowedFd<'_>,
    flags: RecvFlags,
) -> io::Result<usize> {
    if !steps.to_send.is_empty() {
        let mut sending = SendFlags::NOSIGNAL;
        if flags.contains(RecvFlags::DONTWAIT) {
            sending |= SendFlags::DONTWAIT;
        }
        let sent = rustix::net::send(socket, &steps.to_send, sending)?;
        if sent == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        steps.to_send.drain(..sent);
        return Ok(0);
    }
    let mut piece = [0; RECEIVED];
    let (_, count) = rustix::net::recv(socket, &mut piece, flags)?;
    if count == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let arrived = piece.get(..count).unwrap_or_default();
    steps.arrived.extend_from_slice(arrived);
    Ok(count)
}

/// Tells the peer why the handshake failed, if it still reads.
fn refuse<S: Side>(
    steps: &mut Steps<S>,
    socket: BorrowedFd<'_>,
    flags: RecvFlags,
    error: rustls::Error,
) -> io::Error {
    while !steps.to_send.is_empty() && move_bytes(steps, socket, flags).is_ok() {}
    invalid(error)
}

/// The client's handshake for frames on a connected blocking socket, by `deadline`. Changes the
/// socket's timeouts. The kernel rounds them up to ticks, so the handshake may end later by one tick.
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
    let side = UnbufferedClientConnection::new(tls.frames(), name).map_err(invalid)?;
    let mut steps = Steps::new(side);
    let flags = RecvFlags::empty();
    loop {
        if steps.to_send.is_empty() {
            match steps.advance() {
                Ok(Next::Finish) => break,
                Ok(Next::Send | Next::Receive) => {}
                Err(error) => return Err(refuse(&mut steps, socket, flags, error)),
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // The kernel takes a limit of zero as no limit.
        let limit = Some(left.max(Duration::from_millis(1)));
        set_socket_timeout(socket, Timeout::Recv, limit)?;
        set_socket_timeout(socket, Timeout::Send, limit)?;
        match move_bytes(&mut steps, socket, flags) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            moved => drop(moved?),
        }
    }
    let agreed = steps.finish().map_err(invalid)?;
    Session::agreed(agreed).map_err(invalid)
}

/// A server's handshake, driven by the events of its socket.
pub struct ServerHandshake {
    steps: Steps<UnbufferedServerConnection>,
    received: usize,
}

impl ServerHandshake {
    /// Begins one. Fails only on a configuration that cannot be.
    pub fn begin(config: Arc<ServerConfig>) -> io::Result<Self> {
        let side = UnbufferedServerConnection::new(config).map_err(invalid)?;
        Ok(Self {
            steps: Steps::new(side),
            received: 0,
        })
    }

    /// Continues with the bytes that have arrived, without waiting. True when the handshake is
    /// complete.
    ///
    /// # Errors
    ///
    /// The peer has gone, speaks no TLS, is not trusted, or has sent more than 64 KiB. The peer is
    /// told by an alert.
    pub fn advance(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let flags = RecvFlags::DONTWAIT;
        loop {
            // A new socket has room for a flight; one without is given up.
            while !self.steps.to_send.is_empty() {
                move_bytes(&mut self.steps, socket, flags)?;
            }
            match self.steps.advance() {
                Ok(Next::Finish) => return Ok(true),
                Ok(Next::Send) => continue,
                Ok(Next::Receive) => {}
                Err(error) => return Err(refuse(&mut self.steps, socket, flags, error)),
            }
            match move_bytes(&mut self.steps, socket, flags) {
                Ok(count) => self.received += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if self.received > MOST_BYTES {
                return Err(too_long());
            }
        }
    }

    /// The session of a complete handshake. Its buffer is small until [`Session::widen`].
    ///
    /// # Errors
    ///
    /// The handshake is not complete.
    pub fn finish(self) -> io::Result<Session> {
        let agreed = self.steps.finish().map_err(invalid)?;
        Session::of_caller(agreed).map_err(invalid)
    }
}
