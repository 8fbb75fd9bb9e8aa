//! Jobs for peers, on a few threads. At most [`OF_PEER`] jobs of one peer run at a time. So a peer that does
//! not answer leaves threads to the others.

use crate::copiers::{Copiers, Job};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// The most jobs that run at a time.
const THREADS: usize = 32;
/// The most jobs of one peer among them.
const OF_PEER: usize = 8;

/// The threads, and the jobs that wait for others of the same peer.
pub(super) struct Background {
    threads: Copiers,
    peers: Arc<Mutex<Peers>>,
}

/// The jobs of each peer that has some.
#[derive(Default)]
struct Peers {
    running: usize,
    jobs: HashMap<String, PeerJobs>,
}

#[derive(Default)]
struct PeerJobs {
    running: usize,
    waiting: VecDeque<Job>,
}

impl Background {
    pub(super) fn start() -> io::Result<Self> {
        Ok(Self {
            threads: Copiers::start("kvpool-peer", THREADS)?,
            peers: Arc::default(),
        })
    }

    /// Runs a job for a peer. Jobs of one peer start in the order of these calls.
    pub(super) fn run(&self, peer: &str, job: Job) {
        {
            let mut peers = self.peers.lock();
            // Once half of the threads are busy, each peer may run one job only.
            let most = match peers.running < THREADS / 2 {
                true => OF_PEER,
                false => 1,
            };
            let jobs = peers.jobs.entry(peer.to_owned()).or_default();
            if jobs.running >= most {
                jobs.waiting.push_back(job);
                return;
            }
            jobs.running += 1;
            peers.running += 1;
        }
        let (peers, peer) = (Arc::clone(&self.peers), peer.to_owned());
        let in_turn = move || {
            let mut next = Some(job);
            while let Some(job) = next {
                // A panic must not keep a thread from the next job. The panic hook has logged it.
                let _ended = std::panic::catch_unwind(AssertUnwindSafe(job));
                next = next_of(&peers, &peer);
            }
        };
        let in_turn: Job = Box::new(in_turn);
        self.threads.submit(std::iter::once(in_turn));
    }
}

/// The peer's next job for the thread that has ended one. `None` when the thread is free.
fn next_of(peers: &Mutex<Peers>, peer: &str) -> Option<Job> {
    let mut peers = peers.lock();
    let jobs = peers.jobs.get_mut(peer)?;
    let next = jobs.waiting.pop_front();
    if next.is_none() {
        jobs.running -= 1;
        if jobs.running == 0 {
            peers.jobs.remove(peer);
        }
        peers.running -= 1;
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn a_peer_that_does_not_answer_leaves_threads_to_others() {
        const JOBS: usize = 2 * THREADS;
        let background = Background::start().unwrap();
        let (started, answers) = (Arc::<AtomicUsize>::default(), Arc::new(Mutex::new(())));
        let (says, ended) = mpsc::channel();
        let is_silent = answers.lock();
        for _ in 0..JOBS {
            let (started, answers) = (Arc::clone(&started), Arc::clone(&answers));
            let says = says.clone();
            let job = move || {
                started.fetch_add(1, Ordering::SeqCst);
                drop(answers.lock());
                says.send("silent").unwrap();
            };
            background.run("silent", Box::new(job));
        }
        background.run("other", Box::new(move || says.send("other").unwrap()));
        let next = || ended.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(next(), "other");
        assert!(started.load(Ordering::SeqCst) <= OF_PEER);
        drop(is_silent);
        for _ in 0..JOBS {
            assert_eq!(next(), "silent");
        }
        assert_eq!(started.load(Ordering::SeqCst), JOBS);
    }

    #[test]
    fn several_silent_peers_and_a_job_that_panics_leave_threads_to_others() {
        let background = Background::start().unwrap();
        let answers = Arc::new(Mutex::new(()));
        let (says, ended) = mpsc::channel();
        let is_silent = answers.lock();
        for job in 0..8 * OF_PEER {
            let (answers, says) = (Arc::clone(&answers), says.clone());
            let job_of = format!("silent-{}", job % 8);
            let job = move || {
                drop(answers.lock());
                says.send("silent").unwrap();
            };
            background.run(&job_of, Box::new(job));
        }
        for _ in 0..2 * OF_PEER {
            background.run("other", Box::new(|| panic!("of this test")));
        }
        let other = says.clone();
        background.run("other", Box::new(move || other.send("other").unwrap()));
        let next = || ended.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(next(), "other");
        drop(is_silent);
        for _ in 0..8 * OF_PEER {
            assert_eq!(next(), "silent");
        }
    }
}
