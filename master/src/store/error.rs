//! The errors of a metadata store.

use super::LogSeq;
use kvpool_types::{Code, Epoch};
use std::time::Duration;

/// Why an operation of a metadata store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another term has begun: the master of epoch `asked` is no longer the leader. Nothing was
    /// changed.
    #[error("epoch {asked} may not write: the store is in epoch {current}")]
    Fenced {
        /// The epoch that the write carried.
        asked: Epoch,
        /// The epoch that may write.
        current: Epoch,
    },
    /// The group does not follow the last one. Nothing was changed.
    #[error("group {asked} does not follow the log's last one, {last}")]
    Gap {
        /// The position that the write named.
        asked: LogSeq,
        /// The position of the last durable group.
        last: LogSeq,
    },
    /// A snapshot or a cut names a position outside the log. Nothing was changed.
    #[error("position {asked} is outside the log, which was cut at {cut} and ends at {last}")]
    OutsideLog {
        /// The named position.
        asked: LogSeq,
        /// The position through which the log was cut.
        cut: LogSeq,
        /// The position of the last durable group.
        last: LogSeq,
    },
    /// The store did not answer, or failed. The outcome of a write is unknown, so the caller must
    /// read before it depends on it.
    #[error("the metadata store is unavailable: {reason}")]
    Unavailable {
        /// The store's reason.
        reason: String,
    },
    /// The store is out of space and refuses writes until it has room. The write that used up the
    /// last space may have taken effect as a whole.
    #[error("the metadata store is out of space")]
    NoSpace,
    /// The directory's filesystem has no room. Nothing was changed.
    #[error(
        "the data directory {directory} is full: free room on its filesystem or enlarge it; puts go on \
         by themselves then"
    )]
    DirectoryFull {
        /// The store's directory.
        directory: String,
    },
    /// A file of the store was moved or replaced while it was open. Later writes may be lost.
    #[error(
        "{path} was moved or replaced while this kvmaster had it open: put it back, and start kvmaster again"
    )]
    Moved {
        /// The missing file or directory.
        path: String,
    },
    /// The lease has expired or was revoked. Nothing was changed.
    #[error("the lease in the metadata store is gone")]
    LeaseGone,
    /// The store does not grant a lease with the requested TTL.
    #[error("the metadata store granted a lease of {granted:?} instead of {asked:?}")]
    LeaseTtl {
        /// The requested TTL.
        asked: Duration,
        /// The granted TTL.
        granted: Duration,
    },
    /// The stored bytes differ from the written ones.
    #[error("the metadata store is corrupt: {reason}")]
    Corrupt {
        /// The damage and its place.
        reason: String,
    },
    /// The value exceeds the store's limit. Nothing was changed.
    #[error("a value of {size} bytes exceeds the limit of the metadata store")]
    TooLarge {
        /// The size of the value in bytes.
        size: u64,
    },
    /// The store has been closed.
    #[error("the metadata store is closed")]
    Closed,
}

impl StoreError {
    /// True when the same call may succeed later without a change by the caller. After an unknown
    /// outcome the caller must read first.
    pub const fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. } | Self::NoSpace | Self::DirectoryFull { .. }
        )
    }

    /// The stable code for clients.
    pub const fn code(&self) -> Code {
        match self {
            Self::Fenced { .. } => Code::NotLeader,
            Self::Closed => Code::Draining,
            Self::DirectoryFull { .. } => Code::StoreFull,
            _ => Code::StoreFailed,
        }
    }
}

/// Why a metadata store could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another process has the directory open.
    #[error(
        "{path} is in use by another kvmaster; stop it, or give this one a data directory of its own"
    )]
    InUse {
        /// The store's file.
        path: String,
    },
    /// The directory or the file cannot be created, read or written.
    #[error("the data directory {path} (--data-dir) cannot be used")]
    Io {
        /// The store's file or directory.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A newer kvmaster wrote the file.
    #[error("{path} has format {found}; this kvmaster reads format {known}")]
    Format {
        /// The store's file.
        path: String,
        /// The format in the file.
        found: u64,
        /// The format of this version.
        known: u64,
    },
    /// The file is not a metadata store, or is damaged.
    #[error("{path} is not a readable metadata store: {reason}")]
    Corrupt {
        /// The path of the store.
        path: String,
        /// The damage.
        reason: String,
    },
    /// A file of the store is missing, damaged, or belongs to another store.
    #[error(
        "{directory}: {reason}. This pool's metadata cannot be read back whole: put the files back as they \
         were, or start kvmaster once with --accept-empty-store, which sets them aside and begins an empty pool"
    )]
    Damaged {
        /// The store's directory.
        directory: String,
        /// The damage and its place.
        reason: String,
    },
    /// The store failed while it was being opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// etcd did not answer.
    #[error("etcd at {endpoints} cannot be used: {reason}")]
    Unreachable {
        /// The endpoints that were tried.
        endpoints: String,
        /// The last endpoint's error.
        reason: String,
    },
    /// etcd refused the request, or the configuration of etcd is wrong.
    #[error("etcd at {endpoints} cannot be used as configured: {reason}")]
    Refused {
        /// The configured endpoints.
        endpoints: String,
        /// The reason.
        reason: String,
    },
}

impl OpenError {
    /// True if `--accept-empty-store` helps.
    pub const fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    /// True when opening may succeed later without a change by the caller.
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::InUse { .. } | Self::Unreachable { .. })
    }
}
