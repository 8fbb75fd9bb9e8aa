//! The client's side: a connection that agrees on queue pairs, and on each port pairs of lanes, one
//! lane for reads and one for writes.

use super::cooldowns::{PairCooldowns, PortPair};
use super::device::Fabric;
use super::lane::RdmaLane;
use super::lane_choice::LaneChooser;
use super::pieces::RegisteredPart;
use super::queue::{Allows, QueuePair};
use super::rail::Rail;
use super::range_cache::RangeCache;
use super::work::{Fault, Transfer, Verb, WorkError};
use super::{locate, read, write};
use crate::channel::Channel;
use crate::control::{Control, ask_sums};
use crate::copiers::Copiers;
use crate::deadlines::{Deadlines, Expire};
use crate::frame::{failure, receive_by, send, status};
use crate::inline::{self, is_small};
use crate::link::{Link, ReadOp, SumsOp, TransferError, TransferResult, TransportKind, WriteOp};
use crate::memory::{Region, Slice};
use crate::outcomes::{deadline_exceeded, resolve, unreachable};
use crate::socket::set_timeouts;
use crate::split::{check_write, pack};
use crate::tcp;
use crate::wire::{DataTls, Wire};
use futures::future::{BoxFuture, FutureExt};

use kvpool_types::wire::data::{Hello, HelloReply, Meta};
use kvpool_types::wire::frame::Op;
use kvpool_types::wire::rdma::{Offer, RdmaOpen, RdmaOpened, Registered};
use kvpool_types::{Checksum, Code, Epoch, Extent, Incarnation, Length, Offset};
use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

/// The number of threads that register and sum.
pub(super) const THREADS: usize = 2;

/// The bytes that a probe reads.
const PROBE: Length = Length(8);
/// The time limit of the first answer to a probe. The later answers have the same limit after the first one.
const PROBE_TIMEOUT: Duration = Duration::from_millis(1500);
const PROBE_PAUSE: Duration = Duration::from_millis(200);

/// The most queue pairs that a node accepts from one connection.
const MOST_OFFERS: usize = 64;

/// Opens a link to the node whose data port is at `address`, by `deadline`. Blocks.
///
/// # Errors
///
/// [`Code::InvalidArgument`] when the node has no RDMA. [`Code::Unreachable`] when no pair of ports
/// works, [`Code::TooManyHeld`] when this process may not lock enough memory, or the code of the
/// node's refusal.
pub fn connect(
    fabric: &Arc<Fabric>,
    address: SocketAddr,
    hello: Hello,
    deadline: Instant,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    connect_with(fabric, address, hello, deadline, None)
}

/// [`connect`] with TLS on the data port. The bytes that RDMA moves are not encrypted.
///
/// # Errors
///
/// As [`connect`].
pub fn connect_with(
    fabric: &Arc<Fabric>,
    address: SocketAddr,
    hello: Hello,
    deadline: Instant,
    tls: Option<&DataTls>,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    let (link, reply) = open(fabric, address, hello, deadline, tls)?;
    Ok((Arc::new(link), reply))
}

/// [`connect`], also for a peer that registers memory on demand. The link asks such a peer through
/// [`RdmaLink::locate`].
pub(crate) fn open(
    fabric: &Fabric,
    address: SocketAddr,
    hello: Hello,
    deadline: Instant,
    tls: Option<&DataTls>,
) -> Result<(RdmaLink, HelloReply), TransferError> {
    let (socket, reply) = tcp::open(address, &hello, deadline, tls)?;
    let hello = Hello {
        incarnation: reply.incarnation,
        ..hello
    };
    let Agreed { ends, again } = agree(fabric, &socket, reply.incarnation, deadline)?;
    // From here on the requests' deadlines bound the waiting; between requests the socket is
    // silent.
    set_timeouts(socket.as_fd(), None).map_err(unreachable)?;
    // Without a runtime there is no channel, and small writes are announced like large writes.
    let inline = if tokio::runtime::Handle::try_current().is_ok() {
        let (socket, _) = tcp::open(address, &hello, deadline, tls)?;
        Some(Arc::new(
            Channel::from_socket(socket, reply.features).map_err(unreachable)?,
        ))
    } else {
        None
    };
    let nodes = ends.iter().map(|ends| ends.rail.numa_node());
    let open = Arc::new(OpenRdmaLink {
        chooser: LaneChooser::new(nodes.collect()),
        control: Arc::new(Control::start(socket, "rdma", reply.features).map_err(unreachable)?),
        inline,
        incarnation: reply.incarnation,
        ends,
        again,
        copiers: Copiers::start("kvpool-rdma-sum", THREADS).map_err(unreachable)?,
        deadlines: Deadlines::start("kvpool-rdma-timer").map_err(unreachable)?,
    });
    let weak = Arc::downgrade(&open);
    open.control.when_failed(move || {
        if let Some(open) = weak.upgrade() {
            open.abort_lanes();
        }
    });
    Ok((RdmaLink { address, open }, reply))
}

