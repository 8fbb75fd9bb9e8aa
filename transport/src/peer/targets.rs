//! The links to peers, opened when they are first needed and anew when they have failed.
//!
//! Each target has a TCP link, and queue pairs beside it where both ends have RDMA.

use super::endpoint::Route;
use super::host::CLUSTER;
use super::secret::Secret;
use crate::link::{Link, TransferError};
use crate::outcomes::{deadline_exceeded, invalid, unreachable};
use crate::rdma::{self, Fabric, RdmaLink};
use crate::tcp;
use kvpool_types::wire::data::Hello;
use kvpool_types::wire::frame;
use kvpool_types::{ChecksumAlgorithm, ClientId, Code, GrantSigner, Incarnation};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a peer that is not there may keep a call, whatever its own deadline.
const CONNECT: Duration = Duration::from_secs(10);
/// How many targets are kept before those whose links have failed are forgotten.
const SWEEP_AT: usize = 64;

/// How much news is kept for whoever never asks.
const MAX_ROUTE_CHANGES: usize = 256;
/// How long a peer is not reached over RDMA after that has failed: at first, and at most.
const FIRST_COOLDOWN: Duration = Duration::from_secs(1);
const LONGEST_COOLDOWN: Duration = Duration::from_secs(60);

/// The open links to one session of a peer.
#[derive(Clone)]
pub(super) struct Connected {
    /// Carries messages and answers, and the bytes where there is no RDMA.
    pub(super) tcp: Arc<dyn Link>,
    /// Carries the bytes, or why there is none.
    pub(super) rdma: Result<Arc<RdmaLink>, Arc<str>>,
    pub(super) session: Incarnation,
    pub(super) signer: GrantSigner,
}

impl Connected {
    /// The link for bytes.
    pub(super) fn data(&self) -> &dyn Link {
        match &self.rdma {
            Ok(rdma) => &**rdma,
            Err(_) => &*self.tcp,
        }
    }

    /// How the bytes go.
    pub(super) fn route(&self) -> Route {
        Route {
            kind: self.data().kind(),
            why: self.rdma.as_ref().err().cloned(),
        }
    }

    fn is_open(&self) -> bool {
        self.tcp.is_open() && self.rdma.as_ref().map_or(true, |rdma| rdma.is_open())
    }
}

/// What is known of one target.
#[derive(Default)]
struct Target {
    connected: Option<Connected>,
    /// The last time that it was not reached over RDMA for a while.
    cooldown: Option<Cooldown>,
    /// How it was reached when that was said last.
    announced: Option<Route>,
}

/// A while without RDMA, after that has failed.
struct Cooldown {
    until: Instant,
    pause: Duration,
    why: Arc<str>,
    /// Whether the end of it is still to be noticed.
    is_on: bool,
}

impl Target {
    /// Begins a rest, for twice as long as one that has just been.
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

    /// Why it is not reached over RDMA, while it rests. At the end of the rest its links are opened anew.
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

/// Whoever opens a target's link holds the lock, so that others wait for the same one.
type SharedTarget = Arc<Mutex<Target>>;

/// All links of this process.
pub(super) struct Targets {
    client: ClientId,
    secret: Secret,
    /// The ports of this process, or why it has none.
    rdma: Result<Arc<Fabric>, Arc<str>>,
    entries: Mutex<HashMap<String, SharedTarget>>,
    /// What has not been asked for yet of how targets came to be reached.
    route_changes: Mutex<Vec<(String, Route)>>,
}

impl Targets {
    pub(super) fn new(secret: Secret, rdma: Result<Arc<Fabric>, Arc<str>>) -> Self {
        Self {
            client: ClientId(rand::random()),
            secret,
            rdma,
            entries: Mutex::default(),
            route_changes: Mutex::default(),
        }
    }

