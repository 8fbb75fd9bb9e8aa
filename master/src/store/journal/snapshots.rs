//! The thread that writes snapshots, so that appends continue meanwhile.

use super::{Message, Sender, StartError};
use crate::store::record::encode_snapshot;
use crate::store::{LogSeq, MetadataStore, Record, ShardIndex, StoreError};
use kvpool_types::Epoch;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Captured shards to write.
pub(super) struct Job {
    pub(super) captured: Vec<(ShardIndex, Vec<Record>)>,
    /// The position through which the records contain the log.
    pub(super) seq: LogSeq,
    /// The position to cut the log at afterwards.
    pub(super) cut: LogSeq,
}

/// The outcome of a job.
pub(super) struct Outcome {
    pub(super) seq: LogSeq,
    pub(super) cut: LogSeq,
    /// The bytes of each snapshot.
    pub(super) written: Result<Vec<(ShardIndex, u64)>, StoreError>,
}

/// A handle to the thread.
pub(super) struct Thread {
    /// `None` when the thread must end.
    jobs: Option<mpsc::Sender<Job>>,
    outcomes: mpsc::Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    /// Starts the thread. Each outcome wakes `journal`.
    pub(super) fn start(
        store: Arc<dyn MetadataStore>,
        epoch: Epoch,
        shards: u32,
        journal: Sender,
    ) -> Result<Self, StartError> {
        let runtime = super::worker::runtime()?;
        let (jobs, queue) = mpsc::channel::<Job>();
        let (done, outcomes) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("kvm-snapshot".into())
            .spawn(move || {
                for job in queue {
                    let (seq, cut) = (job.seq, job.cut);
                    let written = runtime.block_on(write(&*store, epoch, shards, job));
                    let outcome = Outcome { seq, cut, written };
                    if done.send(outcome).is_err() || !journal.send(Message::SnapshotDone) {
                        return;
                    }
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            outcomes,
            thread: Some(thread),
        })
    }

    /// Hands a job over; false when the thread has ended.
    pub(super) fn write(&self, job: Job) -> bool {
        self.jobs
            .as_ref()
            .is_some_and(|jobs| jobs.send(job).is_ok())
    }

    /// The outcome of a job that ended since the last call.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcomes.try_recv().ok()
    }

    /// Waits for the job in progress and ends the thread.
    pub(super) fn end(&mut self) {
        self.jobs = None;
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the snapshot thread ended on a fault");
        }
    }
}

async fn write(
    store: &dyn MetadataStore,
    epoch: Epoch,
    shards: u32,
    Job { captured, seq, cut }: Job,
) -> Result<Vec<(ShardIndex, u64)>, StoreError> {
    let mut written = Vec::with_capacity(captured.len());
    for (shard, records) in captured {
        let chunks = encode_snapshot(shards, records);
        written.push((shard, chunks.iter().map(|chunk| chunk.len() as u64).sum()));
        store.put_snapshot(epoch, shard, seq, chunks).await?;
    }
    store.truncate_log(epoch, cut).await?;
    Ok(written)
}
