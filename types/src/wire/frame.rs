//! The frame of the data port, of the Unix socket, and of the hot calls to a master.
//!
//! ```text
//! header (40 bytes) | meta (fields of the operation) | payload (bytes of blocks)
//! ```
//!
//! An answer carries its request's id, so requests can be pipelined. Answers on one connection may
//! come in any order. Only TCP frames have a payload, apart from small writes on the Unix socket.

use super::features::Features;
use super::{DecodeError, Reader};
use crate::{Epoch, Length};

/// The first four bytes of every frame: "KVP1".
pub const MAGIC: u32 = u32::from_le_bytes(*b"KVP1");
/// The oldest supported protocol version of the data port.
pub const MIN_VERSION: u16 = 1;
/// The newest supported protocol version of the data port.
pub const VERSION: u16 = 1;
/// The length of a header, in bytes.
pub const HEADER_BYTES: usize = 40;
/// The largest meta part, in bytes.
pub const MAX_META_BYTES: u64 = 4 << 20;
/// The largest payload, in bytes: the longest block and the checksums of its chunks. Blocks whose total
/// exceeds it travel in several frames.
pub const MAX_PAYLOAD_BYTES: u64 = Length::MAX_BLOCK.0 + Length::MAX_BLOCK.chunks() * 8;

/// The operation of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Op {
    /// An operation of another version with an unknown number. It is never sent. A request is
    /// answered with [`crate::Code::Unimplemented`]; its meta and payload are skipped.
    Unknown = 0,
    /// Opens a connection: [`super::data::Hello`].
    Hello = 1,
    /// Reads ranges of extents: [`super::data::ReadRequest`].
    Read = 2,
    /// Writes whole extents under grants: [`super::data::WriteRequest`], with a payload.
    Write = 3,
    /// Asks for the memory of a segment or of the pin board (Unix socket):
    /// [`super::data::MapRequest`]. The answer carries a file descriptor.
    Map = 4,
    /// Announces writes through shared memory or RDMA: [`super::data::WriteRequest`].
    WriteBegin = 5,
    /// Ends announced writes: [`super::data::WriteEnd`].
    WriteEnd = 6,
    /// Pins extents for views: [`super::data::PinRequest`].
    Pin = 7,
    /// Ends pins: [`super::data::PinRequest`] with the same extents.
    Unpin = 8,
    /// Asks for the chunk checksums of extents: [`super::data::ReadRequest`], no payload comes back.
    Sums = 9,
    /// Checks that the peer answers.
    Ping = 10,
    /// Asks for queue pairs of the node, and for the registrations of its memory (TCP):
    /// [`super::rdma::RdmaOpen`]. From then on the connection announces and ends writes like a Unix
    /// socket, and the bytes move over RDMA.
    RdmaOpen = 11,
    /// Asks for the registrations of memory that is registered on demand: [`super::data::ReadRequest`]. It is
    /// sent on a connection with queue pairs, and only to a peer whose [`Op::RdmaOpened`] named no segment.
    RdmaLocate = 12,
    /// Opens a connection to a master. The meta of this call and of the calls below is the protobuf
    /// request of the gRPC method with the same name (here `HelloRequest`). [`Op::Reply`] answers
    /// them.
    Greet = 32,
    /// A call of `Pool.Reserve`.
    Reserve = 33,
    /// A call of `Pool.Commit`.
    Commit = 34,
    /// A call of `Pool.Lookup`.
    Lookup = 36,
    /// A call of `Pool.Exist`.
    Exist = 37,
    /// A call of `Pool.MatchPrefix`.
    MatchPrefix = 38,
    /// A call of `Pool.Renew`.
    Renew = 39,
    /// A call of `Pool.Release`.
    Release = 40,
    /// Answers [`Op::Hello`]: [`super::data::HelloReply`].
    HelloReply = 65,
    /// Answers a request for several extents: [`super::data::Statuses`]. For reads the payload
    /// holds the bytes.
    Statuses = 66,
    /// Answers [`Op::Sums`]: [`super::data::SumsReply`].
    SumsReply = 67,
    /// Answers [`Op::Map`]: [`super::data::MapReply`].
    MapReply = 68,
    /// Answers [`Op::Ping`].
    Pong = 69,
    /// Answers [`Op::RdmaOpen`]: [`super::rdma::RdmaOpened`].
    RdmaOpened = 71,
    /// Answers any request that failed as a whole: [`super::data::Failure`].
    Failure = 70,
    /// Answers a call to a master: the protobuf reply of that call.
    Reply = 72,
    /// Answers [`Op::RdmaLocate`]: [`super::rdma::RdmaLocated`].
    RdmaLocated = 73,
}

