//! The thread that appends groups whose records are visible already, so that what follows need not
//! wait for the disk.

use super::{Message, StartError};
use crate::store::{LogSeq, MetadataStore, StoreError};
use bytes::Bytes;
use kvpool_types::Epoch;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// A handle to the thread, which takes one group at a time.
pub(super) struct Thread {
    groups: mpsc::Sender<(LogSeq, Bytes)>,
    outcomes: mpsc::Receiver<Result<(), StoreError>>,
    thread: JoinHandle<()>,
}

impl Thread {
    /// Starts it. `journal` is woken at each outcome.
    pub(super) fn start(
        store: Arc<dyn MetadataStore>,
        epoch: Epoch,
        journal: mpsc::Sender<Message>,
    ) -> Result<Self, StartError> {
        let runtime = super::worker::runtime()?;
        let (groups, queue) = mpsc::channel();
        let (done, outcomes) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("kvm-append".into())
            .spawn(move || {
                for (seq, group) in queue {
                    let outcome = runtime.block_on(store.append(epoch, seq, group));
                    if done.send(outcome).is_err() || journal.send(Message::Appended).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            groups,
            outcomes,
            thread,
        })
    }

    /// Hands a group over. Should the thread have ended on a fault, [`Thread::wait`] says so.
    pub(super) fn append(&self, seq: LogSeq, group: Bytes) {
        let _ended = self.groups.send((seq, group));
    }

    /// How the append ended that is under way, if it has.
    pub(super) fn outcome(&self) -> Option<Result<(), StoreError>> {
        match self.outcomes.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(mpsc::TryRecvError::Empty) => None,
            Err(mpsc::TryRecvError::Disconnected) => Some(Err(fault())),
        }
    }

    /// Waits for the append that is under way.
    pub(super) fn wait(&self) -> Result<(), StoreError> {
        self.outcomes.recv().unwrap_or_else(|_| Err(fault()))
    }

    /// Ends the thread.
    pub(super) fn end(self) {
        drop(self.groups);
        if self.thread.join().is_err() {
            tracing::error!("the append thread ended on a fault");
        }
    }
}

fn fault() -> StoreError {
    StoreError::Unavailable {
        reason: "the append thread ended on a fault".into(),
    }
}