/// The agreement of two hosts.
struct Agreed {
    ends: Vec<PortLanes>,
    /// The end of the first cooldown among the pairs of ports that were left out.
    again: Option<Instant>,
}

/// Creates queue pairs on every active port, lets the node create its own, and connects them. Keeps
/// the pairs that pass a probe.
fn agree(
    fabric: &Fabric,
    socket: &Wire,
    incarnation: Incarnation,
    deadline: Instant,
) -> Result<Agreed, TransferError> {
    let rails = || fabric.rails().iter().filter(|rail| rail.is_usable());
    let lanes = rails().map(|rail| rail.options.lanes).max().unwrap_or(1);
    let most = MOST_OFFERS / 2 / rails().count().max(1);
    let mut queues = Vec::new();
    let mut refused = None;
    // The outer loop is over rounds, because older nodes pair the offers with their ports in that
    // order.
    for round in 0..usize::from(lanes).min(most).max(1) {
        for rail in rails() {
            let create = || QueuePair::create(rail, Allows::Nothing);
            match create().and_then(|reads| Ok((reads, create()?))) {
                Ok((reads, writes)) => queues.extend([(reads, false), (writes, true)]),
                // Too little room, or an inactive port, reduces the lanes; the link still opens.
                Err(error) => {
                    tracing::debug!(%error, round, rail = rail.name(), "creating a queue pair failed");
                    refused.get_or_insert(error);
                }
            }
        }
    }
    if queues.is_empty() {
        return Err(refused.map_or_else(
            || unreachable("no RDMA port of this host can be used"),
            |error| local_fault("a queue pair", &error),
        ));
    }
    let offers = queues.iter().map(|(queue, writes)| Offer {
        queue: *queue.address(),
        writes: *writes,
    });
    let request = RdmaOpen {
        incarnation,
        offers: offers.collect(),
    };
    send(socket, Op::RdmaOpen, 1, Epoch::default(), &request).map_err(unreachable)?;
    let (header, _, meta) = receive_by(socket, deadline).map_err(unreachable)?;
    let opened = match header.op {
        Op::RdmaOpened => RdmaOpened::decode(&meta).map_err(|_| status(Code::Malformed))?,
        Op::Failure => return Err(failure(&meta)),
        _ => return Err(status(Code::Malformed)),
    };
    if opened.accepted.len() != queues.len() {
        return Err(unreachable(
            "the node did not accept the offered queue pairs",
        ));
    }
    let mut agreed = Agreed {
        ends: Vec::new(),
        again: None,
    };
    let mut queues = queues.into_iter().zip(&opened.accepted);
    while let (Some(((reads, _), its)), Some(((writes, _), theirs))) =
        (queues.next(), queues.next())
    {
        if its.rail != theirs.rail {
            return Err(status(Code::Malformed));
        }
        if its.queue.number == 0 || theirs.queue.number == 0 {
            tracing::debug!(
                rail = reads.rail().name(),
                "no port of the node is on its network"
            );
            continue;
        }
        let pair = PortPair {
            here: reads.address().gid,
            there: its.queue.gid,
        };
        if let Some(until) = fabric.cooldowns.until(pair, Instant::now()) {
            agreed.again = Some(agreed.again.map_or(until, |again| again.min(until)));
            continue;
        }
        let connected = reads.connect(&its.queue);
        if let Err(error) = connected.and_then(|()| writes.connect(&theirs.queue)) {
            tracing::debug!(%error, rail = reads.rail().name(), "connecting a queue pair failed");
            fabric.cooldowns.failed(pair, Instant::now());
            continue;
        }
        let there = opened.registered.iter().filter(|r| r.rail == its.rail);
        agreed.ends.push(PortLanes {
            rail: reads.rail().clone(),
            reads: RdmaLane::new(reads),
            writes: RdmaLane::new(writes),
            load: Arc::default(),
            there: its.rail,
            ranges: RangeCache::of_segments(there),
            pair,
            cooldowns: fabric.cooldowns.clone(),
        });
    }
    probe(&mut agreed.ends, &opened.registered, deadline)?;
    if agreed.ends.is_empty() {
        return Err(unreachable("no pair of RDMA ports transfers data"));
    }
    Ok(agreed)
}

