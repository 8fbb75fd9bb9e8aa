//! One process's side of peer memory: what it exposes, and what it moves from and to others.

use super::exposed::{ExposeError, StillTouched};
use super::host::{INDEX, MAILBOX, PeerHost};
use super::mailbox::MAX_MESSAGE;
use super::plan::{Move, joined};
use super::secret::Secret;
use super::targets::Targets;
use super::transfer::PeerTransfer;
use super::wait::wait_for;
use crate::copiers::Copiers;
use crate::link::{ReadOp, TransferError, TransferResult, TransportKind};
use crate::memory::{Region, Slice};
use crate::outcomes::{deadline_exceeded, invalid};
use crate::rdma::{Fabric, RdmaOptions, Serving};
use crate::tcp::{Server, ServerHandle, ServerOptions};
use kvpool_types::{Code, Epoch, Extent, Length, Offset};
use std::cell::Cell;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// How many transfers that nobody waits for go on at once.
const BACKGROUND: usize = 8;

/// What a peer left for this process.
pub type Message = Vec<u8>;

/// Which way bytes go.
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
    /// What it calls itself, for its peers' logs.
    pub name: String,
    /// What peers must have.
    pub secret: Secret,
    /// How long a peer's transfer may stand still before its connection is ended.
    pub stall: Duration,
    /// Which RDMA ports it uses, where peers have some too; `None`: bytes go over TCP.
    pub rdma: Option<RdmaOptions>,
}

/// How the bytes of one peer go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Over TCP or RDMA.
    pub kind: TransportKind,
    /// Why not over RDMA.
    pub why: Option<Arc<str>>,
}

/// A session: the memory of this process for its peers, and theirs for it. Dropping it ends both.
///
/// All calls block, for as long as their deadline at most.
pub struct Endpoint {
    // Dropped in this order: no peer touches memory any more once the rest goes.
    server: ServerHandle,
    host: Arc<PeerHost>,
    targets: Targets,
    /// The names of its RDMA ports, or why it uses none.
    ports: Result<Vec<String>, Arc<str>>,
    next_grant: AtomicU64,
    background: OnceLock<Copiers>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", self.local_addr())
    }
}

impl Endpoint {
    /// Starts a session with a token of its own, for peers that come to `listener`. Where RDMA was asked
    /// for and cannot be had, bytes go over TCP, and [`Endpoint::ports`] says why.
    pub fn start(listener: TcpListener, options: EndpointOptions) -> io::Result<Self> {
        // Its own, and not one that others of this process share: a peer's device opens whatever is
        // registered for peers in the same protection domain, by a key that can be guessed.
        let rdma: Result<Arc<Fabric>, Arc<str>> = match &options.rdma {
            None => Err("RDMA was not asked for here".into()),
            Some(rdma) => Fabric::open(rdma).map_err(|why| why.to_string().into()),
        };
        let ports = rdma.as_ref().map_err(Arc::clone).map(|fabric| {
            let names = fabric.rails().iter().map(|rail| rail.name().to_owned());
            names.collect()
        });
        let fabric = rdma.as_ref().ok().cloned();
        let host = Arc::new(PeerHost::new(
            &options.name,
            options.secret.clone(),
            fabric.clone(),
        ));
        let serving = ServerOptions {
            stall: options.stall,
            rdma: fabric.map(|fabric| Arc::new(Serving::new(fabric))),
            ..ServerOptions::default()
        };
        Ok(Self {
            server: Server::start(listener, host.clone(), serving)?,
            host,
            targets: Targets::new(options.secret, rdma),
            ports,
            next_grant: AtomicU64::new(1),
            background: OnceLock::new(),
        })
    }

    /// The names of the RDMA ports that it uses, or why it uses none.
    pub fn ports(&self) -> Result<&[String], &str> {
        match &self.ports {
            Ok(ports) => Ok(ports),
            Err(why) => Err(why),
        }
    }

    /// How the bytes of a peer go; connects to it unless it is connected.
    pub fn route(&self, target: &str, deadline: Instant) -> Result<Route, TransferError> {
        Ok(self.targets.open(target, deadline)?.route())
    }

    /// How peers' bytes have come to go since the last call: a peer is named when it is first reached, and
    /// when it is reached in another way than before.
    pub fn news(&self) -> Vec<(String, Route)> {
        self.targets.route_changes()
    }

    /// Where peers find it.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Lets peers read and write a range, by the addresses that it has in this process. Where there are
    /// RDMA ports it is registered with them, which locks its pages and takes a while.
    pub fn expose(&self, memory: Slice) -> Result<(), ExposeError> {
        self.host.expose(memory)
    }

    /// Takes the range that begins at `address` back, and waits until no transfer touches it: for
    /// `patience`, then receives into it are broken off. Reads over RDMA are broken off at once, for
    /// nobody here hears of them. False when none begins there. After an error nothing new touches it, but
    /// it must not be freed.
    pub fn withdraw(&self, address: u64, timeout: Duration) -> Result<bool, StillTouched> {
        self.host.withdraw(address, timeout)
    }

    /// Takes back all that is exposed, and breaks off what touches it; false when something still does.
    pub fn withdraw_all(&self) -> bool {
        let timeout = Duration::from_millis(100);
        let mut all = true;
        for start in self.host.exposed.starts() {
            all &= self.withdraw(start, timeout).is_ok();
        }
        all
    }

    /// Takes the messages that peers have left, oldest first.
    pub fn messages(&self) -> Vec<Message> {
        self.host.mailbox.fetch()
    }

    /// Has `job` done on one of a few threads of the endpoint's.
    pub fn in_background(&self, job: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let pool = match self.background.get() {
            Some(pool) => pool,
            None => {
                let started = Copiers::start("kvpool-peer", BACKGROUND)?;
                self.background.get_or_init(|| started)
            }
        };
        pool.submit(std::iter::once(Box::new(job) as Box<dyn FnOnce() + Send>));
        Ok(())
    }

    /// Moves bytes; `Ok` when all of them are in place, checked against their checksums. After an error
    /// some moves may have been made, but none that reaches outside the peer's exposed memory, not
    /// even in part.
    pub fn transfer(
        &self,
        target: &str,
        direction: Direction,
        moves: &[Move],
        deadline: Instant,
    ) -> Result<(), TransferError> {
        // A frame that names such a range is refused with its whole connection.
        if let Some(each) = moves.iter().find(|each| each.end().is_none()) {
            return Err(TransferError {
                code: Code::OutOfRange,
                message: format!(
                    "{} bytes at {:#x} reach past the last address",
                    each.local.length(),
                    each.remote
                ),
            });
        }
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
            // Another transfer's deadline may have ended the connection, or the peer may have begun a new
            // session since the last one, or registered memory anew that its ports had told of. Doing it
            // all again changes nothing that is in place.
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

    /// Leaves a message with a peer.
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
        all_ok(&wait_for(peer.tcp.write(vec![write], deadline)))
    }

    /// Where the memory begins that a peer exposed first; `None` when it exposes none. Also a way to
    /// see whether it is there.
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
            };
            all_ok(&wait_for(peer.tcp.read(Epoch(0), vec![index], deadline)))?;
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

fn all_ok(outcomes: &[TransferResult]) -> Result<(), TransferError> {
    match outcomes.iter().find_map(|outcome| outcome.as_ref().err()) {
        Some(error) => Err(error.clone()),
        None if outcomes.is_empty() => Err(deadline_exceeded()),
        None => Ok(()),
    }
}
