//! The node's side of TCP.

use super::session::TcpSession;
use crate::handshake::{Admitted, End, judge_hello};
use crate::host::RdmaHost;
use crate::rdma::Serving;
use crate::service::{Connection, FirstFrame, Serve, Service};
use crate::socket::notice_lost_peer;
use kvpool_tls::rustls::ServerConfig;
use kvpool_tls::{Port, ServerTls};
use kvpool_types::Epoch;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The limits of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The most connections at once; more are refused. Callers before hello do not count.
    pub max_connections: usize,
    /// How long a transfer may make no progress before its connection is ended.
    pub stall: Duration,
    /// How long a new connection may take to say hello.
    pub handshake: Duration,
    /// The memory to serve over RDMA; `None` refuses RDMA.
    pub rdma: Option<Arc<Serving>>,
    /// The TLS settings; `None` for a plain port.
    pub tls: Option<ServerTls>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            stall: Duration::from_secs(30),
            handshake: Duration::from_secs(5),
            rdma: None,
            tls: None,
        }
    }
}

/// Starts servers of a host over TCP.
#[derive(Debug)]
pub struct Server;

/// A running server. Dropping it aborts all connections.
pub struct ServerHandle {
    address: SocketAddr,
    service: Service,
}

impl Server {
    /// Serves `listener`, with one thread a connection.
    ///
    /// # Errors
    ///
    /// The error of starting the accepting thread.
    pub fn start(
        listener: TcpListener,
        host: Arc<dyn RdmaHost>,
        options: ServerOptions,
    ) -> io::Result<ServerHandle> {
        let address = listener.local_addr()?;
        let limit = options.max_connections;
        let serve = Arc::new(TcpServe { host, options });
        Ok(ServerHandle {
            address,
            service: Service::start(listener.into(), "kvpool-tcp", limit, serve)?,
        })
    }
}

impl ServerHandle {
    /// The address that the server listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
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

impl std::fmt::Debug for ServerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tcp::ServerHandle({})", self.address)
    }
}

struct TcpServe {
    host: Arc<dyn RdmaHost>,
    options: ServerOptions,
}

impl Serve for TcpServe {
    fn handshake(&self) -> Duration {
        self.options.handshake
    }

    fn epoch(&self) -> Epoch {
        self.host.epoch()
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        let tls = self.options.tls.as_ref()?;
        Some(tls.config(Port::Data))
    }

    fn judge(&self, _: BorrowedFd<'_>, hello: &FirstFrame) -> Result<Admitted, End> {
        judge_hello(&*self.host, hello)
    }

    fn serve(&self, connection: &Arc<Connection>, admitted: Admitted) {
        notice_lost_peer(connection.socket());
        if let Err(error) = rustix::net::sockopt::set_tcp_nodelay(connection.socket(), true) {
            tracing::debug!(%error, "setting TCP_NODELAY failed: small answers may be late");
        }
        TcpSession::new(connection, &*self.host, &self.options, &admitted).run();
    }
}
