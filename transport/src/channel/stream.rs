//! The socket of a channel, TCP or Unix, registered with the runtime's driver.

// UNSAFETY: the driver watches a descriptor that this module keeps open meanwhile.
#![allow(
    unsafe_code,
    reason = "a watched descriptor must stay open, which no type says"
)]

use crate::wire::Wire;
use kvpool_tls::{ClientTls, Session};
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;

/// See the module's documentation.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Tls(TcpStream, Box<Session>),
    /// Watched for readability alone. A Unix socket becomes writable whenever its peer takes a
    /// message, so watching that would wake the driver for each message.
    Unix(AsyncFd<OwnedFd>),
}

impl Stream {
    pub(super) async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    pub(super) async fn connect_tls(
        address: SocketAddr,
        tls: &ClientTls,
        authority: &str,
    ) -> io::Result<Self> {
        let name = tls.name_of(authority).map_err(io::Error::other)?;
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let session = kvpool_tls::connect(tls, name, &mut stream).await?;
        Ok(Self::Tls(stream, Box::new(session)))
    }

    pub(super) fn from_socket(socket: Wire) -> io::Result<Self> {
        let (socket, tls) = socket.into_parts();
        rustix::io::ioctl_fionbio(&socket, true)?;
        match rustix::net::sockopt::socket_domain(&socket)? {
            rustix::net::AddressFamily::UNIX => watch(socket, Interest::READABLE).map(Self::Unix),
            _ => {
                let stream = TcpStream::from_std(socket.into())?;
                Ok(match tls {
                    None => Self::Tcp(stream),
                    Some(tls) => Self::Tls(stream, tls),
                })
            }
        }
    }

    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Tls(stream, tls) => tls.send_some(bytes, |bytes| stream.try_write(bytes)),
            Self::Unix(socket) => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                Ok(rustix::net::send(socket, bytes, flags)?)
            }
        }
    }

    /// Sends the encrypted bytes that the TLS session still holds. Fails with `WouldBlock` while the socket
    /// is full.
    pub(super) fn try_flush(&self) -> io::Result<()> {
        match self {
            Self::Tls(stream, tls) => tls.flush(|bytes| stream.try_write(bytes)),
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
        }
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) | Self::Tls(stream, _) => stream.writable().await,
            Self::Unix(socket) => {
                let watched = rustix::io::fcntl_dupfd_cloexec(socket, 0)?;
                let watched = watch(watched, Interest::WRITABLE)?;
                watched.writable().await.map(drop)
            }
        }
    }

    pub(super) fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_read_ready(context),
            Self::Tls(_, tls) if tls.has_received() => Poll::Ready(Ok(())),
            Self::Tls(stream, _) => stream.poll_read_ready(context),
            Self::Unix(socket) => socket.poll_read_ready(context).map_ok(drop),
        }
    }

    /// Reads only if the driver has seen data.
    pub(super) fn try_read(&self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read(room),
            Self::Tls(stream, tls) => tls.receive(room, |room| stream.try_read(room)),
            Self::Unix(socket) => socket.try_io(Interest::READABLE, |socket| receive(socket, room)),
        }
    }

    /// Reads what has arrived. The driver may report readiness once more for the same bytes.
    pub(super) fn receive_now(&self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => receive(stream, room),
            Self::Tls(stream, tls) => tls.receive(room, |room| receive(stream, room)),
            Self::Unix(socket) => receive(socket, room),
        }
    }

    pub(super) fn shut_down(&self) {
        match self {
            Self::Tcp(stream) | Self::Tls(stream, _) => {
                crate::socket::shut_down(stream.as_fd());
            }
            Self::Unix(socket) => crate::socket::shut_down(socket.as_fd()),
        }
    }
}

/// Registers a descriptor with the runtime's driver.
fn watch(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor is open, and stays the same and open until the `AsyncFd` drops it.
    let watched = unsafe { AsyncFd::register_with_interest(descriptor, interest) };
    Ok(watched?)
}

fn receive(socket: impl AsFd, room: &mut [u8]) -> io::Result<usize> {
    let received = rustix::net::recv(socket, room, RecvFlags::DONTWAIT);
    Ok(received.map(|(_, count)| count)?)
}
