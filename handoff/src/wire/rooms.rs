//! Conversions between the messages of rooms and their protobuf fields.

use super::fields::{self, Kind};
use super::{HandoffDecodeError, HandoffMessage};
use crate::room::{
    ChunkBody, PageRectangle, RoomChunk, RoomGeneration, RoomId, RoomKey, RoomOffer, RoomRoot,
    RoomTag, ToReceiver, ToSender,
};
use kvpool_types::{Checksum, Code};
use std::time::Duration;

fn micros(of: Duration) -> u64 {
    u64::try_from(of.as_micros()).unwrap_or(u64::MAX)
}

fn code_number(code: Code) -> u32 {
    code.to_wire().into()
}

/// This version reads an unknown code of a later version as an internal error.
fn code_of(number: u32) -> Code {
    let known = u16::try_from(number).ok().and_then(Code::from_wire);
    known.unwrap_or(Code::Internal)
}

fn tag_fields(tag: RoomTag) -> fields::Tag {
    fields::Tag {
        room: tag.room.0,
        generation: tag.generation.0,
    }
}

fn tag_of(tag: &fields::Tag) -> RoomTag {
    RoomTag {
        room: RoomId(tag.room),
        generation: RoomGeneration(tag.generation),
    }
}

fn tag_in(tag: Option<fields::Tag>) -> Result<RoomTag, HandoffDecodeError> {
    let tag = tag.ok_or(HandoffDecodeError::Field("tag"))?;
    Ok(tag_of(&tag))
}

fn thirty_two(bytes: &[u8], field: &'static str) -> Result<[u8; 32], HandoffDecodeError> {
    bytes
        .try_into()
        .map_err(|_| HandoffDecodeError::Field(field))
}

fn abort_fields(tag: RoomTag, code: Code) -> fields::Abort {
    fields::Abort {
        tag: Some(tag_fields(tag)),
        code: code_number(code),
    }
}

impl From<&ToSender> for Kind {
    fn from(message: &ToSender) -> Self {
        match message {
            ToSender::Offer(offer) => Self::Offer(fields::Offer {
                tag: Some(tag_fields(offer.tag)),
                receiver: offer.receiver,
                epoch: offer.epoch,
                key: offer.key.0.to_vec(),
                held: offer.held,
                pages: offer.pages,
                view: offer.view,
                wants_aux: offer.wants_aux,
                time_left_micros: micros(offer.time_left),
            }),
            ToSender::Complete { tag } => Self::Complete(tag_fields(*tag)),
            ToSender::Lacks { tag, chunks } => Self::Lacks(fields::Lacks {
                tag: Some(tag_fields(*tag)),
                chunks: chunks.clone(),
            }),
            ToSender::Abort { tag, code } => Self::ReceiverAbort(abort_fields(*tag, *code)),
            ToSender::Aborted { tag } => Self::ReceiverAborted(tag_fields(*tag)),
            ToSender::Decline { tag, code } => Self::Decline(abort_fields(*tag, *code)),
        }
    }
}

impl From<&ToReceiver> for Kind {
    fn from(message: &ToReceiver) -> Self {
        match message {
            ToReceiver::Accept { tag } => Self::Accept(tag_fields(*tag)),
            ToReceiver::Refuse { tag, code } => Self::Refuse(abort_fields(*tag, *code)),
            ToReceiver::Busy { tag, retry_after } => Self::Busy(fields::Busy {
                tag: Some(tag_fields(*tag)),
                retry_after_micros: micros(*retry_after),
            }),
            ToReceiver::Chunk { tag, chunk } => Self::Chunk(fields::Chunk {
                tag: Some(tag_fields(*tag)),
                id: chunk.id,
                rectangle: match &chunk.body {
                    ChunkBody::Aux => None,
                    ChunkBody::Pages(PageRectangle { pages, layers }) => Some(fields::Rectangle {
                        first_page: pages.start,
                        pages: pages.end.saturating_sub(pages.start),
                        first_layer: layers.start,
                        layers: layers.end.saturating_sub(layers.start),
                    }),
                },
                checksum: chunk.checksum.0,
            }),
            ToReceiver::Done { tag, chunks, root } => Self::Done(fields::Done {
                tag: Some(tag_fields(*tag)),
                chunks: *chunks,
                root: root.0.to_vec(),
            }),
            ToReceiver::Abort { tag, code } => Self::SenderAbort(abort_fields(*tag, *code)),
            ToReceiver::Aborted { tag } => Self::SenderAborted(tag_fields(*tag)),
        }
    }
}

