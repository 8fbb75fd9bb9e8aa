//! The protobuf messages. A field number never gets another meaning.
//!
//! Tags 15 to 19 of [`Kind`] belonged to pulls by one-sided reads, which no process sent (ADR 0053).

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(super) struct Envelope {
    #[prost(
        oneof = "Kind",
        tags = "1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 20"
    )]
    pub(super) kind: Option<Kind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Kind {
    #[prost(message, tag = "1")]
    Register(Rank),
    #[prost(message, tag = "3")]
    Offer(Offer),
    #[prost(message, tag = "4")]
    Complete(Tag),
    #[prost(message, tag = "5")]
    Lacks(Lacks),
    #[prost(message, tag = "6")]
    ReceiverAbort(Abort),
    #[prost(message, tag = "7")]
    ReceiverAborted(Tag),
    #[prost(message, tag = "8")]
    Accept(Tag),
    #[prost(message, tag = "9")]
    Refuse(Abort),
    #[prost(message, tag = "10")]
    Busy(Busy),
    #[prost(message, tag = "11")]
    Chunk(Chunk),
    #[prost(message, tag = "12")]
    Done(Done),
    #[prost(message, tag = "13")]
    SenderAbort(Abort),
    #[prost(message, tag = "14")]
    SenderAborted(Tag),
    #[prost(message, tag = "20")]
    Decline(Abort),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Tag {
    #[prost(fixed64, tag = "1")]
    pub(super) room: u64,
    #[prost(uint64, tag = "2")]
    pub(super) generation: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Offer {
    #[prost(message, optional, tag = "1")]
    pub(super) tag: Option<Tag>,
    #[prost(uint32, tag = "2")]
    pub(super) receiver: u32,
    #[prost(uint64, tag = "3")]
    pub(super) epoch: u64,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) key: Vec<u8>,
    #[prost(uint32, tag = "5")]
    pub(super) held: u32,
    #[prost(uint32, tag = "6")]
    pub(super) pages: u32,
    #[prost(bool, tag = "7")]
    pub(super) wants_aux: bool,
    #[prost(uint64, tag = "8")]
    pub(super) time_left_micros: u64,
    #[prost(uint32, tag = "9")]
    pub(super) view: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Lacks {
    #[prost(message, optional, tag = "1")]
    pub(super) tag: Option<Tag>,
    #[prost(uint32, repeated, tag = "2")]
    pub(super) chunks: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Abort {
    #[prost(message, optional, tag = "1")]
    pub(super) tag: Option<Tag>,
    #[prost(uint32, tag = "2")]
    pub(super) code: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Busy {
    #[prost(message, optional, tag = "1")]
    pub(super) tag: Option<Tag>,
    #[prost(uint64, tag = "2")]
    pub(super) retry_after_micros: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Chunk {
    #[prost(message, optional, tag = "1")]
    pub(super) tag: Option<Tag>,
    #[prost(uint32, tag = "2")]
    pub(super) id: u32,
    /// Absent for the slot of metadata.
    #[prost(message, optional, tag = "3")]
    pub(super) rectangle: Option<Rectangle>,
    #[prost(fixed64, tag = "4")]
    pub(super) checksum: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Rectangle {
    #[prost(uint32, tag = "1")]
    pub(super) first_page: u32,
    #[prost(uint32, tag = "2")]
    pub(super) pages: u32,
    #[prost(uint32, tag = "3")]
    pub(super) first_layer: u32,
    #[prost(uint32, tag = "4")]
    pub(super) layers: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Done {
    #[prost(message, optional, tag = "1")]
    pub(super) tag: Option<Tag>,
    #[prost(uint32, tag = "2")]
    pub(super) chunks: u32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) root: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Rank {
    #[prost(string, tag = "1")]
    pub(super) address: String,
    #[prost(uint32, tag = "2")]
    pub(super) tensor_rank: u32,
    #[prost(uint32, tag = "3")]
    pub(super) tensor_ranks: u32,
    #[prost(uint32, tag = "4")]
    pub(super) stage: u32,
    #[prost(uint32, repeated, tag = "5")]
    pub(super) stage_layers: Vec<u32>,
    #[prost(uint32, tag = "6")]
    pub(super) page_tokens: u32,
    #[prost(uint32, tag = "7")]
    pub(super) hidden_bytes: u32,
    #[prost(message, repeated, tag = "10")]
    pub(super) states: Vec<State>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct State {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(uint32, tag = "2")]
    pub(super) layer: u32,
    /// 1 copy, 2 slice, 3 one source.
    #[prost(uint32, tag = "3")]
    pub(super) rule: u32,
    #[prost(uint64, tag = "4")]
    pub(super) outer: u64,
    #[prost(uint64, tag = "5")]
    pub(super) parts: u64,
    #[prost(uint64, tag = "6")]
    pub(super) part_bytes: u64,
    #[prost(fixed64, tag = "7")]
    pub(super) base: u64,
    #[prost(uint32, tag = "8")]
    pub(super) pages: u32,
}
