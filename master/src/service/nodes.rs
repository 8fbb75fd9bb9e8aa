//! The gRPC service for store nodes: one session for each node.

use super::framed::Origin;
use super::refused::{Refused, refused};
use super::rights::{Bearer, Operation, Who, bearer_of};
use crate::leadership::Seat;
use crate::membership::{DrainReport, Outbox, Registration, Reported, StoreNode};
use crate::pool::{MOST_MEDIA, OfferedMedium, Pool, RegisterError};
use kvpool_proto as proto;
use kvpool_types::MediumId;
use kvpool_types::medium::Generation;
use kvpool_types::{
    ChecksumAlgorithm, ClusterId, Code, Epoch, Extent, HostId, Incarnation, IncarnationSecret,
    Length, NodeName, Offset, SegmentId,
};
use proto::master_message::Body as ToNode;
use proto::node_message::Body as FromNode;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

/// The `Nodes` gRPC service of a master, whether it leads or not.
#[derive(Clone, Debug)]
pub struct NodesService {
    seat: Arc<Seat>,
    stopped: watch::Receiver<bool>,
    needs_certificate: bool,
}

impl NodesService {
    /// The service of the master at `seat`. Its sessions end when `stopped` says so.
    pub fn new(seat: Arc<Seat>, stopped: watch::Receiver<bool>) -> Self {
        Self {
            seat,
            stopped,
            needs_certificate: false,
        }
    }

    /// Sets whether nodes must present a certificate.
    #[must_use]
    pub fn with_certificates(self, needed: bool) -> Self {
        Self {
            needs_certificate: needed,
            ..self
        }
    }
}

#[tonic::async_trait]
impl proto::nodes_server::Nodes for NodesService {
    type SessionStream = UnboundedReceiverStream<Result<proto::MasterMessage, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<proto::NodeMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let origin = request.extensions().get::<Origin>().cloned();
        let bearer = bearer_of(&self.seat.guard, request.metadata());
        if self.needs_certificate && !origin.as_ref().is_some_and(Origin::has_certificate) {
            let refused = refused(
                Code::Unauthenticated,
                "this master takes store nodes with a certificate only: pass --tls-cert, --tls-key and --tls-ca",
            );
            bearer.note_refused(Operation::Session, "", &refused);
            Origin::refused_of(request.extensions());
            return Err(refused.into());
        }
        check_node(&bearer, "").inspect_err(|_| Origin::refused_of(request.extensions()))?;
        let outgoing = self.open(origin, bearer, Box::pin(request.into_inner()));
        Ok(Response::new(UnboundedReceiverStream::new(outgoing)))
    }
}

/// The messages of a node, in order, until its stream ends.
pub type NodeInbox = Pin<Box<dyn Stream<Item = Result<proto::NodeMessage, Status>> + Send>>;

impl NodesService {
    /// A session over streams without a socket. Its caller needs no token.
    pub fn session_over(
        &self,
        inbox: NodeInbox,
    ) -> mpsc::UnboundedReceiver<Result<proto::MasterMessage, Status>> {
        let bearer = bearer_of(&self.seat.guard, &MetadataMap::new());
        self.open(None, bearer, inbox)
    }

    fn open(
        &self,
        origin: Option<Origin>,
        bearer: Bearer,
        mut inbox: NodeInbox,
    ) -> mpsc::UnboundedReceiver<Result<proto::MasterMessage, Status>> {
        // The channel has no bound of its own. The quarantine bounds the number of messages to a
        // node, and keeps their content anyway.
        let (outbox, outgoing) = mpsc::unbounded_channel();
        let seat = Arc::clone(&self.seat);
        let mut stopped = self.stopped.clone();
        tokio::spawn(async move {
            let first = match inbox.next().await {
                Some(Ok(proto::NodeMessage {
                    body: Some(FromNode::Register(register)),
                })) => register,
                _ => {
                    let why = "a session must begin with a registration";
                    let refused = refused(Code::Malformed, why);
                    bearer.note_refused(Operation::Session, "", &refused);
                    let _left = outbox.send(Err(refused.into()));
                    return;
                }
            };
            if let Some(Err(refused)) = origin.as_ref().map(Origin::settle) {
                bearer.note_refused(Operation::Session, &first.name, &refused);
                let _left = outbox.send(Err(refused.into()));
                return;
            }
            let pool = match seat.pool() {
                Ok(pool) => pool,
                Err(elsewhere) => {
                    seat.contacts.node(&first.name);
                    let refusal = proto::Refusal {
                        code: Code::NotLeader.to_wire().into(),
                        message: elsewhere.reason,
                        leader: elsewhere.leader,
                    };
                    send(&outbox, ToNode::Refusal(refusal));
                    return;
                }
            };
            // The policy may have changed since the call arrived.
            let who = match check_node(&bearer, &first.name) {
                Ok(who) => who,
                Err(refused) => {
                    let _left = outbox.send(Err(refused.into()));
                    return;
                }
            };
            match begin(&pool, &first, &outbox).await {
                Ok((node, session)) => {
                    drop(outbox);
                    who.note(Operation::Session, &first.name, Ok(()));
                    tokio::select! {
                        biased;
                        () = converse(&pool, &node, session, &mut inbox, bearer) => {}
                        _ = stopped.wait_for(|stopped| *stopped) => {}
                    }
                    pool.detach(&node, session);
                }
                Err(RegisterError { code, message }) => {
                    tracing::warn!(node = ?first.name, %code, message, "node refused");
                    let why = refused(code, message.clone());
                    who.note(Operation::Session, &first.name, Err(&why));
                    let refusal = proto::Refusal {
                        code: code.to_wire().into(),
                        message,
                        leader: String::new(),
                    };
                    send(&outbox, ToNode::Refusal(refusal));
                }
            }
        });
        outgoing
    }
}

