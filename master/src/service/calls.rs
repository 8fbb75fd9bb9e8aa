//! What the pool is asked, whichever way it comes: each call takes its protobuf request and gives its
//! reply.

mod admin;
mod encoding;
mod reads;
mod writes;

use super::refused::{Refused, refused};
use super::request::{Caller, caller, check_leads};
use crate::directory::Replica;
use crate::leadership::Seat;
use crate::membership::StoreNode;
use crate::placement::Segments;
use crate::pool::{Pool, Presence};
use kvpool_proto as proto;
use kvpool_types::{ClientId, Code, Epoch};
use std::sync::Arc;
use std::time::Duration;

/// The calls of a pool.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    pool: Arc<Pool>,
    /// Over whose framed connection they come.
    writer: Option<ClientId>,
}

/// The calls of the pool that is led from here. A caller who is refused counts as heard.
pub(super) fn calls_at(seat: &Seat, caller: Option<&proto::Caller>) -> Result<Calls, Refused> {
    seat.pool().map(Calls::new).map_err(|elsewhere| {
        if let Some(caller) = caller {
            seat.contacts.client(&caller.client_id);
        }
        refused(Code::NotLeader, elsewhere.reason)
    })
}

impl Calls {
    /// The calls of `pool`.
    const fn new(pool: Arc<Pool>) -> Self {
        Self { pool, writer: None }
    }

    /// Has the calls come over a framed connection of a client, and notes that it is there while what
    /// this returns lives.
    pub(super) fn come_from(&mut self, client: &proto::Caller) -> Option<Presence> {
        let client = ClientId::from_slice(&client.client_id)?;
        self.writer = Some(client);
        Some(self.pool.enter_writer(client))
    }

    /// The term of this master.
    pub(super) fn epoch(&self) -> Epoch {
        self.pool.epoch
    }

    /// Waits until the pool knows which of its nodes are back. Questions about which blocks are
    /// there, and puts, are asked after it.
    pub(super) async fn nodes_returned(&self) {
        self.pool.nodes_returned().await;
    }

    /// Whether [`Calls::nodes_returned`] would wait.
    pub(super) fn have_nodes_returned(&self) -> bool {
        self.pool.have_nodes_returned()
    }

    fn caller(&self, from: Option<&proto::Caller>) -> Result<Caller, Refused> {
        caller(&self.pool, from)
    }

    /// The same of a call that changes something.
    fn writer(&self, from: Option<&proto::Caller>) -> Result<Caller, Refused> {
        let caller = self.caller(from)?;
        check_leads(&self.pool)?;
        Ok(caller)
    }

    fn outcomes(&self, codes: &[Code]) -> proto::Outcomes {
        proto::Outcomes {
            epoch: self.pool.epoch.0,
            codes: wire(codes),
        }
    }
}

/// The node table of one reply: each node once, named by its index.
#[derive(Default)]
struct NodeTable {
    nodes: Vec<Arc<StoreNode>>,
}

impl NodeTable {
    fn index(&mut self, segments: &Segments<'_>, replica: &Replica) -> Option<u32> {
        let node = &segments.get(replica.segment)?.node;
        let at = match self.nodes.iter().position(|known| Arc::ptr_eq(known, node)) {
            Some(at) => at,
            None => {
                self.nodes.push(Arc::clone(node));
                self.nodes.len() - 1
            }
        };
        u32::try_from(at).ok()
    }

    fn into_wire(self) -> Vec<proto::NodeAddress> {
        self.nodes
            .iter()
            .map(|node| {
                let address = node.address();
                proto::NodeAddress {
                    name: node.name.0.clone(),
                    incarnation: bytes(&node.incarnation.to_bytes()),
                    data_address: address.data,
                    shm_path: address.shm_path,
                    host_id: bytes(&address.host.to_bytes()),
                }
            })
            .collect()
    }
}

fn bytes(raw: &[u8]) -> ::bytes::Bytes {
    ::bytes::Bytes::copy_from_slice(raw)
}

fn wire(codes: &[Code]) -> Vec<u32> {
    codes.iter().map(|code| code.to_wire().into()).collect()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn optional_ms(ms: u64) -> Option<Duration> {
    (ms > 0).then(|| Duration::from_millis(ms))
}
