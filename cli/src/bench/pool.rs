//! Puts and gets through a pool.

use crate::connection::{control_error, get_error, put_error};
use crate::exit;
use crate::fill;
use crate::output;
use crate::stats::{Samples, gigabytes_a_second};
use anyhow::bail;
use kvpool_client::{Client, GetBlock, GetOptions, Lookup, Put, PutBlock, PutOptions, Remove};
use kvpool_transport::{Region, Slice};
use kvpool_types::key::Digest;
use kvpool_types::{Key, Length, Offset};
use sha2::{Digest as _, Sha256};
use std::time::{Duration, Instant};

/// How much a round of one case moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    block: Length,
    /// Blocks a call.
    batch: usize,
    /// Calls a round.
    calls: usize,
    /// Whether gets give their leases back, so that what a round removes is free for the next. A
    /// get that keeps them spares a call to the master.
    release: bool,
}

/// Batches, for throughput.
pub(crate) const LARGE: Shape = Shape {
    block: Length(1 << 20),
    batch: 32,
    calls: 4,
    release: true,
};

/// Single small blocks, for latency.
pub(crate) const SMALL: Shape = Shape {
    block: Length(4 << 10),
    batch: 1,
    calls: 256,
    release: false,
};

/// One case and what was measured of it.
#[derive(Debug)]
pub(crate) struct Case {
    shape: Shape,
    /// Apart from the memory that gets go to, so that no byte is right because it was never moved.
    source: Region,
    target: Region,
    put: Measured,
    get: Measured,
}

/// One operation.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// 10^9 bytes a second, one a round.
    pub(crate) rates: Vec<f64>,
    /// Every call of every round.
    pub(crate) calls: Samples,
}

/// A block of a round.
#[derive(Debug)]
struct Block {
    digest: Digest,
    key: Key,
    source: Slice,
    target: Slice,
}

impl Shape {
    /// The blocks of a round.
    pub(crate) const fn blocks(&self) -> usize {
        self.batch * self.calls
    }

    /// The bytes of one.
    pub(crate) const fn block_bytes(&self) -> usize {
        self.block.as_usize()
    }

    /// The bytes of a round.
    pub(crate) const fn bytes(&self) -> u64 {
        self.blocks() as u64 * self.block.0
    }
}

impl Case {
    /// A case with nothing measured.
    pub(crate) fn new(shape: Shape) -> Self {
        Self {
            shape,
            source: Region::allocate(Length(shape.bytes())),
            target: Region::allocate(Length(shape.bytes())),
            put: Measured::default(),
            get: Measured::default(),
        }
    }

    /// What was measured, by name.
    pub(crate) fn operations(&self) -> [(String, &Measured); 2] {
        let what = format!(
            "{} x {}",
            self.shape.batch,
            output::bytes(self.shape.block.0)
        );
        [
            (format!("put {what}"), &self.put),
            (format!("get {what}"), &self.get),
        ]
    }

    /// Puts, gets, checks and removes fresh blocks.
    pub(crate) async fn round(&mut self, client: &Client, round: u32) -> anyhow::Result<()> {
        let blocks = self.blocks(round);
        for block in &blocks {
            fill::fill(&block.digest, self.shape.block.0, |offset, bytes| {
                block.source.write_at(Offset(offset), bytes);
            });
        }
        let mut spent = Duration::ZERO;
        for batch in blocks.chunks(self.shape.batch) {
            let took = put(client, batch).await?;
            self.put
                .calls
                .add(took, self.shape.block.0 * batch.len() as u64);
            spent += took;
        }
        self.put
            .rates
            .push(gigabytes_a_second(self.shape.bytes(), spent));
        let mut spent = Duration::ZERO;
        for batch in blocks.chunks(self.shape.batch) {
            let took = get(client, batch, self.shape.release).await?;
            self.get
                .calls
                .add(took, self.shape.block.0 * batch.len() as u64);
            spent += took;
        }
        self.get
            .rates
            .push(gigabytes_a_second(self.shape.bytes(), spent));
        let wrong = blocks.iter().filter(|block| {
            fill::first_wrong(&block.digest, self.shape.block.0, |offset, bytes| {
                block.target.read_at(Offset(offset), bytes);
            })
            .is_some()
        });
        let wrong = wrong.count() as u64;
        let keys = blocks.into_iter().map(|block| block.key).collect();
        client
            .remove(Remove::Keys(keys), true)
            .await
            .map_err(control_error)?;
        if wrong > 0 {
            return Err(exit::WrongBytes { blocks: wrong }.into());
        }
        Ok(())
    }

    fn blocks(&self, round: u32) -> Vec<Block> {
        let length = self.shape.block;
        // The process id keeps two runs at once apart.
        let seed = format!("kvctl bench {} {round} {length}", std::process::id());
        (0..self.shape.blocks() as u64)
            .map(|number| {
                let mut hash = Sha256::new_with_prefix(&seed);
                hash.update(number.to_le_bytes());
                let digest: Digest = hash.finalize().into();
                let part = |region: &Region| {
                    region
                        .slice(Offset(number * length.0), length)
                        .expect("invariant: the memory holds all blocks of a round")
                };
                Block {
                    digest,
                    key: Key::from_digest(digest),
                    source: part(&self.source),
                    target: part(&self.target),
                }
            })
            .collect()
    }
}

async fn put(client: &Client, blocks: &[Block]) -> anyhow::Result<Duration> {
    let puts = blocks
        .iter()
        .map(|block| PutBlock::new(block.key.clone(), block.source.clone()))
        .collect();
    let begin = Instant::now();
    let outcomes = client.batch_put(puts, &PutOptions::default()).await;
    let took = begin.elapsed();
    for outcome in outcomes {
        if outcome.map_err(put_error)? == Put::Present {
            bail!("a key of this run is in the pool already");
        }
    }
    Ok(took)
}

async fn get(client: &Client, blocks: &[Block], release: bool) -> anyhow::Result<Duration> {
    let options = GetOptions {
        release,
        ..GetOptions::default()
    };
    let gets = blocks
        .iter()
        .map(|block| GetBlock::new(block.key.clone(), block.target.clone()))
        .collect();
    let begin = Instant::now();
    let outcomes = client.batch_get(gets, &options).await;
    let took = begin.elapsed();
    for (block, outcome) in blocks.iter().zip(outcomes) {
        if outcome.map_err(get_error)? == Lookup::Miss {
            bail!(
                "{} was evicted: the pool is too small or too busy",
                block.key
            );
        }
    }
    Ok(took)
}
