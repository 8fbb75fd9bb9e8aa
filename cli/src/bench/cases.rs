//! What is measured: one table of cases, each with what bounds it and what is asked of it.

mod table;

pub(crate) use table::table;

use super::agent::protocol::Way;
use super::limits;
use table::{CHAIN, FOUR_KIB, KEYS, MILLION};

/// One case.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// What `--only` selects by: parts from the general to the special, with slashes.
    pub(crate) id: String,
    /// The heading that it is shown under.
    pub(crate) group: &'static str,
    /// Which pool, reached how.
    pub(crate) place: Place,
    /// What is done.
    pub(crate) what: What,
    /// What is told of it.
    pub(crate) metric: Metric,
    /// What it is compared with, in turns.
    pub(crate) bound: Bound,
    /// What is asked of it.
    pub(crate) goal: Goal,
}

/// Where a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pool: Pool,
    pub(crate) way: Way,
    /// Whether the client remembers where blocks lie.
    pub(crate) remembers: bool,
    /// Whether the client polls for answers before it sleeps.
    pub(crate) spins: bool,
    /// What is between clients and daemons.
    pub(crate) path: Path,
    /// How many client processes at once.
    pub(crate) clients: usize,
}

/// What is between a client and what it talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Nothing but this host.
    Loopback,
    /// A link between two network namespaces, where one can be made.
    Veth,
}

/// The pools of a run, each started when the first case needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Pool {
    /// Commits are acknowledged from memory; with `--master`, the pool that it names.
    Main,
    /// Commits are acknowledged once durable.
    Durable,
    /// Holds nothing but what the case of first writes puts.
    Fresh,
    /// Its only segment is served by the process of its client.
    Local,
    /// Holds 100,000 small blocks.
    Keys,
    /// Holds 1,000,000 of them.
    Million,
    /// Full: what is put takes the place of what is evicted.
    Full,
    /// Full of small blocks that were used in a random order, and evicts only what a put needs.
    Crowded,
    /// Full; its master is killed and started again, on metadata that is durable.
    Restarted,
    /// Full, with nine tenths of its blocks on one of two nodes, which is killed.
    Bereft,
}

/// What a case does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum What {
    /// Puts of new blocks, so many a call.
    Put(Blocks, u64),
    /// The same, while another client gets the blocks of each call right after it.
    PutRead(Blocks, u64),
    /// Removals of blocks that were put just before, so many a call. Only the removals are timed.
    Remove(Blocks, u64),
    /// Gets, so many blocks a call.
    Get(Blocks, u64),
    /// Gets of single blocks whose locations are known.
    GetKnown(Blocks),
    /// Views of blocks whose locations are known.
    View(Blocks),
    /// Exist of so many keys, all there.
    Exist { batch: u64, lease: bool },
    /// match_prefix of a chain of so many blocks, all there.
    MatchPrefix(u64),
    /// Nothing of the pool: the machine itself.
    Machine(Bare),
    /// The master's own memory, by the blocks that it holds.
    MasterMemory,
    /// The node's own memory, besides its segments.
    NodeMemory,
    /// A client's memory, by connection.
    ClientMemory,
    /// Eight clients that put small blocks, beside one that puts blocks of an eighth of the pool: the
    /// longest call of any.
    CrowdWait,
    /// The same: what was evicted beyond what was put, by the size of a large block.
    CrowdEvicted,
    /// Puts while the master is killed and started again: the longest time without a put after it is up.
    Restart,
    /// The master's processor time a put after a node was killed, by what it was before.
    NodeLoss,
}

/// What plain code does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bare {
    /// Copies of cold blocks by so many threads; the libc's memory copy as it is, or told to write
    /// around the caches.
    Copy(Blocks, usize, Copier),
    /// So many TCP connections with writes of 1 MiB.
    Stream {
        streams: usize,
        /// Whether each one's ends are kept on a core of their own.
        pinned: bool,
    },
    /// A round trip with requests and answers of so many bytes.
    Ping {
        request: u64,
        answer: u64,
        spin: bool,
        /// Whether both ends are kept on one core, or on two.
        one_core: bool,
    },
    /// First touch of fresh memory.
    Touch,
    /// A write of 4 KiB that is flushed to the disk of the pools' metadata.
    Flush,
}

/// How memory is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copier {
    /// The libc's memory copy as it is.
    Plain,
    /// The libc's memory copy told to write around the caches from 64 KiB on.
    Streaming,
    /// Whichever of them is faster, found out before the case.
    Fastest,
}

