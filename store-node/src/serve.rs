//! The node as its transports see it. The [`Fence`] judges every request. An admitted request gets its part
//! of a segment.

use crate::clock::{ahead_ms, boot_ms};
use crate::config::Isolation;
use crate::fence::{
    Aborts, Census, Fence, FenceItem, Limits, PeerKey, Proven, Range, Span, Term, TermError,
};
use crate::metrics::Metrics;
use crate::segment::Segment;
use kvpool_auth::{Authority, Role, Roles};
use kvpool_transport::Slice;
use kvpool_transport::checksum::sum_shared;
use kvpool_transport::host::{
    Abort, Admission, Host, Peer, RdmaHost, Refused, ShmHost, WriteGuard,
};
use kvpool_transport::shm::board::Board;
use kvpool_types::wire::data::{Hello, HelloReply, ReadItem, WriteRequest};
use kvpool_types::wire::frame;
use kvpool_types::{
    Checksum, ChecksumAlgorithm, ClusterId, Code, Epoch, Extent, Grant, GrantId, HostId,
    Incarnation, IncarnationSecret, Length, NodeName, Offset, SegmentId, Token, Version,
};
use parking_lot::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::Notify;

const ALGORITHM: ChecksumAlgorithm = ChecksumAlgorithm::Crc64Nvme;
/// The roles that move bytes of blocks: clients, and nodes that copy blocks from each other.
const MOVERS: Roles = Roles::of(&[Role::Reader, Role::Writer, Role::Admin, Role::Node]);

/// The identity of the node, the same in all its incarnations.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// Its name.
    pub(crate) name: NodeName,
    /// The machine that it runs on.
    pub(crate) host: HostId,
}

/// The part of a registration that the store knows.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) cluster: Option<ClusterId>,
    pub(crate) incarnation: Incarnation,
    /// The secret that proves this incarnation.
    pub(crate) secret: IncarnationSecret,
    /// Each segment's size, and its number if a master has given it one.
    pub(crate) segments: Vec<(Length, Option<SegmentId>)>,
    pub(crate) held: Vec<Extent>,
    /// Whether readers need a right that the master signed.
    pub(crate) wants_rights: bool,
}

/// A cheap handle on the state that all connections and the agent share.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    identity: Identity,
    segments: Vec<Box<dyn Segment>>,
    fence: RwLock<Fence>,
    cluster: RwLock<Option<ClusterId>>,
    /// The secret of the present incarnation. It changes together with the fence's incarnation, under the
    /// fence's lock.
    secret: Mutex<IncarnationSecret>,
    fenced: Notify,
    /// The connections whose RDMA devices may touch the memory.
    touching: Mutex<Vec<Weak<dyn Abort>>>,
    metrics: Metrics,
    /// Judges the tokens of connecting callers.
    authority: OnceLock<Arc<Authority>>,
    /// Which callers may access the memory directly.
    isolation: Isolation,
}

impl Store {
    pub(crate) fn new(
        identity: Identity,
        segments: Vec<Box<dyn Segment>>,
        limits: Limits,
        metrics: Metrics,
        isolation: Isolation,
    ) -> Self {
        let sizes: Vec<Length> = segments.iter().map(|segment| segment.size()).collect();
        let secret = IncarnationSecret::new(kvpool_seams::random());
        Self {
            shared: Arc::new(Shared {
                identity,
                segments,
                fence: RwLock::new(Fence::new(secret.incarnation(), &sizes, limits)),
                cluster: RwLock::new(None),
                secret: Mutex::new(secret),
                fenced: Notify::new(),
                touching: Mutex::default(),
                metrics,
                authority: OnceLock::new(),
                isolation,
            }),
        }
    }

    /// The same store with tokens: connections need a token that `authority` accepts, and reads need a right.
    pub(crate) fn guarded(self, authority: Option<Arc<Authority>>) -> Self {
        if let Some(authority) = authority {
            self.demand_rights();
            self.shared.authority.get_or_init(|| authority);
        }
        self
    }

    /// Requires a read right that the master signed, from every reader.
    pub(crate) fn demand_rights(&self) {
        self.shared.fence.write().demand_rights();
    }

