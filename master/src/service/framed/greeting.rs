//! The greeting of a framed connection. Until it has come whole and was answered well, the connection
//! is a caller: a task and a few KiB, no thread.

use super::Shared;
use super::wire::{Error, answer, failure};
use crate::pool::Presence;
use crate::service::calls::{Calls, calls_at};
use crate::service::refused::{Refused, refused};
use kvpool_proto as proto;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use kvpool_types::{Code, Length};
use prost::Message;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

/// The largest meta part of a greeting, in bytes.
const MOST_BYTES: u64 = 8 << 10;
/// The longest that a client may have a connection poll.
const MOST_SPIN: Duration = Duration::from_micros(100);
/// How long a refused caller may take to read why.
const LINGER: Duration = Duration::from_millis(500);

/// A caller who has greeted well.
#[derive(Debug)]
pub(super) struct Greeted {
    /// Whom all requests of the connection are put to.
    pub(super) calls: Calls,
    /// How long the connection polls for its next request.
    pub(super) spin: Duration,
    /// What answers the greeting.
    pub(super) reply: Vec<u8>,
    /// Held for as long as the connection lives.
    pub(super) _permit: OwnedSemaphorePermit,
    /// The note that the client is there, for as long.
    pub(super) _presence: Option<Presence>,
}

/// Receives the greeting and judges it. A caller who is refused is told why, and `None` comes back.
pub(super) async fn greet(
    shared: &Shared,
    stream: &mut TcpStream,
) -> Result<Option<Greeted>, Error> {
    let epoch = || shared.seat.known().epoch;
    let (request, outcome) = match receive(stream).await {
        Ok((header, meta)) => (header.request, judge(shared, &header, &meta)),
        Err(Error::Decode(error)) => (0, Err(refused(error.code(), error.to_string()))),
        Err(error) => return Err(error),
    };
    match outcome {
        Ok(greeted) => Ok(Some(greeted)),
        Err(refused) => {
            tell(stream, &failure(request, epoch(), &refused)).await?;
            Ok(None)
        }
    }
}

async fn receive(stream: &mut TcpStream) -> Result<(Header, Vec<u8>), Error> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).await?;
    let header = Header::decode(&head)?;
    // Judged by what it announces, before any room is made for that.
    if u64::from(header.meta) > MOST_BYTES {
        return Err(DecodeError::Oversized {
            what: "greeting",
            size: header.meta.into(),
            limit: MOST_BYTES,
        }
        .into());
    }
    if header.op != Op::Greet || header.payload > 0 {
        return Err(DecodeError::BadValue {
            what: "first operation, which must be a greeting without payload",
            value: (header.op as u16).into(),
        }
        .into());
    }
    let mut meta = vec![0; Length(header.meta.into()).as_usize()];
    stream.read_exact(&mut meta).await?;
    Ok((header, meta))
}

fn judge(shared: &Shared, header: &Header, meta: &[u8]) -> Result<Greeted, Refused> {
    let request = proto::HelloRequest::decode(meta)
        .map_err(|error| refused(Code::Malformed, error.to_string()))?;
    let mut calls = calls_at(&shared.seat, request.caller.as_ref())?;
    let spin = MOST_SPIN.min(Duration::from_micros(request.spin_us.into()));
    let client = request.caller.clone();
    let reply = calls.hello(request)?;
    let permit = shared.take_permit()?;
    let presence = client.and_then(|client| calls.come_from(&client));
    let reply = answer(Op::Reply, header.request, calls.epoch(), |out| {
        out.reserve(reply.encoded_len());
        reply
            .encode(out)
            .expect("invariant: a vector takes what is appended");
    });
    Ok(Greeted {
        calls,
        spin,
        reply,
        _permit: permit,
        _presence: presence,
    })
}

/// Says why the caller is refused, and waits a moment for it to read that: closing at once with bytes
/// unread would make the kernel throw the answer away.
async fn tell(stream: &mut TcpStream, frame: &[u8]) -> Result<(), Error> {
    let told = async {
        stream.write_all(frame).await?;
        stream.shutdown().await?;
        let mut scratch = [0; 4 << 10];
        while stream.read(&mut scratch).await? > 0 {}
        Ok::<_, std::io::Error>(())
    };
    match tokio::time::timeout(LINGER, told).await {
        Ok(told) => Ok(told?),
        Err(_) => Ok(()),
    }
}
