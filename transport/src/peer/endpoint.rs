//! One process's side of peer memory: what it exposes, and what it moves from and to others.

use super::exposed::{ExposeError, StillTouched};
use super::host::{INDEX, MAILBOX, PeerHost};
use super::known::{Connected, Known};
use super::mailbox::MAX_MESSAGE;
use super::plan::{Move, PIECE_BYTES, Run, joined, single};
use super::secret::Secret;
use super::wait::wait_for;
use crate::batch::{deadline_exceeded, invalid};
use crate::checksum::combine_chunks;
use crate::copiers::Copiers;
use crate::link::{ReadOp, TransferError, TransferResult, WriteOp};
use crate::memory::{Region, Slice};
use crate::tcp::{Server, ServerHandle, ServerOptions};
use kvpool_types::{Code, Epoch, Extent, GrantId, Length, Offset};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How many transfers that nobody waits for go on at once.
const BACKGROUND: usize = 8;

/// What a peer left for this process.
pub type Message = Vec<u8>;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
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
}

/// A session: the memory of this process for its peers, and theirs for it. Dropping it ends both.
///
/// All calls block, for as long as their deadline at most.
pub struct Endpoint {
    // Dropped in this order: no peer touches memory any more once the rest goes.
    server: ServerHandle,
    host: Arc<PeerHost>,
    known: Known,
    next_grant: AtomicU64,
    background: OnceLock<Copiers>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", self.local_addr())
    }
}

impl Endpoint {
    /// Starts a session with a token of its own, for peers that come to `listener`.
    pub fn start(listener: TcpListener, options: EndpointOptions) -> io::Result<Self> {
        let host = Arc::new(PeerHost::new(&options.name, options.secret.clone()));
        let serving = ServerOptions {
            stall: options.stall,
            ..ServerOptions::default()
        };
        Ok(Self {
            server: Server::start(listener, host.clone(), serving)?,
            host,
            known: Known::new(options.secret),
            next_grant: AtomicU64::new(1),
            background: OnceLock::new(),
        })
    }

