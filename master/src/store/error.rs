//! The errors of a metadata store.

use super::LogSeq;
use kvpool_types::{Code, Epoch};
use std::time::Duration;

/// Why an operation of a metadata store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another term has begun: the master of epoch `asked` no longer leads. Nothing was changed.
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
    /// A snapshot or a cut names a position that the log does not reach or no longer holds.
    /// Nothing was changed.
    #[error("position {asked} is outside the log, which was cut at {cut} and ends at {last}")]
    OutsideLog {
        /// The position that was named.
        asked: LogSeq,
        /// The position through which the log has been cut.
        cut: LogSeq,
        /// The position of the last durable group.
        last: LogSeq,
    },
    /// The store did not answer or failed. Whether a write took effect is unknown: read back
    /// before anything that depends on it.
    #[error("the metadata store is unavailable: {reason}")]
    Unavailable {
        /// What the store said.
        reason: String,
    },
    /// The store has used up its space and takes no more until room was made. A write whose own bytes used
    /// up the last of it may have been done, whole.
    #[error("the metadata store has used up its space")]
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
        /// The file or directory that is not there any more.
        path: String,
    },
    /// The lease has run out or was revoked. Nothing was changed.
    #[error("the lease in the metadata store is gone")]
    LeaseGone,
    /// The store gives no lease of the time that was asked for.
    #[error("the metadata store gave a lease of {granted:?} where {asked:?} was asked for")]
    LeaseTtl {
        /// The time that was asked for.
        asked: Duration,
        /// The time that was granted.
        granted: Duration,
    },
    /// The stored bytes differ from the written ones.
    #[error("the metadata store is corrupt: {reason}")]
    Corrupt {
        /// What is wrong, and where.
        reason: String,
    },
    /// The value is larger than the store takes. Nothing was changed.
    #[error("a value of {size} bytes is more than the metadata store takes")]
    TooLarge {
        /// The size of the value in bytes.
        size: u64,
    },
    /// The store has been closed.
    #[error("the metadata store is closed")]
    Closed,
}

impl StoreError {
    /// Whether the same call may succeed later with nothing changed by the caller. A write whose
    /// outcome is unknown has to be read back first.
    pub const fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. } | Self::NoSpace | Self::DirectoryFull { .. }
        )
    }

    /// The stable code that a client is told.
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
        /// What the system said.
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
        /// Where the store is.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A file of the store is missing, damaged, or of another store.
    #[error(
        "{directory}: {reason}. This pool's metadata cannot be read back whole: put the files back as they \
         were, or start kvmaster once with --accept-empty-store, which sets them aside and begins an empty pool"
    )]
    Damaged {
        /// The store's directory.
        directory: String,
        /// What is wrong, and where.
        reason: String,
    },
    /// The store failed while it was being opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// etcd did not answer.
    #[error("etcd at {endpoints} cannot be used: {reason}")]
    Unreachable {
        /// The endpoints that were asked.
        endpoints: String,
        /// What the last one said.
        reason: String,
    },
    /// etcd refused, or what is configured about it cannot be right.
    #[error("etcd at {endpoints} cannot be used as configured: {reason}")]
    Refused {
        /// The endpoints that are configured.
        endpoints: String,
        /// What is wrong.
        reason: String,
    },
}

impl OpenError {
    /// Whether `--accept-empty-store` helps.
    pub const fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    /// Whether opening may succeed later with nothing changed by the caller.
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::InUse { .. } | Self::Unreachable { .. })
    }
}
