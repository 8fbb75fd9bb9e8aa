//! The worker's process: reads commands, executes them on the pool, and answers.

use super::protocol::{Answer, Call, Command, Decoded, Prefilled};
use crate::connection::{Connection, control_error};
use crate::fill;
use crate::remote::Reply;
use crate::workload::Prompt;
use anyhow::Context as _;
use kvpool_client::{
    Client, GetBlock, GetError, GetOptions, GetOutcome, Lease, PutBlock, PutOptions, PutOutcome,
};
use kvpool_transport::{Region, Slice};
use kvpool_types::key::Digest;
use kvpool_types::{Code, Key, Length, Offset};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroUsize;
use std::time::Instant;
use tokio::io::{AsyncBufReadExt, BufReader};

/// The role of a worker in messages. Every worker accepts all commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Prefill,
    Decode,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// The settings of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The blocks that it works with.
    pub(crate) blocks: Blocks,
    /// The pool that it works on.
    pub(crate) connection: Connection,
}

/// The size of every block.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Blocks {
    /// In bytes.
    #[arg(long = "block-bytes")]
    pub(crate) bytes: u64,
    /// In tokens.
    #[arg(long = "block-tokens")]
    pub(crate) tokens: NonZeroUsize,
}

impl Options {
    /// The command line of such a worker.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec![
            "worker".into(),
            "--block-bytes".into(),
            self.blocks.bytes.to_string().into(),
            "--block-tokens".into(),
            self.blocks.tokens.to_string().into(),
        ];
        arguments.extend(self.connection.arguments());
        arguments
    }
}

