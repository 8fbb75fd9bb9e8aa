//! The cases: each with its calls, its bound and its goal.

mod table;

pub(crate) use table::table;

use super::agent::protocol::Way;
use super::limits;
use table::{CHAIN, FOUR_KIB, KEYS, MILLION};

/// One case.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// The name, from the general to the special, separated by slashes. `--only` selects by it.
    pub(crate) id: String,
    /// The heading of its table.
    pub(crate) group: &'static str,
    /// The pool, and the way to it.
    pub(crate) place: Place,
    /// The calls.
    pub(crate) what: What,
    /// The reported figure.
    pub(crate) metric: Metric,
    /// The work that alternates with the case.
    pub(crate) bound: Bound,
    /// The goal.
    pub(crate) goal: Goal,
}

/// The pool of a case, and its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) pool: Pool,
    pub(crate) way: Way,
    /// Whether the client caches locations.
    pub(crate) remembers: bool,
    /// Whether the client polls for answers before it sleeps.
    pub(crate) spins: bool,
    /// The network between clients and daemons.
    pub(crate) path: Path,
    /// The number of client processes that work at the same time.
    pub(crate) clients: usize,
}

/// The network between a client and the daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// The loopback of this host.
    Loopback,
    /// A link between two network namespaces, if this host allows one.
    Veth,
}

/// The pools of a run, each started when the first case needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Pool {
    /// Commits are acknowledged from memory. With `--master` it is the named pool.
    Main,
    /// Commits are acknowledged after they are durable.
    Durable,
    /// Holds only the blocks of the case of first writes.
    Fresh,
    /// The client's process serves its only segment.
    Local,
    /// Holds 100,000 small blocks.
    Keys,
    /// Holds 1,000,000 small blocks.
    Million,
    /// Full: each put replaces evicted blocks.
    Full,
    /// Full of small blocks that were used in random order. It evicts only the bytes that a put needs.
    Crowded,
    /// Full; its master is killed and restarted, with durable metadata.
    Restarted,
    /// Full; the node with nine tenths of its blocks is killed, the other one stays.
    NodeLost,
    /// As the main pool, and guarded.
    Guarded(Guard),
    /// As the pool of keys, and guarded.
    GuardedKeys(Guard),
}

/// How a pool is guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Guard {
    /// It requires tokens.
    Tokens,
    /// Every port speaks TLS.
    Tls,
}

impl Pool {
    /// How it is guarded.
    pub(crate) const fn guard(self) -> Option<Guard> {
        match self {
            Self::Guarded(guard) | Self::GuardedKeys(guard) => Some(guard),
            _ => None,
        }
    }
}

/// The calls of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum What {
    /// Puts of new blocks; the number is the blocks of one call.
    Put(Blocks, u64),
    /// The same, while another client gets the blocks of each call right after the call.
    PutRead(Blocks, u64),
    /// Removals of blocks that were put just before; the number is the blocks of one call. Only the removals
    /// are timed.
    Remove(Blocks, u64),
    /// Gets; the number is the blocks of one call.
    Get(Blocks, u64),
    /// Gets of single blocks whose locations are cached.
    GetKnown(Blocks),
    /// Views of blocks whose locations are cached.
    View(Blocks),
    /// `exist` of keys that are present.
    Exist { batch: u64, lease: bool },
    /// `match_prefix` of a chain that is present; the number is its blocks.
    MatchPrefix(u64),
    /// A limit of the machine alone, without a pool.
    Machine(Bare),
    /// The master's own memory, divided by its blocks.
    MasterMemory,
    /// The node's memory without its segments.
    NodeMemory,
    /// A client's memory for one connection.
    ClientMemory,
    /// Eight clients put small blocks, and one more puts blocks of an eighth of the pool. The result is the
    /// longest call of any client.
    CrowdWait,
    /// The same; the result is the bytes evicted beyond need, divided by the size of a large block.
    CrowdEvicted,
    /// Puts while the master is killed and restarted. The result is the longest time without a put after it
    /// serves again.
    Restart,
    /// The master's processor time for a put after a node was killed, divided by that before.
    NodeLoss,
}

