//! Rooms: the two ends of one push or pull, from prefill's ranks to decode's. In both, prefill writes.
//!
//! ```text
//!  RoomReceiver (decode rank)                     RoomSender (prefill rank)
//!   Bootstrapping ───Offer (pages, key, deadline)──► Bootstrapping
//!   WaitingForInput ◄──Accept (all ranks)─────────── WaitingForInput
//!        │           ◄══ bytes ════════════════════════ Produced by the engine
//!   Transferring ◄───Chunk (rectangle, checksum)──── Transferring
//!        │       ◄───Done (number of chunks, root)─────┤
//!   [close, fence, verify] ──Lacks─────────────────► sends these chunks again
//!   Success ─────────Complete──────────────────────► Success
//!   Failed ◄─────Abort, Aborted (after the fence)──► Failed
//! ```
//!
//! - [`RoomReceiver`], [`RoomSender`]: one rank's end of one room
//! - [`ReceiverDesk`], [`SenderDesk`]: all rooms of a process; messages of rooms that have ended
//! - [`CellBitmap`]: the pages and layers that have arrived
//!
//! Invariants, each with a test in `tests/network/`:
//!
//! - Success means that the bytes were verified after the room was closed and fenced. So no later write can
//!   change them.
//! - A receiver gives the pages of a failed room back only after the fence. A sender gives its pages back only
//!   after its writes have ended.
//! - A room ends by its deadline at both ends, whatever the network does. Failed is final.
//! - A message of a room that has ended cannot reopen the room: the tombstone records (room, generation).

mod bitmap;
mod desk;
mod given_up;
mod messages;
mod receiver;
mod sender;
mod tombstones;

pub use bitmap::CellBitmap;
pub use desk::{DeskOptions, ReceiverDesk, SenderDesk};
pub use messages::{
    ChunkBody, MAX_LACKS, RoomChunk, RoomKey, RoomOffer, RoomRoot, ToReceiver, ToSender,
};
pub use receiver::{ReceiverAction, ReceiverEvent, RoomReceiver, RoomReceiverPlan, SenderShare};
pub use sender::{RoomSender, RoomSenderPlan, SenderAction, SenderEvent};
pub use tombstones::{RoomOutcome, Tombstones};

use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// The number of one request, on which prefill and decode agree (row S3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoomId(pub u64);

impl RoomId {
    /// The data-parallel rank that serves the room (row S3). `None` for a group of no ranks.
    pub const fn dp_rank(self, dp_size: u64) -> Option<u64> {
        self.0.checked_rem(dp_size)
    }
}

/// The number of one attempt at a room. A receiver's process numbers its attempts in rising order, over all its
/// rooms. Two incarnations of a process use different numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoomGeneration(pub u64);

/// One attempt at a room, as its receiver names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoomTag {
    /// The room.
    pub room: RoomId,
    /// The receiver's attempt.
    pub generation: RoomGeneration,
}

impl fmt::Display for RoomTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "room {} ({})", self.room.0, self.generation.0)
    }
}

/// The poll states of the documents (row S1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PollState {
    /// The room has failed. Final.
    Failed = 0,
    /// Not all ranks of the other side are known.
    Bootstrapping = 1,
    /// All ranks agree; no byte has moved.
    WaitingForInput = 2,
    /// Bytes move.
    Transferring = 3,
    /// All bytes are in place and verified. Final.
    Success = 4,
}

impl PollState {
    /// The state of a room over all ranks of one side: the least of their states, so that one failure fails the
    /// room. `None` without ranks.
    pub fn combined(ranks: impl IntoIterator<Item = Self>) -> Option<Self> {
        ranks.into_iter().min()
    }

    /// The number of the documents.
    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// The longest time in each state. The room's own deadline bounds the sum of all states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomLimits {
    /// The limit for Bootstrapping.
    pub bootstrapping: Duration,
    /// The limit for WaitingForInput, while prefill computes.
    pub waiting: Duration,
    /// The limit for Transferring without progress.
    pub stalled: Duration,
    /// The limit for the fence and the verification. An abort is repeated for as long.
    pub closing: Duration,
    /// The time between two repetitions of a message without an answer.
    pub retry: Duration,
    /// The time that a broken connection has to come back.
    pub grace: Duration,
}

impl Default for RoomLimits {
    fn default() -> Self {
        Self {
            bootstrapping: Duration::from_secs(30),
            waiting: Duration::from_secs(300),
            stalled: Duration::from_secs(30),
            closing: Duration::from_secs(10),
            retry: Duration::from_millis(500),
            grace: Duration::from_millis(600),
        }
    }
}

impl RoomLimits {
    /// The same limits, with `bootstrapping` replaced by the patience of one room.
    #[must_use]
    pub fn with_patience(self, patience: Option<Duration>) -> Self {
        Self {
            bootstrapping: patience.unwrap_or(self.bootstrapping),
            ..self
        }
    }
}

/// Pages times layers of one request. Pages count from the request's first token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRectangle {
    /// The pages.
    pub pages: Range<u32>,
    /// The layers.
    pub layers: Range<u32>,
}

impl PageRectangle {
    /// The number of pages times layers.
    pub fn cells(&self) -> u64 {
        self.pages.len() as u64 * self.layers.len() as u64
    }

    /// Whether the rectangle holds no page or no layer.
    pub fn is_empty(&self) -> bool {
        self.cells() == 0
    }

    /// Whether all of `other` lies inside this rectangle.
    pub fn contains(&self, other: &Self) -> bool {
        let within = |outer: &Range<u32>, inner: &Range<u32>| {
            outer.start <= inner.start && inner.end <= outer.end
        };
        within(&self.pages, &other.pages) && within(&self.layers, &other.layers)
    }

    /// Splits the rectangle into pieces of at most `cells` pages times layers. The pieces are whole layers if
    /// one layer fits, else pages of one layer.
    pub fn split(&self, cells: u64) -> Vec<Self> {
        let cells = cells.max(1);
        if self.cells() <= cells {
            return vec![self.clone()];
        }
        let step = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let all_pages = self.pages.len() as u64;
        let (layers, pages) = match all_pages <= cells {
            true => (step(cells / all_pages), step(all_pages)),
            false => (1, step(cells)),
        };
        let pieces = |range: &Range<u32>, step: u32| {
            let end = range.end;
            let begins = range.clone().step_by(step as usize);
            begins.map(move |begin| begin..end.min(begin.saturating_add(step)))
        };
        let of_layers = |layers: Range<u32>| {
            pieces(&self.pages, pages).map(move |pages| Self {
                pages,
                layers: layers.clone(),
            })
        };
        pieces(&self.layers, layers).flat_map(of_layers).collect()
    }

    /// The rectangle without the pages before `held`.
    pub fn without_held(&self, held: u32) -> Self {
        let start = self.pages.start.max(held).min(self.pages.end);
        Self {
            pages: start..self.pages.end,
            layers: self.layers.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
