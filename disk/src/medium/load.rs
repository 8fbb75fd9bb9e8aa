//! Loads one block, or a range of it. The load returns only bytes that the checksums prove.

use super::error::{Invalid, Wrong};
use super::flights::Flight;
use super::wanted::{Room, Wanted};
use super::{Medium, Shared};
use crate::{Buffer, Completion, IoError, Op, Request};
use kvpool_transport::Slice;
use kvpool_types::{Checksum, Length};
use parking_lot::Mutex;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Verified bytes of a block. The drop returns their buffer to the arena.
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
    /// The checksums of the chunks that contain the bytes, which match them.
    pub fn chunks(&self) -> &[Checksum] {
        &self.chunks
    }

    /// The buffer, and the range of the block's bytes in it.
    pub fn into_parts(self) -> (Buffer, Range<usize>) {
        (self.buffer, self.range)
    }

    fn new(room: Room, wanted: &Wanted, chunks: Vec<Checksum>) -> Self {
        let (buffer, from) = match room.data {
            Some(data) => (data, wanted.data.start),
            None => (room.head, 0),
        };
        let start = Length(wanted.header + wanted.range.start - from).as_usize();
        let length = Length(wanted.range.end - wanted.range.start).as_usize();
        Self {
            buffer,
            range: start..start + length,
            chunks,
        }
    }
}

/// Bytes that were read and are not verified yet. They are not accessible before [`verify`](Self::verify).
///
/// Verification of 16 MiB takes 1 to 2 ms. A caller that must not delay the engine's thread verifies
/// on a thread of its own.
#[derive(Debug)]
#[must_use]
pub struct Arrival {
    read: Result<Room, Wrong>,
    wanted: Arc<Wanted>,
    shared: Arc<Shared>,
}

impl Arrival {
    /// Returns the bytes if the header and every chunk of the range prove them. Counts a failure by its kind.
    pub fn verify(self) -> Result<Loaded, Wrong> {
        let Self {
            read,
            wanted,
            shared,
        } = self;
        let loaded = read.and_then(|room| {
            let chunks = wanted.verify(shared.id, &room, |_, _| ())?;
            Ok(Loaded::new(room, &wanted, chunks))
        });
        loaded.inspect_err(|wrong| shared.wrong.count(wrong))
    }

    /// Passes each chunk of the range to `sink`, with its offset in the block. A chunk is passed once the
    /// header and its checksum prove it. Returns the checksums of the chunks. After an error `sink` has got
    /// some chunks, and the block must not be used.
    pub fn deliver(self, sink: impl FnMut(u64, &[u8])) -> Result<Vec<Checksum>, Wrong> {
        let Self {
            read,
            wanted,
            shared,
        } = self;
        let chunks = read.and_then(|room| wanted.verify(shared.id, &room, sink));
        chunks.inspect_err(|wrong| shared.wrong.count(wrong))
    }

    /// Drops the bytes without verifying them. After a failed read this is the error, which counts by its kind.
    pub fn give_up(self) -> Result<(), Wrong> {
        let Self { read, shared, .. } = self;
        read.map(drop)
            .inspect_err(|wrong| shared.wrong.count(wrong))
    }
}

/// A whole block that was read straight into memory and is not verified yet. Until [`verify`](Self::verify) has
/// returned, the memory counts as being written.
#[derive(Debug)]
#[must_use]
pub struct Landing {
    read: Result<(Buffer, Slice), Wrong>,
    wanted: Wanted,
    shared: Arc<Shared>,
}

impl Landing {
    /// Returns the checksums of the chunks in memory if the header and these checksums prove the block. Counts a
    /// failure by its kind. After an error the memory holds other bytes, and must not be used.
    pub fn verify(self) -> Result<Vec<Checksum>, Wrong> {
        let Self {
            read,
            wanted,
            shared,
        } = self;
        let chunks = read.and_then(|(head, memory)| wanted.verify_in(shared.id, &head, &memory));
        chunks.inspect_err(|wrong| shared.wrong.count(wrong))
    }
}

/// The state that the requests of one load share. The completion of the last one continues the load.
struct Pending<F> {
    head: Option<Buffer>,
    data: Option<Buffer>,
    failure: Option<Wrong>,
    left: usize,
    done: Option<F>,
}