/// Answers commands until the input ends.
pub(crate) async fn run(blocks: Blocks, connection: &Connection) -> anyhow::Result<()> {
    let mut worker = match Worker::connect(blocks, connection).await {
        Ok(worker) => worker,
        Err(error) => return Reply::<Answer>::of(Err(error)).send(),
    };
    Reply::Done(Answer::Ready).send()?;
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await.context("cannot read commands")? {
        let command = serde_json::from_str(&line).context("invalid command")?;
        let reply = Reply::of(worker.execute(command).await);
        reply.send()?;
        if reply.is_last() {
            return Ok(());
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Worker {
    client: Client,
    seed: Digest,
    blocks: Blocks,
    /// The memory in which blocks are computed, got and verified. It is as large as the longest prompt so
    /// far.
    memory: Region,
    /// The leases of prefills, by request.
    leases: HashMap<u64, Lease>,
}

/// One block of a prompt.
#[derive(Clone, Debug)]
struct Block {
    digest: Digest,
    key: Key,
    memory: Slice,
}

impl Worker {
    async fn connect(blocks: Blocks, connection: &Connection) -> anyhow::Result<Self> {
        let options = connection.options();
        Ok(Self {
            seed: options.namespace.seed(),
            client: connection.connect().await?,
            blocks,
            memory: Region::allocate(Length(blocks.bytes)),
            leases: HashMap::new(),
        })
    }

    async fn execute(&mut self, command: Command) -> anyhow::Result<Answer> {
        match command {
            Command::Prefill { request, prompt } => {
                self.prefill(request, &prompt).await.map(Answer::Prefilled)
            }
            Command::Decode { prompt } => Ok(Answer::Decoded(self.decode(&prompt).await)),
            Command::Release { request } => {
                if let Some(lease) = self.leases.remove(&request) {
                    // If the release fails, the lease expires.
                    if let Err(error) = lease.release().await {
                        tracing::warn!(%error, "cannot release a lease");
                    }
                }
                Ok(Answer::Released)
            }
        }
    }

    async fn prefill(&mut self, request: u64, prompt: &Prompt) -> anyhow::Result<Prefilled> {
        let blocks = self.lay_out(prompt);
        let mut done = Prefilled {
            blocks: blocks.len() as u64,
            ..Prefilled::default()
        };
        if blocks.is_empty() {
            return Ok(done);
        }
        let keys: Vec<Key> = blocks.iter().map(|block| block.key.clone()).collect();
        let begin = Instant::now();
        let prefix = self
            .client
            .match_prefix(&keys)
            .await
            .map_err(control_error)?;
        done.match_prefix = Some(Call::new(begin.elapsed(), 0));
        done.hits = prefix.blocks as u64;
        self.leases.insert(request, prefix.lease);

        let (hits, rest) = blocks.split_at(prefix.blocks.min(blocks.len()));
        let got = self.get(hits).await;
        done.get = got.call;
        done.wrong = got.wrong;
        done.lost = got.missing;
        done.unreadable = got.failed;
        self.compute_and_put(hits.last(), rest, &mut done).await;
        Ok(done)
    }

    /// Fills the blocks with the bytes of their digests and puts them. `before` is the block before the first
    /// one.
    async fn compute_and_put(
        &self,
        before: Option<&Block>,
        blocks: &[Block],
        done: &mut Prefilled,
    ) {
        if blocks.is_empty() {
            return;
        }
        let mut parent = before.map(|block| block.key.clone());
        let mut puts = Vec::with_capacity(blocks.len());
        for block in blocks {
            fill::fill(&block.digest, self.blocks.bytes, |offset, bytes| {
                block.memory.write_at(Offset(offset), bytes);
            });
            puts.push(PutBlock {
                key: block.key.clone(),
                parent: parent.replace(block.key.clone()),
                buffers: vec![block.memory.clone()],
            });
        }
        let begin = Instant::now();
        let outcomes = self.client.batch_put(puts, &PutOptions::default()).await;
        let took = begin.elapsed();
        for outcome in outcomes {
            match outcome {
                Ok(PutOutcome::Stored { .. }) => done.put += 1,
                Ok(PutOutcome::Present) => done.existed += 1,
                Err(error) => count(&mut done.refused, error.code()),
            }
        }
        done.put_call = Some(Call::new(took, done.put * self.blocks.bytes));
    }

    async fn decode(&mut self, prompt: &Prompt) -> Decoded {
        let blocks = self.lay_out(prompt);
        self.get(&blocks).await
    }

    /// Gets blocks and verifies every byte.
    async fn get(&self, blocks: &[Block]) -> Decoded {
        let mut done = Decoded::default();
        if blocks.is_empty() {
            return done;
        }
        for block in blocks {
            forget(&block.memory);
        }
        let gets = blocks
            .iter()
            .map(|block| GetBlock::new(block.key.clone(), block.memory.clone()))
            .collect();
        let options = GetOptions {
            // A request gets a block of its prompt once, so a cached location is useless. A lease after the
            // get would protect the block against eviction.
            release: true,
            ..GetOptions::default()
        };
        let begin = Instant::now();
        let outcomes = self.client.batch_get(gets, &options).await;
        let took = begin.elapsed();
        for (block, outcome) in blocks.iter().zip(outcomes) {
            match outcome {
                Ok(GetOutcome::Hit { length, .. }) => {
                    done.checked += 1;
                    if length != Length(self.blocks.bytes) || !self.is_right(block) {
                        tracing::error!(key = %block.key, %length, "data corruption: bytes differ from what was put");
                        done.wrong += 1;
                    }
                }
                Ok(GetOutcome::Miss) => done.missing += 1,
                Err(error) => count(&mut done.failed, GetError::code(&error)),
            }
        }
        done.call = Some(Call::new(took, done.checked * self.blocks.bytes));
        done
    }

    fn is_right(&self, block: &Block) -> bool {
        fill::first_wrong(&block.digest, self.blocks.bytes, |offset, bytes| {
            block.memory.read_at(Offset(offset), bytes);
        })
        .is_none()
    }

    /// The prompt's blocks, each with its place in this worker's memory.
    fn lay_out(&mut self, prompt: &Prompt) -> Vec<Block> {
        let digests = prompt.digests(self.seed, self.blocks.tokens);
        let needed = Length(self.blocks.bytes * digests.len() as u64);
        if self.memory.length() < needed {
            self.memory = Region::allocate(needed);
        }
        (0..)
            .step_by(Length(self.blocks.bytes).as_usize())
            .zip(digests)
            .map(|(offset, digest)| Block {
                digest,
                key: Key::from_digest(digest),
                memory: self
                    .memory
                    .slice(Offset(offset), Length(self.blocks.bytes))
                    .expect("invariant: the memory is as long as all blocks"),
            })
            .collect()
    }
}

/// Overwrites the first and the last bytes, so the bytes of an earlier request are not right.
fn forget(memory: &Slice) {
    // No block of this length begins or ends with so many zeros.
    const WRONG: [u8; 32] = [0; 32];
    let length = memory.length().as_usize();
    let (wrong, _) = WRONG.split_at(WRONG.len().min(length));
    memory.write_at(Offset(0), wrong);
    memory.write_at(Offset((length - wrong.len()) as u64), wrong);
}

fn count(counts: &mut BTreeMap<String, u64>, code: Code) {
    *counts.entry(code.label().to_owned()).or_default() += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_an_earlier_request_are_not_right() {
        let digest = [7; 32];
        for length in [1, 31, 64, 70_000] {
            let memory = Region::allocate(Length(length)).whole();
            let first_wrong = || {
                fill::first_wrong(&digest, length, |offset, bytes| {
                    memory.read_at(Offset(offset), bytes);
                })
            };
            fill::fill(&digest, length, |offset, bytes| {
                memory.write_at(Offset(offset), bytes);
            });
            assert_eq!(first_wrong(), None, "{length}");
            forget(&memory);
            assert_eq!(first_wrong(), Some(0), "{length}");
            // A get that writes the beginning alone.
            fill::fill(&digest, length / 2, |offset, bytes| {
                memory.write_at(Offset(offset), bytes);
            });
            assert!(first_wrong().is_some(), "{length}");
        }
    }
}
