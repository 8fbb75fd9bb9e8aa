//! Timed puts, gets and removals.

use super::blocks::{Memory, is_right, key};
use super::protocol::Set;
use super::serve::Clock;
use crate::window::{Measured, Meter};
use anyhow::bail;
use kvctl::connection::{get_error, put_error, remove_error};
use kvctl::exit;
use kvpool_client::{
    GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, PutOutcome, Region, Remove, blocking,
};
use kvpool_types::Length;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Puts of new blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Puts<'a> {
    pub(super) client: &'a blocking::Client,
    /// A client that gets the blocks of each call while the next call puts. One call more is made for it.
    pub(super) reader: Option<&'a blocking::Client>,
    /// Whether the pool may evict the oldest blocks before the last ones are put.
    pub(super) evicts: bool,
    pub(super) seed: &'a str,
    pub(super) set: &'a Set,
    /// Blocks of one call.
    pub(super) batch: u64,
}

/// Gets of blocks that are present.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gets<'a> {
    pub(super) client: &'a blocking::Client,
    pub(super) seed: &'a str,
    pub(super) set: &'a Set,
    /// Blocks of one call.
    pub(super) batch: u64,
    /// The first call begins this many blocks after the oldest one.
    pub(super) from: u64,
    /// The number of blocks to get from; zero means all.
    pub(super) among: u64,
}

impl Puts<'_> {
    /// Puts for one window. It also returns the number of blocks, and reads some of them back afterwards.
    pub(super) fn run(
        self,
        memory: &mut Memory,
        clock: Clock<'_>,
    ) -> anyhow::Result<(Measured, u64)> {
        let Self { seed, set, .. } = self;
        memory.fill(seed, set)?;
        let mut next = set.live.end;
        let memory = &*memory;
        let measured = std::thread::scope(|scope| {
            let (put, reading) = match self.reader {
                Some(reader) => {
                    // The reader takes a call's blocks before the next call begins. A slow reader delays the
                    // puts between two calls, which is not measured.
                    let (put, told) = mpsc::sync_channel(0);
                    let reading = scope.spawn(move || self.read(reader, memory, told));
                    (Some(put), Some(reading))
                }
                None => (None, None),
            };
            // The reader has ended only if a get failed; its error is returned below.
            let is_read = |first| put.as_ref().is_none_or(|put| put.send(first).is_ok());
            if self.reader.is_some() {
                // Not timed: it gives the reader blocks to get beside the first timed call.
                self.put(memory, next)?;
                is_read(next);
                next += self.batch;
            }
            let measured = clock.time(|window| {
                let mut meter = Meter::default();
                while !meter.fills(window) {
                    meter.add(self.put(memory, next)?, set.block * self.batch);
                    if !is_read(next) {
                        break;
                    }
                    next += self.batch;
                }
                Ok(meter)
            });
            drop(put);
            if let Some(reading) = reading {
                match reading.join() {
                    Ok(read) => read?,
                    Err(_) => bail!("the reader's thread panicked"),
                }
            }
            measured
        })?;
        let put = next - set.live.end;
        self.read_back(next - 1)?;
        if !self.evicts {
            self.read_back(set.live.end)?;
        }
        Ok((measured, put))
    }

    /// Puts blocks and removes them with one call, for one window. Only the removals are timed. It also
    /// returns the number of blocks. The earlier blocks of the set are removed first.
    pub(super) fn run_removals(
        self,
        memory: &mut Memory,
        clock: Clock<'_>,
    ) -> anyhow::Result<(Measured, u64)> {
        let Self {
            client, seed, set, ..
        } = self;
        super::serve::remove(client, seed, set, set.live.count())?;
        memory.fill(seed, set)?;
        let mut next = set.live.end;
        let measured = clock.time(|window| {
            let mut meter = Meter::default();
            while !meter.fills(window) {
                let blocks = self.blocks(memory, next)?;
                for outcome in client.batch_put(blocks, &PutOptions::default()) {
                    outcome.map_err(put_error)?;
                }
                let keys = (next..next + self.batch).map(|number| key(seed, set, number));
                let keys = Remove::Keys(keys.collect());
                let begin = Instant::now();
                let removed = client.remove(keys, false).map_err(remove_error);
                meter.add(begin.elapsed(), set.block * self.batch);
                if removed?.removed != self.batch {
                    bail!("a block of this run was missing when it was to be removed");
                }
                next += self.batch;
            }
            Ok(meter)
        })?;
        Ok((measured, next - set.live.end))
    }

    /// Gets the blocks of each call; `told` has the number of its first block. The leases end with the gets.
    fn read(
        &self,
        reader: &blocking::Client,
        memory: &Memory,
        told: mpsc::Receiver<u64>,
    ) -> anyhow::Result<()> {
        let Self { seed, set, .. } = self;
        let options = GetOptions {
            release: true,
            ..GetOptions::default()
        };
        for first in told {
            let gets = (first..first + self.batch).map(|number| {
                Ok(GetBlock {
                    key: key(seed, set, number),
                    buffers: memory.target(set, number)?,
                })
            });
            let gets = gets.collect::<anyhow::Result<_>>()?;
            check_hits(reader.batch_get(gets, &options), set)?;
            check(is_right(seed, set, first, &memory.target(set, first)?))?;
        }
        Ok(())
    }

    /// Puts the blocks of one call, the first of them `next`. Returns the time of the call.
    fn put(&self, memory: &Memory, next: u64) -> anyhow::Result<Duration> {
        let blocks = self.blocks(memory, next)?;
        let begin = Instant::now();
        let outcomes = self.client.batch_put(blocks, &PutOptions::default());
        let took = begin.elapsed();
        for outcome in outcomes {
            if outcome.map_err(put_error)? == PutOutcome::Present {
                bail!("a key of this run is already in the pool");
            }
        }
        Ok(took)
    }

    fn blocks(&self, memory: &Memory, next: u64) -> anyhow::Result<Vec<PutBlock>> {
        let Self { seed, set, .. } = self;
        (next..next + self.batch)
            .map(|number| {
                memory.stamp(seed, set, number)?;
                Ok(PutBlock {
                    key: key(seed, set, number),
                    parent: (set.chained && number > 0).then(|| key(seed, set, number - 1)),
                    buffers: memory.source(set, number)?,
                })
            })
            .collect()
    }

    fn read_back(&self, number: u64) -> anyhow::Result<()> {
        let Self { seed, set, .. } = self;
        let whole = Region::allocate(Length(set.block)).whole();
        let gets = vec![GetBlock::new(key(seed, set, number), whole.clone())];
        // The lease is released, because the block is removed soon.
        let options = GetOptions {
            release: true,
            ..GetOptions::default()
        };
        check_hits(self.client.batch_get(gets, &options), set)?;
        check(is_right(seed, set, number, &[whole]))
    }
}

