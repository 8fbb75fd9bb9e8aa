//! The trait that every way of moving bytes implements, seen from a client.
//!
//! A link joins one client to one incarnation of one node over one transport. All work is given in
//! batches; every item of a batch gets its own outcome. A link owns the regions it was given until
//! the I/O on them has ended: dropping the returned future detaches the transfer, it never frees.

use crate::memory::Slice;
use futures::future::BoxFuture;
use kvpool_types::{Checksum, Code, Epoch, Extent, Grant, Length, Offset};
use std::time::Instant;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// Shared memory with a node on the same host.
    Shm,
    /// One-sided reads and writes over RDMA verbs.
    Rdma,
    /// TCP to any host.
    Tcp,
}

/// One range of one extent, and the memory that is to take it.
#[derive(Clone, Debug)]
pub struct ReadOp {
    /// The whole extent, as the master named it.
    pub extent: Extent,
    /// Where in the extent to begin.
    pub from: Offset,
    /// The destination, in order; its total length is what is read.
    pub into: Vec<Slice>,
}

/// One grant, and the memory that its extent is to be written from.
#[derive(Clone, Debug)]
pub struct WriteOp {
    /// The right to write.
    pub grant: Grant,
    /// The source, in order; its total length is the extent's.
    pub from: Vec<Slice>,
}

/// Why one item of a batch did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct TransferError {
    /// The stable code; [`Code::is_retryable`] says whether another try may help.
    pub code: Code,
    /// The same for people.
    pub message: String,
}

/// What became of one item: the checksum of the bytes that were moved, all of them.
pub type TransferResult = Result<Checksum, TransferError>;

/// One way to one incarnation of one node.
///
/// Conformance: `tests/conformance.rs` holds every implementation to what is said here.
pub trait Link: Send + Sync + std::fmt::Debug {
    /// Which way the bytes go.
    fn kind(&self) -> TransportKind;

    /// Reads ranges. The outcome's checksum is of the bytes now in `into`; comparing it is the
    /// caller's work. Every item has ended, one way or the other, by `deadline`: after it nothing
    /// is written to any `into`.
    fn read(
        &self,
        epoch: Epoch,
        ops: Vec<ReadOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>>;

    /// Does a batch of reads at once, on the calling thread, when that takes no waiting and moves
    /// few bytes (64 KiB in all); else `None`, and the caller does [`Link::read`]. The outcomes are
    /// those that `read` would give.
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
    fn write(
        &self,
        ops: Vec<WriteOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>>;

    /// The checksums of each extent's 64 KiB chunks, as its writer gave them to the node.
    fn sums(
        &self,
        epoch: Epoch,
        extents: Vec<Extent>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>>;

    /// Pins an extent at the node and gives the mapped memory, read-only; dropping the slice's last
    /// clone undoes the pin. Only shared memory can.
    fn pin(
        &self,
        epoch: Epoch,
        extent: Extent,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>>;

    /// Pins like [`Link::pin`], at once and without asking the node; `None` when that cannot be done
    /// now, and the caller does `pin`, which also tells why. The pin protects the bytes only if the
    /// caller's lease still runs *after* this returns: see [`crate::shm::board`].
    fn pin_now(&self, epoch: Epoch, extent: Extent) -> Option<Slice> {
        let _ = (epoch, extent);
        None
    }

    /// False once the link has failed: it will not come back, open another.
    fn is_open(&self) -> bool;
}

impl ReadOp {
    /// The bytes that the operation reads.
    pub fn length(&self) -> Length {
        crate::memory::total_length(&self.into)
    }
}
