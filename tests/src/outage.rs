//! A load that continues during faults, and a record of what its clients noticed.
//!
//! Writers put new blocks. Readers get blocks that were put before: some use cached locations, as
//! workers do, and others ask the master every time. Every operation is recorded with its start,
//! its end and its outcome. From that, [`Report`] computes the longest outages and finds errors.

mod report;

pub use report::{Event, Gaps, Report, Summary};

use crate::blocks::{is_right, key, put_all, source, target};
use kvpool_client::{
    Client, GetBlock, GetOptions, GetOutcome, Options as ClientOptions, PutBlock, PutOptions,
};
use kvpool_types::{Code, Epoch};
use rand::Rng;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// The parameters of the load.
#[derive(Clone, Debug)]
pub struct Load {
    /// The number of clients that put new blocks, one at a time.
    pub writers: usize,
    /// The number of clients that get blocks, of each of the two kinds.
    pub readers: usize,
    /// The length of a block in bytes.
    pub length: usize,
    /// The number of blocks before the load begins.
    pub standing: u64,
    /// How long each client pauses between two operations, so that the pool holds all blocks.
    pub rest: Duration,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            writers: 3,
            readers: 2,
            length: 1024,
            standing: 64,
            rest: Duration::from_millis(5),
        }
    }
}

/// The kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A put of a new block.
    Put,
    /// A get by a client with cached locations.
    Get,
    /// A get by a client that asks the master every time.
    Lookup,
}

impl What {
    /// All kinds of operations.
    pub const ALL: [Self; 3] = [Self::Put, Self::Get, Self::Lookup];
}

/// The outcome of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Success: the put is acknowledged, or the bytes are right.
    Done,
    /// A miss of a block that was put.
    Missed,
    /// Bytes that are not the block's.
    Wrong,
    /// An error.
    Failed(Code, String),
}

/// One operation.
#[derive(Clone, Debug)]
pub struct Operation {
    /// The kind.
    pub what: What,
    /// The number of the block.
    pub block: u64,
    /// The time at which it began.
    pub start: Instant,
    /// The time of its answer.
    pub end: Instant,
    /// The outcome.
    pub outcome: Outcome,
    /// The highest epoch that the client knew at that time.
    pub epoch: Epoch,
}

/// A running load. Dropping it ends it.
#[derive(Debug)]
pub struct Running {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
    events: Vec<Event>,
    started: Instant,
}

#[derive(Debug)]
struct Shared {
    load: Load,
    stop: AtomicBool,
    next: AtomicU64,
    operations: Mutex<Vec<Operation>>,
}

impl Load {
    /// Puts the standing blocks and begins. Each client connects with these options.
    pub async fn start(self, options: &ClientOptions) -> anyhow::Result<Running> {
        put_all(
            &Client::connect(options.clone()).await?,
            0..self.standing,
            self.length,
        )
        .await?;
        let forgetful = ClientOptions {
            location_cache: 0,
            ..options.clone()
        };
        let kinds = [
            (What::Put, self.writers, options),
            (What::Get, self.readers, options),
            (What::Lookup, self.readers, &forgetful),
        ];
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            next: AtomicU64::new(self.standing),
            operations: Mutex::default(),
            load: self,
        });
        let mut tasks = JoinSet::new();
        for (what, count, options) in kinds {
            for _ in 0..count {
                let client = Client::connect(options.clone()).await?;
                let shared = Arc::clone(&shared);
                tasks.spawn(async move { shared.go_on(&client, what).await });
            }
        }
        Ok(Running {
            shared,
            tasks,
            events: Vec::new(),
            started: Instant::now(),
        })
    }
}

impl Running {
    /// Records that the test is about to disturb the pool.
    pub fn event(&mut self, name: &str) -> Instant {
        let at = Instant::now();
        self.events.push(Event {
            name: name.to_owned(),
            at,
        });
        at
    }

    /// Waits until an operation of each of these kinds that began after `since` has succeeded. If
    /// `limit` passes, the error names the other kinds.
    pub async fn wait_success(
        &self,
        kinds: &[What],
        since: Instant,
        limit: Duration,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            let without: Vec<What> = kinds
                .iter()
                .copied()
                .filter(|what| !self.shared.succeeded(*what, since))
                .collect();
            if without.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                anyhow::bail!(
                    "no success of {without:?} within {limit:?}; the last failures: {:#?}",
                    self.shared.last_failures()
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends the load when the operations in progress have ended, and returns the report.
    pub async fn end(mut self) -> anyhow::Result<Report> {
        self.shared.stop.store(true, Ordering::Release);
        while let Some(ended) = self.tasks.join_next().await {
            ended?;
        }
        let mut operations = self.shared.operations();
        operations.sort_by_key(|operation| operation.end);
        Ok(Report {
            started: self.started,
            ended: Instant::now(),
            events: std::mem::take(&mut self.events),
            operations,
            standing: self.shared.load.standing,
            length: self.shared.load.length,
        })
    }
}

impl Shared {
    async fn go_on(&self, client: &Client, what: What) {
        while !self.stop.load(Ordering::Acquire) {
            let block = match what {
                What::Put => self.next.fetch_add(1, Ordering::Relaxed),
                _ => rand::rng().random_range(0..self.load.standing),
            };
            let start = Instant::now();
            let outcome = match what {
                What::Put => self.put(client, block).await,
                What::Get => self.get(client, block, false).await,
                What::Lookup => self.get(client, block, true).await,
            };
            let operation = Operation {
                what,
                block,
                start,
                end: Instant::now(),
                outcome,
                epoch: client.epoch(),
            };
            self.lock().push(operation);
            tokio::time::sleep(self.load.rest).await;
        }
    }

    async fn put(&self, client: &Client, block: u64) -> Outcome {
        let key = key(block);
        let put = PutBlock::new(key.clone(), source(&key, self.load.length));
        let outcome = client
            .batch_put(vec![put], &PutOptions::default())
            .await
            .remove(0);
        match outcome {
            Ok(_) => Outcome::Done,
            Err(error) => Outcome::Failed(error.code(), error.to_string()),
        }
    }

    async fn get(&self, client: &Client, block: u64, release: bool) -> Outcome {
        let key = key(block);
        let target = target(self.load.length);
        let get = GetBlock::new(key.clone(), target.clone());
        let options = GetOptions {
            release,
            ..GetOptions::default()
        };
        match client.batch_get(vec![get], &options).await.remove(0) {
            Ok(GetOutcome::Hit { .. }) if is_right(&key, &target, self.load.length) => {
                Outcome::Done
            }
            Ok(GetOutcome::Hit { .. }) => Outcome::Wrong,
            Ok(GetOutcome::Miss) => Outcome::Missed,
            Err(error) => Outcome::Failed(error.code(), error.to_string()),
        }
    }

    fn succeeded(&self, what: What, since: Instant) -> bool {
        let is_one = |operation: &&Operation| {
            operation.what == what && operation.outcome == Outcome::Done && operation.start >= since
        };
        self.lock().iter().rev().find(is_one).is_some()
    }

    fn last_failures(&self) -> Vec<Operation> {
        let has_failed = |operation: &&Operation| operation.outcome != Outcome::Done;
        let operations = self.lock();
        operations
            .iter()
            .rev()
            .filter(has_failed)
            .take(5)
            .cloned()
            .collect()
    }

    fn operations(&self) -> Vec<Operation> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Operation>> {
        self.operations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
