//! The client's side of TCP.

use super::exchange::{Exchange, ExchangeOutcomes, Work};
use super::lane::{TcpLane, open};
use crate::channel::Channel;
use crate::inline::{self, is_small};
use crate::link::{Link, ReadOp, SumsOp, TransferError, TransferResult, TransportKind, WriteOp};
use crate::memory::Slice;
use crate::outcomes::{Batch, invalid, resolve, unreachable};
use crate::split::{Part, cut_read, join_parts, pack, spread, write_payload};
use crate::timer::Timer;
use crate::wire::DataTls;
use futures::future::{BoxFuture, FutureExt};
use kvpool_types::wire::data::{Hello, HelloReply};
use kvpool_types::{Checksum, Epoch, Extent, Incarnation, Token};
use parking_lot::Mutex;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The most checksum bytes that one frame asks for. They come back as meta.
const SUMS_BYTES: u64 = 1 << 20;

/// Options of a link.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// The number of connections, at least 1.
    pub connections: usize,
    /// The time limit for replacing a failed connection.
    pub reconnect: Duration,
    /// The TLS settings; `None` for a plain port.
    pub tls: Option<DataTls>,
    /// The source of the token for connections that the link opens after its first one.
    pub token: TokenSource,
}

/// The source of the present token, for a link that opens connections. A token may be renewed while a link
/// lives.
#[derive(Clone, Default)]
pub struct TokenSource(Option<Arc<dyn Fn() -> Token + Send + Sync>>);

impl TokenSource {
    /// Calls `current` for each new connection.
    pub fn new(current: impl Fn() -> Token + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(current)))
    }

    /// `hello` with the present token. Without a source, `hello` keeps its own token.
    pub(super) fn renew(&self, hello: &Hello) -> Hello {
        let own = || hello.token.clone();
        Hello {
            token: self.0.as_ref().map_or_else(own, |current| current()),
            ..hello.clone()
        }
    }
}

impl std::fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenSource")
    }
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            connections: 2,
            reconnect: Duration::from_secs(2),
            tls: None,
            token: TokenSource::default(),
        }
    }
}

/// Opens a link to the node at `address`, by `deadline`. Blocks.
///
/// # Errors
///
/// [`Code::Unreachable`] when the node cannot be connected, [`Code::DeadlineExceeded`], or the code
/// of the node's refusal.
///
/// [`Code::Unreachable`]: kvpool_types::Code::Unreachable
/// [`Code::DeadlineExceeded`]: kvpool_types::Code::DeadlineExceeded
pub fn connect(
    address: SocketAddr,
    hello: Hello,
    deadline: Instant,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    connect_with(address, hello, deadline, &ConnectOptions::default())
}

/// Like [`connect`], with the given options.
///
/// # Errors
///
/// As [`connect`]. [`Code::InvalidArgument`] when `connections` is 0.
///
/// [`Code::InvalidArgument`]: kvpool_types::Code::InvalidArgument
pub fn connect_with(
    address: SocketAddr,
    hello: Hello,
    deadline: Instant,
    options: &ConnectOptions,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    if options.connections == 0 {
        return Err(invalid("a link needs at least one connection".to_owned()));
    }
    let (socket, reply) = open(address, &hello, deadline, options.tls.as_ref())?;
    // The link's other connections must reach the same incarnation.
    let hello = Hello {
        incarnation: reply.incarnation,
        ..hello
    };
    // Without a runtime there is no channel, and small batches use the lanes too.
    let (inline, mut first) = if tokio::runtime::Handle::try_current().is_ok() {
        let channel = Channel::from_socket(socket, reply.features).map_err(unreachable)?;
        (Some(Arc::new(channel)), None)
    } else {
        (None, Some(socket))
    };
    // Lanes without a socket connect when they get work.
    let lanes = OpenLanes::start(options.connections, || {
        TcpLane::start(address, hello.clone(), options.clone(), first.take())
    })
    .map_err(unreachable)?;
    let timer = Timer::start("kvpool-tcp-timer", {
        let lanes = lanes.0.clone();
        move |now| lanes.iter().filter_map(|lane| lane.expire(now)).min()
    })
    .map_err(unreachable)?;
    let link = TcpLink(Arc::new(OpenTcpLink {
        address,
        incarnation: reply.incarnation,
        inline,
        lanes,
        timer,
        turn: Mutex::new(0),
    }));
    Ok((Arc::new(link), reply))
}

