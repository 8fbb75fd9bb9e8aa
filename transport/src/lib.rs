//! Memory regions, and the ways to move bytes between them.
//!
//! Clients open a [`Link`] to a node; nodes serve a [`Host`]. What lies between is `tcp` or `shm`.
//! Nothing here knows keys, leases or the master.

pub mod host;
pub mod link;
pub mod memory;

pub use link::{Link, ReadOp, TransferError, TransferResult, TransportKind, WriteOp};
pub use memory::{Region, Slice};
