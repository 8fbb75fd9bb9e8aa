//! A relay between two sessions. It reads every frame, and an attack decides what the relay forwards.
//!
//! ```text
//!  prefill ──► port of decode  ──frames──► attack ──► decode
//!  decode  ──► port of prefill ──frames──► attack ──► prefill
//! ```
//!
//! - `frames`: the content of a frame, and changed frames
//! - `scene`: two sessions behind the relay, and the rules that hold after each hand-off
//! - `chance`: hundreds of seeded attacks, and the table of their outcomes
//! - `attacks`: attacks that are refused with a certain code
//! - `earlier`: bytes of earlier connections, and streams that end
//! - `insider`: a process that knows the secret and follows no rule

mod attacks;
mod chance;
mod earlier;
mod frames;
mod insider;
mod scene;

use frames::{Frame, Port, Way};
use kvpool_types::wire::frame::{HEADER_BYTES, Header};
use parking_lot::Mutex;
use std::net::{SocketAddr, TcpListener as PlainListener};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{JoinHandle, JoinSet};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .thread_name("relay")
        .build()
        .unwrap()
});

/// Decides the fate of a frame: forwards it, changes it or drops it.
pub(crate) trait Attack: Send {
    fn frame(&mut self, frame: Frame, wire: &Wire);

    /// Whether a new connection may begin.
    fn connects(&mut self, _port: Port) -> bool {
        true
    }
}

impl<F: FnMut(Frame, &Wire) + Send> Attack for F {
    fn frame(&mut self, frame: Frame, wire: &Wire) {
        self(frame, wire);
    }
}

/// Notes that an attack panics. Without the note only its task would fail.
struct Watched<A> {
    attack: A,
    is_broken: Arc<AtomicBool>,
}

impl<A: Attack> Attack for Watched<A> {
    fn frame(&mut self, frame: Frame, wire: &Wire) {
        let run = AssertUnwindSafe(|| self.attack.frame(frame, wire));
        if catch_unwind(run).is_err() {
            self.is_broken.store(true, Ordering::Relaxed);
        }
    }

    fn connects(&mut self, port: Port) -> bool {
        self.attack.connects(port)
    }
}

enum Part {
    Bytes(Vec<u8>),
    End,
}

/// The two directions of a connection, as seen from a frame.
#[derive(Clone)]
pub(crate) struct Wire {
    ahead: UnboundedSender<Part>,
    back: UnboundedSender<Part>,
}

impl Wire {
    /// Forwards bytes in the frame's direction. A connection that has ended drops them.
    pub(crate) fn ahead(&self, bytes: Vec<u8>) {
        let _ = self.ahead.send(Part::Bytes(bytes));
    }

    /// Sends bytes to the end that sent the frame.
    pub(crate) fn back(&self, bytes: Vec<u8>) {
        let _ = self.back.send(Part::Bytes(bytes));
    }

    /// Ends the frame's direction.
    pub(crate) fn end(&self) {
        let _ = self.ahead.send(Part::End);
    }

    /// Ends both directions.
    pub(crate) fn cut(&self) {
        self.end();
        let _ = self.back.send(Part::End);
    }
}

/// The ports of a relay, which the two sessions give as their addresses.
pub(crate) struct Relay {
    ports: [(Port, SocketAddr, Arc<OnceLock<SocketAddr>>); 2],
    tasks: Vec<JoinHandle<()>>,
    is_broken: Arc<AtomicBool>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Relay {
    pub(crate) fn start(attack: impl Attack + 'static) -> Self {
        let is_broken = Arc::<AtomicBool>::default();
        let attack = Watched {
            attack,
            is_broken: Arc::clone(&is_broken),
        };
        let attack: Arc<Mutex<dyn Attack>> = Arc::new(Mutex::new(attack));
        let numbers = Arc::<AtomicU64>::default();
        let mut tasks = Vec::new();
        let ports = [Port::Prefill, Port::Decode].map(|port| {
            let listener = PlainListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let address = listener.local_addr().unwrap();
            let target = Arc::<OnceLock<SocketAddr>>::default();
            let serving = serve(
                port,
                listener,
                (Arc::clone(&target), Arc::clone(&numbers)),
                Arc::clone(&attack),
            );
            tasks.push(RUNTIME.spawn(serving));
            (port, address, target)
        });
        Self {
            ports,
            tasks,
            is_broken,
        }
    }

    /// Whether the attack itself has panicked.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    pub(crate) fn address(&self, of: Port) -> SocketAddr {
        self.port(of).1
    }

