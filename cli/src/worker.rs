//! Worker processes, in place of the prefill and decode workers of an inference engine.
//!
//! ```text
//!  kvctl demo ──Command, one JSON line──► kvctl worker ──client library──► pool
//!             ◄──Answer, one JSON line──
//! ```

pub(crate) mod protocol;
mod serve;

pub(crate) use serve::{Blocks, Options, Role, run};

/// A worker, seen from the process that sends the commands.
pub(crate) type Handle = crate::remote::Handle<protocol::Command, protocol::Answer>;
