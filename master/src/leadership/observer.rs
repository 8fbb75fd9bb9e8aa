//! Who leads according to etcd, as a value that can be waited on.

use crate::store::etcd::{EtcdStore, Leader};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How soon a watch that broke is opened again.
const RETRY: Duration = Duration::from_millis(100);

/// What etcd says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Leading {
    /// It has not been heard yet.
    #[default]
    Unknown,
    /// Nobody leads.
    Nobody,
    /// This master does.
    By(Leader),
}

/// The task that watches. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Observer {
    seen: watch::Receiver<Leading>,
    task: JoinHandle<()>,
}

impl Observer {
    pub(super) fn start(store: Arc<EtcdStore>) -> Self {
        let (told, seen) = watch::channel(Leading::Unknown);
        let task = tokio::spawn(async move {
            loop {
                if let Err(error) = watch(&store, &told).await {
                    tracing::warn!(%error, "watch of the leader key failed, retrying");
                }
                tokio::time::sleep(RETRY).await;
            }
        });
        Self { seen, task }
    }

    /// A view of its own, whose changes can be waited for.
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
    store: &EtcdStore,
    told: &watch::Sender<Leading>,
) -> Result<(), crate::store::StoreError> {
    let mut changes = store.watch_leader().await?;
    loop {
        let leading = changes.next().await?.map_or(Leading::Nobody, Leading::By);
        told.send_if_modified(|known| {
            let is_new = *known != leading;
            *known = leading;
            is_new
        });
    }
}
