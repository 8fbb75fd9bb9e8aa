//! Memory that peers may touch: one registration a port, and how peers are told of it.

use super::device::Fabric;
use super::registry::{Access, Registration};
use crate::memory::Slice;
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{Length, SegmentId};
use std::io;

/// Memory that is registered for peers on every port of a fabric. Nobody else has a hold of the
/// registrations, so that they end with this.
#[derive(Debug)]
pub(crate) struct Exposure {
    /// One a rail, in order.
    registrations: Vec<Registration>,
}

impl Fabric {
    /// Lets peers whose queue pairs are on these ports read and write the memory. Locks its pages, which
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
    /// Where each port finds the memory, as a segment or a part of one.
    pub(crate) fn places(&self, segment: SegmentId) -> impl Iterator<Item = Registered> {
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

    /// Ends it: when this has succeeded, no port lets a peer touch the memory any more, and what was
    /// under way fails at the peer.
    pub(crate) fn end(self) -> io::Result<()> {
        let mut outcome = Ok(());
        for registration in self.registrations {
            // One that fails must not keep the others.
            outcome = outcome.and(registration.undo());
        }
        outcome
    }
}
