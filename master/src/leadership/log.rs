//! A task that reads the groups of the log as it grows.

use super::terms::RETRY;
use crate::store::{ElectionStore, LogSeq, StoreError};
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// The number of groups that may wait to be applied.
const GROUPS: usize = 64;
/// How long the log may be unreadable before a warning.
const TELL_AFTER: Duration = Duration::from_secs(5);
/// Failures with a longer time between them belong to different outages.
const OUTAGE_GAP: Duration = Duration::from_secs(60);
/// The interval at which the task asks the store for the log's cut.
const CUT_POLL: Duration = Duration::from_secs(10);

/// The groups after a position. A task reads them, so that a wait for a group can be cancelled.
pub(super) struct Groups {
    groups: mpsc::Receiver<Result<(LogSeq, Bytes), StoreError>>,
    task: JoinHandle<()>,
    /// The last known cut of the log.
    cut: Arc<AtomicU64>,
    cutting: JoinHandle<()>,
}

impl Groups {
    /// The groups after position `after`.
    pub(super) fn follow(store: &Arc<dyn ElectionStore>, after: LogSeq) -> Self {
        let cut = Arc::new(AtomicU64::new(0));
        let cutting = tokio::spawn(poll_cut(Arc::clone(store), Arc::clone(&cut)));
        let store = Arc::clone(store);
        let (sender, groups) = mpsc::channel(GROUPS);
        let task = tokio::spawn(async move {
            let mut after = after;
            let mut outage = Outage::default();
            loop {
                let error = match follow(&*store, &mut after, &sender, &mut outage).await {
                    Ok(()) => return,
                    Err(error) => error,
                };
                if !error.is_retryable() {
                    // A failure means that the receiver is gone.
                    let _left = sender.send(Err(error)).await;
                    return;
                }
                outage.failed(&error);
                sleep(RETRY).await;
            }
        });
        Self {
            groups,
            task,
            cut,
            cutting,
        }
    }

    /// The next group. After an error the metadata must be loaded again.
    pub(super) async fn next(&mut self) -> Result<(LogSeq, Bytes), StoreError> {
        self.groups.recv().await.unwrap_or(Err(StoreError::Closed))
    }

    /// The cut of the log, some seconds old.
    pub(super) fn cut(&self) -> LogSeq {
        LogSeq(self.cut.load(Ordering::Relaxed))
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.task.abort();
        self.cutting.abort();
    }
}

/// The log's watch does not report the cut. Without this poll the standby would count the log's
/// groups for ever.
async fn poll_cut(store: Arc<dyn ElectionStore>, cut: Arc<AtomicU64>) {
    loop {
        sleep(CUT_POLL).await;
        match store.log_span().await {
            Ok(span) => cut.store(span.cut.0, Ordering::Relaxed),
            Err(error) => tracing::debug!(%error, "log cut position not read"),
        }
    }
}

async fn follow(
    store: &dyn ElectionStore,
    after: &mut LogSeq,
    sender: &mpsc::Sender<Result<(LogSeq, Bytes), StoreError>>,
    outage: &mut Outage,
) -> Result<(), StoreError> {
    let mut log = store.groups(*after).await?;
    loop {
        match log.next().await {
            Ok((seq, group)) => {
                if outage.end() {
                    tracing::info!("the metadata log is read again");
                }
                *after = seq;
                if sender.send(Ok((seq, group))).await.is_err() {
                    return Ok(());
                }
            }
            // The same watch goes on: it has learned how much a slow store can answer in time.
            Err(error @ StoreError::Unavailable { .. }) => {
                outage.failed(&error);
                sleep(RETRY).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// A time in which the log cannot be read, and what was said about it.
#[derive(Debug, Default)]
struct Outage {
    /// The first and the last failure.
    failures: Option<(Instant, Instant)>,
    is_told: bool,
}

impl Outage {
    /// Notes a failure.
    fn failed(&mut self, error: &StoreError) {
        if self.is_due(Instant::now()) {
            tracing::warn!(%error, "the metadata log cannot be read: this master does not follow it; trying again");
        } else {
            tracing::debug!(%error, "metadata log not read, trying again");
        }
    }

    /// Notes a failure at `now`. Returns true for the first one after [`TELL_AFTER`].
    fn is_due(&mut self, now: Instant) -> bool {
        let began = match self.failures {
            Some((first, last)) if now.duration_since(last) < OUTAGE_GAP => first,
            _ => {
                self.is_told = false;
                now
            }
        };
        self.failures = Some((began, now));
        let is_due = !self.is_told && now.duration_since(began) >= TELL_AFTER;
        self.is_told |= is_due;
        is_due
    }

    /// Notes that a group was read. Returns true if the outage before it was told.
    fn end(&mut self) -> bool {
        self.failures = None;
        std::mem::take(&mut self.is_told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_cannot_be_read_is_told_once_until_it_is_read_again() {
        let start = Instant::now();
        let mut outage = Outage::default();
        let told = |outage: &mut Outage, seconds: std::ops::Range<u64>, step: usize| {
            let is_due = |second: &u64| outage.is_due(start + Duration::from_secs(*second));
            seconds.step_by(step).filter(is_due).collect::<Vec<_>>()
        };
        assert_eq!(told(&mut outage, 0..50, 1), [5]);
        assert!(outage.end());
        assert!(!outage.end(), "it is over");
        assert_eq!(told(&mut outage, 100..150, 1), [105]);
        let rare = OUTAGE_GAP.as_secs();
        let apart = 150 + rare..150 + 10 * rare;
        let step = usize::try_from(rare).unwrap();
        assert_eq!(
            told(&mut outage, apart, step),
            [0; 0],
            "each ends by itself"
        );
        assert!(!outage.end());
    }
}
