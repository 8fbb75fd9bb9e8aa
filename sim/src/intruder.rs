//! A process that belongs to nobody. It tries what no client and no node of ours would: forged and old grants, a
//! reservation of nothing, the name of a node, an epoch that never was. All of it is to be refused.

use crate::checks::leading;
use crate::dice::{Dice, Stream};
use crate::load::name;
use crate::net::{NodePort, Shown};
use crate::plan::{Process, tenant_name};
use crate::world::World;
use kvpool_master::pool::Pool;
use kvpool_proto as proto;
use kvpool_transport::host::Abort;
use kvpool_types::wire::data::{ReadItem, WriteRequest};
use kvpool_types::wire::keys::pack;
use kvpool_types::{Code, Epoch, Extent, Grant, GrantId, Incarnation, Length, ReadRight, Version};
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
/// How late a node may know what a master's clock shows, in milliseconds.
const LATE: u64 = 500;
/// So long after a jump of a master's clock a node knows what the clock shows. A heartbeat is answered within seconds.
const KNOWN: Duration = Duration::from_secs(30);
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
            self.read_with_old_locations(&port);
        }
        self.reserve_nothing().await;
        self.know_a_later_term().await;
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

    /// Free bytes of a node.
    fn free_extent(pool: &Pool, port: &NodePort) -> Option<Extent> {
        let segments = pool.placement.segments();
        let incarnation = port.node.incarnation();
        let mut all = segments.iter();
        let segment = all.find(|segment| segment.node.incarnation == incarnation)?;
        let free = segment.extents().longest_free().next()?;
        Some(Extent {
            segment: segment.id,
            offset: free.offset,
            length: free.length.min(Length(4096)),
        })
    }

    /// The extents of blocks at a node, with their versions.
    fn blocks_at(pool: &Pool, port: &NodePort) -> Vec<(Extent, Version)> {
        let segments = pool.placement.segments();
        let incarnation = port.node.incarnation();
        let is_here = |segment| {
            let segment = segments.get(segment);
            segment.is_some_and(|segment| segment.node.incarnation == incarnation)
        };
        let mut found = Vec::new();
        for block in pool.stored_blocks() {
            for replica in block.replicas.iter().filter(|one| is_here(one.segment)) {
                let extent = Extent {
                    segment: replica.segment,
                    offset: replica.offset,
                    length: block.length,
                };
                found.push((extent, block.version));
            }
        }
        found
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
        for (extent, _) in Self::blocks_at(&pool, port) {
            if Self::may_read(port, pool.epoch, &ReadItem::whole(extent)) {
                self.load
                    .violate("a node reads without a signed location".to_owned());
            }
        }
    }

    /// Reads with locations that were signed for others: changed, after their end, and after their blocks have left.
    fn read_with_old_locations(&self, port: &NodePort) {
        let Some(pool) = self.leader_of(port).filter(|_| self.plan.has_signed_reads) else {
            return;
        };
        let blocks = Self::blocks_at(&pool, port);
        for shown in self.net.locations_of(port.node.incarnation()) {
            let right = shown.right;
            let read = |right| {
                let item = ReadItem::whole(shown.extent).with(Some(right));
                Self::may_read(port, shown.epoch, &item)
            };
            let later = ReadRight {
                deadline_ms: right.deadline_ms + 60_000,
                ..right
            };
            if read(later) {
                self.load
                    .violate("a node believes a changed location".to_owned());
            }
            let mut here = blocks.iter();
            let is_other =
                here.any(|(extent, version)| *extent == shown.extent && *version != right.version);
            let is_over = self.is_over(&pool, &shown);
            if (is_over || is_other) && read(right) {
                let version = right.version;
                let why = if is_over {
                    "past its end"
                } else {
                    "of a block that has left"
                };
                self.load.violate(format!(
                    "a node believes a location of version {version} {why}"
                ));
            }
        }
    }

    /// Whether a location of the present term has ended. The node knows the master's clock by its heartbeats.
    fn is_over(&self, pool: &Pool, shown: &Shown) -> bool {
        let is_steady = !self.net.promises.has_jumped_within(KNOWN);
        is_steady && shown.epoch == pool.epoch && shown.right.deadline_ms + LATE < pool.clock_ms()
    }

    /// Whether the node would send these bytes, or say their checksums.
    fn may_read(port: &NodePort, epoch: Epoch, item: &ReadItem) -> bool {
        let abort: Arc<dyn Abort> = Arc::new(NoConnection);
        let host = port.node.host();
        let incarnation = port.node.incarnation();
        let is_read = host.admit_read(epoch, incarnation, item, &abort).is_ok();
        is_read || host.sums(epoch, incarnation, item).is_ok()
    }

    /// Writes to free bytes, with a grant that nobody signed.
    fn write_without_grant(&self, port: &NodePort, dice: &Dice) {
        let Some((_, pool)) = self.leader() else {
            return;
        };
        if let Some(extent) = Self::free_extent(&pool, port) {
            // Later than all grants of this term.
            let id = (pool.epoch.0 << 40) + (1 << 39) + dice.below(1 << 38);
            let grant = Grant {
                extent,
                epoch: pool.epoch,
                id: GrantId(id),
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

    /// Asks the leader for a location, as one who knows a later term. The network judges the answer: a master of an
    /// earlier term gives none.
    async fn know_a_later_term(&self) {
        let Some((number, pool)) = self.leader() else {
            return;
        };
        let Some(cluster) = *self.net.cluster.lock() else {
            return;
        };
        let request = proto::LookupRequest {
            caller: Some(proto::Caller {
                cluster_id: cluster.to_bytes().to_vec().into(),
                epoch: pool.epoch.0 + 1,
                client_id: vec![0x5a; 16].into(),
                host_id: vec![0x5a; 16].into(),
                namespace: tenant_name(0),
                ..proto::Caller::default()
            }),
            keys: pack([&name(INTRUDER as u64)]).into(),
            no_lease: true,
        };
        let life = crate::life::Life::default();
        let address = crate::net::master_address(number);
        let request = request.encode_to_vec().into();
        let net = Arc::clone(&self.net);
        let call = net.call(Process::Client(INTRUDER), life, address, "Lookup", request);
        let _refused = call.await;
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
