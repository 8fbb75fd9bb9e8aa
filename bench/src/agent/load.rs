//! Several clients that put at once and continue after failed puts. The cases about waiting use it.

use super::blocks::{Memory, digest, is_right, key};
use super::moves::check;
use super::protocol::{Loaded, Set, Writer};
use crate::window::{nanos, now_ns};
use anyhow::{Context as _, bail};
use kvctl::connection::get_error;
use kvpool_client::{
    GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, PutOutcome, Region, Slice, blocking,
};
use kvpool_types::{Length, Offset};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Runs every writer on a thread of its own for a time, or until a file exists. A call in progress at the end
/// counts.
pub(super) fn run(
    seed: &str,
    writers: &[(&Writer, &blocking::Client)],
    lasts: Duration,
    until: Option<PathBuf>,
) -> anyhow::Result<Vec<Loaded>> {
    // The memory comes first, because filling it takes time.
    let memories = writers.iter().map(|(writer, _)| {
        let Writer { set, .. } = writer;
        let mut memory = Memory::new(set.slots * set.block, true);
        memory.fill(seed, set)?;
        Ok(memory)
    });
    let memories: Vec<Memory> = memories.collect::<anyhow::Result<_>>()?;
    let end = Instant::now() + lasts;
    let is_over = || Instant::now() >= end || until.as_ref().is_some_and(|file| file.exists());
    std::thread::scope(|scope| {
        let threads = writers
            .iter()
            .zip(&memories)
            .map(|((writer, client), memory)| {
                scope.spawn(move || write(seed, writer, client, memory, &is_over))
            });
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(loaded) => loaded,
            Err(_) => bail!("a writer's thread panicked"),
        });
        joined.collect()
    })
}

/// The blocks of one get of a shuffle.
const SHUFFLED_AT_ONCE: usize = 64;

/// Gets each live block of a set once, in the order of the key digests. Evicted blocks are skipped. It is an
/// error when none is present.
pub(super) fn shuffle(seed: &str, client: &blocking::Client, set: &Set) -> anyhow::Result<()> {
    let mut numbers: Vec<u64> = (set.live.first..set.live.end).collect();
    numbers.sort_unstable_by_key(|number| digest(seed, set, *number));
    let room = Region::allocate(Length(set.block * SHUFFLED_AT_ONCE as u64));
    let options = GetOptions {
        release: true,
        ..GetOptions::default()
    };
    let mut hits = 0;
    for some in numbers.chunks(SHUFFLED_AT_ONCE) {
        let gets = (0..).zip(some).map(|(place, number)| {
            let target = room.slice(Offset(place * set.block), Length(set.block));
            let target = target.context("the buffer has no room for the block")?;
            Ok(GetBlock::new(key(seed, set, *number), target))
        });
        let gets = gets.collect::<anyhow::Result<_>>()?;
        for outcome in client.batch_get(gets, &options) {
            if let GetOutcome::Hit { .. } = outcome.map_err(get_error)? {
                hits += 1;
            }
        }
    }
    if hits == 0 {
        bail!(
            "none of the {} blocks that were put is in the pool",
            numbers.len()
        );
    }
    Ok(())
}

fn write(
    seed: &str,
    writer: &Writer,
    client: &blocking::Client,
    memory: &Memory,
    is_over: &(dyn Fn() -> bool + Sync),
) -> anyhow::Result<Loaded> {
    let Writer { set, batch, .. } = writer;
    let mut loaded = Loaded::default();
    let mut next = set.live.end;
    let mut last = None;
    while !is_over() {
        let blocks = (next..next + batch).map(|number| {
            memory.stamp(seed, set, number)?;
            Ok(PutBlock {
                key: key(seed, set, number),
                parent: None,
                buffers: memory.source(set, number)?,
            })
        });
        let blocks = blocks.collect::<anyhow::Result<_>>()?;
        let begin = Instant::now();
        let outcomes = client.batch_put(blocks, &PutOptions::default());
        loaded.longest_ns = loaded.longest_ns.max(nanos(begin.elapsed()));
        let mut put = 0;
        for (number, outcome) in (next..).zip(outcomes) {
            match outcome {
                // The block is present if the answer to its commit was lost with the master. No other call
                // puts this key.
                Ok(PutOutcome::Stored { .. } | PutOutcome::Present) => {
                    put += 1;
                    last = Some(number);
                }
                Err(_) => loaded.refused += 1,
            }
        }
        loaded.put += put;
        if put == *batch {
            loaded.ends_ns.push(now_ns());
        }
        next += batch;
    }
    if let Some(number) = last {
        verify(seed, writer, client, number)?;
    }
    Ok(loaded)
}

/// Compares a block with the bytes that were put. An evicted block is not an error.
fn verify(
    seed: &str,
    writer: &Writer,
    client: &blocking::Client,
    number: u64,
) -> anyhow::Result<()> {
    let set = &writer.set;
    let whole: Slice = Region::allocate(Length(set.block)).whole();
    let gets = vec![GetBlock::new(key(seed, set, number), whole.clone())];
    let options = GetOptions {
        release: true,
        ..GetOptions::default()
    };
    match client.batch_get(gets, &options).pop() {
        Some(Ok(GetOutcome::Hit { length, .. })) => {
            check(length == Length(set.block) && is_right(seed, set, number, &[whole]))
        }
        _ => Ok(()),
    }
}
