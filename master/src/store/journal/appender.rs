//! The thread that appends groups whose records are already visible. Later submissions then need
//! not wait for the disk. In a simulation each append is a task.

use super::{Message, Sender, StartError};
use crate::store::{LogSeq, MetadataStore, StoreError};
use crate::workers::Workers;
use bytes::Bytes;
use kvpool_types::Epoch;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use tracing::{Instrument, Span};

/// The way to append one group at a time, beside the journal.
pub(super) struct Appender {
    place: Place,
    outcomes: mpsc::Receiver<Result<(), StoreError>>,
}

enum Place {
    Thread {
        groups: mpsc::Sender<(LogSeq, Bytes, Span)>,
        thread: JoinHandle<()>,
    },
    Task(Arc<Appending>),
    /// The thread has ended.
    Nowhere,
}

/// An append that is handed over.
struct Appending {
    store: Arc<dyn MetadataStore>,
    epoch: Epoch,
    done: mpsc::Sender<Result<(), StoreError>>,
    journal: Sender,
}

impl Appending {
    /// Reports an outcome and wakes the journal. Returns false if the journal has ended.
    fn report(&self, outcome: Result<(), StoreError>) -> bool {
        self.done.send(outcome).is_ok() && self.journal.send(Message::Appended)
    }
}

impl Appender {
    /// Starts it. Each outcome wakes `journal`.
    pub(super) fn start(
        workers: Workers,
        store: Arc<dyn MetadataStore>,
        epoch: Epoch,
        journal: Sender,
    ) -> Result<Self, StartError> {
        let (done, outcomes) = mpsc::channel();
        let appending = Appending {
            store,
            epoch,
            done,
            journal,
        };
        let place = match workers {
            Workers::Threads => appending.thread()?,
            Workers::Tasks => Place::Task(Arc::new(appending)),
        };
        Ok(Self { place, outcomes })
    }

    /// Hands a group over. [`Appender::wait`] reports a thread that ended on a fault.
    pub(super) fn append(&self, seq: LogSeq, group: Bytes, span: Span) {
        match &self.place {
            Place::Thread { groups, .. } => {
                let _ended = groups.send((seq, group, span));
            }
            Place::Task(appending) => {
                let appending = Arc::clone(appending);
                let append = async move {
                    let append = appending.store.append(appending.epoch, seq, group);
                    let outcome = append.await;
                    if appending.report(outcome) {
                        appending.store.tidy_after_append();
                    }
                };
                tokio::spawn(append.instrument(span));
            }
            Place::Nowhere => {}
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

    /// Waits for the append in progress. `None` where it is a task that has not ended: its end wakes
    /// the journal.
    pub(super) fn wait(&self) -> Option<Result<(), StoreError>> {
        match self.place {
            Place::Task(_) => self.outcome(),
            _ => Some(self.outcomes.recv().unwrap_or_else(|_| Err(fault()))),
        }
    }

    /// Ends the thread.
    pub(super) fn end(&mut self) {
        if let Place::Thread { groups, thread } = std::mem::replace(&mut self.place, Place::Nowhere)
        {
            drop(groups);
            if thread.join().is_err() {
                tracing::error!("the append thread ended on a fault");
            }
        }
    }
}

impl Appending {
    fn thread(self) -> Result<Place, StartError> {
        let runtime = super::worker::runtime()?;
        let (groups, queue) = mpsc::channel::<(LogSeq, Bytes, Span)>();
        let thread = kvpool_seams::thread("kvm-append", move || {
            for (seq, group, span) in queue {
                let append = || runtime.block_on(self.store.append(self.epoch, seq, group));
                let outcome = span.in_scope(append);
                drop(span);
                if !self.report(outcome) {
                    return;
                }
                self.store.tidy_after_append();
            }
        })?;
        Ok(Place::Thread { groups, thread })
    }
}

fn fault() -> StoreError {
    StoreError::Unavailable {
        reason: "the append thread ended on a fault".into(),
    }
}