/// Reads a few bytes over each pair of ports, and drops the pairs that transfer none. A node that
/// named no memory is not probed: the first transfer is the test.
fn probe(
    ends: &mut Vec<PortLanes>,
    registered: &[Registered],
    deadline: Instant,
) -> Result<(), TransferError> {
    let (tell, told) = mpsc::channel();
    let begin = Instant::now();
    let mut open = HashSet::new();
    for (number, ends) in ends.iter().enumerate() {
        let place = registered
            .iter()
            .find(|place| place.rail == ends.there && place.length >= PROBE);
        let Some(place) = place else {
            continue;
        };
        let range = Extent {
            segment: place.segment,
            offset: Offset(0),
            length: PROBE,
        };
        let memory = Region::allocate(PROBE).whole();
        let into = RegisteredPart {
            of: memory.clone(),
            slice: memory,
        };
        let transfer = ends.transfer(Verb::Read, &range, &[into])?;
        let tell = tell.clone();
        open.insert(number);
        ends.reads.submit(vec![transfer], move |outcomes| {
            // After the timeout no caller receives the result.
            let _too_late = tell.send((number, outcomes.iter().all(Result::is_ok)));
        });
    }
    drop(tell);
    let mut until = deadline.min(begin + PROBE_TIMEOUT);
    while !open.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        let Ok((number, came)) = told.recv_timeout(left) else {
            break;
        };
        if came {
            open.remove(&number);
            // Once one pair has answered, working pairs answer about as fast.
            let now = Instant::now();
            until = until.min(now + PROBE_PAUSE.max((now - begin) * 2));
        }
    }
    let mut number = 0;
    ends.retain(|ends| {
        let came = !open.contains(&number);
        number += 1;
        if came {
            ends.cooldowns.worked(ends.pair);
        } else {
            tracing::warn!(
                rail = ends.rail.name(),
                "no data arrives over a pair of RDMA ports: the pair enters cooldown"
            );
            ends.cooldowns.failed(ends.pair, Instant::now());
        }
        came
    });
    Ok(())
}

/// A link of queue pairs.
pub(crate) struct RdmaLink {
    address: SocketAddr,
    open: Arc<OpenRdmaLink>,
}

/// Marks a transfer in progress: its ranges stay in the cache.
pub(crate) struct Using {
    open: Arc<OpenRdmaLink>,
    begun: Vec<u64>,
}

impl Drop for Using {
    fn drop(&mut self) {
        for (ends, begun) in self.open.ends.iter().zip(&self.begun) {
            ends.ranges.end(*begun);
        }
    }
}

/// The parts of a link, alive until the link and all its futures are dropped.
pub(super) struct OpenRdmaLink {
    pub(super) control: Arc<Control>,
    /// Carries small writes.
    inline: Option<Arc<Channel>>,
    pub(super) incarnation: Incarnation,
    ends: Vec<PortLanes>,
    /// When a pair's cooldown ends. The link then counts as closed, because only a new link uses
    /// the pair.
    again: Option<Instant>,
    pub(super) copiers: Copiers,
    pub(super) deadlines: Deadlines,
    chooser: LaneChooser,
}

/// The two lanes of one port, and the node's memory as seen by the port.
pub(super) struct PortLanes {
    rail: Arc<Rail>,
    reads: RdmaLane,
    writes: RdmaLane,
    /// The bytes that the lanes have yet to move.
    load: Arc<AtomicU64>,
    /// The node's port at the other end.
    there: u8,
    ranges: RangeCache,
    pair: PortPair,
    cooldowns: Arc<PairCooldowns>,
}

