//! Transfers over TCP: frames of `kvpool_types::wire::frame`, with bytes moved directly between
//! segments and the caller's memory.
//!
//! ```text
//!            link ──► lane (queue, sender thread) ══ connection ══ thread ──► Host
//!  batch ──►   └────► lane (receiver thread)      ══ connection ══ thread ──► Host
//!                      ▲ timer: ends late requests by ending their connection
//! ```
//!
//! A link has few connections and keeps them open. Requests on a connection are pipelined. Batches
//! are divided into frames of a few MiB, so connections share a large batch, and small requests
//! wait for one frame at most.

mod exchange;
mod lane;
mod link;
mod receive;
mod send;
mod server;
mod session;

pub(crate) use lane::open;
pub use link::{ConnectOptions, TokenSource, connect, connect_with};
pub use server::{Server, ServerHandle, ServerOptions};
