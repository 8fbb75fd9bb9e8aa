//! The node's side of shared memory.

use super::fds::{identify, peer_credentials, peer_process};
use super::peers::Peers;
use super::session::ShmSession;
use crate::handshake::{Admitted, End, judge_hello};
use crate::host::{Refused, ShmHost};
use crate::service::{Connection, FirstFrame, Serve, Service};
use kvpool_types::{Code, Epoch};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The most connections at once; more are refused. Callers before hello do not count.
    pub max_connections: usize,
    /// How long a new connection may take to say hello.
    pub handshake: Duration,
    /// How long a frame or an answer may make no progress before its connection is ended.
    pub stall: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            handshake: Duration::from_secs(5),
            stall: Duration::from_secs(30),
        }
    }
}

/// Starts servers of a host over a Unix socket.
#[derive(Debug)]
pub struct Server;

/// A running server. Dropping it aborts all connections and removes the socket.
pub struct ServerHandle {
    path: PathBuf,
    service: Service,
}

impl Server {
    /// Serves a Unix socket at `path`, which only processes of the same user or of root may connect
    /// to. A socket left by a dead server is replaced.
    ///
    /// # Errors
    ///
    /// `AddrInUse` when a process listens at `path`, `AlreadyExists` when `path` is no socket, or
    /// the error of a system call.
    pub fn start(
        path: &Path,
        host: Arc<dyn ShmHost>,
        options: ServerOptions,
    ) -> io::Result<ServerHandle> {
        remove_stale(path)?;
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        let limit = options.max_connections;
        let serve = Arc::new(ShmServe {
            peers: Peers::watch(
                {
                    let host = host.clone();
                    move |peer| host.peer_gone(peer)
                },
                {
                    let host = host.clone();
                    move |peers| host.still_hold(peers)
                },
            )?,
            host,
            options,
        });
        Ok(ServerHandle {
            path: path.to_owned(),
            service: Service::start(listener.into(), "kvpool-shm", limit, serve)?,
        })
    }
}

impl ServerHandle {
    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of open connections.
    pub fn connections(&self) -> usize {
        self.service.connections()
    }

    /// Stops accepting, lets requests in progress finish until `deadline`, then aborts the others.
    /// True when nothing was aborted. Blocks.
    pub fn drain(&self, deadline: Instant) -> bool {
        self.service.drain(deadline)
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, path = %self.path.display(), "removing the socket failed");
        }
    }
}

impl std::fmt::Debug for ServerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "shm::ServerHandle({})", self.path.display())
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    let kind = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("{} exists and is not a socket", path.display()),
        ));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!(
                "another process listens on {}: another node of this name? give this one another --name",
                path.display()
            ),
        )),
        Err(error) => Err(error),
    }
}

struct ShmServe {
    host: Arc<dyn ShmHost>,
    options: ServerOptions,
    peers: Peers,
}

impl ShmServe {
    fn serve_peer(
        &self,
        connection: &Arc<Connection>,
        admitted: &Admitted,
    ) -> Result<std::convert::Infallible, End> {
        let socket = connection.socket();
        let pid = peer_credentials(socket)?.pid;
        let process = peer_process(socket, pid)?;
        let client = admitted.client;
        let identity = identify(&process, pid, client)?;
        crate::socket::set_timeouts(socket, Some(self.options.stall))?;
        admitted.answer(socket, self.host.epoch())?;
        let peer = self.peers.add(process, identity, pid, client, connection);
        let removed = Removed {
            peers: &self.peers,
            peer: &peer,
            connection,
        };
        let end = ShmSession::new(connection, &*self.host, &peer).serve();
        drop(removed);
        end
    }
}

impl Serve for ShmServe {
    fn handshake(&self) -> Duration {
        self.options.handshake
    }

    fn epoch(&self) -> Epoch {
        self.host.epoch()
    }

    fn judge(&self, socket: BorrowedFd<'_>, hello: &FirstFrame) -> Result<Admitted, End> {
        let credentials = peer_credentials(socket)?;
        let own = rustix::process::geteuid().as_raw();
        if credentials.uid != own && credentials.uid != 0 {
            return Err(End::Refuse {
                request: hello.header.request,
                refused: Refused {
                    code: Code::InvalidArgument,
                    message: format!(
                        "shared memory is for processes of user {own}, not of user {}",
                        credentials.uid
                    ),
                },
            });
        }
        let admitted = judge_hello(&*self.host, hello)?;
        match &admitted.memory {
            Ok(()) => Ok(admitted),
            // A session over shared memory is useless without access to the memory.
            Err(refused) => Err(End::Refuse {
                request: admitted.request,
                refused: refused.clone(),
            }),
        }
    }

    fn serve(&self, connection: &Arc<Connection>, admitted: Admitted) {
        let Err(end) = self.serve_peer(connection, &admitted);
        end.carry_out(connection.socket(), self.host.epoch());
    }
}

/// Removes a connection from the table, also when serving it panics.
struct Removed<'a> {
    peers: &'a Peers,
    peer: &'a crate::host::Peer,
    connection: &'a Arc<Connection>,
}

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        self.peers.remove(self.peer, self.connection);
    }
}
