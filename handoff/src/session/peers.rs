//! The other processes of a hand-off. One task for each process sends its letters and watches the process. A
//! letter is an encoded message.
//!
//! ```text
//!  connect ──► LinkUp ──► letters in order ──┬─ lost ──► LinkBroken ──► connect again
//!     ▲  └─ fails ──► LinkBroken             └─ idle, or dropped ──► end
//!     └───────── pause ◄──────────────────────────┘
//! ```

use super::agent::Event;
use crate::wire::HandoffMessage;
use kvpool_transport::TransferError;
use kvpool_transport::peer::{Endpoint, PeerLink, PeerLoss, PeerWatch, PeerWatchOptions};
use kvpool_types::{Code, Incarnation};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

/// The longest time of one attempt to connect, and of one attempt to send a letter.
const CALL: Duration = Duration::from_secs(2);
/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// The pause after a registration that was refused.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// The most letters that wait for one peer. A machine repeats a dropped message if it matters.
const MAX_QUEUED: usize = 65_536;
/// The most writes to one peer that start at a time. A start takes a thread, and may wait for a connection.
const MAX_STARTS: usize = 8;
/// The most peers.
const MAX_PEERS: usize = 4096;
/// The number of attempts to send a letter on one connection.
const ATTEMPTS: u32 = 3;

/// The state that all peer tasks share.
pub(super) struct PeerContext {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) events: mpsc::UnboundedSender<Event>,
    pub(super) watch: PeerWatchOptions,
    /// The first letter on every connection.
    pub(super) registration: Vec<u8>,
}

/// A message that waits for a connection.
struct Outgoing {
    /// The session that the message is for. `None` for any process at the address.
    to: Option<Incarnation>,
    body: Vec<u8>,
}

struct Peer {
    letters: mpsc::Sender<Outgoing>,
    task: JoinHandle<()>,
    /// The session at the other end. `None` until a connection has reported it.
    session: Option<Incarnation>,
    used: Instant,
    /// The number of letters that wait or are under way.
    unsent: Arc<AtomicUsize>,
    /// One permit for each further write that may start now.
    starts: Arc<Semaphore>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The peers of one session, by address.
pub(super) struct Peers {
    context: Arc<PeerContext>,
    by_address: HashMap<String, Peer>,
}

impl Peers {
    pub(super) fn new(context: PeerContext) -> Self {
        Self {
            context: Arc::new(context),
            by_address: HashMap::new(),
        }
    }

    /// Queues a message. Connects to the peer first if the peer is new.
    ///
    /// A message to a session is dropped where another process is at the address. A process reports its own
    /// address, and may report the address of another process. A restarted process has the address of its
    /// earlier incarnation. The process at the address may have a room with the same number and attempt.
    pub(super) fn send(
        &mut self,
        address: &str,
        to: Option<Incarnation>,
        message: &HandoffMessage,
    ) {
        let Some(peer) = self.peer(address) else {
            tracing::warn!(address, "too many peers: a message is dropped");
            return;
        };
        // The count rises before the task can take the letter and lower the count.
        peer.unsent.fetch_add(1, Ordering::Relaxed);
        let body = message.encode();
        if peer.letters.try_send(Outgoing { to, body }).is_err() {
            peer.unsent.fetch_sub(1, Ordering::Relaxed);
            tracing::debug!(address, "a message is dropped: the peer's queue is full");
        }
    }

    /// Whether letters wait or are under way.
    pub(super) fn has_unsent(&self) -> bool {
        let mut peers = self.by_address.values();
        peers.any(|peer| peer.unsent.load(Ordering::Relaxed) > 0)
    }

    /// Connects to a peer, if it is new.
    pub(super) fn know(&mut self, address: &str) {
        self.peer(address);
    }

    /// The permits to start writes to a peer. `None` when there are too many peers.
    pub(super) fn starts(&mut self, address: &str) -> Option<Arc<Semaphore>> {
        self.peer(address).map(|peer| Arc::clone(&peer.starts))
    }

