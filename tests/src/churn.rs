//! A load of puts, replacements, removals and gets that knows the possible contents of each key.
//!
//! Each task has its own keys, so the order of the calls on a key is known. A failed call may or
//! may not have taken effect. So a key may have several possible contents until the next call that
//! succeeds.

use crate::blocks::{bytes_of, key, target};
use anyhow::{bail, ensure};
use kvpool_client::{
    Client, GetBlock, GetOptions, GetOutcome, Leasing, PutBlock, PutOptions, PutOutcome, Remove,
};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Code, Key};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::task::JoinHandle;

/// The timeout of one call. It is short, so that an outage does not stop the load.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The number of keys in one call.
const BATCH: usize = 4;

/// The parameters of the load.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The number of concurrent tasks.
    pub tasks: u64,
    /// The number of keys of each task.
    pub keys: u64,
    /// The length of a block in bytes.
    pub length: usize,
}

/// The counts of a load or a check.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Stored blocks.
    pub stored: u64,
    /// Removed blocks.
    pub removed: u64,
    /// Blocks that were got with right bytes.
    pub right: u64,
    /// Absent blocks.
    pub missed: u64,
    /// Failed calls.
    pub failed: u64,
}

impl std::ops::AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.removed += other.removed;
        self.right += other.right;
        self.missed += other.missed;
        self.failed += other.failed;
    }
}

/// A running load.
#[derive(Debug)]
pub struct Churn {
    tasks: Vec<JoinHandle<anyhow::Result<Task>>>,
    /// The counts of each task after its last step.
    counts: Vec<Arc<Mutex<Seen>>>,
    is_over: Arc<AtomicBool>,
    shape: Shape,
}

/// The possible contents of the keys after a load.
#[derive(Debug)]
pub struct Left {
    tasks: Vec<Task>,
    /// The counts of the load.
    pub seen: Seen,
}

#[derive(Debug)]
struct Task {
    first: u64,
    /// By key: the numbers of its possible contents.
    may_have: Vec<BTreeSet<u64>>,
    next: u64,
    length: usize,
    draws: StdRng,
    seen: Seen,
}

impl Churn {
    /// Starts the load.
    pub fn start(client: &Client, shape: Shape) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let counts: Vec<Arc<Mutex<Seen>>> = (0..shape.tasks).map(|_| Arc::default()).collect();
        let run = |(number, counts): (u64, &Arc<Mutex<Seen>>)| {
            let (client, is_over) = (client.clone(), Arc::clone(&is_over));
            let counts = Arc::clone(counts);
            let mut task = Task {
                first: number * shape.keys,
                may_have: vec![BTreeSet::new(); usize::try_from(shape.keys).unwrap_or(0)],
                next: 1,
                length: shape.length,
                draws: StdRng::seed_from_u64(number),
                seen: Seen::default(),
            };
            tokio::spawn(async move {
                while !is_over.load(Ordering::Acquire) {
                    task.step(&client).await?;
                    *counts.lock() = task.seen;
                }
                Ok(task)
            })
        };
        let tasks = (0..shape.tasks).zip(&counts).map(run).collect();
        Self {
            tasks,
            counts,
            is_over,
            shape,
        }
    }

    /// The counts of the load until now.
    pub fn seen(&self) -> Seen {
        let mut seen = Seen::default();
        for counts in &self.counts {
            seen += *counts.lock();
        }
        seen
    }

    /// Whether every task runs. A task that has ended by itself has found a fault. [`Churn::end`]
    /// returns it.
    pub fn goes_on(&self) -> bool {
        !self.tasks.iter().any(JoinHandle::is_finished)
    }

    /// Ends the load. Fails if any block had a content that its key cannot have.
    pub async fn end(self) -> anyhow::Result<Left> {
        self.is_over.store(true, Ordering::Release);
        let mut left = Left {
            tasks: Vec::new(),
            seen: Seen::default(),
        };
        for task in self.tasks {
            let task = task.await??;
            left.seen += task.seen;
            left.tasks.push(task);
        }
        ensure!(left.tasks.len() as u64 == self.shape.tasks);
        Ok(left)
    }
}

