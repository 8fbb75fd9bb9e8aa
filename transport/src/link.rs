//! The client's side of every transport.
//!
//! A link joins one client to one incarnation of one node over one transport. All work is given in batches,
//! and every item of a batch gets its own outcome. A link keeps the regions of a batch alive until the I/O on
//! them has ended.
//!
//! Cancellation: dropping a returned future detaches the transfer. The transfer continues to its
//! end or its deadline; dropping never frees memory in use.

use crate::memory::Slice;
use futures::future::BoxFuture;
use kvpool_types::{Checksum, Code, Epoch, Extent, Grant, Length, Offset, ReadRight};
use std::time::Instant;

/// The transport of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// Shared memory with a node on the same host.
    Shm,
    /// One-sided reads and writes over RDMA verbs.
    Rdma,
    /// TCP to any host.
    Tcp,
}

/// A read of one range of one extent.
#[derive(Clone, Debug)]
pub struct ReadOp {
    /// The whole extent, as the master named it.
    pub extent: Extent,
    /// The first byte to read, relative to the extent.
    pub from: Offset,
    /// The destination, in order. Its total length is the length of the read.
    pub into: Vec<Slice>,
    /// The permission to read, for a node that requires one.
    pub right: Option<ReadRight>,
}

/// An extent whose checksums are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumsOp {
    /// The whole extent, as the master named it.
    pub extent: Extent,
    /// The permission to read the extent, for a node that requires one.
    pub right: Option<ReadRight>,
}

impl From<Extent> for SumsOp {
    /// A request for the checksums of `extent` without a permission.
    fn from(extent: Extent) -> Self {
        Self {
            extent,
            right: None,
        }
    }
}

/// A write of one whole extent.
#[derive(Clone, Debug)]
pub struct WriteOp {
    /// The proof of permission to write.
    pub grant: Grant,
    /// The source, in order. Its total length equals the extent's.
    pub from: Vec<Slice>,
}

/// Why one item of a batch failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct TransferError {
    /// The stable code. [`Code::is_retryable`] says whether another attempt may succeed.
    pub code: Code,
    /// A message for people.
    pub message: String,
}

/// The outcome of one item: the checksum of all moved bytes.
pub type TransferResult = Result<Checksum, TransferError>;

/// The connections of one client to one incarnation of one node.
///
/// The suite `tests/conformance` holds every implementation to this contract.
pub trait Link: Send + Sync + std::fmt::Debug {
    /// The transport.
    fn kind(&self) -> TransportKind;

    /// Reads ranges. The outcome is the checksum of the bytes in `into`, which the caller compares with the
    /// expected one. Every item ends by `deadline`, and after it the link writes nothing to any `into`.
    ///
    /// # Errors
    ///
    /// One outcome an item: the node's code, [`Code::Unreachable`] when the connection failed, or
    /// [`Code::DeadlineExceeded`].
    fn read(
        &self,
        epoch: Epoch,
        ops: Vec<ReadOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>>;

    /// Reads a small batch (64 KiB in all) on the calling thread, if no wait is needed. `None` means that the
    /// caller must use [`Link::read`]. The outcomes are the same as those of `read`.
    fn read_now(
        &self,
        epoch: Epoch,
        ops: &[ReadOp],
        deadline: Instant,
    ) -> Option<Vec<TransferResult>> {
        let _ = (epoch, ops, deadline);
        None
    }

    /// Writes whole extents. On success all bytes are in place at the node.
    ///
    /// # Errors
    ///
    /// As for [`Link::read`]. After an error the extent's content is unspecified.
    fn write(
        &self,
        ops: Vec<WriteOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>>;

    /// The checksums of each extent's 64 KiB chunks, as its writer gave them to the node.
    ///
    /// # Errors
    ///
    /// As for [`Link::read`].
    fn sums(
        &self,
        epoch: Epoch,
        ops: Vec<SumsOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>>;

    /// Pins an extent at the node and returns its mapped memory, read-only. Dropping the last clone
    /// of the slice removes the pin.
    ///
    /// # Errors
    ///
    /// As for [`Link::read`]. [`Code::InvalidArgument`] on a link that does not use shared memory.
    fn pin(
        &self,
        epoch: Epoch,
        extent: Extent,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>>;

    /// Pins like [`Link::pin`], at once and without a request to the node. `None` means that the caller must
    /// use `pin`, which returns the reason. The pin protects the bytes only if the caller's lease still runs
    /// *after* the return: see [`crate::shm::board`].
    fn pin_now(&self, epoch: Epoch, extent: Extent) -> Option<Slice> {
        let _ = (epoch, extent);
        None
    }

    /// Whether the link still works. A failed link stays failed: open another.
    fn is_open(&self) -> bool;

    /// Ends the link, for a caller that knows the node to be gone. Transfers under way fail with
    /// [`Code::Unreachable`] at once, without waiting for a new connection. This has no effect on a link that
    /// never reconnects.
    fn close(&self) {}
}

impl ReadOp {
    /// The number of bytes to read.
    pub fn length(&self) -> Length {
        crate::memory::total_length(&self.into)
    }
}