    fn peer(&mut self, address: &str) -> Option<&mut Peer> {
        if !self.by_address.contains_key(address) {
            if self.by_address.len() >= MAX_PEERS {
                return None;
            }
            let (letters, queue) = mpsc::channel(MAX_QUEUED);
            let unsent = Arc::default();
            let task = PeerTask {
                context: Arc::clone(&self.context),
                address: address.to_owned(),
                queue,
                unsent: Arc::clone(&unsent),
            };
            let peer = Peer {
                letters,
                task: tokio::spawn(task.run()),
                session: None,
                used: Instant::now(),
                unsent,
                starts: Arc::new(Semaphore::new(MAX_STARTS)),
            };
            self.by_address.insert(address.to_owned(), peer);
        }
        let peer = self.by_address.get_mut(address)?;
        peer.used = Instant::now();
        Some(peer)
    }

    /// Notes the session at an address. Returns the earlier session if it was another one.
    pub(super) fn note_session(
        &mut self,
        address: &str,
        session: Incarnation,
    ) -> Option<Incarnation> {
        let peer = self.by_address.get_mut(address)?;
        let before = peer.session.replace(session);
        before.filter(|before| *before != session)
    }

    /// The session at an address.
    pub(super) fn session(&self, address: &str) -> Option<Incarnation> {
        self.by_address.get(address)?.session
    }

    /// Disconnects the peers that nothing has used for `idle`. A connection costs threads and files, even when
    /// the other end has gone.
    pub(super) fn retain(&mut self, idle: Duration, is_needed: impl Fn(&str) -> bool) {
        let now = Instant::now();
        let endpoint = &self.context.endpoint;
        self.by_address.retain(|address, peer| {
            let is_kept = now - peer.used < idle || is_needed(address);
            if !is_kept {
                peer.task.abort();
                endpoint.disconnect(address, now);
            }
            is_kept
        });
    }
}

/// The open connection of a peer.
struct Connection {
    link: PeerLink,
    /// This channel ends with the connection.
    lost: mpsc::UnboundedReceiver<PeerLoss>,
    _watch: PeerWatch,
}

/// The outcome of sending a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Posted {
    Taken,
    /// The peer refuses the letter. A machine repeats the message if it matters.
    Refused,
    /// The connection has ended.
    Nowhere,
}

/// How a connection ended.
enum Served {
    /// The peer has not answered within the watch's patience.
    Silent,
    Broken,
    /// The peer refuses the registration.
    Unregistered,
    /// No sender is left for this peer.
    Finished,
}

impl Served {
    /// How a connection ended whose watch reports `loss`.
    const fn after(loss: Option<PeerLoss>) -> Self {
        match loss {
            Some(PeerLoss::Silent) => Self::Silent,
            Some(PeerLoss::Closed) | None => Self::Broken,
        }
    }
}

struct PeerTask {
    context: Arc<PeerContext>,
    address: String,
    queue: mpsc::Receiver<Outgoing>,
    unsent: Arc<AtomicUsize>,
}

impl PeerTask {
    async fn run(mut self) {
        loop {
            let mut pause = PAUSE;
            match self.connect().await {
                Ok(mut connection) => {
                    self.tell(Event::LinkUp {
                        address: self.address.clone(),
                        session: connection.link.session(),
                    });
                    match self.serve(&mut connection).await {
                        Served::Silent => self.tell(Event::PeerLost {
                            session: connection.link.session(),
                        }),
                        Served::Broken => {}
                        Served::Unregistered => pause = REFUSED_PAUSE,
                        Served::Finished => return,
                    }
                }
                Err(error) => {
                    tracing::debug!(address = self.address, %error, "connecting to a peer failed");
                }
            }
            // An idle link does not notice the loss: a later write would wait for it.
            self.context
                .endpoint
                .disconnect(&self.address, Instant::now());
            // This comes after each attempt, so that a room which opened meanwhile learns of the loss.
            self.tell(Event::LinkBroken {
                address: self.address.clone(),
            });
            tokio::time::sleep(pause).await;
        }
    }

