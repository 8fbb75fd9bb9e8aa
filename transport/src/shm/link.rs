//! The asking side.

use super::board::Pinner;
use super::control::{Answer, Control};
use super::copy::Copiers;
use super::read;
use super::segments::Segments;
use super::write::{self, Writes};
use crate::batch::{Batch, Outcomes, deadline_exceeded, invalid, unreachable};
use crate::frame::status;
use crate::handshake::say_hello;
use crate::link::{Link, ReadOp, TransferError, TransferResult, TransportKind, WriteOp};
use crate::memory::Slice;
use crate::socket::set_timeouts;
use crate::split::{check_write, pack};
use crate::timer::Timer;
use futures::future::{BoxFuture, FutureExt};
use kvpool_types::wire::data::{
    Hello, HelloReply, MapReply, MapRequest, PinRequest, ReadItem, ReadRequest, Statuses, SumsReply,
};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Checksum, Code, Epoch, Extent, Incarnation, Offset};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

/// The most checksums that one frame asks for, in bytes: they come back as meta.
const SUMS_BYTES: u64 = 1 << 20;

/// How a link works.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// How many threads copy.
    pub copy_threads: usize,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { copy_threads: 2 }
    }
}

/// Opens a link to the node whose socket is at `path`, by `deadline`. Blocks.
pub fn connect(
    path: &Path,
    hello: Hello,
    deadline: Instant,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    connect_with(path, hello, deadline, &ConnectOptions::default())
}

/// Like [`connect`], with other options than the default ones.
pub fn connect_with(
    path: &Path,
    hello: Hello,
    deadline: Instant,
    options: &ConnectOptions,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    if options.copy_threads == 0 {
        return Err(invalid("a link has at least one copy thread".to_owned()));
    }
    let socket = open_socket(path, deadline).map_err(|error| match error {
        Errno::AGAIN | Errno::INPROGRESS => deadline_exceeded(),
        error => unreachable(format!("{}: {}", path.display(), io::Error::from(error))),
    })?;
    let reply = say_hello(socket.as_fd(), &hello, deadline)?;
    set_timeouts(socket.as_fd(), None).map_err(unreachable)?;
    let control = Arc::new(Control::start(socket).map_err(unreachable)?);
    let batches: Arc<Batches> = Arc::default();
    let timer = Timer::start("kvpool-shm-timer", {
        let batches = batches.clone();
        move |now| batches.expire(now)
    })
    .map_err(unreachable)?;
    let link = ShmLink(Arc::new(Open {
        segments: Segments::new(control.clone(), reply.incarnation),
        board: ask_for_board(&control, reply.incarnation),
        control,
        incarnation: reply.incarnation,
        process: std::process::id(),
        copiers: Copiers::start(options.copy_threads).map_err(unreachable)?,
        batches,
        timer,
    }));
    Ok((Arc::new(link), reply))
}

/// Asks for the pin board. Nobody waits for it: until it is there, pins take a round trip.
fn ask_for_board(control: &Control, incarnation: Incarnation) -> Arc<OnceLock<Arc<Pinner>>> {
    let board = Arc::new(OnceLock::new());
    let request = MapRequest {
        incarnation,
        segment: MapRequest::BOARD,
        writable: true,
    };
    let given = board.clone();
    control.request(
        Op::Map,
        Epoch::default(),
        &request,
        move |answer| match answer.and_then(map_board) {
            Ok(pinner) => {
                given.get_or_init(|| Arc::new(pinner));
            }
            Err(error) => tracing::debug!(%error, "the node gives no pin board"),
        },
    );
    board
}

fn map_board(mut answer: Answer) -> Result<Pinner, TransferError> {
    let reply: MapReply = answer.decode(Op::MapReply)?;
    let fd = answer
        .fd()
        .ok_or_else(|| unreachable("a pin board came without its descriptor"))?;
    Pinner::map(fd.as_fd(), reply.size).map_err(unreachable)
}

fn open_socket(path: &Path, deadline: Instant) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // A blocking connect obeys the timeout of sends.
    let left = deadline.saturating_duration_since(Instant::now());
    set_timeouts(socket.as_fd(), Some(left))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

struct ShmLink(Arc<Open>);

