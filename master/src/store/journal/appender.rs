//! The thread that appends groups whose records are already visible, so that later submissions need
//! not wait for the disk.

use super::{Message, Sender, StartError};
use crate::store::{LogSeq, MetadataStore, StoreError};
use bytes::Bytes;
use kvpool_types::Epoch;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use tracing::Span;

/// A handle to the thread, which takes one group at a time.
pub(super) struct Thread {
    /// `None` when the thread must end.
    groups: Option<mpsc::Sender<(LogSeq, Bytes, Span)>>,
    outcomes: mpsc::Receiver<Result<(), StoreError>>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    /// Starts the thread. Each outcome wakes `journal`.
    pub(super) fn start(
        store: Arc<dyn MetadataStore>,
        epoch: Epoch,
        journal: Sender,
    ) -> Result<Self, StartError> {
        let runtime = super::worker::runtime()?;
        let (groups, queue) = mpsc::channel::<(LogSeq, Bytes, Span)>();
        let (done, outcomes) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("kvm-append".into())
            .spawn(move || {
                for (seq, group, span) in queue {
                    let append = || runtime.block_on(store.append(epoch, seq, group));
                    let outcome = span.in_scope(append);
                    drop(span);
                    if done.send(outcome).is_err() || !journal.send(Message::Appended) {
                        return;
                    }
                    store.tidy_after_append();
                }
            })?;
        Ok(Self {
            groups: Some(groups),
            outcomes,
            thread: Some(thread),
        })
    }

    /// Hands a group over. [`Thread::wait`] reports a thread that ended on a fault.
    pub(super) fn append(&self, seq: LogSeq, group: Bytes, span: Span) {
        if let Some(groups) = &self.groups {
            let _ended = groups.send((seq, group, span));
        }
    }

    /// The outcome of the append in progress, if it has ended.
    pub(super) fn outcome(&self) -> Option<Result<(), StoreError>> {
        match self.outcomes.try_recv() {
            Ok(outcome) => Some(outcome),
            Err(mpsc::TryRecvError::Empty) => None,
            Err(mpsc::TryRecvError::Disconnected) => Some(Err(fault())),
        }
    }

    /// Waits for the append in progress.
    pub(super) fn wait(&self) -> Result<(), StoreError> {
        self.outcomes.recv().unwrap_or_else(|_| Err(fault()))
    }

    /// Ends the thread.
    pub(super) fn end(&mut self) {
        self.groups = None;
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the append thread ended on a fault");
        }
    }
}

fn fault() -> StoreError {
    StoreError::Unavailable {
        reason: "the append thread ended on a fault".into(),
    }
}
