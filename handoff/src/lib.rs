//! Direct transfer of KV from a prefill process to a decode process, without the pool.
//!
//! References such as "row C7" name rows of the table in `docs/handoff-rows.md`.
//!
//! ```text
//!  registry ◄──HTTP── prefill, decode        addresses of ranks (`bootstrap` serves it)
//!
//!  prefill: RoomSender ◄─messages (wire)──► RoomReceiver :decode      a room: push and pull
//!               │                                │
//!             pins                        pages of memory
//!               └──── plan: pages and ranks ─────┘   which bytes go where
//! ```
//!
//! - [`plan`]: layouts, ranks and page lists as rows of bytes
//! - [`room`]: the two ends of a push or pull, with their poll states, deadlines and fences
//! - [`pins`]: the pages that offers pin, backpressure, and the breaker of each receiver
//! - [`aux`]: the slot of metadata that travels with the last chunk of pages
//! - [`registration`]: the layout and memory regions that each end sends the other once
//! - [`registry`]: the bootstrap registry, and the HTTP dialects that engines speak to it
//! - [`wire`]: the messages as bytes
//! - [`shares`]: the bytes that one prefill rank sends to one decode rank
//! - [`session`]: runs all rooms of one process over the transport
//! - [`bootstrap`]: the HTTP server of the registry
//!
//! All modules except [`bootstrap`] and [`session`] are pure: no I/O, no clock, no randomness. The
//! caller passes the time as a [`Moment`]. A state machine takes an event and returns actions, which
//! the caller performs. `tests/network/` runs the machines over a network that loses, repeats and
//! delays messages. `tests/session/` runs sessions over real connections.
//!
//! This crate is not for blocks of the pool: a block is named by its content and found by the
//! master. A room is named by its request, and only its two ends know it. ADR 0049 gives the reasons.

#![forbid(unsafe_code)]

pub mod aux;
pub mod bootstrap;
mod moment;
pub mod pins;
pub mod plan;
pub mod registration;
pub mod registry;

pub mod room;
pub mod session;
pub mod shares;
pub mod wire;

pub use moment::Moment;