impl OpenRdmaLink {
    /// The lanes for transfers from or into this memory.
    pub(super) fn lanes_near(&self, memory: Option<&Slice>) -> &PortLanes {
        let load = |number| {
            let ends = self.ends.get(number);
            ends.map_or(0, |ends: &PortLanes| ends.load.load(Ordering::Relaxed))
        };
        self.ends
            .get(self.chooser.lane(memory, load))
            .expect("invariant: a link has at least one port")
    }

    /// Ends the link: work in flight ends with an error, and the node ends its queue pairs.
    pub(super) fn fail(&self, error: &TransferError) {
        self.control.abort(error);
    }

    /// Whether every port has a registration of the extent.
    pub(super) fn knows(&self, extent: &Extent) -> bool {
        self.ends
            .iter()
            .all(|ends| ends.ranges.find(extent).is_some())
    }

    /// Stores the registrations of the range around an extent.
    pub(super) fn learn(
        &self,
        extent: &Extent,
        places: &[Registered],
    ) -> Result<(), TransferError> {
        for place in places.iter().filter(|it| it.segment == extent.segment) {
            let ends = self.ends.iter().filter(|ends| ends.there == place.rail);
            for ends in ends {
                if !ends.ranges.learn(*place) {
                    return Err(status(Code::Malformed));
                }
            }
        }
        if self.knows(extent) {
            return Ok(());
        }
        Err(status(Code::OutOfRange))
    }

    fn abort_lanes(&self) {
        for ends in &self.ends {
            ends.reads.abort();
            ends.writes.abort();
        }
    }

    fn is_open(&self) -> bool {
        let lanes = |ends: &PortLanes| ends.reads.is_open() && ends.writes.is_open();
        let is_whole = self.again.is_none_or(|again| Instant::now() < again);
        is_whole && self.control.is_open() && self.ends.iter().all(lanes)
    }
}

impl PortLanes {
    /// A transfer of one range of a segment.
    pub(super) fn transfer(
        &self,
        verb: Verb,
        range: &Extent,
        local: &[RegisteredPart],
    ) -> Result<Transfer, TransferError> {
        let Some(remote) = self.ranges.find(range) else {
            return Err(status(Code::OutOfRange));
        };
        let register = |part: &RegisteredPart| match self.rail.cached(&part.of) {
            Ok(registration) => Ok((registration, part.slice.clone())),
            // Some kernels cannot register read-only memory. Such a source is copied.
            Err(error) if error.kind() == io::ErrorKind::Unsupported && verb == Verb::Write => {
                let copy = Region::from(part.slice.to_vec()).whole();
                Ok((self.rail.cached(&copy)?, copy))
            }
            Err(error) => Err(error),
        };
        let local: io::Result<Vec<_>> = local.iter().map(register).collect();
        Ok(Transfer {
            verb,
            remote,
            local: local.map_err(|error| local_fault("memory", &error))?,
        })
    }

    /// Moves bytes. `done` gets one outcome an item and must not block.
    pub(super) fn submit(
        &self,
        open: &Arc<OpenRdmaLink>,
        verb: Verb,
        transfers: Vec<Transfer>,
        deadline: Instant,
        done: impl FnOnce(Vec<Result<(), TransferError>>) + Send + 'static,
    ) {
        let (pair, cooldowns) = (self.pair, self.cooldowns.clone());
        let flight = Arc::new(Flight {
            pair,
            cooldowns: cooldowns.clone(),
            open: Arc::downgrade(open),
            is_done: AtomicBool::new(false),
        });
        let tracked: Arc<dyn Expire> = flight.clone();
        open.deadlines.track(deadline, &tracked);
        let lane = match verb {
            Verb::Read => &self.reads,
            Verb::Write => &self.writes,
        };
        let bytes = transfers.iter().map(Transfer::length).sum();
        self.load.fetch_add(bytes, Ordering::Relaxed);
        let load = self.load.clone();
        lane.submit(transfers, move |outcomes| {
            load.fetch_sub(bytes, Ordering::Relaxed);
            flight.is_done.store(true, Ordering::Release);
            let late = Instant::now() >= deadline;
            let is_path = |outcome: &Result<(), WorkError>| {
                matches!(outcome, Err(error) if error.fault == Fault::Path)
            };
            if outcomes.iter().any(is_path) {
                cooldowns.failed(pair, Instant::now());
            }
            let outcomes = outcomes.into_iter();
            done(
                outcomes
                    .map(|outcome| outcome.map_err(|error| failed(&error, late)))
                    .collect(),
            );
        });
    }
}