struct TcpLink(Arc<OpenTcpLink>);

/// Lanes that close when this is dropped. The threads of the lanes hold the lanes, so nothing else would end
/// the threads.
struct OpenLanes(Vec<Arc<TcpLane>>);

impl OpenLanes {
    /// Starts `count` lanes. When one fails, the earlier ones close.
    fn start(
        count: usize,
        mut start: impl FnMut() -> io::Result<Arc<TcpLane>>,
    ) -> io::Result<Self> {
        let mut lanes = Self(Vec::with_capacity(count));
        for _ in 0..count {
            lanes.0.push(start()?);
        }
        Ok(lanes)
    }

    fn close(&self) {
        for lane in &self.0 {
            lane.close(unreachable("the link was closed"));
        }
    }
}

impl Drop for OpenLanes {
    fn drop(&mut self) {
        self.close();
    }
}

/// The state that a link and all its futures share. The lanes close when the last of them is dropped.
struct OpenTcpLink {
    address: SocketAddr,
    incarnation: Incarnation,
    /// Carries small batches.
    inline: Option<Arc<Channel>>,
    lanes: OpenLanes,
    timer: Timer,
    /// The next lane among equally loaded ones.
    turn: Mutex<usize>,
}

impl OpenTcpLink {
    fn submit(&self, epoch: Epoch, deadline: Instant, bytes: u64, work: Work) {
        let lane = self.least_loaded();
        // Queued before the timer is set, so that the next scan sees the exchange.
        lane.submit(Exchange::new(
            epoch,
            deadline,
            work,
            lane.load().clone(),
            bytes,
        ));
        self.timer.scan_by(deadline);
    }

    /// The channel, if there is one and the batch is small enough for it.
    fn inline(&self, payloads: impl ExactSizeIterator<Item = u64>) -> Option<Arc<Channel>> {
        let inline = self.inline.as_ref()?;
        is_small(payloads).then(|| inline.clone())
    }

    fn least_loaded(&self) -> &TcpLane {
        let mut turn = self.turn.lock();
        let (first, second) = self.lanes.0.split_at(*turn);
        *turn = (*turn + 1) % self.lanes.0.len();
        second
            .iter()
            .chain(first)
            .min_by_key(|lane| lane.load().load(Ordering::Relaxed))
            .expect("invariant: a link has at least one lane")
    }
}

impl std::fmt::Debug for TcpLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tcp::Link({})", self.0.address)
    }
}

impl Link for TcpLink {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn read(
        &self,
        epoch: Epoch,
        ops: Vec<ReadOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        if let Some(inline) = self.0.inline(ops.iter().map(|op| op.length().0)) {
            return inline::read(inline, self.0.incarnation, epoch, ops, deadline);
        }
        let mut parts: Vec<Part> = Vec::with_capacity(ops.len());
        let early: Vec<Option<TransferError>> = ops
            .iter()
            .enumerate()
            .map(|(op, read)| cut_read(op, read, &mut parts).err())
            .collect();
        drop(ops);
        let of_ops: Vec<_> = parts
            .iter()
            .map(|part| (part.op, part.item.length))
            .collect();
        let (batch, outcomes) = Batch::new(parts.len());
        let parts = parts
            .into_iter()
            .enumerate()
            .map(|(index, part)| (part.item.length.0, (index, part)))
            .collect();
        spread(parts, self.0.lanes.0.len(), |parts| {
            let bytes = parts.iter().map(|(_, part)| part.item.length.0).sum();
            let mut indices = Vec::with_capacity(parts.len());
            let mut items = Vec::with_capacity(parts.len());
            let mut into = Vec::with_capacity(parts.len());
            for (index, part) in parts {
                indices.push(index);
                items.push(part.item);
                into.push(part.into);
            }
            let work = Work::Read {
                items,
                into,
                outcomes: ExchangeOutcomes::new(batch.clone(), indices),
            };
            self.0.submit(epoch, deadline, bytes, work);
        });
        let open = self.0.clone();
        async move {
            let outcomes = outcomes
                .await
                .expect("invariant: every item of a batch is ended");
            drop(open);
            join_parts(early, of_ops, outcomes)
        }
        .boxed()
    }

