//! Range gets: a part of a block, verified without the rest of it.
//!
//! The node keeps the checksums of a block's 64 KiB chunks. Combined, they must give the block's checksum,
//! which came from the master. The client then reads every chunk that the range touches as a whole, and
//! compares it with its checksum. Bytes of a chunk outside the range go into memory of the client.

use crate::api::{GetOptions, GetOutcome};
use crate::cache::{Located, LocatedReplica};
use crate::clock::{BootTime, Deadline};
use crate::context::ClientContext;
use crate::errors::GetError;
use crate::get::{Renewal, count};
use crate::overlap;
use crate::replica_retry::{ReplicaRetry, Target};
use crate::replicas::part_of;
use kvpool_transport::checksum::combine_chunks;
use kvpool_transport::memory::total_length;
use kvpool_transport::{Link, ReadOp, Region, Slice, SumsOp, TransferError, TransportKind};
use kvpool_types::{CHUNK, Checksum, Code, Key, Length, Offset};
use std::sync::Arc;

/// Gets the range of `key` that begins at `from` and is as long as `buffers`.
pub(crate) async fn get_range(
    inner: &ClientContext,
    key: &Key,
    from: Offset,
    buffers: Vec<Slice>,
    options: &GetOptions,
) -> Result<GetOutcome, GetError> {
    let timeout = options.timeout.unwrap_or(inner.options.timeouts.get);
    let deadline = Deadline::after(timeout);
    let outcome = get(inner, key, from, &buffers, deadline).await;
    count(&inner.counting, &outcome);
    outcome
}

async fn get(
    inner: &ClientContext,
    key: &Key,
    from: Offset,
    buffers: &[Slice],
    deadline: Deadline,
) -> Result<GetOutcome, GetError> {
    overlap::check(buffers)?;
    let length = total_length(buffers);
    let mut retry = ReplicaRetry::new(inner, key, deadline, None);
    loop {
        let Some(target) = retry.next(length).await? else {
            return Ok(GetOutcome::Miss);
        };
        let located = Arc::clone(&target.located);
        let outside = from
            .0
            .checked_add(length.0)
            .is_none_or(|end| end > located.length.0);
        if outside {
            return Err(GetError::OutsideBlock {
                from,
                length,
                block: located.length,
            });
        }
        let node = &target.choice.replica.node;
        let link = match inner
            .links
            .first(node, &target.choice.ways, target.limit)
            .await
        {
            Ok(link) => link,
            Err(error) => {
                let ways = target.choice.ways.clone();
                retry.fail(&target, &ways, error);
                continue;
            }
        };
        let kind = link.kind();
        let renewal = Renewal::new(&inner.control, [(key, &located)]);
        let reading = read(&*link, &target, from, buffers);
        let read = renewal.during(reading, target.limit).await;
        let ended = BootTime::now();
        let lease = renewal.leases().into_iter().flatten().next();
        retry.renewed(&target, lease);
        let outrun = lease.is_some_and(|lease| !lease.runs(ended));
        match read {
            Ok(()) if !outrun => {
                inner.counting.read(kind, length.0);
                retry.done();
                return Ok(GetOutcome::Hit {
                    length: located.length,
                    version: located.version,
                });
            }
            Err(ReadError::Detached(error)) => {
                return Err(GetError::Failed {
                    code: error.code,
                    message: error.message,
                });
            }
            Err(ReadError::Failed(error)) if error.code != Code::ChecksumMismatch => {
                retry.fail(&target, &[kind], error);
            }
            // Without a lease, or after its end, the extent may hold another block. This is no fault.
            Err(ReadError::Failed(error)) if !outrun && lease.is_some() => {
                report(&located, kind, &error);
                retry.fail(&target, &[kind], error);
            }
            _ => retry.lease_outrun(),
        }
    }
}

fn report(located: &Located, kind: TransportKind, error: &TransferError) {
    tracing::warn!(version = %located.version, ?kind, %error, "checksum mismatch in a range");
}

/// Why one attempt to read a range failed.
enum ReadError {
    /// Another attempt may succeed.
    Failed(TransferError),
    /// The link did not keep its deadline. It may still write to the buffers.
    Detached(TransferError),
}

async fn read(
    link: &dyn Link,
    target: &Target,
    from: Offset,
    buffers: &[Slice],
) -> Result<(), ReadError> {
    let LocatedReplica { extent, right, .. } = target.choice.replica;
    let located = &target.located;
    let late = || TransferError {
        code: Code::DeadlineExceeded,
        message: format!("a range of {extent}"),
    };
    let limit = target.limit;
    let sums = limit
        .with_grace()
        .run(link.sums(
            located.epoch,
            vec![SumsOp { extent, right }],
            limit.to_std(),
        ))
        .await
        .map_err(|_| ReadError::Failed(late()))?
        .into_iter()
        .next()
        .unwrap_or_else(|| Err(late()))
        .map_err(ReadError::Failed)?;
    check_sums(located, &sums).map_err(ReadError::Failed)?;
    let plan = plan(located.length, from, buffers, &sums)
        .ok_or_else(late)
        .map_err(ReadError::Failed)?;
    let (ops, expected): (Vec<_>, Vec<_>) = plan
        .into_iter()
        .map(|chunk| {
            let op = ReadOp {
                extent,
                from: chunk.from,
                into: chunk.into,
                right,
            };
            (op, chunk.sum)
        })
        .unzip();
    let results = limit
        .with_grace()
        .run(link.read(located.epoch, ops, limit.to_std()))
        .await
        .map_err(|_| ReadError::Detached(late()))?;
    if results.len() != expected.len() {
        return Err(ReadError::Failed(TransferError {
            code: Code::Internal,
            message: "the link's answer does not match the request".to_owned(),
        }));
    }
    for (result, expected) in results.into_iter().zip(expected) {
        let sum = result.map_err(ReadError::Failed)?;
        if sum != expected {
            return Err(ReadError::Failed(mismatch(format!(
                "checksum mismatch: a chunk has {sum}, the node recorded {expected}"
            ))));
        }
    }
    Ok(())
}

