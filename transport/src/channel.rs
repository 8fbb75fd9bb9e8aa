//! A connection for small frames. No thread sits between the caller and the socket.
//!
//! ```text
//!  call ──► write to the socket ──► register, wait ──┐
//!                                                    ├─ the call polled last reads
//!  call ──► write to the socket ──► register, wait ──┘  for itself and for the others
//! ```
//!
//! Waking a thread costs more than the rest of a small request, so a channel wakes only callers that wait for
//! an answer. Each call writes its own frame. Waiting calls share one reader: the call that was polled last.
//! A reader that has its answer, or is dropped, passes the role to another waiting call. A thread that stops
//! polling its call for a while must pass the role too, with [`WaitedOn`]. Frames with much payload belong on
//! the connections of [`crate::tcp`], which have threads.
//!
//! A channel belongs to the tokio runtime that created it and works only while that runtime runs.
//!
//! ADR 0008 says why the hot calls use frames.

mod absence;
mod inbox;
mod stream;

use crate::frame::{encode_request, trace_for};
use crate::link::TransferError;
use crate::outcomes::unreachable;
use crate::wire::Wire;
use inbox::{Inbox, Waiter};
use kvpool_tls::ClientTls;
use kvpool_types::wire::data::Meta;
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Epoch};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};
use stream::Stream;

pub use absence::WaitedOn;
pub use inbox::Reply;

/// See the module's documentation.
#[derive(Debug)]
pub struct Channel {
    stream: Stream,
    inbox: Arc<Inbox>,
    next_request: AtomicU64,
    /// Held while a frame is written, so that frames do not interleave.
    writing: tokio::sync::Mutex<()>,
    spin: Duration,
    /// The features of the node at the other end.
    features: Features,
}

impl Channel {
    /// Connects to `address`. A call polls for its answer for `spin` before it sleeps.
    ///
    /// # Errors
    ///
    /// The error of the socket call that failed.
    pub async fn connect(address: SocketAddr, spin: Duration) -> io::Result<Self> {
        // Such a channel leads to a master, whose requests carry the trace context in themselves.
        Ok(Self::over(
            Stream::connect(address).await?,
            spin,
            Features::default(),
        ))
    }

    /// Connects to `address` over TLS. The certificate must have the name of `authority`, `HOST:PORT`.
    ///
    /// # Errors
    ///
    /// As [`Channel::connect`]; `InvalidData` when the server is not trusted or speaks no TLS.
    pub async fn connect_tls(
        address: SocketAddr,
        spin: Duration,
        tls: &ClientTls,
        authority: &str,
    ) -> io::Result<Self> {
        let stream = Stream::connect_tls(address, tls, authority).await?;
        Ok(Self::over(stream, spin, Features::default()))
    }

    /// Takes over a connected stream socket, TCP or Unix.
    pub(crate) fn from_socket(socket: impl Into<Wire>, features: Features) -> io::Result<Self> {
        let stream = Stream::from_socket(socket.into())?;
        Ok(Self::over(stream, Duration::ZERO, features))
    }

    fn over(stream: Stream, spin: Duration, features: Features) -> Self {
        Self {
            stream,
            inbox: Arc::default(),
            next_request: AtomicU64::new(1),
            writing: tokio::sync::Mutex::new(()),
            spin,
            features,
        }
    }

    /// Whether the connection still works. A failed channel stays failed: open another.
    pub fn is_open(&self) -> bool {
        self.inbox.failure().is_none()
    }

    /// Ends the connection: all waiting and all later calls fail with `error`.
    pub fn fail(&self, error: TransferError) {
        self.inbox.fail(error);
        self.stream.shut_down();
    }

