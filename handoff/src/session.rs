//! One process's end of its hand-offs: it opens rooms, moves their bytes, and reports their outcomes.
//!
//! ```text
//!  caller ──send, receive──► HandoffSession ──Event──► agent (one thread)
//!    ▲                                                  │  machines: SenderDesk, ReceiverDesk
//!    └──poll, wait── TransferCell ◄────publish──────────┤
//!                                                       ├─ peers: letters and watches, a task each
//!                                                       ├─ Endpoint::link: writes into rooms
//!                                                       └─ Endpoint: open_room, close_room
//! ```
//!
//! - `agent`: the thread that owns the machines
//! - `receiving`, `sending`: decode's and prefill's rooms
//! - `memory`: pages as views of a room and as bytes of a chunk
//! - `peers`: the connections to other processes
//! - `offering`: the offers that wait for pins, and the receivers that decline
//! - `handle`: the state of one transfer, which the caller and the agent share
//! - `request`: the caller's handle of one request
//!
//! Invariants, with their tests in `handoff/tests/session/`:
//!
//! - Calls return at once, except `wait` and [`HandoffSession::close`]. These two wait for a peer, with a
//!   deadline.
//! - `is_released` is true only when no thread and no peer touches the pages for the room any more.
//! - Only the senders that received a room's offers can write into its memory.
//! - At most one room at a time receives into a page.
//! - An offer waits while the pages of other offers exceed the limit. It ends by its deadline, and at once when
//!   a receiver gives up. It also ends when all processes that asked for it are lost, or have lost their
//!   connections for [`RoomLimits::grace`].

mod agent;
mod handle;
mod memory;
mod offering;
mod peers;
mod receiving;
mod request;
mod sending;

pub use handle::TransferState;
pub use memory::{RankMemory, RankMemoryError};
pub use request::{Receiving, Sending};

use crate::pins::{PinLedger, PinOptions};
use crate::plan::{PlanError, Stages};
use crate::registration::RegisteredRanks;
use crate::room::{
    DeskOptions, ReceiverDesk, RoomGeneration, RoomId, RoomLimits, RoomTag, SenderDesk,
};
use crate::shares::receivers_of;
use crate::wire::HandoffMessage;
use agent::{Agent, Call, Event};
use handle::TransferCell;
use kvpool_transport::peer::{
    Endpoint, EndpointOptions, Letter, LetterBox, LetterOptions, PeerWatchOptions, Secret,
};
use kvpool_types::{Code, Incarnation};
use parking_lot::Mutex;
use peers::{PeerContext, Peers};
use receiving::{ReceiveCall, senders_at};
use sending::SendCall;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The most bytes of letters that wait for the agent. A refused letter is sent again.
const MAX_WAITING_BYTES: u64 = 64 << 20;
/// The most ranks that may register with one process.
const MAX_RANKS: usize = 4096;

/// The settings of a session.
#[derive(Clone, Debug)]
pub struct HandoffOptions {
    /// The session's name in its peers' logs.
    pub name: String,
    /// The secret that all processes of the group share.
    pub secret: Secret,
    /// The address that peers connect to, as "host:port". `None` advertises the listener's own address.
    pub address: Option<String>,
    /// The longest time in each state of a room.
    pub limits: RoomLimits,
    /// The bytes of a room that are written at a time.
    pub chunks: ChunkSizes,
    /// The limit of offers, and the breaker of receivers.
    pub pins: PinLimits,
    /// How the session watches the other processes.
    pub watch: PeerWatchOptions,
    /// How long an unused peer stays connected.
    pub idle: Duration,
    /// How long a peer's transfer may make no progress before its connection is closed.
    pub stall: Duration,
    /// The share of rooms, from 0 to 1, that fail on purpose. For tests of callers (row S12).
    pub failure_probability: f64,
}

impl Default for HandoffOptions {
    fn default() -> Self {
        Self {
            name: "handoff".to_owned(),
            secret: Secret::default(),
            address: None,
            limits: RoomLimits::default(),
            chunks: ChunkSizes::default(),
            pins: PinLimits::default(),
            // The loss of a stopped peer is known within four intervals and the time of a step of the engine.
            watch: PeerWatchOptions {
                interval: Duration::from_millis(900),
                ..PeerWatchOptions::default()
            },
            idle: Duration::from_secs(60),
            stall: Duration::from_secs(20),
            failure_probability: 0.0,
        }
    }
}

