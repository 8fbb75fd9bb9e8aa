//! kvstore-node: contributes memory segments to the pool and serves their bytes.
//!
//! ```text
//!            kvmaster                          clients
//!               │ gRPC session                    │ TCP, Unix socket
//!        ┌──────▼──────┐  terms, fences   ┌───────▼────────┐
//!        │ agent       ├────────────────► │ Store: Host    │
//!        │ own thread  │ ◄────────────────┤  Fence (lock)  │
//!        └─────────────┘  fenced tickets  │  segments      │
//!                                         └────────────────┘
//! ```
//!
//! The node does not decide which blocks are kept. It owns memory, moves bytes, and guarantees that an extent
//! is not reused while anything can still touch it. It knows no keys and no leases.
//!
//! A worker can embed it: [`Node::start`] with a [`Config`], [`Node::drain`] at the end.

#![forbid(unsafe_code)]

mod agent;
mod clock;
mod config;
mod fence;
mod flags;
mod media;
mod metrics;
mod node;
mod pulls;
mod reach;
mod segment;
mod serve;
#[cfg(feature = "simulation")]
pub mod simulation;

pub use config::{Config, InvalidSetting, Isolation};
pub use flags::Flags;
pub use media::{Attachment, MediumStatus};
pub use node::{Node, StartError};
