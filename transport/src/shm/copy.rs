//! The threads that copy between mappings and callers' memory, so that no runtime's thread does.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

type Job = Box<dyn FnOnce() + Send>;

/// A few threads with one queue. Dropping it lets them finish what is queued, then end.
pub(super) struct Copiers(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closing: bool,
}

impl Copiers {
    pub(super) fn start(threads: usize) -> io::Result<Self> {
        let copiers = Self(Arc::default());
        for _ in 0..threads {
            let shared = copiers.0.clone();
            std::thread::Builder::new()
                .name("kvpool-shm-copy".to_owned())
                .spawn(move || {
                    while let Some(job) = shared.next() {
                        job();
                    }
                })?;
        }
        Ok(copiers)
    }

    /// Queues a job.
    pub(super) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        self.0.state.lock().jobs.push_back(Box::new(job));
        self.0.changed.notify_one();
    }
}

impl Drop for Copiers {
    fn drop(&mut self) {
        self.0.state.lock().closing = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closing {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}
