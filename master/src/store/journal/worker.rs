//! The journal's thread.

use super::appender;
use super::retention::Retention;
use super::snapshots;
use super::{
    Ack, Callback, Health, JournalError, JournalOptions, Message, SnapshotSource, StartError,
    Submission,
};
use crate::store::record::{Encoder, Record};
use crate::store::{LogSeq, MetadataStore, ShardIndex, StoreError};
use futures::FutureExt;
use kvpool_trace::Context;
use kvpool_types::{Epoch, Length};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout};
use tracing::Span;

/// How long records without a waiting submitter wait for more records of their group. An append
/// takes some hundred microseconds of processor time, whatever its size.
pub(super) const LINGER: Duration = Duration::from_millis(50);
/// The longest flush that a lent thread waits for.
const LENT_FLUSH_LIMIT: Duration = Duration::from_millis(1);
/// The interval at which a full store is asked for room.
const RETRY: Duration = Duration::from_millis(250);
/// The size at which a group is appended at once. A longer group needs memory and saves little. A
/// last record still fits into 64 KiB.
const WORTH: usize = 48 << 10;

/// The parts that the journal's thread works with.
pub(super) struct Parts {
    pub(super) store: Arc<dyn MetadataStore>,
    pub(super) epoch: Epoch,
    pub(super) retention: Retention,
    pub(super) last: LogSeq,
    /// The last position, for other threads.
    pub(super) position: Arc<AtomicU64>,
    pub(super) source: Arc<dyn SnapshotSource>,
    pub(super) options: JournalOptions,
    pub(super) room: Arc<Semaphore>,
    pub(super) health: Arc<Health>,
    pub(super) snapshots: snapshots::Writer,
    pub(super) appender: appender::Appender,
}

/// The runtime that polls a store's futures on a thread of the journal.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, StartError> {
    Ok(tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?)
}

/// Starts the thread, or the task. The worker lives as long as the thread or task. It lives a
/// little longer while another thread uses it.
pub(super) fn start(
    parts: Parts,
    receiver: mpsc::Receiver<Message>,
    queued: Arc<AtomicU64>,
    task: Option<Arc<Notify>>,
) -> Result<Weak<Mutex<Worker>>, StartError> {
    let runtime = match &task {
        None => Some(runtime()?),
        Some(_) => None,
    };
    let ended = Ended {
        health: Arc::clone(&parts.health),
        room: Arc::clone(&parts.room),
    };
    let worker = Arc::new(Mutex::new(Worker {
        parts,
        runtime,
        group: Group::default(),
        in_flight: None,
        full_until: None,
        has_asked_last: false,
        last_flush: Duration::ZERO,
        snapshot_running: false,
        closers: Vec::new(),
    }));
    let shared = Arc::downgrade(&worker);
    let queue = Queue { receiver, queued };
    // `ended` is dropped before the queue. So a submitter that finds the queue closed also finds the reason.
    let end = |worker: Arc<Mutex<Worker>>, ended: Ended, queue: Queue| {
        let closers = worker.lock().end();
        drop(worker);
        drop(ended);
        drop(queue);
        for closer in closers {
            let _caller_left = closer.send(());
        }
    };
    if let Some(told) = task {
        tokio::spawn(async move {
            let queue = run_on_task(&worker, queue, &told).await;
            end(worker, ended, queue);
        });
        return Ok(shared);
    }
    kvpool_seams::thread("kvm-journal", move || {
        let (worker, queue) = (worker, queue);
        // After a panic `ended` is dropped before the queue. So a submitter that finds the queue closed finds the
        // journal ended.
        let ended = ended;
        run(&worker, &queue);
        end(worker, ended, queue);
    })?;
    Ok(shared)
}

/// Submissions that the journal has not taken in yet.
struct Queue {
    receiver: mpsc::Receiver<Message>,
    /// The number of messages: raised before a message is sent, lowered when it is taken in.
    queued: Arc<AtomicU64>,
}

impl Queue {
    /// Waits for a message, for ever without `timeout`. Returns whether more may come, and the
    /// message.
    fn wait(&self, timeout: Option<Duration>) -> (bool, Option<Message>) {
        let Some(timeout) = timeout else {
            let message = self.receiver.recv().ok();
            return (message.is_some(), message);
        };
        match self.receiver.recv_timeout(timeout) {
            Ok(message) => (true, Some(message)),
            Err(mpsc::RecvTimeoutError::Timeout) => (true, None),
            Err(mpsc::RecvTimeoutError::Disconnected) => (false, None),
        }
    }

