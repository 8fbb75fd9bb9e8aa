//! The touches of extents: receives, loads, announced writes, and pins.

use super::Span;
use kvpool_transport::host::{Abort, Peer, ProcessIdentity};
use kvpool_types::{ClientId, GrantId, Length};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// One process of one client. A client's id is random for each life of a client. So a reused process id is
/// not taken for an earlier client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PeerKey {
    client: ClientId,
    process: ProcessIdentity,
    pid: i32,
}

impl From<&Peer> for PeerKey {
    fn from(peer: &Peer) -> Self {
        Self {
            client: peer.client,
            process: peer.identity,
            pid: peer.pid,
        }
    }
}

#[cfg(test)]
impl PeerKey {
    pub(crate) const fn new(client: ClientId, pid: i32) -> Self {
        let process = ProcessIdentity::Pid(pid);
        Self {
            client,
            process,
            pid,
        }
    }
}

impl fmt::Display for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {} (pid {})", self.client, self.pid)
    }
}

/// The kind of a touch.
pub(super) enum Toucher {
    /// A write over TCP or RDMA, or a copy from another node.
    Receive { abort: Arc<dyn Abort> },
    /// A load from a medium, until the block is verified or given up.
    Load,
    /// A process that may be writing through its mapping.
    Hold,
    /// Processes that read the extent in place, with the number of their pins.
    Pins { count: u64 },
}

/// One extent that is being touched.
pub(super) struct Touch {
    /// The kind of the touch.
    pub(super) toucher: Toucher,
    /// The grant under which the toucher writes; 0 for none.
    pub(super) grant: GrantId,
    /// Whether the grant was closed meanwhile, so that the written bytes do not count.
    pub(super) closed: bool,
    /// The fence tickets that wait for the end of the touch.
    pub(super) tickets: Vec<u64>,
}

impl Touch {
    pub(super) const fn new(toucher: Toucher, grant: GrantId) -> Self {
        Self {
            toucher,
            grant,
            closed: false,
            tickets: Vec::new(),
        }
    }
}

impl fmt::Debug for Touch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.toucher {
            Toucher::Receive { .. } => "receive",
            Toucher::Load => "load",
            Toucher::Hold => "hold",
            Toucher::Pins { .. } => "pins",
        };
        f.debug_struct("Touch")
            .field("kind", &kind)
            .field("grant", &self.grant)
            .field("closed", &self.closed)
            .field("tickets", &self.tickets)
            .finish()
    }
}

/// The extents that one process holds.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// The bytes of its announced writes and pinned extents.
    pub(super) bytes: Length,
    /// Its announced writes.
    pub(super) holds: HashMap<GrantId, Span>,
    /// The number of its pins of each extent.
    pub(super) pins: HashMap<Span, u64>,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.pins.is_empty()
    }
}
