//! The processes that a benchmark runs in: clients of the pool, and the two that show the machine's
//! limits. They do what they are told, on a plain thread, as the worker of an engine would.
//!
//! ```text
//!  kvctl bench ──Command, one JSON line──► kvctl bench-agent ──blocking::Client──► pool
//!              ◄──Reply, one JSON line───   (or copies, streams, pings)
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

/// Such a process, seen from the one that tells it what to do.
pub(crate) type Handle = crate::remote::Handle<protocol::Command, protocol::Answer>;
