//! The encoded messages: protobuf, so that this version ignores fields of later versions.
//!
//! A message is at most [`MAX_HANDOFF_MESSAGE`] bytes. A decoder uses memory in proportion to its
//! input. Every value outside its range is an error with the name of its field.

mod fields;
mod rooms;
mod states;
#[cfg(test)]
mod tests;

use crate::registration::RankDescription;
use crate::room::{ToReceiver, ToSender};
use prost::Message as _;

/// The longest message, in bytes. A registration of 40,000 states fits.
pub const MAX_HANDOFF_MESSAGE: usize = 8 << 20;

/// A message between prefill and decode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandoffMessage {
    /// A rank's layout and regions. A rank sends it once; a repetition changes nothing.
    Register(RankDescription),
    /// From a receiver of a room.
    ToSender(ToSender),
    /// From a sender of a room.
    ToReceiver(ToReceiver),
}

/// The reasons for which bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffDecodeError {
    /// The message is too long.
    #[error("a message has at most {MAX_HANDOFF_MESSAGE} bytes, not {0}")]
    TooLong(usize),
    /// The bytes are no protobuf.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// A field is absent, or its value is out of range.
    #[error("malformed message: {0} is absent or out of range")]
    Field(&'static str),
    /// This version does not know the kind of the message.
    #[error("a message of a kind that this version does not know")]
    UnknownKind,
}

impl HandoffMessage {
    /// Encodes the message as protobuf.
    pub fn encode(&self) -> Vec<u8> {
        use fields::{Envelope, Kind};
        let kind = match self {
            Self::Register(rank) => Kind::Register(rank.into()),
            Self::ToSender(message) => message.into(),
            Self::ToReceiver(message) => message.into(),
        };
        Envelope { kind: Some(kind) }.encode_to_vec()
    }

    /// Decodes a message from its bytes.
    ///
    /// # Errors
    ///
    /// See [`HandoffDecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, HandoffDecodeError> {
        if bytes.len() > MAX_HANDOFF_MESSAGE {
            return Err(HandoffDecodeError::TooLong(bytes.len()));
        }
        let envelope = fields::Envelope::decode(bytes);
        let envelope = envelope.map_err(|why| HandoffDecodeError::Malformed(why.to_string()))?;
        envelope
            .kind
            .ok_or(HandoffDecodeError::UnknownKind)?
            .try_into()
    }
}
