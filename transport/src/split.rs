//! Divides batches into frames.

use crate::checksum::combine;
use crate::link::{ReadOp, TransferError, TransferResult, WriteOp};
use crate::memory::{Slice, total_length};
use crate::outcomes::invalid;
use kvpool_types::wire::data::ReadItem;
use kvpool_types::wire::frame::MAX_PAYLOAD_BYTES;
use kvpool_types::{Checksum, Code, Extent, Length, Offset};

/// The payload of a full frame, in bytes. It is small enough that connections share a large batch
/// and small requests are not delayed, and large enough that its fixed cost is negligible.
pub(crate) const FRAME_BYTES: u64 = 4 << 20;
/// The payload that justifies a frame on another connection, in bytes.
const SHARE_BYTES: u64 = 1 << 20;
/// The most items of one frame.
pub(crate) const FRAME_ITEMS: usize = 1024;

/// A range of one read that fits one frame.
pub(crate) struct Part {
    /// The index of the operation in the batch.
    pub(crate) op: usize,
    pub(crate) item: ReadItem,
    pub(crate) into: Vec<Slice>,
}

/// Checks a read and appends its parts to `parts`.
pub(crate) fn cut_read(
    op: usize,
    read: &ReadOp,
    parts: &mut Vec<Part>,
) -> Result<(), TransferError> {
    check_read(read)?;
    let mut done = 0;
    for into in cut(&read.into, FRAME_BYTES) {
        let length = total_length(&into);
        parts.push(Part {
            op,
            item: ReadItem {
                extent: read.extent,
                from: Offset(read.from.0.saturating_add(done)),
                length,
                right: read.right,
            },
            into,
        });
        done += length.0;
    }
    Ok(())
}