/// The caller behind `bearer`, if it may be a store node. A refusal writes an audit line about the
/// node `name`.
fn check_node(bearer: &Bearer, name: &str) -> Result<Who, Refused> {
    judge_node(bearer).inspect_err(|refused| {
        bearer.note_refused(Operation::Session, name, refused);
    })
}

fn judge_node(bearer: &Bearer) -> Result<Who, Refused> {
    let who = bearer.who()?;
    who.may(Operation::Session, "")?;
    Ok(who)
}

fn send(outbox: &Outbox, body: ToNode) {
    // The send fails when the node has left. Its inbox reports that next.
    let _left = outbox.send(Ok(proto::MasterMessage { body: Some(body) }));
}

/// Registers a node, welcomes it, and opens its session. The welcome is queued first, so the node
/// knows the term's key before a grant of the term can reach it.
async fn begin(
    pool: &Arc<Pool>,
    register: &proto::Register,
    outbox: &Outbox,
) -> Result<(Arc<StoreNode>, u64), RegisterError> {
    let registration = read_registration(pool, register)?;
    let node = pool.register(&registration).await?;
    send(
        outbox,
        ToNode::Welcome(proto::Welcome {
            version: register.max_version.min(proto::VERSION),
            cluster_id: bytes::Bytes::copy_from_slice(&pool.cluster.to_bytes()),
            epoch: pool.epoch.0,
            segment_ids: node.segments().iter().map(|id| id.0).collect(),
            grant_key: bytes::Bytes::copy_from_slice(&node.key.0),
            heartbeat_interval_ms: u64::try_from(pool.config.heartbeat_interval.as_millis())
                .unwrap_or(u64::MAX),
            epoch_proof: pool.prove_term(&node.name),
            clock_ms: pool.now().0,
            loads_recorded_below: pool.loads_recorded_below(&node).0,
        }),
    );
    let session = pool.activate(&node, &registration, outbox.clone());
    Ok((node, session))
}

fn read_registration(
    pool: &Pool,
    register: &proto::Register,
) -> Result<Registration, RegisterError> {
    let refuse = |code, message: String| RegisterError { code, message };
    if register.max_version < proto::MIN_VERSION || register.min_version > proto::VERSION {
        return Err(refuse(
            Code::VersionMismatch,
            format!(
                "the node supports protocol versions {} to {}, this master {} to {}",
                register.min_version,
                register.max_version,
                proto::MIN_VERSION,
                proto::VERSION
            ),
        ));
    }
    let named = ClusterId::from_slice(&register.cluster_id);
    if !register.cluster_id.is_empty() && named != Some(pool.cluster) {
        return Err(refuse(
            Code::WrongCluster,
            format!(
                "this is cluster {}, the node belongs to another",
                pool.cluster
            ),
        ));
    }
    if register.checksum_algorithm != ChecksumAlgorithm::Crc64Nvme as u32 {
        return Err(refuse(
            Code::VersionMismatch,
            format!("unknown checksum algorithm {}", register.checksum_algorithm),
        ));
    }
    let incarnation = Incarnation::from_slice(&register.incarnation)
        .ok_or_else(|| refuse(Code::Malformed, "an incarnation has 16 bytes".into()))?;
    let secret = match register.life_secret.as_ref() {
        [] => None,
        bytes => Some(IncarnationSecret::from_slice(bytes).ok_or_else(|| {
            refuse(
                Code::Malformed,
                "the secret of an incarnation has 32 bytes".into(),
            )
        })?),
    };
    let extents = |ranges: &[proto::ExtentRange]| {
        let extent = |range: &proto::ExtentRange| Extent {
            segment: SegmentId(range.segment),
            offset: Offset(range.offset),
            length: Length(range.length),
        };
        ranges.iter().map(extent).collect()
    };
    Ok(Registration {
        name: NodeName(register.name.clone()),
        incarnation,
        data_address: register.data_address.clone(),
        shm_path: register.shm_path.clone(),
        host: HostId::from_slice(&register.host_id).unwrap_or_default(),
        epoch_seen: Epoch(register.epoch_seen),
        segments: register
            .segments
            .iter()
            .map(|s| (Length(s.size_bytes), (s.id != 0).then_some(SegmentId(s.id))))
            .collect(),
        held: extents(&register.held),
        loaded: extents(&register.loaded),
        secret,
        epoch_proof: register.epoch_proof.clone(),
        can_pull: register.can_pull,
        can_undrain: register.can_undrain,
        version: register.version.clone(),
        wants_signed_reads: register.wants_signed_reads,
    })
}

