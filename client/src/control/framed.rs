//! The framed connection to a master, for the hot calls.
//!
//! A master that does not speak the protocol, as those of older versions, is called over gRPC; after a
//! while the client looks again.

use crate::clock::Deadline;
use crate::errors::ControlError;
use kvpool_proto::HelloRequest;
use kvpool_transport::channel::Reply;
use kvpool_transport::{Channel, TransferError};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Epoch};
use parking_lot::RwLock;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// For how long a master that does not speak the protocol is called over gRPC.
const AGAIN: Duration = Duration::from_secs(30);
/// A master that has not answered for so long is asked whether it is still there.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// How long it may take to say so.
const PING_TIMEOUT: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Framed {
    /// `host:port`.
    address: String,
    spin: Duration,
    channel: RwLock<Option<Arc<Channel>>>,
    /// Held while the connection is being opened; until when it is not tried.
    opening: tokio::sync::Mutex<Option<Instant>>,
}

impl Framed {
    /// A connection to be opened to `address` when it is first needed.
    pub(super) fn new(address: String, spin: Duration) -> Self {
        Self {
            address,
            spin,
            channel: RwLock::new(None),
            opening: tokio::sync::Mutex::new(None),
        }
    }

    /// The connection, opened if need be with `greeting`; `None` when the master does not speak the
    /// protocol.
    pub(super) async fn channel(
        &self,
        greeting: impl FnOnce() -> HelloRequest,
        deadline: Deadline,
    ) -> Result<Option<Arc<Channel>>, ControlError> {
        if let Some(channel) = self.open_channel() {
            return Ok(Some(channel));
        }
        let late = |_| {
            let why = format!("a connection to {} is still being opened", self.address);
            ControlError::new(Code::DeadlineExceeded, why)
        };
        let mut not_before = deadline.run(self.opening.lock()).await.map_err(late)?;
        if let Some(channel) = self.open_channel() {
            return Ok(Some(channel));
        }
        if not_before.is_some_and(|then| Instant::now() < then) {
            return Ok(None);
        }
        let limit = deadline.at_most(super::CONNECT_TIMEOUT);
        let opened = limit.run(self.open(greeting(), limit));
        let opened = opened.await.unwrap_or_else(|_| {
            let why = "kvmaster did not greet back in time";
            Err(ControlError::new(Code::Unreachable, why))
        });
        match opened {
            Ok(channel) => {
                *not_before = None;
                Ok(channel.inspect(|channel| *self.channel.write() = Some(Arc::clone(channel))))
            }
            Err(error) if error.code == Code::VersionMismatch => {
                tracing::info!(
                    master = self.address, %error,
                    "this master takes no framed calls: gRPC is used for all"
                );
                *not_before = Some(Instant::now() + AGAIN);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn open_channel(&self) -> Option<Arc<Channel>> {
        let channel = self.channel.read();
        channel
            .as_ref()
            .filter(|channel| channel.is_open())
            .cloned()
    }

    async fn open(
        &self,
        greeting: HelloRequest,
        deadline: Deadline,
    ) -> Result<Option<Arc<Channel>>, ControlError> {
        let failed = |what: &dyn std::fmt::Display| {
            ControlError::new(Code::Unreachable, format!("{}: {what}", self.address))
        };
        let mut found = tokio::net::lookup_host(&self.address)
            .await
            .map_err(|error| failed(&error))?;
        let address: SocketAddr = found.next().ok_or_else(|| failed(&"it names no host"))?;
        let channel = Channel::connect(address, self.spin)
            .await
            .map_err(|error| failed(&error))?;
        let greeting = HelloRequest {
            spin_us: u32::try_from(self.spin.as_micros()).unwrap_or(u32::MAX),
            ..greeting
        };
        match call(&channel, Op::Greet, Epoch(0), &greeting, deadline).await {
            Ok(_) => Ok(Some(Arc::new(channel))),
            // One that speaks gRPC alone hangs up on what it takes for a bad preface.
            Err(error) if matches!(error.code, Code::Unreachable | Code::Malformed) => {
                Err(ControlError::new(Code::VersionMismatch, error.message))
            }
            Err(error) => Err(ControlError::new(error.code, error.message)),
        }
    }
}

/// Makes a call and waits for its answer, the protobuf reply, until `deadline`. While it waits long,
/// it asks now and then whether the master is still there.
pub(super) async fn call(
    channel: &Channel,
    op: Op,
    epoch: Epoch,
    message: &impl prost::Message,
    deadline: Deadline,
) -> Result<Vec<u8>, TransferError> {
    let encode = |out: &mut Vec<u8>| {
        out.reserve(message.encoded_len());
        message
            .encode(out)
            .expect("invariant: a vector takes what is appended");
    };
    let mut call = std::pin::pin!(channel.call(op, epoch, encode));
    loop {
        let waited = deadline.at_most(PING_INTERVAL).run(call.as_mut()).await;
        if let Ok(answered) = waited {
            return read(answered?);
        }
        if deadline.has_passed() {
            return Err(TransferError {
                code: Code::DeadlineExceeded,
                message: "it was not answered in time".to_owned(),
            });
        }
        let there = deadline.at_most(PING_TIMEOUT).run(channel.ping(epoch));
        // An answer to the call is as good as one to the question.
        let silent = tokio::select! {
            answered = call.as_mut() => return read(answered?),
            there = there => there.is_err(),
        };
        if silent && !deadline.has_passed() {
            channel.fail(TransferError {
                code: Code::Unreachable,
                message: "it does not answer".to_owned(),
            });
        }
    }
}

fn read(reply: Reply) -> Result<Vec<u8>, TransferError> {
    reply.expect(Op::Reply)?;
    Ok(reply.meta)
}
