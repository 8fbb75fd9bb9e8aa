//! The node's side of links: queue pairs for a client's offers, and announced writes.
//!
//! The node does not observe the transfers. So a client's access ends with its queue pairs. They
//! are destroyed with the connection that agreed on them, before the guards of the writes announced
//! on it. A host that fences a grant aborts that connection.

use super::device::Fabric;
use super::exposure::Exposure;
use super::matching::{Port, choose};
use super::queue::{Allows, QueuePair};
use super::rail::Rail;
use crate::host::{Abort, Admission, Host, RdmaHost, Refused, WriteGuard};
use crate::memory::{Slice, total_length};

use kvpool_types::wire::data::{ReadRequest, WriteEnd, WriteRequest};
use kvpool_types::wire::rdma::{
    AcceptedOffer, Offer, QueueAddress, RdmaLocated, RdmaOpen, RdmaOpened, Registered,
};
use kvpool_types::{Code, GrantId, Length, SegmentId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};

/// The most queue pairs of one connection.
const MAX_OFFERS: usize = 64;

/// A node's memory, registered on every port.
pub struct Serving {
    fabric: Arc<Fabric>,
    memory: Mutex<Vec<Memory>>,
}

struct Memory {
    whole: Slice,
    exposure: Exposure,
}

impl Serving {
    /// Serves over all ports of a fabric.
    pub fn new(fabric: Arc<Fabric>) -> Self {
        Self {
            fabric,
            memory: Mutex::default(),
        }
    }

    /// Registers a segment on every port, unless it is registered. Locks its pages, which takes a
    /// while.
    ///
    /// # Errors
    ///
    /// As [`Rail::register`].
    pub fn register(&self, whole: &Slice) -> io::Result<()> {
        self.registered(SegmentId(0), whole).map(drop)
    }

    /// The registrations of a segment, one a port. Registers the segment if necessary.
    fn registered(&self, segment: SegmentId, whole: &Slice) -> io::Result<Vec<Registered>> {
        let mut memory = self.memory.lock();
        let same = |known: &&Memory| {
            (known.whole.as_ptr(), known.whole.length()) == (whole.as_ptr(), whole.length())
        };
        if let Some(known) = memory.iter().find(same) {
            return Ok(known.exposure.registrations(segment).collect());
        }
        let exposure = self.fabric.expose(whole)?;
        let places = exposure.registrations(segment).collect();
        memory.push(Memory {
            whole: whole.clone(),
            exposure,
        });
        Ok(places)
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rails = self
            .fabric
            .rails()
            .iter()
            .map(|rail| rail.name().to_owned());
        f.debug_tuple("Serving")
            .field(&rails.collect::<Vec<_>>())
            .finish()
    }
}

/// The registrations around extents of memory that is registered on demand, or the reason for a refusal.
pub(crate) fn located(host: &dyn RdmaHost, request: &ReadRequest) -> RdmaLocated {
    let located = request.items.iter().map(|item| {
        let places = host.registrations(request.incarnation, &item.extent);
        places.map_err(|refused| {
            tracing::debug!(%refused, extent = %item.extent, "locating an extent refused");
            refused.code
        })
    });
    RdmaLocated(located.collect())
}

/// The answer to an offer that no port accepts. No real queue pair has the number 0.
const NOT_ACCEPTED: AcceptedOffer = AcceptedOffer {
    queue: QueueAddress {
        number: 0,
        psn: 0,
        gid: [0; 16],
        lid: 0,
        mtu: 0,
        reads: 0,
    },
    rail: 0,
};

/// Creates and connects the node's queue pair for an offer.
fn connected(rail: &Arc<Rail>, offer: &Offer) -> io::Result<QueuePair> {
    let allows = if offer.writes {
        Allows::Writes
    } else {
        Allows::Reads
    };
    let made = QueuePair::create(rail, allows)?;
    made.connect(&offer.queue)?;
    Ok(made)
}

/// The agreement on one connection.
pub(crate) struct RdmaSession {
    // Dropped in this order: once the queue pairs are gone, no byte arrives under a guard.
    queues: Vec<QueuePair>,
    guards: HashMap<GrantId, Box<dyn WriteGuard>>,
}

