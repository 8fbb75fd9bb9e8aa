//! One process's side of peer memory: the ranges it exposes, and its transfers from and to peers.

use super::background::Background;
use super::direct::Card;
use super::exposed::{ExposeError, StillTouched};
use super::host::{INDEX, MAILBOX, PeerHost};
use super::letters::{LetterOptions, LetterWriter, MAX_ADDRESS};
use super::links::PeerLink;
use super::mailbox::MAX_MESSAGE;
use super::plan::{Move, joined};
use super::rooms::{ClosedRoom, RoomPass, RoomView};
use super::secret::Secret;
use super::targets::Targets;
use super::transfer::PeerTransfer;
use super::watch::{PeerLoss, PeerWatch, PeerWatchOptions};
use crate::link::{ReadOp, TransferError, TransferResult, TransportKind};
use crate::memory::{Region, Slice};
use crate::outcomes::{deadline_exceeded, invalid};
use crate::rdma::{Fabric, RdmaOptions, Serving};
use crate::tcp::{Server, ServerHandle, ServerOptions};
use futures::executor::block_on;
use kvpool_types::{Code, Epoch, Extent, Incarnation, Length, Offset};
use std::cell::Cell;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// The bytes of a message from a peer, at most 64 KiB.
pub type Message = Vec<u8>;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the peer's memory into this process's.
    Read,
    /// From this process's memory into the peer's.
    Write,
}

/// How an endpoint serves its peers.
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// The endpoint's name in its peers' logs.
    pub name: String,
    /// The secret that peers must share.
    pub secret: Secret,
    /// How long a peer's transfer may make no progress before its connection is ended.
    pub stall: Duration,
    /// The RDMA ports to use with peers that have some; `None` for TCP alone.
    pub rdma: Option<RdmaOptions>,
    /// Whether this process and peers on its host may copy from each other's exposed memory, where the kernel
    /// permits it and bytes do not go over RDMA. Otherwise such reads go over TCP.
    pub reads_directly: bool,
    /// How letters are exchanged; `None` when they are not.
    pub letters: Option<LetterOptions>,
}

/// The transport that the bytes of one peer use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// TCP or RDMA.
    pub kind: TransportKind,
    /// Why RDMA is not used.
    pub why: Option<Arc<str>>,
    /// Whether large reads are copied from the memory of the peer's process, which is on the same host.
    pub reads_directly: bool,
}

/// A session: this process's memory for its peers, and access to theirs. The drop ends both.
///
/// All calls block, until their deadline at most.
pub struct Endpoint {
    // Dropped in this order: once the server has ended, no peer touches the memory, but for direct reads.
    server: ServerHandle,
    pub(super) host: Arc<PeerHost>,
    targets: Targets,
    /// The names of the RDMA ports, or why there are none.
    ports: Result<Vec<String>, Arc<str>>,
    next_grant: Arc<AtomicU64>,
    letters: Option<Arc<LetterWriter>>,
    background: OnceLock<Background>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", self.local_addr())
    }
}