    /// Sends a request and waits for its answer, without a deadline. `encode_meta` writes the
    /// frame's meta.
    ///
    /// Cancellation: dropping the future gives up the answer. A request that was dropped half
    /// written ends the channel.
    ///
    /// # Errors
    ///
    /// The peer's own code when it answers with a failure. [`Code::Unreachable`] when the
    /// connection fails.
    pub async fn call(
        &self,
        op: Op,
        epoch: Epoch,
        encode_meta: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Reply, TransferError> {
        self.call_with_payload(op, epoch, &[], encode_meta).await
    }

    /// Checks that the peer still answers.
    ///
    /// # Errors
    ///
    /// As [`Channel::call`].
    pub async fn ping(&self, epoch: Epoch) -> Result<(), TransferError> {
        let reply = self.call(Op::Ping, epoch, |_| {}).await?;
        reply.expect(Op::Pong)
    }

    /// Like [`Channel::call`], with a payload.
    pub(crate) async fn call_with_payload(
        &self,
        op: Op,
        epoch: Epoch,
        payload: &[u8],
        encode_meta: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Reply, TransferError> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let bytes = payload.len() as u64;
        let mut frame = encode_request(
            (op, request, epoch),
            bytes,
            trace_for(self.features),
            encode_meta,
        )
        .map_err(|error| TransferError {
            code: error.code(),
            message: error.to_string(),
        })?;
        frame.extend_from_slice(payload);
        let waiter = self.inbox.register(request)?;
        self.send(&frame).await?;
        if !self.spin.is_zero()
            && let Some(answer) = self.poll_busily(&waiter)
        {
            return answer;
        }
        self.wait(&waiter).await
    }

    /// Writes a whole frame.
    async fn send(&self, frame: &[u8]) -> Result<(), TransferError> {
        let _turn = self.writing.lock().await;
        let mut partial = Partial {
            channel: self,
            broken: false,
        };
        let mut sent = 0;
        while let Some(rest) = frame.get(sent..).filter(|rest| !rest.is_empty()) {
            match self.stream.try_write(rest) {
                Ok(0) => return Err(partial.fail(&io::ErrorKind::WriteZero.into())),
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    partial.broken = sent > 0;
                    if let Err(error) = self.stream.writable().await {
                        return Err(partial.fail(&error));
                    }
                }
                Err(error) => return Err(partial.fail(&error)),
            }
        }
        loop {
            match self.stream.try_flush() {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    partial.broken = true;
                    if let Err(error) = self.stream.writable().await {
                        return Err(partial.fail(&error));
                    }
                }
                Err(error) => return Err(partial.fail(&error)),
            }
        }
        partial.broken = false;
        Ok(())
    }

    async fn wait(&self, waiter: &Waiter<'_>) -> Result<Reply, TransferError> {
        poll_fn(|context| {
            if let Some(answer) = waiter.take() {
                return Poll::Ready(answer);
            }
            absence::note(&self.inbox);
            // The waker must be set before the attempt: a reader that gives up the role wakes a call whose
            // waker is set.
            waiter.wake_with(context.waker());
            let Some(mut reader) = self.inbox.try_read() else {
                // Another reader may have stored the answer since.
                return waiter.take().map_or(Poll::Pending, Poll::Ready);
            };
            loop {
                match self.stream.poll_readable(context) {
                    Poll::Pending => break,
                    Poll::Ready(Err(error)) => {
                        drop(reader);
                        self.fail(unreachable(error));
                        break;
                    }
                    Poll::Ready(Ok(())) => {}
                }
                // A read that finds nothing re-arms the driver, which then wakes this task.
                if let Err(error) = reader.receive(|room| self.stream.try_read(room)) {
                    drop(reader);
                    self.fail(error);
                    break;
                }
                if waiter.is_answered() {
                    break;
                }
            }
            waiter.take().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Polls without sleeping until `spin` has passed.
    fn poll_busily(&self, waiter: &Waiter<'_>) -> Option<Result<Reply, TransferError>> {
        let until = Instant::now() + self.spin;
        loop {
            if let Some(answer) = waiter.take() {
                return Some(answer);
            }
            if let Some(mut reader) = self.inbox.try_read() {
                if let Err(error) = reader.receive(|room| self.stream.receive_now(room)) {
                    drop(reader);
                    self.fail(error);
                }
            } else {
                std::hint::spin_loop();
            }
            if Instant::now() >= until {
                return waiter.take();
            }
        }
    }
}

impl Reply {
    /// Checks that the answer is an `op`.
    ///
    /// # Errors
    ///
    /// [`Code::Malformed`] when the answer has another operation.
    pub fn expect(&self, op: Op) -> Result<(), TransferError> {
        if self.op == op {
            return Ok(());
        }
        Err(TransferError {
            code: Code::Malformed,
            message: format!("the answer is {:?}, not {op:?}", self.op),
        })
    }

    /// Decodes the meta of an answer whose operation must be `op`.
    pub(crate) fn decode<M: Meta>(&self, op: Op) -> Result<M, TransferError> {
        self.expect(op)?;
        M::decode(&self.meta).map_err(|error| TransferError {
            code: error.code(),
            message: error.to_string(),
        })
    }
}

/// A frame that is being written. If this is dropped, the frame is incomplete and the peer cannot read any
/// later frame. So the drop ends the connection.
struct Partial<'a> {
    channel: &'a Channel,
    broken: bool,
}

impl Partial<'_> {
    fn fail(&mut self, error: &io::Error) -> TransferError {
        self.broken = false;
        let error = unreachable(error);
        self.channel.fail(error.clone());
        error
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        if self.broken {
            self.channel
                .fail(unreachable("a request was dropped half written"));
        }
    }
}

#[cfg(test)]
mod tests;
