//! One life of a process. What the process is waiting for when it dies never comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Life(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    is_over: AtomicBool,
    told: Notify,
}

impl Life {
    pub(crate) fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Acquire)
    }

    /// Whether both are of one process.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The process dies.
    pub(crate) fn end(&self) {
        self.0.is_over.store(true, Ordering::Release);
        self.0.told.notify_waiters();
    }

    /// Completes when the process is dead.
    pub(crate) async fn over(&self) {
        loop {
            let mut told = std::pin::pin!(self.0.told.notified());
            told.as_mut().enable();
            if self.is_over() {
                return;
            }
            told.await;
        }
    }

    /// Does not come back in a dead process.
    pub(crate) async fn check(&self) {
        if self.is_over() {
            std::future::pending::<()>().await;
        }
    }

    /// Work of the process; `None` when the process died meanwhile.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.over() => None,
            done = work => Some(done),
        }
    }
}