impl Gets<'_> {
    /// Gets for one window. It verifies the stamp of each block, and all bytes of two blocks at the end.
    pub(super) fn run(self, memory: &mut Memory, clock: Clock<'_>) -> anyhow::Result<Measured> {
        let Self {
            client, seed, set, ..
        } = self;
        let count = match self.among {
            0 => set.live.count(),
            among => among.min(set.live.count()),
        };
        if count < self.batch {
            bail!("{} has {count} blocks: too few for a batch", set.tag);
        }
        let options = GetOptions::default();
        if self.among > 0 {
            for from in 0..count {
                let gets = self.gets(memory, count, from, 1)?.1;
                check_hits(client.batch_get(gets, &options), set)?;
            }
        }
        let mut from = self.from;
        let mut last = Vec::new();
        let measured = clock.time(|window| {
            let mut meter = Meter::default();
            while !meter.fills(window) {
                let (numbers, gets) = self.gets(memory, count, from, self.batch)?;
                for number in &numbers {
                    memory.forget(set, *number)?;
                }
                let begin = Instant::now();
                let outcomes = client.batch_get(gets, &options);
                meter.add(begin.elapsed(), set.block * self.batch);
                check_hits(outcomes, set)?;
                for number in &numbers {
                    check(memory.is_stamped(seed, set, *number)?)?;
                }
                from += self.batch;
                last = numbers;
            }
            Ok(meter)
        })?;
        for number in [last.first(), last.last()].into_iter().flatten() {
            let target = memory.target(set, *number)?;
            check(is_right(seed, set, *number, &target))?;
        }
        Ok(measured)
    }

    fn gets(
        &self,
        memory: &Memory,
        count: u64,
        from: u64,
        batch: u64,
    ) -> anyhow::Result<(Vec<u64>, Vec<GetBlock>)> {
        let Self { seed, set, .. } = self;
        let numbers: Vec<u64> = (from..from + batch)
            .map(|at| set.live.first + at % count)
            .collect();
        let gets = numbers.iter().map(|number| {
            Ok(GetBlock {
                key: key(seed, set, *number),
                buffers: memory.target(set, *number)?,
            })
        });
        let gets = gets.collect::<anyhow::Result<_>>()?;
        Ok((numbers, gets))
    }
}

fn check_hits(
    outcomes: Vec<Result<GetOutcome, kvpool_client::GetError>>,
    set: &Set,
) -> anyhow::Result<()> {
    for outcome in outcomes {
        match outcome.map_err(get_error)? {
            GetOutcome::Hit { length, .. } if length == Length(set.block) => {}
            GetOutcome::Hit { .. } => check(false)?,
            GetOutcome::Miss => bail!("a block was evicted: the pool is too small or too busy"),
        }
    }
    Ok(())
}

/// Ends the run if the bytes are wrong.
pub(super) fn check(right: bool) -> anyhow::Result<()> {
    if right {
        Ok(())
    } else {
        Err(exit::WrongBytes { blocks: 1 }.into())
    }
}
