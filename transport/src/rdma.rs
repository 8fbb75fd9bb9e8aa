//! One-sided reads and writes over RDMA verbs, between memory that is registered on both sides.
//!
//! ```text
//!  Fabric ─► Rail (one port: protection domain, registrations, one completion thread)
//!              └─ QueuePair ─► RdmaLane: submit ─► plan ─► post ─► completions ─► done
//! ```
//!
//! - [`options`]: the operator's settings, and why RDMA may be unavailable
//! - [`device`]: the library and the devices of this host
//! - [`rail`]: one port, with its limits, registrations and queue pairs
//! - [`registry`]: registered memory, and the cache for callers that do not register
//! - [`queue`]: one reliable connection, from its creation to its end
//! - [`work`]: the work of a lane, and its possible errors
//! - `plan`, `turns`, `operation`: transfers as work requests, their order, their outcomes
//! - [`lane`]: the submitting side of a queue pair
//! - `completions`: the thread that receives completions
//! - `matching`: which ports of two hosts form pairs; `cooldowns`: pairs that failed
//! - `lane_choice`: which of several lanes carries a transfer
//! - `link`, `read`, `write`: the [`Link`](crate::Link) of a client, agreed on over the data port
//! - `pieces`, `posting`: a batch in pieces, and their posting in turn
//! - `range_cache`, `locate`: where a link finds the node's memory
//! - `serve`: the node's side; `exposure`: its registered memory
//! - `sys`: libibverbs, loaded at run time
//!
//! Work in flight keeps its memory alive. A submitted slice is kept until its work request has
//! ended or its queue pair is destroyed, whatever the submitter does.
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
pub(crate) use link::{RdmaLink, open};
pub use link::{connect, connect_with};
pub use options::{RdmaOptions, Retry, Unavailable};
pub use queue::{Allows, QueueAddress, QueuePair};
pub use rail::{Limits, Rail};
pub use registry::{Access, RegisteredBuffer, Registration};
pub use serve::Serving;
pub(crate) use serve::{RdmaSession, located};
pub use work::{Fault, Remote, Transfer, Verb, WorkError};
