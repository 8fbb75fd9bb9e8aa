//! The socket of a channel, TCP or Unix, on the runtime's driver.

use rustix::net::RecvFlags;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll};
use tokio::net::{TcpStream, UnixStream};

/// See the module's documentation.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(super) async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    pub(super) fn from_socket(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        match rustix::net::sockopt::socket_domain(&socket)? {
            rustix::net::AddressFamily::UNIX => UnixStream::from_std(socket.into()).map(Self::Unix),
            _ => TcpStream::from_std(socket.into()).map(Self::Tcp),
        }
    }

    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    pub(super) fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_read_ready(context),
            Self::Unix(stream) => stream.poll_read_ready(context),
        }
    }

    /// Reads when the driver has seen that something came.
    pub(super) fn try_read(&self, room: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read(room),
            Self::Unix(stream) => stream.try_read(room),
        }
    }

    /// Asks the kernel, whatever the driver knows. What the driver then still believes costs it one
    /// look in vain.
    pub(super) fn receive_now(&self, room: &mut [u8]) -> io::Result<usize> {
        let received = match self {
            Self::Tcp(stream) => rustix::net::recv(stream.as_fd(), room, RecvFlags::DONTWAIT),
            Self::Unix(stream) => rustix::net::recv(stream.as_fd(), room, RecvFlags::DONTWAIT),
        };
        Ok(received.map(|(_, count)| count)?)
    }

    pub(super) fn shut_down(&self) {
        match self {
            Self::Tcp(stream) => crate::socket::shut_down(stream.as_fd()),
            Self::Unix(stream) => crate::socket::shut_down(stream.as_fd()),
        }
    }
}
