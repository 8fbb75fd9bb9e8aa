//! The processes of a benchmark: clients of the pool, and two processes that measure the machine's limits.
//! Each executes commands on a plain thread, as a worker of an engine would.
//!
//! ```text
//!  kvbench ──Command, one JSON line──► kvbench agent ──blocking::Client──► pool
//!          ◄──Reply, one JSON line───   (or copies, streams, pings)
//! ```

mod blocks;
mod load;
mod local;
mod lookups;
mod moves;
pub(crate) mod protocol;
mod serve;
mod yardstick;

pub(crate) use serve::run;

/// An agent, seen from kvbench.
pub(crate) type Handle = kvctl::remote::Handle<protocol::Command, protocol::Answer>;
