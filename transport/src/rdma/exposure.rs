//! Memory that peers may access: one registration per port, and its description for peers.

use super::device::Fabric;
use super::registry::{Access, Registration};
use crate::memory::Slice;
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{Length, SegmentId};
use std::io;

/// Memory registered for peers on every port of a fabric. It owns the registrations, which end when
/// it is dropped.
#[derive(Debug)]
pub(crate) struct Exposure {
    /// One registration per rail, in order.
    registrations: Vec<Registration>,
}

impl Fabric {
    /// Lets peers with queue pairs on these ports read and write the memory. Locks the pages, which
    /// takes a while.
    pub(crate) fn expose(&self, memory: &Slice) -> io::Result<Exposure> {
        let rails = self.rails().iter();
        let registrations = rails.map(|rail| rail.register(memory, Access::RemoteReadWrite));
        Ok(Exposure {
            registrations: registrations.collect::<io::Result<_>>()?,
        })
    }
}

impl Exposure {
    /// The registration on each port, as a segment or a part of one.
    pub(crate) fn registrations(&self, segment: SegmentId) -> impl Iterator<Item = Registered> {
        (0..)
            .zip(&self.registrations)
            .map(move |(rail, registration)| Registered {
                rail,
                segment,
                address: registration.address(),
                length: Length(registration.length()),
                rkey: registration.rkey(),
            })
    }

    /// Deregisters the memory. After success no port lets a peer touch it, and transfers in
    /// progress fail at the peer.
    pub(crate) fn end(self) -> io::Result<()> {
        let mut outcome = Ok(());
        for registration in self.registrations {
            // A failure must not keep the other registrations.
            outcome = outcome.and(registration.undo());
        }
        outcome
    }
}
