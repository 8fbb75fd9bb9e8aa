//! Blocks through shared memory, for clients on the node's own host.
//!
//! ```text
//!  link ──► control socket (frames without payload, descriptors beside them) ──► thread ──► Host
//!    ├────► pin board: slots in shared memory ◄── looked at by the Host
//!    ├────► copy threads: mapping of the segment ◄══► the caller's memory
//!    └────► timer: ends what waits past its deadline
//!                                         watcher: pidfd of each client's process ──► Host::peer_gone
//! ```
//!
//! A write is announced before its first byte and ended after its last, because a mapping cannot be
//! taken back: until the end, or the death of the process, the node keeps the extent as it is.

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
