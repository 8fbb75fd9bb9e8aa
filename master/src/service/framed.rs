//! The hot calls over framed connections.
//!
//! One port serves both protocols. The first bytes of a connection tell which one it speaks.
//!
//! ```text
//!            ┌─ "PRI * HTTP/2.0" ─► tonic (grpc.rs)
//!  accept ───┤
//!            └─ "KVP1" ─ greeting ─► a thread that reads, calls, and answers (connection.rs)
//! ```
//!
//! With TLS the first message of the handshake tells, by the protocols that it offers (ALPN). ADR 0046 has more.
//!
//! A framed connection has its own thread with blocking I/O. The slowest part of a small call is a
//! wake-up between threads, so one thread does everything. A connection gets its thread after its
//! hello. Until then it is a caller, as is a gRPC connection before its first call. Callers are
//! bounded by `kvpool_daemon::callers`, connections by `--max-connections`.
//!
//! ADR 0008 says why not every call uses gRPC.

mod connection;
mod greeting;
mod grpc;
mod stream;
mod waiting_calls;
mod wire;

use crate::leadership::Seat;
use crate::open_connections::OpenConnections;
use crate::service::refused::{Refused, refused};
use connection::Connection;
use futures::Stream;
pub use grpc::{GrpcStream, Origin};
use kvpool_daemon::callers::{Caller, Callers};
use kvpool_tls::{Port, ServerTls};
use kvpool_types::Code;
use kvpool_types::wire::frame::MAGIC;
use rustix::net::sockopt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use stream::{Framed, Incoming};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;

/// How long a caller may take for its hello or its first call.
const CALLER_TIMEOUT: Duration = Duration::from_secs(5);
/// The most callers at a time.
const MOST_CALLERS: usize = 512;
/// The most bytes of all callers together. gRPC sets no bound on a first call.
const MOST_CALLERS_BYTES: u64 = 64 << 20;
/// The most gRPC connections that may wait for the gRPC server.
const BACKLOG: usize = 256;

/// The state that all framed connections share.
#[derive(Debug)]
struct Shared {
    seat: Arc<Seat>,
    open: Arc<OpenConnections>,
    /// The most connections that may poll for their next request at a time: half of the cores.
    most_spinning: usize,
    spinning: AtomicUsize,
    callers: Arc<Callers>,
    /// How the port is served; `None` for plain connections.
    tls: Option<ServerTls>,
    /// One permit for each connection that is no longer a caller.
    connection_permits: Arc<Semaphore>,
}

impl Shared {
    fn take_permit(&self) -> Result<OwnedSemaphorePermit, Refused> {
        let permit = Arc::clone(&self.connection_permits).try_acquire_owned();
        permit.map_err(|_| {
            let most = self.seat.config.max_connections;
            refused(
                Code::TooManyHeld,
                format!("this master has {most} connections, the limit of --max-connections"),
            )
        })
    }
}

/// The gRPC connections, for tonic to serve.
#[derive(Debug)]
pub struct GrpcConnections(mpsc::Receiver<io::Result<GrpcStream>>);

impl Stream for GrpcConnections {
    type Item = io::Result<GrpcStream>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<GrpcStream>>> {
        self.0.poll_recv(context)
    }
}

/// Accepts connections on `listener` until `stopped` is true. Serves framed connections and returns
/// the gRPC ones. Spawns the accepting task into `tasks`.
pub fn serve(
    seat: Arc<Seat>,
    listener: TcpListener,
    tls: Option<ServerTls>,
    stopped: watch::Receiver<bool>,
    tasks: &mut JoinSet<()>,
) -> GrpcConnections {
    let cores = kvpool_seams::cores().unwrap_or(1);
    let shared = Arc::new(Shared {
        open: seat.connections(),
        callers: Callers::new(MOST_CALLERS, MOST_CALLERS_BYTES),
        tls,
        connection_permits: Arc::new(Semaphore::new(
            seat.config.max_connections.min(Semaphore::MAX_PERMITS),
        )),
        seat,
        most_spinning: (cores / 2).max(1),
        spinning: AtomicUsize::new(0),
    });
    let (grpc, connections) = mpsc::channel(BACKLOG);
    tasks.spawn(accept_all(shared, listener, stopped, grpc));
    GrpcConnections(connections)
}

