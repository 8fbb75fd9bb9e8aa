//! The trait that a store node implements, and that the serving side of every transport asks before
//! it touches a byte.
//!
//! ```text
//!  frame in ──► server (tcp/, shm/) ──► Host::admit_* ──► guard ──► bytes move ──► guard dropped
//! ```
//!
//! A guard is the host's record that an extent is being touched: while one lives, the extent cannot
//! be reported fenced.

use crate::memory::Slice;
use crate::shm::board::Board;
use kvpool_types::wire::data::{Hello, HelloReply, ReadItem, WriteRequest};
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{
    Checksum, ClientId, Code, Epoch, Extent, Grant, GrantId, Incarnation, Length, SegmentId,
};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// Why a host refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Refused {
    /// The stable code.
    pub code: Code,
    /// The same for people, with the values that matter.
    pub message: String,
}

/// Something that can stop the I/O of one connection at once: a TCP server gives one with each
/// admitted write, so that fencing can end a receive in progress.
pub trait Abort: Send + Sync {
    /// Stops the connection's I/O. The guard is dropped soon after.
    fn abort(&self);
}

/// A receive into one extent, in progress. Dropping it without [`WriteGuard::finish`] says that the
/// bytes are not all there.
pub trait WriteGuard: Send {
    /// The memory to write, exactly as long as the extent.
    fn target(&self) -> &Slice;
    /// Records that all bytes are in place, and their chunk checksums.
    fn finish(self: Box<Self>, sums: Vec<Checksum>) -> Code;
}

/// What became of the admission of one write.
pub enum Admission {
    /// Write the bytes through the guard.
    Write(Box<dyn WriteGuard>),
    /// Skip the bytes and answer with this.
    Refuse(Refused),
}

/// The process behind a Unix-socket connection. The host keeps what the process holds until it
/// gives it up or dies; a closed connection alone frees nothing, since mappings outlive it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Which client it said it is at hello.
    pub client: ClientId,
    /// A pidfd of the process: readable once it is gone.
    pub process: Arc<OwnedFd>,
    /// What tells the process from others.
    pub identity: ProcessIdentity,
    /// Its process id, for messages; 0 when it is in a pid namespace that cannot be seen from here.
    pub pid: i32,
}

/// What tells a process from all others that live: the first of these that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProcessIdentity {
    /// The number of its pidfd's inode. From Linux 6.9 on no two processes have the same.
    Inode(u64),
    /// Its process id, which is not 0.
    Pid(i32),
    /// The client in it: it cannot be seen from here, and a client's id is random for each life of a
    /// client. A process with two clients then counts as two.
    Client(ClientId),
}

/// A store node, as its transports see it. Calls do not block on I/O.
pub trait Host: Send + Sync + 'static {
    /// Judges a hello: cluster, versions, checksum algorithm, incarnation, token.
    fn hello(&self, hello: &Hello) -> Result<HelloReply, Refused>;

    /// The node's present epoch.
    fn epoch(&self) -> Epoch;

    /// Judges a read and gives the memory to read from, exactly `item.length` long.
    fn admit_read(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
    ) -> Result<Slice, Refused>;

    /// Judges a write that comes over TCP or RDMA: incarnation, epoch, proof, range, not fenced, not
    /// written before, no other receive into the extent in progress.
    fn admit_write(
        &self,
        incarnation: Incarnation,
        grant: &Grant,
        abort: Arc<dyn Abort>,
    ) -> Admission;

    /// Writes blocks whose bytes are here already: each is judged like by [`Host::admit_write`], then
    /// copied into place and recorded, with nothing in between. One code a grant, in order. `payload`
    /// is as long as the request says.
    fn write_now(&self, request: &WriteRequest, payload: &[u8]) -> Vec<Code>;

    /// The chunk checksums of an extent.
    fn sums(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        extent: &Extent,
    ) -> Result<Vec<Checksum>, Refused>;

    /// The memory of every segment, whole, to be registered with devices. Who may write it is the
    /// matter of [`Host::admit_write`]. A host that gives the incarnation up aborts the connection
    /// that asked.
    fn memory(
        &self,
        incarnation: Incarnation,
        abort: Weak<dyn Abort>,
    ) -> Result<Vec<(SegmentId, Slice)>, Refused>;

    /// Where the ports of this host find the registered memory around an extent, for a peer that has
    /// queue pairs here. Of a host whose segments stay, [`Host::memory`] has told all.
    fn places(
        &self,
        _incarnation: Incarnation,
        _extent: &Extent,
    ) -> Result<Vec<Registered>, Refused> {
        Err(Refused {
            code: Code::InvalidArgument,
            message: "a node's segments are told of when a link is opened".to_owned(),
        })
    }

    /// A descriptor of a segment's memory and its size; read-only unless `writable`.
    fn map(
        &self,
        incarnation: Incarnation,
        segment: SegmentId,
        writable: bool,
    ) -> Result<(OwnedFd, Length), Refused>;

    /// A pin board for one connection of `peer`, and the descriptor that the peer maps it by. The
    /// connection keeps the board for as long as it lives; once the host alone has it, no view can be
    /// taken on it any more and it may be closed and, when nothing is pinned on it, forgotten.
    fn board(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
    ) -> Result<(Arc<Board>, OwnedFd), Refused>;

    /// Records that `peer` is about to write through its mapping under each of these grants; an answer
    /// each, in order. Judged like [`Host::admit_write`].
    fn begin_shm_writes(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
        grants: &[Grant],
    ) -> Vec<Code>;

    /// Records that `peer` has stopped writing under each of these grants: with all bytes in place where
    /// there are sums. An answer each, in order.
    fn end_shm_writes(&self, peer: &Peer, items: Vec<(GrantId, Vec<Checksum>)>) -> Vec<Code>;

    /// Pins an extent for a view.
    fn pin(&self, peer: &Peer, epoch: Epoch, incarnation: Incarnation, extent: &Extent) -> Code;

    /// Undoes one pin.
    fn unpin(&self, peer: &Peer, extent: &Extent) -> Code;

    /// Frees all that the process of `peer` holds: called once the process is gone.
    fn peer_gone(&self, peer: &Peer);

    /// Counts bytes served and taken, for metrics.
    fn count(&self, read: Length, written: Length);
}
