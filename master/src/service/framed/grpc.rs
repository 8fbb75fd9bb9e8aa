//! A gRPC connection, watched until its first call is complete.
//!
//! gRPC has no hello. A connection without a decoded call is a caller. Its time is bounded and its
//! bytes are counted. It is displaced when there are too many callers. Its first call makes it a
//! known connection, if the master has a permit left.

use super::CALLER_TIMEOUT;
use super::stream::Incoming;
use kvpool_daemon::callers::Caller;
use kvpool_types::Code;
use parking_lot::Mutex;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::server::Connected;

use crate::service::refused::{Refused, refused};

/// The number of refused calls after which the master closes a connection without an accepted call.
/// The answers to further calls would take memory until the peer reads them.
const MOST_REFUSED: u32 = 64;

/// The connection of a call, as the call's handler sees it.
#[derive(Clone, Debug)]
pub struct Origin(Arc<Identity>);

#[derive(Debug)]
struct Identity {
    is_known: AtomicBool,
    /// The number of refused calls.
    refused: AtomicU32,
    has_certificate: bool,
    caller: Caller,
    places: Arc<Semaphore>,
    /// Held for the life of the connection.
    place: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Origin {
    /// Makes the connection a known one. Called when a call is complete.
    pub(in crate::service) fn settle(&self) -> Result<(), Refused> {
        let identity = &self.0;
        if identity.is_known.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut place = identity.place.lock();
        if place.is_none() {
            let taken = Arc::clone(&identity.places).try_acquire_owned();
            *place = Some(taken.map_err(|_| {
                refused(
                    Code::TooManyHeld,
                    "this master has the most connections that --max-connections allows",
                )
            })?);
        }
        identity.caller.settle();
        identity.is_known.store(true, Ordering::Release);
        Ok(())
    }

    /// Calls [`Origin::settle`] for a request's connection, if it is watched.
    pub(in crate::service) fn settle_of(request: &tonic::Extensions) -> Result<(), Refused> {
        request.get::<Self>().map_or(Ok(()), Self::settle)
    }

    /// Counts a call that was refused because its caller is unknown.
    pub(in crate::service) fn refused_of(request: &tonic::Extensions) {
        let Some(Self(identity)) = request.get::<Self>() else {
            return;
        };
        let refused = identity.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if refused >= MOST_REFUSED && !identity.is_known.load(Ordering::Acquire) {
            identity.caller.displace();
        }
    }

    /// Whether the caller presented a certificate. The handshake has verified it.
    pub(in crate::service) fn has_certificate(&self) -> bool {
        self.0.has_certificate
    }

    fn is_known(&self) -> bool {
        self.0.is_known.load(Ordering::Acquire)
    }
}

/// A gRPC connection, watched until its first call is complete.
pub struct GrpcStream {
    stream: Incoming,
    origin: Origin,
    /// Completes when the caller is displaced, or its time is over.
    over: Option<Pin<Box<dyn Future<Output = ()> + Send + Sync>>>,
    /// Whether `over` has completed: a completed future must not be polled again.
    is_over: bool,
}

impl std::fmt::Debug for GrpcStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrpcStream({:?})", self.origin)
    }
}

impl GrpcStream {
    pub(super) fn new(stream: Incoming, caller: Caller, places: Arc<Semaphore>) -> Self {
        let displaced = caller.displacement();
        let over = async move {
            tokio::select! {
                () = displaced => {}
                () = tokio::time::sleep(CALLER_TIMEOUT) => {}
            }
        };
        let identity = Identity {
            is_known: AtomicBool::new(false),
            refused: AtomicU32::new(0),
            has_certificate: stream.has_peer_certificate(),
            caller,
            places,
            place: Mutex::new(None),
        };
        Self {
            stream,
            origin: Origin(Arc::new(identity)),
            over: Some(Box::pin(over)),
            is_over: false,
        }
    }

    /// Fails once the caller's time is over. Registers the task to be woken then.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.is_over {
            return Err(out_of_time());
        }
        let Some(over) = &mut self.over else {
            return Ok(());
        };
        if self.origin.is_known() {
            self.over = None;
            return Ok(());
        }
        match over.as_mut().poll(context) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => {
                self.is_over = true;
                Err(out_of_time())
            }
        }
    }
}

fn out_of_time() -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        "no call arrived in time, or too many callers are waiting",
    )
}

impl Connected for GrpcStream {
    type ConnectInfo = Origin;

    fn connect_info(&self) -> Origin {
        self.origin.clone()
    }
}

impl AsyncRead for GrpcStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        self.check(context)?;
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if self.over.is_some() {
            let count = buffer.filled().len() - before;
            self.origin.0.caller.received(count as u64);
        }
        read
    }
}

impl AsyncWrite for GrpcStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_daemon::callers::Callers;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    async fn accepted(most: usize) -> (TcpStream, GrpcStream, Arc<Callers>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let callers = Callers::new(most, 1 << 20);
        let places = Arc::new(Semaphore::new(1));
        let stream = Incoming::Plain(accepted.unwrap().0);
        let stream = GrpcStream::new(stream, callers.admit(), places);
        (client.unwrap(), stream, callers)
    }

    #[tokio::test]
    async fn a_caller_whose_calls_are_refused_is_closed_and_a_known_one_is_not() {
        for is_known in [false, true] {
            let (_client, mut stream, _callers) = accepted(1).await;
            let origin = stream.connect_info();
            if is_known {
                origin.settle().unwrap();
            }
            let mut request = tonic::Extensions::default();
            request.insert(origin);
            for _ in 1..MOST_REFUSED {
                Origin::refused_of(&request);
            }
            stream.write_all(b"x").await.unwrap();
            Origin::refused_of(&request);
            assert_eq!(stream.write_all(b"x").await.is_ok(), is_known);
        }
    }

    #[tokio::test]
    async fn a_displaced_caller_fails_at_every_read_and_write() {
        let (_client, mut stream, callers) = accepted(1).await;
        callers.displace_all();
        for _ in 0..2 {
            let read = stream.read_u8().await;
            assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
            let written = stream.write_all(b"x").await;
            assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
    }
}
