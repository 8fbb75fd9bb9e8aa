//! The processes that have connected, and the clean-up after their exit.
//!
//! The holdings of a process are freed once the process has exited *and* the threads that serve its
//! connections have ended. Otherwise a request still in a socket could take a new pin or write
//! after the clean-up.
//!
//! A client without connections is forgotten once it holds no extent. A long-lived process may open many clients.

use super::fds::is_gone;
use crate::host::{Abort, Peer, ProcessIdentity};
use crate::service::Connection;
use kvpool_types::ClientId;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// All connected processes whose exit has not been noticed. One thread watches them.
pub(super) struct Peers(Arc<PeersShared>);

type StillHold = dyn Fn(&[Peer]) -> Vec<bool> + Send + Sync;

struct PeersShared {
    /// Called for each client whose process has exited.
    told: Box<dyn Fn(&Peer) + Send + Sync>,
    /// Returns for each client without a connection whether it still holds anything.
    still_hold: Box<StillHold>,
    state: Mutex<PeersState>,
    /// Signals the watcher that a process was added, or that watching ends.
    wake: OwnedFd,
}

#[derive(Default)]
struct PeersState {
    stopped: bool,
    processes: Vec<ClientProcess>,
}

struct ClientProcess {
    pidfd: Arc<OwnedFd>,
    identity: ProcessIdentity,
    gone: bool,
    clients: Vec<ProcessClient>,
}

struct ProcessClient {
    peer: Peer,
    connections: Vec<Arc<Connection>>,
}