    /// Whether the token of a hello permits the connection. Grants and locations then decide which extents
    /// the caller may touch.
    fn judge_token(&self, token: &Token) -> Result<(), Refused> {
        let Some(authority) = self.shared.authority.get() else {
            return Ok(());
        };
        let refused = |code, message: String| Err(Refused { code, message });
        match authority.judge(token.as_str()) {
            Err(error) => refused(error.code(), error.to_string()),
            Ok(known) if known.any_roles().and(MOVERS).is_empty() => refused(
                Code::Forbidden,
                format!(
                    "the data port needs one of the roles {MOVERS}, which the policy does not give {:?}",
                    known.subject()
                ),
            ),
            Ok(_) => Ok(()),
        }
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.shared.identity
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    pub(crate) fn census(&self) -> Census {
        self.shared.fence.read().census()
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let cluster = *self.shared.cluster.read();
        let fence = self.shared.fence.read();
        let mut ids = fence.segment_ids().iter().copied();
        let sizes = self.shared.segments.iter().map(|segment| segment.size());
        Snapshot {
            cluster,
            incarnation: fence.incarnation(),
            secret: self.shared.secret.lock().clone(),
            segments: sizes.map(|size| (size, ids.next())).collect(),
            held: fence.held(),
            wants_rights: fence.wants_rights(),
        }
    }

    /// The memory of every segment.
    pub(crate) fn whole_segments(&self) -> Vec<Slice> {
        let segments = self.shared.segments.iter();
        segments
            .filter_map(|segment| segment.memory(Offset(0), segment.size()))
            .collect()
    }

    /// Enters the term of the master that welcomed the node.
    pub(crate) fn enter(&self, cluster: ClusterId, term: Term) -> Result<(), TermError> {
        let aborts = self.change(|fence| fence.enter(term))?;
        abort_all(aborts);
        *self.shared.cluster.write() = Some(cluster);
        Ok(())
    }

    /// Records the master's clock from an answer to a heartbeat.
    pub(crate) fn hear_clock(&self, clock_ms: u64) {
        if let Some(ahead) = ahead_ms(clock_ms) {
            self.shared.fence.read().hear_clock(ahead);
        }
    }

    /// Records below which grant id all loads have durable records, from an answer to a heartbeat.
    pub(crate) fn loads_recorded(&self, below: GrantId) {
        self.shared.fence.write().loads_recorded(below);
    }

    /// The extents of loads whose records may not be durable.
    pub(crate) fn loaded(&self) -> Vec<Extent> {
        self.shared.fence.read().loaded()
    }

    /// Records that a copy of `version` was loaded from a medium to `extent` under `grant`.
    pub(crate) fn is_load_of(&self, extent: &Extent, grant: GrantId, version: Version) {
        let mut fence = self.shared.fence.write();
        fence.is_load_of(extent, grant, version);
    }

    /// Records that a copy of `version` was written to `extent` under `grant`.
    pub(crate) fn is_copy_of(&self, extent: &Extent, grant: GrantId, version: Version) {
        let mut fence = self.shared.fence.write();
        fence.is_copy_of(extent, grant, version);
    }

    /// Begins a new incarnation: forgets the blocks of the old one and closes its grants.
    pub(crate) fn renew(&self, keep_cluster: bool) {
        let secret = IncarnationSecret::new(kvpool_seams::random());
        abort_all(self.change(|fence| {
            let incarnation = secret.incarnation();
            *self.shared.secret.lock() = secret;
            fence.renew(incarnation)
        }));
        let touching = std::mem::take(&mut *self.shared.touching.lock());
        abort_all(touching.iter().filter_map(Weak::upgrade).collect());
        if !keep_cluster {
            *self.shared.cluster.write() = None;
        }
    }

    /// Fences extents. [`Store::take_fenced`] returns the tickets.
    pub(crate) fn fence(&self, items: &[FenceItem]) {
        abort_all(self.change(|fence| fence.fence(items)));
    }

    /// Whether [`Store::look_again`] must be called soon.
    pub(crate) fn waits_for_boards(&self) -> bool {
        self.shared.fence.read().waits_for_boards()
    }

    /// Settles the tickets whose pins on boards, or reads, have ended.
    pub(crate) fn look_again(&self) {
        abort_all(self.change(Fence::look_again));
    }

    /// The tickets fenced since the last call.
    pub(crate) fn take_fenced(&self) -> Vec<u64> {
        self.shared.fence.write().take_fenced()
    }

    /// Returns when there may be fenced tickets to take.
    pub(crate) async fn fenced(&self) {
        self.shared.fenced.notified().await;
    }

    /// Refuses new writes and views from now on.
    pub(crate) fn drain(&self) {
        self.change(Fence::drain);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.shared.fence.read().is_draining()
    }

    /// Whether the bytes of a written extent have this checksum. Reads all the bytes, so the agent's own
    /// thread must not call it.
    pub(crate) fn verify(&self, extent: &Extent, checksum: Checksum) -> bool {
        let memory = self.written(extent);
        memory.is_ok_and(|memory| sum_shared(&memory).whole == checksum)
    }

    /// The memory of a written extent. The extent may get another block at any time.
    pub(crate) fn written(&self, extent: &Extent) -> Result<Slice, Refused> {
        let whole = ReadItem::whole(*extent);
        let span = {
            let fence = self.shared.fence.read();
            fence.read(fence.epoch(), fence.incarnation(), &whole)
        };
        span.and_then(|span| self.memory(span))
    }

    /// Changes the fence. Wakes the agent if this fenced tickets.
    fn change<T>(&self, change: impl FnOnce(&mut Fence) -> T) -> T {
        let (outcome, fenced) = {
            let mut fence = self.shared.fence.write();
            let outcome = change(&mut fence);
            (outcome, fence.has_fenced())
        };
        if fenced {
            self.shared.fenced.notify_one();
        }
        outcome
    }

    /// Checks the proofs of grants under a shared lock, because this takes longer than the other checks.
    fn prove(&self, incarnation: Incarnation, grants: &[Grant]) -> Vec<Result<Proven, Refused>> {
        let fence = self.shared.fence.read();
        let prove = |grant| fence.prove(incarnation, grant);
        grants.iter().map(prove).collect()
    }

    fn memory(&self, span: Span) -> Result<Slice, Refused> {
        let Range { start, .. } = span.range;
        let segment = self.shared.segments.get(span.segment.0);
        segment
            .and_then(|segment| segment.memory(start, span.range.length()))
            .ok_or_else(|| Refused {
                code: Code::Internal,
                message: format!("{span:?} is not in memory"),
            })
    }

    fn refuse(&self, refused: Refused) -> Refused {
        self.shared.metrics.refused(refused.code);
        tracing::debug!(code = %refused.code, refused.message, "request refused");
        refused
    }

    /// Counts an outcome and returns its code.
    fn answer(&self, outcome: Result<(), Refused>) -> Code {
        match outcome {
            Ok(()) => Code::Ok,
            Err(refused) => self.refuse(refused).code,
        }
    }

    /// Frees the extents that a frame took if its process has already ended, since the frame may
    /// arrive after the death was noticed. A later death is noticed by the watch on processes.
    fn sweep_if_dead(&self, peer: &Peer) {
        let mut poll = [PollFd::new(&peer.process, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        if matches!(rustix::event::poll(&mut poll, Some(&now)), Ok(ready) if ready > 0) {
            self.peer_gone(peer);
        }
    }
}

fn abort_all(aborts: Aborts) {
    for abort in aborts {
        abort.abort();
    }
}

impl Host for Store {
    fn hello(&self, hello: &Hello) -> Result<HelloReply, Refused> {
        let refuse = |code, message: String| Err(self.refuse(Refused { code, message }));
        if hello.min_version > frame::VERSION || hello.max_version < frame::MIN_VERSION {
            return refuse(
                Code::VersionMismatch,
                format!(
                    "the client speaks versions {} to {}, this node {} to {}",
                    hello.min_version,
                    hello.max_version,
                    frame::MIN_VERSION,
                    frame::VERSION
                ),
            );
        }
        if hello.checksum_algorithm != ALGORITHM as u8 {
            return refuse(
                Code::VersionMismatch,
                format!(
                    "the client uses checksum algorithm {}, this node {}",
                    hello.checksum_algorithm, ALGORITHM as u8
                ),
            );
        }
        if let Err(refused) = self.judge_token(&hello.token) {
            return Err(self.refuse(refused));
        }
        let Some(cluster) = *self.shared.cluster.read() else {
            return refuse(
                Code::StaleEpoch,
                "no master has welcomed this node yet".into(),
            );
        };
        if hello.cluster != cluster {
            return refuse(
                Code::WrongCluster,
                format!("cluster {} is meant, this is {cluster}", hello.cluster),
            );
        }
        let incarnation = self.shared.fence.read().incarnation();
        if hello.incarnation != Incarnation(0) && hello.incarnation != incarnation {
            return refuse(
                Code::WrongIncarnation,
                format!("{} is meant, this is {incarnation}", hello.incarnation),
            );
        }
        Ok(HelloReply {
            version: hello.max_version.min(frame::VERSION),
            cluster,
            node: self.shared.identity.name.clone(),
            incarnation,
            host: self.shared.identity.host,
            checksum_algorithm: ALGORITHM as u8,
            features: kvpool_types::wire::features::Features::default(),
        })
    }

    fn memory_right(&self, hello: &Hello) -> Result<(), Refused> {
        let authority = match (self.shared.isolation, self.shared.authority.get()) {
            (Isolation::Strict, Some(authority)) => authority,
            _ => return Ok(()),
        };
        // A mapping or a registration gives access to every block of a segment, for reading and writing.
        match authority.judge(hello.token.as_str()) {
            Ok(known) if known.pool_roles().has_any(Roles::WRITERS) => Ok(()),
            Ok(_) => Err(Refused {
                code: Code::Forbidden,
                message: format!(
                    "with --isolation strict, shared memory and RDMA need one of the roles {} in every \
                     namespace: use TCP",
                    Roles::WRITERS
                ),
            }),
            Err(error) => Err(Refused {
                code: error.code(),
                message: error.to_string(),
            }),
        }
    }

    fn epoch(&self) -> Epoch {
        self.shared.fence.read().epoch()
    }

    fn admit_read(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
        abort: &Arc<dyn Abort>,
    ) -> Result<Slice, Refused> {
        let admitted = {
            let fence = self.shared.fence.read();
            fence
                .prove_read(epoch, incarnation, item, boot_ms)
                .and_then(|()| fence.read(epoch, incarnation, item))
                .map(|span| (span, fence.begin_read(span, abort)))
        };
        admitted
            .and_then(|(span, guard)| {
                let memory = self.memory(span)?;
                Ok(match guard {
                    Some(guard) => memory.with_hook(Arc::new(guard)),
                    None => memory,
                })
            })
            .map_err(|refused| self.refuse(refused))
    }

    fn admit_write(
        &self,
        incarnation: Incarnation,
        grant: &Grant,
        abort: Arc<dyn Abort>,
    ) -> Admission {
        let proven = self.shared.fence.read().prove(incarnation, grant);
        let admitted = proven.and_then(|proven| {
            let target = self.memory(self.shared.fence.read().locate(&grant.extent)?)?;
            let span = self.change(|fence| fence.begin_receive(&proven, abort))?;
            Ok((span, target))
        });
        match admitted {
            Ok((span, target)) => Admission::Write(Box::new(Receive {
                store: self.clone(),
                span: Some(span),
                target,
            })),
            Err(refused) => Admission::Refuse(self.refuse(refused)),
        }
    }

    fn write_now(&self, request: &WriteRequest, payload: &[u8]) -> Vec<Code> {
        let proven = self.prove(request.incarnation, &request.grants);
        // The admission, the copy and the record happen under one lock, so nothing can come between them.
        // This is why only small blocks are written this way.
        let written: Vec<Result<(), Refused>> = self.change(|fence| {
            let blocks = request.blocks(payload).zip(proven);
            blocks
                .map(|(block, proven)| {
                    let span = fence.admit_now(&proven?)?;
                    self.memory(span)?.write_at(Offset(0), block.bytes);
                    fence.record_now(span, block.grant.id, block.sums())
                })
                .collect()
        });
        written
            .into_iter()
            .map(|outcome| self.answer(outcome))
            .collect()
    }

    fn sums(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
    ) -> Result<Vec<Checksum>, Refused> {
        let sums = {
            let fence = self.shared.fence.read();
            fence
                .prove_read(epoch, incarnation, item, boot_ms)
                .and_then(|()| fence.sums(epoch, incarnation, &item.extent))
        };
        sums.map_err(|refused| self.refuse(refused))
    }

    fn count(&self, read: Length, written: Length) {
        self.shared.metrics.moved(read, written);
    }

    fn served(&self, op: frame::Op, took: Duration) {
        self.shared.metrics.request(op.name(), took);
    }
}

impl RdmaHost for Store {
    fn memory(
        &self,
        incarnation: Incarnation,
        abort: Weak<dyn Abort>,
    ) -> Result<Vec<(SegmentId, Slice)>, Refused> {
        // The connection is registered first. The end of the incarnation then either refuses it or aborts it.
        {
            let mut touching = self.shared.touching.lock();
            touching.retain(|connection| connection.strong_count() > 0);
            touching.push(abort);
        }
        let ids = {
            let fence = self.shared.fence.read();
            let checked = fence.check_incarnation(incarnation);
            checked.map(|()| fence.segment_ids().to_vec())
        };
        let ids = ids.map_err(|refused| self.refuse(refused))?;
        let segments = self.whole_segments();
        if ids.len() != segments.len() {
            return Err(self.refuse(Refused {
                code: Code::Unreachable,
                message: "no master has welcomed the node".to_owned(),
            }));
        }
        Ok(ids.into_iter().zip(segments).collect())
    }
}

impl ShmHost for Store {
    fn map(
        &self,
        incarnation: Incarnation,
        segment: SegmentId,
        writable: bool,
    ) -> Result<(OwnedFd, Length), Refused> {
        let index = {
            let fence = self.shared.fence.read();
            fence
                .check_incarnation(incarnation)
                .and_then(|()| fence.segment(segment))
        };
        let index = index.map_err(|refused| self.refuse(refused))?;
        let shared = self.shared.segments.get(index.0).map(|segment| {
            let fd = segment.share(writable);
            fd.map(|fd| (fd, segment.size()))
        });
        match shared {
            Some(Ok(shared)) => Ok(shared),
            Some(Err(error)) => Err(self.refuse(Refused {
                code: Code::Internal,
                message: format!("segment {segment} cannot be shared: {error}"),
            })),
            None => Err(self.refuse(Refused {
                code: Code::OutOfRange,
                message: format!("segment {segment} is not one of this node's"),
            })),
        }
    }

    fn board(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
    ) -> Result<(Arc<Board>, OwnedFd), Refused> {
        let allowance = self.shared.fence.read().limits().held_per_client;
        let (board, fd) = Board::create(allowance).map_err(|error| {
            self.refuse(Refused {
                code: Code::Internal,
                message: format!("a pin board cannot be made: {error}"),
            })
        })?;
        let board = Arc::new(board);
        self.change(|fence| fence.hang(peer.into(), incarnation, board.clone()))
            .map_err(|refused| self.refuse(refused))?;
        self.sweep_if_dead(peer);
        Ok((board, fd))
    }

    fn begin_shm_writes(
        &self,
        peer: &Peer,
        incarnation: Incarnation,
        grants: &[Grant],
    ) -> Vec<Code> {
        let proven = self.prove(incarnation, grants);
        let begun: Vec<Result<(), Refused>> = self.change(|fence| {
            let begin = |proven: Result<_, _>| fence.begin_hold(peer.into(), &proven?);
            proven.into_iter().map(begin).collect()
        });
        if begun.iter().any(Result::is_ok) {
            self.sweep_if_dead(peer);
        }
        begun
            .into_iter()
            .map(|outcome| self.answer(outcome))
            .collect()
    }

    fn end_shm_writes(&self, peer: &Peer, items: Vec<(GrantId, Vec<Checksum>)>) -> Vec<Code> {
        self.change(|fence| {
            let end = |(grant, sums)| fence.end_hold(peer.into(), grant, sums);
            items.into_iter().map(end).collect()
        })
    }

    fn pin(&self, peer: &Peer, epoch: Epoch, incarnation: Incarnation, extent: &Extent) -> Code {
        let outcome = self.change(|fence| fence.pin(peer.into(), epoch, incarnation, extent));
        if outcome.is_ok() {
            self.sweep_if_dead(peer);
        }
        self.answer(outcome)
    }

    fn unpin(&self, peer: &Peer, incarnation: Incarnation, extent: &Extent) -> Code {
        self.change(|fence| fence.unpin(peer.into(), incarnation, extent))
    }

    fn still_hold(&self, peers: &[Peer]) -> Vec<bool> {
        let keys: Vec<PeerKey> = peers.iter().map(PeerKey::from).collect();
        self.change(|fence| fence.still_hold(&keys))
    }

    fn peer_gone(&self, peer: &Peer) {
        let key = PeerKey::from(peer);
        tracing::debug!(peer = %key, "client is gone, its writes and pins are released");
        self.change(|fence| fence.peer_gone(key));
    }
}

/// A receive in progress. The fence waits for it. The drop of this guard ends it in every case.
struct Receive {
    store: Store,
    span: Option<Span>,
    target: Slice,
}

impl Receive {
    fn end(&mut self, sums: Option<Vec<Checksum>>) -> Code {
        match self.span.take() {
            Some(span) => self.store.change(|fence| fence.end_receive(span, sums)),
            None => Code::GrantEnded,
        }
    }
}

impl WriteGuard for Receive {
    fn parts(&self) -> &[Slice] {
        std::slice::from_ref(&self.target)
    }

    fn finish(mut self: Box<Self>, sums: Vec<Checksum>) -> Code {
        self.end(Some(sums))
    }
}

impl Drop for Receive {
    fn drop(&mut self) {
        if self.span.is_some() {
            self.end(None);
        }
    }
}
