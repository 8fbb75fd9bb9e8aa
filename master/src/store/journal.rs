//! The only writer of the log. It groups submitted records, makes each group durable, and then
//! calls back.
//!
//! ```text
//!  submit ──► queue (bounded in bytes) ──► [journal thread]  encode ─► append ─► callbacks
//!                                               │                     (or [append thread])
//!                                               │ between groups: capture some shards
//!                                               ▼
//!                                          [snapshot thread] put_snapshot ─► truncate_log
//! ```
//!
//! Every submission that waits when an append ends joins the next group. So any number of callers
//! share one flush per group. The append thread appends a group that no caller waits for: its
//! submissions were answered from memory, or concern past events. The journal answers later
//! submissions meanwhile.
//!
//! **Architecture Invariants:**
//!
//! * Each callback runs once, under the journal's lock and in the order of the log. It runs after
//!   its group is durable, except for [`Ack::Memory`]. A past event delays no [`Ack::Memory`] after
//!   it.
//! * A callback runs on the journal's thread. If nothing is before it, it runs on the submitter's
//!   thread in two cases: that thread is lent, or the answer comes from memory.
//! * A shard is captured while no append is in progress and the next group is empty. The callbacks
//!   have then applied the log through its last position, and nothing else.
//! * After a failed append the journal appends and acknowledges nothing more.
//! * A full store changes nothing. The journal then refuses unanswered submissions. It keeps
//!   answered ones, and records of past events, and appends these first when there is space.
//!
//! ADR 0002 says why there is one log and one snapshot for each shard.

mod appender;
mod retention;
mod snapshots;
#[cfg(test)]
mod tests;
mod worker;

use super::{LogSeq, LogState, MetadataStore, Record, ShardIndex, StoreError};
use crate::workers::Workers;
use bytesize::ByteSize;
use kvpool_trace::Context;
use kvpool_types::{Code, Epoch, Length};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

/// When to answer a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ack {
    /// When its records are durable.
    Durable,
    /// In its turn, before its records are durable. The records are appended together with others
    /// up to 50 ms later, and are lost if the master dies before.
    ///
    /// While the store stalls, the journal answers the group in progress and the next group, up to
    /// their full size. Later submissions wait. A submission after a durable one waits for it,
    /// unless the durable one is a past event ([`Journal::insist`]). Space in the queue is returned
    /// when the records are durable.
    Memory,
}

/// Why records were not acknowledged.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The append failed, and it is unknown whether the records are durable. Only the next start
    /// can tell, because it reads the log.
    #[error("the metadata log could not be written: {0}")]
    Unknown(Arc<StoreError>),
    /// The records were not logged, because the store refused them or an earlier append failed.
    #[error("the metadata log takes no more records: {0}")]
    Refused(Arc<StoreError>),
    /// The records were not logged: the journal is closed, or the submitter did not wait for space in the
    /// queue.
    #[error("the records were abandoned before they were logged")]
    Abandoned,
    /// A fault ended the journal's thread. Whether the records are durable is unknown.
    #[error("the journal's thread ended on a fault")]
    Died,
}

impl JournalError {
    /// True when the same call may succeed later, perhaps after the master's next start.
    pub fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }

    /// Whether the records may still be durable.
    pub const fn is_outcome_unknown(&self) -> bool {
        matches!(self, Self::Unknown(_) | Self::Died)
    }

    /// The reason, for a caller that does not know the log.
    pub fn told(&self) -> String {
        match self {
            Self::Unknown(error) | Self::Refused(error) => error.to_string(),
            Self::Abandoned | Self::Died => self.to_string(),
        }
    }

    /// The stable code for clients.
    pub fn code(&self) -> Code {
        match self {
            Self::Unknown(_) | Self::Died => Code::StoreFailed,
            Self::Refused(error) => match **error {
                StoreError::Fenced { .. } => Code::NotLeader,
                StoreError::DirectoryFull { .. } => Code::StoreFull,
                _ => Code::StoreFailed,
            },
            Self::Abandoned => Code::Draining,
        }
    }
}

