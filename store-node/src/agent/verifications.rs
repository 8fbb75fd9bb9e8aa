//! Verifications: blocks that the master has the node check again.

use super::VERIFIERS;
use super::message::{self, Malformed};
use crate::serve::Store;
use kvpool_proto as proto;
use kvpool_types::{Checksum, Extent};
use std::collections::VecDeque;
use tokio::task::JoinSet;

/// The verifications that a session has asked for, and that are not answered.
///
/// One report of a reader has the master ask for thousands. All but a few wait here, so they end with
/// their session: the next one asks for them again.
pub(super) struct Verifications {
    store: Store,
    waiting: VecDeque<Verification>,
    running: JoinSet<Option<proto::Verified>>,
}

struct Verification {
    ticket: u64,
    extent: Extent,
    checksum: Checksum,
}

impl Verifications {
    pub(super) fn new(store: Store) -> Self {
        Self {
            store,
            waiting: VecDeque::new(),
            running: JoinSet::new(),
        }
    }

    /// Takes an order of the master.
    pub(super) fn push(&mut self, asked: &proto::Verify) -> Result<(), Malformed> {
        self.waiting.push_back(Verification {
            ticket: asked.ticket,
            extent: message::extent(asked.extent.as_ref())?,
            checksum: Checksum(asked.checksum),
        });
        self.start();
        Ok(())
    }

    /// The next verdict; `None` when nothing runs. Loses no verdict when it is dropped.
    pub(super) async fn next(&mut self) -> Option<proto::Verified> {
        loop {
            let ended = self.running.join_next().await?;
            self.start();
            // A check that panicked gives no verdict. The master asks again in the next session.
            if let Ok(Some(verdict)) = ended {
                return Some(verdict);
            }
        }
    }

    /// Starts as many as there are threads: a task that waits for a thread outlives its session.
    fn start(&mut self) {
        while self.running.len() < VERIFIERS
            && let Some(next) = self.waiting.pop_front()
        {
            let store = self.store.clone();
            let work = kvpool_seams::blocking(move || next.run(&store));
            self.running.spawn(async move { work.await.ok() });
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