    fn next(&self) -> Option<Message> {
        self.receiver.try_recv().ok()
    }

    fn taken(&self) {
        self.queued.fetch_sub(1, Ordering::AcqRel);
    }
}

fn run(worker: &Mutex<Worker>, queue: &Queue) {
    let mut closing = false;
    let mut timeout = None;
    loop {
        let (goes_on, mut next) = if closing {
            let next = queue.next();
            (next.is_some(), next)
        } else {
            queue.wait(timeout)
        };
        if !goes_on {
            break;
        }
        // The lock is held for the whole turn, so that a submitter with the lock never sees a half-done step.
        let mut worker = worker.lock();
        while let Some(message) = next {
            closing |= worker.take(message);
            queue.taken();
            next = if worker.is_full() { None } else { queue.next() };
        }
        let _is_done = worker.turn(closing);
        timeout = worker.timeout();
    }
}

/// [`run`] as a task, which waits only for messages and for time to pass.
async fn run_on_task(worker: &Mutex<Worker>, queue: Queue, told: &Notify) -> Queue {
    let mut closing = false;
    loop {
        let (is_done, rest, wait) = {
            let mut worker = worker.lock();
            let mut rest = false;
            while let Some(message) = queue.next() {
                closing |= worker.take(message);
                queue.taken();
                rest = worker.is_full();
                if rest {
                    break;
                }
            }
            let is_done = worker.turn(closing);
            (is_done, rest, worker.timeout())
        };
        if is_done && rest {
            continue;
        }
        if is_done && closing {
            return queue;
        }
        match wait {
            Some(wait) => {
                let _late = timeout(wait.max(Duration::from_millis(1)), told.notified()).await;
            }
            None => told.notified().await,
        }
    }
}

/// Marks the journal as ended, even if a fault ends its thread. So no submitter waits for it.
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

/// Dropped by a panic, it fails the journal.
struct Fault(Arc<Health>);

impl Drop for Fault {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(JournalError::Died);
        }
    }
}

/// The group for the next append.
#[derive(Default)]
struct Group {
    encoder: Encoder,
    records: usize,
    /// The submissions, in the order of the log.
    entries: Vec<Entry>,
    /// The first entry that [`Worker::answer_from_memory`] has not passed.
    next: usize,
    /// The number of entries without an answer.
    waiting: usize,
    /// The number of unanswered entries that are not past events. No later submission is answered
    /// before them.
    ordered: usize,
    /// Whether a submission has been answered from memory.
    answered: bool,
    /// When the first record came.
    begun: Option<Instant>,
    /// The span of the first submission that is exported: the append's span goes below it.
    trace: Option<Context>,
}

/// A submission of a group. It keeps its records, in case the store has no room for the group.
struct Entry {
    records: Vec<Record>,
    ack: Ack,
    has_happened: bool,
    /// `None` once the submission has been answered.
    callback: Option<Callback>,
    room: Option<OwnedSemaphorePermit>,
}

/// The span of an append, from its beginning to the store's answer.
fn append_span(epoch: Epoch, seq: LogSeq, bytes: u64, below: Option<Context>) -> Span {
    let context = below.map(Context::to_bytes);
    kvpool_trace::below(context.as_ref().map_or(&[], |bytes| bytes), || {
        kvpool_trace::span!("journal append", epoch = epoch.0, group = seq.0, bytes)
    })
}

/// A group that the append thread is appending.
struct InFlight {
    seq: LogSeq,
    size: u64,
    group: Group,
}

impl Group {
    /// How much longer the group may wait for more records. `None` if it is empty, or if a
    /// submitter waits for it.
    fn lingers(&self) -> Option<Duration> {
        let begun = self.begun.filter(|_| self.waiting == 0)?;
        if self.encoder.len() >= WORTH {
            return Some(Duration::ZERO);
        }
        Some(LINGER.saturating_sub(begun.elapsed()))
    }