impl Left {
    /// Gets every key. Fails if a block has a content that its key cannot have, or if a key that
    /// exists cannot be got.
    pub async fn check(&mut self, client: &Client) -> anyhow::Result<Seen> {
        let mut seen = Seen::default();
        for task in &mut self.tasks {
            task.seen = Seen::default();
            for first in (0..task.may_have.len()).step_by(BATCH) {
                let batch: Vec<usize> = (first..task.may_have.len()).take(BATCH).collect();
                let keys: Vec<Key> = batch.iter().map(|at| task.key(*at)).collect();
                let present = client.exist(&keys, Leasing::None).await?.present;
                let found = task.get(client, &batch).await?;
                let missed = batch.iter().zip(present).zip(found);
                let missed = missed.filter(|((_, is_present), is_found)| *is_present && !is_found);
                let missed: Vec<Key> = missed.map(|((at, _), _)| task.key(*at)).collect();
                if missed.is_empty() {
                    continue;
                }
                // A block may be evicted between the two calls. Then it is absent now.
                let present = client.exist(&missed, Leasing::None).await?.present;
                for (key, is_present) in missed.iter().zip(present) {
                    ensure!(!is_present, "{key} exists and cannot be got");
                }
            }
            seen += task.seen;
        }
        Ok(seen)
    }
}

impl Task {
    fn key(&self, at: usize) -> Key {
        key(self.first + at as u64)
    }

    fn content(&self, at: usize, number: u64) -> Vec<u8> {
        let of = key((self.first + at as u64) << 32 | number);
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.extend(bytes_of(&of, self.length - bytes.len()));
        bytes
    }

    async fn step(&mut self, client: &Client) -> anyhow::Result<()> {
        let first = self.draws.random_range(0..=self.may_have.len() - BATCH);
        let batch: Vec<usize> = (first..first + BATCH).collect();
        match self.draws.random_range(0..10) {
            0..5 => self.put(client, &batch).await,
            5 => self.remove(client, &batch).await,
            _ => self.get(client, &batch).await.map(drop),
        }
    }

    async fn put(&mut self, client: &Client, batch: &[usize]) -> anyhow::Result<()> {
        let number = self.next;
        self.next += 1;
        let upsert = self.draws.random_bool(0.5);
        let put = |at: &usize| {
            let bytes = Region::from(self.content(*at, number)).whole();
            PutBlock::new(self.key(*at), bytes)
        };
        let options = PutOptions {
            upsert,
            timeout: Some(TIMEOUT),
            ..PutOptions::default()
        };
        let puts = batch.iter().map(put).collect();
        let outcomes = client.batch_put(puts, &options).await;
        for (at, outcome) in batch.iter().zip(outcomes) {
            let may_have = &mut self.may_have[*at];
            match outcome {
                Ok(PutOutcome::Stored { .. }) => {
                    *may_have = BTreeSet::from([number]);
                    self.seen.stored += 1;
                }
                Ok(PutOutcome::Present) if may_have.is_empty() => {
                    bail!("{} is present again after its removal", self.key(*at));
                }
                Ok(PutOutcome::Present) => {}
                Err(_) => {
                    may_have.insert(number);
                    self.seen.failed += 1;
                }
            }
        }
        Ok(())
    }

    async fn remove(&mut self, client: &Client, batch: &[usize]) -> anyhow::Result<()> {
        let keys: Vec<Key> = batch.iter().map(|at| self.key(*at)).collect();
        let Ok(removed) = client.remove(Remove::Keys(keys), true).await else {
            self.seen.failed += 1;
            return Ok(());
        };
        for (at, code) in batch.iter().zip(removed.codes) {
            if matches!(code, Code::Ok | Code::Missing) {
                self.may_have[*at].clear();
                self.seen.removed += 1;
            }
        }
        Ok(())
    }

    /// Returns whether each key was present.
    async fn get(&mut self, client: &Client, batch: &[usize]) -> anyhow::Result<Vec<bool>> {
        let targets: Vec<Slice> = batch.iter().map(|_| target(self.length)).collect();
        let gets = batch.iter().zip(&targets);
        let gets = gets.map(|(at, target)| GetBlock::new(self.key(*at), target.clone()));
        let options = GetOptions {
            release: true,
            timeout: Some(TIMEOUT * 4),
        };
        let outcomes = client.batch_get(gets.collect(), &options).await;
        let mut found = Vec::new();
        for ((at, target), outcome) in batch.iter().zip(&targets).zip(outcomes) {
            found.push(matches!(outcome, Ok(GetOutcome::Hit { .. })));
            match outcome {
                Ok(GetOutcome::Hit { .. }) => {
                    let mut bytes = target.to_vec();
                    bytes.truncate(self.length);
                    let is_it = |number: &u64| self.content(*at, *number) == bytes;
                    let may_have = &self.may_have[*at];
                    if !may_have.iter().any(is_it) {
                        let head = u64::from_le_bytes(bytes[..8].try_into()?);
                        bail!("{}: content {head}, may have {may_have:?}", self.key(*at));
                    }
                    self.seen.right += 1;
                }
                Ok(GetOutcome::Miss) => self.seen.missed += 1,
                Err(_) => self.seen.failed += 1,
            }
        }
        Ok(found)
    }
}