/// Why a journal could not be started.
#[derive(Debug, thiserror::Error)]
#[error("the journal's threads cannot be started: {0}")]
pub struct StartError(#[from] std::io::Error);

/// The state that a journal captures for snapshots, such as the directory.
pub trait SnapshotSource: Send + Sync + 'static {
    /// The number of shards.
    fn shards(&self) -> u32;

    /// The present records of a shard. Called on the journal's thread between two groups.
    fn capture(&self, shard: ShardIndex) -> Vec<Record>;

    /// The present records without a shard. Called on the journal's thread between two groups.
    fn capture_system(&self) -> Vec<Record>;

    /// Whether the state still exists. A dropped state has no records, and no snapshot may be taken
    /// of it.
    fn is_there(&self) -> bool {
        true
    }

    /// Records that every snapshot ends with, whichever shard it has. Called together with the
    /// captures.
    fn capture_beside(&self) -> Vec<Record> {
        Vec::new()
    }
}

/// Options for groups and snapshots.
#[derive(Clone, Debug)]
pub struct JournalOptions {
    /// The size at which a group is appended. A submission is never split.
    pub group_bytes: ByteSize,
    /// The number of records at which a group is appended.
    pub group_records: usize,
    /// The memory of waiting records. When it is used up, [`Journal::submit`] waits.
    pub queue_bytes: ByteSize,
    /// The log size below which no shard is captured.
    pub log_bytes: ByteSize,
    /// The log may grow to this multiple of all snapshots before a shard is captured.
    pub log_ratio: u64,
    /// The size up to which the snapshots of several shards are written together. In a small pool
    /// the flush of a snapshot costs more than its bytes.
    pub capture_bytes: ByteSize,
    /// Whether every append runs on the append thread, so that the journal gathers the next group meanwhile.
    /// This costs a wake-up, which is worth it for a remote store.
    pub appends_aside: bool,
    /// The threads or tasks on which the journal runs. On tasks every append runs beside the journal.
    pub workers: Workers,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self {
            group_bytes: ByteSize::mib(1),
            group_records: 16_384,
            queue_bytes: ByteSize::mib(16),
            log_bytes: ByteSize::mib(16),
            log_ratio: 2,
            capture_bytes: ByteSize::mib(1),
            appends_aside: false,
            workers: Workers::Threads,
        }
    }
}

/// The most records that are answered from memory, or appended, on their submitter's thread.
const FEW: usize = 32;

thread_local! {
    /// Whether this thread may wait for the disk.
    static LENT: Cell<bool> = const { Cell::new(false) };
    /// The store to which this thread appended while it was lent, until [`end_loan`].
    static APPENDED: Cell<Option<Arc<dyn MetadataStore>>> = const { Cell::new(None) };
}

/// Runs `f` with this thread lent to the journal: an idle journal appends submissions of `f` on this thread.
/// Two wake-ups between threads would take about as long as a small put. No other work may wait for this
/// thread, and it must be outside a runtime.
pub(crate) fn lend_thread<T>(f: impl FnOnce() -> T) -> T {
    struct EndLend;
    impl Drop for EndLend {
        fn drop(&mut self) {
            LENT.set(false);
        }
    }
    LENT.set(true);
    let _back = EndLend;
    f()
}

/// Finishes the work of an append on this lent thread. The lender calls it after it has sent its
/// answer, since a small write to the log would delay the answer by some microseconds.
pub(crate) fn end_loan() {
    if let Some(store) = APPENDED.take() {
        store.tidy_after_append();
    }
}

/// Lets `store` tidy up after an append on this thread: at once, or at the end of the loan.
fn after_loan(store: &Arc<dyn MetadataStore>) {
    if LENT.get() {
        APPENDED.set(Some(Arc::clone(store)));
    } else {
        store.tidy_after_append();
    }
}

/// A handle to a running journal. When the last handle is dropped, the journal writes the queued
/// records and ends.
#[derive(Clone, Debug)]
pub struct Journal {
    shared: Arc<JournalShared>,
}

struct JournalShared {
    sender: Sender,
    /// `None` once the journal's thread has ended.
    worker: Weak<Mutex<worker::Worker>>,
    room: Arc<Semaphore>,
    queue_bytes: u32,
    health: Arc<Health>,
    position: Arc<AtomicU64>,
}

impl std::fmt::Debug for JournalShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal")
            .field("health", &self.health)
            .finish_non_exhaustive()
    }
}

/// The sending side of the journal's queue.
#[derive(Clone, Debug)]
struct Sender {
    sender: mpsc::Sender<Message>,
    queued: Arc<AtomicU64>,
    /// Notified of each message if the journal is a task.
    task: Option<Arc<Notify>>,
}

impl Sender {
    /// Queues a message; false when the journal's thread has ended.
    fn send(&self, message: Message) -> bool {
        self.queued.fetch_add(1, Ordering::AcqRel);
        let sent = self.sender.send(message).is_ok();
        if let Some(task) = &self.task {
            task.notify_one();
        }
        sent
    }

