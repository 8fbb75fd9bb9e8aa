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

/// A registration is logged without the secret of the node's life and the proof of its term.
impl std::fmt::Debug for Register {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Register")
            .field("min_version", &self.min_version)
            .field("max_version", &self.max_version)
            .field("cluster_id", &self.cluster_id)
            .field("name", &self.name)
            .field("incarnation", &self.incarnation)
            .field("data_address", &self.data_address)
            .field("shm_path", &self.shm_path)
            .field("host_id", &self.host_id)
            .field("epoch_seen", &self.epoch_seen)
            .field("segments", &self.segments)
            .field("held", &self.held)
            .field("checksum_algorithm", &self.checksum_algorithm)
            .field("has_life_secret", &!self.life_secret.is_empty())
            .field("has_epoch_proof", &!self.epoch_proof.is_empty())
            .field("can_pull", &self.can_pull)
            .field("wants_signed_reads", &self.wants_signed_reads)
            .field("loaded", &self.loaded)
            .field("can_undrain", &self.can_undrain)
            .field("version", &self.version)
            .finish()
    }
}

/// A welcome is logged without the key of the term's grants and the proof of the term.
impl std::fmt::Debug for Welcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Welcome")
            .field("version", &self.version)
            .field("cluster_id", &self.cluster_id)
            .field("epoch", &self.epoch)
            .field("segment_ids", &self.segment_ids)
            .field("has_grant_key", &!self.grant_key.is_empty())
            .field("heartbeat_interval_ms", &self.heartbeat_interval_ms)
            .field("has_epoch_proof", &!self.epoch_proof.is_empty())
            .field("clock_ms", &self.clock_ms)
            .field("loads_recorded_below", &self.loads_recorded_below)
            .finish()
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
