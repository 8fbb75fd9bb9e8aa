//! The stream of a connection, plain or TLS. A caller's stream belongs to the runtime; a framed
//! connection's stream blocks its own thread.

use kvpool_tls::rustls::ServerConfig;
use kvpool_tls::tokio_rustls::server::TlsStream;
use kvpool_tls::{Caller, FrameStream, Session};
use rustix::net::{RecvFlags, SendFlags};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream as Socket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The stream of a caller, or of a gRPC connection.
#[derive(Debug)]
pub(super) enum Incoming {
    Plain(TcpStream),
    /// gRPC over TLS.
    Tls(Box<TlsStream<TcpStream>>),
    /// Frames over TLS.
    Frames(Box<FrameStream>),
}

impl Incoming {
    /// The stream after the TLS handshake. The caller's time bounds the handshake.
    pub(super) async fn handshake(
        config: Arc<ServerConfig>,
        stream: TcpStream,
    ) -> io::Result<Self> {
        Ok(match kvpool_tls::accept(config, stream).await? {
            Caller::Grpc(stream) => Self::Tls(stream),
            Caller::Frames(stream) => Self::Frames(stream),
        })
    }

    /// Whether a gRPC peer presented a certificate. The handshake has verified it.
    pub(super) fn has_peer_certificate(&self) -> bool {
        match self {
            Self::Plain(_) | Self::Frames(_) => false,
            Self::Tls(stream) => stream.get_ref().1.peer_certificates().is_some(),
        }
    }
}

/// Calls the same method of either stream.
macro_rules! either {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Incoming::Plain($inner) => $call,
            Incoming::Tls($inner) => $call,
            Incoming::Frames($inner) => $call,
        }
    };
}

impl AsyncRead for Incoming {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(&mut *self, inner => Pin::new(inner).poll_read(context, buffer))
    }
}

impl AsyncWrite for Incoming {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(&mut *self, inner => Pin::new(inner).poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self, inner => Pin::new(inner).poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self, inner => Pin::new(inner).poll_shutdown(context))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(&mut *self, inner => Pin::new(inner).poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        either!(self, inner => inner.is_write_vectored())
    }
}

/// The stream of a framed connection, on a blocking socket.
#[derive(Debug)]
pub(super) struct Framed {
    socket: Socket,
    tls: Option<Arc<Session>>,
}

impl Framed {
    pub(super) const fn new(socket: Socket, tls: Option<Arc<Session>>) -> Self {
        Self { socket, tls }
    }

    /// Another handle of the same connection.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self::new(self.socket.try_clone()?, self.tls.clone()))
    }

    /// Sets how long a read or a write may take.
    pub(super) fn set_timeouts(&self, limit: Duration) -> io::Result<()> {
        self.socket.set_read_timeout(Some(limit))?;
        self.socket.set_write_timeout(Some(limit))
    }

    /// Ends one direction of the socket, or both.
    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// Waits for bytes and reads them. Fails with `WouldBlock` when the timeout passes.
    pub(super) fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        let mut socket = &self.socket;
        match &self.tls {
            None => socket.read(room),
            Some(tls) => tls.receive(room, |room| socket.read(room)),
        }
    }

    /// Reads the bytes that have arrived, without waiting.
    pub(super) fn read_now(&self, room: &mut [u8]) -> io::Result<usize> {
        let receive = |room: &mut [u8]| {
            let received = rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT)?;
            Ok(received.1)
        };
        match &self.tls {
            None => receive(room),
            Some(tls) => tls.receive(room, receive),
        }
    }

    /// Sends everything.
    pub(super) fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        let mut socket = &self.socket;
        match &self.tls {
            None => socket.write_all(bytes),
            Some(tls) => tls.send(bytes, |bytes| socket.write(bytes)),
        }
    }

    /// Sends as many bytes as the socket takes without waiting, and returns their number. With TLS,
    /// some of these bytes may wait in the session for the next call.
    pub(super) fn write_now(&self, bytes: &[u8]) -> io::Result<usize> {
        let send = |bytes: &[u8]| {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            Ok(rustix::net::send(&self.socket, bytes, flags)?)
        };
        match &self.tls {
            None => send(bytes),
            Some(tls) => tls.send_some(bytes, send),
        }
    }

    /// Sends the bytes that wait in the TLS session.
    pub(super) fn flush(&self) -> io::Result<()> {
        let mut socket = &self.socket;
        match &self.tls {
            None => Ok(()),
            Some(tls) => tls.flush(|bytes| socket.write(bytes)),
        }
    }

    /// Whether bytes wait in the TLS session.
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }
}
