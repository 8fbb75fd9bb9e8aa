//! The journal's thread.

use super::retention::Retention;
use super::snapshots;
use super::{
    Ack, Callback, Health, JournalError, JournalOptions, Message, SnapshotSource, StartError,
    Submission,
};
use crate::store::record::Encoder;
use crate::store::{LogSeq, MetadataStore, ShardIndex, StoreError};
use kvpool_types::{Epoch, Length};
use std::sync::{Arc, mpsc};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// What the thread is made of.
pub(super) struct Parts {
    pub(super) store: Arc<dyn MetadataStore>,
    pub(super) epoch: Epoch,
    pub(super) retention: Retention,
    pub(super) last: LogSeq,
    pub(super) source: Arc<dyn SnapshotSource>,
    pub(super) options: JournalOptions,
    pub(super) receiver: mpsc::Receiver<Message>,
    pub(super) room: Arc<Semaphore>,
    pub(super) health: Arc<Health>,
    pub(super) snapshots: snapshots::Thread,
}

/// What runs a store's futures on a thread of our own.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, StartError> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}

/// Starts the thread.
pub(super) fn start(parts: Parts) -> Result<(), StartError> {
    let runtime = runtime()?;
    std::thread::Builder::new()
        .name("kvm-journal".into())
        .spawn(move || {
            let closers = Worker {
                _ended: Ended {
                    health: Arc::clone(&parts.health),
                    room: Arc::clone(&parts.room),
                },
                parts,
                runtime,
                group: Group::default(),
                snapshot_running: false,
                closers: Vec::new(),
            }
            .run();
            for closer in closers {
                let _caller_left = closer.send(());
            }
        })?;
    Ok(())
}

/// Says that the journal has ended, also when its thread ends on a fault: nobody is to wait for
/// it.
struct Ended {
    health: Arc<Health>,
    room: Arc<Semaphore>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.health.fail(if std::thread::panicking() {
            JournalError::Died
        } else {
            JournalError::Abandoned
        });
        self.room.close();
    }
}

/// What is being gathered for the next append.
#[derive(Default)]
struct Group {
    encoder: Encoder,
    records: usize,
    waiting: Vec<(Callback, Option<OwnedSemaphorePermit>)>,
}

struct Worker {
    /// Dropped before the queue is: whoever learns that the queue has ended finds out why.
    _ended: Ended,
    parts: Parts,
    runtime: tokio::runtime::Runtime,
    group: Group,
    snapshot_running: bool,
    closers: Vec<oneshot::Sender<()>>,
}

impl Worker {
    fn run(mut self) -> Vec<oneshot::Sender<()>> {
        let mut closing = false;
        loop {
            let first = if closing {
                self.parts.receiver.try_recv().ok()
            } else {
                self.parts.receiver.recv().ok()
            };
            let Some(first) = first else { break };
            let mut next = Some(first);
            while let Some(message) = next {
                closing |= self.take(message);
                next = if self.is_full() {
                    None
                } else {
                    self.parts.receiver.try_recv().ok()
                };
            }
            self.append();
            if closing {
                // What comes later is refused, so that the rest of the queue has an end.
                self.parts.health.fail(JournalError::Abandoned);
            } else {
                self.take_snapshot();
            }
        }
        self.parts.snapshots.end();
        self.closers
    }

    fn is_full(&self) -> bool {
        self.group.records >= self.parts.options.group_records
            || self.group.encoder.len()
                >= Length(self.parts.options.group_bytes.as_u64()).as_usize()
    }

    /// Takes in one message; true when it asks for the end.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Submit(submission) => self.gather(submission),
            Message::SnapshotDone => {}
            Message::Close(closer) => {
                self.closers.extend(closer);
                return true;
            }
        }
        false
    }

    fn gather(&mut self, submission: Submission) {
        let Submission {
            records,
            ack,
            callback,
            room,
        } = submission;
        if let Err(error) = self.parts.health.check() {
            callback.call(Err(error.for_later()));
            return;
        }
        for record in &records {
            self.group.encoder.push(record);
        }
        self.group.records += records.len();
        drop(records);
        // One that was to be answered from memory keeps the order behind one that was not.
        if ack == Ack::Memory && self.group.waiting.is_empty() {
            callback.call(Ok(self.position()));
        } else {
            self.group.waiting.push((callback, room));
        }
    }

    /// The position that what was gathered gets.
    fn position(&self) -> LogSeq {
        if self.group.encoder.is_empty() {
            self.parts.last
        } else {
            self.parts.last.next()
        }
    }

    /// Makes what was gathered durable and calls back.
    fn append(&mut self) {
        let seq = self.position();
        let group = std::mem::take(&mut self.group);
        let outcome = self.parts.health.check().and_then(|()| {
            if group.encoder.is_empty() {
                return Ok(());
            }
            let bytes = group.encoder.finish(0);
            let size = bytes.len() as u64;
            let appended = self.parts.store.append(self.parts.epoch, seq, bytes);
            self.runtime.block_on(appended).map_err(|error| {
                tracing::error!(%seq, %error, "the metadata log cannot be written; restart needed");
                let error = Arc::new(error);
                let failure = match *error {
                    StoreError::Unavailable { .. } => JournalError::Unknown(error),
                    _ => JournalError::Refused(error),
                };
                self.parts.health.fail(failure.clone());
                failure
            })?;
            self.parts.last = seq;
            self.parts.retention.appended(seq, size);
            Ok(())
        });
        for (callback, room) in group.waiting {
            callback.call(outcome.clone().map(|()| seq));
            drop(room);
        }
    }

    /// Captures a shard if the log has grown too large and no snapshot is being written.
    fn take_snapshot(&mut self) {
        while let Some(outcome) = self.parts.snapshots.outcome() {
            self.snapshot_done(outcome);
        }
        if self.snapshot_running || self.parts.health.check().is_err() {
            return;
        }
        let Some(due) = self.parts.retention.due(self.parts.last) else {
            return;
        };
        let records = if due.shard == ShardIndex::SYSTEM {
            self.parts.source.capture_system()
        } else {
            self.parts.source.capture(due.shard)
        };
        self.snapshot_running = self.parts.snapshots.write(snapshots::Job {
            shard: due.shard,
            seq: self.parts.last,
            records,
            cut: due.cut,
        });
        if !self.snapshot_running {
            self.parts.retention.failed();
        }
    }

    fn snapshot_done(&mut self, outcome: snapshots::Outcome) {
        self.snapshot_running = false;
        let snapshots::Outcome {
            shard,
            seq,
            cut,
            written,
        } = outcome;
        match written {
            Ok(bytes) => self.parts.retention.put(shard, seq, bytes, cut),
            Err(error) => {
                tracing::warn!(%shard, %seq, %error, "a metadata snapshot could not be written");
                self.parts.retention.failed();
            }
        }
    }
}
