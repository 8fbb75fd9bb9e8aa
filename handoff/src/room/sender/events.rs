//! The events that a sender takes, and the actions that it returns.

use crate::Moment;
use crate::room::messages::{ChunkBody, ToReceiver, ToSender};
use crate::room::{PageRectangle, RoomId, RoomLimits};
use kvpool_types::{Checksum, Code, Incarnation};

/// The data that a sender has when the engine names the room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomSenderPlan {
    /// The room.
    pub room: RoomId,
    /// All pages of the request, and this rank's layers.
    pub rectangle: PageRectangle,
    /// The number of receiving ranks that this rank sends to.
    pub receivers: usize,
    /// The longest time in each state.
    pub limits: RoomLimits,
    /// When the room ends at the latest.
    pub deadline: Moment,
    /// The most pages times layers of a chunk. Larger rectangles are split.
    pub chunk_cells: u64,
    /// The most pages times layers under way to one receiver. A single larger chunk may also go.
    pub cells_under_way: u64,
}

/// An event at a sender. `from` and `to` are indices of receivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderEvent {
    /// A message has arrived.
    Message {
        /// The receiver.
        from: usize,
        /// The session of its process.
        session: Incarnation,
        /// The message.
        message: ToSender,
    },
    /// The engine has computed these pages and layers.
    Produced(PageRectangle),
    /// The engine has computed everything.
    ProducedAll,
    /// A write has ended.
    Written {
        /// The receiver.
        to: usize,
        /// The chunk.
        id: u32,
        /// The checksum of the bytes in place, or the reason why they are not in place.
        outcome: Result<Checksum, Code>,
    },
    /// No write reads the room's pages any more. Answers [`SenderAction::CancelWrites`].
    WritesEnded,
    /// A connection to the receiver is up.
    LinkUp {
        /// The receiver.
        from: usize,
        /// The session at its end.
        session: Incarnation,
    },
    /// The connection to the receiver broke.
    LinkBroken {
        /// The receiver.
        from: usize,
    },
    /// The receiver's process has ended, or answers no ping.
    PeerLost {
        /// The receiver.
        from: usize,
    },
    /// The caller gives the room up.
    Abort {
        /// The reason for the abort.
        code: Code,
    },
    /// Time has passed: see [`super::RoomSender::next_wake`].
    Tick,
}

/// The actions that the sender's caller must perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderAction {
    /// Send a message to a receiver.
    Send {
        /// The receiver's index.
        to: usize,
        /// The message.
        message: ToReceiver,
    },
    /// Write a chunk into a receiver's pages, then report [`SenderEvent::Written`].
    Write {
        /// The receiver's index.
        to: usize,
        /// The chunk's number.
        id: u32,
        /// The bytes.
        body: ChunkBody,
    },
    /// End all writes of the room, then report [`SenderEvent::WritesEnded`].
    CancelWrites,
    /// The pages are free for another use. The room returns this exactly once.
    ReleasePages,
}
