//! Worker processes: what stands in for the prefill and decode workers of an inference engine.
//!
//! ```text
//!  kvctl demo ──Command, one JSON line──► kvctl worker ──client library──► pool
//!             ◄──Answer, one JSON line──
//! ```

mod handle;
pub(crate) mod protocol;
mod serve;

pub(crate) use handle::Handle;
pub(crate) use serve::{Blocks, Options, Role, run};
