//! The part of etcd's API that kvpool uses: key-value transactions, watches, leases, maintenance.
//!
//! ```text
//!  Client ──► the endpoint that answered last ──► etcd
//!     └─ it fails or is late: a new connection to it later, the next endpoint now
//! ```
//!
//! * [`Client`] makes the calls. [`kv`], [`lease`], [`watch`] and [`maintenance`] say which.
//! * [`discover`] finds the masters of a pool: which keys they announce themselves under is said there.
//! * `testing` (a feature) starts real etcd processes.
//!
//! The messages and services are generated from a file of our own (ADR 0010 says why). This is no general client: it
//! has neither range streams nor locks, roles or members' administration.

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
