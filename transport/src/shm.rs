//! Transfers through shared memory, for clients on the node's host.
//!
//! ```text
//!  link ──► control socket (frames without payload, with descriptors) ──► thread ──► Host
//!    ├────► pin board: slots in shared memory ◄── read by the Host
//!    ├────► copy threads: mapping of the segment ◄══► the caller's memory
//!    └────► timer: ends operations at their deadline
//!                                         watcher: pidfd of each client's process ──► ShmHost::peer_gone
//! ```
//!
//! A write is announced before its first byte and ended after its last byte, because a mapping
//! cannot be revoked. Until the end, or the death of the process, the node does not reuse the
//! extent.

pub mod board;
pub(crate) mod fds;
mod link;
mod peers;
mod read;
mod segments;
mod server;
mod session;
mod write;

pub use link::{ConnectOptions, connect, connect_with};
pub use server::{Server, ServerHandle, ServerOptions};
