//! A connection for small frames, without a thread of its own between the caller and the socket.
//!
//! ```text
//!  call ──► write to the socket ──► register, wait ──┐
//!                                                    ├─ whoever is polled reads what is there,
//!  call ──► write to the socket ──► register, wait ──┘  for itself and for the others
//! ```
//!
//! Waking a thread takes longer than all the rest of a small request, so nobody is woken who does not
//! wait for the answer: each call writes its own frame, and of those that wait for answers the one
//! that was polled last reads them all. When it leaves, answered or dropped, it wakes another one to
//! take its place. Frames with much payload belong on the connections of [`crate::tcp`], which have
//! threads.
//!
//! A channel belongs to the tokio runtime that it was made on and works only while that runs.
//!
//! ADR 0008 says why the hot calls use frames.

mod inbox;
mod stream;

use crate::frame::encode_head;
use crate::link::TransferError;
use crate::outcomes::unreachable;
use inbox::{Inbox, Waiter};
use kvpool_types::wire::data::Meta;
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Epoch};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};
use stream::Stream;

pub use inbox::Reply;

/// See the module's documentation.
#[derive(Debug)]
pub struct Channel {
    stream: Stream,
    inbox: Inbox,
    next_request: AtomicU64,
    /// Held while a frame is being written, so that no other gets between its bytes.
    writing: tokio::sync::Mutex<()>,
    spin: Duration,
}

impl Channel {
    /// Connects to `address`. Calls poll for `spin` for their answers before they sleep.
    pub async fn connect(address: SocketAddr, spin: Duration) -> io::Result<Self> {
        Ok(Self::over(Stream::connect(address).await?, spin))
    }

    /// Takes over a connected stream socket, TCP or Unix.
    pub(crate) fn from_socket(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self::over(Stream::from_socket(socket)?, Duration::ZERO))
    }

    fn over(stream: Stream, spin: Duration) -> Self {
        Self {
            stream,
            inbox: Inbox::default(),
            next_request: AtomicU64::new(1),
            writing: tokio::sync::Mutex::new(()),
            spin,
        }
    }

    /// False once the connection has failed: it will not come back, make another.
    pub fn is_open(&self) -> bool {
        self.inbox.failure().is_none()
    }

    /// Ends the connection: all calls that wait fail with `error`, and so do those to come.
    pub fn fail(&self, error: TransferError) {
        self.inbox.fail(error);
        self.stream.shut_down();
    }

    /// Asks, and waits for the answer however long it takes. `encode_meta` writes the frame's meta.
    ///
    /// Fails with the peer's own code when it answers with a failure, and with
    /// [`Code::Unreachable`] when the connection fails. Dropping the future gives the answer up.
    pub async fn call(
        &self,
        op: Op,
        epoch: Epoch,
        encode_meta: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Reply, TransferError> {
        self.call_with_payload(op, epoch, &[], encode_meta).await
    }

    /// Asks whether the other side still answers.
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
        let mut frame =
            encode_head(op, request, epoch, bytes, encode_meta).map_err(|error| TransferError {
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
        partial.broken = false;
        Ok(())
    }

    async fn wait(&self, waiter: &Waiter<'_>) -> Result<Reply, TransferError> {
        poll_fn(|context| {
            if let Some(answer) = waiter.take() {
                return Poll::Ready(answer);
            }
            // Known before the turn to read is tried for: who gives the turn up looks for one to
            // wake after that.
            waiter.wake_with(context.waker());
            let Some(mut reader) = self.inbox.try_read() else {
                // Another may have left the answer since.
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
                // Where nothing was there the driver has been told so, and is asked again to wake.
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

    /// Reads without sleeping for as long as was set.
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
    /// Fails unless the answer is an `op`.
    pub fn expect(&self, op: Op) -> Result<(), TransferError> {
        if self.op == op {
            return Ok(());
        }
        Err(TransferError {
            code: Code::Malformed,
            message: format!("the answer is {:?}, not {op:?}", self.op),
        })
    }

    /// The meta of an answer that must be an `op`.
    pub(crate) fn decode<M: Meta>(&self, op: Op) -> Result<M, TransferError> {
        self.expect(op)?;
        M::decode(&self.meta).map_err(|error| TransferError {
            code: error.code(),
            message: error.to_string(),
        })
    }
}

/// A frame that is being written. Left in the middle, what follows on the stream could not be
/// understood: the connection is then of no more use.
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
                .fail(unreachable("a request was given up in the middle"));
        }
    }
}

#[cfg(test)]
mod tests;