/// The medium that a node offers; `None` if the description is impossible.
fn offered_medium(offer: &proto::OfferedMedium) -> Option<OfferedMedium> {
    Some(OfferedMedium {
        medium: MediumId::from_slice(&offer.medium_id)?,
        generation: Generation(offer.generation),
        size: Length(offer.size_bytes),
        zone: Length(offer.zone_bytes),
        state: offer.state(),
        budget: offer.budget_bytes_per_day,
        namespaces: offer.namespaces.clone(),
    })
}

/// The ends of transfers. A code of a later version counts as a failure.
fn ends(done: &proto::TransfersDone) -> Vec<(u64, Code)> {
    let done = done.transfers.iter();
    done.map(|one| (one.ticket, Code::from_peer(one.code)))
        .collect()
}

/// Processes a node's messages until its stream ends.
async fn converse(
    pool: &Arc<Pool>,
    node: &Arc<StoreNode>,
    session: u64,
    inbox: &mut NodeInbox,
    mut bearer: Bearer,
) {
    loop {
        let message = match inbox.next().await {
            Some(Ok(message)) => message,
            None => return,
            Some(Err(error)) => {
                tracing::info!(node = %node.name, %error, "node session failed");
                return;
            }
        };
        let Some(body) = message.body else { continue };
        if let FromNode::RenewToken(renewed) = body {
            let next = bearer.renewed(renewed.token);
            match judge_node(&next) {
                Ok(_) => bearer = next,
                // The session continues while the earlier token is valid.
                Err(refused) => tracing::warn!(
                    node = %node.name,
                    code = %refused.code,
                    refused.message,
                    "the node's new token is refused and not used: write a good one to its token file"
                ),
            }
            continue;
        }
        // Heartbeats arrive all the time, so a session ends soon after its token expires or its
        // right is withdrawn.
        if let Err(refused) = check_node(&bearer, &node.name.0) {
            tracing::warn!(node = %node.name, code = %refused.code, refused.message, "node session ended");
            return;
        }
        match body {
            FromNode::RenewToken(_) => {}
            FromNode::Heartbeat(beat) => {
                node.note_problems(beat.problems);
                pool.heard(
                    node,
                    Some(Reported {
                        held_bytes: beat.held_bytes,
                        connections: beat.connections,
                        read_bytes: beat.read_bytes,
                        written_bytes: beat.written_bytes,
                    }),
                );
                node.send(ToNode::HeartbeatAck(proto::HeartbeatAck {
                    sequence: beat.sequence,
                    epoch: pool.epoch.0,
                    clock_ms: pool.now().0,
                    loads_recorded_below: pool.loads_recorded_below(node).0,
                }));
            }
            FromNode::Fenced(fenced) => {
                pool.heard(node, None);
                pool.fenced(node, &fenced.tickets);
            }
            FromNode::Verified(verified) => {
                pool.heard_verified(node, verified.ticket, verified.matches);
            }
            FromNode::Media(media) => {
                node.note_unused(session, media.unused);
                let offered = media.media.iter().take(MOST_MEDIA);
                let offered = offered.filter_map(offered_medium).collect();
                // Called before the task below, so that the lists are processed in their order.
                let processed = pool.media_offered(node, session, offered);
                let node = Arc::clone(node);
                // In a task: a store that stalls must not delay the node's heartbeats.
                tokio::spawn(async move {
                    if let Err(error) = processed.await {
                        tracing::warn!(node = %node.name, code = %error.code, error.message, "media not attached");
                    }
                });
            }
            FromNode::MediumAttached(attached) => {
                if let Some(medium) = MediumId::from_slice(&attached.medium_id) {
                    let generation = Generation(attached.generation);
                    let (pool, node) = (Arc::clone(pool), Arc::clone(node));
                    tokio::spawn(async move {
                        pool.medium_attached(&node, session, medium, generation)
                            .await;
                    });
                }
            }
            FromNode::TransfersDone(done) => {
                let transfers = done.transfers.iter();
                let refused = transfers.filter(|one| one.takes_no_writes);
                pool.writes_refused(node, refused.map(|one| one.ticket));
                pool.transfers_done(node, &ends(&done));
            }
            FromNode::Pulled(done) => pool.pulled(node, &ends(&done)),
            FromNode::Draining(draining) => {
                let report = DrainReport {
                    session: draining.out_of_service.then_some(session),
                    moves: draining.move_blocks,
                    number: draining.number,
                };
                pool.says_it_drains(node, report);
                if draining.out_of_service && draining.media_leave {
                    pool.media_leave(node, session);
                }
            }
            FromNode::Undrained(heard) => pool.undrained(node, heard.number),
            FromNode::Goodbye(_) => {
                pool.said_goodbye(node);
                return;
            }
            FromNode::Register(_) => {
                tracing::warn!(node = %node.name, "second registration in one session, closing the session");
                return;
            }
        }
    }
}
