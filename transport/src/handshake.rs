//! The hello of a connection, and the requests that all transports answer in the same way.

use crate::frame::{self, ReceiveError, receive_by, refuse, send};
use crate::host::{Host, Refused};
use crate::link::TransferError;
use crate::outcomes::unreachable;
use crate::service::FirstFrame;
use crate::wire::WireRef;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{Failure, Hello, HelloReply, Meta, ReadRequest, SumsReply};
use kvpool_types::wire::frame::{Header, MAX_META_BYTES, Op};
use kvpool_types::{ClientId, Code, Epoch};
use std::io;
use std::time::Instant;

/// Why a server ends a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    /// The peer closed, or a drain or an abort ended the connection.
    #[error("the connection is over")]
    Over,
    /// The connection failed, or timed out.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer gets a refusal with the reason.
    #[error("{refused}")]
    Refuse {
        /// The request that it answers; 0 for the whole connection.
        request: u64,
        /// The reason.
        refused: Refused,
    },
}

impl From<ReceiveError> for End {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Closed => Self::Over,
            ReceiveError::Io(error) => Self::Io(error),
            ReceiveError::Decode { error, request } => Self::malformed(request, &error),
        }
    }
}

impl End {
    /// Refuses a frame that cannot be decoded.
    pub(crate) fn malformed(request: u64, error: &DecodeError) -> Self {
        Self::Refuse {
            request,
            refused: Refused {
                code: error.code(),
                message: error.to_string(),
            },
        }
    }

    /// Logs the reason, and sends a refusal if there is one.
    pub(crate) fn carry_out<'s>(self, socket: impl Into<WireRef<'s>>, epoch: Epoch) {
        match self {
            Self::Over => {}
            Self::Io(error) => tracing::debug!(%error, "connection failed"),
            Self::Refuse { request, refused } => {
                tracing::debug!(%refused, "connection refused");
                refuse(socket, request, epoch, &refused);
            }
        }
    }
}

/// A caller whose hello was accepted but not answered yet.
#[derive(Debug)]
pub(crate) struct Admitted {
    /// The client's id.
    pub(crate) client: ClientId,
    /// The request id of the hello.
    pub(crate) request: u64,
    /// The answer to send.
    pub(crate) reply: HelloReply,
    /// Whether the caller may access memory directly.
    pub(crate) memory: Result<(), Refused>,
}

impl Admitted {
    pub(crate) fn answer<'s>(
        &self,
        socket: impl Into<WireRef<'s>>,
        epoch: Epoch,
    ) -> io::Result<()> {
        send(socket, Op::HelloReply, self.request, epoch, &self.reply)
    }
}

/// Judges the first frame, which must be a hello. Does not block.
pub(crate) fn judge_hello(host: &dyn Host, frame: &FirstFrame) -> Result<Admitted, End> {
    let FirstFrame { header, meta } = frame;
    if header.op != Op::Hello {
        return Err(End::malformed(
            header.request,
            &DecodeError::BadValue {
                what: "first operation, which must be a hello",
                value: header.op as u64,
            },
        ));
    }
    let hello = Hello::decode(meta).map_err(|error| End::malformed(header.request, &error))?;
    let reply = host.hello(&hello).map_err(|refused| End::Refuse {
        request: header.request,
        refused,
    })?;
    Ok(Admitted {
        client: hello.client,
        request: header.request,
        reply,
        memory: host.memory_right(&hello),
    })
}

/// Sends hello and receives the answer, by `deadline`.
pub(crate) fn say_hello<'s>(
    socket: impl Into<WireRef<'s>>,
    hello: &Hello,
    deadline: Instant,
) -> Result<HelloReply, TransferError> {
    let wire = socket.into();
    let left = deadline.saturating_duration_since(Instant::now());
    crate::socket::set_timeouts(wire.socket(), Some(left)).map_err(unreachable)?;
    let sent = send(wire, Op::Hello, 0, Epoch::default(), hello);
    let received = match (receive_by(wire, deadline), sent) {
        (Ok(received), _) => received,
        (Err(ReceiveError::Io(error)), _) if error.kind() == io::ErrorKind::TimedOut => {
            return Err(crate::outcomes::deadline_exceeded());
        }
        // The port of a dead node may belong to another program now, so there is no node.
        (
            Err(ReceiveError::Decode {
                error: error @ DecodeError::BadMagic(_),
                ..
            }),
            _,
        ) => {
            return Err(unreachable(format!(
                "another program answers there: {error}"
            )));
        }
        (Err(ReceiveError::Decode { error, .. }), _) => {
            return Err(TransferError {
                code: error.code(),
                message: error.to_string(),
            });
        }
        (Err(_), Err(error)) => return Err(unreachable(error)),
        (Err(error), Ok(())) => return Err(unreachable(error)),
    };
    let (Header { op, .. }, features, meta) = received;
    match op {
        Op::HelloReply => HelloReply::decode(&meta)
            .map(|reply| HelloReply { features, ..reply })
            .map_err(|error| TransferError {
                code: error.code(),
                message: error.to_string(),
            }),
        Op::Failure => Err(frame::failure(&meta)),
        other => Err(TransferError {
            code: Code::Malformed,
            message: format!("the node answered hello with {other:?}"),
        }),
    }
}

/// Answers a request for chunk checksums. Fails as soon as the answer exceeds one frame, before it
/// collects more.
pub(crate) fn answer_sums(
    host: &dyn Host,
    epoch: Epoch,
    request: &ReadRequest,
) -> Result<SumsReply, Failure> {
    let mut answers = Vec::with_capacity(request.items.len());
    let mut size = 8;
    for item in &request.items {
        let answer = host.sums(epoch, request.incarnation, item);
        // Eight bytes a checksum, and at most eight before each item's checksums.
        size += 8 + answer.as_ref().map_or(0, |sums| 8 * sums.len() as u64);
        if size > MAX_META_BYTES {
            let error = DecodeError::Oversized {
                what: "checksums",
                size,
                limit: MAX_META_BYTES,
            };
            return Err(Failure {
                code: error.code(),
                message: error.to_string(),
            });
        }
        answers.push(answer.map_err(|refused| refused.code));
    }
    Ok(SumsReply(answers))
}

#[cfg(test)]
mod tests;
