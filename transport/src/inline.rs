//! Small batches over a [`Channel`]: one frame in each direction, without waking another thread.
//!
//! The bytes of a small batch pass through the frame's own buffer. Copying 64 KiB costs less than
//! the system calls that would avoid the copy.

use crate::channel::Channel;
use crate::checksum::{ChunkedSum, Sum, checksum};
use crate::frame::status;
use crate::link::{ReadOp, TransferError, TransferResult, WriteOp};
use crate::memory::Slice;
use crate::outcomes::{deadline_exceeded, invalid, unreachable};
use crate::split::{FRAME_ITEMS, check_read, write_payload};
use futures::future::{BoxFuture, FutureExt};
use kvpool_types::wire::data::{Meta, ReadItem, ReadRequest, Statuses, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{CHUNK, Checksum, Code, Epoch, Incarnation, Length, Offset};
use std::sync::Arc;
use std::time::Instant;

/// The largest payload of a small batch, in bytes.
pub(crate) const SMALL_BYTES: u64 = 128 << 10;

/// The largest payload that a node receives whole before it looks up the blocks' extents: a small
/// batch with its chunk checksums.
pub(crate) const WHOLE_BYTES: u64 = 2 * SMALL_BYTES;

/// Whether a batch with these payload sizes is small.
pub(crate) fn is_small(payloads: impl ExactSizeIterator<Item = u64>) -> bool {
    payloads.len() <= FRAME_ITEMS && payloads.fold(0, u64::saturating_add) <= SMALL_BYTES
}

/// Reads a small batch.
pub(crate) fn read(
    channel: Arc<Channel>,
    incarnation: Incarnation,
    epoch: Epoch,
    ops: Vec<ReadOp>,
    deadline: Instant,
) -> BoxFuture<'static, Vec<TransferResult>> {
    async move {
        let early: Vec<Option<TransferError>> = ops.iter().map(|op| check_read(op).err()).collect();
        let asked = || ops.iter().zip(&early).filter(|(_, early)| early.is_none());
        let request = ReadRequest {
            incarnation,
            items: asked()
                .map(|(op, _)| ReadItem {
                    extent: op.extent,
                    from: op.from,
                    length: op.length(),
                    right: op.right,
                })
                .collect(),
        };
        let answer = if request.items.is_empty() {
            Ok(Vec::new())
        } else {
            let call = channel.call(Op::Read, epoch, |out| request.encode(out));
            with_deadline(&channel, deadline, call)
                .await
                .and_then(|reply| {
                    let Statuses(codes) = reply.decode(Op::Statuses)?;
                    let into: Vec<&[Slice]> = asked().map(|(op, _)| op.into.as_slice()).collect();
                    hand_out(&request.items, &codes, &into, &reply.payload)
                })
        };
        join(early, answer)
    }
    .boxed()
}

/// Writes a small batch.
pub(crate) fn write(
    channel: Arc<Channel>,
    incarnation: Incarnation,
    ops: Vec<WriteOp>,
    deadline: Instant,
) -> BoxFuture<'static, Vec<TransferResult>> {
    async move {
        let mut early = Vec::with_capacity(ops.len());
        let mut grants = Vec::with_capacity(ops.len());
        let mut whole = Vec::with_capacity(ops.len());
        let bytes: u64 = ops.iter().map(|op| op.grant.extent.length.0 + 8).sum();
        let mut payload = Vec::with_capacity(Length(bytes).as_usize());
        for op in &ops {
            let checked = write_payload(op);
            if checked.is_ok() {
                grants.push(op.grant);
                whole.push(append_block(&mut payload, op));
            }
            early.push(checked.err());
        }
        drop(ops);
        let epoch = grants.iter().map(|grant| grant.epoch).max();
        let answer = if grants.is_empty() {
            Ok(Vec::new())
        } else {
            let request = WriteRequest {
                incarnation,
                grants,
            };
            let call =
                channel.call_with_payload(Op::Write, epoch.unwrap_or_default(), &payload, |out| {
                    request.encode(out)
                });
            with_deadline(&channel, deadline, call)
                .await
                .and_then(|reply| {
                    let Statuses(codes) = reply.decode(Op::Statuses)?;
                    expect(codes.len(), whole.len())?;
                    let outcomes = codes.into_iter().zip(whole);
                    Ok(outcomes
                        .map(|(code, sum)| match code {
                            Code::Ok => Ok(sum),
                            code => Err(status(code)),
                        })
                        .collect())
                })
        };
        join(early, answer)
    }
    .boxed()
}

