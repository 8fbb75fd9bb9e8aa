//! The hot calls over framed connections.
//!
//! One port serves both protocols: what a connection says first tells which it speaks.
//!
//! ```text
//!            ┌─ "PRI * HTTP/2.0" ─► tonic (grpc.rs)
//!  accept ───┤
//!            └─ "KVP1" ───────────► a thread that reads, calls, and answers (connection.rs)
//! ```
//!
//! A framed connection has a thread of its own with blocking I/O: what takes longest in a small call
//! is waking the one who answers it, so nobody else is woken.

mod connection;
mod open;
mod waiting;
mod wire;

use crate::leadership::Seat;
use connection::Connection;
use futures::Stream;
use kvpool_types::wire::frame::MAGIC;
pub use open::Open;
use rustix::net::sockopt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// How long a new connection may take to say which protocol it speaks.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many gRPC connections may wait to be taken up.
const BACKLOG: usize = 256;

/// What all framed connections share.
#[derive(Debug)]
struct Shared {
    seat: Arc<Seat>,
    open: Arc<Open>,
    /// How many connections may poll for their next request at a time: half of the cores.
    most_spinning: usize,
    spinning: AtomicUsize,
}

/// The connections that speak gRPC, for tonic to serve.
#[derive(Debug)]
pub struct GrpcConnections(mpsc::Receiver<io::Result<TcpStream>>);

impl Stream for GrpcConnections {
    type Item = io::Result<TcpStream>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<TcpStream>>> {
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
    grpc: mpsc::Sender<io::Result<TcpStream>>,
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
                greetings.spawn(async move {
                    let sorted = tokio::time::timeout(PATIENCE, sort(&shared, stream, peer, &grpc));
                    match sorted.await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => tracing::debug!(%peer, %error, "a connection failed"),
                        Err(_) => tracing::debug!(%peer, "a connection said nothing"),
                    }
                });
            }
            Err(error) => {
                // Most likely there are no descriptors left: some may be closed soon.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    shared.open.end_all();
}

/// Looks at the first bytes of a connection and gives it to those who serve its protocol.
async fn sort(
    shared: &Arc<Shared>,
    stream: TcpStream,
    peer: SocketAddr,
    grpc: &mpsc::Sender<io::Result<TcpStream>>,
) -> io::Result<()> {
    // On the socket itself: without it an answer's last part waits 40 ms for a delayed ACK.
    stream.set_nodelay(true)?;
    notice_lost_peer(&stream)?;
    let mut first = [0; 4];
    if stream.peek(&mut first).await? == 0 {
        return Ok(());
    }
    // The first byte tells them apart, and a sender that trickles is no reason to wait here.
    if first.first() != MAGIC.to_le_bytes().first() {
        // Nobody takes it when the server stops.
        let _left = grpc.send(Ok(stream)).await;
        return Ok(());
    }
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    let connection = Connection::new(Arc::clone(shared), stream)?;
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
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
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

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
