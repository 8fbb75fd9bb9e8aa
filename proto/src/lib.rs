//! The gRPC services of kvpool: what `proto/*.proto` say, as generated code. No logic.

#[allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::allow_attributes_without_reason,
    reason = "generated; the .proto files carry the documentation"
)]
mod generated {
    include!("generated/kvpool.v1.rs");
}

pub use generated::*;

/// A hello is logged without its token.
impl std::fmt::Debug for HelloRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HelloRequest")
            .field("min_version", &self.min_version)
            .field("max_version", &self.max_version)
            .field("caller", &self.caller)
            .field("features", &self.features)
            .field("has_token", &!self.token.is_empty())
            .finish_non_exhaustive()
    }
}

/// A renewed token is not logged.
impl std::fmt::Debug for RenewToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RenewToken(..)")
    }
}

/// The oldest control protocol version spoken here.
pub const MIN_VERSION: u32 = 1;
/// The newest control protocol version spoken here: since 2 there are standbys, which say who leads and
/// pass calls on.
pub const VERSION: u32 = 2;
/// The metadata entry of a failed call that holds its `kvpool_types::Code`, in decimal.
pub const CODE_METADATA: &str = "kvpool-code";
/// The most tickets in one message between a master and a node, in either direction.
pub const MAX_TICKETS: usize = 4096;
/// The largest gRPC message accepted, in bytes. Senders split batches well below it.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
