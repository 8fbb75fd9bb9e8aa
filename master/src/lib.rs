//! kvmaster: the directory of a pool's blocks and their replicas. It never touches a block's bytes.
//!
//! ```text
//!  clients ─frames, gRPC─► service ─► pool ─┬─► directory    key ─► block, leases, recency
//!  nodes   ─gRPC─────────►   ▲              ├─► placement    segments, extents, quarantine
//!  people  ─HTTP─────────►   │              ├─► reservations open puts
//!                            │              ├─► membership   nodes and their states
//!                      leadership           └─► store        journal, log, snapshots
//!                   (leader or standby)
//! ```

#![forbid(unsafe_code)]

pub mod accounts;
pub mod clock;
mod config;
pub mod directory;
mod flags;
pub mod leadership;
pub mod membership;
pub mod metrics;
pub mod namespaces;
pub mod open_connections;
pub mod overview;
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
pub mod tenant;
pub mod term;
pub mod tier;
mod wait_budget;
pub mod workers;
pub mod writers;

pub use config::{CommitAck, Config, InvalidSetting};
pub use flags::Flags;
pub use server::Server;