    fn tell(&self, event: Event) {
        // The agent may have ended.
        drop(self.context.events.send(event));
    }

    async fn connect(&self) -> Result<Connection, TransferError> {
        let (context, address) = (Arc::clone(&self.context), self.address.clone());
        let connecting = tokio::task::spawn_blocking(move || {
            let deadline = Instant::now() + CALL;
            let (notice, lost) = mpsc::unbounded_channel();
            let on_loss = move |loss| {
                // The task may have ended.
                let _ = notice.send(loss);
            };
            let endpoint = &context.endpoint;
            let watch = endpoint.watch(&address, context.watch, deadline, on_loss)?;
            let mut link = endpoint.link(&address, deadline)?;
            if link.session() != watch.session() {
                // The link belongs to the peer's earlier incarnation.
                endpoint.disconnect(&address, deadline);
                link = endpoint.link(&address, deadline)?;
            }
            if link.session() != watch.session() {
                return Err(TransferError {
                    code: Code::WrongIncarnation,
                    message: format!("{address} has started anew"),
                });
            }
            Ok(Connection {
                link,
                lost,
                _watch: watch,
            })
        });
        connecting.await.unwrap_or_else(|_| {
            Err(TransferError {
                code: Code::Internal,
                message: "the session ends".to_owned(),
            })
        })
    }

    /// Sends letters until the connection ends.
    async fn serve(&mut self, connection: &mut Connection) -> Served {
        let registration = &self.context.registration;
        match self.watched_post(connection, registration).await {
            Ok(Posted::Taken) => {}
            // The peer would refuse every later letter. The next connection registers again.
            Ok(Posted::Refused) => return Served::Unregistered,
            Ok(Posted::Nowhere) => return Served::Broken,
            Err(lost) => return lost,
        }
        loop {
            let Outgoing { to, body } = tokio::select! {
                biased;
                loss = connection.lost.recv() => return Served::after(loss),
                letter = self.queue.recv() => match letter {
                    Some(letter) => letter,
                    None => return Served::Finished,
                },
            };
            let at = connection.link.session();
            let posted = if to.is_some_and(|to| to != at) {
                tracing::debug!(
                    address = self.address,
                    "a message to a process that is gone"
                );
                Ok(Posted::Refused)
            } else {
                self.watched_post(connection, &body).await
            };
            self.unsent.fetch_sub(1, Ordering::Relaxed);
            match posted {
                Ok(Posted::Taken | Posted::Refused) => {}
                // The watch of the next connection tells whether the peer is alive.
                Ok(Posted::Nowhere) => return Served::Broken,
                Err(lost) => return lost,
            }
        }
    }

    /// Posts a letter until the watch reports a loss: a stopped peer leaves the letter without an answer.
    async fn watched_post(
        &self,
        connection: &mut Connection,
        letter: &[u8],
    ) -> Result<Posted, Served> {
        let Connection { link, lost, .. } = connection;
        tokio::select! {
            biased;
            loss = lost.recv() => Err(Served::after(loss)),
            posted = self.post(link, letter) => Ok(posted),
        }
    }

    async fn post(&self, link: &PeerLink, letter: &[u8]) -> Posted {
        for _ in 0..ATTEMPTS {
            match link.post(letter, Instant::now() + CALL).await {
                Ok(()) => return Posted::Taken,
                Err(error) if error.code.is_retryable() => {
                    tracing::debug!(address = self.address, %error, "a letter is sent again");
                    if !link.is_open() {
                        return Posted::Nowhere;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => {
                    tracing::warn!(address = self.address, %error, "a peer refuses a letter");
                    return Posted::Refused;
                }
            }
        }
        Posted::Refused
    }
}