async fn accept_all(
    shared: Arc<Shared>,
    listener: TcpListener,
    mut stopped: watch::Receiver<bool>,
    grpc: mpsc::Sender<io::Result<GrpcStream>>,
) {
    // When this task ends, the hellos in progress end too.
    let mut greetings = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(|stopped| *stopped) => break,
            Some(_) = greetings.join_next() => continue,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (shared, grpc) = (Arc::clone(&shared), grpc.clone());
                let caller = shared.callers.admit();
                greetings.spawn(async move {
                    match sort(&shared, stream, peer, caller, &grpc).await {
                        Ok(()) => {}
                        Err(error) => tracing::debug!(%peer, %error, "connection failed"),
                    }
                });
            }
            Err(error) => {
                // The process has probably reached its limit of file descriptors. Callers hold some
                // of them.
                tracing::warn!(%error, "connection not accepted; check the limit of open files");
                if !shared.callers.displace_oldest() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
    shared.open.end_all();
}

/// Reads the first bytes of a connection and passes it to the server of its protocol.
async fn sort(
    shared: &Arc<Shared>,
    stream: TcpStream,
    peer: SocketAddr,
    caller: Caller,
    grpc: &mpsc::Sender<io::Result<GrpcStream>>,
) -> Result<(), wire::Error> {
    // Without `nodelay` on the socket, an answer's last part waits 40 ms for a delayed ACK.
    stream.set_nodelay(true)?;
    notice_lost_peer(&stream).map_err(io::Error::from)?;
    let begun = async {
        let mut stream = match &shared.tls {
            None => Incoming::Plain(stream),
            Some(tls) => Incoming::handshake(tls.config(Port::Control), stream).await?,
        };
        let is_framed = match &stream {
            Incoming::Plain(stream) => {
                let mut first = [0; 4];
                if stream.peek(&mut first).await? == 0 {
                    return Err(wire::Error::Closed);
                }
                // The first byte already tells the protocol, so a slow sender is no reason to wait
                // for more.
                first.first() == MAGIC.to_le_bytes().first()
            }
            Incoming::Tls(_) => false,
            Incoming::Frames(_) => true,
        };
        if !is_framed {
            return Ok((stream, None));
        }
        let greeted = greeting::greet(shared, &mut stream).await?;
        Ok((stream, Some(greeted)))
    };
    let begun = tokio::select! {
        begun = tokio::time::timeout(CALLER_TIMEOUT, begun) => begun,
        () = caller.displaced() => return Ok(()),
    };
    match begun {
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        Ok(Err(wire::Error::Closed)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Ok(Ok((stream, None))) => {
            let stream = GrpcStream::new(stream, caller, Arc::clone(&shared.connection_permits));
            // The send fails when the server stops.
            let _left = grpc.send(Ok(stream)).await;
            Ok(())
        }
        // The caller was refused.
        Ok(Ok((_, Some(None)))) => Ok(()),
        Ok(Ok((stream, Some(Some(greeted))))) => {
            caller.settle();
            let (stream, session) = match stream {
                Incoming::Plain(stream) => (stream, None),
                Incoming::Frames(stream) => {
                    let (stream, session) = stream.into_parts();
                    session.widen();
                    (stream, Some(Arc::new(session)))
                }
                Incoming::Tls(_) => return Err(wire::Error::Closed),
            };
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            let stream = Framed::new(stream, session);
            let connection = Connection::new(Arc::clone(shared), stream, greeted)?;
            let runtime = tokio::runtime::Handle::current();
            std::thread::Builder::new()
                .name("kvmaster-calls".to_owned())
                .spawn(move || {
                    let _entered = runtime.enter();
                    if let Err(error) = connection.serve(&runtime) {
                        tracing::debug!(%peer, %error, "framed connection ended");
                    }
                })?;
            Ok(())
        }
    }
}

/// Makes the kernel end a connection whose peer disappeared silently. Without this, the connection
/// would keep its thread for ever, and its waiting calls until their deadlines.
fn notice_lost_peer(stream: &TcpStream) -> rustix::io::Result<()> {
    const QUIET: Duration = Duration::from_secs(60);
    const PAUSE: Duration = Duration::from_secs(10);
    const TIMES: u32 = 3;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, QUIET)?;
    sockopt::set_tcp_keepintvl(stream, PAUSE)?;
    sockopt::set_tcp_keepcnt(stream, TIMES)
}

/// One of a bounded number of slots, returned on drop.
#[derive(Debug)]
struct ConnectionSlot<'a>(&'a AtomicUsize);

impl<'a> ConnectionSlot<'a> {
    /// Takes a slot when fewer than `most` are taken.
    fn take(taken: &'a AtomicUsize, most: usize) -> Option<Self> {
        taken
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |count| {
                (count < most).then_some(count + 1)
            })
            .ok()?;
        Some(Self(taken))
    }
}

impl Drop for ConnectionSlot<'_> {
    fn drop(&mut self) {
        let taken = self.0.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(taken > 0, "invariant: a slot is returned once");
    }
}