/// The bytes of a room that are written at a time. A write that does not end within [`RoomLimits::stalled`]
/// starts again from its first byte. So the bytes under way are few enough for a slow network, and enough for a
/// fast one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSizes {
    /// The bytes of a chunk, at least one page of one layer. The session splits larger chunks of the engine.
    pub bytes: u64,
    /// The bytes under way to one receiver.
    pub bytes_under_way: u64,
}

impl Default for ChunkSizes {
    fn default() -> Self {
        Self {
            bytes: 16 << 20,
            bytes_under_way: 64 << 20,
        }
    }
}

/// The limit on the pages that offers pin, and the back-off of a receiver without pages (rows P1, P5, P6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinLimits {
    /// The pages that all offers together may pin, counted once for each offer. `None` for no limit: the pages
    /// are the caller's own, and requests with a common prefix may offer the same pages.
    pub pages: Option<u64>,
    /// The share of `pages` that stays free, in percent. An offer waits while the pins exceed the rest. Without
    /// `pages` it has no effect.
    pub reserve_percent: u8,
    /// How long prefill does not serve a process that declined for want of pages.
    pub back_off: Duration,
}

impl Default for PinLimits {
    /// No limit; the documents' reserve of 2 % and back-off of 2.0 s.
    fn default() -> Self {
        let options = PinOptions::default();
        Self {
            pages: None,
            reserve_percent: options.reserve_percent,
            back_off: options.back_off,
        }
    }
}

impl PinLimits {
    fn ledger(self) -> PinLedger {
        let options = PinOptions {
            // Without a limit there is no reserve either, even at 100 %.
            reserve_percent: self.pages.map_or(0, |_| self.reserve_percent),
            back_off: self.back_off,
        };
        PinLedger::new(self.pages.unwrap_or(u64::MAX), options)
    }
}

/// Why decode asks for nothing of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclineReason {
    /// Decode could not allocate all pages. Prefill does not serve its process for [`PinLimits::back_off`].
    NoPages,
    /// Decode does not need the request.
    NotWanted,
}

/// The reasons to refuse a call. A refused call changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// A page lies outside a state.
    #[error("a page lies outside the memory of a state")]
    NoSuchPage,
    /// A page to receive into is named twice.
    #[error("page {0} is named twice")]
    PageTwice(u32),
    /// The numbers of ranks make no plan, or an address is missing.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Pages lie outside the request, or layers outside this rank's.
    #[error("pages {0:?} and layers {1:?} lie outside the request of this rank")]
    OutOfRange(Range<u32>, Range<u32>),
    /// Some pages or layers of the request were not named, or one was named twice.
    #[error("{named} of {all} pages and layers of the request are named as computed")]
    NotComputed {
        /// The number of pages times layers that were named.
        named: u64,
        /// The number of pages times layers of the request on this rank.
        all: u64,
    },
    /// The metadata exceed the slot.
    #[error("metadata of {0} bytes exceed a slot of {1} bytes")]
    LongAux(usize, u64),
    /// The room is open already: its pages are being sent or offered.
    #[error("room {0} is open")]
    Repeated(u64),
    /// The session is closed.
    #[error("the session is closed")]
    Closed,
}

/// How long a request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTimes {
    /// The request ends by then.
    pub deadline: Instant,
    /// How long the other end may take to open its room; by default [`RoomLimits::bootstrapping`]. Give a busy
    /// other end more time. The loss of the other process is detected earlier.
    pub patience: Option<Duration>,
}

impl RequestTimes {
    /// Times in which the other end may take until `deadline`.
    pub fn patient(deadline: Instant) -> Self {
        Self {
            deadline,
            patience: Some(deadline.saturating_duration_since(Instant::now())),
        }
    }
}

impl From<Instant> for RequestTimes {
    fn from(deadline: Instant) -> Self {
        Self {
            deadline,
            patience: None,
        }
    }
}

