//! Pulls: decode reads prefill's pages, at once (eager) or when it uses them (delayed).
//!
//! ```text
//!  PullDesk (prefill)                       PullReceiver (decode)
//!   pins the pages ──Ready (checksums)────► eager: allocates all pages, or says Busy
//!   frees what is held ◄──Ack (held)───────  reads, verifies
//!   frees the rest ◄──────PullDone─────────  once, after the last page
//!                                           delayed: keeps proxies, which hold no memory; at use
//!                                            reads chunk N while chunk N-1 is scattered
//! ```
//!
//! Rows P3, P4, P6 to P8 and P10. Every page has a checksum in Ready, which a read must match: a
//! page that its sender has freed meanwhile, after the TTL, is never taken for the right one.

mod desk;
mod pingpong;
mod receiver;
#[cfg(test)]
mod tests;

pub use desk::{PullAction, PullDesk};
pub use receiver::{PullEvent, PullOptions, PullReceiver, PullStep};

use crate::pins::PullId;
use kvpool_types::{Checksum, Code};
use std::time::Duration;

/// When decode reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullMode {
    /// At once.
    Eager,
    /// When the engine uses the pages.
    Delayed,
}

/// Prefill's notice that pages can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullReady {
    /// The pull.
    pub pull: PullId,
    /// When decode reads.
    pub mode: PullMode,
    /// The sender's pages, in the order of the request.
    pub pages: Vec<u32>,
    /// The checksum of each page.
    pub sums: Vec<Checksum>,
    /// How long the sender keeps the pages.
    pub ttl: Duration,
}

/// A message of decode about one pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToPullSender {
    /// Decode takes the pull, and holds these pages already: indices into the ready notice.
    Ack {
        /// The pull.
        pull: PullId,
        /// The indices, in rising order.
        held: Vec<u32>,
    },
    /// Decode could not allocate, and has undone what it had (P10).
    Busy {
        /// The pull.
        pull: PullId,
    },
    /// Decode reads no page any more. Sent exactly once.
    PullDone {
        /// The pull.
        pull: PullId,
    },
}

/// A message of prefill about one pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToPullReceiver {
    /// Pages can be read.
    Ready(PullReady),
    /// The pages are about to be freed.
    Abort {
        /// The pull.
        pull: PullId,
        /// The reason.
        code: Code,
    },
}
