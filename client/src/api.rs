//! The arguments and outcomes of a client's operations.

use crate::lease::Lease;
use kvpool_transport::Slice;
use kvpool_types::{Checksum, Code, Epoch, Extent, Incarnation, Key, Length, MediumId, Version};
use std::collections::BTreeMap;
use std::time::Duration;

/// One block to put, from host memory or from a GPU's ([`crate::GpuSlice`]).
#[derive(Clone, Debug)]
pub struct PutBlock<B = Slice> {
    /// What names it.
    pub key: Key,
    /// The key of the block before this one in its chain. The commit links the two if the parent is present.
    pub parent: Option<Key>,
    /// The buffers with the block's bytes, in order. They must not change until the put returns. If the
    /// put's future is dropped, they must not change until the put's timeout has passed.
    pub buffers: Vec<B>,
}

/// How to put.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// How many replicas to write, each on a different node; 0 means 1. With fewer nodes there are
    /// fewer replicas.
    pub replicas: u32,
    /// The names of the nodes to try first, in this order; at most 64. Each gets one replica at most.
    pub preferred_nodes: Vec<String>,
    /// Whether to prefer nodes on this host, after the preferred nodes.
    pub prefer_same_host: bool,
    /// For this time, evict the block only after blocks without a pin. Rounded up to a millisecond.
    pub soft_pin: Option<Duration>,
    /// Never evict the block.
    pub hard_pin: bool,
    /// Write a new version if the block is present. Without it, such a put is [`PutOutcome::Present`].
    pub upsert: bool,
    /// How long the call may take; [`crate::Timeouts::put`] when not said.
    pub timeout: Option<Duration>,
}

/// The outcome of a put that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The bytes were moved, and the block is visible and durable.
    Stored {
        /// How many replicas were written.
        replicas: usize,
    },
    /// The block was in the pool already. No bytes were moved.
    Present,
}

/// One block to get, into host memory or into a GPU's ([`crate::GpuSlice`]).
#[derive(Clone, Debug)]
pub struct GetBlock<B = Slice> {
    /// What names it.
    pub key: Key,
    /// The buffers that receive the block's bytes, in order. Together they must be at least as long as the
    /// block; bytes beyond the block are not changed. Unless the outcome is a hit, their contents are
    /// undefined.
    pub buffers: Vec<B>,
}

/// How to get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// How long the call may take; [`crate::Timeouts::get`] when not said.
    pub timeout: Option<Duration>,
    /// Wait until the master has released the call's leases, and cache no locations. Otherwise the leases
    /// are released a moment later. The wait is at most 0.1 s.
    pub release: bool,
}

/// The outcome of a get that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetOutcome {
    /// The bytes are in the buffers and match the committed checksum.
    Hit {
        /// The length of the whole block, also after a get of a range.
        length: Length,
        /// Which committed value of the key it is.
        version: Version,
    },
    /// The pool does not have the block.
    Miss,
}

/// How to take a view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ViewOptions {
    /// How long the call may take; [`crate::Timeouts::get`] when not said.
    pub timeout: Option<Duration>,
    /// Return the view without comparing its bytes with the block's checksum.
    pub unverified: bool,
}

/// Whether the master leases the blocks that it reports as present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leasing {
    /// Lease the reported blocks and mark them as recently used.
    #[default]
    Lease,
    /// Take no lease and leave recency unchanged.
    None,
}

/// The answer of `exist`: which of the asked keys are present.
#[derive(Debug)]
pub struct Existence {
    /// One answer for each key, in the order of the keys.
    pub present: Vec<bool>,
    /// The lease on the blocks that are present; empty with [`Leasing::None`].
    pub lease: Lease,
}

/// The answer of `match_prefix`: how much of a chain is present.
#[derive(Debug)]
pub struct Prefix {
    /// How many leading blocks of the chain are present.
    pub blocks: usize,
    /// The lease on these blocks; empty with [`Leasing::None`].
    pub lease: Lease,
}

/// What to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remove {
    /// Blocks by key.
    Keys(Vec<Key>),
    /// Every block of this namespace whose key matches a regular expression.
    Pattern(String),
    /// Every block of this namespace.
    Namespace,
    /// Every block of every namespace.
    Everything,
}

/// What a removal did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// How many blocks are gone.
    pub removed: u64,
    /// How many were kept because a lease or a pin protects them.
    pub kept: u64,
    /// For [`Remove::Keys`], one outcome per key, in order: ok, missing or leased. A large removal
    /// takes several messages. If one got no answer, its keys have the code of that failure, and their
    /// blocks may or may not be removed.
    pub codes: Vec<Code>,
}

/// Where a listing continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page(pub(crate) bytes::Bytes);

/// One page of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The blocks of this page.
    pub blocks: Vec<Listed>,
    /// Where the next page begins; `None` when this was the last.
    pub next: Option<Page>,
}

/// One block of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its key's string form.
    pub key: String,
    /// Its length.
    pub length: Length,
    /// How many replicas it has.
    pub replicas: u32,
    /// Whether a lease on it runs.
    pub leased: bool,
    /// Whether it is pinned, softly or hard.
    pub pinned: bool,
}

