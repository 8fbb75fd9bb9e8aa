//! Access to the memory of another process, by that process's own addresses.
//!
//! ```text
//!  Endpoint ──transfer(target, ranges)──► plan ──► Link ──TCP──► Server ──► Host (host.rs)
//!     │                                           │                          │ admits exposed
//!     │                                           └─────RDMA─────► ports ◄── │ ranges only
//!     └─ expose, withdraw ───────────────────────────────────────────► Exposed (exposed.rs)
//! ```
//!
//! - `background`: jobs for peers on threads of their own
//! - [`secret`]: the proof that a process may connect
//! - `exposed`: the ranges that peers may touch, and the wait until no peer touches a range
//! - `direct`: reads from the memory of a peer on the same host.
//! - `host`: a process as its data port sees it: its memory is one segment, and offsets are
//!   addresses
//! - `mailbox`: short messages from peers
//! - `names`: the addresses of peers' names
//! - `letters`: messages of known senders, taken as they arrive
//! - `links`: one peer's links, for letters and for writes into its rooms
//! - `plan`: ranges as batches of a link
//! - `rooms`: views of memory that one key opens for a while, as a hand-off needs them
//! - `room_writes`: what was written into a room
//! - `targets`: the links to peers
//! - `transfer`: one transfer over these links
//! - `watch`: the notice of a peer's death
//! - [`endpoint`]: the interface that joins all of these
//!
//! The protocol is that of the data port, so links, frames, checksums and deadlines are the pool's
//! own. There is no master. The incarnation of an [`endpoint::Endpoint`] is drawn at its start and
//! serves as its session's token. Every read names the token. Every write is signed with a key
//! derived from the token and the secret. Where both ends have RDMA ports, an admitted connection
//! agrees on queue pairs, which end with it. Through them a port can touch the exposed ranges only.
//!
//! ADR 0014 says what a peer may access, and why. ADR 0050 adds rooms.

mod background;
mod direct;
pub mod endpoint;
mod exposed;
mod host;
mod letters;
mod links;
mod mailbox;
mod names;
mod plan;
mod room_writes;
mod rooms;
pub mod secret;
mod targets;
mod transfer;
mod watch;

pub use endpoint::{Direction, Endpoint, EndpointOptions, Message, Route};
pub use exposed::{ExposeError, StillTouched};
pub use host::{CLUSTER, MEMORY};
pub use letters::{Letter, LetterBox, LetterOptions};
pub use links::{PeerLink, RoomPart};
pub use plan::Move;
pub use rooms::{ClosedRoom, RoomPass, RoomRows, RoomView};
pub use secret::Secret;
pub use watch::{PeerLoss, PeerWatch, PeerWatchOptions};

#[cfg(test)]
mod tests;
