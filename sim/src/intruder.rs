//! A process that belongs to nobody. It tries what no client and no node of ours would: forged and old grants, a
//! reservation of nothing, the name of a node, an epoch that never was. All of it is to be refused.

use crate::checks::leading;
use crate::dice::{Dice, Stream};
use crate::load::name;
use crate::net::NodePort;
use crate::plan::{Process, tenant_name};
use crate::world::World;
use kvpool_master::pool::Pool;
use kvpool_proto as proto;
use kvpool_transport::host::Abort;
use kvpool_types::wire::data::{ReadItem, WriteRequest};
use kvpool_types::wire::keys::pack;
use kvpool_types::{Code, Epoch, Extent, Grant, GrantId, Incarnation, Length, Offset};
use prost::Message;
use proto::node_message::Body;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

/// The number of the intruder's process.
const INTRUDER: usize = 97;
/// An epoch that no history reaches.
pub(crate) const NO_EPOCH: Epoch = Epoch(1_000_000);
/// How long a master may take to answer a registration.
const ANSWER: Duration = Duration::from_millis(500);

/// What the intruder reads goes nowhere.
#[derive(Debug)]
struct NoConnection;

impl Abort for NoConnection {
    fn abort(&self) {}
}

impl World {
    /// Tries everything once at a node, and at its master.
    pub(crate) async fn intrude(self: Arc<Self>, node: usize) {
        let visit = self.visits.fetch_add(1, Ordering::Relaxed);
        let dice = Dice::new(self.plan.seed, Stream::Intruder(visit));
        if let Some(port) = self.net.node(node) {
            self.write_without_grant(&port, &dice);
            self.write_with_old_grants(&port, node);
            self.read_without_location(&port);
        }
        self.reserve_nothing().await;
        self.register_as(node).await;
    }

    /// The pool that leads, if one does.
    fn leader(&self) -> Option<(usize, Arc<Pool>)> {
        leading(self).into_iter().next()
    }

    /// The pool that leads, if it sends readers to this life of a node.
    fn leader_of(&self, port: &NodePort) -> Option<Arc<Pool>> {
        let (_, pool) = self.leader()?;
        let incarnation = port.node.incarnation();
        let members = pool.members.all();
        let mut here = members.iter();
        let is_here = here.any(|one| one.incarnation == incarnation && one.is_readable());
        (is_here && port.node.is_connected()).then_some(pool)
    }

    /// Bytes of a node's first segment, whoever has them.
    fn some_extent(pool: &Pool, port: &NodePort) -> Option<Extent> {
        let segments = pool.placement.segments();
        let incarnation = port.node.incarnation();
        let mut all = segments.iter();
        let segment = all.find(|segment| segment.node.incarnation == incarnation)?;
        Some(Extent {
            segment: segment.id,
            offset: Offset(0),
            length: Length(4096),
        })
    }

    fn write(&self, port: &NodePort, grant: Grant, what: &str) {
        let request = WriteRequest {
            incarnation: port.node.incarnation(),
            grants: vec![grant],
        };
        let bytes = vec![0xee; grant.extent.length.as_usize()];
        let mut payload = bytes.clone();
        let mut sums = kvpool_transport::checksum::ChunkedSum::for_length(grant.extent.length);
        sums.update(&bytes);
        for sum in &sums.finish().chunks {
            payload.extend_from_slice(&sum.0.to_le_bytes());
        }
        let codes = port.node.host().write_now(&request, &payload);
        if codes.contains(&Code::Ok) {
            self.load
                .violate(format!("a node writes with {what}: {grant:?}"));
        }
    }

    /// Reads whatever is there, without a location that the leader signed.
    fn read_without_location(&self, port: &NodePort) {
        let Some(pool) = self.leader_of(port).filter(|_| self.plan.has_signed_reads) else {
            return;
        };
        let Some(extent) = Self::some_extent(&pool, port) else {
            return;
        };
        let item = ReadItem::whole(extent);
        let abort: Arc<dyn Abort> = Arc::new(NoConnection);
        let host = port.node.host();
        let incarnation = port.node.incarnation();
        let is_read = host
            .admit_read(pool.epoch, incarnation, &item, &abort)
            .is_ok();
        if is_read || host.sums(pool.epoch, incarnation, &item).is_ok() {
            self.load
                .violate("a node reads without a signed location".to_owned());
        }
    }