/// One process's end of its hand-offs. Dropping the session closes it.
pub struct HandoffSession {
    events: mpsc::UnboundedSender<Event>,
    memory: Arc<RankMemory>,
    local: SocketAddr,
    address: String,
    pinned: Arc<AtomicU64>,
    waiting_offers: Arc<AtomicU64>,
    generations: AtomicU64,
    sending: Arc<Mutex<HashSet<RoomId>>>,
    thread: Mutex<AgentThread>,
}

/// The agent's thread, or the result of its end: false when a peer may still touch pages of decode.
enum AgentThread {
    Runs(JoinHandle<bool>),
    Ended(bool),
}

impl std::fmt::Debug for HandoffSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HandoffSession({})", self.address)
    }
}

/// Decodes letters and passes them to the agent.
struct Inbox {
    events: mpsc::UnboundedSender<Event>,
    waiting_bytes: Arc<AtomicU64>,
}

impl LetterBox for Inbox {
    fn take(&self, letter: Letter) -> Code {
        let bytes = letter.body.len() as u64;
        if self.waiting_bytes.load(Ordering::Relaxed) + bytes > MAX_WAITING_BYTES {
            return Code::TooManyHeld;
        }
        let message = match HandoffMessage::decode(&letter.body) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!(address = letter.address, %error, "a letter is refused");
                return Code::Malformed;
            }
        };
        self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        let event = Event::Letter {
            from: letter.from,
            address: letter.address,
            message: Box::new(message),
            bytes,
        };
        match self.events.send(event) {
            Ok(()) => Code::Ok,
            Err(_) => Code::Draining,
        }
    }
}

