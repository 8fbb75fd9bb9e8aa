//! The arguments and outcomes of a client's operations.

use crate::lease::Lease;
use kvpool_transport::Slice;
use kvpool_types::{Checksum, Code, Epoch, Extent, Incarnation, Key, Length, MediumId, Version};
use std::collections::BTreeMap;
use std::time::Duration;

/// One block to put, from host memory or from a GPU's ([`crate::GpuSlice`]).
#[derive(Clone, Debug)]
pub struct PutBlock<B = Slice> {
    /// The block's key.
    pub key: Key,
    /// The key of the block before this one in its chain. The commit links the two blocks if the parent is
    /// present.
    pub parent: Option<Key>,
    /// The memory with the block's bytes, in order. The bytes must not change until the put returns. If the
    /// put's future is dropped, they must not change until the put's timeout has passed.
    pub buffers: Vec<B>,
}

/// The options of a put.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// The number of replicas to write, each on a different node; 0 means 1. If the pool has fewer nodes, the
    /// block gets fewer replicas.
    pub replicas: u32,
    /// The names of the nodes to try first, in this order; at most 64. Each gets one replica at most.
    pub preferred_nodes: Vec<String>,
    /// Whether to prefer nodes on this host, after the preferred nodes.
    pub prefer_same_host: bool,
    /// For this time, eviction takes the block only after all blocks without a pin. The time is rounded up to
    /// a millisecond.
    pub soft_pin: Option<Duration>,
    /// Whether eviction must never take the block.
    pub hard_pin: bool,
    /// Whether to write a new version if the block is present. If this is false, the put of a present block
    /// ends with [`PutOutcome::Present`].
    pub upsert: bool,
    /// The time limit of the call; `None` means [`crate::Timeouts::put`].
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
    /// The block's key.
    pub key: Key,
    /// The buffers that receive the block's bytes, in order. Together they must be at least as long as the
    /// block. The get does not change bytes beyond the block's end. Unless the outcome is a hit, the contents
    /// of the buffers are undefined.
    ///
    /// A get whose buffers overlap fails. Buffers of different blocks are not compared. If these overlap, the
    /// shared bytes are undefined, also after hits.
    pub buffers: Vec<B>,
}

/// The options of a get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// The time limit of the call; `None` means [`crate::Timeouts::get`].
    pub timeout: Option<Duration>,
    /// Whether to wait until the master has released the call's leases, for at most 0.1 s. The call then
    /// caches no locations. If this is false, the client releases the leases shortly after the return.
    pub release: bool,
}

/// The outcome of a get that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetOutcome {
    /// The bytes are in the buffers and match the committed checksum.
    Hit {
        /// The length of the whole block, even after a get of a range.
        length: Length,
        /// The version of the block that was read.
        version: Version,
    },
    /// The pool does not have the block.
    Miss,
}

/// The options of a view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ViewOptions {
    /// The time limit of the call; `None` means [`crate::Timeouts::get`].
    pub timeout: Option<Duration>,
    /// Whether to return the view without comparing its bytes with the block's checksum.
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

/// The answer of `exist`: which of the given keys are present.
#[derive(Debug)]
pub struct Existence {
    /// One answer for each key, in the order of the keys.
    pub present: Vec<bool>,
    /// The lease on the blocks that are present; empty with [`Leasing::None`].
    pub lease: Lease,
}

/// The answer of `match_prefix`: how many leading blocks of a chain are present.
#[derive(Debug)]
pub struct Prefix {
    /// The number of leading blocks that are present.
    pub blocks: usize,
    /// The lease on these blocks; empty with [`Leasing::None`].
    pub lease: Lease,
}

/// The blocks to remove.
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

/// The outcome of a removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// The number of removed blocks.
    pub removed: u64,
    /// The number of blocks that were kept because a lease or a pin protects them.
    pub kept: u64,
    /// For [`Remove::Keys`], one outcome per key, in order: ok, missing or leased. A large removal takes
    /// several messages. If one message got no answer, its keys have the code of that failure. Their blocks
    /// may or may not be removed.
    pub codes: Vec<Code>,
}

/// The position at which a listing continues, opaque to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page(pub(crate) bytes::Bytes);

/// One page of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The blocks of this page.
    pub blocks: Vec<Listed>,
    /// The position of the next page; `None` after the last page.
    pub next: Option<Page>,
}

/// One block of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The string form of the block's key.
    pub key: String,
    /// The block's length in bytes.
    pub length: Length,
    /// The number of the block's replicas.
    pub replicas: u32,
    /// Whether the block has an unexpired lease.
    pub leased: bool,
    /// Whether the block is pinned, softly or hard.
    pub pinned: bool,
}

