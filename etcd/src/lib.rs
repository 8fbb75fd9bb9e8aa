//! The part of etcd's API that kvpool uses: key-value transactions, watches, leases, maintenance.
//!
//! ```text
//!  Client ──► the endpoint that answered last ──► etcd
//!     └─ it fails or is late: a new connection to it later, the next endpoint now
//! ```
//!
//! * [`Client`] makes the calls. [`kv`], [`lease`], [`watch`] and [`maintenance`] define them.
//! * [`discover`] finds the masters of a pool, and documents the keys under which they announce themselves.
//! * `testing` (a feature) starts real etcd processes.
//!
//! The messages and services are generated from kvpool's own `.proto` file (ADR 0010 says why). This is not a general
//! client: it has no range streams, no locks, and no administration of roles or members.

mod client;
pub mod discover;
mod error;
pub mod kv;
pub mod lease;
pub mod maintenance;
#[cfg(feature = "testing")]
pub mod testing;
pub mod watch;

pub use client::{Client, Options, Tls};
pub use error::Error;

#[allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated; the .proto file carries the documentation"
)]
mod generated {
    include!("generated/etcdserverpb.rs");
}
