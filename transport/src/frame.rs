//! Frames on a blocking socket.

use crate::host::Refused;
use crate::link::TransferError;
use crate::socket::{Gather, Scatter};
use crate::wire::WireRef;
use kvpool_trace::Context;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::features::{Features, TRACE_BYTES};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::{Code, Epoch};
use std::io;
use std::time::{Duration, Instant};
use tracing::Span;

/// How long a refused connection stays open, so that the peer can read the reason.
const LINGER: Duration = Duration::from_millis(500);

/// Why no frame was received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The peer closed between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The connection failed, or timed out.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes are no valid frame.
    #[error("{error}")]
    Decode {
        /// The decoder's reason.
        error: DecodeError,
        /// The frame's request id; 0 when unknown.
        request: u64,
    },
}

/// Encodes the header and meta of a frame. Fails when meta or payload exceed their limits.
pub(crate) fn encode_head(
    op: Op,
    request: u64,
    epoch: Epoch,
    payload: u64,
    encode_meta: impl FnOnce(&mut Vec<u8>),
) -> Result<Vec<u8>, DecodeError> {
    let mut out = vec![0; HEADER_BYTES];
    encode_meta(&mut out);
    let meta = (out.len() - HEADER_BYTES) as u64;
    let oversized = |what, size, limit| DecodeError::Oversized { what, size, limit };
    let limit = kvpool_types::wire::frame::MAX_META_BYTES;
    if meta > limit {
        return Err(oversized("frame meta", meta, limit));
    }
    let limit = kvpool_types::wire::frame::MAX_PAYLOAD_BYTES;
    if payload > limit {
        return Err(oversized("frame payload", payload, limit));
    }
    let header = Header {
        version: VERSION,
        op,
        request,
        epoch,
        meta: u32::try_from(meta).expect("invariant: checked against the limit above"),
        payload,
    };
    out[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(out)
}

/// [`encode_head`] for a request, which carries the trace context `trace` if there is one.
pub(crate) fn encode_request(
    (op, request, epoch): (Op, u64, Epoch),
    payload: u64,
    trace: Option<Context>,
    encode_meta: impl FnOnce(&mut Vec<u8>),
) -> Result<Vec<u8>, DecodeError> {
    let Some(trace) = trace else {
        return encode_head(op, request, epoch, payload, encode_meta);
    };
    let mut frame = encode_head(op, request, epoch, payload, |out| {
        encode_meta(out);
        out.extend_from_slice(&trace.to_bytes());
    })?;
    if let Some(head) = frame.first_chunk_mut() {
        Features::TRACE.mark(head);
    }
    Ok(frame)
}

/// The trace context of the current span, for a request to a node with these features.
pub(crate) fn trace_for(features: Features) -> Option<Context> {
    if features.has(Features::TRACE) {
        kvpool_trace::current()
    } else {
        None
    }
}

/// The span of a request that a node serves. It is a child of the client's span if the request carries a
/// trace context, which is removed from `meta`.
pub(crate) fn serve_span(
    head: &[u8; HEADER_BYTES],
    header: &Header,
    meta: &mut Vec<u8>,
    transport: &'static str,
) -> Span {
    let mut context = Vec::new();
    if Features::of(head).has(Features::TRACE) && meta.len() >= TRACE_BYTES {
        context = meta.split_off(meta.len() - TRACE_BYTES);
    }
    kvpool_trace::below(&context, || {
        kvpool_trace::span!(
            "node request",
            otel.name = header.op.name(),
            otel.kind = "server",
            transport,
            request = header.request,
            epoch = header.epoch.0,
            payload_bytes = header.payload,
        )
    })
}

/// Sends a frame without payload.
pub(crate) fn send<'s>(
    socket: impl Into<WireRef<'s>>,
    op: Op,
    request: u64,
    epoch: Epoch,
    meta: &impl Meta,
) -> io::Result<()> {
    let head = encode_head(op, request, epoch, 0, |out| meta.encode(out))
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let mut gather = Gather::default();
    gather.push_bytes(&head);
    gather.send_all(socket)
}

