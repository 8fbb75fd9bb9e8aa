//! One thread of a load: its client, its blocks, and its calls.

use super::blocks::Blocks;
use super::report::Tally;
use super::{Load, Operation};
use crate::connection::{connect_error, get_error, put_error, remove_error};
use crate::exit;
use crate::workload::Random;
use anyhow::bail;
use kvpool_client::{
    GetOptions, GetOutcome, Options, PutBlock, PutOptions, PutOutcome, Remove, RemoveError,
    blocking,
};
use kvpool_types::{Code, Key, Length};
use std::ops::Range;
use std::time::{Duration, Instant};

/// The keys of one removal, well below a master's limit.
const REMOVED_AT_ONCE: u64 = 2048;

/// How long the last removal waits for the leases of this thread's gets.
const LEASES_END: Duration = Duration::from_secs(30);
const LEASES_POLL: Duration = Duration::from_millis(20);

/// Draws are out of this many, so a share has six digits.
const PARTS: u64 = 1_000_000;

/// One thread of a load.
#[derive(Debug)]
pub(super) struct Worker {
    load: Load,
    client: blocking::Client,
    blocks: Blocks,
    /// The numbers of the blocks that are in the pool.
    live: Range<u64>,
    /// Whether removals are forced. A token without the role `admin` may not.
    forces: bool,
    /// The keys of blocks whose leases kept them from being removed.
    kept: Vec<Key>,
    /// The next block to get.
    cursor: u64,
    /// The keys requested so far that were never put.
    absent: u64,
    /// The blocks got so far, which decide the next one to verify.
    got: u64,
    random: Random,
}

impl Worker {
    /// Connects to the pool and writes the patterns of the blocks.
    pub(super) fn connect(load: Load, number: u32, options: Options) -> anyhow::Result<Self> {
        let options = Options {
            // With remembered locations a get would not ask the master.
            location_cache: 0,
            ..options
        };
        let client = blocking::Client::connect(options).map_err(connect_error)?;
        let largest = client.limits().max_block.0;
        if load.block_bytes > largest {
            let message = format!(
                "--block-size is {} bytes, but the pool takes blocks of at most {largest} bytes",
                load.block_bytes
            );
            return Err(exit::Usage(message).into());
        }
        let seed = format!("{}/{number}", load.seed);
        Ok(Self {
            blocks: Blocks::new(seed, load.block_bytes, load.batch)?,
            client,
            live: 0..0,
            forces: true,
            kept: Vec::new(),
            cursor: 0,
            absent: 0,
            got: 0,
            random: Random::new(u64::from(number)),
            load,
        })
    }

    /// Puts the blocks that gets request. The first failure is an error.
    pub(super) fn fill(&mut self) -> anyhow::Result<()> {
        if self.load.operation == Operation::Put {
            return Ok(());
        }
        let whole_calls = self.load.blocks_per_thread / self.load.batch;
        for _ in 0..whole_calls {
            let puts = self.next_puts()?;
            for outcome in self.client.batch_put(puts, &PutOptions::default()) {
                outcome.map_err(put_error)?;
            }
        }
        Ok(())
    }

    /// Calls until `until`.
    pub(super) fn load(&mut self, until: Instant) -> anyhow::Result<Tally> {
        let mut tally = Tally::new()?;
        while Instant::now() < until {
            let puts = match self.load.operation {
                Operation::Put => true,
                Operation::Get => false,
                Operation::Mixed => self.draws(self.load.put_share),
            };
            if puts {
                self.put(&mut tally)?;
            } else {
                self.get(&mut tally)?;
            }
        }
        Ok(tally)
    }

    /// Removes all blocks of this thread.
    pub(super) fn remove_all(mut self) -> anyhow::Result<()> {
        let until = Instant::now() + LEASES_END;
        loop {
            self.remove(self.live.end).map_err(remove_error)?;
            if self.kept.is_empty() {
                return Ok(());
            }
            if Instant::now() > until {
                bail!(
                    "{} blocks stay in the pool: their leases do not end",
                    self.kept.len()
                );
            }
            std::thread::sleep(LEASES_POLL);
        }
    }