impl Endpoint {
    /// Starts a session with a new token, for peers that connect to `listener`. When RDMA is
    /// requested but unavailable, bytes go over TCP, and [`Endpoint::ports`] gives the reason.
    ///
    /// # Errors
    ///
    /// The error of starting the server on `listener`.
    pub fn start(listener: TcpListener, options: EndpointOptions) -> io::Result<Self> {
        // The fabric is not shared with other endpoints of the process. A peer's device can open
        // every registration in a protection domain, because keys can be guessed.
        let rdma: Result<Arc<Fabric>, Arc<str>> = match &options.rdma {
            None => Err("RDMA was not asked for here".into()),
            Some(rdma) => Fabric::open(rdma).map_err(|why| why.to_string().into()),
        };
        let ports = rdma.as_ref().map_err(Arc::clone).map(|fabric| {
            let names = fabric.rails().iter().map(|rail| rail.name().to_owned());
            names.collect()
        });
        let fabric = rdma.as_ref().ok().cloned();
        let letter_box = options.letters.as_ref();
        let letter_box = letter_box.map(|letters| Arc::clone(&letters.letter_box));
        let secret = options.secret.clone();
        let card = options.reads_directly.then(Card::new).and_then(|card| {
            card.inspect_err(|error| tracing::debug!(%error, "no direct reads on this host"))
                .ok()
        });
        let host = PeerHost::new(&options.name, secret, fabric.clone(), card, letter_box);
        let here = listener.local_addr()?;
        let letters = match options.letters {
            None => None,
            Some(letters) => {
                let address = letters.address.unwrap_or_else(|| here.to_string());
                if address.len() > MAX_ADDRESS {
                    let why = format!("an address has at most {MAX_ADDRESS} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
                }
                let secret = options.secret.clone();
                let writer = LetterWriter::new(secret, host.session(), address);
                Some(Arc::new(writer))
            }
        };
        let serving = ServerOptions {
            stall: options.stall,
            rdma: fabric.map(|fabric| Arc::new(Serving::new(fabric))),
            ..ServerOptions::default()
        };
        Ok(Self {
            server: Server::start(listener, host.clone(), serving)?,
            host,
            targets: Targets::new(options.secret, rdma, options.reads_directly),
            ports,
            next_grant: Arc::new(AtomicU64::new(1)),
            letters,
            background: OnceLock::new(),
        })
    }

    /// The names of the RDMA ports in use.
    ///
    /// # Errors
    ///
    /// Why the endpoint uses no RDMA port.
    pub fn ports(&self) -> Result<&[String], &str> {
        match &self.ports {
            Ok(ports) => Ok(ports),
            Err(why) => Err(why),
        }
    }

    /// The transport of a peer. Connects to the peer if necessary.
    ///
    /// # Errors
    ///
    /// [`Code::Unreachable`] or [`Code::DeadlineExceeded`] when the peer cannot be reached; the
    /// peer's own code when it refuses.
    pub fn route(&self, target: &str, deadline: Instant) -> Result<Route, TransferError> {
        Ok(self.targets.open(target, deadline)?.route())
    }

    /// The changes of routes since the last call. A peer is listed when it is first reached, and whenever its
    /// transport changes.
    pub fn route_changes(&self) -> Vec<(String, Route)> {
        self.targets.route_changes()
    }

    /// The address that peers connect to.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Lets peers read and write a range, by its addresses in this process. Registration with the
    /// RDMA ports locks the range's pages and takes a while.
    ///
    /// # Errors
    ///
    /// See [`ExposeError`].
    pub fn expose(&self, memory: Slice) -> Result<(), ExposeError> {
        self.host.expose(memory)
    }

    /// Withdraws the range that begins at `address`, and waits until no transfer touches it. A direct read of a
    /// peer on this host may go on, because this process cannot observe it. After
    /// `timeout`, receives into the range are aborted. Reads over RDMA are aborted at once, because
    /// this process cannot observe them. False when no range begins there.
    ///
    /// # Errors
    ///
    /// [`StillTouched`] when a transfer or a port may still touch the range. No new transfer can,
    /// but the memory must not be freed.
    pub fn withdraw(&self, address: u64, timeout: Duration) -> Result<bool, StillTouched> {
        self.host.withdraw(address, timeout)
    }

    /// Withdraws all ranges and aborts the transfers that touch them. False when a transfer may
    /// still touch a range.
    pub fn withdraw_all(&self) -> bool {
        let timeout = Duration::from_millis(100);
        let mut all = true;
        for start in self.host.exposed.starts() {
            all &= self.withdraw(start, timeout).is_ok();
        }
        all
    }

    /// Takes the messages from peers, oldest first.
    pub fn messages(&self) -> Vec<Message> {
        self.host.mailbox.fetch()
    }

    /// Runs `job`, which is about one peer, on one of a few background threads. At most 8 jobs about
    /// one peer run at a time: a peer that does not answer delays no job about another one.
    ///
    /// # Errors
    ///
    /// The error of starting the threads at the first call.
    pub fn in_background(
        &self,
        target: &str,
        job: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let background = match self.background.get() {
            Some(background) => background,
            None => {
                let started = Background::start()?;
                self.background.get_or_init(|| started)
            }
        };
        background.run(target, Box::new(job));
        Ok(())
    }

    /// Moves bytes. `Ok` means that all of them are in place and match their checksums. After an
    /// error some moves may be complete. A move that reaches outside the peer's exposed memory
    /// touches no byte.
    ///
    /// # Errors
    ///
    /// [`Code::OutOfRange`] when a move leaves the peer's exposed memory. The message names the move's
    /// range, and the nearest exposed range if the peer tells it within a second.
    /// [`Code::ChecksumMismatch`] when memory changed during the transfer. Otherwise as
    /// [`Endpoint::route`].
    pub fn transfer(
        &self,
        target: &str,
        direction: Direction,
        moves: &[Move],
        deadline: Instant,
    ) -> Result<(), TransferError> {
        check_addresses(moves)?;
        let over_rdma = Cell::new(false);
        let once = || {
            over_rdma.set(false);
            let peer = self.targets.open(target, deadline)?;
            over_rdma.set(peer.rdma.is_ok());
            let moving = PeerTransfer {
                peer: &peer,
                grants: &self.next_grant,
                direction,
                deadline,
            };
            moving.run(&joined(moves), moves)
        };
        let may_pass = |outcome: &Result<(), TransferError>| {
            let code = outcome.as_ref().err().map(|error| error.code);
            matches!(code, Some(Code::Unreachable | Code::WrongIncarnation))
                && Instant::now() < deadline
        };
        let mut outcome = once();
        if may_pass(&outcome) {
            // Another transfer's deadline may have ended the connection. Or the peer may have
            // started a new session, or registered memory anew. Repeating all moves is safe: it
            // rewrites the same bytes.
            outcome = once();
        }
        if may_pass(&outcome)
            && over_rdma.get()
            && let Err(error) = &outcome
        {
            self.targets.cool_down(target, error, deadline);
            outcome = once();
        }
        outcome
    }

    /// Opens a room over memory of this process. A holder of the pass may write into it until
    /// [`Endpoint::close_room`]. The memory needs no [`Endpoint::expose`]. The caller must not give it to
    /// another room meanwhile.
    ///
    /// # Errors
    ///
    /// [`ExposeError::Unfit`] without a view.
    pub fn open_room(&self, views: Vec<RoomView>) -> Result<RoomPass, ExposeError> {
        self.host.rooms.open(views)
    }

    /// Closes a room: refuses new writes at once, waits for writes under way, and after `patience` ends their
    /// connections. On return, nothing writes into the room's memory. `None` when the room is not open.
    ///
    /// # Errors
    ///
    /// [`StillTouched`] when a write did not end. No new write can come, but the memory must not be
    /// used for something else. A later call waits again.
    pub fn close_room(
        &self,
        room: Epoch,
        patience: Duration,
    ) -> Result<Option<ClosedRoom>, StillTouched> {
        self.host.rooms.close(room, patience)
    }

    /// The links to a peer, for calls that do not block. Connects to the peer if necessary.
    ///
    /// # Errors
    ///
    /// As [`Endpoint::route`].
    pub fn link(&self, target: &str, deadline: Instant) -> Result<PeerLink, TransferError> {
        Ok(PeerLink {
            connected: self.targets.open(target, deadline)?,
            grants: Arc::clone(&self.next_grant),
            letters: self.letters.clone(),
        })
    }

    /// Ends the links to a peer that is known to be gone. Transfers under way fail at once, and the next use
    /// connects again. Unused links do not detect by themselves that the peer has died.
    pub fn disconnect(&self, target: &str, deadline: Instant) {
        self.targets.disconnect(target, deadline);
    }

    /// The session's token, which letters name.
    pub fn session(&self) -> Incarnation {
        self.host.session()
    }

    /// Watches a peer, until the watch is dropped. A thread calls `on_loss` once when the peer's
    /// process is gone or answers no ping.
    ///
    /// # Errors
    ///
    /// As [`Endpoint::route`].
    pub fn watch(
        &self,
        target: &str,
        options: PeerWatchOptions,
        deadline: Instant,
        on_loss: impl FnOnce(PeerLoss) + Send + 'static,
    ) -> Result<PeerWatch, TransferError> {
        let (socket, session) = self.targets.connection(target, deadline)?;
        PeerWatch::start(socket, session, options, on_loss)
    }

    /// Sends a message to a peer's mailbox.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] for an empty message or one over 64 KiB, [`Code::TooManyHeld`]
    /// when the mailbox is full. Otherwise as [`Endpoint::route`].
    pub fn tell(
        &self,
        target: &str,
        message: &[u8],
        deadline: Instant,
    ) -> Result<(), TransferError> {
        if message.is_empty() || message.len() as u64 > MAX_MESSAGE {
            return Err(invalid(format!(
                "a message has 1 to {MAX_MESSAGE} bytes, not {}",
                message.len()
            )));
        }
        let peer = self.targets.open(target, deadline)?;
        let extent = Extent {
            segment: MAILBOX,
            offset: Offset(0),
            length: Length(message.len() as u64),
        };
        let memory = Region::from(message.to_vec()).whole();
        let moving = PeerTransfer {
            peer: &peer,
            grants: &self.next_grant,
            direction: Direction::Write,
            deadline,
        };
        let write = moving.signed(extent, vec![memory]);
        all_ok(&block_on(peer.tcp.write(vec![write], deadline)))
    }

    /// The address of the range that the peer exposed first; `None` when it exposes none. Also
    /// serves as a liveness check.
    ///
    /// # Errors
    ///
    /// As [`Endpoint::route`].
    pub fn first_exposed(
        &self,
        target: &str,
        deadline: Instant,
    ) -> Result<Option<u64>, TransferError> {
        let ask = || {
            let peer = self.targets.open(target, deadline)?;
            let answer = Region::allocate(Length(8));
            let index = ReadOp {
                extent: Extent {
                    segment: INDEX,
                    offset: Offset(0),
                    length: Length(8),
                },
                from: Offset(0),
                into: vec![answer.whole()],
                right: None,
            };
            all_ok(&block_on(peer.tcp.read(Epoch(0), vec![index], deadline)))?;
            let mut first = [0; 8];
            answer.whole().read_at(Offset(0), &mut first);
            Ok(Some(u64::from_le_bytes(first)).filter(|first| *first != 0))
        };
        match ask() {
            Err(TransferError {
                code: Code::Unreachable | Code::WrongIncarnation,
                ..
            }) if Instant::now() < deadline => ask(),
            other => other,
        }
    }
}

/// Refuses addresses past the end of the address space. The peer would refuse a frame with such a
/// range together with its whole connection.
fn check_addresses(moves: &[Move]) -> Result<(), TransferError> {
    match moves.iter().find(|each| each.end().is_none()) {
        None => Ok(()),
        Some(each) => Err(TransferError {
            code: Code::OutOfRange,
            message: format!(
                "{} bytes at {:#x} exceed the address space",
                each.local.length(),
                each.remote
            ),
        }),
    }
}

fn all_ok(outcomes: &[TransferResult]) -> Result<(), TransferError> {
    match outcomes.iter().find_map(|outcome| outcome.as_ref().err()) {
        Some(error) => Err(error.clone()),
        None if outcomes.is_empty() => Err(deadline_exceeded()),
        None => Ok(()),
    }
}