    /// Where peers find it.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr()
    }

    /// Lets peers read and write a range, by the addresses that it has in this process.
    pub fn expose(&self, memory: Slice) -> Result<(), ExposeError> {
        self.host.exposed.insert(memory)
    }

    /// Takes the range that begins at `address` back, and waits until no transfer touches it: for
    /// `patience`, then receives into it are broken off. False when none begins there. After an error
    /// nothing new touches it, but it must not be freed.
    pub fn withdraw(&self, address: u64, patience: Duration) -> Result<bool, StillTouched> {
        self.host.exposed.remove(address, patience)
    }

    /// Takes back all that is exposed, and breaks off what touches it; false when something still does.
    pub fn withdraw_all(&self) -> bool {
        let patience = Duration::from_millis(100);
        let mut all = true;
        for start in self.host.exposed.starts() {
            all &= self.withdraw(start, patience).is_ok();
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
        way: Way,
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
        let once = || {
            let peer = self.known.open(target, deadline)?;
            self.run(&peer, way, joined(moves), moves, deadline)
        };
        match once() {
            // Another transfer's deadline may have ended the connection, or the peer may have begun a new
            // session since the last one. Doing it all again changes nothing that is in place.
            Err(error)
                if matches!(error.code, Code::Unreachable | Code::WrongIncarnation)
                    && Instant::now() < deadline =>
            {
                once()
            }
            other => other,
        }
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
        let peer = self.known.open(target, deadline)?;
        let extent = Extent {
            segment: MAILBOX,
            offset: Offset(0),
            length: Length(message.len() as u64),
        };
        let memory = Region::from(message.to_vec()).whole();
        let written = peer
            .link
            .write(vec![self.signed(&peer, extent, vec![memory])], deadline);
        all_ok(&wait_for(written))
    }

    /// Where the memory begins that a peer exposed first; `None` when it exposes none. Also a way to
    /// see whether it is there.
    pub fn first_exposed(
        &self,
        target: &str,
        deadline: Instant,
    ) -> Result<Option<u64>, TransferError> {
        let ask = || {
            let peer = self.known.open(target, deadline)?;
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
            all_ok(&wait_for(peer.link.read(Epoch(0), vec![index], deadline)))?;
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

    /// Does runs; those that were joined over a border of exposed ranges are done move by move.
    fn run(
        &self,
        peer: &Connected,
        way: Way,
        runs: Vec<Run>,
        moves: &[Move],
        deadline: Instant,
    ) -> Result<(), TransferError> {
        let outcomes = match way {
            Way::Write => self.write(peer, &runs, deadline),
            Way::Read => read(peer, &runs, deadline),
        };
        let mut apart = Vec::new();
        for (run, outcome) in runs.iter().zip(outcomes) {
            match outcome {
                Err(error) if error.code == Code::OutOfRange && run.moves.len() > 1 => {
                    let of_run = moves.iter().enumerate().skip(run.moves.start);
                    let of_run = of_run.take(run.moves.len());
                    apart.extend(
                        of_run
                            .filter(|(_, each)| each.local.length() > Length(0))
                            .map(|(index, each)| single(index, each)),
                    );
                }
                outcome => outcome?,
            }
        }
        if apart.is_empty() {
            return Ok(());
        }
        self.run(peer, way, apart, moves, deadline)
    }

    fn signed(&self, peer: &Connected, extent: Extent, from: Vec<Slice>) -> WriteOp {
        let id = GrantId(self.next_grant.fetch_add(1, Ordering::Relaxed));
        WriteOp {
            grant: peer.signer.sign(peer.session, Epoch(0), id, extent),
            from,
        }
    }

    /// Writes runs, those in pieces only once the peer has said that all of them may be written.
    fn write(
        &self,
        peer: &Connected,
        runs: &[Run],
        deadline: Instant,
    ) -> Vec<Result<(), TransferError>> {
        let mut outcomes = admitted(peer, runs, deadline);
        let mut ops = Vec::with_capacity(runs.len());
        let mut of_run = Vec::with_capacity(runs.len());
        for (index, run) in runs.iter().enumerate() {
            if !matches!(outcomes.get(index), Some(Ok(()))) {
                continue;
            }
            for piece in run.pieces() {
                ops.push(self.signed(peer, piece.extent, piece.local));
                of_run.push(index);
            }
        }
        let written = wait_for(peer.link.write(ops, deadline));
        for (index, outcome) in of_run.into_iter().zip(written) {
            if let (Some(known @ Ok(())), Err(error)) = (outcomes.get_mut(index), outcome) {
                *known = Err(error);
            }
        }
        outcomes
    }
}

/// What the peer says to the runs that go in pieces; to the others it will say it with their bytes.
fn admitted(peer: &Connected, runs: &[Run], deadline: Instant) -> Vec<Result<(), TransferError>> {
    let mut outcomes = vec![Ok(()); runs.len()];
    let cut: Vec<usize> = (0..runs.len())
        .filter(|index| runs.get(*index).is_some_and(Run::is_cut))
        .collect();
    if cut.is_empty() {
        return outcomes;
    }
    let scratch = Region::allocate(Length(cut.len() as u64));
    let asked = cut.iter().enumerate().filter_map(|(at, index)| {
        Some(ReadOp {
            extent: runs.get(*index)?.extent,
            from: Offset(0),
            into: vec![scratch.slice(Offset(at as u64), Length(1))?],
        })
    });
    let said = wait_for(peer.link.read(Epoch(0), asked.collect(), deadline));
    for (index, outcome) in cut.into_iter().zip(said) {
        if let Some(known) = outcomes.get_mut(index) {
            *known = outcome.map(drop);
        }
    }
    outcomes
}

/// Reads runs, and compares what came with what the peer says is there. Memory that its owner changes
/// meanwhile is read once more.
fn read(peer: &Connected, runs: &[Run], deadline: Instant) -> Vec<Result<(), TransferError>> {
    let first: Vec<&Run> = runs.iter().collect();
    let mut outcomes = read_checked(peer, &first, deadline);
    let changed = |outcome: &Result<(), TransferError>| matches!(outcome, Err(error) if error.code == Code::ChecksumMismatch);
    let again: Vec<usize> = (0..runs.len())
        .filter(|index| outcomes.get(*index).is_some_and(changed))
        .collect();
    if again.is_empty() {
        return outcomes;
    }
    let second: Vec<&Run> = again.iter().filter_map(|index| runs.get(*index)).collect();
    let repeated = read_checked(peer, &second, deadline);
    for (index, outcome) in again.into_iter().zip(repeated) {
        if let Some(known) = outcomes.get_mut(index) {
            *known = outcome;
        }
    }
    outcomes
}

fn read_checked(
    peer: &Connected,
    runs: &[&Run],
    deadline: Instant,
) -> Vec<Result<(), TransferError>> {
    let ops = runs.iter().map(|run| ReadOp {
        extent: run.extent,
        from: Offset(0),
        into: run.local.clone(),
    });
    let reading = peer.link.read(Epoch(0), ops.collect(), deadline);
    // The answer to one of these is bounded, whatever the length of a run: each names a part of it.
    let parts = runs.iter().map(|run| sum_parts(run.extent));
    let parts: Vec<Vec<Extent>> = parts.collect();
    let asked = parts.iter().flatten().copied().collect();
    let summing = peer.link.sums(Epoch(0), asked, deadline);
    let read = wait_for(reading);
    let mut sums = wait_for(summing).into_iter();
    let mut outcomes = Vec::with_capacity(runs.len());
    for ((run, outcome), parts) in runs.iter().zip(read).zip(parts) {
        let said: Result<Vec<_>, TransferError> = sums.by_ref().take(parts.len()).collect();
        outcomes.push(outcome.and_then(|came| {
            let there = combine_chunks(run.extent.length, &said?.concat());
            if came == there {
                return Ok(());
            }
            Err(TransferError {
                code: Code::ChecksumMismatch,
                message: format!(
                    "what was read of {} bytes at {:#x} is not what is there",
                    run.extent.length, run.extent.offset.0
                ),
            })
        }));
    }
    outcomes
}

fn sum_parts(of: Extent) -> Vec<Extent> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < of.length.0 {
        let length = PIECE_BYTES.min(of.length.0 - at);
        parts.push(Extent {
            offset: Offset(of.offset.0.saturating_add(at)),
            length: Length(length),
            ..of
        });
        at += length;
    }
    parts
}

fn all_ok(outcomes: &[TransferResult]) -> Result<(), TransferError> {
    match outcomes.iter().find_map(|outcome| outcome.as_ref().err()) {
        Some(error) => Err(error.clone()),
        None if outcomes.is_empty() => Err(deadline_exceeded()),
        None => Ok(()),
    }
}
