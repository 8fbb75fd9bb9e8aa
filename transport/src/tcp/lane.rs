//! One connection of a link, and the queue of exchanges for it. A lane reconnects when its
//! connection has failed and the queue is not empty.

use super::exchange::Exchange;
use super::link::ConnectOptions;
use super::receive::receive_answers;
use super::send::send_request;
use crate::handshake::say_hello;
use crate::link::TransferError;
use crate::outcomes::{deadline_exceeded, unreachable};
use crate::socket::{notice_lost_peer, set_timeouts, shut_down, wait_until_ready};
use crate::threads;
use crate::wire::{DataTls, Wire, WireRef};
use kvpool_types::wire::data::{Hello, HelloReply};
use kvpool_types::wire::features::Features;
use kvpool_types::{Code, Incarnation};
use parking_lot::{Condvar, Mutex};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

pub(super) struct TcpLane {
    address: SocketAddr,
    /// Sent on each connection, with the present token. It names the incarnation that the first connection
    /// found.
    hello: Hello,
    options: ConnectOptions,
    state: Mutex<TcpLaneState>,
    changed: Condvar,
    load: Arc<AtomicU64>,
    next_request: AtomicU64,
}

struct TcpLaneState {
    /// Exchanges that are not assigned to a connection yet.
    queue: VecDeque<Arc<Exchange>>,
    wire: Option<Arc<TcpConnection>>,
    /// The reason why the lane is closed.
    closed: Option<TransferError>,
}

/// A connection after its hello.
pub(super) struct TcpConnection {
    socket: Wire,
    /// The features of the node at the other end.
    features: Features,
    dead: AtomicBool,
    /// Exchanges that were sent and not answered; `None` once the connection is dead.
    pending: Mutex<Option<HashMap<u64, Arc<Exchange>>>>,
}

impl TcpConnection {
    fn new(socket: Wire, features: Features) -> Arc<Self> {
        Arc::new(Self {
            socket,
            features,
            dead: AtomicBool::new(false),
            pending: Mutex::new(Some(HashMap::new())),
        })
    }

    pub(super) const fn takes_traces(&self) -> bool {
        self.features.has(Features::TRACE)
    }

    pub(super) fn socket(&self) -> WireRef<'_> {
        self.socket.as_ref()
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn pending(&self, request: u64) -> Option<Arc<Exchange>> {
        self.pending.lock().as_ref()?.get(&request).cloned()
    }

    pub(super) fn forget(&self, request: u64) {
        let forgotten = self
            .pending
            .lock()
            .as_mut()
            .and_then(|pending| pending.remove(&request));
        // Dropped outside the lock: it may be the last holder, whose drop reports the outcomes.
        drop(forgotten);
    }

    /// Ends the connection: blocked calls on it return.
    fn abort(&self) {
        self.dead.store(true, Ordering::Release);
        shut_down(self.socket.as_fd());
    }

    /// Ends the connection and fails its pending exchanges.
    fn fail(&self, error: &TransferError) {
        self.abort();
        let pending = self.pending.lock().take();
        for exchange in pending.into_iter().flat_map(HashMap::into_values) {
            exchange.fail(error.clone());
        }
    }

    /// Assigns an exchange to this connection. False when the connection is dead.
    fn take(&self, request: u64, exchange: &Arc<Exchange>) -> bool {
        match self.pending.lock().as_mut() {
            Some(pending) if !self.is_dead() => {
                pending.insert(request, exchange.clone());
                true
            }
            _ => false,
        }
    }

    /// Ends the connection when an exchange on it is late. Otherwise returns the next deadline.
    fn expire(&self, now: Instant) -> Option<Instant> {
        let pending = self.pending.lock();
        let mut next = None;
        let mut late = false;
        for exchange in pending.as_ref()?.values() {
            if exchange.deadline <= now {
                late = true;
                exchange.fail(deadline_exceeded());
            } else {
                next = earlier(next, Some(exchange.deadline));
            }
        }
        if late {
            // Late bytes may arrive at any time and must not be written any more.
            self.abort();
            return None;
        }
        next
    }
}

impl TcpLane {
    /// Creates a lane over a connection after its hello, and starts its threads.
    pub(super) fn start(
        address: SocketAddr,
        hello: Hello,
        options: ConnectOptions,
        socket: Option<Wire>,
    ) -> io::Result<Arc<Self>> {
        let lane = Arc::new(Self {
            address,
            hello,
            options,
            state: Mutex::new(TcpLaneState {
                queue: VecDeque::new(),
                wire: None,
                closed: None,
            }),
            changed: Condvar::new(),
            load: Arc::default(),
            next_request: AtomicU64::new(1),
        });
        if let Some(socket) = socket {
            // The connection was opened without a runtime, so its user has no spans.
            let wire = TcpConnection::new(socket, Features::default());
            start_receiver(&wire)?;
            lane.state.lock().wire = Some(wire);
        }
        let sender = lane.clone();
        if let Err(error) = threads::start("kvpool-tcp-send", move || sender.send_all()) {
            // The receiving thread would otherwise wait as long as the node keeps the connection.
            lane.close(unreachable(&error));
            return Err(error);
        }
        Ok(lane)
    }

    /// The bytes in the queue and in flight.
    pub(super) fn load(&self) -> &Arc<AtomicU64> {
        &self.load
    }

    /// Whether the lane accepts work.
    pub(super) fn is_open(&self) -> bool {
        self.state.lock().closed.is_none()
    }

