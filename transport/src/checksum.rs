//! Checksums of bytes as they move: CRC-64/NVME, whose parts can be combined.
//!
//! A block's checksum is the combination of the checksums of its 64 KiB chunks, so that one pass
//! over the bytes gives both. Shared memory is never summed where it lies: what was summed could
//! change before it is used. The private side of a copy is.

// UNSAFETY: sums bytes of a caller's memory in place, through a reference that lives for the sum of
// one piece.
#![allow(unsafe_code, reason = "sums the caller's memory without copying it")]

mod combine;

pub use combine::combine;

use crate::memory::{Slice, streaming, total_length};
use crc_fast::{CrcAlgorithm, Digest};
use kvpool_types::{CHUNK, Checksum, Length, Offset};

/// The bytes that are copied and then summed while they are in the cache. A divisor of a chunk.
const PIECE: u64 = 32 << 10;
/// A copy asks whether to go on before each run of so many bytes: asking for every piece would cost
/// as much as summing a small one.
const RUN: u64 = 256 << 10;
/// A block of so many bytes is put past the caches: it would only drive out what is used.
const STREAMED: u64 = 256 << 10;

/// The checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> Checksum {
    Checksum(crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes))
}

/// The checksum of a whole block out of those of its chunks, in order; `length` is the block's.
pub fn combine_chunks(length: Length, chunks: &[Checksum]) -> Checksum {
    let mut left = length.0;
    chunks.iter().fold(Checksum(0), |whole, chunk| {
        let size = left.min(CHUNK);
        left -= size;
        combine(whole, *chunk, Length(size))
    })
}

/// Sums bytes that come in pieces of any sizes.
#[derive(Clone, Debug)]
pub struct Sum(Digest);

impl Default for Sum {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }
}

impl Sum {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    pub fn finish(&self) -> Checksum {
        Checksum(self.0.finalize())
    }

    /// Adds the first `length` bytes from `from` on of memory that is the caller's own.
    pub(crate) fn update_private(&mut self, slice: &Slice, from: Offset, length: Length) {
        with_private(slice, from, length, |bytes| self.update(bytes));
    }
}

/// Sums a block that comes in pieces of any sizes, chunk by chunk.
#[derive(Clone, Debug, Default)]
pub struct ChunkedSum {
    chunks: Vec<Checksum>,
    open: Sum,
    /// The bytes in the open chunk.
    filled: u64,
    length: u64,
}

/// The checksums of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSums {
    /// Of all bytes.
    pub whole: Checksum,
    /// Of each 64 KiB chunk, in order; the last may be shorter.
    pub chunks: Vec<Checksum>,
}

impl ChunkedSum {
    /// A sum that expects a block of `length` bytes.
    pub fn for_length(length: Length) -> Self {
        Self {
            chunks: Vec::with_capacity(Length(length.chunks()).as_usize()),
            ..Self::default()
        }
    }

    /// Adds bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = Length(CHUNK - self.filled).as_usize();
            let (piece, rest) = bytes.split_at(room.min(bytes.len()));
            self.open.update(piece);
            self.filled += piece.len() as u64;
            self.length += piece.len() as u64;
            if self.filled == CHUNK {
                self.close_chunk();
            }
            bytes = rest;
        }
    }

    /// Adds `length` bytes from `from` on of memory that is the caller's own.
    pub(crate) fn update_private(&mut self, slice: &Slice, from: Offset, length: Length) {
        with_private(slice, from, length, |bytes| self.update(bytes));
    }

    /// The checksums of all bytes so far.
    pub fn finish(self) -> BlockSums {
        let length = Length(self.length);
        let chunks = self.finish_chunks();
        BlockSums {
            whole: combine_chunks(length, &chunks),
            chunks,
        }
    }

    /// Those of the chunks alone.
    pub(crate) fn finish_chunks(mut self) -> Vec<Checksum> {
        if self.filled > 0 {
            self.close_chunk();
        }
        self.chunks
    }

    fn close_chunk(&mut self) {
        self.chunks.push(self.open.finish());
        self.open = Sum::default();
        self.filled = 0;
    }
}

/// Which side of a copy is private to this process, and so is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Private {
    /// What is copied from.
    Source,
    /// What is copied to.
    Destination,
}

/// Copies all of `from` to `to` in pieces, sums each piece on its private side while it is in the
/// cache, and asks `go_on` before each run of a few. `None` when that said no: nothing more was
/// written then.
///
/// Panics unless both have the same total length and `to` is writable.
pub fn copy_with_sum(
    from: &[Slice],
    to: &[Slice],
    private: Private,
    go_on: impl FnMut() -> bool,
) -> Option<BlockSums> {
    let mut sum = ChunkedSum::for_length(total_length(from));
    copy_pieces(from, to, private, go_on, |bytes| sum.update(bytes)).then(|| sum.finish())
}