/// Receives exactly `bytes`. `again` decides whether to continue after a timeout.
pub(crate) fn receive_exact<'s>(
    socket: impl Into<WireRef<'s>>,
    bytes: &mut [u8],
    mut again: impl FnMut(usize) -> bool,
) -> Result<(), ReceiveError> {
    let wire = socket.into();
    let mut scatter = Scatter::default();
    scatter.push_bytes(bytes);
    let mut received = 0;
    while !scatter.is_full() {
        match scatter.receive(wire) {
            Ok(0) if received == 0 => return Err(ReceiveError::Closed),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => received += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && again(received) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Decodes a header.
pub(crate) fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<Header, ReceiveError> {
    Header::decode(bytes).map_err(|error| {
        // A header with an oversized part is otherwise valid, so its request id is known.
        let request = match error {
            DecodeError::Oversized { .. } => bytes[8..16].try_into().map_or(0, u64::from_le_bytes),
            _ => 0,
        };
        ReceiveError::Decode { error, request }
    })
}

/// The first length of a meta buffer, in bytes. Most meta parts are shorter. The buffer doubles as bytes
/// arrive. So a peer that announces much and sends little takes little memory.
const META_STEP: usize = 64 << 10;

/// The most bytes that a connection keeps for the next meta part.
const META_KEPT: usize = 1 << 20;

/// Frees memory beyond [`META_KEPT`] before a connection waits for its next frame.
pub(crate) fn rest(meta: &mut Vec<u8>) {
    meta.clear();
    meta.shrink_to(META_KEPT);
}

/// Receives the meta part that `header` announces.
pub(crate) fn receive_meta<'s>(
    socket: impl Into<WireRef<'s>>,
    header: &Header,
    meta: &mut Vec<u8>,
) -> Result<(), ReceiveError> {
    let wire = socket.into();
    let announced = kvpool_types::Length(header.meta.into()).as_usize();
    meta.clear();
    while meta.len() < announced {
        let received = meta.len();
        let room = meta.capacity().max(received * 2).max(META_STEP);
        let next = announced.min(room);
        meta.reserve_exact(next - received);
        meta.resize(next, 0);
        receive_exact(wire, &mut meta[received..], |_| false).map_err(|error| match error {
            ReceiveError::Closed => io::Error::from(io::ErrorKind::UnexpectedEof).into(),
            other => other,
        })?;
    }
    Ok(())
}

/// Receives one whole frame without payload, by `deadline`.
pub(crate) fn receive_by<'s>(
    socket: impl Into<WireRef<'s>>,
    deadline: Instant,
) -> Result<(Header, Features, Vec<u8>), ReceiveError> {
    let wire = socket.into();
    let mut head = [0; HEADER_BYTES];
    receive_slowly(wire, &mut head, deadline)?;
    let header = decode_header(&head)?;
    if header.op == Op::HelloReply
        && let Err(error) = Features::of(&head).shared()
    {
        let request = header.request;
        return Err(ReceiveError::Decode { error, request });
    }
    let mut meta = vec![0; kvpool_types::Length(header.meta.into()).as_usize()];
    receive_slowly(wire, &mut meta, deadline)?;
    if header.payload > 0 {
        return Err(ReceiveError::Decode {
            error: DecodeError::BadValue {
                what: "payload of a hello",
                value: header.payload,
            },
            request: header.request,
        });
    }
    let features = Features::of(&head).shared().unwrap_or_default();
    Ok((header, features, meta))
}

/// Receives `bytes` in any number of parts, by `deadline`.
fn receive_slowly<'s>(
    socket: impl Into<WireRef<'s>>,
    bytes: &mut [u8],
    deadline: Instant,
) -> Result<(), ReceiveError> {
    let wire = socket.into();
    let mut scatter = Scatter::default();
    scatter.push_bytes(bytes);
    while !scatter.is_full() {
        match scatter.receive_by(wire, deadline) {
            Ok(0) => return Err(ReceiveError::Closed),
            Ok(_) => {}
            // The next check of the deadline ends the loop if it has passed.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Sends the reason and waits [`LINGER`] for the peer to read it. If a socket with unread bytes were closed
/// at once, the kernel would discard the answer.
pub(crate) fn refuse<'s>(
    socket: impl Into<WireRef<'s>>,
    request: u64,
    epoch: Epoch,
    refused: &Refused,
) {
    let wire = socket.into();
    let failure = Failure {
        code: refused.code,
        message: refused.message.clone(),
    };
    let deadline = Instant::now() + LINGER;
    let told = crate::socket::set_timeouts(wire.socket(), Some(LINGER))
        .and_then(|()| send(wire, Op::Failure, request, epoch, &failure))
        .and_then(|()| {
            Ok(rustix::net::shutdown(
                wire.socket(),
                rustix::net::Shutdown::Write,
            )?)
        });
    if let Err(error) = told {
        tracing::debug!(%error, "sending the reason for a refusal failed");
        return;
    }
    let mut scratch = [0; 16 << 10];
    while Instant::now() < deadline {
        let mut scatter = Scatter::default();
        scatter.push_bytes(&mut scratch);
        if !matches!(scatter.receive_by(wire, deadline), Ok(1..)) {
            return;
        }
    }
}

/// Discards `left` bytes of payload of an unknown operation.
pub(crate) fn skip<'s>(socket: impl Into<WireRef<'s>>, mut left: u64) -> Result<(), ReceiveError> {
    let wire = socket.into();
    let mut scratch = [0; 16 << 10];
    while left > 0 {
        let piece = left.min(scratch.len() as u64);
        let (room, _) = scratch.split_at_mut(kvpool_types::Length(piece).as_usize());
        receive_exact(wire, room, |_| false)?;
        left -= piece;
    }
    Ok(())
}

/// The answer to an unknown operation of a later version.
pub(crate) fn unimplemented() -> Failure {
    Failure {
        code: Code::Unimplemented,
        message: "this node does not implement the operation".to_owned(),
    }
}

/// Decodes a failure frame's meta into an error.
pub(crate) fn failure(meta: &[u8]) -> TransferError {
    match Failure::decode(meta) {
        Ok(failure) => TransferError {
            code: failure.code,
            message: failure.message,
        },
        Err(error) => TransferError {
            code: Code::Malformed,
            message: format!("malformed failure frame from the node: {error}"),
        },
    }
}

/// The error for an item's code other than `Ok`.
pub(crate) fn status(code: Code) -> TransferError {
    TransferError {
        code,
        message: format!("the node answered {code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::tests::sealed;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn header(meta: u32) -> Header {
        Header {
            version: VERSION,
            op: Op::Read,
            request: 1,
            epoch: Epoch(1),
            meta,
            payload: 0,
        }
    }

    #[test]
    fn memory_is_used_for_what_came_and_not_for_what_was_announced() {
        let (mut peer, socket) = UnixStream::pair().unwrap();
        peer.write_all(&[7; 100]).unwrap();
        drop(peer);
        let mut meta = Vec::new();
        let received = receive_meta(socket.as_fd(), &header(4 << 20), &mut meta);
        assert!(matches!(received, Err(ReceiveError::Io(_))));
        assert!(meta.capacity() <= META_STEP, "{}", meta.capacity());
    }

    #[test]
    fn a_long_meta_part_comes_whole_and_its_memory_goes_after_it() {
        let (mut peer, socket) = UnixStream::pair().unwrap();
        let long: Vec<u8> = (0..3_000_001_u32).map(|at| at.to_le_bytes()[0]).collect();
        let sent = long.clone();
        let sender = std::thread::spawn(move || peer.write_all(&sent).unwrap());
        let mut meta = Vec::new();
        receive_meta(socket.as_fd(), &header(3_000_001), &mut meta).unwrap();
        sender.join().unwrap();
        assert!(meta == long);
        rest(&mut meta);
        assert!(meta.capacity() <= META_KEPT, "{}", meta.capacity());
    }

    #[test]
    fn a_record_in_many_slow_parts_ends_at_the_deadline() {
        let (wire, (mut peer, session)) = sealed();
        let frame = encode_head(Op::Ping, 7, Epoch(1), 0, |out| out.extend([0; 160])).unwrap();
        let mut record = Vec::new();
        let sent = session.send(&frame, |bytes| {
            record.extend_from_slice(bytes);
            Ok(bytes.len())
        });
        sent.unwrap();
        // Each byte comes in time, and all of them together do not.
        let sender = std::thread::spawn(move || {
            for byte in record.chunks(1) {
                peer.write_all(byte).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
            peer
        });
        let begun = Instant::now();
        let received = receive_by(&wire, begun + Duration::from_millis(300));
        let is_late = |error: &io::Error| error.kind() == io::ErrorKind::TimedOut;
        assert!(matches!(&received, Err(ReceiveError::Io(error)) if is_late(error)));
        assert!(begun.elapsed() < Duration::from_secs(2));
        // Nothing of the record is lost.
        let (header, ..) = receive_by(&wire, begun + Duration::from_secs(60)).unwrap();
        assert_eq!((header.op, header.request), (Op::Ping, 7));
        sender.join().unwrap();
    }
}
