//! The client's side of shared memory.

use super::board::Pinner;
use super::read;
use super::segments::Segments;
use super::write::{self, Writes};
use crate::channel::Channel;
use crate::control::{Control, ControlAnswer, ask_sums};
use crate::copiers::Copiers;
use crate::deadlines::Deadlines;
use crate::frame::status;
use crate::handshake::say_hello;
use crate::inline::{self, is_small};
use crate::link::{Link, ReadOp, SumsOp, TransferError, TransferResult, TransportKind, WriteOp};
use crate::memory::{OwnProcess, Slice};
use crate::outcomes::{deadline_exceeded, invalid, resolve, unreachable};
use crate::socket::set_timeouts;
use crate::split::{check_write, pack};
use futures::future::{BoxFuture, FutureExt};
use kvpool_types::wire::data::{Hello, HelloReply, MapReply, MapRequest, PinRequest, Statuses};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Checksum, Code, Epoch, Extent, Incarnation};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Options of a link.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// The number of copy threads, at least 1.
    pub copy_threads: usize,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { copy_threads: 2 }
    }
}

/// Opens a link to the node whose socket is at `path`, by `deadline`. Blocks.
///
/// # Errors
///
/// [`Code::Unreachable`] when the socket cannot be connected, [`Code::DeadlineExceeded`], or the
/// code of the node's refusal.
pub fn connect(
    path: &Path,
    hello: Hello,
    deadline: Instant,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    connect_with(path, hello, deadline, &ConnectOptions::default())
}

/// Like [`connect`], with the given options.
///
/// # Errors
///
/// As [`connect`]. [`Code::InvalidArgument`] when `copy_threads` is 0.
pub fn connect_with(
    path: &Path,
    hello: Hello,
    deadline: Instant,
    options: &ConnectOptions,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    if options.copy_threads == 0 {
        return Err(invalid("a link needs at least one copy thread".to_owned()));
    }
    let (socket, reply) = greet(path, &hello, deadline)?;
    // Without a runtime there is no channel, and small writes are announced like large writes.
    let inline = if tokio::runtime::Handle::try_current().is_ok() {
        // The second connection must reach the same incarnation.
        let hello = Hello {
            incarnation: reply.incarnation,
            ..hello
        };
        let (socket, _) = greet(path, &hello, deadline)?;
        Some(Arc::new(
            Channel::from_socket(socket, reply.features).map_err(unreachable)?,
        ))
    } else {
        None
    };
    let control = Arc::new(Control::start(socket, "shm", reply.features).map_err(unreachable)?);
    let link = ShmLink(Arc::new(OpenShmLink {
        segments: Segments::new(control.clone(), reply.incarnation),
        board: ask_for_board(&control, reply.incarnation),
        control,
        inline,
        incarnation: reply.incarnation,
        process: OwnProcess::mark().map_err(unreachable)?,
        copiers: Copiers::start("kvpool-shm-copy", options.copy_threads).map_err(unreachable)?,
        deadlines: Deadlines::start("kvpool-shm-timer").map_err(unreachable)?,
    }));
    Ok((Arc::new(link), reply))
}

/// Connects and says hello, by `deadline`.
fn greet(
    path: &Path,
    hello: &Hello,
    deadline: Instant,
) -> Result<(OwnedFd, HelloReply), TransferError> {
    let socket = open_socket(path, deadline).map_err(|error| match error {
        Errno::AGAIN | Errno::INPROGRESS => deadline_exceeded(),
        error => unreachable(format!("{}: {}", path.display(), io::Error::from(error))),
    })?;
    let reply = say_hello(socket.as_fd(), hello, deadline)?;
    set_timeouts(socket.as_fd(), None).map_err(unreachable)?;
    Ok((socket, reply))
}

/// Requests the pin board without waiting. Until it arrives, pins take a round trip.
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
            Err(error) => tracing::debug!(%error, "the node gave no pin board"),
        },
    );
    board
}

fn map_board(mut answer: ControlAnswer) -> Result<Pinner, TransferError> {
    let reply: MapReply = answer.decode(Op::MapReply)?;
    let fd = answer
        .fd()
        .ok_or_else(|| unreachable("the node sent a pin board without its descriptor"))?;
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
    // A blocking connect obeys the send timeout. The kernel rounds that up to ticks.
    let left = deadline.saturating_duration_since(Instant::now());
    set_timeouts(socket.as_fd(), Some(left))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

struct ShmLink(Arc<OpenShmLink>);

/// The parts of a link, alive until the link and all its futures are dropped.
pub(super) struct OpenShmLink {
    pub(super) control: Arc<Control>,
    /// Carries small writes.
    inline: Option<Arc<Channel>>,
    pub(super) incarnation: Incarnation,
    pub(super) segments: Segments,
    pub(super) copiers: Copiers,
    /// The pin board, once the node has sent it.
    board: Arc<OnceLock<Arc<Pinner>>>,
    process: OwnProcess,
    deadlines: Deadlines,
}

impl OpenShmLink {
    /// Whether the caller's thread may touch the mappings. The link must be open, and the caller
    /// must not be a forked child of the process that opened it, because a child does not inherit
    /// the mappings.
    pub(super) fn is_usable(&self) -> bool {
        self.control.is_open() && self.process.is_current()
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
        let (batch, outcomes) = self.0.deadlines.batch(ops.len(), deadline);
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
        if let Some(inline) = &self.0.inline
            && is_small(ops.iter().map(|op| op.grant.extent.length.0))
        {
            return inline::write(inline.clone(), self.0.incarnation, ops, deadline);
        }
        let (batch, outcomes) = self.0.deadlines.batch(ops.len(), deadline);
        let mut writes = Vec::with_capacity(ops.len());
        for (item, mut write) in ops.into_iter().enumerate() {
            match check_write(&write) {
                Ok(length) => {
                    // The batch keeps the memory, because a node that never answers would hold it
                    // forever.
                    batch.keep(item, std::mem::take(&mut write.from));
                    writes.push((length.0, (item, write)));
                }
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
        ops: Vec<SumsOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>> {
        let (batch, outcomes) = self.0.deadlines.batch(ops.len(), deadline);
        let (control, incarnation) = (&self.0.control, self.0.incarnation);
        ask_sums(control, incarnation, epoch, ops, &batch);
        resolve(self.0.clone(), outcomes)
    }

    fn pin(
        &self,
        epoch: Epoch,
        extent: Extent,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>> {
        let (batch, outcomes) = self.0.deadlines.batch::<Slice>(1, deadline);
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
                // From here on the drop of `pin` removes the pin, also if the caller has left.
                let pin = NodePin {
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
        let inline = self.0.inline.as_ref();
        self.0.control.is_open() && inline.is_none_or(|inline| inline.is_open())
    }
}

/// A pin at the node. Keeps the control socket open until the pin is removed.
struct NodePin {
    control: Arc<Control>,
    request: PinRequest,
}

impl Drop for NodePin {
    fn drop(&mut self) {
        self.control
            .request(Op::Unpin, Epoch::default(), &self.request, |answer| {
                if let Err(error) = answer {
                    tracing::debug!(%error, "unpinning failed: the pin ends with the process");
                }
            });
    }
}
