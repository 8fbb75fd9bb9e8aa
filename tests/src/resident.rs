//! A thread that runs work for other threads.
//!
//! A process that a thread starts inherits the thread's network namespace. It may also ask to die
//! with that thread. So a resident thread stays for as long as its processes are needed.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use tokio::runtime::{Builder, Runtime};

type Job = Box<dyn FnOnce(&Runtime) + Send>;

/// A thread with a runtime of its own. Dropping it ends the thread.
#[derive(Debug)]
pub struct Resident {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Resident {
    /// Starts a thread and runs `prepare` on it first.
    pub fn start(
        prepare: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (jobs, queue) = channel::<Job>();
        let thread = std::thread::spawn(move || {
            for job in queue {
                job(&runtime);
            }
        });
        let resident = Self {
            jobs: Some(jobs),
            thread: Some(thread),
        };
        resident.run(|_| prepare())?;
        Ok(resident)
    }

    /// Runs `work` on the thread and returns its result. A panic of `work` continues in the caller.
    pub fn run<R: Send + 'static>(&self, work: impl FnOnce(&Runtime) -> R + Send + 'static) -> R {
        let (done, outcome) = channel::<Result<R, Box<dyn Any + Send>>>();
        let job: Job = Box::new(move |runtime| {
            let _nobody_waits = done.send(catch_unwind(AssertUnwindSafe(|| work(runtime))));
        });
        let taken = self.jobs.as_ref().map(|jobs| jobs.send(job));
        assert!(matches!(taken, Some(Ok(()))), "the thread is gone");
        match outcome.recv() {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => resume_unwind(panic),
            Err(_) => panic!("the thread ended in the middle of its work"),
        }
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _its_jobs_caught_their_panics = thread.join();
        }
    }
}