    /// Answers every waiting submission.
    fn answer(&mut self, outcome: &Result<LogSeq, JournalError>) {
        for Entry { callback, room, .. } in self.entries.drain(..) {
            if let Some(callback) = callback {
                callback.call(outcome.clone());
            }
            drop(room);
        }
        (self.next, self.waiting, self.ordered) = (0, 0, 0);
    }

    /// Adds a submission to the end of the group.
    fn push(&mut self, entry: Entry) {
        for record in &entry.records {
            self.encoder.push(record);
        }
        if !entry.records.is_empty() {
            self.begun.get_or_insert_with(Instant::now);
        }
        self.records += entry.records.len();
        if entry.callback.is_some() {
            self.waiting += 1;
            self.ordered += usize::from(!entry.has_happened);
        } else {
            self.answered = true;
        }
        self.entries.push(entry);
        debug_assert!(
            self.ordered <= self.waiting && self.waiting <= self.entries.len(),
            "invariant: a group counts its unanswered entries"
        );
    }

    /// Answers the submissions that need not be durable first. A past event that waits for the disk delays no
    /// later submission: its callback changes nothing that a reader or a put sees.
    fn answer_from_memory(&mut self, position: LogSeq) {
        while let Some(entry) = self.entries.get_mut(self.next) {
            if entry.ack == Ack::Memory {
                if let Some(callback) = entry.callback.take() {
                    self.waiting -= 1;
                    self.ordered -= usize::from(!entry.has_happened);
                    self.answered = true;
                    callback.call(Ok(position));
                }
            } else if !entry.has_happened {
                return;
            }
            self.next += 1;
        }
    }

    /// Joins two consecutive groups after `error`. Answered submissions and past events are kept, in their
    /// order. All others are refused.
    fn shed(self, next: Self, error: &JournalError) -> Self {
        let mut kept = Self::default();
        for mut entry in self.entries.into_iter().chain(next.entries) {
            if entry.has_happened || entry.callback.is_none() {
                kept.push(entry);
            } else if let Some(callback) = entry.callback.take() {
                callback.call(Err(error.clone()));
            }
        }
        kept
    }
}

/// The state of the journal.
pub(super) struct Worker {
    parts: Parts,
    /// `None` on a task.
    runtime: Option<tokio::runtime::Runtime>,
    group: Group,
    in_flight: Option<InFlight>,
    /// While the store has no room: the time of the next attempt.
    full_until: Option<Instant>,
    /// Whether a store without room was asked once more at the end.
    has_asked_last: bool,
    /// The duration of the last append that this thread waited for.
    last_flush: Duration,
    snapshot_running: bool,
    closers: Vec<oneshot::Sender<()>>,
}

impl Worker {
    /// Takes in a submission on the submitter's own thread; gives it back without room. Returns
    /// whether the journal's thread needs a message: it already knows of a group that has begun.
    pub(super) fn take_here(&mut self, submission: Submission) -> Result<bool, Submission> {
        if self.is_full() {
            return Err(submission);
        }
        let is_first = self.group.begun.is_none();
        // After a panic in a callback the journal's state is unknown.
        let guard = Fault(Arc::clone(&self.parts.health));
        self.gather(submission);
        drop(guard);
        Ok(is_first || self.is_full())
    }

    /// Adds a submission to the group unless the group is full. [`Worker::answer_here`] answers it later.
    /// Returns whether the journal's thread has work after it.
    pub(super) fn enter_here(&mut self, submission: Submission) -> Result<bool, Submission> {
        if self.is_full() {
            return Err(submission);
        }
        let is_first = self.group.begun.is_none();
        self.enter(submission);
        Ok(is_first || self.is_full())
    }

    /// Answers the submissions of [`Worker::enter_here`].
    pub(super) fn answer_here(&mut self) {
        // After a panic in a callback the journal's state is unknown.
        let guard = Fault(Arc::clone(&self.parts.health));
        if self.parts.health.check_room().is_ok() {
            self.answer_from_memory();
        }
        drop(guard);
    }

    /// Appends a submission on the submitter's own thread if nothing else is in progress; otherwise
    /// gives it back. Returns whether the journal's thread has work after it.
    pub(super) fn append_here(&mut self, submission: Submission) -> Result<bool, Submission> {
        let idle =
            self.in_flight.is_none() && self.full_until.is_none() && self.group.entries.is_empty();
        // Other calls of the connection wait behind a lent thread. A slow disk must not hold them as well.
        if !idle || self.parts.options.appends_aside || self.last_flush > LENT_FLUSH_LIMIT {
            return Err(submission);
        }
        let guard = Fault(Arc::clone(&self.parts.health));
        self.gather(submission);
        self.append();
        drop(guard);
        Ok(self.full_until.is_some() || self.parts.retention.is_due())
    }

