//! Frames over TLS on the runtime: a master's port, which frames share with gRPC, and the clients
//! of that port.

use crate::client::ClientTls;
use crate::handshake::{MOST_BYTES, Next, Side, Steps};
use crate::session::{Session, invalid};
use crate::{ALPN_FRAMES, ALPN_GRPC};
use rustls::ServerConfig;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::{Accepted, Acceptor, UnbufferedServerConnection};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::coop::poll_proceed;
use tokio_rustls::server::{StartHandshake, TlsStream};

/// A caller of a port that gRPC and frames share.
#[derive(Debug)]
pub enum Caller {
    /// It speaks gRPC.
    Grpc(Box<TlsStream<TcpStream>>),
    /// It speaks frames.
    Frames(Box<FrameStream>),
}

/// The server's handshake with a caller, whose protocol ALPN names.
///
/// # Errors
///
/// The peer closed the connection, does not speak TLS, is not trusted, speaks frames over a version before 1.3, or
/// sent more than 64 KiB. An alert tells the peer the reason.
pub async fn accept(config: Arc<ServerConfig>, mut stream: TcpStream) -> io::Result<Caller> {
    let mut hello = Vec::new();
    let accepted = read_hello(&mut stream, &mut hello).await?;
    let offers = |name| {
        let mut names = accepted.client_hello().alpn().into_iter().flatten();
        names.any(|offered| offered == name)
    };
    if offers(ALPN_GRPC) || !offers(ALPN_FRAMES) {
        let stream = StartHandshake::from_parts(accepted, stream);
        return Ok(Caller::Grpc(Box::new(stream.into_stream(config).await?)));
    }
    let side = UnbufferedServerConnection::new(config).map_err(invalid)?;
    let mut steps = Steps::new(side);
    steps.arrived = hello;
    finish(&mut stream, &mut steps).await?;
    let session = Session::of_caller(steps.finish().map_err(invalid)?).map_err(invalid)?;
    let stream = FrameStream { stream, session };
    Ok(Caller::Frames(Box::new(stream)))
}

/// Reads the caller's first message. `hello` gets its bytes.
async fn read_hello(stream: &mut TcpStream, hello: &mut Vec<u8>) -> io::Result<Accepted> {
    let mut acceptor = Acceptor::default();
    loop {
        let before = hello.len();
        receive(stream, hello).await?;
        let mut new = hello.get(before..).unwrap_or_default();
        while !new.is_empty() {
            acceptor.read_tls(&mut new)?;
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => return Ok(accepted),
            Ok(None) => {}
            Err((error, mut alert)) => {
                let mut told = Vec::new();
                alert.write_all(&mut told)?;
                // The alert tells the peer the reason, if the peer still reads.
                let _gone = stream.write_all(&told).await;
                return Err(invalid(error));
            }
        }
    }
}

/// The client's handshake for frames on a connected stream.
///
/// # Errors
///
/// `InvalidData` when the server is not trusted or speaks no TLS 1.3.
pub async fn connect(
    tls: &ClientTls,
    name: ServerName<'static>,
    stream: &mut TcpStream,
) -> io::Result<Session> {
    let side = UnbufferedClientConnection::new(tls.frames(), name).map_err(invalid)?;
    let mut steps = Steps::new(side);
    finish(stream, &mut steps).await?;
    Session::agreed(steps.finish().map_err(invalid)?).map_err(invalid)
}

/// Completes a handshake.
async fn finish<S: Side>(stream: &mut TcpStream, steps: &mut Steps<S>) -> io::Result<()> {
    let mut received = 0;
    loop {
        let next = steps.advance();
        let told = stream.write_all(&steps.to_send).await;
        steps.to_send.clear();
        match next.map_err(invalid)? {
            Next::Finish => return told,
            Next::Send => told?,
            Next::Receive => {
                told?;
                received += receive(stream, &mut steps.arrived).await?;
                if received > MOST_BYTES {
                    return Err(too_long());
                }
            }
        }
    }
}

/// Receives once. Returns the number of bytes.
async fn receive(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> io::Result<usize> {
    let count = stream.read_buf(bytes).await?;
    if count == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if bytes.len() > MOST_BYTES {
        return Err(too_long());
    }
    Ok(count)
}

pub(crate) fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the handshake is too long")
}

/// The stream of a caller that speaks frames.
#[derive(Debug)]
pub struct FrameStream {
    stream: TcpStream,
    session: Session,
}

impl FrameStream {
    /// The socket, and the session over it. Bytes that the stream received and did not deliver stay
    /// in the session.
    pub fn into_parts(self) -> (TcpStream, Session) {
        (self.stream, self.session)
    }
}

// `try_read` and `try_write` do not count against a task's cooperative budget. A peer that sends without pause would
// keep the thread, and no timeout would fire. So each read and each write consumes one unit of the budget.

fn would_block<T>(result: &io::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

impl AsyncRead for FrameStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = buffer.initialize_unfilled();
        if room.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let turn = ready!(poll_proceed(context));
        loop {
            let read = self
                .session
                .receive(room, |room| self.stream.try_read(room));
            if would_block(&read) {
                ready!(self.stream.poll_read_ready(context))?;
                continue;
            }
            turn.made_progress();
            buffer.advance(read?);
            return Poll::Ready(Ok(()));
        }
    }
}

impl AsyncWrite for FrameStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let turn = ready!(poll_proceed(context));
        loop {
            let send = |bytes: &[u8]| self.stream.try_write(bytes);
            let written = self.session.send_some(bytes, send);
            if !would_block(&written) {
                turn.made_progress();
                return Poll::Ready(written);
            }
            ready!(self.stream.poll_write_ready(context))?;
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let flushed = self.session.flush(|bytes| self.stream.try_write(bytes));
            if !would_block(&flushed) {
                return Poll::Ready(flushed);
            }
            ready!(self.stream.poll_write_ready(context))?;
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.as_mut().poll_flush(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
