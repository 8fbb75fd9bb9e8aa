//! The events that a receiver takes, and the actions that it returns.

use crate::Moment;
use crate::room::messages::{RoomChunk, RoomKey, ToReceiver, ToSender};
use crate::room::{PageRectangle, RoomLimits, RoomTag};
use kvpool_types::{Code, Incarnation};

/// The share of a request that one sender must send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SenderShare {
    /// The session of the sender's process. `None` until a connection has reported it.
    pub session: Option<Incarnation>,
    /// All pages of the request, and the sender's layers.
    pub rectangle: PageRectangle,
    /// This rank among the receivers of the sender.
    pub receiver: u32,
    /// The number of the sender's first view in the room.
    pub view: u32,
    /// Whether the sender fills the slot of metadata.
    pub wants_aux: bool,
}

/// The data that a receiver has when it opens a room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomReceiverPlan {
    /// The room, with a generation above all earlier ones of this process.
    pub tag: RoomTag,
    /// The epoch and key of the room at this process's transport.
    pub epoch: u64,
    /// The key of writes into the room.
    pub key: RoomKey,
    /// The number of leading pages that the receiver holds already.
    pub held: u32,
    /// The number of the receiver's pages for the rest of the request. The caller has reserved all of them.
    pub pages: u32,
    /// The senders.
    pub senders: Vec<SenderShare>,
    /// The longest time in each state.
    pub limits: RoomLimits,
    /// The latest end of the room.
    pub deadline: Moment,
}

/// An event at a receiver. `from` is an index into the plan's senders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverEvent {
    /// A message has arrived.
    Message {
        /// The sender.
        from: usize,
        /// The message.
        message: ToReceiver,
    },
    /// A connection to the sender is up.
    LinkUp {
        /// The sender.
        from: usize,
        /// The session at its end.
        session: Incarnation,
    },
    /// The connection to the sender broke.
    LinkBroken {
        /// The sender.
        from: usize,
    },
    /// The sender's process has ended, or answers no ping.
    PeerLost {
        /// The sender.
        from: usize,
    },
    /// No write can reach the room's pages any more. Answers [`ReceiverAction::CloseRoom`].
    Fenced,
    /// The chunks were compared with memory. Answers [`ReceiverAction::Verify`].
    Verified {
        /// Whether all checksums are equal.
        is_equal: bool,
        /// Whether the aux slot names this room (S3); true without a slot.
        is_own_room: bool,
    },
    /// The caller gives the room up.
    Abort {
        /// The reason for the abort.
        code: Code,
    },
    /// Time has passed: see [`super::RoomReceiver::next_wake`].
    Tick,
}

/// The actions that the receiver's caller must perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverAction {
    /// Send a message to a sender.
    Send {
        /// The sender's index.
        to: usize,
        /// The message.
        message: ToSender,
    },
    /// Admit no new write into the room, end the writes in progress, then report [`ReceiverEvent::Fenced`].
    CloseRoom,
    /// Compare these chunks with memory, then report [`ReceiverEvent::Verified`].
    Verify(Vec<(usize, RoomChunk)>),
    /// The pages are free for another use. The room returns this at most once, and only after a failure.
    ReleasePages,
}
