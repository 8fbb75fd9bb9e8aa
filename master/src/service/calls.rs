//! The calls of the pool, independent of the protocol: each takes its protobuf request and returns
//! its reply.

mod admin;
mod encoding;
mod reads;
mod replicas;
mod signing;
mod tenancy;
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
    /// The client whose framed connection carries the calls.
    writer: Option<ClientId>,
}

/// The calls of the pool that this master leads. If it leads none, the caller counts as a recent
/// contact.
pub(super) fn calls_at(seat: &Seat, caller: Option<&proto::Caller>) -> Result<Calls, Refused> {
    seat.pool().map(Calls::new).map_err(|elsewhere| {
        // A client id that does not parse is not recorded: the contacts keep ids only.
        if let Some(client) = caller.and_then(|caller| ClientId::from_slice(&caller.client_id)) {
            seat.contacts.client(client);
        }
        refused(Code::NotLeader, elsewhere.reason)
    })
}

impl Calls {
    /// The calls of `pool`.
    const fn new(pool: Arc<Pool>) -> Self {
        Self { pool, writer: None }
    }

    /// Binds the calls to a framed connection of a client. The client counts as present until the
    /// result is dropped.
    pub(super) fn come_from(&mut self, client: &proto::Caller) -> Option<Presence> {
        let client = ClientId::from_slice(&client.client_id)?;
        self.writer = Some(client);
        Some(self.pool.enter_writer(client))
    }

    /// Notes the latency of a call, for metrics.
    pub(super) fn took(&self, op: &str, took: Duration) {
        self.pool.metrics.request(op, took);
    }

    /// True while the master leads the pool of these calls.
    pub(super) fn are_led_at(&self, seat: &Seat) -> bool {
        seat.pool().is_ok_and(|led| Arc::ptr_eq(&led, &self.pool))
    }

    /// The epoch of this master's term.
    pub(super) fn epoch(&self) -> Epoch {
        self.pool.epoch
    }

    /// Waits until the pool knows which of its nodes have returned. Puts and questions about
    /// present blocks depend on that.
    pub(super) async fn nodes_returned(&self) {
        self.pool.nodes_returned().await;
    }

    /// True when lookups may have to wait for media.
    pub(super) fn have_media(&self) -> bool {
        self.pool.has_media()
    }

    /// True when [`Calls::nodes_returned`] would return at once.
    pub(super) fn have_nodes_returned(&self) -> bool {
        self.pool.have_nodes_returned()
    }

    fn caller(&self, from: Option<&proto::Caller>) -> Result<Caller, Refused> {
        caller(&self.pool, from)
    }

    /// [`Calls::caller`], and a check that the caller may change metadata now.
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

/// The node table of one reply. The table lists each node once, and extents name nodes by index.
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
