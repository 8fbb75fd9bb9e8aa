//! The trait that a store node implements. The serving side of every transport asks it before it
//! touches a byte.
//!
//! ```text
//!  frame in ──► server (tcp/, shm/) ──► Host::admit_* ──► guard ──► bytes move ──► guard dropped
//!
//!  Host: every transport    RdmaHost: Host + registration    ShmHost: Host + mappings, pins
//! ```
//!
//! A guard records that bytes of an extent are being touched. While a guard lives, the host must
//! not report the extent as fenced.

use crate::memory::Slice;
use crate::shm::board::Board;
use kvpool_types::wire::data::{Hello, HelloReply, ReadItem, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{
    Checksum, ClientId, Code, Epoch, Extent, Grant, GrantId, Incarnation, Length, Offset, SegmentId,
};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A refusal by the host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refused {
    /// The stable code.
    pub code: Code,
    /// A message for people, with the values that matter.
    pub message: String,
}

/// Stops the I/O of one connection at once. A TCP server passes one with each admitted write, so
/// that fencing can end a receive in progress.
pub trait Abort: Send + Sync {
    /// Stops the connection's I/O. The connection drops its guard soon after.
    fn abort(&self);
    /// Whether the write ends soon after [`Abort::abort`]. A load lasts until its disk answers.
    fn ends_soon(&self) -> bool {
        true
    }
}

/// A receive into one extent, in progress. Dropping it without [`WriteGuard::finish`] means that
/// bytes are missing.
pub trait WriteGuard: Send {
    /// The memory to write, in order, exactly as long as the extent.
    fn parts(&self) -> &[Slice];
    /// Copies bytes to offset `from` of the extent. Panics unless they lie inside.
    fn write_at(&self, from: Offset, bytes: &[u8]) {
        let (mut skip, mut rest) = (from.0, bytes);
        for part in self.parts() {
            let length = part.length().0;
            if skip >= length {
                skip -= length;
                continue;
            }
            let fits = Length(length - skip).as_usize().min(rest.len());
            let (here, after) = rest.split_at(fits);
            part.write_at(Offset(skip), here);
            (skip, rest) = (0, after);
        }
        assert!(rest.is_empty(), "invariant: bytes lie inside the extent");
    }
    /// Whether [`WriteGuard::take`] should get the bytes. Otherwise the transport may write them into the parts
    /// itself.
    fn takes_bytes(&self) -> bool {
        false
    }
    /// Takes the next bytes of the extent. Only the caller can change them. The transport gives all bytes in
    /// order, or none.
    fn take(&mut self, bytes: &[u8]) {
        let _ = bytes;
    }
    /// Records that all bytes are in place, with their chunk checksums. Returns the outcome of the
    /// write.
    fn finish(self: Box<Self>, sums: Vec<Checksum>) -> Code;
}

/// The verdict on one write.
pub enum Admission {
    /// Write the bytes through the guard.
    Write(Box<dyn WriteGuard>),
    /// Skip the bytes and answer with the refusal.
    Refuse(Refused),
}

/// The process behind a Unix-socket connection. The host keeps the pins and writes of the process
/// until the process ends them or dies. A closed connection frees nothing, because mappings outlive
/// it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The client id from the hello.
    pub client: ClientId,
    /// A pidfd of the process; readable once the process has exited.
    pub process: Arc<OwnedFd>,
    /// The identity that tells the process from others.
    pub identity: ProcessIdentity,
    /// The process id, for messages; 0 when the process is in a pid namespace that this host cannot
    /// see.
    pub pid: i32,
}

/// Identifies a live process. The first known variant is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProcessIdentity {
    /// The inode number of the pidfd. Since Linux 6.9 it is unique among processes.
    Inode(u64),
    /// The process id, never 0.
    Pid(i32),
    /// The client inside the process, when neither of the others is known. A client's id is random
    /// for each of its lives, so a process with two clients counts as two.
    Client(ClientId),
}

