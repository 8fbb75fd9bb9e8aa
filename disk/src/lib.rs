//! I/O on a disk, partition or file.
//!
//! ```text
//!  caller ─ submit(Request, Buffer) ─► Engine ─┬─ io_uring    one ring and one thread
//!     ▲                                        ├─ threads     where io_uring is blocked
//!     │                                        ├─ Memory      for tests: power cuts
//!     └──────── done(Completion) ◄─────────────┴─ Faulty      for tests: errors, delays
//!
//!  Arena ─ take ─► Buffer     page-aligned memory of the node's arena
//!  Slice                      memory of blocks, into which a block is read without a copy
//! ```
//!
//! No engine uses an async runtime: a request carries the function that its completion calls.
//!
//! **Architecture Invariant:** until the completion only its request may write a buffer or slice. Others may read a
//! slice meanwhile, and get undefined bytes.
//!
//! ADR 0035 says why there is one ring per disk and no runtime.

pub mod arena;
mod directory;
pub mod engine;
pub mod faulty;
mod file;
mod holder;
pub mod medium;
pub mod memory;
mod scattered;
mod threads;
mod uring;

pub use arena::{Arena, Buffer};
pub use directory::{check_directory, open_in};
pub use engine::{Completion, Engine, EngineKind, IoError, Op, Request};
pub use faulty::{Fault, Faulty};
pub use file::{Choice, OpenError, Options, check, open};
pub use memory::{Event, Memory};

/// The unit of offsets and lengths of all I/O, in bytes.
pub const GRANULE: usize = 4096;