    /// The time without work unless a message comes; `None` for no limit. The end of an append sends such a
    /// message.
    fn timeout(&self) -> Option<Duration> {
        if let Some(until) = self.full_until {
            return Some(until.saturating_duration_since(Instant::now()));
        }
        self.group.lingers().filter(|_| self.in_flight.is_none())
    }

    /// Appends the group if that is possible now. Returns false if the end of an append on another
    /// task must come first.
    fn turn(&mut self, closing: bool) -> bool {
        self.look_at_append();
        if self.is_full() && !self.end_append() {
            return false;
        }
        self.look_for_room();
        if self.full_until.is_some() {
            // Nothing is appended meanwhile.
        } else if self.in_flight.is_none() && self.group.lingers().is_none_or(|left| left.is_zero())
        {
            self.append();
        }
        if !closing {
            self.take_snapshot();
            return true;
        }
        // At the end, a full store is asked once more, since it may accept the rest. Records that
        // it refuses are lost.
        let asks = self.full_until.is_none() || !std::mem::replace(&mut self.has_asked_last, true);
        if asks && !self.drain() {
            return false;
        }
        // Later submissions are refused, so that the queue has an end.
        self.parts.health.fail(JournalError::Abandoned);
        true
    }

    /// Ends the other threads; answers the callers that wait for the end.
    fn end(&mut self) -> Vec<oneshot::Sender<()>> {
        self.parts.appender.end();
        self.parts.snapshots.end();
        // A submitter may drop the rest of the worker, on a thread of another runtime, where no
        // runtime may be dropped.
        self.runtime = None;
        std::mem::take(&mut self.closers)
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
        if self.enter(submission) {
            self.answer_from_memory();
        }
    }

    /// Adds a submission to the group. Returns false if the submission was refused. Its callback then has the error.
    fn enter(&mut self, submission: Submission) -> bool {
        let Submission {
            records,
            ack,
            has_happened,
            callback,
            trace,
            room,
        } = submission;
        let health = &self.parts.health;
        let takes = if has_happened {
            health.check()
        } else {
            health.check_room()
        };
        if let Err(error) = takes {
            callback.call(Err(error.for_later()));
            return false;
        }
        self.group.trace = self.group.trace.or(trace);
        self.group.push(Entry {
            records,
            ack,
            has_happened,
            callback: Some(callback),
            room,
        });
        true
    }

    /// Answers submissions that need not be durable first, unless the append in progress has one to
    /// answer before them.
    fn answer_from_memory(&mut self) {
        let before = self.in_flight.as_ref();
        if before.is_none_or(|before| before.group.ordered == 0) {
            let position = self.position();
            self.group.answer_from_memory(position);
        }
    }

    /// The position of the group.
    fn position(&self) -> LogSeq {
        if self.group.encoder.is_empty() {
            self.parts.last
        } else {
            self.parts.last.next()
        }
    }

