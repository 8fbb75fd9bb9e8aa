//! Receives answers directly into the callers' memory.

use super::exchange::{Exchange, Work};
use super::lane::TcpConnection;
use crate::checksum::Sum;
use crate::frame::{ReceiveError, decode_header, failure, receive_exact, receive_meta, status};
use crate::link::{TransferError, TransferResult};
use crate::memory::Slice;
use crate::socket::{LargePayload, Scatter, wait_to_receive};
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{Meta, ReadItem, Statuses, SumsReply};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use kvpool_types::{Code, Length, Offset};
use std::io;
use std::time::Instant;

/// The most bytes that one call receives. They are summed while they are in the cache. The deadline
/// is checked between calls.
const PIECE: u64 = 256 << 10;

/// Receives answers until the connection ends. Returns the reason.
pub(super) fn receive_answers(wire: &TcpConnection) -> TransferError {
    let mut meta = Vec::new();
    loop {
        if let Err(error) = receive_answer(wire, &mut meta) {
            return error;
        }
    }
}

fn receive_answer(wire: &TcpConnection, meta: &mut Vec<u8>) -> Result<(), TransferError> {
    let mut head = [0; HEADER_BYTES];
    wait_to_receive(wire.socket()).map_err(crate::outcomes::unreachable)?;
    receive_exact(wire.socket(), &mut head, |_| true).map_err(receive_error)?;
    let header = decode_header(&head).map_err(receive_error)?;
    receive_meta(wire.socket(), &header, meta).map_err(receive_error)?;
    if header.op == Op::Failure && header.request == 0 {
        return Err(failure(meta));
    }
    // The exchange stays in the table while its payload arrives, so that the timer sees its
    // deadline.
    let exchange = wire
        .pending(header.request)
        .ok_or_else(|| malformed("an answer to an unknown request"))?;
    answer(wire, &header, meta, &exchange)?;
    wire.forget(header.request);
    Ok(())
}

fn answer(
    wire: &TcpConnection,
    header: &Header,
    meta: &[u8],
    exchange: &Exchange,
) -> Result<(), TransferError> {
    let has_payload = header.op == Op::Statuses && matches!(exchange.work, Work::Read { .. });
    if header.payload > 0 && !has_payload {
        return Err(malformed("an unexpected payload"));
    }
    if header.op == Op::Failure {
        exchange.fail(failure(meta));
        return Ok(());
    }
    match (&exchange.work, header.op) {
        (
            Work::Read {
                items,
                into,
                outcomes,
            },
            Op::Statuses,
        ) => {
            let codes = statuses(meta, items.len())?;
            let expected: u64 = items
                .iter()
                .zip(&codes)
                .filter(|(_, code)| **code == Code::Ok)
                .map(|(item, _)| item.length.0)
                .sum();
            if expected != header.payload {
                return Err(malformed("a read answer of the wrong length"));
            }
            match receive_payload(wire, exchange.deadline, items, into, &codes) {
                Ok(results) => outcomes.set(Ok(results)),
                Err(error) => {
                    // The connection ends in the middle of a frame. Only this exchange missed its
                    // deadline; the others on the connection get [`Code::Unreachable`].
                    outcomes.set(Err(error));
                    return Err(crate::outcomes::unreachable(
                        "the connection was ended in the middle of an answer",
                    ));
                }
            }
        }
        (
            Work::Write {
                grants,
                sent,
                outcomes,
                ..
            },
            Op::Statuses,
        ) => {
            let codes = statuses(meta, grants.len())?;
            let sent = sent.lock();
            if sent.len() != grants.len() {
                return Err(malformed("an answer to a write before all of it was sent"));
            }
            let results = codes
                .into_iter()
                .zip(sent.iter())
                .map(|(code, sum)| match code {
                    Code::Ok => Ok(*sum),
                    code => Err(status(code)),
                })
                .collect();
            outcomes.set(Ok(results));
        }
        (Work::Sums { ops, outcomes }, Op::SumsReply) => {
            let reply = SumsReply::decode(meta).map_err(|error| decode_error(&error))?;
            if reply.0.len() != ops.len() {
                return Err(malformed("checksums of the wrong number of extents"));
            }
            let results = reply.0.into_iter().map(|sums| sums.map_err(status));
            outcomes.set(Ok(results.collect()));
        }
        _ => return Err(malformed("an answer to another kind of request")),
    }
    Ok(())
}

