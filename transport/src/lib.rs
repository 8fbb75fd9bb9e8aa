//! Moves bytes between clients and store nodes: memory regions, checksums, and the transports.
//!
//! ```text
//!  client                                                            store node
//!  Link::read, write, sums, pin                                      Host: judges, lends memory
//!    │                                                                 ▲
//!    ├─ inline ─► Channel ═══ frames, TCP or Unix socket ════════► service ─► tcp, shm sessions
//!    ├─ tcp ────► lanes ═════ frames with payload ═══════════════►   │
//!    ├─ shm ────► Control ═══ frames, descriptors ═══════════════►   │
//!    │             └ copiers: mapping of the segment ◄══► caller's memory; pin board
//!    └─ rdma ───► Control ═══ frames ════════════════════════════►   │
//!                  └ RdmaLane: queue pairs ═══ reads, writes ══════► registered segments
//!
//!  gpu: device memory ◄═ copy engines ═► pinned host memory ◄═► any link
//!  peer: a process's own memory, served to other processes by the same sessions and links
//! ```
//!
//! | modules | content |
//! |---|---|
//! | [`link`], [`host`] | the two ends of every transport: the client's trait and the node's trait |
//! | [`tcp`], [`shm`], [`rdma`] | the transports; each has a `link` (client) and a `server` or `serve` (node) |
//! | [`channel`], `inline` | small requests on one connection without a thread, also to a master |
//! | `control` | the socket beside a mapping or queue pairs: announcements, ends, checksums |
//! | `frame`, `socket`, `handshake` | frames on a blocking socket, vectored I/O, the hello |
//! | `service` | the accepting thread, callers before hello, one thread a connection |
//! | `split`, `outcomes`, `deadlines`, `timer`, `copiers` | a batch: its frames, outcomes, deadline and jobs |
//! | [`memory`], [`checksum`], [`machine`] | regions and slices, CRC-64 while copying, the host's identity |
//! | [`gpu`], [`peer`] | copy engines, and peer memory for `mooncake.engine` |
//!
//! This crate does not know keys, leases or the master. A new transport implements [`Link`], calls
//! [`Host`](host::Host), and runs the suite `tests/conformance`.

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
mod threads;
mod timer;
mod wire;

pub use channel::Channel;
pub use link::{Link, ReadOp, SumsOp, TransferError, TransferResult, TransportKind, WriteOp};
pub use memory::{Region, Slice};
pub use wire::DataTls;
