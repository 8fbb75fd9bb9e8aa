//! Loads one block. The load returns only bytes that the checksums prove.

use super::error::{Invalid, Wrong};
use super::flights::Flight;
use super::wanted::Wanted;
use super::{Medium, Shared};
use crate::{Buffer, Completion, IoError, Op, Request};
use kvpool_transport::Slice;
use kvpool_types::{Checksum, MediumId};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A verified block. The drop returns its buffer to the arena.
#[derive(Debug)]
pub struct Loaded {
    buffer: Buffer,
    range: Range<usize>,
    chunks: Vec<Checksum>,
}

impl Deref for Loaded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(self.range.clone()).unwrap_or_default()
    }
}

impl Loaded {
    /// The buffer, the range of the block's bytes in it, and the checksums of the block's chunks.
    pub(super) fn into_parts(self) -> (Buffer, Range<usize>, Vec<Checksum>) {
        (self.buffer, self.range, self.chunks)
    }
}

/// A block that was read into memory of the kind `M` and is not verified yet.
#[derive(Debug)]
struct Unverified<M> {
    read: Result<M, Wrong>,
    wanted: Wanted,
    shared: Arc<Shared>,
}

impl<M> Unverified<M> {
    /// Returns the result of `prove`, or the error of the read. Counts a failure by its kind.
    fn verify<T>(
        self,
        prove: impl FnOnce(&Wanted, MediumId, M) -> Result<T, Wrong>,
    ) -> Result<T, Wrong> {
        let Self {
            read,
            wanted,
            shared,
        } = self;
        let proved = read.and_then(|memory| prove(&wanted, shared.id, memory));
        proved.inspect_err(|wrong| shared.wrong.count(wrong))
    }
}

/// A block that was read into the arena and is not verified yet. Its bytes are not accessible before
/// [`verify`](Self::verify).
///
/// Verification of 16 MiB takes 1 to 2 ms. A caller that must not delay the engine's thread verifies
/// on a thread of its own.
#[derive(Debug)]
#[must_use]
pub struct Arrival(Unverified<Buffer>);

impl Arrival {
    /// Returns the block if the header and every chunk prove it. Counts a failure by its kind.
    pub fn verify(self) -> Result<Loaded, Wrong> {
        self.0.verify(|wanted, medium, buffer| {
            let chunks = wanted.verify(medium, &buffer, |_, _| ())?;
            Ok(Loaded {
                buffer,
                range: wanted.block(),
                chunks,
            })
        })
    }

    /// Passes each chunk to `sink`, with its offset in the block. A chunk is passed once the header and its
    /// checksum prove it. Returns the checksums of the chunks. After an error `sink` has got some chunks, and the
    /// block must not be used.
    pub fn deliver(self, sink: impl FnMut(u64, &[u8])) -> Result<Vec<Checksum>, Wrong> {
        self.0
            .verify(|wanted, medium, buffer| wanted.verify(medium, &buffer, sink))
    }

    /// Drops the bytes without verifying them. After a failed read this is the error, which counts by its kind.
    pub fn give_up(self) -> Result<(), Wrong> {
        self.0.verify(|_, _, _| Ok(()))
    }
}

/// A block that was read straight into memory and is not verified yet. Until [`verify`](Self::verify) has
/// returned, the memory counts as being written.
#[derive(Debug)]
#[must_use]
pub struct Landing(Unverified<(Buffer, Slice)>);

impl Landing {
    /// Returns the checksums of the chunks in memory if the header and these checksums prove the block. Counts a
    /// failure by its kind. After an error the memory holds other bytes, and must not be used.
    pub fn verify(self) -> Result<Vec<Checksum>, Wrong> {
        self.0
            .verify(|wanted, medium, (header, memory)| wanted.verify_in(medium, &header, &memory))
    }
}

impl Medium {
    /// Reads a block with its header into a buffer of the arena. `done` is called once: on this thread if
    /// nothing was read, else on the engine's thread. The load fails unless the buffer comes from `wanted`.
    pub fn load_into_arena(
        &self,
        wanted: Wanted,
        buffer: Buffer,
        done: impl FnOnce(Arrival) + Send + 'static,
    ) {
        let is_right = buffer.len() as u64 == wanted.footprint;
        let op = is_right.then_some(Op::Read(buffer));
        self.load(wanted, op, |buffer, _| buffer, |read| done(Arrival(read)));
    }

    /// Reads a block straight into memory, and its header into a buffer. `done` is called once: on this
    /// thread if nothing was read, else on the engine's thread. The load fails unless the memory
    /// [fits](Wanted::fits), and the buffer comes from `wanted`.
    ///
    /// The memory may be written until the load ends, however long the device takes. A caller that must know the
    /// end gives the memory a [hook](Slice::with_hook): the hook is dropped once the kernel no longer uses the memory.
    pub fn load_into(
        &self,
        wanted: Wanted,
        header: Buffer,
        memory: Slice,
        done: impl FnOnce(Landing) + Send + 'static,
    ) {
        let is_right = wanted.fits(&memory) && header.len() as u64 == wanted.header;
        let op = is_right.then_some(Op::ReadInto(header, memory));
        self.load(wanted, op, Option::zip, |read| done(Landing(read)));
    }

    /// Reads a block with one request. `op` is `None` if the caller's memory is not right for the block.
    /// `memory_of` returns the memory of the completed request, if the engine gave it back.
    fn load<M: 'static>(
        &self,
        wanted: Wanted,
        op: Option<Op>,
        memory_of: fn(Option<Buffer>, Option<Slice>) -> Option<M>,
        done: impl FnOnce(Unverified<M>) + Send + 'static,
    ) {
        let shared = Arc::clone(&self.shared);
        let (op, range, flight) = match self.begin(&wanted, op) {
            Ok(begun) => begun,
            Err(invalid) => {
                let read = Err(Wrong::Invalid(invalid));
                return done(Unverified {
                    read,
                    wanted,
                    shared,
                });
            }
        };
        let offset = wanted.offset;
        let number = shared.suspects.begin();
        let finished = move |completion: Completion| {
            let Completion {
                buffer,
                memory,
                result,
            } = completion;
            let read = shared.judge_read(number, &range, result);
            let read = read.and_then(|()| memory_of(buffer, memory).ok_or_else(kept));
            drop(flight);
            done(Unverified {
                read,
                wanted,
                shared,
            });
        };
        self.engine.submit(Request {
            op,
            offset,
            done: Box::new(finished),
        });
    }

    /// The operation of a load, the range of the block's extent, and the flight of the load.
    fn begin(&self, wanted: &Wanted, op: Option<Op>) -> Result<(Op, Range<u64>, Flight), Invalid> {
        let length = wanted.expected.length;
        let op = op.ok_or(Invalid::Length(length))?;
        let range = self.shared.place(wanted.offset, length)?;
        let flight = self.shared.flights.begin().ok_or(Invalid::Detached)?;
        Ok((op, range, flight))
    }
}

/// The error of a request whose buffer did not come back.
fn kept() -> Wrong {
    let error = std::io::Error::other("the engine kept a buffer");
    Wrong::Io(IoError::System(error))
}
