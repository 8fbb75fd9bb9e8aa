//! Stores one block: header and data in one write.

use super::Medium;
use super::error::{Invalid, StoreError};
use super::fields::checksum;
use super::header::{Header, StoreNumber, footprint, header_bytes};
use super::load::Loaded;
use super::suspects::Access;
use crate::{Arena, Buffer, Completion, Op, Request};
use kvpool_types::checksum::{CHUNK, combine_chunks};
use kvpool_types::{Checksum, Length, MediumId, Version};
use std::sync::Arc;
use std::time::Instant;

/// The target offset of a store, and the identity of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The offset of the extent, in bytes from the medium's start; a multiple of a granule.
    pub offset: u64,
    /// The number of this store.
    pub number: StoreNumber,
    /// The block's version.
    pub version: Version,
    /// The checksum of the whole block, as its commit stored it.
    pub checksum: Checksum,
}

/// The buffer of a block to be stored. The caller fills it.
#[derive(Debug)]
pub struct Staged {
    buffer: Buffer,
    header: usize,
    length: u64,
    /// The checksums of the chunks, if [`fill`](Self::fill) has computed them.
    chunks: Option<Vec<Checksum>>,
}

impl Staged {
    /// Takes a buffer for a block of `length` bytes from the arena. Waits until `until`, or not at all.
    /// `Ok(None)` means that the arena has no free buffer.
    ///
    /// # Errors
    ///
    /// [`Invalid::Length`] for an empty block, and for a block that is too long.
    pub fn take(
        arena: &Arc<Arena>,
        length: u64,
        until: Option<Instant>,
    ) -> Result<Option<Self>, Invalid> {
        let invalid = Invalid::Length(length);
        let header = Length(header_bytes(length).ok_or(invalid)?).as_usize();
        let whole = Length(footprint(length).ok_or(invalid)?).as_usize();
        let buffer = take(arena, whole, until);
        Ok(buffer.map(|buffer| Self {
            buffer,
            header,
            length,
            chunks: None,
        }))
    }

    /// A verified block, to be stored at another offset. It keeps its buffer. If it waited for another
    /// buffer, it would hold the memory for which others wait.
    pub fn from_loaded(loaded: Loaded) -> Self {
        let (buffer, block, chunks) = loaded.into_parts();
        Self {
            buffer,
            header: block.start,
            length: block.len() as u64,
            chunks: Some(chunks),
        }
    }

    /// The block's bytes. Until they are filled they hold bytes of other blocks, which used the buffer
    /// before.
    pub fn data(&mut self) -> &mut [u8] {
        self.chunks = None;
        self.bytes()
    }

    /// Fills the block chunk by chunk: `read` gets a chunk's offset in the block, and the memory to fill.
    /// Each chunk's checksum is computed while the chunk is in the processor's cache.
    pub fn fill(&mut self, mut read: impl FnMut(u64, &mut [u8])) {
        let chunks = self.bytes().chunks_mut(Length(CHUNK).as_usize());
        let sums = chunks.zip((0u64..).step_by(Length(CHUNK).as_usize()));
        let sums = sums.map(|(chunk, from)| {
            read(from, chunk);
            checksum(chunk)
        });
        let sums = sums.collect();
        self.chunks = Some(sums);
    }

    fn bytes(&mut self) -> &mut [u8] {
        let length = Length(self.length).as_usize();
        let (_, data) = self.buffer.split_at_mut(self.header);
        data.split_at_mut(length).0
    }

    /// Writes the header before the data and the padding after it.
    fn seal(mut self, medium: MediumId, stamp: &Stamp) -> Result<Buffer, Invalid> {
        let length = self.length;
        let chunks = self.chunks.take().unwrap_or_else(|| {
            let chunks = self.bytes().chunks(Length(CHUNK).as_usize());
            chunks.map(checksum).collect()
        });
        if combine_chunks(Length(length), &chunks) != stamp.checksum {
            return Err(Invalid::Checksum);
        }
        let header = Header {
            medium,
            offset: stamp.offset,
            number: stamp.number,
            version: stamp.version,
            length,
            checksum: stamp.checksum,
            chunks,
        };
        let header = header.encode().ok_or(Invalid::Length(length))?;
        let (head, data) = self.buffer.split_at_mut(self.header);
        head.copy_from_slice(&header);
        // The buffer held other blocks before, whose bytes must not reach the disk.
        data.split_at_mut(Length(length).as_usize()).1.fill(0);
        Ok(self.buffer)
    }
}

/// A buffer of the arena. Waits for it until `until`, or not at all.
pub(super) fn take(arena: &Arc<Arena>, bytes: usize, until: Option<Instant>) -> Option<Buffer> {
    match until {
        Some(until) => arena.take_within(bytes, until),
        None => arena.take(bytes),
    }
}

impl Medium {
    /// Stores a block. `done` is called once: on this thread if nothing was written, else on the engine's
    /// thread. A successful store survives a power cut after the next [`flush`](Self::flush).
    ///
    /// This computes the block's checksum on the calling thread, unless [`Staged::fill`] did.
    pub fn store(
        &self,
        staged: Staged,
        stamp: Stamp,
        done: impl FnOnce(Result<(), StoreError>) + Send + 'static,
    ) {
        let (buffer, flight) = match self.prepare(staged, &stamp) {
            Ok(prepared) => prepared,
            Err(invalid) => return done(Err(StoreError::Invalid(invalid))),
        };
        let range = stamp.offset..stamp.offset + buffer.len() as u64;
        let shared = Arc::clone(&self.shared);
        let number = shared.suspects.begin();
        self.engine.submit(Request {
            op: Op::Write(buffer),
            offset: stamp.offset,
            done: Box::new(move |Completion { buffer, result, .. }| {
                drop(buffer);
                shared.judge(number, &range, Access::Write, &result);
                drop(flight);
                done(result.map_err(StoreError::Io));
            }),
        });
    }

    fn prepare(
        &self,
        staged: Staged,
        stamp: &Stamp,
    ) -> Result<(Buffer, super::flights::Flight), Invalid> {
        let range = self.shared.place(stamp.offset, staged.length)?;
        if self.shared.bad.lock().touches(&range) {
            return Err(Invalid::BadRange(stamp.offset));
        }
        let buffer = staged.seal(self.shared.id, stamp)?;
        let flight = self.shared.flights.begin().ok_or(Invalid::Detached)?;
        Ok((buffer, flight))
    }

    /// Makes every store that succeeded before this call survive a power cut. `done` is called once.
    ///
    /// After a failed flush the medium is never marked as clean: the kernel may have dropped the bytes of
    /// successful stores.
    pub fn flush(&self, done: impl FnOnce(Result<(), StoreError>) + Send + 'static) {
        let Some(flight) = self.shared.flights.begin() else {
            return done(Err(StoreError::Invalid(Invalid::Detached)));
        };
        let shared = Arc::clone(&self.shared);
        self.engine.submit(Request {
            op: Op::Flush,
            offset: 0,
            done: Box::new(move |completion| {
                if completion.result.is_err() {
                    shared.note_failed_flush();
                }
                drop(flight);
                done(completion.result.map_err(StoreError::Io));
            }),
        });
    }
}
