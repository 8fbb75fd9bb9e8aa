//! The features of one end of a connection, beyond its protocol version.
//!
//! Both ends send their features when a connection opens. On the data port they are in the reserved
//! field of the headers of [`Op::Hello`](super::frame::Op) and of its answer. Older versions write
//! zero there and ignore it. To a master they are in `HelloRequest` and `HelloReply`. An end uses a
//! feature only if both have sent it.
//!
//! An unknown bit in the lower half is ignored. An unknown bit in the upper half is refused as
//! `version_mismatch`, because the sender requires the feature.

use super::DecodeError;
use super::frame::HEADER_BYTES;
use std::ops::Range;

/// The position of the features in a header, in bytes.
const PLACE: Range<usize> = 28..32;
/// The bits of required features.
const REQUIRED: u32 = 0xffff_0000;

/// The bytes of the context of a trace: the trace id (16), then the span id (8), as in W3C Trace Context.
pub const TRACE_BYTES: usize = 24;

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u32);

impl Features {
    /// An unknown operation is answered with [`crate::Code::Unimplemented`], and the connection
    /// continues. Without this feature the connection ends.
    pub const UNIMPLEMENTED: Self = Self(1);
    /// Requests on the data port may carry a trace context. Such a request has this bit in its header too, and its
    /// meta ends with the [`TRACE_BYTES`] of the context. A node without the feature would refuse the meta.
    pub const TRACE: Self = Self(2);
    /// The features of this version.
    pub const OURS: Self = Self(Self::UNIMPLEMENTED.0 | Self::TRACE.0);

    /// The features in a header that opens a connection.
    pub const fn of(head: &[u8; HEADER_BYTES]) -> Self {
        Self(u32::from_le_bytes([head[28], head[29], head[30], head[31]]))
    }

    /// Writes the features into a header that opens a connection.
    pub fn mark(self, head: &mut [u8; HEADER_BYTES]) {
        head[PLACE].copy_from_slice(&self.0.to_le_bytes());
    }

    /// The features that both ends have, given the peer's.
    ///
    /// # Errors
    ///
    /// [`DecodeError::UnknownFeatures`] when the peer requires an unknown feature.
    pub fn shared(self) -> Result<Self, DecodeError> {
        let unknown = self.0 & REQUIRED & !Self::OURS.0;
        if unknown != 0 {
            return Err(DecodeError::UnknownFeatures(unknown));
        }
        Ok(Self(self.0 & Self::OURS.0))
    }

    /// Whether the set contains all features of `others`.
    pub const fn has(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Epoch;
    use crate::wire::frame::{Header, Op, VERSION};

    fn head(op: Op) -> [u8; HEADER_BYTES] {
        let header = Header {
            version: VERSION,
            op,
            request: 1,
            epoch: Epoch(2),
            meta: 3,
            payload: 0,
        };
        header.encode()
    }

    #[test]
    fn only_the_opening_frames_carry_features() {
        for op in [Op::Hello, Op::HelloReply] {
            assert_eq!(Features::of(&head(op)), Features::OURS);
        }
        assert_eq!(Features::of(&head(Op::Read)), Features(0));
        let mut marked = head(Op::Hello);
        Features(0x8000_0001).mark(&mut marked);
        assert_eq!(Features::of(&marked), Features(0x8000_0001));
        // The other fields of the header are unchanged.
        assert_eq!(Header::decode(&marked), Header::decode(&head(Op::Hello)));
    }

    #[test]
    fn unknown_features_are_ignored_unless_they_are_required() {
        assert_eq!(Features(0).shared(), Ok(Features(0)));
        assert_eq!(Features(0xffff).shared(), Ok(Features::OURS));
        let error = Features(0x0001_0001).shared().unwrap_err();
        assert_eq!(error, DecodeError::UnknownFeatures(0x0001_0000));
        assert_eq!(error.code(), crate::Code::VersionMismatch);
    }
}
