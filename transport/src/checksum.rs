//! Checksums of bytes as they move: CRC-64/NVME, whose parts can be combined.
//!
//! A block's checksum is the combination of the checksums of its 64 KiB chunks, so one pass gives
//! both. This module never sums shared memory in place: another process could change the bytes
//! after the sum. It sums the private side of a copy.

// UNSAFETY: sums a caller's memory in place, through a reference that lives while one piece is
// summed.
#![allow(unsafe_code, reason = "sums the caller's memory without copying it")]

pub use kvpool_types::checksum::{combine, combine_chunks};

use crate::memory::{Slice, streaming, total_length};
use crc_fast::{CrcAlgorithm, Digest};
use kvpool_types::{CHUNK, Checksum, Length, Offset};

/// The bytes that are copied and then summed while they are in the cache. A chunk is a multiple of this.
const PIECE: u64 = 32 << 10;
/// The bytes between two calls of `go_on`. A call for every piece would cost as much as the sum of a small
/// piece.
const RUN: u64 = 256 << 10;

/// The CRC-64/NVME of `bytes`.
pub fn checksum(bytes: &[u8]) -> Checksum {
    Checksum(crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes))
}

/// An incremental checksum over pieces of any size.
#[derive(Clone, Debug)]
pub struct Sum(Digest);

impl Default for Sum {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }
}

impl Sum {
    /// Adds `bytes` to the sum.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    pub fn finish(&self) -> Checksum {
        Checksum(self.0.finalize())
    }

    /// Adds `length` bytes from `from` on, of memory that no other process can change.
    pub(crate) fn update_private(&mut self, slice: &Slice, from: Offset, length: Length) {
        with_private(slice, from, length, |bytes| self.update(bytes));
    }
}

/// An incremental checksum of a block and of each of its chunks.
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
    /// The checksum of the whole block.
    pub whole: Checksum,
    /// The checksum of each 64 KiB chunk, in order. The last chunk may be shorter.
    pub chunks: Vec<Checksum>,
}

impl ChunkedSum {
    /// Reserves room for the chunks of a block of `length` bytes.
    pub fn for_length(length: Length) -> Self {
        Self {
            chunks: Vec::with_capacity(Length(length.chunks()).as_usize()),
            ..Self::default()
        }
    }

    /// Adds `bytes` to the sum.
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

    /// Adds `length` bytes from `from` on, of memory that no other process can change.
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

    /// The checksums of the chunks alone.
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

/// The side of a copy that only this process can change. That side is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Private {
    /// The source of the copy.
    Source,
    /// The target of the copy.
    Destination,
}

/// Copies all of `from` to `to` in pieces, and sums each piece on its private side while it is in
/// the cache. Calls `go_on` before each run of pieces. Returns `None` when `go_on` returned false:
/// the copy stopped there.
///
/// # Panics
///
/// Panics unless both sides have the same total length and `to` is writable.
pub fn copy_with_sum(
    from: &[Slice],
    to: &[Slice],
    private: Private,
    go_on: impl FnMut() -> bool,
) -> Option<BlockSums> {
    let mut sum = ChunkedSum::for_length(total_length(from));
    copy_pieces(from, to, private, go_on, |bytes| sum.update(bytes)).then(|| sum.finish())
}

/// [`copy_with_sum`] without the checksums of the chunks, which saves the memory for them and their
/// combination.
pub fn copy_with_whole_sum(
    from: &[Slice],
    to: &[Slice],
    private: Private,
    go_on: impl FnMut() -> bool,
) -> Option<Checksum> {
    let mut sum = Sum::default();
    copy_pieces(from, to, private, go_on, |bytes| sum.update(bytes)).then(|| sum.finish())
}

/// Copies piece by piece and passes each piece's private side to `sum`. False when `go_on` stopped
/// the copy.
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
    let streams = private == Private::Source && total_length(from).0 >= streaming::STREAMED;
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
                // The sum loads the piece into the cache; the copy reads it from there.
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

/// Sums memory that other processes may change: it copies each piece and sums the copy.
pub fn sum_shared(slice: &Slice) -> BlockSums {
    let mut sum = ChunkedSum::for_length(slice.length());
    with_copies(std::slice::from_ref(slice), |copy| sum.update(copy));
    sum.finish()
}

/// [`sum_shared`] of scattered memory, for the chunks only.
pub(crate) fn chunk_sums_shared(parts: &[Slice]) -> Vec<Checksum> {
    let mut sum = ChunkedSum::for_length(total_length(parts));
    with_copies(parts, |copy| sum.update(copy));
    sum.finish_chunks()
}

/// [`sum_shared`] of scattered memory, for all bytes together.
pub(crate) fn whole_sum_shared(parts: &[Slice]) -> Checksum {
    let mut sum = Sum::default();
    with_copies(parts, |copy| sum.update(copy));
    sum.finish()
}

/// Copies memory piece by piece, and passes each copy on.
fn with_copies(parts: &[Slice], mut pass: impl FnMut(&[u8])) {
    let longest = parts.iter().map(|part| part.length().0).max();
    let mut scratch = vec![0; Length(PIECE.min(longest.unwrap_or(0))).as_usize()];
    for part in parts {
        let mut at = 0;
        while at < part.length().0 {
            let piece = PIECE.min(part.length().0 - at);
            let (copy, _) = scratch.split_at_mut(Length(piece).as_usize());
            part.read_at(Offset(at), copy);
            pass(copy);
            at += piece;
        }
    }
}

/// A position in scattered memory.
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

    /// Advances inside the current slice, and skips slices that are used up.
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
    // SAFETY: the range lies inside a living region, as `range` has checked, and `slice` keeps the
    // region alive. The bytes are the caller's side of a transfer, which the contract of `Link`
    // keeps unchanged during the transfer. Each byte is loaded once and no control flow depends on
    // it. A caller that breaks the contract gets a wrong checksum, and nothing worse.
    let bytes = unsafe { std::slice::from_raw_parts(start, length.as_usize()) };
    use_bytes(bytes);
}

#[cfg(test)]
mod tests;
