//! The links to peers, opened at their first use and reopened after a failure.
//!
//! Each target has a TCP link. Where both ends have RDMA it also has queue pairs.

use super::direct::{CARD_BYTES, DirectMemory};
use super::endpoint::Route;
use super::host::{CARD, CLUSTER};
use super::names::Names;
use super::secret::Secret;
use crate::link::{Link, ReadOp, TransferError};
use crate::memory::Region;
use crate::outcomes::{deadline_exceeded, invalid};
use crate::rdma::{self, Fabric, RdmaLink};
use crate::tcp;
use futures::executor::block_on;
use kvpool_types::wire::data::Hello;
use kvpool_types::wire::frame;
use kvpool_types::{
    ChecksumAlgorithm, ClientId, Code, Epoch, Extent, GrantSigner, Incarnation, Length, Offset,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time that connecting to an absent peer may take, whatever the call's deadline.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest time to wait for a peer's card.
const CARD_TIME: Duration = Duration::from_secs(3);
/// The number of targets above which targets without an open link are dropped.
const SWEEP_AT: usize = 64;

/// The most route changes that are kept until they are fetched.
const MAX_ROUTE_CHANGES: usize = 256;
/// The cooldown of RDMA to a peer after a failure: the first, and the longest.
const FIRST_COOLDOWN: Duration = Duration::from_secs(1);
const LONGEST_COOLDOWN: Duration = Duration::from_secs(60);

/// The open links to one session of a peer.
#[derive(Clone)]
pub(super) struct Connected {
    /// Carries messages and answers. Carries the bytes when there is no RDMA.
    pub(super) tcp: Arc<dyn Link>,
    /// Carries the bytes, or the reason why there is no RDMA.
    pub(super) rdma: Result<Arc<RdmaLink>, Arc<str>>,
    /// The peer's memory, where this process can copy from it.
    pub(super) direct: Option<Arc<DirectMemory>>,
    pub(super) session: Incarnation,
    pub(super) signer: GrantSigner,
}

impl Connected {
    /// The link that carries the bytes.
    pub(super) fn data(&self) -> &dyn Link {
        match &self.rdma {
            Ok(rdma) => &**rdma,
            Err(_) => &*self.tcp,
        }
    }

    /// The transport of the bytes, and the reason for it.
    pub(super) fn route(&self) -> Route {
        Route {
            kind: self.data().kind(),
            why: self.rdma.as_ref().err().cloned(),
            reads_directly: self.rdma.is_err()
                && self.direct.as_ref().is_some_and(|direct| direct.works()),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.tcp.is_open() && self.rdma.as_ref().map_or(true, |rdma| rdma.is_open())
    }
}

/// The state of one target.
#[derive(Default)]
struct Target {
    connected: Option<Connected>,
    /// The last period without RDMA.
    cooldown: Option<Cooldown>,
    /// The route that was logged last.
    announced: Option<Route>,
}

/// A period without RDMA after a failure.
struct Cooldown {
    until: Instant,
    pause: Duration,
    why: Arc<str>,
    /// Whether the period is still on. False once its end has been noticed.
    is_on: bool,
}

impl Target {
    /// Starts a cooldown, twice as long as a recent one.
    fn cool_down(&mut self, why: Arc<str>, now: Instant) {
        let pause = match &self.cooldown {
            Some(last) if now < last.until + LONGEST_COOLDOWN => {
                (last.pause * 2).min(LONGEST_COOLDOWN)
            }
            _ => FIRST_COOLDOWN,
        };
        self.cooldown = Some(Cooldown {
            until: now + pause,
            pause,
            why,
            is_on: true,
        });
    }

    /// The reason of the current cooldown. When the cooldown has ended, drops the links so that
    /// they are reopened.
    fn cooling_down(&mut self, now: Instant) -> Option<Arc<str>> {
        let cooldown = self.cooldown.as_mut().filter(|cooldown| cooldown.is_on)?;
        if now < cooldown.until {
            return Some(cooldown.why.clone());
        }
        cooldown.is_on = false;
        self.connected = None;
        None
    }
}

/// The lock is held while the target's links are opened, so that all callers share one link.
type SharedTarget = Arc<Mutex<Target>>;

/// All links of this process to peers.
pub(super) struct Targets {
    client: ClientId,
    secret: Secret,
    /// This process's ports, or why it has none.
    rdma: Result<Arc<Fabric>, Arc<str>>,
    /// Whether to copy from the memory of peers on this host.
    reads_directly: bool,
    names: Names,
    entries: Mutex<HashMap<String, SharedTarget>>,
    /// The route changes that [`Targets::route_changes`] has not returned yet.
    route_changes: Mutex<Vec<(String, Route)>>,
}

impl Targets {
    pub(super) fn new(
        secret: Secret,
        rdma: Result<Arc<Fabric>, Arc<str>>,
        reads_directly: bool,
    ) -> Self {
        Self {
            client: ClientId(rand::random()),
            secret,
            rdma,
            reads_directly,
            names: Names::new(),
            entries: Mutex::default(),
            route_changes: Mutex::default(),
        }
    }

    /// Opens the links to a target ("host:port") by `deadline`, or returns the open links. Blocks.
    pub(super) fn open(&self, target: &str, deadline: Instant) -> Result<Connected, TransferError> {
        let entry = self.entry(target);
        let mut held = entry
            .try_lock_until(deadline)
            .ok_or_else(deadline_exceeded)?;
        let cooling_down = held.cooling_down(Instant::now());
        if let Some(connected) = &held.connected
            && connected.is_open()
        {
            let connected = connected.clone();
            self.announce(target, &mut held.announced, connected.route());
            return Ok(connected);
        }
        held.connected = None;
        let may_cool_down = cooling_down.is_none();
        let rdma = match cooling_down {
            Some(why) => Err(why),
            None => self.rdma.clone(),
        };
        let limit = deadline.min(Instant::now() + CONNECT);
        let (connected, may_pass) = self.connect(target, rdma, limit)?;
        if may_cool_down
            && may_pass
            && let Err(why) = &connected.rdma
        {
            // One failed attempt must not disable RDMA for the life of the link.
            held.cool_down(why.clone(), Instant::now());
        }
        self.announce(target, &mut held.announced, connected.route());
        held.connected = Some(connected.clone());
        Ok(connected)
    }

    /// Ends the links to a target, so that the next use connects again.
    pub(super) fn disconnect(&self, target: &str, deadline: Instant) {
        let entry = self.entry(target);
        let held = entry.try_lock_until(deadline);
        if let Some(connected) = held.and_then(|mut held| held.connected.take()) {
            connected.tcp.close();
        }
    }

    /// Moves a target from RDMA to TCP for a cooldown.
    pub(super) fn cool_down(&self, target: &str, why: &TransferError, deadline: Instant) {
        let entry = self.entry(target);
        let Some(mut held) = entry.try_lock_until(deadline) else {
            return;
        };
        let why = format!("transfers over RDMA failed: {why}");
        held.cool_down(why.into(), Instant::now());
        held.connected = None;
    }

    /// Logs and records a target's route, if it differs from the last one.
    fn announce(&self, target: &str, announced: &mut Option<Route>, route: Route) {
        if announced.as_ref() == Some(&route) {
            return;
        }
        *announced = Some(route.clone());
        let (why, reads_directly) = (route.why.as_deref(), route.reads_directly);
        tracing::info!(target, kind = ?route.kind, why, reads_directly, "route to a peer's memory changed");
        let mut route_changes = self.route_changes.lock();
        if route_changes.len() < MAX_ROUTE_CHANGES {
            route_changes.push((target.to_owned(), route));
        }
    }

    /// Takes the route changes since the last call.
    pub(super) fn route_changes(&self) -> Vec<(String, Route)> {
        std::mem::take(&mut *self.route_changes.lock())
    }

    fn entry(&self, target: &str) -> SharedTarget {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.get(target) {
            return Arc::clone(entry);
        }
        if entries.len() >= SWEEP_AT {
            entries.retain(|_, entry| {
                let is_open =
                    |held: &Target| held.connected.as_ref().is_some_and(Connected::is_open);
                entry.try_lock().is_none_or(|held| is_open(&held))
            });
        }
        Arc::clone(entries.entry(target.to_owned()).or_default())
    }

    /// A connection of its own to a target, with a hello. Blocks.
    pub(super) fn connection(
        &self,
        target: &str,
        deadline: Instant,
    ) -> Result<(OwnedFd, Incarnation), TransferError> {
        let limit = deadline.min(Instant::now() + CONNECT);
        let found = self.names.resolve(target, limit)?;
        let (_, (wire, reply)) = first_of(target, &found, limit, |address, until| {
            tcp::open(address, &self.hello(), until, None)
        })?;
        Ok((wire.into_parts().0, reply.incarnation))
    }

    fn hello(&self) -> Hello {
        Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster: CLUSTER,
            client: self.client,
            incarnation: Incarnation(0),
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token: self.secret.proof(self.client).into(),
        }
    }

    /// Opens the links. The flag tells whether another attempt may get queue pairs, if this attempt got none.
    fn connect(
        &self,
        target: &str,
        rdma: Result<Arc<Fabric>, Arc<str>>,
        deadline: Instant,
    ) -> Result<(Connected, bool), TransferError> {
        let hello = self.hello();
        let found = self.names.resolve(target, deadline)?;
        let (address, (tcp, reply)) = first_of(target, &found, deadline, |address, until| {
            tcp::connect(address, hello.clone(), until)
        })?;
        let hello = Hello {
            incarnation: reply.incarnation,
            ..hello
        };
        let (rdma, may_pass) = with_queue_pairs(rdma, address, hello, deadline)?;
        let direct = (self.reads_directly && rdma.is_err()).then(|| direct_memory(&*tcp, deadline));
        let connected = Connected {
            tcp,
            rdma,
            direct: direct.flatten(),
            session: reply.incarnation,
            signer: self.secret.grant_key(reply.incarnation).signer(),
        };
        Ok((connected, may_pass))
    }
}

/// The memory of the peer at the other end of `tcp`, if this process can copy from it.
fn direct_memory(tcp: &dyn Link, deadline: Instant) -> Option<Arc<DirectMemory>> {
    // A peer that is slow to answer gets no direct reads, and the caller keeps its time.
    let deadline = deadline.min(Instant::now() + CARD_TIME);
    let card = Region::allocate(Length(CARD_BYTES));
    let read = ReadOp {
        extent: Extent {
            segment: CARD,
            offset: Offset(0),
            length: Length(CARD_BYTES),
        },
        from: Offset(0),
        into: vec![card.whole()],
        right: None,
    };
    let asked = block_on(tcp.read(Epoch(0), vec![read], deadline));
    let told = asked.into_iter().next()?;
    // Also a peer of an older version refuses.
    told.inspect_err(|error| tracing::debug!(%error, "the peer tells no process to read from"))
        .ok()?;
    DirectMemory::open(&card.whole().to_vec())
        .inspect_err(|error| tracing::debug!(%error, "no direct reads from the peer's memory"))
        .ok()
        .map(Arc::new)
}

/// Tries the addresses of a target in order, until one succeeds. Each may take its share of the time left. So
/// an address without an answer leaves time to the others.
fn first_of<T>(
    target: &str,
    found: &[SocketAddr],
    deadline: Instant,
    attempt: impl Fn(SocketAddr, Instant) -> Result<T, TransferError>,
) -> Result<(SocketAddr, T), TransferError> {
    let mut last = invalid(format!("{target} resolves to no address"));
    for (untried, address) in (1..=found.len()).rev().zip(found) {
        let now = Instant::now();
        let left = deadline.saturating_duration_since(now);
        let share = left / u32::try_from(untried).unwrap_or(u32::MAX);
        match attempt(*address, now + share) {
            Ok(opened) => return Ok((*address, opened)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Queue pairs, or why there are none.
type QueuePairs = Result<Arc<RdmaLink>, Arc<str>>;

/// Opens queue pairs to a peer that has admitted this process. The flag tells whether another
/// attempt may succeed where this one failed.
fn with_queue_pairs(
    rdma: Result<Arc<Fabric>, Arc<str>>,
    address: SocketAddr,
    hello: Hello,
    deadline: Instant,
) -> Result<(QueuePairs, bool), TransferError> {
    let fabric = match rdma {
        Ok(fabric) => fabric,
        Err(why) => return Ok((Err(why), false)),
    };
    match rdma::open(&fabric, address, hello, deadline, None) {
        Ok((link, _)) => Ok((Ok(Arc::new(link)), true)),
        // The peer has started a new session, or is too slow: the whole attempt fails.
        Err(error) if matches!(error.code, Code::WrongIncarnation | Code::DeadlineExceeded) => {
            Err(error)
        }
        Err(error) if error.code == Code::InvalidArgument => {
            let why = "the peer has no RDMA port, or was not configured to use one";
            Ok((Err(why.into()), false))
        }
        Err(error) => {
            let why = format!("no queue pairs with the peer: {error}");
            Ok((Err(why.into()), true))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn an_address_that_does_not_answer_leaves_time_to_the_next_one() {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        // It accepts nobody. The system connects its callers, and no hello is answered.
        let (silent, right) = (listen(), listen());
        let found = [silent, right].map(|listener| (listener.local_addr().unwrap(), listener));
        let addresses = found.each_ref().map(|(address, _)| *address);
        let targets = Targets::new(Secret::default(), Err("none here".into()), false);
        let deadline = Instant::now() + Duration::from_secs(2);
        let tried = first_of("peer", &addresses, deadline, |address, until| {
            if address == addresses[0] {
                return tcp::open(address, &targets.hello(), until, None).map(drop);
            }
            assert!(Instant::now() < until, "no time is left");
            Ok(())
        });
        assert_eq!(tried.unwrap().0, addresses[1]);
        assert!(Instant::now() < deadline);
        let refused = first_of("peer", &[], deadline, |_, _| Ok(()));
        assert_eq!(refused.unwrap_err().code, Code::InvalidArgument);
    }

    #[test]
    fn a_peer_that_failed_over_rdma_is_tried_again_after_growing_cooldowns() {
        let (mut target, mut now) = (Target::default(), Instant::now());
        assert_eq!(target.cooling_down(now), None);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            target.cool_down("it failed".into(), now);
            assert_eq!(target.cooling_down(now).as_deref(), Some("it failed"));
            let pause = target.cooldown.as_ref().unwrap().pause;
            pauses.push(pause.as_secs());
            now += pause;
            assert_eq!(target.cooling_down(now), None, "it is tried again");
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        now += LONGEST_COOLDOWN + LONGEST_COOLDOWN;
        target.cool_down("it failed".into(), now);
        assert_eq!(target.cooldown.as_ref().unwrap().pause, FIRST_COOLDOWN);
    }
}