/// What a link has, until it and all that it was asked to do are done.
pub(super) struct Open {
    pub(super) control: Arc<Control>,
    pub(super) incarnation: Incarnation,
    pub(super) segments: Segments,
    pub(super) copiers: Copiers,
    /// What pins are taken on at once, when the node has given it.
    board: Arc<OnceLock<Arc<Pinner>>>,
    /// The id of the process that opened the link.
    process: u32,
    batches: Arc<Batches>,
    timer: Timer,
}

/// What the deadline ends.
trait Expire: Send + Sync {
    fn expire(&self);
    fn is_done(&self) -> bool;
}

impl<T: Send> Expire for Batch<T> {
    fn expire(&self) {
        Batch::expire(self);
    }

    fn is_done(&self) -> bool {
        Batch::is_done(self)
    }
}

/// The batches in progress and their deadlines.
#[derive(Default)]
struct Batches(Mutex<Tracked>);

#[derive(Default)]
struct Tracked {
    batches: Vec<(Instant, Weak<dyn Expire>)>,
    /// How many there may be before those that are done are thrown out.
    sweep_at: usize,
}

impl Batches {
    fn track(&self, deadline: Instant, batch: Weak<dyn Expire>) {
        let mut tracked = self.0.lock();
        if tracked.batches.len() >= tracked.sweep_at {
            tracked.batches.retain(|(_, batch)| is_live(batch));
            tracked.sweep_at = 64 + 2 * tracked.batches.len();
        }
        tracked.batches.push((deadline, batch));
    }

    /// Ends what waits past its deadline; when the next one is due.
    fn expire(&self, now: Instant) -> Option<Instant> {
        let mut late = Vec::new();
        let next = {
            let mut tracked = self.0.lock();
            tracked.batches.retain(|(deadline, batch)| {
                if *deadline <= now {
                    late.extend(batch.upgrade());
                }
                *deadline > now && is_live(batch)
            });
            let deadlines = tracked.batches.iter().map(|(deadline, _)| *deadline);
            deadlines.min()
        };
        for batch in late {
            batch.expire();
        }
        next
    }
}

fn is_live(batch: &Weak<dyn Expire>) -> bool {
    batch.upgrade().is_some_and(|batch| !batch.is_done())
}

impl Open {
    /// A batch that its deadline ends, and its outcomes.
    fn batch<T: Send + 'static>(
        &self,
        count: usize,
        deadline: Instant,
    ) -> (Arc<Batch<T>>, Outcomes<T>) {
        let (batch, outcomes) = Batch::new(count);
        if count > 0 {
            let tracked: Arc<dyn Expire> = batch.clone();
            self.batches.track(deadline, Arc::downgrade(&tracked));
            self.timer.sooner(deadline);
        }
        (batch, outcomes)
    }

    /// Whether a thread of the caller may touch the mappings: the link has not failed, and the caller
    /// is no child of the process that opened it, for a child does not inherit them.
    pub(super) fn is_usable(&self) -> bool {
        self.control.is_open() && std::process::id() == self.process
    }
}

impl std::fmt::Debug for ShmLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "shm::Link({})", self.0.incarnation)
    }
}

impl Link for ShmLink {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn read(
        &self,
        _epoch: Epoch,
        ops: Vec<ReadOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        let (batch, outcomes) = self.0.batch(ops.len(), deadline);
        read::start(&self.0, &batch, ops, deadline);
        resolve(self.0.clone(), outcomes)
    }

    fn read_now(
        &self,
        _epoch: Epoch,
        ops: &[ReadOp],
        deadline: Instant,
    ) -> Option<Vec<TransferResult>> {
        read::now(&self.0, ops, deadline)
    }

    fn write(
        &self,
        ops: Vec<WriteOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        let (batch, outcomes) = self.0.batch(ops.len(), deadline);
        let mut writes = Vec::with_capacity(ops.len());
        for (item, write) in ops.into_iter().enumerate() {
            match check_write(&write) {
                Ok(length) => writes.push((length.0, (item, write))),
                Err(error) => batch.end(item, Err(error)),
            }
        }
        pack(writes, u64::MAX, |_, items| {
            let batch = batch.clone();
            write::start(
                &self.0,
                Writes {
                    batch,
                    items,
                    deadline,
                },
            );
        });
        resolve(self.0.clone(), outcomes)
    }

