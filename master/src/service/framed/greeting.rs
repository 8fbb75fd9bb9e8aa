//! The hello of a framed connection. Until the hello is complete and accepted, the connection is a
//! caller: a task and a few KiB, without a thread.

use super::Shared;
use super::stream::Incoming;
use super::wire::{Error, answer, failure};
use crate::pool::Presence;
use crate::service::calls::{Calls, calls_at};
use crate::service::refused::{Refused, refused};
use crate::service::rights::Bearer;
use kvpool_proto as proto;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use kvpool_types::{Code, Length, Token};
use prost::Message;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::OwnedSemaphorePermit;

/// The largest meta part of a hello, in bytes.
const MOST_BYTES: u64 = (8 << 10) + kvpool_auth::MAX_TOKEN_BYTES as u64;
/// The longest time that a client may ask the master to poll.
const MOST_SPIN: Duration = Duration::from_micros(100);
/// The most bytes that a refused caller may send after its hello. A caller that sends more is not
/// waiting for the reason.
const MOST_DRAINED: u64 = 64 << 10;
/// How long a refused caller may take to read the reason.
const LINGER: Duration = Duration::from_millis(500);

/// An accepted hello.
#[derive(Debug)]
pub(super) struct Greeted {
    /// The calls for all requests of the connection.
    pub(super) calls: Calls,
    /// The caller that the hello named.
    pub(super) bearer: Arc<Bearer>,
    /// How long the connection polls for its next request.
    pub(super) spin: Duration,
    /// The answer to the hello.
    pub(super) reply: Vec<u8>,
    /// Held for the life of the connection.
    pub(super) _permit: OwnedSemaphorePermit,
    /// The client counts as present for the life of the connection.
    pub(super) _presence: Option<Presence>,
}

/// Receives and checks the hello. A refused caller gets the reason, and the result is `None`.
pub(super) async fn greet(
    shared: &Shared,
    stream: &mut Incoming,
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

async fn receive(stream: &mut Incoming) -> Result<(Header, Vec<u8>), Error> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).await?;
    let header = Header::decode(&head)?;
    // The announced length is checked before any memory is allocated for it.
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
            what: "first operation, which must be a hello without payload",
            value: (header.op as u16).into(),
        }
        .into());
    }
    let mut meta = vec![0; Length(header.meta.into()).as_usize()];
    stream.read_exact(&mut meta).await?;
    Ok((header, meta))
}

fn judge(shared: &Shared, header: &Header, meta: &[u8]) -> Result<Greeted, Refused> {
    let mut request = proto::HelloRequest::decode(meta)
        .map_err(|error| refused(Code::Malformed, error.to_string()))?;
    let token = Token::from(std::mem::take(&mut request.token));
    let bearer = Bearer::new(shared.seat.guard.clone(), token);
    let request = bearer.allow(request)?;
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
        bearer: Arc::new(bearer),
        spin,
        reply,
        _permit: permit,
        _presence: presence,
    })
}

/// Sends the reason to a refused caller, and gives the caller time to read it. A close with unread
/// bytes would make the kernel discard the answer.
async fn tell(stream: &mut Incoming, frame: &[u8]) -> Result<(), Error> {
    let told = async {
        stream.write_all(frame).await?;
        stream.shutdown().await?;
        let mut scratch = [0; 4 << 10];
        let mut rest = stream.take(MOST_DRAINED);
        while rest.read(&mut scratch).await? > 0 {}
        Ok::<_, std::io::Error>(())
    };
    match tokio::time::timeout(LINGER, told).await {
        Ok(told) => Ok(told?),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};

    #[tokio::test]
    async fn a_refused_caller_that_goes_on_sending_is_not_read_to_its_end() {
        const SENT: usize = 256 << 10;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (caller, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let mut caller = caller.unwrap();
        let mut stream = Incoming::Plain(accepted.unwrap().0);
        let sending = tokio::spawn(async move {
            let _refused = caller.write_all(&vec![7; SENT]).await;
            let _refused = caller.shutdown().await;
            caller
        });
        tell(&mut stream, b"why").await.unwrap();
        let mut left = vec![0; SENT];
        let left = stream.read(&mut left).await.unwrap();
        assert!(left > 0, "everything was read");
        drop(stream);
        let _caller = sending.await.unwrap();
    }
}
