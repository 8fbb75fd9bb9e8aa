//! The state that all operations of one client share.

use crate::cache::{Located, Locations};
use crate::clock::{Backoff, Deadline};
use crate::control::Control;
use crate::counters::Counting;
use crate::errors::ControlError;
use crate::gpu::Staging;
use crate::links::Links;
use crate::locate::{self, Found, How, is_later};
use crate::message_limits::MessageLimits;
use crate::options::Options;
use crate::releases::{Holding, Releases};
use crate::revoker::Revoker;
use kvpool_transport::rdma::Fabric;
use kvpool_types::{Code, Key};
use std::sync::{Arc, OnceLock};

/// The state that all operations of one client share.
#[derive(Debug)]
pub(crate) struct ClientContext {
    pub(crate) options: Options,
    pub(crate) control: Arc<Control>,
    pub(crate) locations: Arc<Locations>,
    pub(crate) links: Links,
    pub(crate) counting: Arc<Counting>,
    pub(crate) revoker: Revoker,
    pub(crate) releases: Arc<Releases>,
    /// The RDMA ports of this host, if they may be used.
    pub(crate) rdma: Option<Arc<Fabric>>,
    /// The staging memory of GPU blocks, once a GPU buffer was registered.
    pub(crate) staging: OnceLock<Arc<Staging>>,
}

impl ClientContext {
    /// The limits of one message to the master.
    pub(crate) fn message_limits(&self) -> MessageLimits {
        MessageLimits {
            keys: self.control.limits().max_batch_keys,
            bytes: self.options.max_message_bytes.as_usize(),
        }
    }

    /// Asks the master for the locations of `keys`.
    pub(crate) async fn lookup(
        &self,
        keys: &[Key],
        keep: bool,
        deadline: Deadline,
    ) -> Result<Vec<Found>, ControlError> {
        let how = How {
            limits: self.message_limits(),
            concurrency: self.options.batch_concurrency,
            keep,
            deadline,
        };
        locate::lookup(&self.control, &self.locations, keys, how).await
    }

    /// Asks the master for the location of one block. While the block is being loaded from an SSD, this asks
    /// again. If the block is not loaded by the deadline, it counts as absent.
    pub(crate) async fn lookup_one(&self, key: &Key, deadline: Deadline) -> Found {
        let (mut backoff, mut was_later) = (Backoff::default(), false);
        loop {
            let found = self.lookup(std::slice::from_ref(key), true, deadline).await;
            match found.and_then(|mut found| found.pop().unwrap_or(Ok(None))) {
                Err(error) if is_later(&error) => was_later = true,
                Err(error) if was_later && error.code == Code::DeadlineExceeded => return Ok(None),
                found => return found,
            }
            if !deadline.pause(backoff.next()).await {
                return Ok(None);
            }
        }
    }

    /// Starts to hold leases for one operation; holds none yet.
    pub(crate) fn hold(&self) -> Holding {
        Holding::new(Arc::clone(&self.releases))
    }

    /// Whether none of the block's replicas can be reached by the transports that may be used.
    pub(crate) fn reaches_none(&self, located: &Located) -> bool {
        located
            .replicas
            .iter()
            .all(|replica| self.links.ways(&replica.node).is_empty())
    }
}