/// A store node, as its transports see it. Calls do not block on I/O.
///
/// A refusal carries a stable code, such as `WrongIncarnation`, `StaleEpoch` or `OutOfRange`.
pub trait Host: Send + Sync + 'static {
    /// Judges a hello: cluster, versions, checksum algorithm, incarnation, token.
    fn hello(&self, hello: &Hello) -> Result<HelloReply, Refused>;

    /// Whether the caller behind an accepted hello may access memory directly: map it, or read and write it
    /// over RDMA. Another caller still reads and writes over TCP.
    fn memory_right(&self, hello: &Hello) -> Result<(), Refused> {
        let _ = hello;
        Ok(())
    }

    /// The node's current epoch.
    fn epoch(&self) -> Epoch;

    /// Judges a read. Returns the memory to read, exactly `item.length` bytes. The read ends when the slice is
    /// dropped; until then the host may stop it by `abort`.
    fn admit_read(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
        abort: &Arc<dyn Abort>,
    ) -> Result<Slice, Refused>;

    /// Judges a write over TCP or RDMA: incarnation, epoch, proof, range. Refuses a fenced extent,
    /// a used grant, and a second receive into the same extent.
    fn admit_write(
        &self,
        incarnation: Incarnation,
        grant: &Grant,
        abort: Arc<dyn Abort>,
    ) -> Admission;

    /// Writes blocks whose bytes have arrived. Each block is judged like [`Host::admit_write`], copied into its
    /// extent and recorded, in one step. Returns one code per grant, in order. `payload` has the length that the
    /// request states.
    fn write_now(&self, request: &WriteRequest, payload: &[u8]) -> Vec<Code>;

    /// The chunk checksums of the whole extent of `item`, as its writer gave them.
    fn sums(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
    ) -> Result<Vec<Checksum>, Refused>;

    /// Adds to the byte counters of the metrics.
    fn count(&self, read: Length, written: Length);

    /// Records the time from the end of a request's meta to its answer, for metrics.
    fn served(&self, op: Op, took: Duration) {
        let _ = (op, took);
    }
}

/// A host whose memory RDMA devices can access: the data port opens RDMA links to it.
pub trait RdmaHost: Host {
    /// The memory of every segment, for registration with devices. [`Host::admit_write`] decides
    /// about writes to it. When the incarnation ends, the host aborts the connection through
    /// `abort`.
    fn memory(
        &self,
        incarnation: Incarnation,
        abort: Weak<dyn Abort>,
    ) -> Result<Vec<(SegmentId, Slice)>, Refused>;

    /// The registrations around an extent, one for each port of this host, for a peer with queue
    /// pairs here. A store node refuses: its segments do not change, and [`RdmaHost::memory`] names
    /// them all.
    fn registrations(
        &self,
        _incarnation: Incarnation,
        _extent: &Extent,
    ) -> Result<Vec<Registered>, Refused> {
        Err(Refused {
            code: Code::InvalidArgument,
            message: "a store node names its segments when a link opens".to_owned(),
        })
    }
}

/// A host whose memory other processes of its machine map, behind a Unix socket.
pub trait ShmHost: Host {
    /// A descriptor of a segment's memory, and its size in bytes. The descriptor is read-only
    /// unless `writable`.
    fn map(
        &self,
        incarnation: Incarnation,
        segment: SegmentId,
        writable: bool,
    ) -> Result<(OwnedFd, Length), Refused>;

    /// Creates a pin board for one connection of `peer`, and the descriptor by which the peer maps
    /// it. The connection keeps the board while it lives. Once only the host has it, no new view
    /// can be taken on it. The host may then close it, and forget it when nothing is pinned on it.
    fn board(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
    ) -> Result<(Arc<Board>, OwnedFd), Refused>;

    /// Records that `peer` starts to write through its mapping under these grants. Judges like
    /// [`Host::admit_write`]. Returns one code a grant, in order.
    fn begin_shm_writes(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
        grants: &[Grant],
    ) -> Vec<Code>;

    /// Records that `peer` has stopped writing under these grants. Checksums mean that all bytes
    /// are in place; none means that they are not. Returns one code a grant, in order.
    fn end_shm_writes(&self, peer: &Peer, items: Vec<(GrantId, Vec<Checksum>)>) -> Vec<Code>;

    /// Pins an extent for a view.
    fn pin(&self, peer: &Peer, epoch: Epoch, incarnation: Incarnation, extent: &Extent) -> Code;

    /// Removes one pin that was taken in this incarnation, which may be over.
    fn unpin(&self, peer: &Peer, incarnation: Incarnation, extent: &Extent) -> Code;

    /// Returns for each of these clients whether it still holds or has pinned anything. None of the clients
    /// has a connection, and none gets one during the call. So a client that holds nothing cannot take
    /// anything either.
    ///
    /// The caller holds a lock: the host must not wait for one of its connections.
    fn still_hold(&self, peers: &[Peer]) -> Vec<bool>;

    /// Frees everything that the process of `peer` holds. Called after the process has exited.
    fn peer_gone(&self, peer: &Peer);
}