/// The master's description of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The block's length in bytes.
    pub length: Length,
    /// The checksum that the writer committed.
    pub checksum: Checksum,
    /// The number of the put that committed the block.
    pub version: Version,
    /// The block's replicas.
    pub replicas: Vec<DescribedReplica>,
    /// The remaining time of the block's lease; zero without a lease.
    pub lease_left: Duration,
    /// The remaining time of the soft pin; zero without one.
    pub soft_pin_left: Duration,
    /// Whether the block has a hard pin, so that eviction never takes it.
    pub hard_pin: bool,
}

/// One replica of a described block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedReplica {
    /// The name of the store node that holds the replica.
    pub node: String,
    /// The range of memory that holds the replica.
    pub extent: Extent,
    /// The state of the replica: live, suspect, draining, drained or hidden.
    pub state: String,
}

/// Limits that the master states at connect and again in each new term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a block.
    pub max_block: Length,
    /// The most keys in one message.
    pub max_batch_keys: usize,
    /// How long a lease of the master lasts.
    pub lease_ttl: Duration,
}

/// The state and the counters of the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// The master's term.
    pub epoch: Epoch,
    /// The number of visible blocks.
    pub blocks: u64,
    /// The number of puts between reserve and commit.
    pub reservations: u64,
    /// The memory that the store nodes contribute, in bytes.
    pub capacity: Length,
    /// The bytes that blocks, grants and quarantine take.
    pub used: Length,
    /// The bytes of freed extents that may not be granted again yet.
    pub quarantine: Length,
    /// The store nodes.
    pub nodes: Vec<NodeStats>,
    /// The master's counters by name.
    pub counters: BTreeMap<String, u64>,
    /// The time since the master started.
    pub uptime: Duration,
    /// The names of the pool's namespaces.
    pub namespaces: Vec<String>,
    /// The SSD media, including media that no node has attached now, and media that nodes have and do not use.
    pub media: Vec<MediumStats>,
    /// The faults of the leader's key files, policy file and certificate files, one sentence each.
    pub problems: Vec<String>,
}

/// One SSD medium, as the master sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumStats {
    /// The medium; 0 for a refused medium without a known id.
    pub id: MediumId,
    /// The id of the medium's segment.
    pub segment: kvpool_types::SegmentId,
    /// The name of the node that attached the medium last.
    pub node: String,
    /// The medium's state: `ready`, `read_only`, `slow`, `gone`, `attaching`, `absent` or `refused`. A refused medium
    /// of another pool has neither a segment nor bytes.
    pub state: String,
    /// The number of its last attachment.
    pub generation: u64,
    /// The bytes available for blocks and their headers.
    pub capacity: Length,
    /// The bytes of `capacity` that are in use.
    pub used: Length,
    /// The number of blocks with a copy on the medium.
    pub copies: u64,
    /// The number of the zone that is being written, counted from 0.
    pub zone: u32,
    /// The length of a zone in bytes.
    pub zone_size: Length,
    /// For a refused medium, its path at the node; otherwise empty.
    pub path: String,
    /// For a refused medium, why the node does not use it; otherwise empty.
    pub reason: String,
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
    /// The node's name.
    pub name: String,
    /// The node's state: live, suspect, draining or drained.
    pub state: String,
    /// The incarnation, which identifies the running process of the node.
    pub incarnation: Incarnation,
    /// The address of the node's data port.
    pub data_address: String,
    /// The path of the node's Unix socket for clients on its host; empty if it has none.
    pub shm_path: String,
    /// The time since the node's last message to the master.
    pub heartbeat_age: Duration,
    /// The node's segments.
    pub segments: Vec<SegmentStats>,
    /// The faults of the node's token, key and certificate files, one sentence each.
    pub problems: Vec<String>,
    /// The number of blocks that a stop of this draining node would lose, when the master last counted them.
    /// `None` while blocks move, if the node does not drain, and from an older master.
    pub left_blocks: Option<u64>,
    /// The node's version of kvpool; empty when unknown.
    pub version: String,
    /// True while the node drains and its media do not come back. False from an older master.
    pub media_leave: bool,
}

/// One segment of a store node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentStats {
    /// The segment's id.
    pub id: kvpool_types::SegmentId,
    /// The segment's size in bytes.
    pub capacity: Length,
    /// The bytes of the segment that blocks, grants and quarantine take.
    pub used: Length,
    /// The bytes of freed extents that may not be granted again yet.
    pub quarantine: Length,
    /// The number of contiguous ranges of free space.
    pub free_ranges: u64,
    /// The length of the longest free range in bytes.
    pub largest_free: Length,
}

impl<B> PutBlock<B> {
    /// Describes a put of one buffer, for a block without a parent.
    pub fn new(key: Key, bytes: B) -> Self {
        Self {
            key,
            parent: None,
            buffers: vec![bytes],
        }
    }
}

impl<B> GetBlock<B> {
    /// Describes a get into one buffer.
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
    /// The position as opaque bytes, which may be kept outside this process.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The position whose bytes [`Page::as_bytes`] returned.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}
