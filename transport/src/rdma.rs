//! One-sided reads and writes over RDMA verbs, between memory that is registered on both sides.
//!
//! ```text
//!  Fabric ─► Rail (one port: protection domain, registrations, one completion thread)
//!              └─ QueuePair ─► RdmaLane: submit ─► plan ─► post ─► completions ─► done
//! ```
//!
//! - [`options`] what an operator can set, and why there may be no RDMA here
//! - [`device`] the library and the devices of this host
//! - [`rail`] one port: its limits, what is registered and made on it
//! - [`registry`] registered memory, and the cache for callers who do not register
//! - [`queue`] one reliable connection, from its creation to its end
//! - [`work`] what a lane is asked to do and how it may end
//! - `plan`, `turns`, `operation` transfers as work requests, their order, their outcomes
//! - [`lane`] the side of a queue pair that submits
//! - `completions` the thread that hears of ends
//! - `matching` which ports of two hosts are the ends of a link, `rests` those over which nothing comes
//! - `near` which of several lanes a transfer goes over
//! - `link`, `read`, `write` the [`Link`](crate::Link) of a client, agreed on over the data port
//! - `pieces`, `posting` a batch in pieces, and whose turn it is to post one
//! - `places`, `locate` where a link finds the node's memory
//! - `serve` the node's side of it, `exposure` its memory
//! - `sys` libibverbs, loaded at run time
//!
//! What is in flight owns its memory: a slice that was submitted is kept until its work request has
//! ended or its queue pair has been destroyed, whatever its submitter does meanwhile.
//!
//! ADR 0013 says how links are agreed on and fenced.

mod completions;
mod cooldowns;
pub mod device;
mod exposure;
pub mod lane;
mod lane_choice;
mod link;
mod locate;
mod matching;
mod operation;
pub mod options;
mod pieces;
mod plan;
mod posting;
pub mod queue;
pub mod rail;
mod range_cache;
mod read;
pub mod registry;
mod serve;
mod shared;
mod sys;
mod turns;
pub mod work;
mod write;

pub use device::Fabric;
pub(crate) use exposure::Exposure;
pub use lane::RdmaLane;
pub use link::connect;
pub(crate) use link::{RdmaLink, open};
pub use options::{RdmaOptions, Retry, Unavailable};
pub use queue::{Allows, QueueAddress, QueuePair};
pub use rail::{Limits, Rail};
pub use registry::{Access, RegisteredBuffer, Registration};
pub use serve::Serving;
pub(crate) use serve::{RdmaSession, located};
pub use work::{Fault, Remote, Transfer, Verb, WorkError};