impl Op {
    /// The name of the operation in metrics and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Hello => "hello",
            Self::Read => "read",
            Self::Write => "write",
            Self::Map => "map",
            Self::WriteBegin => "write_begin",
            Self::WriteEnd => "write_end",
            Self::Pin => "pin",
            Self::Unpin => "unpin",
            Self::Sums => "sums",
            Self::Ping => "ping",
            Self::RdmaOpen => "rdma_open",
            Self::RdmaLocate => "rdma_locate",
            Self::Greet => "greet",
            Self::Reserve => "reserve",
            Self::Commit => "commit",
            Self::Lookup => "lookup",
            Self::Exist => "exist",
            Self::MatchPrefix => "match_prefix",
            Self::Renew => "renew",
            Self::Release => "release",
            Self::HelloReply => "hello_reply",
            Self::Statuses => "statuses",
            Self::SumsReply => "sums_reply",
            Self::MapReply => "map_reply",
            Self::Pong => "pong",
            Self::RdmaOpened => "rdma_opened",
            Self::Failure => "failure",
            Self::Reply => "reply",
            Self::RdmaLocated => "rdma_located",
        }
    }

    /// The operation with this wire number; never [`Op::Unknown`].
    pub const fn from_wire(raw: u16) -> Option<Self> {
        Some(match raw {
            1 => Self::Hello,
            2 => Self::Read,
            3 => Self::Write,
            4 => Self::Map,
            5 => Self::WriteBegin,
            6 => Self::WriteEnd,
            7 => Self::Pin,
            8 => Self::Unpin,
            9 => Self::Sums,
            10 => Self::Ping,
            11 => Self::RdmaOpen,
            12 => Self::RdmaLocate,
            32 => Self::Greet,
            33 => Self::Reserve,
            34 => Self::Commit,
            36 => Self::Lookup,
            37 => Self::Exist,
            38 => Self::MatchPrefix,
            39 => Self::Renew,
            40 => Self::Release,
            65 => Self::HelloReply,
            66 => Self::Statuses,
            67 => Self::SumsReply,
            68 => Self::MapReply,
            69 => Self::Pong,
            70 => Self::Failure,
            71 => Self::RdmaOpened,
            72 => Self::Reply,
            73 => Self::RdmaLocated,
            _ => return None,
        })
    }
}

/// The fixed head of every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The protocol version of the sender.
    pub version: u16,
    /// The operation.
    pub op: Op,
    /// The request id, chosen by the requester. The answer repeats it.
    pub request: u64,
    /// The sender's epoch: the epoch of its locations or grants.
    pub epoch: Epoch,
    /// The length of the meta part, in bytes.
    pub meta: u32,
    /// The length of the payload, in bytes.
    pub payload: u64,
}

impl Header {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&self.version.to_le_bytes());
        out[6..8].copy_from_slice(&(self.op as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.request.to_le_bytes());
        out[16..24].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[24..28].copy_from_slice(&self.meta.to_le_bytes());
        // Bytes 28 to 32 are zero, except in a frame that opens a connection.
        out[32..40].copy_from_slice(&self.payload.to_le_bytes());
        if matches!(self.op, Op::Hello | Op::HelloReply) {
            Features::OURS.mark(&mut out);
        }
        out
    }

    /// Decodes a header and checks it against the limits.
    ///
    /// # Errors
    ///
    /// See [`DecodeError`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes, "frame header");
        let magic = reader.u32()?;
        if magic != MAGIC {
            return Err(DecodeError::BadMagic(magic));
        }
        let version = reader.u16()?;
        if !(MIN_VERSION..=VERSION).contains(&version) {
            return Err(DecodeError::VersionMismatch {
                theirs: version,
                ours_min: MIN_VERSION,
                ours_max: VERSION,
            });
        }
        let op = reader.u16()?;
        let op = Op::from_wire(op).unwrap_or(Op::Unknown);
        let request = reader.u64()?;
        let epoch = Epoch(reader.u64()?);
        let meta = reader.u32()?;
        let _features = reader.u32()?;
        let payload = reader.u64()?;
        limit("frame meta", meta.into(), MAX_META_BYTES)?;
        limit("frame payload", payload, MAX_PAYLOAD_BYTES)?;
        Ok(Self {
            version,
            op,
            request,
            epoch,
            meta,
            payload,
        })
    }
}

const fn limit(what: &'static str, size: u64, limit: u64) -> Result<(), DecodeError> {
    if size > limit {
        Err(DecodeError::Oversized { what, size, limit })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
