//! The work that a term does beside its calls: eviction, time-outs, moves, copies to media, and the
//! log.
//!
//! Each piece of work is a step that never waits. In production a thread repeats the step. In a
//! simulation a task does, on the runtime's only thread, so that time is virtual and the order of
//! steps is repeatable (ADR 0052).

use crate::pool::Pool;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Whether threads or tasks repeat the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// A thread for each piece of work.
    #[default]
    Threads,
    /// A task for each, on a runtime with one thread. For simulations: the log of such a term needs
    /// a store whose calls do not block.
    Tasks,
}

/// Wakes one worker.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    woken: Mutex<bool>,
    thread: Condvar,
    /// `None` if a thread waits: the condition variable is then enough.
    task: Option<Notify>,
    /// The number of wake-ups.
    #[cfg(test)]
    times: std::sync::atomic::AtomicU64,
}

impl Wake {
    pub(crate) fn new(workers: Workers) -> Self {
        Self {
            task: (workers == Workers::Tasks).then(Notify::new),
            ..Self::default()
        }
    }

    /// The number of wake-ups until now.
    #[cfg(test)]
    pub(crate) fn times(&self) -> u64 {
        self.times.load(std::sync::atomic::Ordering::SeqCst)
    }

    pub(crate) fn wake(&self) {
        #[cfg(test)]
        self.times.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        *self.woken.lock() = true;
        self.thread.notify_one();
        if let Some(task) = &self.task {
            task.notify_one();
        }
    }

    /// Waits for a wake-up, at most `limit`.
    fn wait(&self, limit: Duration) {
        let mut woken = self.woken.lock();
        if !*woken {
            self.thread.wait_for(&mut woken, limit);
        }
        *woken = false;
    }

    /// [`Wake::wait`] as a future.
    async fn waited(&self, limit: Duration) {
        if let Some(task) = self.task.as_ref().filter(|_| !*self.woken.lock()) {
            // Time must pass even without a wait, or other tasks never run.
            let limit = limit.max(Duration::from_millis(1));
            let _late = tokio::time::timeout(limit, task.notified()).await;
        } else {
            tokio::task::yield_now().await;
        }
        *self.woken.lock() = false;
    }
}

impl Workers {
    /// Repeats `step` until the pool stops: first after `first`, then after the time that the last
    /// step returned. A wake-up of `wake` ends each wait early.
    pub(crate) fn start(
        self,
        pool: &Arc<Pool>,
        name: &str,
        wake: fn(&Pool) -> &Wake,
        first: Duration,
        mut step: impl FnMut(&Arc<Pool>) -> Duration + Send + 'static,
    ) -> std::io::Result<()> {
        let (pool, mut wait) = (Arc::clone(pool), first);
        match self {
            Self::Threads => {
                kvpool_seams::thread(name, move || {
                    while !pool.is_stopping() {
                        wake(&pool).wait(wait);
                        if !pool.is_stopping() {
                            wait = step(&pool);
                        }
                    }
                })?;
            }
            Self::Tasks => {
                tokio::spawn(async move {
                    while !pool.is_stopping() {
                        wake(&pool).waited(wait).await;
                        if !pool.is_stopping() {
                            wait = step(&pool);
                        }
                    }
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test]
    async fn a_wake_up_before_the_wait_is_not_lost_on_a_task_or_a_thread() {
        for workers in [Workers::Threads, Workers::Tasks] {
            let wake = Wake::new(workers);
            wake.wake();
            let begun = Instant::now();
            match workers {
                Workers::Threads => wake.wait(Duration::from_secs(60)),
                Workers::Tasks => wake.waited(Duration::from_secs(60)).await,
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{workers:?}");
        }
    }

    #[tokio::test]
    async fn a_wait_ends_at_its_limit_on_a_task_and_on_a_thread() {
        let limit = Duration::from_millis(5);
        for workers in [Workers::Threads, Workers::Tasks] {
            let wake = Wake::new(workers);
            let begun = Instant::now();
            match workers {
                Workers::Threads => wake.wait(limit),
                Workers::Tasks => wake.waited(limit).await,
            }
            assert!(begun.elapsed() >= limit, "{workers:?}");
        }
    }
}