/// Blocks of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// The bytes of one.
    pub(crate) bytes: u64,
    /// Into how many buffers one is scattered.
    pub(crate) pieces: u64,
    /// How many lie side by side when they are scattered.
    pub(crate) group: u64,
    /// Whether each has the one before it as its parent.
    pub(crate) chained: bool,
    /// How many of them are kept in the pool.
    pub(crate) kept: Kept,
}

/// How many blocks a set keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// As many as cover more memory than caches hold, so that each is cold when it is its turn.
    Span,
    /// So many.
    Exactly(u64),
}

/// What is told of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metric {
    /// 10^9 bytes a second.
    Rate,
    /// The median call, in microseconds.
    P50,
    /// Keys a second, in millions.
    Keys,
    /// Processor seconds of client and node for 10^9 bytes.
    Cpu,
    /// Bytes of memory.
    Bytes,
    /// The call that one in a hundred exceeds, by the median call.
    Tail,
    /// Seconds.
    Seconds,
    /// How often something is contained in another.
    Times,
}

/// What a case is compared with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Bound {
    /// Plain code.
    Bare(Bare),
    /// As many bare TCP connections as the client has, but no more than two: more are no faster on
    /// machines that this is for.
    StreamsAsUsed,
    /// Another case.
    Case(String),
    /// A plain flush of the disk and one and a half times another case.
    FlushAnd(String),
    /// Nothing, and why.
    None(&'static str),
}

/// What is asked of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// The ratio to the bound is no less.
    RatioAtLeast(f64),
    /// The ratio to the bound is no more.
    RatioAtMost(f64),
    /// The result is no less, in the metric's unit.
    AtLeast(f64),
    /// The result is no more, in the metric's unit.
    AtMost(f64),
    /// Nothing, and why.
    None(&'static str),
}

/// The fewest blocks that a set has.
const FEWEST: u64 = 4;

/// The bytes of blocks in cases that are about keys.
pub(crate) const SMALL: u64 = 64;

impl Blocks {
    /// How plain code copies such blocks.
    pub(crate) const fn shape(self) -> limits::Shape {
        limits::Shape {
            block: self.bytes,
            pieces: self.pieces,
            group: self.group,
        }
    }
}

impl What {
    /// The blocks that it works on.
    pub(crate) fn blocks(self, pool: Pool) -> Option<Blocks> {
        match self {
            Self::Put(blocks, _)
            | Self::PutRead(blocks, _)
            | Self::Remove(blocks, _)
            | Self::Get(blocks, _)
            | Self::GetKnown(blocks)
            | Self::View(blocks) => Some(blocks),
            Self::MatchPrefix(_) => Some(CHAIN),
            Self::Exist { .. } | Self::MasterMemory => Some(match pool {
                Pool::Million => MILLION,
                _ => KEYS,
            }),
            Self::ClientMemory => Some(FOUR_KIB),
            Self::Machine(_)
            | Self::NodeMemory
            | Self::CrowdWait
            | Self::CrowdEvicted
            | Self::Restart
            | Self::NodeLoss => None,
        }
    }
}

impl Case {
    /// Whether it needs a pool that this run starts and sees into.
    pub(crate) fn needs_own_pool(&self) -> bool {
        !matches!(self.place.pool, Pool::Main | Pool::Keys)
            || matches!(
                self.what,
                What::MasterMemory | What::NodeMemory | What::PutRead(..)
            )
            || matches!(&self.bound, Bound::Case(id) if id.starts_with("shm/put-fresh"))
            || (self.metric == Metric::Cpu && !matches!(self.what, What::Machine(_)))
    }

    /// Whether its blocks fit memory of `span` bytes on each side, a whole call of them at least.
    pub(crate) fn fits(&self, span: u64) -> bool {
        let Some(blocks) = self.what.blocks(self.place.pool) else {
            return true;
        };
        let slots = match blocks.kept {
            Kept::Span => span / blocks.bytes,
            Kept::Exactly(count) => count,
        };
        let batch = match self.what {
            What::Put(_, batch)
            | What::PutRead(_, batch)
            | What::Remove(_, batch)
            | What::Get(_, batch) => batch,
            _ => 1,
        };
        slots >= batch.max(FEWEST)
            && slots.is_multiple_of(blocks.group)
            && slots * blocks.bytes <= span
    }

    /// Whether it takes long or much memory, and is measured only when that is asked for.
    pub(crate) fn is_large(&self) -> bool {
        self.place.pool == Pool::Million
    }
}

/// Bytes as they stand in names.
pub(crate) fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) {
        format!("{}MiB", bytes >> 20)
    } else {
        format!("{}KiB", bytes >> 10)
    }
}