    /// Writes over whatever is there, with a grant that nobody signed.
    fn write_without_grant(&self, port: &NodePort, dice: &Dice) {
        let Some((_, pool)) = self.leader() else {
            return;
        };
        if let Some(extent) = Self::some_extent(&pool, port) {
            let grant = Grant {
                extent,
                epoch: pool.epoch,
                id: GrantId(dice.below(1 << 40)),
                mac: [0x5a; 16],
            };
            self.write(port, grant, "a grant that nobody signed");
        }
    }

    /// Writes with grants of terms that are over, once the node has heard of the present one.
    fn write_with_old_grants(&self, port: &NodePort, node: usize) {
        let Some(pool) = self.leader_of(port) else {
            return;
        };
        let incarnation = port.node.incarnation();
        for grant in self.net.grants_of(incarnation) {
            if grant.epoch < pool.epoch && grant.extent.length.0 <= 16 << 10 {
                self.write(
                    port,
                    grant,
                    &format!("a grant of an earlier term at n{node}"),
                );
            }
        }
    }

    async fn reserve_nothing(&self) {
        let Some((number, pool)) = self.leader() else {
            return;
        };
        let Some(cluster) = *self.net.cluster.lock() else {
            return;
        };
        let request = proto::ReserveRequest {
            caller: Some(proto::Caller {
                cluster_id: cluster.to_bytes().to_vec().into(),
                epoch: pool.epoch.0,
                client_id: vec![0x5a; 16].into(),
                host_id: vec![0x5a; 16].into(),
                namespace: tenant_name(0),
                ..proto::Caller::default()
            }),
            keys: pack([&name(INTRUDER as u64)]).into(),
            lengths: vec![0],
            ..proto::ReserveRequest::default()
        };
        let life = crate::life::Life::default();
        let address = crate::net::master_address(number);
        let request = request.encode_to_vec().into();
        let net = Arc::clone(&self.net);
        let from = Process::Client(INTRUDER);
        let Ok(reply) = net.call(from, life, address, "Reserve", request).await else {
            return;
        };
        let granted = proto::ReserveReply::decode(reply).map(|reply| reply.reservations);
        let mut granted = granted.into_iter().flatten();
        if granted.any(|one| one.code != u32::from(Code::InvalidArgument.to_wire())) {
            self.load
                .violate("a put of no bytes is not refused as such".to_owned());
        }
    }

    /// Registers with what a node says in the open, and with an epoch that never was.
    async fn register_as(&self, node: usize) {
        let Some((number, pool)) = self.leader() else {
            return;
        };
        let Some(seen) = self.net.registered(node) else {
            return;
        };
        let incarnation = Incarnation::from_slice(&seen.incarnation);
        let members = pool.members.all();
        if members
            .iter()
            .any(|one| Some(one.incarnation) == incarnation)
        {
            for secret in [vec![0x5a; 32], Vec::new()] {
                let stolen = proto::Register {
                    life_secret: secret.into(),
                    ..seen.clone()
                };
                if self.is_welcome(number, stolen).await {
                    self.load
                        .violate(format!("a stranger is welcome as n{node}"));
                }
            }
        }
        let later = proto::Register {
            name: "stranger".to_owned(),
            incarnation: vec![0x5a; 16].into(),
            life_secret: Vec::new().into(),
            epoch_seen: NO_EPOCH.0,
            epoch_proof: vec![0x5a; 32].into(),
            held: Vec::new(),
            loaded: Vec::new(),
            ..seen
        };
        let _refused = self.is_welcome(number, later).await;
    }

    async fn is_welcome(&self, master: usize, register: proto::Register) -> bool {
        let (to_master, at_master) = tokio::sync::mpsc::channel(1);
        let Some(mut answers) = self
            .net
            .knock(master, Box::pin(ReceiverStream::new(at_master)))
        else {
            return false;
        };
        let message = proto::NodeMessage {
            body: Some(Body::Register(register)),
        };
        if to_master.send(Ok(message)).await.is_err() {
            return false;
        }
        let answered = timeout(ANSWER, answers.recv()).await;
        let Ok(Some(Ok(proto::MasterMessage { body: Some(body) }))) = answered else {
            return false;
        };
        matches!(body, proto::master_message::Body::Welcome(_))
    }
}
