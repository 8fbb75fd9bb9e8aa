//! The client library that an inference worker embeds to put KV blocks into the pool and get them back.
//!
//! Control calls go to the leading kvmaster in batches. Bytes move directly between the worker's memory
//! and the store nodes. Every operation has a deadline. Every get is verified against the checksum that
//! the writer committed. A miss is a value, not an error.
//!
//! ```text
//!              ┌──────────────── Client ────────────────┐
//!  batch_put ─►│ put    reserve ► write ► commit        │
//!  batch_get ─►│ get    locate ► read ► verify          │──frames: hot calls──► leading kvmaster
//!  get_range ─►│ range  locate ► read chunks ► verify   │──gRPC: other calls──► (found through any
//!  get_view  ─►│ view   locate ► pin ► read in place    │                        master, or etcd)
//!              │   │                                    │
//!              │   ├─ location cache: no lookup for a   │
//!              │   │  block whose location is cached    │
//!              │   ├─ replicas: the next one is tried   │══bytes══► kvstore-node: shared memory,
//!              │   │  when one fails                    │           RDMA or TCP, one link each
//!              │   └─ releases: leases that are given   │
//!              │      back later, many in one call      │
//!              └────────────────────────────────────────┘
//! ```
//!
//! Hot calls (reserve, commit, lookup, exist, match_prefix, renew, release) travel in frames. gRPC
//! carries the other calls, and all calls where frames cannot be used. To reach a node, the client
//! tries shared memory on the same host, then RDMA, then TCP ([`TransportChoice`] restricts the choice).
//!
//! Operators use `kvctl`, which is built on this crate. The crate itself stores no blocks.
//!
//! # Quick start
//!
//! The keys come from the seed of a namespace, and the client must connect with the same namespace. Each
//! put names its parent, so that eviction takes the end of a chain before its beginning.
//!
//! ```no_run
//! use kvpool_client::{
//!     Client, GetBlock, GetOptions, Length, Namespace, Options, PutBlock, PutOptions, Region, chain,
//! };
//! use std::num::NonZeroUsize;
//!
//! const BLOCK_BYTES: usize = 64 << 10;
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let namespace = Namespace {
//!         name: "llama-8b".into(),
//!         dtype: "bf16".into(),
//!         ..Default::default()
//!     };
//!     let seed = namespace.seed();
//!     let client = Client::connect(Options {
//!         namespace,
//!         ..Options::default()
//!     })
//!     .await?;
//!
//!     // Chained SHA-256 over the prompt's tokens. A partial block at the end has no key.
//!     let tokens: Vec<u32> = (0..100).collect();
//!     let block_tokens = NonZeroUsize::new(16).ok_or("a block has tokens")?;
//!     let keys = chain::chain_keys(seed, block_tokens, &tokens);
//!
//!     // One round trip: how many leading blocks are in the pool. The lease protects them from eviction.
//!     let prefix = client.match_prefix(&keys).await?;
//!     println!("{} of {} blocks are in the pool", prefix.blocks, keys.len());
//!
//!     // Compute the missing blocks and put them: one outcome per block.
//!     let mut puts = Vec::new();
//!     for (at, key) in keys.iter().enumerate().skip(prefix.blocks) {
//!         let parent = at
//!             .checked_sub(1)
//!             .and_then(|before| keys.get(before))
//!             .cloned();
//!         let kv = Region::from(vec![u8::try_from(at)?; BLOCK_BYTES]);
//!         puts.push(PutBlock {
//!             parent,
//!             ..PutBlock::new(key.clone(), kv.whole())
//!         });
//!     }
//!     for outcome in client.batch_put(puts, &PutOptions::default()).await {
//!         println!("put: {:?}", outcome?);
//!     }
//!
//!     // A decode worker, on this host or another, gets the chain into its own memory, verified.
//!     let targets: Vec<Region> = keys
//!         .iter()
//!         .map(|_| Region::allocate(Length(BLOCK_BYTES as u64)))
//!         .collect();
//!     let gets = keys
//!         .iter()
//!         .zip(&targets)
//!         .map(|(key, kv)| GetBlock::new(key.clone(), kv.whole()));
//!     for outcome in client
//!         .batch_get(gets.collect(), &GetOptions::default())
//!         .await
//!     {
//!         println!("get: {:?}", outcome?);
//!     }
//!     Ok(())
//! }
//! ```
//!
//! [`blocking`] has the same operations for callers without an async runtime.
//!
//! # Outcomes
//!
//! A batch returns one outcome for each key, in order. One bad key never fails the other keys.
//! [`PutOutcome`] and [`GetOutcome`] are the successes; a block that is absent is [`GetOutcome::Miss`].
//! Each error has a stable [`Code`] and `is_retryable()`.
//!
//! # Cancellation
//!
//! Dropping an operation's future is always safe and never blocks. Transfers that are under way keep
//! their buffers alive and run until they complete or their deadline passes. Until then the bytes of a
//! get's buffers are undefined, and the bytes of a put's buffers must not change. Reservations of a
//! dropped put are revoked. If its commit was already sent, the block may become visible. Leases of a
//! dropped get are released.

pub mod blocking;

mod api;
mod cache;
mod client;
mod clock;
mod cluster;
mod context;
mod control;
mod counters;
mod dialer;
mod distinct;
mod errors;
mod get;
mod gpu;
mod latencies;
mod lease;
mod links;
mod locate;
mod message_limits;
mod namespaces;
mod options;
mod overlap;
mod packed;
mod put;
mod queries;
mod range;
mod releases;
mod replica_retry;
mod replica_tasks;
mod replicas;
mod reports;
mod revoker;
#[cfg(feature = "simulation")]
pub mod simulation;
mod spans;
mod view;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use api::{
    DescribedReplica, Description, Detached, Existence, GetBlock, GetOptions, GetOutcome, Leasing,
    Limits, Listed, Listing, MediumStats, NodeStats, Page, PoolStats, Prefix, PutBlock, PutOptions,
    PutOutcome, Remove, Removed, SegmentStats, ViewOptions,
};
pub use client::Client;
pub use cluster::{ClusterStatus, MasterStatus, SnapshotStatus, cluster_overview, cluster_status};
pub use counters::Counters;
pub use errors::{ConnectError, ControlError, GetError, PutError, RemoveError};
pub use gpu::{GpuBuffer, GpuSlice};
pub use kvpool_auth::Credentials;
pub use kvpool_transport::gpu::GpuError;
pub use kvpool_transport::rdma::{RdmaOptions, RegisteredBuffer};
pub use kvpool_transport::{Region, Slice};
pub use kvpool_types::namespace::Namespace;
pub use kvpool_types::{
    Code, Key, KeyRef, Length, NamespaceSettings, Offset, Setting, Version, chain,
};
pub use latencies::Latency;
pub use lease::Lease;
pub use namespaces::NamespaceInfo;
pub use options::{
    BadMaster, ClientFiles, DEFAULT_MASTER, Options, Timeouts, TransportChoice, masters,
    parse_master,
};
pub use packed::PackedKeys;
pub use put::order_matters;
pub use replica_tasks::{ReplicaBlocks, ReplicaChange, ReplicaTask, ReplicaTaskState, ReplicaWish};
pub use view::View;