/// Cuts memory into parts of `size` bytes, in order. The last part may be shorter.
fn cut(memory: &[Slice], size: u64) -> Vec<Vec<Slice>> {
    let mut parts = Vec::new();
    let (mut part, mut room) = (Vec::new(), size);
    for slice in memory {
        let mut done = 0;
        while done < slice.length().0 {
            let taken = room.min(slice.length().0 - done);
            part.extend(slice.slice(Offset(done), Length(taken)));
            done += taken;
            room -= taken;
            if room == 0 {
                parts.push(std::mem::take(&mut part));
                room = size;
            }
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

/// Checks a read's arguments. Returns its length.
pub(crate) fn check_read(read: &ReadOp) -> Result<Length, TransferError> {
    let length = read.length();
    if length == Length(0) {
        return Err(invalid(format!("an empty read of {}", read.extent)));
    }
    if read.into.iter().any(|slice| !slice.is_writable()) {
        return Err(invalid(format!(
            "a read of {} into read-only memory",
            read.extent
        )));
    }
    Ok(length)
}

/// The range of the segment that a read covers.
pub(crate) fn source(read: &ReadOp) -> Result<Extent, TransferError> {
    let length = check_read(read)?;
    let offset = read.extent.offset.0.checked_add(read.from.0);
    let source = offset.map(|offset| Extent {
        segment: read.extent.segment,
        offset: Offset(offset),
        length,
    });
    source
        .filter(|source| read.extent.contains(source))
        .ok_or_else(|| TransferError {
            code: Code::OutOfRange,
            message: format!(
                "{length} bytes from {} lie outside {}",
                read.from, read.extent
            ),
        })
}

/// Checks a write's arguments. Returns its length.
pub(crate) fn check_write(write: &WriteOp) -> Result<Length, TransferError> {
    let extent = write.grant.extent;
    let length = total_length(&write.from);
    if length != extent.length || length == Length(0) {
        return Err(invalid(format!(
            "a write of {length} bytes under a grant of {extent}"
        )));
    }
    Ok(length)
}

/// The payload of one write in bytes; an error when it exceeds a frame.
pub(crate) fn write_payload(write: &WriteOp) -> Result<u64, TransferError> {
    let length = check_write(write)?;
    let payload = length.0.saturating_add(length.chunks() * 8);
    if payload > MAX_PAYLOAD_BYTES {
        return Err(TransferError {
            code: Code::TooLarge,
            message: format!("a block of {length} bytes does not fit one frame"),
        });
    }
    Ok(payload)
}

/// Packs items with weights into frames, in order. Each frame holds at least one item and ends when it is
/// full.
pub(crate) fn pack<T>(things: Vec<(u64, T)>, limit: u64, mut frame: impl FnMut(u64, Vec<T>)) {
    let mut open = Vec::new();
    let mut weight = 0u64;
    for (bytes, thing) in things {
        if !open.is_empty() && (weight.saturating_add(bytes) > limit || open.len() == FRAME_ITEMS) {
            frame(weight, std::mem::take(&mut open));
            weight = 0;
        }
        weight = weight.saturating_add(bytes);
        open.push(thing);
    }
    if !open.is_empty() {
        frame(weight, open);
    }
}

/// [`pack`] into frames of at most [`FRAME_BYTES`], for `ways` parallel connections. Each connection gets the
/// same number of frames, with weights as equal as the items allow. So all connections finish at about the
/// same time.
pub(crate) fn spread<T>(things: Vec<(u64, T)>, ways: usize, mut frame: impl FnMut(Vec<T>)) {
    let total = things
        .iter()
        .fold(0, |sum: u64, (bytes, _)| sum.saturating_add(*bytes));
    let ways = ways as u64;
    let frames = match total.div_ceil(FRAME_BYTES) {
        few if few <= ways => few.max(ways.min(total / SHARE_BYTES)).max(1),
        many => many.next_multiple_of(ways),
    };
    let share = total.div_ceil(frames).max(1);
    let mut open = Vec::new();
    let (mut weight, mut done, mut current) = (0, 0u64, 0);
    for (bytes, thing) in things {
        // An item belongs to the share that holds its middle byte.
        let belongs = done.saturating_add(bytes / 2) / share;
        let is_full = bytes.saturating_add(weight) > FRAME_BYTES || open.len() == FRAME_ITEMS;
        if !open.is_empty() && (belongs != current || is_full) {
            frame(std::mem::take(&mut open));
            weight = 0;
        }
        current = belongs;
        weight = bytes.saturating_add(weight);
        done = done.saturating_add(bytes);
        open.push(thing);
    }
    if !open.is_empty() {
        frame(open);
    }
}

/// Combines the outcomes of parts, in order, into the outcomes of the operations. `early` holds the errors of
/// operations that were not sent.
pub(crate) fn join_parts(
    early: Vec<Option<TransferError>>,
    parts: Vec<(usize, Length)>,
    outcomes: Vec<TransferResult>,
) -> Vec<TransferResult> {
    let mut joined: Vec<TransferResult> = early
        .into_iter()
        .map(|error| error.map_or(Ok(Checksum(0)), Err))
        .collect();
    for ((op, length), outcome) in parts.into_iter().zip(outcomes) {
        if let Some(whole) = joined.get_mut(op)
            && let Ok(sum) = *whole
        {
            *whole = outcome.map(|part| combine(sum, part, length));
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;
    use kvpool_types::{Epoch, Extent, Grant, GrantId, SegmentId};

    #[test]
    fn a_large_read_is_cut_without_a_gap() {
        let region = Region::allocate(Length(10 << 20));
        let into: Vec<Slice> = [0u64, 3 << 20, 3 << 20, 9 << 20]
            .iter()
            .zip([3u64 << 20, 0, 6 << 20, 1 << 20])
            .map(|(from, length)| region.slice(Offset(*from), Length(length)).unwrap())
            .collect();
        let read = ReadOp {
            extent: Extent {
                segment: SegmentId(1),
                offset: Offset(4096),
                length: Length(20 << 20),
            },
            from: Offset(100),
            into,
            right: None,
        };
        let mut parts = Vec::new();
        cut_read(7, &read, &mut parts).unwrap();
        let mut next = 100;
        for part in &parts {
            assert_eq!(part.op, 7);
            assert_eq!(part.item.from, Offset(next));
            assert_eq!(total_length(&part.into), part.item.length);
            assert!(part.item.length.0 <= FRAME_BYTES);
            next += part.item.length.0;
        }
        assert_eq!(next, 100 + (10 << 20));
    }

    #[test]
    fn the_longest_block_fits_one_frame_with_its_checksums() {
        let piece = Region::allocate(Length(1 << 20)).whole();
        let write = |length: u64| WriteOp {
            grant: Grant {
                extent: Extent {
                    segment: SegmentId(1),
                    offset: Offset(0),
                    length: Length(length),
                },
                epoch: Epoch(1),
                id: GrantId(1),
                mac: [0; 16],
            },
            from: vec![piece.clone(); Length(length >> 20).as_usize()],
        };
        let longest = Length::MAX_BLOCK.0;
        assert!(write_payload(&write(longest)).unwrap() > longest);
        let longer = write_payload(&write(longest + (1 << 20))).unwrap_err();
        assert_eq!(longer.code, Code::TooLarge);
    }

    #[test]
    fn frames_are_full_but_not_over() {
        let things = [1, 2, 3, 4, 10, 1, 1]
            .map(|weight| (weight, weight))
            .to_vec();
        let mut frames = Vec::new();
        pack(things, 5, |weight, things| frames.push((weight, things)));
        assert_eq!(
            frames,
            [
                (3, vec![1, 2]),
                (3, vec![3]),
                (4, vec![4]),
                (10, vec![10]),
                (2, vec![1, 1])
            ]
        );
    }

    /// The weights of the frames that things with these weights are spread over.
    fn shares(things: impl IntoIterator<Item = u64>, ways: usize) -> Vec<u64> {
        let things = things.into_iter().map(|bytes| (bytes, bytes)).collect();
        let mut frames = Vec::new();
        spread(things, ways, |things| frames.push(things.iter().sum()));
        frames
    }

    #[test]
    fn connections_side_by_side_get_as_much_each() {
        assert_eq!(shares([1 << 20; 32], 2), [4 << 20; 8]);
        assert_eq!(shares([256 << 10; 128], 2), [4 << 20; 8]);
        assert_eq!(shares([8 << 20; 16], 2), [8 << 20; 16]);
        assert_eq!(shares([256 << 10; 8], 2), [1 << 20; 2]);
        assert_eq!(shares([256 << 10; 8], 1), [2 << 20]);
        assert_eq!(shares([3 << 20; 4], 2), [3 << 20; 4]);
        assert_eq!(
            shares([1 << 20; 9], 2),
            [2 << 20, 2 << 20, 3 << 20, 2 << 20]
        );
        // Two cases: too little for two frames, and nothing at all.
        assert_eq!(shares([100; 10], 2), [1000]);
        assert_eq!(shares([], 2), [0; 0]);
        assert_eq!(shares([0], 2), [0]);
        assert_eq!(shares([1; 3000], 1), [1024, 1024, 952]);
    }

    #[test]
    fn one_bad_part_fails_its_operation_alone() {
        let bad = invalid("bad".to_owned());
        let joined = join_parts(
            vec![None, Some(bad.clone()), None],
            vec![
                (0, Length(5)),
                (0, Length(4)),
                (2, Length(1)),
                (2, Length(1)),
            ],
            vec![
                Ok(crate::checksum::checksum(b"12345")),
                Ok(crate::checksum::checksum(b"6789")),
                Err(bad.clone()),
                Ok(Checksum(1)),
            ],
        );
        assert_eq!(
            joined,
            [
                Ok(Checksum(0xae8b_1486_0a79_9888)),
                Err(bad.clone()),
                Err(bad)
            ]
        );
    }
}
