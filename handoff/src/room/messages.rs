//! The messages of a room, and the digest over its chunks.

use super::{PageRectangle, RoomGeneration, RoomId, RoomTag};
use kvpool_types::{Checksum, Code};
use sha2::{Digest, Sha256};
use std::fmt;
use std::time::Duration;

/// The key that signs writes into one room's pages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RoomKey(pub [u8; 32]);

impl fmt::Debug for RoomKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RoomKey(..)")
    }
}

/// Decode's offer of its pages to one prefill rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomOffer {
    /// The room and the receiver's attempt.
    pub tag: RoomTag,
    /// The receiver's rank among the receivers of the sender.
    pub receiver: u32,
    /// The epoch under which the receiver's transport accepts writes.
    pub epoch: u64,
    /// The key of these writes.
    pub key: RoomKey,
    /// The number of leading pages that the receiver holds already.
    pub held: u32,
    /// The number of the receiver's pages for the request's pages from `held` on.
    pub pages: u32,
    /// The number of the sender's first view in the room.
    pub view: u32,
    /// Whether this sender sends metadata.
    pub wants_aux: bool,
    /// The time that the room has left.
    pub time_left: Duration,
}

/// The content of one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChunkBody {
    /// Pages of some layers.
    Pages(PageRectangle),
    /// The slot of metadata.
    Aux,
}

/// A chunk whose bytes are in place at the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomChunk {
    /// The chunk's number, from 0, unique among the chunks of one sender in one room.
    pub id: u32,
    /// The content.
    pub body: ChunkBody,
    /// The checksum of the chunk's bytes, in the order of the plan's rows.
    pub checksum: Checksum,
}

/// A digest over all chunks that one sender sent, in order of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomRoot(pub [u8; 32]);

impl RoomRoot {
    /// The digest over chunks in the order of their numbers.
    pub fn of<'a>(tag: RoomTag, chunks: impl Iterator<Item = &'a RoomChunk>) -> Self {
        let RoomTag {
            room: RoomId(room),
            generation: RoomGeneration(generation),
        } = tag;
        let mut digest = Sha256::new_with_prefix(b"kvpool room root 1");
        digest.update(room.to_le_bytes());
        digest.update(generation.to_le_bytes());
        for chunk in chunks {
            digest.update(chunk.id.to_le_bytes());
            match &chunk.body {
                ChunkBody::Aux => digest.update([1]),
                ChunkBody::Pages(PageRectangle { pages, layers }) => {
                    digest.update([0]);
                    for bound in [pages.start, pages.end, layers.start, layers.end] {
                        digest.update(bound.to_le_bytes());
                    }
                }
            }
            digest.update(chunk.checksum.0.to_le_bytes());
        }
        Self(digest.finalize().into())
    }
}

/// The most chunks that one `Lacks` names. A sender sends no more chunks again for one message.
pub const MAX_LACKS: usize = 1024;

/// A message of the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToSender {
    /// Offers pages to the sender. The receiver repeats it until the sender answers.
    Offer(RoomOffer),
    /// All bytes are in place and verified. Answers `Done`.
    Complete {
        /// The room.
        tag: RoomTag,
    },
    /// Answers `Done`: the sender has not announced these chunks, at most [`MAX_LACKS`].
    Lacks {
        /// The room.
        tag: RoomTag,
        /// The numbers of the chunks.
        chunks: Vec<u32>,
    },
    /// The receiver gives the room up.
    Abort {
        /// The room.
        tag: RoomTag,
        /// The reason.
        code: Code,
    },
    /// The receiver's pages are fenced.
    Aborted {
        /// The room.
        tag: RoomTag,
    },
    /// The receiver's process asks for nothing of the request, now or later. The request ends at all ends. The
    /// process sends this once. If the message is lost, the sender's deadline ends the request.
    Decline {
        /// The room, with an attempt of its own.
        tag: RoomTag,
        /// The reason: [`Code::Full`] for a process that could not allocate pages.
        code: Code,
    },
}

impl ToSender {
    /// The room that the message belongs to.
    pub const fn tag(&self) -> RoomTag {
        match self {
            Self::Offer(RoomOffer { tag, .. })
            | Self::Complete { tag }
            | Self::Lacks { tag, .. }
            | Self::Abort { tag, .. }
            | Self::Aborted { tag }
            | Self::Decline { tag, .. } => *tag,
        }
    }
}

/// A message of the sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToReceiver {
    /// The sender accepts the offer.
    Accept {
        /// The room.
        tag: RoomTag,
    },
    /// The sender refuses the offer for good.
    Refuse {
        /// The room.
        tag: RoomTag,
        /// The reason.
        code: Code,
    },
    /// The sender does not serve the attempt now: the receiver offers again later.
    Busy {
        /// The room.
        tag: RoomTag,
        /// The least time to wait.
        retry_after: Duration,
    },
    /// The bytes of a chunk are in place.
    Chunk {
        /// The room.
        tag: RoomTag,
        /// The chunk.
        chunk: RoomChunk,
    },
    /// All chunks are in place. The sender repeats it until the receiver answers.
    Done {
        /// The room.
        tag: RoomTag,
        /// The number of chunks.
        chunks: u32,
        /// The digest over all chunks.
        root: RoomRoot,
    },
    /// The sender gives the room up.
    Abort {
        /// The room.
        tag: RoomTag,
        /// The reason.
        code: Code,
    },
    /// The sender's writes have ended.
    Aborted {
        /// The room.
        tag: RoomTag,
    },
}

impl ToReceiver {
    /// The room that the message belongs to.
    pub const fn tag(&self) -> RoomTag {
        match self {
            Self::Accept { tag }
            | Self::Refuse { tag, .. }
            | Self::Busy { tag, .. }
            | Self::Chunk { tag, .. }
            | Self::Done { tag, .. }
            | Self::Abort { tag, .. }
            | Self::Aborted { tag } => *tag,
        }
    }
}