/// A part of the callers' memory to receive into.
struct ReceiveTarget<'a> {
    slice: &'a Slice,
    at: u64,
    /// Whether the item is complete once this part is full.
    last: bool,
}

/// Receives the bytes of all successful items, and sums them as they arrive.
fn receive_payload(
    wire: &TcpConnection,
    deadline: Instant,
    items: &[ReadItem],
    into: &[Vec<Slice>],
    codes: &[Code],
) -> Result<Vec<TransferResult>, TransferError> {
    debug_assert_eq!(items.len(), into.len());
    let mut targets: Vec<ReceiveTarget<'_>> = Vec::with_capacity(items.len());
    for slices in into.iter().zip(codes).filter(|(_, c)| **c == Code::Ok) {
        targets.extend(slices.0.iter().map(|slice| ReceiveTarget {
            slice,
            at: 0,
            last: false,
        }));
        if let Some(target) = targets.last_mut() {
            target.last = true;
        }
    }
    let mut sums = Vec::with_capacity(items.len());
    let mut sum = Sum::default();
    let mut first = 0;
    let mut payload = LargePayload::new(
        wire.socket().socket(),
        targets.iter().map(|t| t.slice.length().0).sum(),
    );
    while first < targets.len() {
        if wire.is_dead() {
            return Err(crate::outcomes::unreachable("the connection was closed"));
        }
        if Instant::now() >= deadline {
            return Err(crate::outcomes::deadline_exceeded());
        }
        let mut received = receive_piece(wire, targets.get(first..).unwrap_or_default())?;
        payload.received(received);
        while received > 0 {
            let target = targets
                .get_mut(first)
                .expect("invariant: no more is received than there are targets for");
            let taken = received.min(target.slice.length().0 - target.at);
            sum.update_private(target.slice, Offset(target.at), Length(taken));
            target.at += taken;
            received -= taken;
            if target.at == target.slice.length().0 {
                first += 1;
                if target.last {
                    sums.push(std::mem::take(&mut sum).finish());
                }
            }
        }
    }
    let mut sums = sums.into_iter();
    Ok(codes
        .iter()
        .map(|code| match code {
            Code::Ok => sums
                .next()
                .ok_or_else(|| malformed("a read answer without bytes")),
            code => Err(status(*code)),
        })
        .collect())
}

/// Receives up to [`PIECE`] bytes into the first targets. Returns the number of bytes.
fn receive_piece(
    wire: &TcpConnection,
    targets: &[ReceiveTarget<'_>],
) -> Result<u64, TransferError> {
    let mut scatter = Scatter::default();
    let mut room = PIECE;
    for target in targets {
        let length = room.min(target.slice.length().0 - target.at);
        scatter.push_part(target.slice, Offset(target.at), Length(length));
        room -= length;
        if room == 0 {
            break;
        }
    }
    match scatter.receive(wire.socket()) {
        Ok(0) => Err(crate::outcomes::unreachable(io::Error::from(
            io::ErrorKind::UnexpectedEof,
        ))),
        Ok(count) => Ok(count as u64),
        Err(error) => Err(crate::outcomes::unreachable(error)),
    }
}

fn statuses(meta: &[u8], count: usize) -> Result<Vec<Code>, TransferError> {
    let Statuses(codes) = Statuses::decode(meta).map_err(|error| decode_error(&error))?;
    if codes.len() == count {
        Ok(codes)
    } else {
        Err(malformed("statuses of the wrong number of items"))
    }
}

fn receive_error(error: ReceiveError) -> TransferError {
    match error {
        ReceiveError::Decode { error, .. } => decode_error(&error),
        other => crate::outcomes::unreachable(other),
    }
}

fn decode_error(error: &DecodeError) -> TransferError {
    TransferError {
        code: error.code(),
        message: error.to_string(),
    }
}

fn malformed(what: &str) -> TransferError {
    TransferError {
        code: Code::Malformed,
        message: format!("invalid answer from the node: {what}"),
    }
}