/// A failure of this process or its host: another node would give the same.
fn local_fault(what: &str, error: &io::Error) -> TransferError {
    let is_limit = matches!(
        error.raw_os_error(),
        Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM)
    );
    let (code, remedy) = if is_limit || error.kind() == io::ErrorKind::OutOfMemory {
        let remedy = "; raise this process's limit of locked memory (ulimit -l)";
        (Code::TooManyHeld, remedy)
    } else {
        (Code::Unreachable, "")
    };
    TransferError {
        code,
        message: format!("{what} is not available for RDMA on this host: {error}{remedy}"),
    }
}

fn failed(error: &WorkError, late: bool) -> TransferError {
    if late {
        deadline_exceeded()
    } else {
        unreachable(error)
    }
}

/// Work on a lane that must end by a deadline. A device cannot take back a single work request, so
/// a missed deadline ends the link.
struct Flight {
    pair: PortPair,
    cooldowns: Arc<PairCooldowns>,
    open: Weak<OpenRdmaLink>,
    is_done: AtomicBool,
}

impl Expire for Flight {
    fn expire(&self) {
        if !self.is_done()
            && let Some(open) = self.open.upgrade()
        {
            self.cooldowns.failed(self.pair, Instant::now());
            open.fail(&deadline_exceeded());
        }
    }

    fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }
}

impl RdmaLink {
    /// While the guard lives, the link forgets no range that it learns or uses.
    pub(crate) fn using(&self) -> Using {
        let begun = self.open.ends.iter().map(|ends| ends.ranges.begin());
        Using {
            begun: begun.collect(),
            open: self.open.clone(),
        }
    }

    /// Asks the peer for the registrations of unknown extents. One outcome an extent; an error
    /// means that the extent is not registered.
    pub(crate) fn locate(
        &self,
        extents: Vec<Extent>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<(), TransferError>>> {
        let (batch, outcomes) = self.open.deadlines.batch(extents.len(), deadline);
        locate::start(&self.open, &batch, extents);
        resolve(self.open.clone(), outcomes)
    }
}

impl std::fmt::Debug for RdmaLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rdma::Link({})", self.address)
    }
}

impl Link for RdmaLink {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn read(
        &self,
        _epoch: Epoch,
        ops: Vec<ReadOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        let (batch, outcomes) = self.open.deadlines.batch(ops.len(), deadline);
        read::start(&self.open, &batch, ops, deadline);
        resolve(self.open.clone(), outcomes)
    }

    fn write(
        &self,
        ops: Vec<WriteOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        if let Some(inline) = &self.open.inline
            && is_small(ops.iter().map(|op| op.grant.extent.length.0))
        {
            return inline::write(inline.clone(), self.open.incarnation, ops, deadline);
        }
        let (batch, outcomes) = self.open.deadlines.batch(ops.len(), deadline);
        let mut writes = Vec::with_capacity(ops.len());
        for (item, mut write) in ops.into_iter().enumerate() {
            match check_write(&write) {
                Ok(length) => {
                    // A node that never answers would otherwise hold the memory forever.
                    batch.keep(item, std::mem::take(&mut write.from));
                    writes.push((length.0, (item, write)));
                }
                Err(error) => batch.end(item, Err(error)),
            }
        }
        pack(writes, u64::MAX, |_, items| {
            let batch = batch.clone();
            write::start(&self.open, batch, items, deadline);
        });
        resolve(self.open.clone(), outcomes)
    }

    fn sums(
        &self,
        epoch: Epoch,
        ops: Vec<SumsOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>> {
        let (batch, outcomes) = self.open.deadlines.batch(ops.len(), deadline);
        let (control, incarnation) = (&self.open.control, self.open.incarnation);
        ask_sums(control, incarnation, epoch, ops, &batch);
        resolve(self.open.clone(), outcomes)
    }

    fn pin(
        &self,
        _epoch: Epoch,
        _extent: Extent,
        _deadline: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>> {
        let error = TransferError {
            code: Code::InvalidArgument,
            message: "views need shared memory, not RDMA".to_owned(),
        };
        futures::future::ready(Err(error)).boxed()
    }

    fn is_open(&self) -> bool {
        let inline = self.open.inline.as_ref();
        self.open.is_open() && inline.is_none_or(|inline| inline.is_open())
    }
}
