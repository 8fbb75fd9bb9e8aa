//! The memory of another process, reached by the addresses that it has there.
//!
//! ```text
//!  Endpoint ──transfer(target, ranges)──► plan ──► Link ──TCP──► Server ──► Host (host.rs)
//!     │                                           │                          │ admits what is
//!     │                                           └─────RDMA─────► ports ◄── │ registered with
//!     └─ expose, withdraw ───────────────────────────────────────────► Exposed (exposed.rs)
//! ```
//!
//! - [`secret`] what proves that a process may connect
//! - `exposed` the ranges that peers may touch, and waiting until none does
//! - `host` a process as the data port sees it: its memory is one segment, offsets are addresses
//! - `mailbox` short messages that peers leave
//! - `plan` ranges as batches of a link
//! - `known` the links to peers
//! - `moving` a transfer over them
//! - [`endpoint`] all of it together
//!
//! The protocol is that of the data port, so links, frames, checksums and deadlines are the pool's own.
//! There is no master: the incarnation of a [`endpoint::Endpoint`] is drawn at its start and serves as the
//! token of its session. Every read names it, every write is signed under a key made of it and the secret.
//! Where both ends have RDMA ports, a connection that was let in agrees on queue pairs, which end with it;
//! what a port may touch by them is what is exposed.
//!
//! ADR 0014 says what a peer may access, and why.

pub mod endpoint;
mod exposed;
mod host;
mod mailbox;
mod plan;
pub mod secret;
mod targets;
mod transfer;
mod wait;

pub use endpoint::{Direction, Endpoint, EndpointOptions, Message, Route};
pub use exposed::{ExposeError, StillTouched};
pub use host::{CLUSTER, MEMORY};
pub use plan::Move;
pub use secret::Secret;

#[cfg(test)]
mod tests;