/// Like [`copy_with_sum`] for one who needs no chunk's checksum, only that of all bytes: saves their
/// combination, and the memory that they would be in.
pub fn copy_with_whole_sum(
    from: &[Slice],
    to: &[Slice],
    private: Private,
    go_on: impl FnMut() -> bool,
) -> Option<Checksum> {
    let mut sum = Sum::default();
    copy_pieces(from, to, private, go_on, |bytes| sum.update(bytes)).then(|| sum.finish())
}

/// Copies piece by piece and hands each piece's private side to `sum`; false when `go_on` said no.
fn copy_pieces(
    from: &[Slice],
    to: &[Slice],
    private: Private,
    mut go_on: impl FnMut() -> bool,
    mut sum: impl FnMut(&[u8]),
) -> bool {
    assert_eq!(
        total_length(from),
        total_length(to),
        "invariant: both sides of a copy have one length"
    );
    let streams = private == Private::Source && total_length(from).0 >= STREAMED;
    let (mut source, mut target) = (Cursor::new(from), Cursor::new(to));
    let mut run = 0;
    while let (Some((source_slice, source_at)), Some((target_slice, target_at))) =
        (source.current(), target.current())
    {
        if run == 0 && !go_on() {
            return false;
        }
        let piece = PIECE
            .min(source_slice.length().0 - source_at.0)
            .min(target_slice.length().0 - target_at.0);
        let bytes = Length(piece).as_usize();
        match private {
            Private::Source => {
                // The sum brings the piece into the cache, from where it is copied.
                with_private(source_slice, source_at, Length(piece), &mut sum);
                if streams {
                    source_slice.stream_to(source_at, target_slice, target_at, bytes);
                } else {
                    source_slice.copy_to(source_at, target_slice, target_at, bytes);
                }
            }
            Private::Destination => {
                source_slice.copy_to(source_at, target_slice, target_at, bytes);
                with_private(target_slice, target_at, Length(piece), &mut sum);
            }
        }
        source.advance(piece);
        target.advance(piece);
        run += piece;
        if run >= RUN {
            run = 0;
        }
    }
    if streams {
        streaming::fence();
    }
    true
}

/// The checksums of memory that others may be changing: each piece is copied and the copy summed.
pub fn sum_shared(slice: &Slice) -> BlockSums {
    let mut scratch = vec![0; Length(PIECE.min(slice.length().0)).as_usize()];
    let mut sum = ChunkedSum::for_length(slice.length());
    let mut at = 0;
    while at < slice.length().0 {
        let piece = PIECE.min(slice.length().0 - at);
        let (copy, _) = scratch.split_at_mut(Length(piece).as_usize());
        slice.read_at(Offset(at), copy);
        sum.update(copy);
        at += piece;
    }
    sum.finish()
}

/// A place in scattered memory.
struct Cursor<'a> {
    slices: std::slice::Iter<'a, Slice>,
    current: Option<&'a Slice>,
    at: u64,
}

impl<'a> Cursor<'a> {
    fn new(slices: &'a [Slice]) -> Self {
        let mut slices = slices.iter();
        let current = slices.next();
        let mut cursor = Self {
            slices,
            current,
            at: 0,
        };
        cursor.advance(0);
        cursor
    }

    fn current(&self) -> Option<(&'a Slice, Offset)> {
        Some((self.current?, Offset(self.at)))
    }

    /// Moves on inside the current slice, and past all that have nothing left.
    fn advance(&mut self, bytes: u64) {
        self.at += bytes;
        while self
            .current
            .is_some_and(|slice| slice.length().0 <= self.at)
        {
            self.current = self.slices.next();
            self.at = 0;
        }
    }
}

fn with_private(slice: &Slice, from: Offset, length: Length, use_bytes: impl FnOnce(&[u8])) {
    if length == Length(0) {
        return;
    }
    let start = slice.range(from, length);
    // SAFETY: the range lies inside a living region, as `range` has checked, which `slice` counts. It
    // is the caller's side of a transfer, which the contract of `Link` keeps unchanged for the time
    // of the transfer; bytes are loaded once and no control flow depends on them, so a caller that
    // breaks the contract gets a checksum that fits no bytes, and nothing worse.
    let bytes = unsafe { std::slice::from_raw_parts(start, length.as_usize()) };
    use_bytes(bytes);
}

#[cfg(test)]
mod tests;
