//! Blocks that the master takes for written: Reserve and Commit over framed connections, many at a
//! time, without bytes. This measures the master and its log, not the transfer of bytes.
//!
//! The nodes and their grants are real, but the blocks are not: a get finds other bytes. Only
//! benches may use this.

use crate::blocks::key;
use crate::raw;
use anyhow::{Context, bail};
use kvpool_proto as proto;
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::wire::keys;
use kvpool_types::{Code, Epoch, Key};
use prost::Message;
use std::collections::HashMap;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The committed length of every block, in bytes.
pub const LENGTH: u64 = 64;

/// The pause before blocks without room are tried again.
const PAUSE: Duration = Duration::from_millis(20);

/// The parameters of the commits.
#[derive(Clone, Copy, Debug)]
pub struct Drive {
    /// The number of framed connections, each with a thread.
    pub connections: usize,
    /// The number of batches in flight on each connection.
    pub in_flight: usize,
    /// The number of blocks in a batch.
    pub batch: u64,
    /// Whether to write new versions of present blocks.
    pub upsert: bool,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// The number of acknowledged blocks.
    pub blocks: u64,
    /// The time from the first reserve to the last acknowledgement.
    pub took: Duration,
    /// The latency of each commit, in ascending order.
    pub commits: Vec<Duration>,
}

impl Measured {
    /// Acknowledged blocks a second.
    pub fn rate(&self) -> f64 {
        blocks_f64(self.blocks) / self.took.as_secs_f64().max(1e-9)
    }

    /// The median latency of the commits.
    pub fn median(&self) -> Duration {
        let middle = self.commits.get(self.commits.len() / 2);
        middle.copied().unwrap_or_default()
    }
}

#[allow(
    clippy::cast_precision_loss,
    reason = "counts of blocks are far below 2^53"
)]
fn blocks_f64(blocks: u64) -> f64 {
    blocks as f64
}

impl Drive {
    /// Commits the blocks with these numbers at the master at `address` (`host:port`), or as many
    /// of them as possible within `limit`.
    pub fn run(
        self,
        address: &str,
        numbers: Range<u64>,
        limit: Duration,
    ) -> anyhow::Result<Measured> {
        let next = AtomicU64::new(numbers.start);
        let started = Instant::now();
        let work = Work {
            drive: self,
            next: &next,
            again: Mutex::default(),
            end: numbers.end,
            until: started + limit,
        };
        let parts: anyhow::Result<Vec<Measured>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.connections)
                .map(|_| scope.spawn(|| Connection::open(address)?.commit(&work)))
                .collect();
            let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
            joined
                .map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let mut all = Measured {
            took: started.elapsed(),
            ..Measured::default()
        };
        for part in parts? {
            all.blocks += part.blocks;
            all.commits.extend(part.commits);
        }
        all.commits.sort_unstable();
        Ok(all)
    }
}

/// The state that the connections share.
struct Work<'a> {
    drive: Drive,
    next: &'a AtomicU64,
    /// The blocks without room in the last attempt.
    again: Mutex<Vec<u64>>,
    end: u64,
    until: Instant,
}

impl Work<'_> {
    /// The next batch; `None` if no block is left.
    fn take(&self) -> Option<Vec<u64>> {
        let again = std::mem::take(&mut *self.lock_again());
        if !again.is_empty() && Instant::now() < self.until {
            // The extents of replaced versions will soon be free.
            std::thread::sleep(PAUSE);
            return Some(again);
        }
        let first = self.next.fetch_add(self.drive.batch, Ordering::Relaxed);
        let is_left = first < self.end && Instant::now() < self.until;
        is_left.then(|| (first..self.end.min(first + self.drive.batch)).collect())
    }

    fn lock_again(&self) -> MutexGuard<'_, Vec<u64>> {
        self.again.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A batch that waits for an answer.
enum Pending {
    Reserve(Vec<u64>),
    Commit(u64, Instant),
}

struct Connection {
    stream: BufReader<TcpStream>,
    caller: proto::Caller,
    next: u64,
    pending: HashMap<u64, Pending>,
}

impl Connection {
    fn open(address: &str) -> anyhow::Result<Self> {
        let stream = raw::connect(address)?;
        stream.set_nodelay(true)?;
        let mut connection = Self {
            stream: BufReader::with_capacity(1 << 20, stream),
            caller: proto::Caller::default(),
            next: 1,
            pending: HashMap::new(),
        };
        let hello = proto::HelloRequest {
            min_version: 1,
            max_version: 1,
            ..Default::default()
        };
        connection.send(Op::Greet, &hello)?;
        let (_, reply) = connection.receive()?;
        let reply = proto::HelloReply::decode(reply.as_slice())?;
        connection.caller.cluster_id = reply.cluster_id;
        connection.caller.epoch = reply.epoch;
        Ok(connection)
    }

