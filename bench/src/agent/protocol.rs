//! The commands of an agent and its answers.

use crate::limits;
use crate::security::Access;
use crate::window::{Measured, Window};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// A command. The sender chooses the names of clients.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Allocate `span` bytes for gets, and as many for puts if `source`.
    Memory { span: u64, source: bool },
    /// Connect a client to a pool and give it a name.
    Connect(Connect),
    /// Close all clients except these.
    Keep { clients: Vec<String> },
    /// Connect `count` more clients, get a block with each, and report the memory of one connection.
    ConnectMore { like: Connect, set: Set, count: u32 },
    /// Serve a segment to the pool from this process.
    Embed(Embed),
    /// Stop serving it, and close all clients.
    Leave,
    /// Run one window of work on a pool.
    Work(Order),
    /// Get each live block of a set once, in an order that does not depend on its place. Evicted blocks are
    /// skipped.
    Shuffle { client: String, set: Set },
    /// Put with several clients at once, for a time or until a file exists. Failed puts do not end it.
    Load {
        writers: Vec<Writer>,
        lasts: Duration,
        until: Option<PathBuf>,
    },
    /// Remove all blocks of a set.
    Remove { client: String, set: Set },
    /// Receive streams and answer pings at an address of this host.
    Listen {
        host: IpAddr,
        /// The certificate of encrypted streams.
        cert: PathBuf,
        /// Its key.
        key: PathBuf,
    },
    /// Allocate twice `span` bytes for copies, and use the far end at `far`.
    Reach {
        span: u64,
        far: SocketAddr,
        /// The authority of the far end's certificate.
        ca: PathBuf,
    },
    /// Run one window of a limit of the machine.
    Limit {
        limit: Limit,
        /// The processes whose processor time is counted after that of this process.
        watch: Vec<u32>,
    },
}

/// An answer: first [`Answer::Done`], then one for each command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The command is done.
    Done,
    /// The address of [`Command::Listen`].
    Listens(SocketAddr),
    /// The result of a window, and the set's blocks in the pool after it.
    Measured { measured: Measured, live: Live },
    /// The memory of one connection, in bytes.
    PerConnection(f64),
    /// The results of [`Command::Load`], in the order of its writers.
    Loaded(Vec<Loaded>),
}

/// One client that puts on a thread of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Writer {
    /// The name of its client, which no other thread uses.
    pub(crate) client: String,
    /// The set to put; its first new block follows the live ones.
    pub(crate) set: Set,
    /// Blocks of one call.
    pub(crate) batch: u64,
}

/// The results of one writer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Loaded {
    /// The blocks that were put.
    pub(crate) put: u64,
    /// The blocks that failed, also by timeout.
    pub(crate) refused: u64,
    /// The longest call, in nanoseconds.
    pub(crate) longest_ns: u64,
    /// The ends of the calls that put all of their blocks, in nanoseconds of the monotonic clock.
    pub(crate) ends_ns: Vec<u64>,
}

/// A client to connect.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Connect {
    /// The name of the client in later commands.
    pub(crate) name: String,
    /// The address of the master.
    pub(crate) master: String,
    /// The token and certificate that it presents, and the authority that it trusts.
    pub(crate) access: Access,
    pub(crate) way: Way,
    /// Whether it caches locations.
    pub(crate) remembers: bool,
    /// The time for which it polls for an answer before it sleeps.
    pub(crate) spin: Duration,
}

/// The transport of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    Shm,
    Rdma,
    Tcp,
}

/// A store node to run in this process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Embed {
    pub(crate) master: String,
    /// The bytes of its segment.
    pub(crate) segment: u64,
    /// The path of its Unix socket.
    pub(crate) socket: PathBuf,
}

/// Blocks of one kind in one pool. Their keys and bytes follow from these fields and the seed, so every
/// process of a run knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Set {
    /// The name of the set, unique in the run.
    pub(crate) tag: String,
    /// The bytes of a block.
    pub(crate) block: u64,
    /// The number of buffers of a block in a client's memory.
    pub(crate) pieces: u64,
    /// The number of blocks that lie side by side there, layer by layer.
    pub(crate) group: u64,
    /// Whether the parent of each block is the block before it.
    pub(crate) chained: bool,
    /// The number of places in a client's memory. Block `n` uses place `n % slots`, which also determines its
    /// bytes after the first 32.
    pub(crate) slots: u64,
    /// The blocks that are in the pool.
    pub(crate) live: Live,
}

/// A range of block numbers, from the oldest block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Live {
    pub(crate) first: u64,
    pub(crate) end: u64,
}

/// Work on a pool for one window.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) client: String,
    pub(crate) set: Set,
    pub(crate) work: Work,
    pub(crate) window: Window,
    /// The processes whose processor time is counted after that of this process.
    pub(crate) watch: Vec<u32>,
    /// The start, in nanoseconds of the monotonic clock; zero means now.
    pub(crate) begin_ns: u64,
}

/// The calls of a window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// Put new blocks. If the set has too few places, the oldest blocks are removed before the window.
    Put {
        batch: u64,
        /// Whether nothing is removed: the pool makes room by eviction, or has room for all.
        evicts: bool,
        /// A client that gets the blocks of each call while the next call puts. The first call is not timed,
        /// so each timed one has gets beside it.
        reader: Option<String>,
    },
    /// Put new blocks and remove them; only the removals are timed.
    Remove { batch: u64 },
    /// Get blocks, the first of them `from` blocks after the oldest one. If `among` is not zero, the calls
    /// take turns over that many blocks, each got once before the window.
    Get { batch: u64, from: u64, among: u64 },
    /// Take views of `among` blocks in turns; each block is looked up once before the window.
    View { among: u64 },
    /// `exist` of blocks that are present.
    Exist { batch: u64, lease: bool },
    /// `match_prefix` of a chain that is present.
    MatchPrefix { blocks: u64 },
}

/// Plain code that shows a limit of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Limit {
    /// Copies of cold blocks.
    Copy {
        shape: limits::Shape,
        threads: usize,
        bytes: u64,
    },
    /// One round through bare TCP connections.
    Stream {
        streams: usize,
        /// Whether the two ends of each connection share one core, another for each connection.
        pinned: bool,
        /// Whether rustls encrypts them.
        tls: bool,
        bytes: u64,
    },
    /// Round trips over a bare TCP connection.
    Ping {
        request: u64,
        answer: u64,
        spin: bool,
        /// Whether both ends are on one core, or on two.
        one_core: bool,
        window: Window,
    },
    /// First touch of memory.
    Touch { bytes: u64 },
    /// Writes of 4 KiB, each flushed to the disk.
    Flush { window: Window },
}

impl Live {
    /// The number of blocks.
    pub(crate) const fn count(self) -> u64 {
        self.end - self.first
    }
}