impl HandoffSession {
    /// Starts a session over the memory of one rank, for peers that connect to `listener`.
    ///
    /// # Errors
    ///
    /// The error of starting the server or the thread.
    pub fn start(
        listener: TcpListener,
        mut memory: RankMemory,
        options: HandoffOptions,
    ) -> io::Result<Self> {
        let local = listener.local_addr()?;
        let address = options.address.unwrap_or_else(|| local.to_string());
        memory.set_address(address.clone());
        let memory = Arc::new(memory);
        let (events, received) = mpsc::unbounded_channel();
        let waiting_bytes = Arc::<AtomicU64>::default();
        let endpoint_options = EndpointOptions {
            name: options.name,
            secret: options.secret,
            stall: options.stall,
            rdma: None,
            reads_directly: false,
            letters: Some(LetterOptions {
                address: Some(address.clone()),
                letter_box: Arc::new(Inbox {
                    events: events.clone(),
                    waiting_bytes: Arc::clone(&waiting_bytes),
                }),
            }),
        };
        let endpoint = Arc::new(Endpoint::start(listener, endpoint_options)?);
        let registration = HandoffMessage::Register(memory.description().clone()).encode();
        let context = PeerContext {
            endpoint: Arc::clone(&endpoint),
            events: events.clone(),
            watch: options.watch,
            registration,
        };
        let desk = DeskOptions::default();
        let pinned = Arc::<AtomicU64>::default();
        let waiting_offers = Arc::<AtomicU64>::default();
        let sending = Arc::<Mutex<HashSet<RoomId>>>::default();
        let session: Incarnation = endpoint.session();
        let agent = Agent {
            endpoint,
            memory: Arc::clone(&memory),
            limits: options.limits,
            chunks: options.chunks,
            idle: options.idle,
            events: events.clone(),
            peers: Peers::new(context),
            ranks: RegisteredRanks::new(memory.description().page_tokens, MAX_RANKS),
            addresses: HashMap::new(),
            receivers: ReceiverDesk::new(session, &desk),
            receiving: HashMap::new(),
            pages_in_use: HashSet::new(),
            senders: SenderDesk::new(desk),
            sending: HashMap::new(),
            open_rooms: Arc::clone(&sending),
            pins: options.pins.ledger(),
            waiting: BTreeMap::new(),
            waiting_offers: Arc::clone(&waiting_offers),
            lost: BTreeMap::new(),
            failure_probability: options.failure_probability,
            pinned: Arc::clone(&pinned),
            waiting_bytes,
            origin: Instant::now(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .thread_name("kvpool-handoff-io")
            .build()?;
        let thread = std::thread::Builder::new()
            .name("kvpool-handoff".to_owned())
            .spawn(move || {
                let is_over = runtime.block_on(agent.run(received));
                runtime.shutdown_timeout(Duration::from_secs(1));
                is_over
            })?;
        Ok(Self {
            events,
            memory,
            local,
            address,
            pinned,
            waiting_offers,
            generations: AtomicU64::new(1),
            sending,
            thread: Mutex::new(AgentThread::Runs(thread)),
        })
    }

    /// The address that peers connect to.
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The address that this session advertises to its peers.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The memory of this rank.
    pub fn memory(&self) -> &RankMemory {
        &self.memory
    }

    /// The number of this rank's pages that rooms send, counted once for each room. It excludes the pages of
    /// offers that wait.
    pub fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// The offers that wait until other offers free their pages.
    pub fn waiting_offers(&self) -> u64 {
        self.waiting_offers.load(Ordering::Relaxed)
    }

    /// Receives a request's pages from prefill. This rank holds the first `held` pages of the request already.
    /// `pages` are this rank's pages for the rest of the request, in order. `addresses` names all ranks of
    /// prefill as "host:port": the `sources` ranks of the first of `stages`, then those of the next stage. With
    /// `wants_aux` the first sender of this rank also sends the slot of metadata.
    ///
    /// # Errors
    ///
    /// - [`HandoffError::NoSuchPage`]: a page lies outside a state.
    /// - [`HandoffError::PageTwice`]: a page is named twice.
    /// - [`HandoffError::Plan`]: neither number of tensor-parallel ranks divides the other, or the stages do not
    ///   fit.
    /// - [`HandoffError::Closed`]: the session has ended.
    ///
    /// Other failures are in the state of the request. It fails with [`Code::InProgress`] while another room
    /// holds one of the pages. It fails with [`Code::OutOfRange`] when prefill has another number of pages.
    pub fn receive(
        &self,
        room: RoomId,
        (held, pages): (u32, Vec<u32>),
        addresses: &[String],
        (sources, stages): (u32, &Stages),
        wants_aux: bool,
        times: impl Into<RequestTimes>,
    ) -> Result<Receiving, HandoffError> {
        if !self.memory.has_pages(&pages) {
            return Err(HandoffError::NoSuchPage);
        }
        let mut seen = HashSet::new();
        if let Some(page) = pages.iter().find(|page| !seen.insert(**page)) {
            return Err(HandoffError::PageTwice(*page));
        }
        let senders = senders_at(self.memory.description(), addresses, (sources, stages))?;
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let tag = RoomTag {
            room,
            generation: RoomGeneration(generation),
        };
        let cell = TransferCell::new();
        let call = ReceiveCall {
            tag,
            pages,
            held,
            senders,
            wants_aux,
            times: times.into(),
        };
        self.call(Call::Receive(call, Arc::clone(&cell)))?;
        Ok(Receiving::new(tag, cell, self.events.clone()))
    }

    /// Sends a request's pages to decode, which has `decode_ranks` tensor-parallel ranks. `pages` are this
    /// rank's pages, from the request's first token. The caller keeps the pages until they are released.
    ///
    /// # Errors
    ///
    /// - [`HandoffError::NoSuchPage`]: a page lies outside a state.
    /// - [`HandoffError::Plan`]: neither number of tensor-parallel ranks divides the other.
    /// - [`HandoffError::Repeated`]: the room is sent or offered already, and its pages are not released.
    /// - [`HandoffError::Closed`]: the session has ended.
    pub fn send(
        &self,
        room: RoomId,
        pages: Vec<u32>,
        decode_ranks: u32,
        times: impl Into<RequestTimes>,
    ) -> Result<Sending, HandoffError> {
        self.open_sending(room, pages, decode_ranks, (times.into(), false))
    }

    /// Offers a request's pages until decode asks for them: at once (eager), or at their first use (delayed).
    /// All pages are computed. They stay pinned until decode has them, or until `deadline`.
    ///
    /// While the pages of other offers exceed [`PinLimits`], the offer waits in Bootstrapping and answers no
    /// receiver. The caller keeps the pages meanwhile. An offer that still waits at `deadline` fails with
    /// [`Code::Full`].
    ///
    /// # Errors
    ///
    /// As [`HandoffSession::send`].
    pub fn offer(
        &self,
        room: RoomId,
        pages: Vec<u32>,
        decode_ranks: u32,
        deadline: Instant,
    ) -> Result<Sending, HandoffError> {
        let times = RequestTimes::patient(deadline);
        self.open_sending(room, pages, decode_ranks, (times, true))
    }

    /// Tells prefill that this process asks for nothing of a request. The request ends at all ends, and
    /// prefill's pages are free. One rank of decode speaks for all ranks. `addresses` names all ranks of
    /// prefill. The other ends fail with [`Code::Full`] or, for a request that is not wanted, with
    /// [`Code::Draining`].
    ///
    /// Prefill accepts the message while this process has a place in the request, or while a place is left that
    /// no process asked for. The process sends the message once. If it is lost, the offer ends at its deadline.
    ///
    /// # Errors
    ///
    /// [`HandoffError::Closed`] after the end of the session.
    pub fn decline(
        &self,
        room: RoomId,
        addresses: &[String],
        reason: DeclineReason,
    ) -> Result<(), HandoffError> {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let tag = RoomTag {
            room,
            generation: RoomGeneration(generation),
        };
        let code = match reason {
            DeclineReason::NoPages => Code::Full,
            DeclineReason::NotWanted => Code::Draining,
        };
        self.call(Call::Decline(tag, addresses.to_vec(), code))
    }

    fn open_sending(
        &self,
        room: RoomId,
        pages: Vec<u32>,
        decode_ranks: u32,
        (times, is_offer): (RequestTimes, bool),
    ) -> Result<Sending, HandoffError> {
        if !self.memory.has_pages(&pages) {
            return Err(HandoffError::NoSuchPage);
        }
        let receivers = receivers_of(self.memory.description(), decode_ranks)?.len();
        let count = pages.len();
        {
            let mut open = self.sending.lock();
            if !open.insert(room) {
                return Err(HandoffError::Repeated(room.0));
            }
        }
        // The agent counts an offer once its pages are pinned.
        let pinned = if is_offer { 0 } else { count as u64 };
        self.pinned.fetch_add(pinned, Ordering::Relaxed);
        let cell = TransferCell::new();
        let call = SendCall {
            room,
            pages,
            receivers,
            times,
            is_offer,
        };
        if let Err(error) = self.call(Call::Send(call, Arc::clone(&cell))) {
            self.sending.lock().remove(&room);
            self.pinned.fetch_sub(pinned, Ordering::Relaxed);
            return Err(error);
        }
        let pages = u32::try_from(count).unwrap_or(u32::MAX);
        let sending = Sending::new((room, pages), &self.memory, cell, self.events.clone());
        if is_offer {
            sending.name_all();
        }
        Ok(sending)
    }

    fn call(&self, call: Call) -> Result<(), HandoffError> {
        let sent = self.events.send(Event::Call(call));
        sent.map_err(|_| HandoffError::Closed)
    }

    /// Ends all transfers, and waits a few seconds until nothing touches their pages. Returns false when a peer
    /// may still touch them: do not free the memory then.
    pub fn close(&self) -> bool {
        // A second caller waits for the first, and gets the same answer.
        let mut thread = self.thread.lock();
        let is_over = match std::mem::replace(&mut *thread, AgentThread::Ended(false)) {
            AgentThread::Ended(is_over) => is_over,
            AgentThread::Runs(runs) => {
                // The agent's thread may have ended.
                drop(self.events.send(Event::Call(Call::Close)));
                runs.join().unwrap_or(false) && self.pinned() == 0
            }
        };
        *thread = AgentThread::Ended(is_over);
        is_over
    }
}

impl Drop for HandoffSession {
    fn drop(&mut self) {
        self.close();
    }
}