    /// True when the journal has taken in every sent message.
    fn is_idle(&self) -> bool {
        self.queued.load(Ordering::Acquire) == 0
    }
}

impl Drop for JournalShared {
    fn drop(&mut self) {
        // The send fails when the thread has already ended, which is the goal.
        let _ended = self.sender.send(Message::Close(None));
    }
}

/// Why the journal accepts nothing.
#[derive(Debug, Default)]
struct Health {
    /// The permanent reason, if any.
    failed: Mutex<Option<JournalError>>,
    /// The temporary reason, if any: the store has no room.
    full: Mutex<Option<Arc<StoreError>>>,
}

impl Health {
    /// An error once the journal has failed.
    fn check(&self) -> Result<(), JournalError> {
        self.failed.lock().clone().map_or(Ok(()), Err)
    }

    /// An error while records cannot be made durable.
    fn check_room(&self) -> Result<(), JournalError> {
        self.check()?;
        let full = self.full.lock().clone();
        full.map_or(Ok(()), |full| Err(JournalError::Refused(full)))
    }

    /// Keeps the first reason.
    fn fail(&self, error: JournalError) {
        self.failed.lock().get_or_insert(error);
    }

    fn set_full(&self, full: Option<Arc<StoreError>>) {
        *self.full.lock() = full;
    }
}

type OnDurable = Box<dyn FnOnce(Result<LogSeq, JournalError>) + Send>;

/// A callback that is called exactly once, with an error if it is dropped.
struct Callback(Option<OnDurable>);

impl Callback {
    fn call(mut self, outcome: Result<LogSeq, JournalError>) {
        if let Some(call) = self.0.take() {
            call(outcome);
        }
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            let error = if std::thread::panicking() {
                JournalError::Died
            } else {
                JournalError::Abandoned
            };
            call(Err(error));
        }
    }
}

struct Submission {
    records: Vec<Record>,
    ack: Ack,
    /// Whether the records concern past events. The journal keeps such records until the store has space.
    has_happened: bool,
    callback: Callback,
    /// The span of the submitter, if it is exported.
    trace: Option<Context>,
    /// The space in the queue, returned when the records are durable. `None` for a submission that did not
    /// wait for space.
    room: Option<OwnedSemaphorePermit>,
}

enum Message {
    Submit(Submission),
    /// A snapshot has ended. Its outcome comes through another channel, where no submission is
    /// before it.
    SnapshotDone,
    /// An append has ended. Its outcome also comes through another channel.
    Appended,
    Close(Option<oneshot::Sender<()>>),
}

impl Journal {
    /// Starts a journal that appends under `epoch`, behind the position in `state`.
    ///
    /// # Errors
    ///
    /// [`StartError`] when a thread or its runtime cannot be started.
    pub fn start(
        store: Arc<dyn MetadataStore>,
        epoch: Epoch,
        state: &LogState,
        source: Arc<dyn SnapshotSource>,
        options: JournalOptions,
    ) -> Result<Self, StartError> {
        let (sender, receiver) = mpsc::channel();
        let queued = Arc::new(AtomicU64::new(0));
        let sender = Sender {
            sender,
            queued: Arc::clone(&queued),
            task: (options.workers == Workers::Tasks).then(Arc::default),
        };
        let queue_bytes = u32::try_from(options.queue_bytes.as_u64())
            .unwrap_or(u32::MAX)
            .max(1);
        let room = Arc::new(Semaphore::new(Length(queue_bytes.into()).as_usize()));
        let health = Arc::new(Health::default());
        let (workers, task) = (options.workers, sender.task.clone());
        let snapshots = snapshots::Writer::start(
            workers,
            Arc::clone(&store),
            epoch,
            source.shards(),
            sender.clone(),
        )?;
        let appender =
            appender::Appender::start(workers, Arc::clone(&store), epoch, sender.clone())?;
        let position = Arc::new(AtomicU64::new(state.span.last.0));
        let parts = worker::Parts {
            store,
            epoch,
            retention: retention::Retention::new(state, source.shards(), &options),
            source,
            options,
            last: state.span.last,
            position: Arc::clone(&position),
            room: Arc::clone(&room),
            health: Arc::clone(&health),
            snapshots,
            appender,
        };
        let worker = worker::start(parts, receiver, queued, task)?;
        Ok(Self {
            shared: Arc::new(JournalShared {
                sender,
                worker,
                room,
                queue_bytes,
                health,
                position,
            }),
        })
    }

