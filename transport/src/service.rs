//! The part of the servers that all transports share. The [`acceptor`] admits callers, each admitted
//! connection has a thread, and a drain or an abort ends the connections.
//!
//! ```text
//! idle ──begin──► busy ──finish──► idle        drain: idle ones end now, busy ones when they finish
//! ```

mod acceptor;

use crate::handshake::{Admitted, End};
use crate::host::Abort;
use crate::socket::shut_down;
use crate::wire::{Wire, WireRef};
use acceptor::Acceptor;
pub(crate) use acceptor::FirstFrame;
use kvpool_tls::rustls::ServerConfig;
use kvpool_types::Epoch;
use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long threads may take to end after their sockets were shut down.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// An accepted connection.
pub(crate) struct Connection {
    wire: Wire,
    phase: Mutex<ConnectionPhase>,
    aborted: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ConnectionPhase {
    Idle,
    Busy,
    Draining,
}

impl Connection {
    pub(crate) fn new(wire: impl Into<Wire>) -> Arc<Self> {
        Arc::new(Self {
            wire: wire.into(),
            phase: Mutex::new(ConnectionPhase::Idle),
            aborted: AtomicBool::new(false),
        })
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }

    /// The socket with its session.
    pub(crate) fn wire(&self) -> WireRef<'_> {
        self.wire.as_ref()
    }

    /// Marks the start of a request. False when the connection must end.
    pub(crate) fn begin(&self) -> bool {
        let mut phase = self.phase.lock();
        let goes_on = *phase == ConnectionPhase::Idle;
        if goes_on {
            *phase = ConnectionPhase::Busy;
        }
        goes_on
    }

    /// Marks the end of a request. False when the connection must end.
    pub(crate) fn finish(&self) -> bool {
        let mut phase = self.phase.lock();
        let goes_on = *phase == ConnectionPhase::Busy;
        if goes_on {
            *phase = ConnectionPhase::Idle;
        }
        goes_on && !self.is_aborted()
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    fn drain(&self) {
        let mut phase = self.phase.lock();
        if *phase == ConnectionPhase::Idle {
            shut_down(self.socket());
        }
        *phase = ConnectionPhase::Draining;
    }
}

impl Abort for Connection {
    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        shut_down(self.socket());
    }
}

/// Handles the connections of one transport.
pub(crate) trait Serve: Send + Sync + 'static {
    /// How long a caller may take to say hello.
    fn handshake(&self) -> Duration;
    /// The epoch to send in refusals.
    fn epoch(&self) -> Epoch;
    /// The configuration of a caller's TLS handshake; `None` for a plain port.
    fn tls(&self) -> Option<Arc<ServerConfig>> {
        None
    }
    /// Judges a caller by its first frame. Runs on the accepting thread, so it must not block.
    fn judge(&self, socket: BorrowedFd<'_>, hello: &FirstFrame) -> Result<Admitted, End>;
    /// Answers the hello, and serves the connection until it ends.
    fn serve(&self, connection: &Arc<Connection>, admitted: Admitted);
}

/// An accepting thread and the threads of its connections. Dropping it aborts them all.
pub(crate) struct Service {
    shared: Arc<ServiceShared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

struct ServiceShared {
    serve: Arc<dyn Serve>,
    name: &'static str,
    limit: usize,
    /// Signals the accepting thread to end.
    wake: OwnedFd,
    connections: Mutex<Connections>,
    ended: Condvar,
}

#[derive(Default)]
struct Connections {
    stopped: bool,
    next: u64,
    open: HashMap<u64, Arc<Connection>>,
}

impl Service {
    /// Serves a listening socket, `limit` connections at once. The threads are named after `name`.
    pub(crate) fn start(
        listener: OwnedFd,
        name: &'static str,
        limit: usize,
        serve: Arc<dyn Serve>,
    ) -> io::Result<Self> {
        let shared = Arc::new(ServiceShared {
            serve,
            name,
            limit,
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            connections: Mutex::default(),
            ended: Condvar::new(),
        });
        let mut acceptor_loop = Acceptor::open(shared.clone(), listener)?;
        let accepting = std::thread::Builder::new()
            .name(format!("{name}-accept"))
            .spawn(move || acceptor_loop.run())?;
        Ok(Self {
            shared,
            accepting: Mutex::new(Some(accepting)),
        })
    }

    /// The number of open connections.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.lock().open.len()
    }

    /// Stops accepting, lets requests in progress finish until `deadline`, then aborts the others.
    /// True when nothing was aborted.
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        self.stop_accepting();
        let drained = {
            let mut connections = self.shared.connections.lock();
            for connection in connections.open.values() {
                connection.drain();
            }
            self.shared.wait_until_empty(&mut connections, deadline)
        };
        if !drained {
            self.abort_all();
        }
        drained
    }

    fn stop_accepting(&self) {
        self.shared.connections.lock().stopped = true;
        if let Err(error) = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes()) {
            tracing::error!(%error, "waking the accepting thread failed");
            return;
        }
        if let Some(thread) = self.accepting.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the accepting thread panicked");
        }
    }

    fn abort_all(&self) {
        let mut connections = self.shared.connections.lock();
        for connection in connections.open.values() {
            connection.abort();
        }
        let deadline = Instant::now() + ABORT_GRACE;
        if !self.shared.wait_until_empty(&mut connections, deadline) {
            tracing::warn!(
                left = connections.open.len(),
                "connections did not end after they were aborted"
            );
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop_accepting();
        self.abort_all();
    }
}

impl ServiceShared {
    fn wait_until_empty(
        &self,
        connections: &mut parking_lot::MutexGuard<'_, Connections>,
        deadline: Instant,
    ) -> bool {
        while !connections.open.is_empty() {
            if self.ended.wait_until(connections, deadline).timed_out() {
                break;
            }
        }
        connections.open.is_empty()
    }

    /// Starts a thread for a connection. Returns the socket when there are too many connections.
    fn open(self: &Arc<Self>, wire: Wire, admitted: Admitted) -> Result<(), Wire> {
        let (number, connection) = {
            let mut connections = self.connections.lock();
            if connections.stopped {
                return Ok(());
            }
            if connections.open.len() >= self.limit {
                return Err(wire);
            }
            connections.next += 1;
            let number = connections.next;
            wire.widen();
            let connection = Connection::new(wire);
            connections.open.insert(number, connection.clone());
            (number, connection)
        };
        let shared = self.clone();
        let spawned = std::thread::Builder::new()
            .name(self.name.to_owned())
            .spawn(move || {
                // Also runs when serving panics, so that the failed connection is not counted as
                // open forever.
                let _closed = Closed {
                    shared: &shared,
                    number,
                };
                shared.serve.serve(&connection, admitted);
            });
        if let Err(error) = spawned {
            tracing::warn!(%error, "starting a thread for a connection failed");
            self.close(number);
        }
        Ok(())
    }

    /// Ends a connection and frees its slot under one lock. A peer that has seen the end finds the
    /// slot free.
    fn close(&self, number: u64) {
        let mut connections = self.connections.lock();
        if let Some(connection) = connections.open.remove(&number) {
            // A host may still hold the connection as an `Abort`, which must not keep the socket
            // open.
            shut_down(connection.socket());
        }
        drop(connections);
        self.ended.notify_all();
    }
}

struct Closed<'a> {
    shared: &'a ServiceShared,
    number: u64,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.shared.close(self.number);
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tls_tests;
