//! Streams through bare TCP connections to another process, plain or encrypted by rustls. The sockets have the
//! kernel's defaults.

use super::core::pin;
use super::{Opening, Purpose, tls};
use kvpool_tls::rustls::ClientConfig;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most bytes of one send or receive.
const CALL: usize = 1 << 20;

/// The connections of a limit, and their rounds. Bytes are totals over the connections.
#[derive(Clone, Debug)]
pub(crate) struct Plan<'a> {
    /// The number of connections.
    pub(crate) count: usize,
    /// Whether the two ends of each connection share one core, another for each connection.
    pub(crate) pinned: bool,
    /// TLS of the streams; `None` without TLS.
    pub(crate) tls: Option<&'a Arc<ClientConfig>>,
    /// The bytes of a round.
    pub(crate) bytes: u64,
    /// The bytes of memory at the far end.
    pub(crate) span: u64,
}

/// A connection to the far process.
trait Wire: Read + Write + Send + std::fmt::Debug {}

impl<T: Read + Write + Send + std::fmt::Debug> Wire for T {}

/// Connections to the far process, which confirms each round.
#[derive(Debug)]
pub(crate) struct Streams {
    sockets: Vec<Box<dyn Wire>>,
    /// The bytes of a round on one connection.
    bytes: usize,
    /// Whether the two ends of each connection share one core, another for each connection.
    pinned: bool,
    /// The start of the next round in the source.
    at: usize,
}

impl Streams {
    /// Opens the connections.
    pub(crate) fn open(far: SocketAddr, plan: &Plan<'_>) -> io::Result<Self> {
        let Plan {
            count,
            pinned,
            tls,
            bytes,
            span,
        } = *plan;
        let share = |all: u64| {
            let calls = (all / count as u64).div_ceil(CALL as u64).max(1);
            calls * CALL as u64
        };
        let sockets = (0..count as u64).map(|number| {
            let opening = Opening {
                purpose: match tls {
                    Some(_) => Purpose::TlsStream,
                    None => Purpose::Stream,
                },
                first: share(bytes),
                second: share(span),
                core: pinned.then_some(number),
            };
            let mut socket = TcpStream::connect(far)?;
            socket.set_nodelay(true)?;
            socket.write_all(&opening.to_bytes())?;
            let mut socket: Box<dyn Wire> = match tls {
                Some(tls) => Box::new(tls::connect(socket, Arc::clone(tls))?),
                None => Box::new(socket),
            };
            // The far end confirms after its memory is ready.
            socket.read_exact(&mut [0])?;
            Ok(socket)
        });
        Ok(Self {
            sockets: sockets.collect::<io::Result<_>>()?,
            bytes: usize::try_from(share(bytes)).unwrap_or(usize::MAX),
            pinned,
            at: 0,
        })
    }

    /// The bytes of a round.
    pub(crate) fn bytes(&self) -> u64 {
        (self.bytes * self.sockets.len()) as u64
    }

    /// Sends one round from `source` and returns the time until the far end has all of it.
    pub(crate) fn round(&mut self, source: &[u8]) -> io::Result<Duration> {
        let bytes = self.bytes;
        let part = source.len() / self.sockets.len().max(1) / CALL * CALL;
        if part == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let from = self.at % part / CALL;
        let begin = Instant::now();
        let pinned = self.pinned;
        let lone = self.sockets.len() == 1 && !pinned;
        let mut pairs = (0..).zip(self.sockets.iter_mut().zip(source.chunks_exact(part)));
        if lone {
            pairs.try_for_each(|(_, (socket, source))| send(&mut **socket, source, from, bytes))?;
        } else {
            std::thread::scope(|scope| {
                let threads: Vec<_> = pairs
                    .map(|(number, (socket, source))| {
                        scope.spawn(move || {
                            let _pinned = pinned.then(|| pin(number));
                            send(&mut **socket, source, from, bytes)
                        })
                    })
                    .collect();
                threads.into_iter().try_for_each(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|_| Err(io::Error::other("a sender panicked")))
                })
            })?;
        }
        let took = begin.elapsed();
        self.at = from * CALL + bytes;
        Ok(took)
    }
}

/// Sends a round in calls of [`CALL`], starting with call `from` of `source`. It waits until the far end has
/// all of it.
fn send(socket: &mut dyn Wire, source: &[u8], from: usize, bytes: usize) -> io::Result<()> {
    let calls = source.chunks_exact(CALL).cycle().skip(from);
    for call in calls.take(bytes / CALL) {
        socket.write_all(call)?;
    }
    socket.flush()?;
    socket.read_exact(&mut [0])
}

/// The far end: receives rounds of `bytes` into `span` bytes of memory until the connection ends.
pub(super) fn receive(socket: &mut (impl Read + Write), bytes: u64, span: u64) -> io::Result<()> {
    let span = usize::try_from(span).unwrap_or(CALL).max(CALL);
    let mut memory = vec![1; span];
    socket.write_all(&[1])?;
    socket.flush()?;
    let mut left = bytes;
    let mut at = 0;
    loop {
        let end = (at + CALL).min(span);
        let room = memory.get_mut(at..end).unwrap_or_default();
        let got = socket.read(room)?;
        if got == 0 {
            return Ok(());
        }
        at = if at + got >= span { 0 } else { at + got };
        left = left.saturating_sub(got as u64);
        if left == 0 {
            socket.write_all(&[1])?;
            socket.flush()?;
            left = bytes;
        }
    }
}