/// Appends a block and its chunk checksums to the payload. Returns the block's checksum.
fn append_block(payload: &mut Vec<u8>, op: &WriteOp) -> Checksum {
    let begin = payload.len();
    for slice in &op.from {
        let at = payload.len();
        payload.resize(at + slice.length().as_usize(), 0);
        slice.read_at(Offset(0), payload.get_mut(at..).unwrap_or_default());
    }
    // Sums the copy, which the caller can no longer change.
    let bytes = payload.get(begin..).unwrap_or_default();
    if op.grant.extent.length.0 <= CHUNK {
        let whole = checksum(bytes);
        payload.extend_from_slice(&whole.0.to_le_bytes());
        return whole;
    }
    let mut sum = ChunkedSum::for_length(op.grant.extent.length);
    sum.update(bytes);
    let sums = sum.finish();
    for chunk in &sums.chunks {
        payload.extend_from_slice(&chunk.0.to_le_bytes());
    }
    sums.whole
}

/// Copies the bytes of the successful items to their destinations, and sums them.
fn hand_out(
    items: &[ReadItem],
    codes: &[Code],
    into: &[&[Slice]],
    mut payload: &[u8],
) -> Result<Vec<TransferResult>, TransferError> {
    expect(codes.len(), items.len())?;
    let ok = codes
        .iter()
        .zip(items)
        .filter(|(code, _)| **code == Code::Ok);
    let expected: u64 = ok.map(|(_, item)| item.length.0).sum();
    expect(payload.len(), Length(expected).as_usize())?;
    let mut results = Vec::with_capacity(items.len());
    for (code, slices) in codes.iter().zip(into) {
        if *code != Code::Ok {
            results.push(Err(status(*code)));
            continue;
        }
        let mut sum = Sum::default();
        for slice in *slices {
            let (bytes, rest) = payload.split_at(slice.length().as_usize());
            slice.write_at(Offset(0), bytes);
            sum.update(bytes);
            payload = rest;
        }
        results.push(Ok(sum.finish()));
    }
    Ok(results)
}

/// Merges each operation's early error with the answers to the others.
fn join(
    early: Vec<Option<TransferError>>,
    answer: Result<Vec<TransferResult>, TransferError>,
) -> Vec<TransferResult> {
    let mut answered = answer.as_ref().map(|results| results.iter());
    early
        .into_iter()
        .map(|early| match (early, &mut answered) {
            (Some(error), _) => Err(error),
            (None, Ok(results)) => results.next().cloned().unwrap_or_else(|| {
                Err(invalid("the node sent no answer for this item".to_owned()))
            }),
            (None, Err(error)) => Err((*error).clone()),
        })
        .collect()
}

/// Awaits a call until its deadline. A call that times out ends the channel, as in [`crate::tcp`]:
/// the path to the node may be dead, and nothing else would detect it.
async fn with_deadline<T>(
    channel: &Channel,
    deadline: Instant,
    call: impl Future<Output = Result<T, TransferError>>,
) -> Result<T, TransferError> {
    tokio::time::timeout_at(deadline.into(), call)
        .await
        .unwrap_or_else(|_| {
            channel.fail(unreachable("a request was not answered in time"));
            Err(deadline_exceeded())
        })
}

fn expect(got: usize, wanted: usize) -> Result<(), TransferError> {
    if got == wanted {
        return Ok(());
    }
    Err(TransferError {
        code: Code::Malformed,
        message: format!("the node answered {got} items of {wanted}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;
    use kvpool_types::wire::features::Features;
    use kvpool_types::{Extent, SegmentId};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// The node hangs, or the path to it is cut. The link must close so that the client opens a new
    /// one.
    #[tokio::test]
    async fn a_timed_out_request_ends_the_channel() {
        let (ours, _silent) = UnixStream::pair().unwrap();
        let channel = Arc::new(
            Channel::from_socket(std::os::fd::OwnedFd::from(ours), Features::default()).unwrap(),
        );
        let length = Length(4096);
        let op = ReadOp {
            extent: Extent {
                segment: SegmentId(1),
                offset: Offset(0),
                length,
            },
            from: Offset(0),
            into: vec![Region::allocate(length).whole()],
            right: None,
        };
        let deadline = Instant::now() + Duration::from_millis(50);
        let outcomes = read(
            channel.clone(),
            Incarnation(1),
            Epoch(1),
            vec![op],
            deadline,
        )
        .await;
        assert_eq!(outcomes, [Err(deadline_exceeded())]);
        assert!(!channel.is_open());
    }
}
