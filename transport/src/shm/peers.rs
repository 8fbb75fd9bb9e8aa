//! The processes that have connected, and what happens when one is gone.
//!
//! What a process holds is freed once the process is dead *and* the threads that serve its
//! connections have ended, so that a request that was still in a socket cannot take hold of
//! something after that.

use super::fds::is_gone;
use crate::host::{Abort, Host, Peer};
use crate::service::Connection;
use kvpool_types::ClientId;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// All processes that have connected and are not known to be gone. One thread watches them.
pub(super) struct Peers(Arc<Shared>);

struct Shared {
    host: Arc<dyn Host>,
    state: Mutex<State>,
    /// Written to when there is one more to watch, or when watching is to end.
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    stopped: bool,
    processes: Vec<Process>,
}

struct Process {
    pidfd: Arc<OwnedFd>,
    pid: i32,
    gone: bool,
    clients: Vec<Client>,
}

struct Client {
    peer: Peer,
    connections: Vec<Arc<Connection>>,
}

impl Peers {
    pub(super) fn watch(host: Arc<dyn Host>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            host,
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
        pid: i32,
        client: ClientId,
        connection: &Arc<Connection>,
    ) -> Peer {
        let mut state = self.0.state.lock();
        let known = state
            .processes
            .iter()
            // The number of a dead process may have come back as another one's.
            .position(|process| process.pid == pid && !process.gone && !is_gone(&process.pidfd));
        let index = known.unwrap_or_else(|| {
            state.processes.push(Process {
                pidfd: Arc::new(pidfd),
                pid,
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
            pid,
        };
        match process
            .clients
            .iter_mut()
            .find(|known| known.peer.client == client)
        {
            Some(known) => known.connections.push(connection.clone()),
            None => process.clients.push(Client {
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
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.0.state.lock().stopped = true;
        self.0.wake();
    }
}

impl Shared {
    fn wake(&self) {
        match rustix::io::write(&self.wake, &1u64.to_ne_bytes()) {
            // It is full when the watcher is about to wake up anyway.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => tracing::error!(%error, "the watcher of processes cannot be woken"),
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
                    tracing::error!(%error, "processes can no longer be watched");
                    return;
                }
            }
            let mut ready = polled.iter().map(|polled| !polled.revents().is_empty());
            if ready.next() == Some(true) {
                // An event that was taken by nobody only wakes the watcher once more.
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

    /// Frees what is held by the clients of dead processes whose connections have ended.
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
            tracing::info!(pid = peer.pid, client = %peer.client, "a client's process is gone");
            self.host.peer_gone(&peer);
        }
    }
}
