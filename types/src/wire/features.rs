//! What an end of a connection can do beyond its protocol version.
//!
//! Both ends tell their features when a connection opens: on the data port in the reserved field of the headers
//! of [`Op::Hello`](super::frame::Op) and its answer, which older versions write as zero and do not read; to a
//! master in `HelloRequest` and `HelloReply`. Either uses a feature only where both have told it.
//!
//! A bit that is not known here is ignored in the lower half, and refused as `version_mismatch` in the upper
//! one: there stands what the sender cannot do without.

use super::DecodeError;
use super::frame::HEADER_BYTES;
use std::ops::Range;

/// Where features stand in a header.
const PLACE: Range<usize> = 28..32;
/// The bits that must be known.
const REQUIRED: u32 = 0xffff_0000;

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u32);

impl Features {
    /// An operation that is not known is answered with [`crate::Code::Unimplemented`], and the connection goes
    /// on. Without it such an operation ends the connection.
    pub const UNIMPLEMENTED: Self = Self(1);
    /// What is told here.
    pub const OURS: Self = Self::UNIMPLEMENTED;

    /// The features in a header that opens a connection.
    pub const fn of(head: &[u8; HEADER_BYTES]) -> Self {
        Self(u32::from_le_bytes([head[28], head[29], head[30], head[31]]))
    }

    /// Writes them into a header that opens a connection.
    pub fn mark(self, head: &mut [u8; HEADER_BYTES]) {
        head[PLACE].copy_from_slice(&self.0.to_le_bytes());
    }

    /// Those that the other end, which told these, shares with this one.
    pub fn shared(self) -> Result<Self, DecodeError> {
        let unknown = self.0 & REQUIRED & !Self::OURS.0;
        if unknown != 0 {
            return Err(DecodeError::UnknownFeatures(unknown));
        }
        Ok(Self(self.0 & Self::OURS.0))
    }

    /// Whether all of `others` are among them.
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
    fn what_opens_a_connection_tells_features_and_nothing_else_does() {
        for op in [Op::Hello, Op::HelloReply] {
            assert_eq!(Features::of(&head(op)), Features::OURS);
        }
        assert_eq!(Features::of(&head(Op::Read)), Features(0));
        let mut marked = head(Op::Hello);
        Features(0x8000_0001).mark(&mut marked);
        assert_eq!(Features::of(&marked), Features(0x8000_0001));
        // The rest of the header is as it was.
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