    /// Makes the group durable and calls back. If no caller waits, the append thread does this, and the
    /// journal answers later submissions meanwhile. No append may be in progress.
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
            let trace = group.trace.take();
            let runtime = self.runtime.as_ref().filter(|_| {
                !group.answered && group.ordered > 0 && !self.parts.options.appends_aside
            });
            self.parts.last = seq;
            self.parts.position.store(seq.0, Ordering::Release);
            let span = append_span(self.parts.epoch, seq, size, trace);
            let Some(runtime) = runtime else {
                self.in_flight = Some(InFlight { seq, size, group });
                self.parts.appender.append(seq, bytes, span);
                return;
            };
            let inside = span.enter();
            let append = self.parts.store.append(self.parts.epoch, seq, bytes);
            let begun = Instant::now();
            let outcome = runtime.block_on(append);
            self.last_flush = begun.elapsed();
            self.in_flight = Some(InFlight { seq, size, group });
            self.appended(outcome);
            super::after_loan(&self.parts.store);
            drop(inside);
        }
    }

    /// Calls back if the append in progress has ended.
    fn look_at_append(&mut self) {
        if self.in_flight.is_some()
            && let Some(outcome) = self.parts.appender.outcome()
        {
            self.appended(outcome);
        }
    }

    /// Waits for the append in progress, and calls back. False when it is a task that has not ended.
    fn end_append(&mut self) -> bool {
        if self.in_flight.is_some() {
            let Some(outcome) = self.parts.appender.wait() else {
                return false;
            };
            self.appended(outcome);
        }
        true
    }

    /// Makes every submission that was taken in durable, and calls back. Returns false while an
    /// append on another task has not ended.
    fn drain(&mut self) -> bool {
        if !self.end_append() {
            return false;
        }
        self.append();
        self.end_append()
    }

    /// Handles a full store, which has changed nothing.
    fn no_room(&mut self, seq: LogSeq, group: Group, error: StoreError) {
        tracing::error!(%error, "the metadata log has no room");
        let error = Arc::new(error);
        self.parts.health.set_full(Some(Arc::clone(&error)));
        self.parts.last = LogSeq(seq.0.saturating_sub(1));
        self.parts
            .position
            .store(self.parts.last.0, Ordering::Release);
        let next = std::mem::take(&mut self.group);
        self.group = group.shed(next, &JournalError::Refused(error));
        self.full_until = Some(Instant::now() + RETRY);
    }

    /// Asks a full store whether it has room now.
    fn look_for_room(&mut self) {
        if self.full_until.is_none_or(|until| Instant::now() < until) {
            return;
        }
        let group = self.group.encoder.len() as u64;
        let bytes = group.max(self.parts.options.group_bytes.as_u64());
        let room = self.parts.store.make_room(bytes);
        let room = match &self.runtime {
            Some(runtime) => runtime.block_on(room),
            // The store of a simulation answers at once.
            None => room.now_or_never().unwrap_or(Ok(())),
        };
        match room {
            Ok(()) => {
                tracing::info!("the metadata log has room again");
                self.full_until = None;
                self.parts.health.set_full(None);
            }
            Err(StoreError::DirectoryFull { .. }) => {
                self.full_until = Some(Instant::now() + RETRY);
            }
            Err(error) => {
                tracing::error!(%error, "the metadata log cannot be written; restart needed");
                self.full_until = None;
                self.parts
                    .health
                    .fail(JournalError::Refused(Arc::new(error)));
            }
        }
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
        let outcome = match outcome {
            Err(error @ StoreError::DirectoryFull { .. }) => {
                return self.no_room(seq, group, error);
            }
            outcome => outcome,
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

    /// Captures shards if the log has grown too large and no snapshot is being written.
    fn take_snapshot(&mut self) {
        while let Some(outcome) = self.parts.snapshots.outcome() {
            self.snapshot_done(outcome);
        }
        if self.snapshot_running || self.parts.health.check_room().is_err() {
            return;
        }
        if !self.parts.retention.is_due() {
            return;
        }
        // Records answered from memory are in the directory but perhaps not in the log.
        if !self.drain() || self.parts.health.check_room().is_err() {
            return;
        }
        let due = self.parts.retention.due(self.parts.last);
        let source = &self.parts.source;
        let capture = |shard| match shard {
            ShardIndex::SYSTEM => (shard, source.capture_system()),
            _ => (shard, source.capture(shard)),
        };
        let mut captured: Vec<_> = due.shards.into_iter().map(capture).collect();
        let beside = source.capture_beside();
        if !source.is_there() {
            self.parts.retention.failed();
            return;
        }
        for (_, records) in &mut captured {
            records.extend_from_slice(&beside);
        }
        self.snapshot_running = self.parts.snapshots.write(snapshots::Job {
            captured,
            seq: self.parts.last,
            cut: due.cut,
        });
        if !self.snapshot_running {
            self.parts.retention.failed();
        }
    }

    fn snapshot_done(&mut self, outcome: snapshots::Outcome) {
        self.snapshot_running = false;
        let snapshots::Outcome { seq, cut, written } = outcome;
        match written {
            Ok(snapshots) => self.parts.retention.put(&snapshots, seq, cut),
            Err(error) => {
                tracing::warn!(%seq, %error, "metadata snapshots could not be written");
                self.parts.retention.failed();
            }
        }
    }
}