    /// The links to a target, "host:port", by `deadline`. Blocks.
    pub(super) fn open(&self, target: &str, deadline: Instant) -> Result<Connected, TransferError> {
        let entry = self.entry(target);
        let mut held = entry
            .try_lock_until(deadline)
            .ok_or_else(deadline_exceeded)?;
        let cooling_down = held.cooling_down(Instant::now());
        if let Some(connected) = &held.connected
            && connected.is_open()
        {
            return Ok(connected.clone());
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
            // What one attempt came to is not for the life of the link.
            held.cool_down(why.clone(), Instant::now());
        }
        let route = connected.route();
        if held.announced.as_ref() != Some(&route) {
            held.announced = Some(route.clone());
            self.announce(target, route);
        }
        held.connected = Some(connected.clone());
        Ok(connected)
    }

    /// Has a target that was reached over RDMA be reached over TCP for a while.
    pub(super) fn cool_down(&self, target: &str, why: &TransferError, deadline: Instant) {
        let entry = self.entry(target);
        let Some(mut held) = entry.try_lock_until(deadline) else {
            return;
        };
        let why = format!("transfers over RDMA have failed: {why}");
        held.cool_down(why.into(), Instant::now());
        held.connected = None;
    }

    /// Says how a target is reached.
    fn announce(&self, target: &str, route: Route) {
        let why = route.why.as_deref();
        tracing::info!(target, kind = ?route.kind, why, "a peer's memory is reached");
        let mut route_changes = self.route_changes.lock();
        if route_changes.len() < MAX_ROUTE_CHANGES {
            route_changes.push((target.to_owned(), route));
        }
    }

    /// How targets have come to be reached since the last call.
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

    /// Opens links; whether another attempt may have queue pairs where this one has none.
    fn connect(
        &self,
        target: &str,
        rdma: Result<Arc<Fabric>, Arc<str>>,
        deadline: Instant,
    ) -> Result<(Connected, bool), TransferError> {
        let hello = Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster: CLUSTER,
            client: self.client,
            incarnation: Incarnation(0),
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token: self.secret.proof(self.client).into(),
        };
        let mut last = invalid(format!("{target} names no address"));
        for address in resolve(target, deadline)? {
            match tcp::connect(address, hello.clone(), deadline) {
                Ok((tcp, reply)) => {
                    let hello = Hello {
                        incarnation: reply.incarnation,
                        ..hello
                    };
                    let (rdma, may_pass) = with_queue_pairs(rdma, address, hello, deadline)?;
                    let connected = Connected {
                        tcp,
                        rdma,
                        session: reply.incarnation,
                        signer: self.secret.grant_key(reply.incarnation).signer(),
                    };
                    return Ok((connected, may_pass));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Queue pairs, or why there are none.
type QueuePairs = Result<Arc<RdmaLink>, Arc<str>>;

/// Queue pairs to a peer that has let this process in, and whether another attempt may have some where
/// this one has none.
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
    match rdma::open(&fabric, address, hello, deadline) {
        Ok((link, _)) => Ok((Ok(Arc::new(link)), true)),
        // The peer is there, but no more the one that was asked before.
        Err(error) if matches!(error.code, Code::WrongIncarnation | Code::DeadlineExceeded) => {
            Err(error)
        }
        Err(error) if error.code == Code::InvalidArgument => {
            let why = "the peer has no RDMA port, or was not asked to use one";
            Ok((Err(why.into()), false))
        }
        Err(error) => {
            let why = format!("no queue pairs with the peer: {error}");
            Ok((Err(why.into()), true))
        }
    }
}

/// The addresses of "host:port". Asking for a name may take longer than the caller waits.
fn resolve(target: &str, deadline: Instant) -> Result<Vec<SocketAddr>, TransferError> {
    if let Ok(address) = target.parse() {
        return Ok(vec![address]);
    }
    let (answer, asked) = mpsc::channel();
    let name = target.to_owned();
    std::thread::Builder::new()
        .name("kvpool-resolve".to_owned())
        .spawn(move || {
            let found = name.to_socket_addrs().map(Iterator::collect);
            // Nobody waits any more when the deadline has passed.
            drop(answer.send(found));
        })
        .map_err(unreachable)?;
    asked
        .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        .map_err(|_| deadline_exceeded())?
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => invalid(format!("{target:?} is no host:port")),
            _ => unreachable(format!("{target}: {error}")),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_failed_over_rdma_is_tried_again_after_rests_that_grow() {
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
