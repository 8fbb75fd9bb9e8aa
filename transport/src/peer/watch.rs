//! The detection of a peer's death, over a connection that carries pings.
//!
//! When a process dies, the kernel closes its connection, which the watch detects at once. A stopped process,
//! or a host that is gone, answers no ping.

use crate::frame::{encode_head, receive_by};
use crate::link::TransferError;
use crate::outcomes::unreachable;
use crate::socket::{Gather, shut_down};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Epoch, Incarnation};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a peer is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerWatchOptions {
    /// The time between two pings.
    pub interval: Duration,
    /// The number of unanswered pings in a row after which a peer counts as lost.
    pub misses: u32,
}

impl Default for PeerWatchOptions {
    /// A ping a second, and three misses.
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            misses: 3,
        }
    }
}

/// Why a watched peer counts as lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerLoss {
    /// The connection ended: the process is gone, or the network broke.
    Closed,
    /// The peer answers no ping.
    Silent,
}

struct WatchedPeer {
    socket: OwnedFd,
    is_over: AtomicBool,
}

/// A watch over one session of a peer. The drop ends the watch without a call of `on_loss`.
pub struct PeerWatch {
    watched: Arc<WatchedPeer>,
    session: Incarnation,
}

impl std::fmt::Debug for PeerWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PeerWatch({})", self.session)
    }
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        self.watched.is_over.store(true, Ordering::SeqCst);
        shut_down(self.watched.socket.as_fd());
    }
}

impl PeerWatch {
    /// Watches a peer over a connection that has said hello. A thread calls `on_loss` once, or
    /// never.
    pub(super) fn start(
        socket: OwnedFd,
        session: Incarnation,
        options: PeerWatchOptions,
        on_loss: impl FnOnce(PeerLoss) + Send + 'static,
    ) -> Result<Self, TransferError> {
        let watched = Arc::new(WatchedPeer {
            socket,
            is_over: AtomicBool::new(false),
        });
        let of_thread = watched.clone();
        std::thread::Builder::new()
            .name("kvpool-watch".to_owned())
            .spawn(move || {
                let loss = of_thread.watch(options);
                if !of_thread.is_over.swap(true, Ordering::SeqCst) {
                    on_loss(loss);
                }
            })
            .map_err(unreachable)?;
        Ok(Self { watched, session })
    }

    /// The session that is watched.
    pub const fn session(&self) -> Incarnation {
        self.session
    }

    /// Whether the peer is not lost and the watch still runs.
    pub fn is_alive(&self) -> bool {
        !self.watched.is_over.load(Ordering::SeqCst)
    }
}

fn ping(socket: BorrowedFd<'_>, request: u64) -> io::Result<()> {
    let head = encode_head(Op::Ping, request, Epoch(0), 0, |_| {})
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let mut gather = Gather::default();
    gather.push_bytes(&head);
    gather.send_all(socket)
}

impl WatchedPeer {
    /// Pings until the peer is lost.
    fn watch(&self, options: PeerWatchOptions) -> PeerLoss {
        let socket = self.socket.as_fd();
        let mut misses = 0;
        for request in 1.. {
            let next = Instant::now() + options.interval;
            if ping(socket, request).is_err() {
                return PeerLoss::Closed;
            }
            let mut is_answered = false;
            // An answer to an earlier ping counts, because the peer lives.
            while self.has_data(next) {
                // The rest of an answer that has begun may come a little later.
                if receive_by(socket, next + options.interval).is_err() {
                    return PeerLoss::Closed;
                }
                is_answered = true;
            }
            if self.is_over.load(Ordering::SeqCst) {
                break;
            }
            misses = if is_answered { 0 } else { misses + 1 };
            if misses >= options.misses {
                return PeerLoss::Silent;
            }
        }
        PeerLoss::Closed
    }

    /// Waits for data, or for the end of the connection. False when neither comes in time.
    fn has_data(&self, until: Instant) -> bool {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(limit) = Timespec::try_from(left) else {
                return false;
            };
            let mut entry = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut entry, Some(&limit)) {
                Ok(0) => return false,
                Err(Errno::INTR) => {}
                // A failure of the socket shows when it is read.
                Ok(_) | Err(_) => return true,
            }
        }
    }
}
