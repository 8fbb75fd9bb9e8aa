//! Blocks over TCP: frames of `kvpool_types::wire::frame`, bytes straight from and into segments and
//! the caller's memory.
//!
//! ```text
//!            link ──► lane (queue, sender thread) ══ connection ══ thread ──► Host
//!  batch ──►   └────► lane (receiver thread)      ══ connection ══ thread ──► Host
//!                      ▲ timer: ends what is past its deadline, by ending its connection
//! ```
//!
//! A link has few connections and keeps them; requests on one are pipelined and batches are cut into
//! frames of some MiB, so that connections share a large batch and small requests find gaps.

mod exchange;
mod lane;
mod link;
mod receive;
mod send;
mod server;
mod session;

pub(crate) use lane::open;
pub use link::{ConnectOptions, connect, connect_with};
pub use server::{Server, ServerHandle, ServerOptions};
