//! The current leader according to the store, as a value that tasks can wait on.

use crate::store::{ElectionStore, Leader};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The delay before a broken watch is opened again.
const RETRY: Duration = Duration::from_millis(100);

/// The leader according to the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Leading {
    /// The store has not answered yet.
    #[default]
    Unknown,
    /// No master leads.
    Nobody,
    /// A master leads: this one or another.
    By(Leader),
}

/// The watching task, which ends on drop.
#[derive(Debug)]
pub(super) struct Observer {
    seen: watch::Receiver<Leading>,
    task: JoinHandle<()>,
}

impl Observer {
    pub(super) fn start(store: Arc<dyn ElectionStore>) -> Self {
        let (told, seen) = watch::channel(Leading::Unknown);
        let task = tokio::spawn(async move {
            loop {
                if let Err(error) = watch(&*store, &told).await {
                    tracing::warn!(%error, "watch of the leader key failed, retrying");
                }
                tokio::time::sleep(RETRY).await;
            }
        });
        Self { seen, task }
    }

    /// A receiver of the changes.
    pub(super) fn view(&self) -> watch::Receiver<Leading> {
        self.seen.clone()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn watch(
    store: &dyn ElectionStore,
    told: &watch::Sender<Leading>,
) -> Result<(), crate::store::StoreError> {
    let mut changes = store.leaders().await?;
    loop {
        let leading = changes.next().await?.map_or(Leading::Nobody, Leading::By);
        told.send_if_modified(|known| {
            let is_new = *known != leading;
            *known = leading;
            is_new
        });
    }
}
