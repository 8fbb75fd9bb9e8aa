//! The groups of the log as it grows, read by a task of their own.

use super::terms::RETRY;
use crate::store::etcd::EtcdStore;
use crate::store::{LogSeq, StoreError};
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// How many groups wait to be applied.
const GROUPS: usize = 64;
/// The groups behind a position, read by a task so that waiting for them can be given up.
pub(super) struct Groups {
    groups: mpsc::Receiver<Result<(LogSeq, Bytes), StoreError>>,
    task: JoinHandle<()>,
}

impl Groups {
    /// Those behind `after`.
    pub(super) fn follow(store: &Arc<EtcdStore>, after: LogSeq) -> Self {
        let store = Arc::clone(store);
        let (sender, groups) = mpsc::channel(GROUPS);
        let task = tokio::spawn(async move {
            let mut after = after;
            loop {
                let error = match follow(&store, &mut after, &sender).await {
                    Ok(()) => return,
                    Err(error) => error,
                };
                if !error.is_retryable() {
                    // Nobody listens any more when this fails.
                    let _left = sender.send(Err(error)).await;
                    return;
                }
                tracing::debug!(%error, "the log is followed again");
                sleep(RETRY).await;
            }
        });
        Self { groups, task }
    }

    /// The next one. An error says that the metadata has to be loaded anew.
    pub(super) async fn next(&mut self) -> Result<(LogSeq, Bytes), StoreError> {
        self.groups.recv().await.unwrap_or(Err(StoreError::Closed))
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn follow(
    store: &EtcdStore,
    after: &mut LogSeq,
    sender: &mpsc::Sender<Result<(LogSeq, Bytes), StoreError>>,
) -> Result<(), StoreError> {
    let mut log = store.follow(*after).await?;
    loop {
        let (seq, group) = log.next().await?;
        *after = seq;
        if sender.send(Ok((seq, group))).await.is_err() {
            return Ok(());
        }
    }
}