/// What the master knows of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its length.
    pub length: Length,
    /// Its checksum.
    pub checksum: Checksum,
    /// Which committed value of the key it is.
    pub version: Version,
    /// Where it lies.
    pub replicas: Vec<DescribedReplica>,
    /// The remaining time of the block's lease; zero without a lease.
    pub lease_left: Duration,
    /// The remaining time of the soft pin; zero without one.
    pub soft_pin_left: Duration,
    /// Whether it is never evicted.
    pub hard_pin: bool,
}

/// One replica of a described block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedReplica {
    /// The name of its node.
    pub node: String,
    /// Where it lies.
    pub extent: Extent,
    /// What state it is in: live, suspect, draining, drained, hidden.
    pub state: String,
}

/// Limits that the master states at connect and again in each new term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest block.
    pub max_block: Length,
    /// The most keys in one message.
    pub max_batch_keys: usize,
    /// How long a lease of the master lasts.
    pub lease_ttl: Duration,
}

/// What the master counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// The master's term.
    pub epoch: Epoch,
    /// How many blocks are visible.
    pub blocks: u64,
    /// How many puts are between reserve and commit.
    pub reservations: u64,
    /// The memory that the store nodes contribute, in bytes.
    pub capacity: Length,
    /// What blocks, grants and quarantine take.
    pub used: Length,
    /// Bytes of freed extents that may not be granted again yet.
    pub quarantine: Length,
    /// The store nodes.
    pub nodes: Vec<NodeStats>,
    /// The master's counters by name.
    pub counters: BTreeMap<String, u64>,
    /// How long the master has been up.
    pub uptime: Duration,
    /// The namespaces that are known.
    pub namespaces: Vec<String>,
    /// The SSD media, including media that no node has attached now.
    pub media: Vec<MediumStats>,
    /// What is wrong with the leader's files of keys, of the policy and of certificates, one sentence each.
    pub problems: Vec<String>,
}

/// One SSD medium, as the master sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumStats {
    /// The medium.
    pub id: MediumId,
    /// Its segment.
    pub segment: kvpool_types::SegmentId,
    /// The node that offered it last.
    pub node: String,
    /// `ready`, `read_only`, `slow`, `gone`, `attaching` or `absent`.
    pub state: String,
    /// The number of its last attachment.
    pub generation: u64,
    /// The bytes available for blocks and their headers.
    pub capacity: Length,
    /// How many of them are in use.
    pub used: Length,
    /// The blocks with a copy there.
    pub copies: u64,
    /// The zone that is written, counted from 0.
    pub zone: u32,
    /// The bytes of a zone.
    pub zone_size: Length,
}

/// The outcome of [`Client::detach_medium`](crate::Client::detach_medium).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detached {
    /// The pool has forgotten the medium and this number of copies, durably.
    Done(u64),
    /// The pool has no such medium.
    Unknown,
    /// The connected node with this name has the medium. Nothing was changed.
    Connected(String),
    /// The medium has this number of copies. Nothing was changed.
    HasCopies(u64),
}

/// One store node, as the master sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeStats {
    /// Its name.
    pub name: String,
    /// What state it is in: live, suspect, draining, drained.
    pub state: String,
    /// The incarnation: identifies the running process of the node.
    pub incarnation: Incarnation,
    /// Its data port.
    pub data_address: String,
    /// The path of its Unix socket for clients on its host; empty if there is none.
    pub shm_path: String,
    /// The time since its last message.
    pub heartbeat_age: Duration,
    /// Its segments.
    pub segments: Vec<SegmentStats>,
    /// What is wrong with its files of tokens, keys and certificates, one sentence each.
    pub problems: Vec<String>,
    /// Of a draining node: the blocks that a stop would lose, as of the master's last look. `None` while blocks move,
    /// and from an older master.
    pub left_blocks: Option<u64>,
}

/// One segment of a store node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentStats {
    /// Its number.
    pub id: kvpool_types::SegmentId,
    /// Its size.
    pub capacity: Length,
    /// What blocks, grants and quarantine take of it.
    pub used: Length,
    /// Bytes of freed extents that may not be granted again yet.
    pub quarantine: Length,
    /// The number of ranges that the free space consists of.
    pub free_ranges: u64,
    /// The length of the longest free range.
    pub largest_free: Length,
}

impl<B> PutBlock<B> {
    /// A block without a parent, in one buffer.
    pub fn new(key: Key, bytes: B) -> Self {
        Self {
            key,
            parent: None,
            buffers: vec![bytes],
        }
    }
}

impl<B> GetBlock<B> {
    /// A get into one buffer.
    pub fn new(key: Key, into: B) -> Self {
        Self {
            key,
            buffers: vec![into],
        }
    }
}

impl GetOutcome {
    /// Whether the block was found.
    pub const fn is_hit(&self) -> bool {
        matches!(self, Self::Hit { .. })
    }
}

impl Page {
    /// The page's opaque bytes, to be kept outside this process.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The page that [`Page::as_bytes`] gave.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}