    /// Sets the address to which a port's connections go.
    pub(crate) fn aim(&self, of: Port, target: SocketAddr) {
        self.port(of).2.set(target).unwrap();
    }

    fn port(&self, of: Port) -> &(Port, SocketAddr, Arc<OnceLock<SocketAddr>>) {
        self.ports.iter().find(|(port, ..)| *port == of).unwrap()
    }
}

async fn serve(
    port: Port,
    listener: PlainListener,
    (target, numbers): (Arc<OnceLock<SocketAddr>>, Arc<AtomicU64>),
    attack: Arc<Mutex<dyn Attack>>,
) {
    let listener = TcpListener::from_std(listener).unwrap();
    // Dropping the relay ends all of its connections.
    let mut connections = JoinSet::new();
    loop {
        let Ok((near, _)) = listener.accept().await else {
            continue;
        };
        let Some(target) = target.get().copied() else {
            continue;
        };
        if !attack.lock().connects(port) {
            continue;
        }
        let connection = numbers.fetch_add(1, Ordering::Relaxed);
        let attack = Arc::clone(&attack);
        connections.spawn(async move {
            if let Ok(far) = TcpStream::connect(target).await {
                join(near, far, (port, connection), attack).await;
            }
        });
    }
}

async fn join(
    near: TcpStream,
    far: TcpStream,
    (port, connection): (Port, u64),
    attack: Arc<Mutex<dyn Attack>>,
) {
    // As in the sessions themselves, no frame waits for another.
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let ((from_near, to_near), (from_far, to_far)) = (near.into_split(), far.into_split());
    let ((to_server, server), (to_client, client)) = (unbounded_channel(), unbounded_channel());
    let way = |is_answer| Way { port, is_answer };
    let asking = Wire {
        ahead: to_server.clone(),
        back: to_client.clone(),
    };
    let answering = Wire {
        ahead: to_client,
        back: to_server,
    };
    tokio::join!(
        read(from_near, (way(false), connection), asking, &attack),
        read(from_far, (way(true), connection), answering, &attack),
        write(to_far, server),
        write(to_near, client),
    );
}

async fn read(
    mut from: OwnedReadHalf,
    (way, connection): (Way, u64),
    wire: Wire,
    attack: &Mutex<dyn Attack>,
) {
    while let Ok(bytes) = read_frame(&mut from).await {
        let frame = Frame {
            way,
            connection,
            bytes,
        };
        attack.lock().frame(frame, &wire);
    }
    wire.end();
}

async fn read_frame(from: &mut OwnedReadHalf) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; HEADER_BYTES];
    from.read_exact(&mut bytes).await?;
    bytes.resize(HEADER_BYTES + rest_of(&bytes), 0);
    from.read_exact(&mut bytes[HEADER_BYTES..]).await?;
    Ok(bytes)
}

/// The next frame of a connection outside the relay.
fn read_plain(from: &mut impl std::io::Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; HEADER_BYTES];
    from.read_exact(&mut bytes)?;
    bytes.resize(HEADER_BYTES + rest_of(&bytes), 0);
    from.read_exact(&mut bytes[HEADER_BYTES..])?;
    Ok(bytes)
}

fn rest_of(head: &[u8]) -> usize {
    let header = Header::decode(head.first_chunk().unwrap()).unwrap();
    usize::try_from(u64::from(header.meta) + header.payload).unwrap()
}

async fn write(mut to: OwnedWriteHalf, mut parts: UnboundedReceiver<Part>) {
    while let Some(Part::Bytes(bytes)) = parts.recv().await {
        if to.write_all(&bytes).await.is_err() {
            break;
        }
    }
    // Later parts are dropped, because the direction has ended.
    parts.close();
    drop(to.shutdown().await);
}
