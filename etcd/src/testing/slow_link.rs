//! A relay to an etcd whose answers arrive late or slowly.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// The most bytes in one piece of an answer.
const PIECE: usize = 64 << 10;
/// The pieces that the relay holds. Behind them etcd has to wait, as on a slow network.
const HELD: usize = 16;

/// A relay to one endpoint of etcd. At first it delays nothing. Its end accepts no further connections.
#[derive(Debug)]
pub struct SlowLink {
    address: String,
    pace: Arc<Pace>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct Pace {
    /// By how much each byte of an answer is late.
    delay_ms: AtomicU64,
    bytes_per_second: AtomicU64,
    connections: AtomicUsize,
}

impl SlowLink {
    /// A relay to an endpoint, with or without `http://`.
    ///
    /// # Errors
    ///
    /// The system's, when no port can be opened.
    pub async fn to(endpoint: &str) -> io::Result<Self> {
        let target = endpoint.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let pace = Arc::new(Pace {
            delay_ms: AtomicU64::new(0),
            bytes_per_second: AtomicU64::new(u64::MAX),
            connections: AtomicUsize::new(0),
        });
        let accepting = tokio::spawn(accept(listener, target, Arc::clone(&pace)));
        Ok(Self {
            address,
            pace,
            accepting,
        })
    }

    /// The relay's own address, `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Answers of etcd arrive later by this time.
    pub fn delay(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.pace.delay_ms.store(millis, Ordering::SeqCst);
    }

    /// Answers on one connection arrive at this rate at most.
    pub fn limit(&self, bytes_per_second: u64) {
        let limit = &self.pace.bytes_per_second;
        limit.store(bytes_per_second.max(1), Ordering::SeqCst);
    }

    /// The number of connections that the relay has accepted.
    pub fn connections(&self) -> usize {
        self.pace.connections.load(Ordering::SeqCst)
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, target: String, pace: Arc<Pace>) {
    while let Ok((client, _)) = listener.accept().await {
        pace.connections.fetch_add(1, Ordering::SeqCst);
        let (target, pace) = (target.clone(), Arc::clone(&pace));
        tokio::spawn(async move {
            // Either side may leave, which ends the connection to the other.
            let _left = relay(client, &target, &pace).await;
        });
    }
}

/// Relays until one side ends.
async fn relay(client: TcpStream, target: &str, pace: &Pace) -> io::Result<()> {
    let server = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (sender, mut held) = mpsc::channel::<(Instant, Vec<u8>)>(HELD);
    let requests = async {
        tokio::io::copy(&mut from_client, &mut to_server).await?;
        Ok(())
    };
    let answers = async {
        loop {
            let mut bytes = vec![0; PIECE];
            let count = from_server.read(&mut bytes).await?;
            bytes.truncate(count);
            let delay = Duration::from_millis(pace.delay_ms.load(Ordering::SeqCst));
            if count == 0 || sender.send((Instant::now() + delay, bytes)).await.is_err() {
                return Ok(());
            }
        }
    };
    let arrivals = async {
        while let Some((due, bytes)) = held.recv().await {
            let rate = pace.bytes_per_second.load(Ordering::SeqCst);
            let takes = Duration::from_micros(bytes.len() as u64 * 1_000_000 / rate);
            sleep_until(due.max(Instant::now() + takes)).await;
            to_client.write_all(&bytes).await?;
        }
        Ok(())
    };
    tokio::select! {
        ended = requests => ended,
        ended = answers => ended,
        ended = arrivals => ended,
    }
}
