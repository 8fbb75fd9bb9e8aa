//! Memory regions, and the ways to move bytes between them.
//!
//! Clients open a [`Link`] to a node; nodes serve a [`Host`](host::Host). What lies between is [`tcp`]
//! or [`shm`]; a [`channel`] carries what is small. [`peer`] gives a process's own memory to others in the
//! same way. Nothing here knows keys, leases or the master.

pub mod channel;
pub mod checksum;
mod control;
mod copiers;
mod deadlines;
mod frame;
pub mod gpu;
mod handshake;
pub mod host;
mod inline;
pub mod link;
pub mod machine;
pub mod memory;
mod outcomes;
pub mod peer;
pub mod rdma;
mod service;
pub mod shm;
mod socket;
mod split;
pub mod tcp;
mod timer;

pub use channel::Channel;
pub use link::{Link, ReadOp, TransferError, TransferResult, TransportKind, WriteOp};
pub use memory::{Region, Slice};
