//! The hot calls over framed connections.
//!
//! One port serves both protocols: what a connection says first tells which it speaks.
//!
//! ```text
//!            ┌─ "PRI * HTTP/2.0" ─► tonic (grpc.rs)
//!  accept ───┤
//!            └─ "KVP1" ─ greeting ─► a thread that reads, calls, and answers (connection.rs)
//! ```
//!
//! A framed connection has a thread of its own with blocking I/O: what takes longest in a small call
//! is waking the one who answers it, so nobody else is woken. It gets the thread once it has greeted: until
//! then it is a caller, as is a gRPC connection on which no call has come. Callers are bounded apart from
//! connections (`kvpool_daemon::callers`), and these by `--max-connections`.
//!
//! ADR 0008 says why they do not all use gRPC.

mod connection;
mod greeting;
mod grpc;
mod waiting_calls;
mod wire;

use crate::leadership::Seat;
use crate::open_connections::OpenConnections;
use crate::service::refused::{Refused, refused};
use connection::Connection;
use futures::Stream;
pub use grpc::{GrpcStream, Origin};
use kvpool_daemon::callers::{Caller, Callers};
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
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;

/// How long a caller may take to greet, or to make its first call.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most callers at a time.
const MOST_CALLERS: usize = 512;
/// What callers may have sent together. A first call over gRPC may be as large as any.
const MOST_CALLERS_BYTES: u64 = 64 << 20;
/// How many gRPC connections may wait to be taken up.
const BACKLOG: usize = 256;

/// What all framed connections share.
#[derive(Debug)]
struct Shared {
    seat: Arc<Seat>,
    open: Arc<OpenConnections>,
    /// How many connections may poll for their next request at a time: half of the cores.
    most_spinning: usize,
    spinning: AtomicUsize,
    callers: Arc<Callers>,
    /// A place for each connection that is no caller any more.
    connection_permits: Arc<Semaphore>,
}

impl Shared {
    fn take_permit(&self) -> Result<OwnedSemaphorePermit, Refused> {
        let permit = Arc::clone(&self.connection_permits).try_acquire_owned();
        permit.map_err(|_| {
            let most = self.seat.config.max_connections;
            refused(
                Code::TooManyHeld,
                format!(
                    "this master serves {most} connections, which is what --max-connections allows"
                ),
            )
        })
    }
}

/// The connections that speak gRPC, for tonic to serve.
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

/// Accepts connections on `listener` until `stopped` says so, serves the framed ones, and gives the
/// others away. The task of the accepting is spawned into `tasks`.
pub fn serve(
    seat: Arc<Seat>,
    listener: TcpListener,
    stopped: watch::Receiver<bool>,
    tasks: &mut JoinSet<()>,
) -> GrpcConnections {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shared = Arc::new(Shared {
        open: seat.connections(),
        callers: Callers::new(MOST_CALLERS, MOST_CALLERS_BYTES),
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
    // They end with this task, at the latest.
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
                // Most likely there are no descriptors left. Callers hold some.
                tracing::warn!(%error, "connection not accepted; check the limit of open files");
                if !shared.callers.displace_oldest() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
    shared.open.end_all();
}

/// Looks at the first bytes of a connection and gives it to those who serve its protocol.
async fn sort(
    shared: &Arc<Shared>,
    mut stream: TcpStream,
    peer: SocketAddr,
    caller: Caller,
    grpc: &mpsc::Sender<io::Result<GrpcStream>>,
) -> Result<(), wire::Error> {
    // On the socket itself: without it an answer's last part waits 40 ms for a delayed ACK.
    stream.set_nodelay(true)?;
    notice_lost_peer(&stream).map_err(io::Error::from)?;
    let begun = async {
        let mut first = [0; 4];
        if stream.peek(&mut first).await? == 0 {
            return Err(wire::Error::Closed);
        }
        // The first byte tells them apart, and a sender that trickles is no reason to wait here.
        if first.first() != MAGIC.to_le_bytes().first() {
            return Ok(None);
        }
        greeting::greet(shared, &mut stream).await.map(Some)
    };
    let begun = tokio::select! {
        begun = tokio::time::timeout(PATIENCE, begun) => begun,
        () = caller.displaced() => return Ok(()),
    };
    match begun {
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        Ok(Err(wire::Error::Closed)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Ok(Ok(None)) => {
            let stream = GrpcStream::new(stream, caller, Arc::clone(&shared.connection_permits));
            // Nobody takes it when the server stops.
            let _left = grpc.send(Ok(stream)).await;
            Ok(())
        }
        // It was refused.
        Ok(Ok(Some(None))) => Ok(()),
        Ok(Ok(Some(Some(greeted)))) => {
            caller.settle();
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            let connection = Connection::new(Arc::clone(shared), stream, greeted)?;
            let runtime = tokio::runtime::Handle::current();
            std::thread::Builder::new()
                .name("kvmaster-calls".to_owned())
                .spawn(move || {
                    let _entered = runtime.enter();
                    if let Err(error) = connection.serve(&runtime) {
                        tracing::debug!(%peer, %error, "a framed connection ended");
                    }
                })?;
            Ok(())
        }
    }
}

/// Has the kernel end a connection whose peer is gone without a word, its host down or cut off: it would
/// keep a thread for ever, and calls that wait until their own time is over.
fn notice_lost_peer(stream: &TcpStream) -> rustix::io::Result<()> {
    const QUIET: Duration = Duration::from_secs(60);
    const PAUSE: Duration = Duration::from_secs(10);
    const TIMES: u32 = 3;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, QUIET)?;
    sockopt::set_tcp_keepintvl(stream, PAUSE)?;
    sockopt::set_tcp_keepcnt(stream, TIMES)
}

/// One of the places that there are for something; given back when dropped.
#[derive(Debug)]
struct ConnectionSlot<'a>(&'a AtomicUsize);

impl<'a> ConnectionSlot<'a> {
    /// Takes a place when fewer than `most` are taken.
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
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
