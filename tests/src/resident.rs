//! A thread that others have work done on.
//!
//! What a thread starts inherits where it stands: its network namespace, and the life of a process that
//! asks to die with the thread that started it. A resident is a thread that stays for as long.

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
    /// Starts a thread, and does `prepare` on it before anything else.
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

    /// Does `work` on the thread and waits for what comes of it. A panic of it goes on here.
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
