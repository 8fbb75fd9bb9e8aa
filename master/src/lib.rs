//! kvmaster: knows which block of the pool lies where. It never touches a block's bytes.
//!
//! ```text
//!  clients ─gRPC─► service ─► pool ─┬─► directory    key ─► block, leases, recency
//!  nodes   ─gRPC─►                  ├─► placement    segments, extents, quarantine
//!  people  ─HTTP─►                  ├─► reservations puts under way
//!                                   ├─► membership   nodes and their states
//!                                   └─► store        journal, log, snapshots
//! ```

#![forbid(unsafe_code)]

pub mod clock;
mod config;
pub mod directory;
mod flags;
pub mod leadership;
pub mod membership;
pub mod metrics;
pub mod namespaces;
pub mod open_connections;
pub mod placement;
pub mod pool;
pub mod replica;
pub mod reservations;
mod server;
pub mod service;
mod slab;
mod standalone;
pub mod standby;
pub mod store;
pub mod term;
mod wait_budget;
pub mod writers;

pub use config::{CommitAck, Config, InvalidSetting};
pub use flags::Flags;
pub use server::Server;
