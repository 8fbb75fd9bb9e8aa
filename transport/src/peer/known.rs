//! The links to peers, one a target, opened when they are first needed and anew when they have failed.

use super::host::CLUSTER;
use super::secret::Secret;
use crate::batch::{deadline_exceeded, invalid, unreachable};
use crate::link::{Link, TransferError};
use crate::tcp;
use kvpool_types::wire::data::Hello;
use kvpool_types::wire::frame;
use kvpool_types::{ChecksumAlgorithm, ClientId, GrantSigner, Incarnation};
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

/// An open link to one session of a peer.
#[derive(Clone)]
pub(super) struct Connected {
    pub(super) link: Arc<dyn Link>,
    pub(super) session: Incarnation,
    pub(super) signer: GrantSigner,
}

/// One target's link. Whoever opens it holds the lock, so that others wait for the same one.
type Place = Arc<Mutex<Option<Connected>>>;

/// All links of this process.
pub(super) struct Known {
    client: ClientId,
    secret: Secret,
    places: Mutex<HashMap<String, Place>>,
}

impl Known {
    pub(super) fn new(secret: Secret) -> Self {
        Self {
            client: ClientId(rand::random()),
            secret,
            places: Mutex::default(),
        }
    }

    /// The link to a target, "host:port", by `deadline`. Blocks.
    pub(super) fn open(&self, target: &str, deadline: Instant) -> Result<Connected, TransferError> {
        let place = self.place(target);
        let mut held = place
            .try_lock_until(deadline)
            .ok_or_else(deadline_exceeded)?;
        if let Some(connected) = held.as_ref()
            && connected.link.is_open()
        {
            return Ok(connected.clone());
        }
        *held = None;
        let connected = self.connect(target, deadline.min(Instant::now() + CONNECT))?;
        *held = Some(connected.clone());
        Ok(connected)
    }

    fn place(&self, target: &str) -> Place {
        let mut places = self.places.lock();
        if let Some(place) = places.get(target) {
            return Arc::clone(place);
        }
        if places.len() >= SWEEP_AT {
            places.retain(|_, place| {
                let is_open = |held: &Option<Connected>| {
                    held.as_ref().is_some_and(|held| held.link.is_open())
                };
                place.try_lock().is_none_or(|held| is_open(&held))
            });
        }
        Arc::clone(places.entry(target.to_owned()).or_default())
    }

    fn connect(&self, target: &str, deadline: Instant) -> Result<Connected, TransferError> {
        let hello = Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster: CLUSTER,
            client: self.client,
            incarnation: Incarnation(0),
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token: self.secret.proof(self.client),
        };
        let mut last = invalid(format!("{target} names no address"));
        for address in resolve(target, deadline)? {
            match tcp::connect(address, hello.clone(), deadline) {
                Ok((link, reply)) => {
                    return Ok(Connected {
                        link,
                        session: reply.incarnation,
                        signer: self.secret.grant_key(reply.incarnation).signer(),
                    });
                }
                Err(error) => last = error,
            }
        }
        Err(last)
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