/// Plain code that bounds a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bare {
    /// Copies of cold blocks; the number is the threads.
    Copy(Blocks, usize, Copier),
    /// TCP connections with writes of 1 MiB.
    Stream {
        streams: usize,
        /// Whether the two ends of each connection share one core, another for each connection.
        pinned: bool,
        /// Whether rustls encrypts them.
        tls: bool,
    },
    /// A round trip with requests and answers of these sizes, in bytes.
    Ping {
        request: u64,
        answer: u64,
        spin: bool,
        /// Whether both ends are on one core, or on two.
        one_core: bool,
    },
    /// First touch of fresh memory.
    Touch,
    /// A write of 4 KiB, flushed to the disk of the pools' metadata.
    Flush,
}

/// The way to copy memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copier {
    /// The plain copy of the libc.
    Plain,
    /// The libc's copy with non-temporal stores from 64 KiB on.
    Streaming,
    /// The faster one of the two, found before the case.
    Fastest,
}

/// Blocks of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// The bytes of a block.
    pub(crate) bytes: u64,
    /// The number of buffers of a block.
    pub(crate) pieces: u64,
    /// The number of scattered blocks that lie side by side.
    pub(crate) group: u64,
    /// Whether the parent of each block is the block before it.
    pub(crate) chained: bool,
    /// The number of blocks kept in the pool.
    pub(crate) kept: Kept,
}

/// The number of blocks of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// As many blocks as fill the span, so each block is cold at its turn.
    Span,
    /// This number.
    Exactly(u64),
}

/// The reported figure of a case.
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
    /// The 99th percentile of the calls, divided by the median.
    Tail,
    /// Seconds.
    Seconds,
    /// A ratio without unit.
    Times,
}

/// The bound of a case.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Bound {
    /// Plain code.
    Bare(Bare),
    /// As many bare TCP connections as the client has, at most two. More connections are not faster on
    /// machines with few cores.
    StreamsAsUsed,
    /// The same, encrypted by rustls.
    TlsStreamsAsUsed,
    /// Another case.
    Case(String),
    /// One flush of the disk plus one and a half times another case.
    FlushAnd(String),
    /// None; the text says why.
    None(&'static str),
}

/// The goal of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// The smallest ratio to the bound.
    RatioAtLeast(f64),
    /// The largest ratio to the bound.
    RatioAtMost(f64),
    /// The smallest result, in the metric's unit.
    AtLeast(f64),
    /// The largest result, in the metric's unit.
    AtMost(f64),
    /// None; the text says why.
    None(&'static str),
}

/// The smallest number of blocks of a set.
const FEWEST: u64 = 4;

/// The block size in cases about keys, in bytes.
pub(crate) const SMALL: u64 = 64;

impl Blocks {
    /// The shape in which plain code copies such blocks.
    pub(crate) const fn shape(self) -> limits::Shape {
        limits::Shape {
            block: self.bytes,
            pieces: self.pieces,
            group: self.group,
        }
    }
}

impl What {
    /// The blocks of its calls.
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
    /// Whether it needs a pool that this run starts and can inspect.
    pub(crate) fn needs_own_pool(&self) -> bool {
        !matches!(self.place.pool, Pool::Main | Pool::Keys)
            || matches!(
                self.what,
                What::MasterMemory | What::NodeMemory | What::PutRead(..)
            )
            || matches!(&self.bound, Bound::Case(id) if id.starts_with("shm/put-fresh"))
            || (self.metric == Metric::Cpu && !matches!(self.what, What::Machine(_)))
    }

    /// Whether the blocks of one call fit into `span` bytes.
    pub(crate) fn fits(&self, span: u64) -> bool {
        let Some(blocks) = self.what.blocks(self.place.pool) else {
            return true;
        };
        let slots = match blocks.kept {
            Kept::Span => span / blocks.bytes,
            Kept::Exactly(count) => count,
        };
        let batch = match self.what {
            // The blocks that are got, and those that are put meanwhile.
            What::PutRead(_, batch) => 2 * batch,
            What::Put(_, batch) | What::Remove(_, batch) | What::Get(_, batch) => batch,
            _ => 1,
        };
        slots >= batch.max(FEWEST)
            && slots.is_multiple_of(blocks.group)
            && slots * blocks.bytes <= span
    }

    /// Whether its pool is guarded, so that it runs only with `--secured`.
    pub(crate) const fn is_secured(&self) -> bool {
        self.place.pool.guard().is_some()
    }

    /// Whether it takes long or much memory, so that it runs only with `--large`.
    pub(crate) fn is_large(&self) -> bool {
        self.place.pool == Pool::Million
    }
}

/// A size as it is written in names.
pub(crate) fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) {
        format!("{}MiB", bytes >> 20)
    } else {
        format!("{}KiB", bytes >> 10)
    }
}