fn offer_of(offer: fields::Offer) -> Result<RoomOffer, HandoffDecodeError> {
    Ok(RoomOffer {
        tag: tag_in(offer.tag)?,
        receiver: offer.receiver,
        epoch: offer.epoch,
        key: RoomKey(thirty_two(&offer.key, "key")?),
        held: offer.held,
        pages: offer.pages,
        view: offer.view,
        wants_aux: offer.wants_aux,
        time_left: Duration::from_micros(offer.time_left_micros),
    })
}

fn rectangle_of(of: &fields::Rectangle) -> Result<PageRectangle, HandoffDecodeError> {
    let range = |first: u32, count: u32| first.checked_add(count).map(|end| first..end);
    let pages = range(of.first_page, of.pages).filter(|pages| !pages.is_empty());
    let layers = range(of.first_layer, of.layers).filter(|layers| !layers.is_empty());
    match (pages, layers) {
        (Some(pages), Some(layers)) => Ok(PageRectangle { pages, layers }),
        _ => Err(HandoffDecodeError::Field("rectangle")),
    }
}

fn chunk_of(chunk: fields::Chunk) -> Result<ToReceiver, HandoffDecodeError> {
    let body = match &chunk.rectangle {
        None => ChunkBody::Aux,
        Some(rectangle) => ChunkBody::Pages(rectangle_of(rectangle)?),
    };
    Ok(ToReceiver::Chunk {
        tag: tag_in(chunk.tag)?,
        chunk: RoomChunk {
            id: chunk.id,
            body,
            checksum: Checksum(chunk.checksum),
        },
    })
}

impl TryFrom<Kind> for HandoffMessage {
    type Error = HandoffDecodeError;

    fn try_from(kind: Kind) -> Result<Self, HandoffDecodeError> {
        let to_sender = |message| Ok(Self::ToSender(message));
        let to_receiver = |message| Ok(Self::ToReceiver(message));
        match kind {
            Kind::Register(rank) => Ok(Self::Register(rank.try_into()?)),
            Kind::Offer(offer) => to_sender(ToSender::Offer(offer_of(offer)?)),
            Kind::Complete(tag) => to_sender(ToSender::Complete { tag: tag_of(&tag) }),
            Kind::Lacks(lacks) => to_sender(ToSender::Lacks {
                tag: tag_in(lacks.tag)?,
                chunks: lacks.chunks,
            }),
            Kind::ReceiverAbort(abort) => to_sender(ToSender::Abort {
                tag: tag_in(abort.tag)?,
                code: code_of(abort.code),
            }),
            Kind::ReceiverAborted(tag) => to_sender(ToSender::Aborted { tag: tag_of(&tag) }),
            Kind::Decline(decline) => to_sender(ToSender::Decline {
                tag: tag_in(decline.tag)?,
                code: code_of(decline.code),
            }),
            Kind::Accept(tag) => to_receiver(ToReceiver::Accept { tag: tag_of(&tag) }),
            Kind::Refuse(refuse) => to_receiver(ToReceiver::Refuse {
                tag: tag_in(refuse.tag)?,
                code: code_of(refuse.code),
            }),
            Kind::Busy(busy) => to_receiver(ToReceiver::Busy {
                tag: tag_in(busy.tag)?,
                retry_after: Duration::from_micros(busy.retry_after_micros),
            }),
            Kind::Chunk(chunk) => to_receiver(chunk_of(chunk)?),
            Kind::Done(done) => to_receiver(ToReceiver::Done {
                tag: tag_in(done.tag)?,
                chunks: done.chunks,
                root: RoomRoot(thirty_two(&done.root, "root")?),
            }),
            Kind::SenderAbort(abort) => to_receiver(ToReceiver::Abort {
                tag: tag_in(abort.tag)?,
                code: code_of(abort.code),
            }),
            Kind::SenderAborted(tag) => to_receiver(ToReceiver::Aborted { tag: tag_of(&tag) }),
        }
    }
}