    /// Submits records that must become durable together, and waits for space in the queue.
    ///
    /// The journal calls `on_durable` exactly once: with the position of the records, or with the
    /// reason that they are not acknowledged. The callback must not block. It runs on the journal's
    /// thread. For [`Ack::Memory`] and on a lent thread it may run on this thread, so the caller
    /// must hold no lock.
    ///
    /// A future that is dropped before there is space calls back with [`JournalError::Abandoned`].
    /// An error returned here goes to `on_durable` too.
    pub async fn submit(
        &self,
        records: Vec<Record>,
        ack: Ack,
        on_durable: impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static,
    ) -> Result<(), JournalError> {
        let callback = Callback(Some(Box::new(on_durable)));
        let size = self.queued_size(&records);
        let room = Arc::clone(&self.shared.room).acquire_many_owned(size).await;
        // The semaphore is closed when the thread ends.
        let room = room.map_err(|_| JournalError::Abandoned)?;
        let submission = Submission {
            records,
            ack,
            has_happened: false,
            callback,
            trace: kvpool_trace::current(),
            room: Some(room),
        };
        // A wake-up of another thread takes longer than answering a few records from memory. With
        // many records the submitter has other work meanwhile.
        let left = match ack {
            Ack::Memory if submission.records.len() <= FEW => {
                self.take_here(submission, worker::Worker::take_here)
            }
            Ack::Durable if submission.records.len() <= FEW && LENT.get() => {
                self.take_here(submission, worker::Worker::append_here)
            }
            _ => Some(submission),
        };
        left.map_or(Ok(()), |submission| self.enqueue(submission))
    }

    /// Submits records from code that cannot wait. A full queue takes them as well, and callers of
    /// [`Journal::submit`] then wait longer. So another limit must bound these records. Removals,
    /// for example, are bounded by the number of blocks. `on_durable` as with [`Journal::submit`].
    pub fn submit_now(
        &self,
        records: Vec<Record>,
        ack: Ack,
        on_durable: impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static,
    ) {
        self.submit_at_once(records, ack, false, on_durable);
    }

    /// Submits records of past events, such as an eviction, as [`Journal::submit_now`] does. While the store has
    /// no room the journal keeps the records and retries.
    pub fn insist(
        &self,
        records: Vec<Record>,
        ack: Ack,
        on_durable: impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static,
    ) {
        self.submit_at_once(records, ack, true, on_durable);
    }

    fn submit_at_once(
        &self,
        records: Vec<Record>,
        ack: Ack,
        has_happened: bool,
        on_durable: impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static,
    ) {
        // The callback receives the error.
        let _told = self.enqueue(self.submission(records, ack, has_happened, on_durable));
    }

    /// A submission that does not wait for room in the queue.
    fn submission(
        &self,
        records: Vec<Record>,
        ack: Ack,
        has_happened: bool,
        on_durable: impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static,
    ) -> Submission {
        let size = self.queued_size(&records);
        let room = Arc::clone(&self.shared.room)
            .try_acquire_many_owned(size)
            .ok();
        Submission {
            records,
            ack,
            has_happened,
            callback: Callback(Some(Box::new(on_durable))),
            trace: kvpool_trace::current(),
            room,
        }
    }