    fn write(
        &self,
        ops: Vec<WriteOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        if let Some(inline) = self.0.inline(ops.iter().map(|op| op.grant.extent.length.0)) {
            return inline::write(inline, self.0.incarnation, ops, deadline);
        }
        let (batch, outcomes) = Batch::<Checksum>::new(ops.len());
        let mut writes = Vec::with_capacity(ops.len());
        for (index, write) in ops.into_iter().enumerate() {
            match write_payload(&write) {
                Ok(payload) => writes.push((write.grant.extent.length.0, (index, payload, write))),
                Err(error) => batch.end(index, Err(error)),
            }
        }
        spread(writes, self.0.lanes.0.len(), |writes| {
            let bytes = writes.iter().map(|(_, payload, _)| payload).sum();
            let epoch = writes
                .iter()
                .map(|(_, _, write)| write.grant.epoch)
                .max()
                .unwrap_or_default();
            let mut indices = Vec::with_capacity(writes.len());
            let mut grants = Vec::with_capacity(writes.len());
            let mut from = Vec::with_capacity(writes.len());
            for (index, _, write) in writes {
                indices.push(index);
                grants.push(write.grant);
                from.push(write.from);
            }
            let work = Work::Write {
                grants,
                from,
                sent: Mutex::default(),
                outcomes: ExchangeOutcomes::new(batch.clone(), indices),
            };
            self.0.submit(epoch, deadline, bytes, work);
        });
        resolve(self.0.clone(), outcomes)
    }

    fn sums(
        &self,
        epoch: Epoch,
        ops: Vec<SumsOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>> {
        let (batch, outcomes) = Batch::new(ops.len());
        let ops = ops
            .into_iter()
            .enumerate()
            .map(|(index, op)| (op.extent.length.chunks() * 8, (index, op)))
            .collect();
        pack(ops, SUMS_BYTES, |_, ops| {
            let (indices, ops) = ops.into_iter().unzip();
            let work = Work::Sums {
                ops,
                outcomes: ExchangeOutcomes::new(batch.clone(), indices),
            };
            self.0.submit(epoch, deadline, 0, work);
        });
        resolve(self.0.clone(), outcomes)
    }

    fn pin(
        &self,
        _epoch: Epoch,
        extent: Extent,
        _deadline: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>> {
        let error = invalid(format!("{extent} cannot be pinned over TCP"));
        std::future::ready(Err(error)).boxed()
    }

    fn close(&self) {
        self.0.lanes.close();
        // Small payloads were copied into frames, so the channel holds no memory of the caller.
        if let Some(inline) = &self.0.inline {
            inline.fail(unreachable("the link was closed"));
        }
    }

    fn is_open(&self) -> bool {
        let inline = self.0.inline.as_ref();
        inline.is_none_or(|inline| inline.is_open())
            && self.0.lanes.0.iter().all(|lane| lane.is_open())
    }
}

#[cfg(test)]
mod tests {
    use super::super::lane::tests::lane_to_a_silent_peer;
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_link_whose_second_lane_does_not_start_ends_the_first() {
        let mut started: Vec<(Arc<TcpLane>, UnixStream)> = Vec::new();
        let lanes = OpenLanes::start(2, || {
            if !started.is_empty() {
                // As where the process may have no more threads.
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let (lane, peer) = lane_to_a_silent_peer();
            started.push((lane.clone(), peer));
            Ok(lane)
        });
        assert!(lanes.is_err());
        let limit = Instant::now() + Duration::from_secs(5);
        // Its thread holds the lane.
        while Arc::strong_count(&started[0].0) > 1 {
            assert!(
                Instant::now() < limit,
                "the thread of the first lane is there"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