    /// Queues an exchange, or fails it when the lane is closed.
    pub(super) fn submit(&self, exchange: Arc<Exchange>) {
        let mut state = self.state.lock();
        if let Some(error) = &state.closed {
            let error = error.clone();
            drop(state);
            exchange.fail(error);
            return;
        }
        state.queue.push_back(exchange);
        drop(state);
        self.changed.notify_one();
    }

    /// Closes the lane.
    pub(super) fn close(&self, error: TransferError) {
        let (queue, wire) = {
            let mut state = self.state.lock();
            state.closed.get_or_insert(error.clone());
            (std::mem::take(&mut state.queue), state.wire.take())
        };
        self.changed.notify_one();
        if let Some(wire) = wire {
            wire.abort();
        }
        for exchange in queue {
            exchange.fail(error.clone());
        }
    }

    /// Ends all late exchanges. Returns the next deadline.
    pub(super) fn expire(&self, now: Instant) -> Option<Instant> {
        let mut next = None;
        let mut late = Vec::new();
        let wire = {
            let mut state = self.state.lock();
            state.queue.retain(|exchange| {
                if exchange.deadline <= now {
                    late.push(exchange.clone());
                    return false;
                }
                next = earlier(next, Some(exchange.deadline));
                true
            });
            state.wire.clone()
        };
        for exchange in late {
            exchange.fail(deadline_exceeded());
        }
        earlier(next, wire.and_then(|wire| wire.expire(now)))
    }

    fn send_all(&self) {
        while self.wait_for_work() {
            let wire = match self.live_wire() {
                Ok(wire) => wire,
                Err(error) => {
                    tracing::debug!(address = %self.address, %error, "connecting a lane failed");
                    self.close(error);
                    return;
                }
            };
            let Some((request, exchange)) = self.hand_over(&wire) else {
                continue;
            };
            let sent = send_request(&wire, self.hello.incarnation, request, &exchange);
            if let Err(error) = sent {
                wire.fail(&unreachable(error));
            }
        }
    }

    /// Moves the next exchange from the queue to `wire`. `None` when the connection has died since it was
    /// checked. The exchange then goes to the next connection.
    fn hand_over(&self, wire: &TcpConnection) -> Option<(u64, Arc<Exchange>)> {
        // The state stays locked. Otherwise the timer could scan while the exchange is in neither table, and
        // lose its deadline.
        let mut state = self.state.lock();
        let exchange = state.queue.pop_front()?;
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        if wire.take(request, &exchange) {
            return Some((request, exchange));
        }
        state.queue.push_front(exchange);
        None
    }

    /// Waits for a queued exchange. False when the lane is closed.
    fn wait_for_work(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.closed.is_some() {
                return false;
            }
            if !state.queue.is_empty() {
                return true;
            }
            self.changed.wait(&mut state);
        }
    }

    /// The live connection, or a new one after a failure.
    fn live_wire(&self) -> Result<Arc<TcpConnection>, TransferError> {
        if let Some(wire) = &self.state.lock().wire
            && !wire.is_dead()
        {
            return Ok(wire.clone());
        }
        let deadline = Instant::now() + self.options.reconnect;
        let (socket, reply) = open(
            self.address,
            &self.options.token.renew(&self.hello),
            deadline,
            self.options.tls.as_ref(),
        )?;
        check_incarnation(self.hello.incarnation, &reply)?;
        let wire = TcpConnection::new(socket, reply.features);
        let mut state = self.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        start_receiver(&wire).map_err(unreachable)?;
        state.wire = Some(wire.clone());
        Ok(wire)
    }
}

fn start_receiver(wire: &Arc<TcpConnection>) -> io::Result<()> {
    let wire = wire.clone();
    threads::start("kvpool-tcp-recv", move || {
        let error = receive_answers(&wire);
        wire.fail(&error);
    })
}

fn check_incarnation(expected: Incarnation, reply: &HelloReply) -> Result<(), TransferError> {
    if reply.incarnation == expected {
        return Ok(());
    }
    Err(TransferError {
        code: Code::WrongIncarnation,
        message: format!(
            "the link is to incarnation {expected} of {}, which now has incarnation {}",
            reply.node, reply.incarnation
        ),
    })
}

/// Opens a connection and says hello, by `deadline`. A TLS handshake may end later by a tick of the kernel.
pub(crate) fn open(
    address: SocketAddr,
    hello: &Hello,
    deadline: Instant,
    tls: Option<&DataTls>,
) -> Result<(Wire, HelloReply), TransferError> {
    let socket = open_socket(address, deadline).map_err(|error| match error {
        Errno::TIMEDOUT => deadline_exceeded(),
        error => unreachable(format!("{address}: {}", io::Error::from(error))),
    })?;
    let socket = match tls {
        None => Wire::from(socket),
        Some(tls) => tls.handshake(socket, address, deadline)?,
    };
    let reply = say_hello(&socket, hello, deadline)?;
    // From here on the requests' deadlines bound the waiting.
    set_timeouts(socket.as_fd(), None).map_err(unreachable)?;
    Ok((socket, reply))
}

fn open_socket(address: SocketAddr, deadline: Instant) -> Result<OwnedFd, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    notice_lost_peer(socket.as_fd());
    match rustix::net::connect(&socket, &address) {
        Err(Errno::INPROGRESS) => {
            wait_until_ready(socket.as_fd(), PollFlags::OUT, deadline)?;
            sockopt::socket_error(&socket)??;
        }
        connected => connected?,
    }
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
pub(super) mod tests;
