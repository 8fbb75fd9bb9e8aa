//! Loads of the metadata. Memory never holds the metadata twice, and no load blocks the runtime.

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Drops `before`, then loads. Memory need not have room for both.
pub(super) async fn anew<T, E>(
    before: T,
    load: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    drop(before);
    load.await
}

/// Runs `load` on a blocking thread: a load computes for long without yielding, and a store may
/// block its callers. If this future is dropped, the load ends the next time that it waits for the
/// store. `None`: the load panicked, or the runtime shuts down.
pub(super) async fn beside<T: Send + 'static>(
    load: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    let (_caller, caller_left) = oneshot::channel::<()>();
    let load = async move {
        tokio::select! {
            biased;
            _ = caller_left => None,
            loaded = load => Some(loaded),
        }
    };
    let loading = kvpool_seams::blocking(move || Handle::current().block_on(load));
    loading.await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::time::{Instant, sleep, timeout};

    #[tokio::test]
    async fn what_was_loaded_before_is_gone_when_the_next_load_begins() {
        let before = Arc::new(1);
        let weak = Arc::downgrade(&before);
        let load = async {
            assert_eq!(weak.strong_count(), 0, "memory holds both");
            Ok::<_, ()>(Arc::new(2))
        };
        assert_eq!(anew(before, load).await, Ok(Arc::new(2)));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_load_whose_caller_left_ends() {
        let held = Arc::new(());
        let weak = Arc::downgrade(&held);
        let load = async move {
            for _ in 0..10_000 {
                sleep(Duration::from_millis(1)).await;
            }
            drop(held);
        };
        let waited = timeout(Duration::from_millis(50), beside(load)).await;
        assert_eq!(waited.ok(), None);
        let left = Instant::now();
        while weak.strong_count() > 0 {
            assert!(left.elapsed() < Duration::from_secs(5), "it goes on");
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(beside(async { 7 }).await, Some(7));
    }
}
