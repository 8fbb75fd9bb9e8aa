//! The media in a simulation. Tasks on the single thread do the jobs, in simulated time.

use super::disk::SETTLE;
use super::{COPIERS, Disk, Duty, Job, Media, MediaError, Shared, SsdConfig, Store, TEND, WORKERS};
use futures::future::join_all;
use kvpool_disk::{Arena, Engine};
use std::iter::repeat_n;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The memory for transfers. No task may block for it, since the single thread would block forever.
const ARENA: usize = 128 << 20;
/// The longest delay in microseconds before a simulated thread takes a job.
const LATE: u64 = 400;
/// The interval at which a job checks the device for which it waits.
const LOOK: Duration = Duration::from_millis(2);

impl Media {
    /// The media on these devices, and their work as a future that the caller must poll. Devices answer
    /// requests for superblocks and flushes at once.
    pub(crate) fn simulated(
        engines: Vec<(SsdConfig, Arc<dyn Engine>)>,
        store: Store,
    ) -> Result<(Self, impl Future<Output = ()> + use<>), MediaError> {
        let arena = Arena::new(ARENA)?;
        let mut disks = Vec::with_capacity(engines.len());
        for (number, (config, engine)) in engines.into_iter().enumerate() {
            let path = PathBuf::from(format!("ssd{number}"));
            let disk = Disk::read(&config, path.clone(), engine, &arena)
                .map_err(|source| MediaError::Refused { path, source })?;
            disks.push(disk);
        }
        let media = Self::of(disks, arena, store);
        let workers = repeat_n(Duty::Serve, WORKERS);
        let workers = workers.chain(repeat_n(Duty::Attach, media.shared.attachers()));
        let workers = workers.chain(repeat_n(Duty::Copy, COPIERS));
        let workers: Vec<_> = workers
            .map(|duty| Arc::clone(&media.shared).run_simulated(duty))
            .collect();
        let shared = Arc::clone(&media.shared);
        let tending = async move {
            loop {
                sleep(TEND).await;
                shared.tend();
            }
        };
        let work = async move {
            let _never = tokio::join!(join_all(workers), tending);
        };
        Ok((media, work))
    }
}

impl Shared {
    async fn run_simulated(self: Arc<Self>, duty: Duty) {
        let mut changed = self.changed.tasks.subscribe();
        loop {
            loop {
                let job = self.work.lock().take(duty);
                let Some(job) = job else { break };
                sleep(Duration::from_micros(kvpool_seams::random_range(0..LATE))).await;
                if matches!(job, Job::Attach(..) | Job::Reset(..)) {
                    self.settle().await;
                }
                self.serve(job);
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Waits for the requests that a medium would wait for before it is attached again.
    async fn settle(&self) {
        let until = Instant::now() + SETTLE;
        let is_busy = || self.disks.iter().any(|disk| disk.lock().in_flight() > 0);
        while is_busy() && Instant::now() < until {
            sleep(LOOK).await;
        }
    }
}
