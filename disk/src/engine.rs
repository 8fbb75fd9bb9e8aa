//! The interface of an engine: requests, completions and errors.

use crate::GRANULE;
use crate::arena::Buffer;
use kvpool_transport::Slice;
use kvpool_types::Offset;
use rustix::io::Errno;
use std::fmt;
use std::io;

/// The operation of a request.
#[derive(Debug)]
pub enum Op {
    /// Fill the buffer.
    Read(Buffer),
    /// Fill the buffer, and the memory with the bytes after it. The memory begins at a multiple of a granule.
    /// Others may read it meanwhile.
    ReadInto(Buffer, Slice),
    /// Write the whole buffer.
    Write(Buffer),
    /// Make durable every write that was completed before this request was submitted.
    Flush,
}

/// One request to an engine.
pub struct Request {
    /// The operation.
    pub op: Op,
    /// The first byte, as an offset into the device; 0 for a flush.
    pub offset: u64,
    /// Called once with the outcome, on a thread of the engine. The function must not wait for I/O or for another
    /// request, because the thread has other completions to serve. It may compute briefly: a store node verifies
    /// a block of up to 2 MiB here if no other transfer is in progress.
    pub done: Box<dyn FnOnce(Completion) + Send>,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}", self.op, self.offset)
    }
}

impl Op {
    /// The bytes of the range.
    pub fn length(&self) -> u64 {
        match self {
            Self::Read(buffer) | Self::Write(buffer) => buffer.len() as u64,
            Self::ReadInto(buffer, memory) => buffer.len() as u64 + memory.length().0,
            Self::Flush => 0,
        }
    }

    /// Whether this is a read.
    pub fn is_read(&self) -> bool {
        matches!(self, Self::Read(_) | Self::ReadInto(..))
    }

    /// Fills the targets of a read with the bytes of its range. Does nothing for other operations.
    ///
    /// # Panics
    ///
    /// Panics unless there are as many bytes as the range has.
    pub fn fill(&mut self, bytes: &[u8]) {
        match self {
            Self::Read(buffer) => buffer.copy_from_slice(bytes),
            Self::ReadInto(buffer, memory) => {
                let (first, rest) = bytes.split_at(buffer.len());
                buffer.copy_from_slice(first);
                assert!(rest.len() as u64 == memory.length().0);
                memory.write_at(Offset(0), rest);
            }
            Self::Write(_) | Self::Flush => {}
        }
    }
}

/// The outcome of a request.
#[derive(Debug)]
pub struct Completion {
    /// The buffer of a read or write, also after an error. `None` when the kernel may still use the buffer.
    pub buffer: Option<Buffer>,
    /// The memory of an [`Op::ReadInto`], by the same rule.
    pub memory: Option<Slice>,
    /// The result. After an error the contents of a read's buffer, or of a write's range, are undefined.
    pub result: Result<(), IoError>,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// The device or file ended within the range.
    #[error("the device ended after {done} of {wanted} bytes")]
    Short {
        /// The bytes of the request.
        wanted: u64,
        /// The bytes that were transferred.
        done: u64,
    },
    /// The filesystem has no space for the write, in spite of preallocation.
    #[error("no space is left for the write")]
    NoSpace,
    /// The device, file or filesystem is read-only.
    #[error("the device is read-only")]
    ReadOnly,
    /// The device could not read or write the range.
    #[error("the device failed: {0}")]
    Medium(io::Error),
    /// The device is no longer there.
    #[error("the device is gone: {0}")]
    Gone(io::Error),
    /// The range does not lie inside the device.
    #[error("the range exceeds the device")]
    OutOfRange,
    /// The offset, the length or the address of the memory is not a multiple of a granule.
    #[error("the range is not aligned to {GRANULE} bytes")]
    Unaligned,
    /// Any other error.
    #[error(transparent)]
    System(io::Error),
}

impl IoError {
    /// Whether the host failed and not the device: it has no memory, or it interrupted the request.
    pub fn is_of_host(&self) -> bool {
        let Self::System(error) = self else {
            return false;
        };
        match Errno::from_io_error(error) {
            Some(errno) => matches!(
                errno,
                Errno::NOMEM | Errno::FAULT | Errno::NOBUFS | Errno::INTR | Errno::AGAIN
            ),
            // The engine itself gave the request up.
            None => true,
        }
    }
}

impl From<Errno> for IoError {
    fn from(errno: Errno) -> Self {
        let error = io::Error::from(errno);
        match errno {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Self::NoSpace,
            Errno::ROFS | Errno::PERM => Self::ReadOnly,
            // The descriptor is the engine's own and open, so this error means that it is not open for
            // writing.
            Errno::BADF => Self::ReadOnly,
            Errno::IO | Errno::ILSEQ | Errno::NODATA | Errno::TIMEDOUT | Errno::REMOTEIO => {
                Self::Medium(error)
            }
            Errno::NODEV | Errno::NXIO | Errno::NOMEDIUM | Errno::STALE | Errno::SHUTDOWN => {
                Self::Gone(error)
            }
            _ => Self::System(error),
        }
    }
}

/// The kind of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineKind {
    /// io_uring.
    Uring,
    /// A pool of threads with blocking calls.
    Threads,
    /// Memory, for tests.
    Memory,
}

/// Serves requests on one device, in any order.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Takes a request, without waiting for the device. Every request ends with one call of its `done`, also
    /// when the engine is dropped.
    fn submit(&self, request: Request);

    /// The size of the device in bytes.
    fn size(&self) -> u64;

    /// The kind of this engine.
    fn kind(&self) -> EngineKind;

    /// The number of requests that have not ended.
    fn in_flight(&self) -> usize;
}

impl Completion {
    /// The outcome of an operation, whose memory nobody uses any more.
    pub fn of(op: Op, result: Result<(), IoError>) -> Self {
        let (buffer, memory) = match op {
            Op::Read(buffer) | Op::Write(buffer) => (Some(buffer), None),
            Op::ReadInto(buffer, memory) => (Some(buffer), Some(memory)),
            Op::Flush => (None, None),
        };
        Self {
            buffer,
            memory,
            result,
        }
    }
}

impl Request {
    /// Ends the request with `result`.
    pub(crate) fn end(self, result: Result<(), IoError>) {
        (self.done)(Completion::of(self.op, result));
    }

    /// Checks the range against a device of `size` bytes.
    pub(crate) fn check(&self, size: u64) -> Result<(), IoError> {
        let (granule, length) = (GRANULE as u64, self.op.length());
        let is_unaligned = match &self.op {
            Op::ReadInto(_, memory) => !memory.as_ptr().addr().is_multiple_of(GRANULE),
            _ => false,
        };
        if is_unaligned || !self.offset.is_multiple_of(granule) || !length.is_multiple_of(granule) {
            return Err(IoError::Unaligned);
        }
        match self.offset.checked_add(length) {
            Some(end) if end <= size => Ok(()),
            _ => Err(IoError::OutOfRange),
        }
    }
}
