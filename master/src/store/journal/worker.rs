//! The journal's thread.

use super::appender;
use super::retention::Retention;
use super::snapshots;
use super::{
    Ack, Callback, Health, JournalError, JournalOptions, Message, SnapshotSource, StartError,
    Submission,
};
use crate::store::record::Encoder;
use crate::store::{LogSeq, MetadataStore, ShardIndex, StoreError};
use kvpool_types::{Epoch, Length};
use std::collections::VecDeque;
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
    pub(super) appender: appender::Thread,
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
                in_flight: None,
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
    /// Whether a submission has been answered from memory.
    answered: bool,
    waiting: VecDeque<Waiting>,
    /// The room of what has been answered from memory.
    rooms: Vec<OwnedSemaphorePermit>,
}

/// A submission that is not answered yet.
struct Waiting {
    ack: Ack,
    callback: Callback,
    room: Option<OwnedSemaphorePermit>,
}

/// A group that the append thread has.
struct InFlight {
    seq: LogSeq,
    size: u64,
    group: Group,
}

impl Group {
    /// Answers everything that waits.
    fn answer(&mut self, outcome: &Result<LogSeq, JournalError>) {
        for Waiting { callback, room, .. } in self.waiting.drain(..) {
            callback.call(outcome.clone());
            drop(room);
        }
    }
}

struct Worker {
    /// Dropped before the queue is: whoever learns that the queue has ended finds out why.
    _ended: Ended,
    parts: Parts,
    runtime: tokio::runtime::Runtime,
    group: Group,
    in_flight: Option<InFlight>,
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
            self.look_at_append();
            if self.is_full() {
                self.end_append();
            }
            if self.in_flight.is_none() {
                self.append();
            }
            if closing {
                self.drain();
                // What comes later is refused, so that the rest of the queue has an end.
                self.parts.health.fail(JournalError::Abandoned);
            } else {
                self.take_snapshot();
            }
        }
        self.parts.appender.end();
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
            Message::SnapshotDone | Message::Appended => {}
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
        self.group.waiting.push_back(Waiting {
            ack,
            callback,
            room,
        });
        self.answer_from_memory();
    }

    /// Answers what need not wait to be durable. It keeps the order behind what must.
    fn answer_from_memory(&mut self) {
        let before = self.in_flight.as_ref();
        if before.is_some_and(|before| !before.group.waiting.is_empty()) {
            return;
        }
        let position = self.position();
        let group = &mut self.group;
        let is_next = |group: &Group| group.waiting.front().is_some_and(|w| w.ack == Ack::Memory);
        while is_next(group)
            && let Some(first) = group.waiting.pop_front()
        {
            group.answered = true;
            group.rooms.extend(first.room);
            first.callback.call(Ok(position));
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

    /// Makes what was gathered durable and calls back, or has the append thread do so when something
    /// was answered from memory already. No append may be under way.
    fn append(&mut self) {
        let seq = self.position();
        let mut group = std::mem::take(&mut self.group);
        if let Err(error) = self.parts.health.check() {
            group.answer(&Err(error.for_later()));
        } else if group.encoder.is_empty() {
            group.answer(&Ok(seq));
        } else {
            let bytes = std::mem::take(&mut group.encoder).finish(0);
            let size = bytes.len() as u64;
            let in_background = group.answered;
            self.parts.last = seq;
            self.in_flight = Some(InFlight { seq, size, group });
            if in_background {
                self.parts.appender.append(seq, bytes);
            } else {
                let append = self.parts.store.append(self.parts.epoch, seq, bytes);
                let outcome = self.runtime.block_on(append);
                self.appended(outcome);
            }
        }
    }

    /// Calls back if the append that is under way has ended.
    fn look_at_append(&mut self) {
        if self.in_flight.is_some()
            && let Some(outcome) = self.parts.appender.outcome()
        {
            self.appended(outcome);
        }
    }

    /// Waits for the append that is under way, and calls back.
    fn end_append(&mut self) {
        if self.in_flight.is_some() {
            let outcome = self.parts.appender.wait();
            self.appended(outcome);
        }
    }

    /// Makes everything durable that has been taken in, and calls back.
    fn drain(&mut self) {
        self.end_append();
        self.append();
        self.end_append();
    }

    fn appended(&mut self, outcome: Result<(), StoreError>) {
        let Some(InFlight {
            seq,
            size,
            mut group,
        }) = self.in_flight.take()
        else {
            return;
        };
        let outcome = outcome.map_err(|error| {
            tracing::error!(%seq, %error, "the metadata log cannot be written; restart needed");
            let error = Arc::new(error);
            let failure = match *error {
                StoreError::Unavailable { .. } => JournalError::Unknown(error),
                _ => JournalError::Refused(error),
            };
            self.parts.health.fail(failure.clone());
            failure
        });
        if outcome.is_ok() {
            self.parts.retention.appended(seq, size);
        }
        group.answer(&outcome.map(|()| seq));
        if self.parts.health.check().is_ok() {
            self.answer_from_memory();
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
        if self.parts.retention.due(self.parts.last).is_none() {
            return;
        }
        // What was answered from memory is in the directory and may not be in the log.
        self.drain();
        let healthy = self.parts.health.check().is_ok();
        let due = self.parts.retention.due(self.parts.last);
        let Some(due) = due.filter(|_| healthy) else {
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