    /// Runs `submit`, which may hold locks while it submits. The caller itself must hold no lock.
    ///
    /// If the journal is free, the callbacks run on this thread after `submit` has returned. Waking
    /// another thread would take longer.
    pub(crate) fn submit_under<T>(&self, submit: impl FnOnce(&mut Submitter<'_>) -> T) -> T {
        let worker = self.shared.worker.upgrade();
        let free = worker.as_deref().and_then(Mutex::try_lock);
        let mut submitter = Submitter {
            journal: self,
            // Messages that were sent earlier must be handled first.
            worker: free.filter(|_| self.shared.sender.is_idle()),
            needs_turn: false,
        };
        let submitted = submit(&mut submitter);
        if let Some(mut worker) = submitter.worker.take() {
            worker.answer_here();
        }
        if submitter.needs_turn {
            // If the thread has ended, its waiters already know.
            let _told = self.shared.sender.send(Message::Appended);
        }
        submitted
    }

    /// Waits until all earlier submissions are durable. Returns the log's last position then.
    ///
    /// # Errors
    ///
    /// [`JournalError`] when an earlier record is not known to be durable.
    pub async fn flush(&self) -> Result<LogSeq, JournalError> {
        let (done, durable) = oneshot::channel();
        self.submit(Vec::new(), Ack::Durable, |outcome| {
            let _caller_left = done.send(outcome);
        })
        .await?;
        durable.await.unwrap_or(Err(JournalError::Died))
    }

    /// The position of the last group handed to the store.
    pub fn position(&self) -> LogSeq {
        LogSeq(self.shared.position.load(Ordering::Acquire))
    }

    /// True when every submitted record is durable. Submissions without records count too.
    pub fn is_idle(&self) -> bool {
        let all = Length(self.shared.queue_bytes.into()).as_usize();
        self.shared.sender.is_idle() && self.shared.room.available_permits() == all
    }

    /// An error once the journal has failed: then only another start helps.
    pub fn healthy(&self) -> Result<(), JournalError> {
        self.shared.health.check()
    }

    /// An error while records cannot be made durable, as `/readyz` reports. A full store ends by
    /// itself when it has room.
    pub fn has_room(&self) -> Result<(), JournalError> {
        self.shared.health.check_room()
    }

    /// Makes the submitted records durable, waits for a snapshot in progress, and ends. Later
    /// submissions give [`JournalError::Abandoned`].
    pub async fn close(&self) {
        let (done, ended) = oneshot::channel();
        if self.shared.sender.send(Message::Close(Some(done))) {
            // An error means that the thread has already ended.
            let _ended = ended.await;
        }
    }

    fn enqueue(&self, submission: Submission) -> Result<(), JournalError> {
        if let Err(error) = self.healthy() {
            submission.callback.call(Err(error.clone().for_later()));
            return Err(error.for_later());
        }
        // Dropping the message calls the callback.
        if self.shared.sender.send(Message::Submit(submission)) {
            Ok(())
        } else {
            Err(JournalError::Abandoned)
        }
    }

    /// Takes a submission in on this thread when the journal is free and no submission is before
    /// it; otherwise gives it back.
    fn take_here(
        &self,
        submission: Submission,
        take: impl FnOnce(&mut worker::Worker, Submission) -> Result<bool, Submission>,
    ) -> Option<Submission> {
        let Some(worker) = self.shared.worker.upgrade() else {
            return Some(submission);
        };
        let taken = match worker.try_lock() {
            // A message sent earlier comes first.
            Some(mut worker) if self.shared.sender.is_idle() => take(&mut worker, submission),
            _ => Err(submission),
        };
        match taken {
            Ok(true) => {
                // If the thread has ended, its waiters already know.
                let _told = self.shared.sender.send(Message::Appended);
                None
            }
            Ok(false) => None,
            Err(submission) => Some(submission),
        }
    }

    /// The approximate memory of records, at most the queue's size.
    fn queued_size(&self, records: &[Record]) -> u32 {
        let size: usize = records
            .iter()
            .map(|record| {
                let text = record.place().map_or(0, |(_, key)| key.as_ref().text_len());
                size_of::<Record>() + text
            })
            .sum();
        u32::try_from(size)
            .unwrap_or(u32::MAX)
            .min(self.shared.queue_bytes)
    }
}

/// Receives the records that are submitted within [`Journal::submit_under`].
pub(crate) struct Submitter<'j> {
    journal: &'j Journal,
    /// The lock of the journal's worker, if the journal was free. While this thread holds it, the
    /// journal takes nothing else in.
    worker: Option<MutexGuard<'j, worker::Worker>>,
    /// True if the journal's thread has work afterwards.
    needs_turn: bool,
}

impl Submitter<'_> {
    /// Submits records without waiting for durability, as [`Journal::submit_now`] with
    /// [`Ack::Memory`] does. If the journal has failed, the callback runs within this call.
    pub(crate) fn submit_now(
        &mut self,
        records: Vec<Record>,
        on_logged: impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static,
    ) {
        let submission = self
            .journal
            .submission(records, Ack::Memory, false, on_logged);
        let entered = match &mut self.worker {
            Some(worker) if submission.records.len() <= FEW => worker.enter_here(submission),
            _ => Err(submission),
        };
        match entered {
            Ok(needs_turn) => self.needs_turn |= needs_turn,
            Err(submission) => {
                // Later submissions must not overtake this one.
                self.worker = None;
                let _told = self.journal.enqueue(submission);
            }
        }
    }
}

impl JournalError {
    /// The error for records after the failure, which were certainly not logged.
    fn for_later(self) -> Self {
        match self {
            Self::Unknown(error) => Self::Refused(error),
            other => other,
        }
    }
}
