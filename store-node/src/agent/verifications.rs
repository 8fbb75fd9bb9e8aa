//! Verifications: the master asks the node to verify blocks that a reader has reported as damaged.

use super::message::{self, Malformed};
use crate::serve::Store;
use kvpool_proto as proto;
use kvpool_types::{Checksum, Extent};
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// The verifications that a session has requested and that are not answered yet.
///
/// One report of a reader can make the master request thousands. All but a few wait for a permit. Those that
/// wait end with their session, and the next session requests them again.
pub(super) struct Verifications {
    store: Store,
    permits: Arc<Semaphore>,
    asked: JoinSet<Option<proto::Verified>>,
}

struct Verification {
    ticket: u64,
    extent: Extent,
    checksum: Checksum,
}

impl Verifications {
    /// Each verification takes one of `permits`, which all sessions share.
    pub(super) fn new(store: Store, permits: Arc<Semaphore>) -> Self {
        Self {
            store,
            permits,
            asked: JoinSet::new(),
        }
    }

    /// Queues a verification that the master requests.
    pub(super) fn push(&mut self, asked: &proto::Verify) -> Result<(), Malformed> {
        let one = Verification {
            ticket: asked.ticket,
            extent: message::extent(asked.extent.as_ref())?,
            checksum: Checksum(asked.checksum),
        };
        let (store, permits) = (self.store.clone(), Arc::clone(&self.permits));
        self.asked.spawn(async move {
            let permit = permits.acquire_owned().await.ok()?;
            let work = kvpool_seams::blocking(move || {
                // A verification that outlives its session keeps its permit.
                let _permit = permit;
                one.run(&store)
            });
            work.await.ok()
        });
        Ok(())
    }

    /// The next verdict; `None` when no verification is left. Dropping the future loses no verdict.
    pub(super) async fn next(&mut self) -> Option<proto::Verified> {
        loop {
            let ended = self.asked.join_next().await?;
            // A verification that panicked gives no verdict. The master requests it again in the next
            // session.
            if let Ok(Some(verdict)) = ended {
                return Some(verdict);
            }
        }
    }
}

impl Verification {
    fn run(&self, store: &Store) -> proto::Verified {
        let (extent, checksum) = (self.extent, self.checksum);
        let matches = store.verify(&extent, checksum);
        store.metrics().verified(matches);
        if !matches {
            tracing::warn!(%extent, %checksum, "checksum mismatch on re-verification");
        }
        proto::Verified {
            ticket: self.ticket,
            matches,
        }
    }
}
