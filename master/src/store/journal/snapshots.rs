//! The thread that writes snapshots, so that appends continue meanwhile. In a simulation each job is
//! a task.

use super::{Message, Sender, StartError};
use crate::store::record::encode_snapshot;
use crate::store::{LogSeq, MetadataStore, Record, ShardIndex, StoreError};
use crate::workers::Workers;
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

/// The thread or task that writes snapshots.
pub(super) struct Writer {
    place: Place,
    outcomes: mpsc::Receiver<Outcome>,
}

enum Place {
    Thread {
        jobs: mpsc::Sender<Job>,
        thread: JoinHandle<()>,
    },
    Task(Arc<Writing>),
    /// The thread has ended.
    Nowhere,
}

/// The parts that a job needs.
struct Writing {
    store: Arc<dyn MetadataStore>,
    epoch: Epoch,
    shards: u32,
    done: mpsc::Sender<Outcome>,
    journal: Sender,
}

impl Writing {
    async fn run(&self, job: Job) -> Outcome {
        let (seq, cut) = (job.seq, job.cut);
        let written = write(&*self.store, self.epoch, self.shards, job).await;
        Outcome { seq, cut, written }
    }

    /// Reports an outcome and wakes the journal. Returns false if the journal has ended.
    fn report(&self, outcome: Outcome) -> bool {
        self.done.send(outcome).is_ok() && self.journal.send(Message::SnapshotDone)
    }

    fn thread(self) -> Result<Place, StartError> {
        let runtime = super::worker::runtime()?;
        let (jobs, queue) = mpsc::channel::<Job>();
        let thread = kvpool_seams::thread("kvm-snapshot", move || {
            for job in queue {
                let outcome = runtime.block_on(self.run(job));
                if !self.report(outcome) {
                    return;
                }
            }
        })?;
        Ok(Place::Thread { jobs, thread })
    }
}

impl Writer {
    /// Starts it. Each outcome wakes `journal`.
    pub(super) fn start(
        workers: Workers,
        store: Arc<dyn MetadataStore>,
        epoch: Epoch,
        shards: u32,
        journal: Sender,
    ) -> Result<Self, StartError> {
        let (done, outcomes) = mpsc::channel();
        let writing = Writing {
            store,
            epoch,
            shards,
            done,
            journal,
        };
        let place = match workers {
            Workers::Threads => writing.thread()?,
            Workers::Tasks => Place::Task(Arc::new(writing)),
        };
        Ok(Self { place, outcomes })
    }

    /// Hands a job over; false when the thread has ended.
    pub(super) fn write(&self, job: Job) -> bool {
        match &self.place {
            Place::Thread { jobs, .. } => jobs.send(job).is_ok(),
            Place::Task(writing) => {
                let writing = Arc::clone(writing);
                tokio::spawn(async move { writing.report(writing.run(job).await) });
                true
            }
            Place::Nowhere => false,
        }
    }

    /// The outcome of a job that ended since the last call.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.outcomes.try_recv().ok()
    }

    /// Waits for the job in progress and ends the thread.
    pub(super) fn end(&mut self) {
        if let Place::Thread { jobs, thread } = std::mem::replace(&mut self.place, Place::Nowhere) {
            drop(jobs);
            if thread.join().is_err() {
                tracing::error!("the snapshot thread ended on a fault");
            }
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
