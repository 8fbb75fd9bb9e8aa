//! The pool id and the limits that the last hello stated. They are renewed in each term, since a restarted
//! master may have other limits.

use super::known::{ANOTHER_POOL, Known};
use super::master::Sending;
use super::masters::Route;
use super::messages::Message;
use crate::api::Limits;
use crate::clock::{Deadline, millis};
use crate::errors::ControlError;
use kvpool_proto::{HelloReply, HelloRequest, MIN_VERSION, VERSION};
use kvpool_types::{ChecksumAlgorithm, ClusterId, Code, Epoch, Length};
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;

/// The time limit of a hello for which no caller waits.
const GREETING_TIMEOUT: Duration = Duration::from_secs(1);

/// The pool id and the limits of the last hello.
#[derive(Debug)]
pub(super) struct Agreed {
    known: Arc<Known>,
    /// The client's own limit on the keys of a message.
    max_batch_keys: usize,
    settled: RwLock<Settled>,
    /// Whether a background hello is in progress.
    is_greeting: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct Settled {
    /// `None` before the first hello.
    cluster: Option<ClusterId>,
    /// The term of the last hello.
    epoch: Epoch,
    limits: Limits,
}

impl Agreed {
    /// The state before the first hello. No message will have more than `max_batch_keys` keys.
    pub(super) fn new(known: Arc<Known>, max_batch_keys: usize) -> Self {
        let max_batch_keys = max_batch_keys.max(1);
        let limits = Limits {
            max_block: Length(u64::MAX),
            max_batch_keys,
            lease_ttl: Duration::ZERO,
        };
        Self {
            known,
            max_batch_keys,
            settled: RwLock::new(Settled {
                cluster: None,
                epoch: Epoch(0),
                limits,
            }),
            is_greeting: AtomicBool::new(false),
        }
    }

    pub(super) fn limits(&self) -> Limits {
        self.settled.read().limits
    }

    /// The pool that the client belongs to; `None` before the first hello.
    pub(super) fn cluster(&self) -> Option<ClusterId> {
        self.settled.read().cluster
    }

    /// Adopts the limits of a hello, unless its term is earlier than that of the last hello.
    pub(super) fn settle(&self, hello: &HelloReply) -> Result<(), ControlError> {
        let read = self.read(hello);
        let mut settled = self.settled.write();
        let epoch = Epoch(hello.epoch);
        if epoch < settled.epoch {
            return Ok(());
        }
        // This also holds for a reply that cannot be read: asked again, the master would answer the same.
        settled.epoch = epoch;
        let (cluster, limits) = read?;
        settled.cluster = Some(cluster);
        settled.limits = limits;
        self.known.join(hello.cluster_id.clone());
        Ok(())
    }

    fn read(&self, hello: &HelloReply) -> Result<(ClusterId, Limits), ControlError> {
        if !(MIN_VERSION..=VERSION).contains(&hello.version) {
            return Err(ControlError::new(
                Code::VersionMismatch,
                format!(
                    "the master speaks protocol version {}, this client {MIN_VERSION} to {VERSION}",
                    hello.version
                ),
            ));
        }
        let cluster = ClusterId::from_slice(&hello.cluster_id).ok_or_else(|| {
            ControlError::new(
                Code::Malformed,
                format!("the cluster id has {} bytes", hello.cluster_id.len()),
            )
        })?;
        if self.known.is_of_another(&hello.cluster_id) {
            let why = format!("the master, of cluster {cluster}, {ANOTHER_POOL}");
            return Err(ControlError::new(Code::WrongCluster, why));
        }
        let known = u8::try_from(hello.checksum_algorithm)
            .ok()
            .and_then(ChecksumAlgorithm::from_wire);
        if known.is_none() {
            return Err(ControlError::new(
                Code::VersionMismatch,
                format!(
                    "checksum algorithm {} is unknown to this client",
                    hello.checksum_algorithm
                ),
            ));
        }
        let theirs = usize::try_from(hello.max_batch_keys).unwrap_or(usize::MAX);
        let limits = Limits {
            max_block: Length(hello.max_block_bytes),
            max_batch_keys: theirs.clamp(1, self.max_batch_keys),
            lease_ttl: Duration::from_millis(hello.lease_ttl_ms),
        };
        Ok((cluster, limits))
    }

    /// Sends a hello to the master of `route` in the background, if a term after that of the last hello is
    /// known.
    pub(super) fn renew(self: &Arc<Self>, route: &Route, background: &Handle) {
        let is_outdated = {
            let settled = self.settled.read();
            settled.cluster.is_some() && settled.epoch < self.known.epoch()
        };
        if !is_outdated || self.is_greeting.swap(true, Ordering::AcqRel) {
            return;
        }
        let (agreed, route) = (Arc::clone(self), route.clone());
        background.spawn(async move {
            if let Err(error) = agreed.greet(&route).await {
                tracing::debug!(%error, "limits of the new term not learned");
            }
            agreed.is_greeting.store(false, Ordering::Release);
        });
    }

    async fn greet(&self, route: &Route) -> Result<(), ControlError> {
        let deadline = Deadline::after(GREETING_TIMEOUT);
        let mut caller = self.known.caller(None);
        caller.forward = route.leader.is_some();
        caller.wait_ms = millis(deadline.left()).max(1);
        let mut request = HelloRequest::default();
        request.set_caller(caller);
        let sending = Sending {
            deadline,
            framed: None,
            connection: 0,
        };
        let sent = route.master.send(request, sending).await;
        let hello = sent.map_err(|unanswered| unanswered.error)?;
        let address = &route.master.address;
        if let Err(highest) = self.known.hear(Epoch(hello.epoch), address) {
            let why = format!("the master at {address} is behind the later epoch {highest}");
            return Err(ControlError::new(Code::StaleEpoch, why));
        }
        self.settle(&hello)
    }
}
