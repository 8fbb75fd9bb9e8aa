//! Who may be touching an extent right now: receives, announced writes, and pins.

use super::Span;
use kvpool_transport::host::{Abort, Peer, ProcessIdentity};
use kvpool_types::{ClientId, GrantId, Length};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// One process of one client. The client's id is random for each life of a client, so a process id
/// that the system gives out again does not bring a dead client back.
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

/// What touches one extent.
pub(super) enum Toucher {
    /// Bytes come in over TCP.
    Receive { abort: Arc<dyn Abort> },
    /// A process may be writing through its mapping.
    Hold,
    /// Processes read in place, so many times.
    Pins { count: u64 },
}

/// One extent that is being touched.
pub(super) struct Touch {
    /// Who touches it.
    pub(super) toucher: Toucher,
    /// The grant that is written under; the number 0 stands for none.
    pub(super) grant: GrantId,
    /// Whether the grant was closed meanwhile, so that what was written does not count.
    pub(super) closed: bool,
    /// The fence tickets that wait for the end of it.
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

/// What one process holds.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// The bytes of its announced writes and of the extents that it has pinned.
    pub(super) bytes: Length,
    /// Its announced writes.
    pub(super) holds: HashMap<GrantId, Span>,
    /// How often it has pinned each extent.
    pub(super) pins: HashMap<Span, u64>,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.holds.is_empty() && self.pins.is_empty()
    }
}