    fn sums(
        &self,
        epoch: Epoch,
        extents: Vec<Extent>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>> {
        let (batch, outcomes) = self.0.batch(extents.len(), deadline);
        let extents = extents.into_iter().enumerate();
        let extents = extents
            .map(|(item, extent)| (extent.length.chunks() * 8, (item, extent)))
            .collect();
        pack(extents, SUMS_BYTES, |_, extents| {
            let (indices, items): (Vec<usize>, Vec<ReadItem>) = extents
                .into_iter()
                .map(|(item, extent)| {
                    let whole = ReadItem {
                        extent,
                        from: Offset(0),
                        length: extent.length,
                    };
                    (item, whole)
                })
                .unzip();
            let request = ReadRequest {
                incarnation: self.0.incarnation,
                items,
            };
            let batch = batch.clone();
            self.0
                .control
                .request(Op::Sums, epoch, &request, move |answer| {
                    let reply = answer.and_then(|answer| answer.decode(Op::SumsReply));
                    match reply {
                        Ok(SumsReply(sums)) if sums.len() == indices.len() => {
                            for (item, sums) in indices.into_iter().zip(sums) {
                                batch.end(item, sums.map_err(status));
                            }
                        }
                        reply => {
                            let error = reply.err().unwrap_or_else(|| status(Code::Malformed));
                            for item in indices {
                                batch.end(item, Err(error.clone()));
                            }
                        }
                    }
                });
        });
        resolve(self.0.clone(), outcomes)
    }

    fn pin(
        &self,
        epoch: Epoch,
        extent: Extent,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>> {
        let (batch, outcomes) = self.0.batch::<Slice>(1, deadline);
        let open = self.0.clone();
        let request = PinRequest {
            incarnation: open.incarnation,
            extents: vec![extent],
        };
        self.0
            .control
            .request(Op::Pin, epoch, &request, move |answer| {
                let pinned = answer.and_then(|answer| {
                    let Statuses(codes) = answer.decode(Op::Statuses)?;
                    match codes.as_slice() {
                        [Code::Ok] => Ok(()),
                        [code] => Err(status(*code)),
                        _ => Err(status(Code::Malformed)),
                    }
                });
                if let Err(error) = pinned {
                    return batch.end(0, Err(error));
                }
                // From here on, dropping this undoes the pin, also when nobody waits any more.
                let pin = Pin {
                    control: open.control.clone(),
                    request: PinRequest {
                        incarnation: open.incarnation,
                        extents: vec![extent],
                    },
                };
                open.segments.with(extent.segment, false, move |mapped| {
                    let view = mapped.and_then(|region| {
                        region
                            .slice(extent.offset, extent.length)
                            .ok_or_else(|| status(Code::OutOfRange))
                    });
                    batch.end(0, view.map(|view| view.with_hook(Arc::new(pin))));
                });
            });
        let outcomes = resolve(self.0.clone(), outcomes);
        async move {
            outcomes
                .await
                .pop()
                .expect("invariant: a batch of one has one outcome")
        }
        .boxed()
    }

    fn pin_now(&self, epoch: Epoch, extent: Extent) -> Option<Slice> {
        let open = &self.0;
        let board = open.board.get()?;
        if !open.is_usable() {
            return None;
        }
        let region = open.segments.mapped(extent.segment)?;
        let view = region.slice(extent.offset, extent.length)?;
        let pin = board.pin(epoch, extent)?;
        Some(view.with_hook(Arc::new(pin)))
    }

    fn is_open(&self) -> bool {
        self.0.control.is_open()
    }
}

/// A pin at the node. Keeps the control socket open until it is undone.
struct Pin {
    control: Arc<Control>,
    request: PinRequest,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.control
            .request(Op::Unpin, Epoch::default(), &self.request, |answer| {
                if let Err(error) = answer {
                    tracing::debug!(%error, "a pin ends with the process, not before");
                }
            });
    }
}

/// The outcomes, with the link kept open until they are there.
fn resolve<T: Send + 'static>(
    open: Arc<Open>,
    outcomes: Outcomes<T>,
) -> BoxFuture<'static, Vec<Result<T, TransferError>>> {
    async move {
        let outcomes = outcomes
            .await
            .expect("invariant: every item of a batch is ended");
        drop(open);
        outcomes
    }
    .boxed()
}