impl Medium {
    /// Reads bytes of a block. `done` is called once: on this thread if nothing was read, else on the
    /// engine's thread. `room` must come from `wanted`; the load fails otherwise.
    pub fn load(&self, wanted: Wanted, room: Room, done: impl FnOnce(Arrival) + Send + 'static) {
        let begun = self.begin(&wanted);
        let shared = Arc::clone(&self.shared);
        let wanted = Arc::new(wanted);
        let flight = match begun {
            Ok((_, flight)) => flight,
            Err(invalid) => {
                let read = Err(Wrong::Invalid(invalid));
                return done(Arrival {
                    read,
                    wanted,
                    shared,
                });
            }
        };
        let Room { head, data } = room;
        let apart = data.map(|data| (data, wanted.offset + wanted.data.start, false));
        let reads = [Some((head, wanted.offset, true)), apart];
        let pending = Arc::new(Mutex::new(Pending {
            head: None,
            data: None,
            failure: None,
            left: reads.iter().flatten().count(),
            done: Some((done, flight)),
        }));
        for (buffer, offset, is_head) in reads.into_iter().flatten() {
            let pending = Arc::clone(&pending);
            let shared = Arc::clone(&shared);
            let wanted = Arc::clone(&wanted);
            let range = offset..offset + buffer.len() as u64;
            let number = shared.suspects.begin();
            let finished = move |Completion { buffer, result, .. }: Completion| {
                let result = shared.judge_read(number, &range, result);
                let Some((room, (done, flight))) = pending.lock().answer(buffer, is_head, result)
                else {
                    return;
                };
                drop(flight);
                done(Arrival {
                    read: room,
                    wanted,
                    shared,
                });
            };
            self.engine.submit(Request {
                op: Op::Read(buffer),
                offset,
                done: Box::new(finished),
            });
        }
    }
}

impl Medium {
    /// Reads a whole block straight into memory, and its header into a buffer. `done` is called once: on this
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
        let length = wanted.expected.length;
        let shared = Arc::clone(&self.shared);
        let is_right = wanted.fits(&memory) && header.len() as u64 == wanted.header;
        let begun = match is_right {
            true => self.begin(&wanted),
            false => Err(Invalid::Length(length)),
        };
        let (range, flight) = match begun {
            Ok(begun) => begun,
            Err(invalid) => {
                let read = Err(Wrong::Invalid(invalid));
                return done(Landing {
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
            let read = read.and_then(|()| buffer.zip(memory).ok_or_else(kept));
            drop(flight);
            done(Landing {
                read,
                wanted,
                shared,
            });
        };
        self.engine.submit(Request {
            op: Op::ReadInto(header, memory),
            offset,
            done: Box::new(finished),
        });
    }
}

impl Medium {
    /// The range of the block's extent, and the flight of its load.
    fn begin(&self, wanted: &Wanted) -> Result<(Range<u64>, Flight), Invalid> {
        let range = self.shared.place(wanted.offset, wanted.expected.length)?;
        let flight = self.shared.flights.begin().ok_or(Invalid::Detached)?;
        Ok((range, flight))
    }
}

/// The error of a request whose buffer did not come back.
fn kept() -> Wrong {
    let error = std::io::Error::other("the engine kept a buffer");
    Wrong::Io(IoError::System(error))
}

impl<F> Pending<F> {
    /// Takes one completion. The last one returns the buffers or the first failure, and the function to call.
    fn answer(
        &mut self,
        buffer: Option<Buffer>,
        is_head: bool,
        result: Result<(), Wrong>,
    ) -> Option<(Result<Room, Wrong>, F)> {
        if let Err(wrong) = result {
            self.failure.get_or_insert(wrong);
        }
        let slot = if is_head {
            &mut self.head
        } else {
            &mut self.data
        };
        *slot = buffer;
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return None;
        }
        let room = match (self.failure.take(), self.head.take()) {
            (Some(wrong), _) => Err(wrong),
            (None, None) => Err(kept()),
            (None, Some(head)) => Ok(Room {
                head,
                data: self.data.take(),
            }),
        };
        Some((room, self.done.take()?))
    }
}
