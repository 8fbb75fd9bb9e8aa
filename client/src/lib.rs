//! The client library that inference workers embed.
//!
//! Control goes to kvmaster through gRPC, in batches; bytes move straight between the worker's
//! memory and the store nodes. Every operation has a deadline, every read is verified against the
//! checksum that the writer committed, and a miss is a value, not an error.
//!
//! ```text
//!              ┌────────── Client ──────────┐
//!  batch_put ─►│ put    reserve write commit│──gRPC──► kvmaster (the one that leads)
//!  batch_get ─►│ get    locate  read  verify│
//!  get_range ─►│ range  (64 KiB chunks)     │══bytes═► kvstore-node (shm or TCP)
//!  get_view  ─►│ view   pin, read in place  │
//!              └────────────────────────────┘
//! ```
//!
//! It is not for operators (that is `kvctl`, built on it), and it keeps no bytes of its own.

pub mod blocking;

mod addresses;
mod api;
mod batch;
mod cache;
mod client;
mod clock;
mod cluster;
mod control;
mod counters;
mod dialer;
mod errors;
mod get;
mod gpu;
mod hunt;
mod lease;
mod links;
mod locate;
mod options;
mod packed;
mod put;
mod queries;
mod range;
mod releases;
mod replicas;
mod reports;
mod view;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

pub use api::{
    DescribedReplica, Description, Existence, GetBlock, GetOptions, Leasing, Limits, Listed,
    Listing, Lookup, NodeStats, Page, PoolStats, Prefix, Put, PutBlock, PutOptions, Remove,
    Removed, SegmentStats, ViewOptions,
};
pub use client::Client;
pub use cluster::{ClusterStatus, MasterStatus, SnapshotStatus, cluster_status};
pub use counters::Counters;
pub use errors::{ConnectError, ControlError, GetError, PutError, RemoveError};
pub use gpu::{GpuBuffer, GpuSlice};
pub use kvpool_transport::gpu::GpuError;
pub use kvpool_transport::rdma::{RdmaOptions, RegisteredBuffer};
pub use kvpool_transport::{Region, Slice};
pub use kvpool_types::namespace::Namespace;
pub use lease::Lease;
pub use options::{Options, Timeouts, TransportChoice, masters};
pub use packed::PackedKeys;
pub use view::View;