impl Peers {
    /// Starts to watch processes. `told` is called for each client whose process has exited. `still_hold`
    /// returns for each client without a connection whether it holds anything.
    pub(super) fn watch(
        told: impl Fn(&Peer) + Send + Sync + 'static,
        still_hold: impl Fn(&[Peer]) -> Vec<bool> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(PeersShared {
            told: Box::new(told),
            still_hold: Box::new(still_hold),
            state: Mutex::default(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        std::thread::Builder::new()
            .name("kvpool-shm-watch".to_owned())
            .spawn({
                let shared = shared.clone();
                move || shared.watch_all()
            })?;
        Ok(Self(shared))
    }

    /// Adds a connection of a process. Clients of one process share one pidfd.
    pub(super) fn add(
        &self,
        pidfd: OwnedFd,
        identity: ProcessIdentity,
        pid: i32,
        client: ClientId,
        connection: &Arc<Connection>,
    ) -> Peer {
        let mut state = self.0.state.lock();
        let known = state
            .processes
            .iter()
            // A new process may have the number of a dead process.
            .position(|process| {
                process.identity == identity && !process.gone && !is_gone(&process.pidfd)
            });
        let index = known.unwrap_or_else(|| {
            state.processes.push(ClientProcess {
                pidfd: Arc::new(pidfd),
                identity,
                gone: false,
                clients: Vec::new(),
            });
            state.processes.len() - 1
        });
        let process = state
            .processes
            .get_mut(index)
            .expect("invariant: the index was just found");
        let peer = Peer {
            client,
            process: process.pidfd.clone(),
            identity,
            pid,
        };
        match process
            .clients
            .iter_mut()
            .find(|known| known.peer.client == client)
        {
            Some(known) => known.connections.push(connection.clone()),
            None => process.clients.push(ProcessClient {
                peer: peer.clone(),
                connections: vec![connection.clone()],
            }),
        }
        drop(state);
        if known.is_none() {
            self.0.wake();
        }
        peer
    }

    /// Removes a connection that has ended.
    pub(super) fn remove(&self, peer: &Peer, connection: &Arc<Connection>) {
        for process in &mut self.0.state.lock().processes {
            if Arc::ptr_eq(&process.pidfd, &peer.process) {
                for client in &mut process.clients {
                    client
                        .connections
                        .retain(|known| !Arc::ptr_eq(known, connection));
                }
            }
        }
        self.0.free_gone();
        self.0.forget_idle();
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.0.state.lock().stopped = true;
        self.0.wake();
    }
}

impl PeersShared {
    fn wake(&self) {
        match rustix::io::write(&self.wake, &1u64.to_ne_bytes()) {
            // A full counter means that the watcher is about to wake anyway.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => tracing::error!(%error, "waking the watcher of client processes failed"),
        }
    }

    fn watch_all(&self) {
        loop {
            let pidfds: Vec<Arc<OwnedFd>> = {
                let state = self.state.lock();
                if state.stopped {
                    return;
                }
                let watched = state.processes.iter().filter(|process| !process.gone);
                watched.map(|process| process.pidfd.clone()).collect()
            };
            let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
            polled.extend(
                pidfds
                    .iter()
                    .map(|pidfd| PollFd::new(&**pidfd, PollFlags::IN)),
            );
            match rustix::event::poll(&mut polled, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "watching client processes failed: exits go unnoticed");
                    return;
                }
            }
            let mut ready = polled.iter().map(|polled| !polled.revents().is_empty());
            if ready.next() == Some(true) {
                // An event left unread only wakes the watcher once more.
                let _taken = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            let gone: Vec<_> = pidfds
                .iter()
                .zip(ready)
                .filter(|(_, ready)| *ready)
                .map(|(pidfd, _)| pidfd)
                .collect();
            for process in &mut self.state.lock().processes {
                if gone.iter().any(|gone| Arc::ptr_eq(gone, &process.pidfd)) {
                    process.gone = true;
                    // A child may have inherited the sockets, which would keep them open.
                    let clients = process.clients.iter();
                    for connection in clients.flat_map(|client| &client.connections) {
                        connection.abort();
                    }
                }
            }
            self.free_gone();
        }
    }

    /// Frees the holdings of clients whose process has exited and whose connections have ended.
    fn free_gone(&self) {
        let mut freed = Vec::new();
        self.state.lock().processes.retain_mut(|process| {
            if process.gone {
                process.clients.retain(|client| {
                    let held = !client.connections.is_empty();
                    if !held {
                        freed.push(client.peer.clone());
                    }
                    held
                });
            }
            !(process.gone && process.clients.is_empty())
        });
        for peer in freed {
            tracing::info!(pid = peer.pid, client = %peer.client, "client process exited");
            (self.told)(&peer);
        }
    }

    /// Forgets clients of living processes that have no connection and hold nothing. A client that holds
    /// something is checked again when another connection ends.
    fn forget_idle(&self) {
        let mut state = self.state.lock();
        let living = state.processes.iter().filter(|process| !process.gone);
        let idle: Vec<Peer> = living
            .flat_map(|process| &process.clients)
            .filter(|client| client.connections.is_empty())
            .map(|client| client.peer.clone())
            .collect();
        if idle.is_empty() {
            return;
        }
        // The lock is held, so that no client connects meanwhile. Such a client could take extents that would never
        // be freed after its death.
        let mut still_hold = (self.still_hold)(&idle).into_iter();
        for process in state.processes.iter_mut().filter(|process| !process.gone) {
            process.clients.retain(|client| {
                !client.connections.is_empty() || still_hold.next().unwrap_or(true)
            });
        }
        let known = state.processes.len();
        let is_used = |process: &ClientProcess| process.gone || !process.clients.is_empty();
        state.processes.retain(is_used);
        let is_fewer = state.processes.len() < known;
        drop(state);
        if is_fewer {
            // The watcher lets go of their pidfds.
            self.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fds::identify;
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    const ALICE: ClientId = ClientId(1);
    const BOB: ClientId = ClientId(2);

    /// A process that lives until its input closes or it is killed.
    fn process() -> Child {
        let mut cat = Command::new("cat");
        cat.stdin(Stdio::piped()).spawn().unwrap()
    }

    fn pidfd_of(process: &Child) -> OwnedFd {
        pidfd_open(Pid::from_child(process), PidfdFlags::empty()).unwrap()
    }

    fn end(mut process: Child) {
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Opens a connection of a client, and ends it.
    fn come_and_go(
        peers: &Peers,
        process: &Child,
        client: ClientId,
        identity: impl Fn(&OwnedFd, ClientId) -> ProcessIdentity,
    ) {
        let connection = Connection::new(OwnedFd::from(UnixStream::pair().unwrap().0));
        let pidfd = pidfd_of(process);
        let identity = identity(&pidfd, client);
        let peer = peers.add(pidfd, identity, 0, client, &connection);
        peers.remove(&peer, &connection);
    }

    fn processes(peers: &Peers) -> usize {
        peers.0.state.lock().processes.len()
    }

    /// Each client of a process that cannot be identified has a pidfd of its own.
    #[test]
    fn clients_that_are_closed_leave_nothing_while_their_process_lives() {
        type Identify = fn(&OwnedFd, ClientId) -> ProcessIdentity;
        let by_process: Identify = |_, _| ProcessIdentity::Pid(7);
        let by_client: Identify = |_, client| ProcessIdentity::Client(client);
        let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        for identity in [by_process, by_client] {
            let peers = Peers::watch(|_| {}, |idle| vec![false; idle.len()]).unwrap();
            let living = process();
            let before = files();
            for number in 1..=1000 {
                come_and_go(&peers, &living, ClientId(number), identity);
                assert_eq!(processes(&peers), 0);
            }
            // Other tests of this program have files too.
            assert!(files() < before + 300, "{before} and {}", files());
            end(living);
        }
    }

    #[test]
    fn a_client_is_known_until_it_holds_nothing_any_more() {
        let holds = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&holds);
        let still_hold = move |idle: &[Peer]| -> Vec<bool> {
            let held = |peer: &Peer| peer.client == ALICE && asked.load(Ordering::Relaxed);
            idle.iter().map(held).collect()
        };
        let peers = Peers::watch(|_| {}, still_hold).unwrap();
        let living = process();
        let by_client = |_: &OwnedFd, client| ProcessIdentity::Client(client);
        come_and_go(&peers, &living, ALICE, by_client);
        come_and_go(&peers, &living, BOB, by_client);
        assert_eq!(processes(&peers), 1);
        holds.store(false, Ordering::Relaxed);
        come_and_go(&peers, &living, BOB, by_client);
        assert_eq!(processes(&peers), 0);
        end(living);
    }

    #[test]
    fn an_invisible_process_keeps_its_holdings_when_another_dies() {
        type Identify = fn(&OwnedFd, ClientId) -> ProcessIdentity;
        let by_kernel: Identify = |pidfd, client| identify(pidfd, 0, client).unwrap();
        let by_client: Identify = |_, client| ProcessIdentity::Client(client);
        for identity in [by_kernel, by_client] {
            let (gone, heard) = mpsc::channel();
            let told = move |peer: &Peer| gone.send(peer.client).unwrap();
            let peers = Peers::watch(told, |idle| vec![true; idle.len()]).unwrap();
            let join = |process: &Child, client| come_and_go(&peers, process, client, identity);
            let (first, second) = (process(), process());
            join(&first, ALICE);
            join(&second, BOB);
            end(first);
            let limit = Duration::from_secs(5);
            assert_eq!(heard.recv_timeout(limit), Ok(ALICE));
            // A wrong client would be reported at once.
            let other = heard.recv_timeout(Duration::from_millis(200));
            assert_eq!(other, Err(mpsc::RecvTimeoutError::Timeout));
            join(&second, BOB);
            end(second);
            assert_eq!(heard.recv_timeout(limit), Ok(BOB));
        }
    }

    #[test]
    fn a_process_is_known_again_by_each_pidfd_of_it() {
        let (first, second) = (process(), process());
        let identity = |process, pid, client| identify(&pidfd_of(process), pid, client).unwrap();
        assert_eq!(identity(&first, 7, ALICE), identity(&first, 7, BOB));
        assert_eq!(identity(&first, 0, ALICE), identity(&first, 0, ALICE));
        assert_ne!(identity(&first, 0, ALICE), identity(&second, 0, BOB));
        end(first);
        end(second);
    }
}