/// Checks that the chunk checksums combine to the block's checksum, which came from the master.
fn check_sums(located: &Located, sums: &[Checksum]) -> Result<(), TransferError> {
    let whole = combine_chunks(located.length, sums);
    if sums.len() as u64 == located.length.chunks() && whole == located.checksum {
        Ok(())
    } else {
        Err(mismatch(format!(
            "checksum mismatch: {} chunk checksums combine to {whole}, the block has {}",
            sums.len(),
            located.checksum
        )))
    }
}

fn mismatch(message: String) -> TransferError {
    TransferError {
        code: Code::ChecksumMismatch,
        message,
    }
}

/// One chunk to read.
#[derive(Debug)]
struct Chunk {
    from: Offset,
    into: Vec<Slice>,
    sum: Checksum,
}

/// The chunks of a block of `block` bytes that a range touches, and the memory for their bytes. Bytes outside
/// the range get memory of their own. `None` when the range exceeds the block.
fn plan(block: Length, from: Offset, buffers: &[Slice], sums: &[Checksum]) -> Option<Vec<Chunk>> {
    let end = from.0.checked_add(total_length(buffers).0)?;
    if end > block.0 {
        return None;
    }
    let mut chunks = Vec::new();
    for (number, sum) in (0u64..).zip(sums) {
        let begins = number * CHUNK;
        let ends = (begins + CHUNK).min(block.0);
        let (first, last) = (begins.max(from.0), ends.min(end));
        if first >= last {
            continue;
        }
        let scratch = |length: u64| (length > 0).then(|| Region::allocate(Length(length)).whole());
        let wanted = part_of(buffers, Offset(first - from.0), Length(last - first))?;
        let into = scratch(first - begins)
            .into_iter()
            .chain(wanted)
            .chain(scratch(ends - last))
            .collect();
        chunks.push(Chunk {
            from: Offset(begins),
            into,
            sum: *sum,
        });
    }
    Some(chunks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_transport::checksum::checksum;
    use kvpool_types::{Epoch, Version};
    use proptest::prelude::*;

    fn located(bytes: &[u8]) -> Located {
        Located {
            epoch: Epoch(1),
            version: Version(1),
            checksum: checksum(bytes),
            length: Length(bytes.len() as u64),
            replicas: Vec::new(),
            lease: None,
        }
    }

    fn sums(bytes: &[u8]) -> Vec<Checksum> {
        bytes
            .chunks(Length(CHUNK).as_usize())
            .map(checksum)
            .collect()
    }

    #[test]
    fn chunk_checksums_are_believed_only_when_they_make_up_the_blocks() {
        let bytes: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
        let located = located(&bytes);
        let mut sums = sums(&bytes);
        assert!(check_sums(&located, &sums).is_ok());
        sums[1].0 ^= 1;
        let error = check_sums(&located, &sums).unwrap_err();
        assert_eq!(error.code, Code::ChecksumMismatch);
        sums[1].0 ^= 1;
        sums.pop();
        assert!(check_sums(&located, &sums).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_plan_reads_whole_chunks_and_fills_the_range(
            block in 1u64..300_000,
            from in 0u64..300_000,
            parts in prop::collection::vec(1u64..100_000, 1..4),
        ) {
            let bytes: Vec<u8> = (0..block).map(|n| (n % 253) as u8).collect();
            let sums = sums(&bytes);
            let buffers: Vec<Slice> =
                parts.iter().map(|part| Region::allocate(Length(*part)).whole()).collect();
            let length: u64 = parts.iter().sum();
            let Some(plan) = plan(Length(block), Offset(from), &buffers, &sums) else {
                prop_assert!(from + length > block);
                return Ok(());
            };
            for chunk in &plan {
                // This does what a link does: it fills the slices from the extent, and returns the checksum.
                let mut at = chunk.from.as_usize();
                let begins = at;
                for slice in &chunk.into {
                    let next = at + slice.length().as_usize();
                    slice.write_at(Offset(0), &bytes[at..next]);
                    at = next;
                }
                prop_assert_eq!(checksum(&bytes[begins..at]), chunk.sum);
            }
            let got: Vec<u8> = buffers.iter().flat_map(Slice::to_vec).collect();
            let (from, length) = (Length(from).as_usize(), Length(length).as_usize());
            prop_assert_eq!(&got[..], &bytes[from..from + length]);
        }
    }
}