    fn commit(mut self, work: &Work<'_>) -> anyhow::Result<Measured> {
        let mut measured = Measured::default();
        for _ in 0..work.drive.in_flight {
            self.reserve(work)?;
        }
        while !self.pending.is_empty() {
            let (request, reply) = self.receive()?;
            let pending = self.pending.remove(&request);
            match pending.context("an answer to nothing")? {
                Pending::Reserve(numbers) => self.commit_batch(work, &numbers, &reply)?,
                Pending::Commit(blocks, sent) => {
                    measured.commits.push(sent.elapsed());
                    let outcomes = proto::Outcomes::decode(reply.as_slice())?;
                    if let Some(code) = outcomes.codes.iter().find(|code| **code != 0) {
                        bail!("a commit was answered {code}");
                    }
                    measured.blocks += blocks;
                    self.reserve(work)?;
                }
            }
        }
        Ok(measured)
    }

    /// Asks for room for the next batch, if there is a batch left.
    fn reserve(&mut self, work: &Work<'_>) -> anyhow::Result<()> {
        let Some(numbers) = work.take() else {
            return Ok(());
        };
        let request = proto::ReserveRequest {
            caller: Some(self.caller.clone()),
            keys: packed(&numbers),
            lengths: vec![LENGTH; numbers.len()],
            upsert: work.drive.upsert,
            timeout_ms: 10_000,
            grant_ttl_ms: 60_000,
            ..Default::default()
        };
        let sent = self.send(Op::Reserve, &request)?;
        self.pending.insert(sent, Pending::Reserve(numbers));
        Ok(())
    }

    /// Commits the granted blocks. Blocks without room are tried again.
    fn commit_batch(
        &mut self,
        work: &Work<'_>,
        numbers: &[u64],
        reply: &[u8],
    ) -> anyhow::Result<()> {
        let reply = proto::ReserveReply::decode(reply)?;
        let mut granted = Vec::with_capacity(numbers.len());
        let mut items = Vec::with_capacity(numbers.len());
        for (number, reservation) in numbers.iter().zip(&reply.reservations) {
            let code = u16::try_from(reservation.code)
                .ok()
                .and_then(Code::from_wire);
            match code {
                Some(Code::Ok) => {}
                Some(Code::Full | Code::NoNodes) => {
                    work.lock_again().push(*number);
                    continue;
                }
                other => bail!("a reserve was answered {other:?}"),
            }
            let extents = reservation.extents.iter();
            granted.push(*number);
            items.push(proto::CommitItem {
                version: reservation.version,
                length: LENGTH,
                checksum: 0,
                segments: extents.map(|extent| extent.segment).collect(),
                parent: 0,
            });
        }
        if granted.is_empty() {
            return self.reserve(work);
        }
        let request = proto::CommitRequest {
            caller: Some(self.caller.clone()),
            keys: packed(&granted),
            items,
            ..Default::default()
        };
        let blocks = granted.len() as u64;
        let now = Instant::now();
        let sent = self.send(Op::Commit, &request)?;
        self.pending.insert(sent, Pending::Commit(blocks, now));
        Ok(())
    }

    /// Sends a call in one write, and returns its number.
    fn send(&mut self, op: Op, message: &impl Message) -> anyhow::Result<u64> {
        let request = self.next;
        self.next += 1;
        let meta = message.encode_to_vec();
        let header = Header {
            version: VERSION,
            op,
            request,
            epoch: Epoch(self.caller.epoch),
            meta: u32::try_from(meta.len())?,
            payload: 0,
        };
        let frame = [&header.encode()[..], &meta].concat();
        self.stream.get_mut().write_all(&frame)?;
        Ok(request)
    }

    /// The number and the meta of the next answer.
    fn receive(&mut self) -> anyhow::Result<(u64, Vec<u8>)> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head)?;
        let header = Header::decode(&head)?;
        let mut meta = vec![0; usize::try_from(header.meta)?];
        self.stream.read_exact(&mut meta)?;
        if header.op != Op::Reply {
            bail!("answered by {:?}: {:?}", header.op, Failure::decode(&meta));
        }
        Ok((header.request, meta))
    }
}

fn packed(numbers: &[u64]) -> bytes::Bytes {
    let keys: Vec<Key> = numbers.iter().copied().map(key).collect();
    keys::pack(&keys).into()
}