    fn put(&mut self, tally: &mut Tally) -> anyhow::Result<()> {
        let kept = self.load.blocks_per_thread - self.load.batch;
        if self.live.end - self.live.start > kept
            && let Err(error) = self.remove(self.live.end - kept)
        {
            // The run continues, as after a failed put: the master may be back for the next call.
            tally.put.fail(error.code(), || remove_error(error));
            return Ok(());
        }
        let puts = self.next_puts()?;
        let begin = Instant::now();
        let outcomes = self.client.batch_put(puts, &PutOptions::default());
        let took = begin.elapsed();
        let mut stored = 0;
        for outcome in outcomes {
            match outcome {
                Ok(PutOutcome::Stored { .. }) => stored += 1,
                // The pool has it since an attempt without an answer.
                Ok(PutOutcome::Present) => tally.put.present += 1,
                Err(error) => tally.put.fail(error.code(), || put_error(error)),
            }
        }
        tally.put.add(took, stored, stored * self.load.block_bytes);
        Ok(())
    }

    fn get(&mut self, tally: &mut Tally) -> anyhow::Result<()> {
        let mut numbers = Vec::new();
        let mut gets = Vec::new();
        for at in 0..self.load.batch {
            let number = self.next_number();
            let key = match number {
                Some(number) => self.blocks.key(number),
                None => {
                    self.absent += 1;
                    self.blocks.absent_key(self.absent)
                }
            };
            self.got += u64::from(number.is_some());
            let verified = number.is_some() && self.got.is_multiple_of(self.load.verify_every);
            if verified {
                self.blocks.clear(at)?;
            }
            gets.push(self.blocks.get(key, at)?);
            numbers.push((number, verified));
        }
        let begin = Instant::now();
        let outcomes = self.client.batch_get(gets, &GetOptions::default());
        let took = begin.elapsed();
        let mut hits = 0;
        for (at, ((number, verified), outcome)) in (0..).zip(numbers.into_iter().zip(outcomes)) {
            match (outcome, number) {
                (Ok(GetOutcome::Hit { length, .. }), Some(number)) => {
                    hits += 1;
                    let mut right = length == Length(self.load.block_bytes);
                    if verified {
                        tally.verified += 1;
                        right &= self.blocks.is_right(number, at)?;
                    }
                    tally.wrong += u64::from(!right);
                }
                // A block under a key that was never put.
                (Ok(GetOutcome::Hit { .. }), None) => tally.wrong += 1,
                (Ok(GetOutcome::Miss), Some(_)) => tally.get.evicted += 1,
                (Ok(GetOutcome::Miss), None) => tally.get.absent += 1,
                (Err(error), _) => tally.get.fail(error.code(), || get_error(error)),
            }
        }
        tally.get.add(took, hits, hits * self.load.block_bytes);
        Ok(())
    }

    /// The next blocks to put, which are live from now on: a failed put may have stored a block.
    fn next_puts(&mut self) -> anyhow::Result<Vec<PutBlock>> {
        let numbers = self.live.end..self.live.end + self.load.batch;
        self.live.end = numbers.end;
        numbers.map(|number| self.blocks.put(number)).collect()
    }

    /// The number of the next block to get; `None` for a key that was never put.
    fn next_number(&mut self) -> Option<u64> {
        if self.live.is_empty() || !self.draws(self.load.hit_share) {
            return None;
        }
        let count = self.live.end - self.live.start;
        self.cursor += 1;
        Some(self.live.start + self.cursor % count)
    }

    /// Draws with this probability.
    fn draws(&mut self, share: f64) -> bool {
        (self.random.below(PARTS) as f64) < share * PARTS as f64
    }

    /// Removes the live blocks with numbers below `end`, and blocks that leases kept before. Blocks that the pool has
    /// evicted are no error.
    fn remove(&mut self, end: u64) -> Result<(), RemoveError> {
        while self.live.start < end || !self.kept.is_empty() {
            let through = end.min(self.live.start + REMOVED_AT_ONCE);
            let live = (self.live.start..through).map(|number| self.blocks.key(number));
            let keys: Vec<Key> = self.kept.iter().cloned().chain(live).collect();
            // Forced, where that is allowed: the only leases are those of this thread's gets.
            let removed = match self.client.remove(Remove::Keys(keys.clone()), self.forces) {
                Err(error) if self.forces && error.code() == Code::Forbidden => {
                    self.forces = false;
                    continue;
                }
                removed => removed?,
            };
            self.live.start = through;
            let outcomes = keys.into_iter().zip(removed.codes);
            let kept = outcomes.filter(|(_, code)| *code == Code::Leased);
            self.kept = kept.map(|(key, _)| key).collect();
            if self.live.start >= end {
                break;
            }
        }
        Ok(())
    }
}
