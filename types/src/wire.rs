//! The codecs of everything on a wire: packed keys inside gRPC messages, and the frames of the data
//! port and the Unix socket. All numbers are little-endian.

pub mod data;
pub mod features;
pub mod frame;
pub mod incoming;
pub mod keys;
pub mod rdma;
mod reader;

pub use reader::Reader;

/// Why received bytes were refused. They changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes end before the value does.
    #[error("{what}: the bytes end too early")]
    Truncated {
        /// The value that was being read.
        what: &'static str,
    },
    /// A field has an invalid value.
    #[error("{what}: bad value {value}")]
    BadValue {
        /// The field.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// Bytes are left over after the value.
    #[error("{what}: {left} bytes too many")]
    Trailing {
        /// The value that was being read.
        what: &'static str,
        /// The number of surplus bytes.
        left: usize,
    },
    /// A string is not UTF-8.
    #[error("{what}: not UTF-8")]
    NotUtf8 {
        /// The field.
        what: &'static str,
    },
    /// The frame does not start with the magic number.
    #[error("not a kvpool frame: it begins with {0:#010x}")]
    BadMagic(u32),
    /// The peer uses another protocol version.
    #[error("protocol version {theirs} is not supported ({ours_min} to {ours_max} are)")]
    VersionMismatch {
        /// The version in the frame.
        theirs: u16,
        /// The oldest supported version.
        ours_min: u16,
        /// The newest supported version.
        ours_max: u16,
    },
    /// The peer requires unknown features.
    #[error("the peer requires unknown features {0:#010x}: one side is too old")]
    UnknownFeatures(u32),
    /// A part is larger than its limit.
    #[error("{what} of {size} bytes is over the limit of {limit}")]
    Oversized {
        /// The part.
        what: &'static str,
        /// The announced size in bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
    },
}

impl DecodeError {
    /// The stable code to send to the peer.
    pub const fn code(&self) -> crate::Code {
        match self {
            Self::VersionMismatch { .. } | Self::UnknownFeatures(_) => crate::Code::VersionMismatch,
            Self::Oversized { .. } => crate::Code::Oversized,
            _ => crate::Code::Malformed,
        }
    }
}
