//! What a benchmark's process is told and what it answers.

use crate::bench::limits;
use crate::bench::window::{Measured, Window};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// What a process is told. Names of clients are chosen by whoever tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Set `span` bytes aside to get blocks into, and as many to put from if `source`.
    Memory { span: u64, source: bool },
    /// Connect to a pool, under a name.
    Connect(Connect),
    /// End the connections whose names are not these.
    Keep { clients: Vec<String> },
    /// Connect some more times, get a block each, and say what that took of memory.
    ConnectMore { like: Connect, set: Set, count: u32 },
    /// Serve a segment of memory to the pool from within this process.
    Embed(Embed),
    /// Serve it no more.
    Leave,
    /// Work on a pool.
    Work(Order),
    /// Get the live blocks of a set once each, those that are still there, in an order that says nothing
    /// of where they lie.
    Shuffle { client: String, set: Set },
    /// Put with several clients at once for so long, or until there is such a file, whatever comes of
    /// each put.
    Load {
        writers: Vec<Writer>,
        lasts: Duration,
        until: Option<PathBuf>,
    },
    /// Remove all blocks of a set.
    Remove { client: String, set: Set },
    /// Receive streams and answer pings, at an address of the process's host.
    Listen { host: IpAddr },
    /// Take two times `span` bytes to copy, with a far end at `far`.
    Reach { span: u64, far: SocketAddr },
    /// Do what shows a limit of the machine.
    Limit {
        limit: Limit,
        /// Processes whose processor time is counted, besides this one, which comes first.
        watch: Vec<u32>,
    },
}

/// What a process answers: first [`Answer::Done`], then one a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// It is done.
    Done,
    /// Where [`Command::Listen`] is served.
    Listens(SocketAddr),
    /// What came of a window, and the set's blocks that are there after it.
    Measured { measured: Measured, live: Live },
    /// The bytes of memory that a connection took.
    PerConnection(f64),
    /// What came of [`Command::Load`], in the order of its writers.
    Loaded(Vec<Loaded>),
}

/// One client that puts, on a thread of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Writer {
    /// The name of its client, which nobody else uses meanwhile.
    pub(crate) client: String,
    /// What it puts, from the end of the live ones on.
    pub(crate) set: Set,
    /// Blocks a call.
    pub(crate) batch: u64,
}

/// What came of one writer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Loaded {
    /// The blocks that were put.
    pub(crate) put: u64,
    /// The blocks that were refused, or not put within the client's timeout.
    pub(crate) refused: u64,
    /// The longest call, in nanoseconds.
    pub(crate) longest_ns: u64,
    /// When each call ended that put all of its blocks, in nanoseconds of the monotonic clock.
    pub(crate) ends_ns: Vec<u64>,
}

/// A client to connect.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Connect {
    /// What the client is called from now on.
    pub(crate) name: String,
    /// The pool's master.
    pub(crate) master: String,
    pub(crate) way: Way,
    /// Whether it remembers where blocks lie.
    pub(crate) remembers: bool,
    /// How long it polls for an answer before it sleeps.
    pub(crate) spin: Duration,
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    Shm,
    Rdma,
    Tcp,
}

/// A node to run in this process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Embed {
    pub(crate) master: String,
    /// The bytes of its segment.
    pub(crate) segment: u64,
    /// Where its Unix socket goes.
    pub(crate) socket: PathBuf,
}

/// Blocks of one kind in one pool. Their keys and bytes follow from this alone, so every process of
/// a run knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Set {
    /// What tells it from other sets of the run.
    pub(crate) tag: String,
    /// The bytes of a block.
    pub(crate) block: u64,
    /// Into how many buffers a block is scattered in the memory of a client.
    pub(crate) pieces: u64,
    /// How many blocks lie side by side there, layer by layer.
    pub(crate) group: u64,
    /// Whether each block has the one before it as its parent.
    pub(crate) chained: bool,
    /// How many places there are in a client's memory: block `n` uses place `n % slots`, which also
    /// determines its bytes, but for the first 32.
    pub(crate) slots: u64,
    /// Those that are in the pool.
    pub(crate) live: Live,
}

/// Blocks by number, from the oldest on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Live {
    pub(crate) first: u64,
    pub(crate) end: u64,
}

/// Work on a pool, over and over for a window.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) client: String,
    pub(crate) set: Set,
    pub(crate) work: Work,
    pub(crate) window: Window,
    /// Processes whose processor time is counted, besides this one, which comes first.
    pub(crate) watch: Vec<u32>,
    /// When to begin, in nanoseconds of the monotonic clock; zero: at once.
    pub(crate) begin_ns: u64,
}

/// What a call does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    /// Put so many new blocks; before the window, the oldest go as far as the set has no more
    /// places.
    Put {
        batch: u64,
        /// Whether nothing is removed for them: the pool makes room.
        evicts: bool,
        /// A client that gets the blocks of each call right after it, meanwhile.
        reader: Option<String>,
    },
    /// Put so many new blocks and remove them; only the removals are timed.
    Remove { batch: u64 },
    /// Get so many blocks, `from` after the oldest one. Of `among` blocks only, if that is not zero:
    /// those are got once before the window.
    Get { batch: u64, from: u64, among: u64 },
    /// Take a view of one block of so many; each is looked up once before the window.
    View { among: u64 },
    /// Ask whether so many blocks are there, which they are.
    Exist { batch: u64, lease: bool },
    /// Ask how much of a chain of so many blocks is there, which all of it is.
    MatchPrefix { blocks: u64 },
}

/// What shows a limit of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Limit {
    /// Copies of cold blocks.
    Copy {
        shape: limits::Shape,
        threads: usize,
        bytes: u64,
    },
    /// A round through bare TCP connections.
    Stream {
        streams: usize,
        /// Whether each one's ends are kept on a core of their own.
        pinned: bool,
        bytes: u64,
    },
    /// Round trips over a bare TCP connection.
    Ping {
        request: u64,
        answer: u64,
        spin: bool,
        /// Whether both ends are kept on one core, or on two.
        one_core: bool,
        window: Window,
    },
    /// First touch of memory.
    Touch { bytes: u64 },
    /// Writes of 4 KiB, each flushed to the disk.
    Flush { window: Window },
}

impl Live {
    /// How many there are.
    pub(crate) const fn count(self) -> u64 {
        self.end - self.first
    }
}