impl RdmaSession {
    /// Creates the node's queue pairs for a client's offers.
    pub(crate) fn open(
        serving: &Serving,
        host: &dyn RdmaHost,
        abort: Weak<dyn Abort>,
        request: &RdmaOpen,
    ) -> Result<(Self, RdmaOpened), Refused> {
        if request.offers.is_empty() || request.offers.len() > MAX_OFFERS {
            return Err(Refused {
                code: Code::InvalidArgument,
                message: format!(
                    "{} queue pairs were offered, not 1 to {MAX_OFFERS}",
                    request.offers.len()
                ),
            });
        }
        let failed = |what: &str, error: io::Error| Refused {
            code: Code::Internal,
            message: format!("RDMA: {what}: {error}"),
        };
        let segments = host.memory(request.incarnation, abort)?;
        let rails = serving.fabric.rails();
        let mut registered = Vec::new();
        for (segment, whole) in &segments {
            let places = serving
                .registered(*segment, whole)
                .map_err(|error| failed("registering a segment failed", error))?;
            registered.extend(places);
        }
        let mut queues = Vec::with_capacity(request.offers.len());
        let mut accepted = Vec::with_capacity(request.offers.len());
        let ports: Vec<Option<Port>> = rails.iter().map(|rail| rail.address()).collect();
        let mut loads = vec![0; rails.len()];
        let mut refused = None;
        // A client offers pairs: one queue pair for reads and one for writes, on the same port.
        for pair in request.offers.chunks(2) {
            let at = pair
                .first()
                .and_then(|offer| choose(&ports, &loads, &Port::of(&offer.queue)));
            let rail = at.and_then(|at| Some((rails.get(at)?, u8::try_from(at).ok()?)));
            let made = rail.map(|(rail, at)| {
                let made = pair.iter().map(|offer| connected(rail, offer));
                made.collect::<io::Result<Vec<_>>>().map(|made| (made, at))
            });
            match made {
                Some(Ok((made, rail))) => {
                    if let Some(load) = loads.get_mut(usize::from(rail)) {
                        *load += 1;
                    }
                    accepted.extend(made.iter().map(|made| AcceptedOffer {
                        queue: *made.address(),
                        rail,
                    }));
                    queues.extend(made);
                    continue;
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "connecting a client's queue pair failed");
                    refused = Some(failed("connecting a queue pair failed", error));
                }
                None => tracing::debug!(?pair, "no port of this node reaches the client's port"),
            }
            accepted.extend(pair.iter().map(|_| NOT_ACCEPTED));
        }
        if queues.is_empty() {
            return Err(refused.unwrap_or_else(|| Refused {
                code: Code::Unreachable,
                message: "RDMA: no active port of the node reaches a port of the client".to_owned(),
            }));
        }
        let session = Self {
            queues,
            guards: HashMap::new(),
        };
        Ok((
            session,
            RdmaOpened {
                accepted,
                registered,
            },
        ))
    }

    /// Admits announced writes. The client may start the admitted writes at once.
    pub(crate) fn begin(
        &mut self,
        host: &dyn Host,
        abort: &Arc<impl Abort + 'static>,
        request: &WriteRequest,
    ) -> Vec<Code> {
        let admit = |grant| match host.admit_write(request.incarnation, grant, abort.clone()) {
            Admission::Write(guard) => {
                self.guards.insert(grant.id, guard);
                Code::Ok
            }
            Admission::Refuse(refused) => {
                tracing::debug!(%refused, extent = %grant.extent, "write refused");
                refused.code
            }
        };
        request.grants.iter().map(admit).collect()
    }

    /// Ends writes. Checksums mean that all bytes are in place; none means that they are not.
    pub(crate) fn end(&mut self, host: &dyn Host, request: WriteEnd) -> Vec<Code> {
        let mut written = 0;
        let end = |(grant, sums): (GrantId, Vec<_>)| match self.guards.remove(&grant) {
            None => Code::GrantRefused,
            Some(_) if sums.is_empty() => Code::Ok,
            Some(guard) => {
                let length = total_length(guard.parts());
                if sums.len() as u64 != length.chunks() {
                    return Code::InvalidArgument;
                }
                written += length.0;
                guard.finish(sums)
            }
        };
        let codes = request.items.into_iter().map(end).collect();
        host.count(Length(0), Length(written));
        codes
    }
}

impl Drop for RdmaSession {
    fn drop(&mut self) {
        let announced = self.guards.len();
        tracing::debug!(queues = self.queues.len(), announced, "RDMA link ended");
    }
}
