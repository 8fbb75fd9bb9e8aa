//! What the servers of all transports share: accepting connections, one thread each, and ending them.
//!
//! ```text
//! idle ──begin──► busy ──finish──► idle        drain: idle ones end now, busy ones when they finish
//! ```

use crate::host::Abort;
use crate::socket::shut_down;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long threads whose sockets have been shut down get to notice.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// One accepted connection.
pub(crate) struct Connection {
    socket: OwnedFd,
    phase: Mutex<Phase>,
    aborted: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    Busy,
    Draining,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            socket,
            phase: Mutex::new(Phase::Idle),
            aborted: AtomicBool::new(false),
        })
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// A request has begun to come in; false when the connection is to end instead.
    pub(crate) fn begin(&self) -> bool {
        let mut phase = self.phase.lock();
        let goes_on = *phase == Phase::Idle;
        if goes_on {
            *phase = Phase::Busy;
        }
        goes_on
    }

    /// The request has been answered; false when the connection is to end.
    pub(crate) fn finish(&self) -> bool {
        let mut phase = self.phase.lock();
        let goes_on = *phase == Phase::Busy;
        if goes_on {
            *phase = Phase::Idle;
        }
        goes_on && !self.is_aborted()
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    fn drain(&self) {
        let mut phase = self.phase.lock();
        if *phase == Phase::Idle {
            shut_down(self.socket());
        }
        *phase = Phase::Draining;
    }
}

impl Abort for Connection {
    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        shut_down(self.socket());
    }
}

/// What is done with connections.
pub(crate) trait Serve: Send + Sync + 'static {
    /// Serves one connection until it ends.
    fn serve(&self, connection: &Arc<Connection>);
    /// Tells a connection that there are too many.
    fn refuse(&self, socket: BorrowedFd<'_>);
}

/// An accepting thread and the threads of its connections. Dropping it aborts them all.
pub(crate) struct Service {
    shared: Arc<Shared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    serve: Arc<dyn Serve>,
    name: &'static str,
    limit: usize,
    /// Written to when accepting is to end.
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
    /// Serves what comes to a listening socket, `limit` connections at once. Threads carry `name`.
    pub(crate) fn start(
        listener: OwnedFd,
        name: &'static str,
        limit: usize,
        serve: Arc<dyn Serve>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            serve,
            name,
            limit,
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            connections: Mutex::default(),
            ended: Condvar::new(),
        });
        let accepting = std::thread::Builder::new()
            .name(format!("{name}-accept"))
            .spawn({
                let shared = shared.clone();
                move || shared.accept_all(&listener)
            })?;
        Ok(Self {
            shared,
            accepting: Mutex::new(Some(accepting)),
        })
    }

    /// How many connections are open.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.lock().open.len()
    }

    /// Accepts no more, lets requests in progress finish until `deadline`, then ends what is left.
    /// True when nothing had to be cut off.
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
            tracing::error!(%error, "the accepting thread cannot be woken");
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
                "connections have not ended after they were aborted"
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

impl Shared {
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

    fn accept_all(self: &Arc<Self>, listener: &OwnedFd) {
        loop {
            let mut waiting = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
            ];
            match rustix::event::poll(&mut waiting, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "connections can no longer be accepted");
                    return;
                }
            }
            let [listening, woken] = waiting;
            if woken.revents().contains(PollFlags::IN) {
                return;
            }
            if listening.revents().is_empty() {
                continue;
            }
            match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
                Ok(socket) => self.open(socket),
                // The other side has gone already, or a signal came.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
                Err(error) => {
                    // Most likely there are no descriptors left: some may be closed soon.
                    tracing::warn!(%error, "a connection could not be accepted");
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }

    fn open(self: &Arc<Self>, socket: OwnedFd) {
        let connection = Connection::new(socket);
        let number = {
            let mut connections = self.connections.lock();
            if connections.stopped {
                return;
            }
            if connections.open.len() >= self.limit {
                drop(connections);
                self.serve.refuse(connection.socket());
                return;
            }
            connections.next += 1;
            let number = connections.next;
            connections.open.insert(number, connection.clone());
            number
        };
        let shared = self.clone();
        let spawned = std::thread::Builder::new()
            .name(self.name.to_owned())
            .spawn(move || {
                // Also runs when serving panics, so that a fault in one connection is not counted
                // as an open one for ever.
                let _closed = Closed {
                    shared: &shared,
                    number,
                };
                shared.serve.serve(&connection);
            });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread could be had for a connection");
            self.close(number);
        }
    }

    /// Ends a connection and frees its place, in one step for those who come after: whoever has seen
    /// the end of one finds room for the next.
    fn close(&self, number: u64) {
        let mut connections = self.connections.lock();
        if let Some(connection) = connections.open.remove(&number) {
            // A host may still hold the connection as an `Abort`, which must not keep it open.
            shut_down(connection.socket());
        }
        drop(connections);
        self.ended.notify_all();
    }
}

struct Closed<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.shared.close(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// Ends each connection when its peer has said one byte.
    struct OneByte;

    impl Serve for OneByte {
        fn serve(&self, connection: &Arc<Connection>) {
            rustix::io::read(connection.socket(), &mut [0; 1]).unwrap();
        }

        fn refuse(&self, socket: BorrowedFd<'_>) {
            rustix::io::write(socket, b"x").unwrap();
        }
    }

    #[test]
    fn who_has_seen_the_end_of_a_connection_finds_its_place_free() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let service = Service::start(listener.into(), "test", 1, Arc::new(OneByte)).unwrap();
        let mut first = TcpStream::connect(address).unwrap();
        while service.connections() == 0 {
            std::thread::yield_now();
        }
        let places = service.shared.connections.lock();
        first.write_all(b"1").unwrap();
        first
            .set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let early = first.read(&mut [0; 1]).unwrap_err();
        assert_eq!(early.kind(), io::ErrorKind::WouldBlock);
        drop(places);
        assert_eq!(first.read(&mut [0; 1]).unwrap(), 0);
        let mut second = TcpStream::connect(address).unwrap();
        second.write_all(b"1").unwrap();
        assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "refused");
        assert!(service.drain(Instant::now() + Duration::from_secs(5)));
    }
}
