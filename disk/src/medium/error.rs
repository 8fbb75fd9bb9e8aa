//! The errors of media, stores and loads.

use super::header::{HeaderWrong, StoreNumber};
use crate::IoError;
use kvpool_types::{ClusterId, Version};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// Why a device was not opened as a medium.
///
/// `Io` and `NoRoom` say nothing about the content. `NewerFormat` needs a later release, and `TooSmall` a
/// larger device. For the other variants the only remedy is to format the device anew, which loses all
/// content.
#[derive(Debug, Error)]
pub enum MediumRefused {
    /// The device holds bytes that are not kvpool's.
    #[error("it holds bytes that are not kvpool's. To lose them: --ssd path=PATH,reset")]
    Foreign,
    /// A later release formatted the medium.
    #[error("the medium has format {0}, which a later release wrote: run the later release")]
    NewerFormat(u32),
    /// Neither superblock can be read, and one was kvpool's.
    #[error("both superblocks are damaged. To lose its blocks: --ssd path=PATH,reset")]
    Damaged,
    /// The device is smaller than the medium on it.
    #[error("the device has {device} bytes, and its medium has {medium}")]
    Shrunk {
        /// The bytes of the device.
        device: u64,
        /// The bytes in the superblock.
        medium: u64,
    },
    /// The device has no room for a superblock and one extent.
    #[error("the device has {0} bytes, too few for a medium")]
    TooSmall(u64),
    /// The medium belongs to another pool.
    #[error("the medium belongs to cluster {theirs}, not {ours}: formatting needs reset in --ssd")]
    OtherCluster {
        /// The cluster in the superblock.
        theirs: ClusterId,
        /// The cluster that attaches.
        ours: ClusterId,
    },
    /// The arena has no room for one granule.
    #[error("the arena has no room for the superblock")]
    NoRoom,
    /// The device failed.
    #[error("the superblock was not read or written: {0}")]
    Io(#[source] IoError),
}

impl MediumRefused {
    /// Whether the same call may succeed later: the device did not answer in time, or the arena had no free
    /// buffer.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::NoRoom => true,
            Self::Io(IoError::System(error)) => error.kind() == io::ErrorKind::TimedOut,
            _ => false,
        }
    }
}

/// Why a medium was not marked as clean. Its content is verified on every load anyway.
#[derive(Debug, Error)]
pub enum DetachError {
    /// Stores or loads were in flight at the deadline.
    #[error("{0} stores and loads were still in flight")]
    Busy(usize),
    /// A flush failed since the attach, so an acknowledged store may be lost.
    #[error("a flush failed since the medium was attached")]
    FlushFailed,
    /// The superblock was not written.
    #[error(transparent)]
    Superblock(#[from] MediumRefused),
}

/// An invalid request. Nothing was read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Invalid {
    /// The length is 0 or over [`Length::MAX_BLOCK`](kvpool_types::Length::MAX_BLOCK).
    #[error("no block of {0} bytes can be stored")]
    Length(u64),
    /// The extent is not aligned to a granule, or not inside the medium's data.
    #[error("no extent can lie at {0}")]
    Place(u64),
    /// The extent touches a bad range.
    #[error("the extent at {0} touches a bad range")]
    BadRange(u64),
    /// The bytes to store do not have the expected checksum.
    #[error("the bytes to store do not have the expected checksum")]
    Checksum,
    /// The medium is detached.
    #[error("the medium is detached")]
    Detached,
}

/// Why a store failed. The extent holds no valid block, or an older one.
#[derive(Debug, Error)]
pub enum StoreError {
    /// Nothing was written.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The device failed. Part of the extent may be written.
    #[error("the extent was not written: {0}")]
    Io(#[source] IoError),
}

/// Why a load returned no bytes.
#[derive(Debug, Error)]
pub enum Wrong {
    /// The header is not valid.
    #[error("the header is wrong: {0:?}")]
    Header(HeaderWrong),
    /// The chunk with this number does not have its checksum.
    #[error("chunk {0} is damaged")]
    Chunk(u64),
    /// The header was written for another offset.
    #[error("the extent was written for offset {written_for}")]
    Misdirected {
        /// The offset in the header.
        written_for: u64,
    },
    /// The offset holds another version, or the same version from another store.
    #[error("the extent holds version {version} of store {}", number.0)]
    Stale {
        /// The number of the store in the header.
        number: StoreNumber,
        /// The version in the header.
        version: Version,
    },
    /// The device failed. It may read the extent later.
    #[error("the extent was not read: {0}")]
    Io(#[source] IoError),
    /// The extent has a bad sector: it failed again, after a later read of the device had succeeded.
    #[error("the extent has a bad sector: {0}")]
    BadSector(#[source] IoError),
    /// Nothing was read.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

/// The kinds of [`Wrong`], as labels of a counter.
pub const WRONG_KINDS: [&str; 11] = [
    "magic",
    "length",
    "header_crc",
    "sums",
    "other_medium",
    "disagrees",
    "chunk",
    "misdirected",
    "stale",
    "io",
    "invalid",
];

impl Wrong {
    /// The index of the kind in [`WRONG_KINDS`].
    const fn index(&self) -> usize {
        match self {
            Self::Header(HeaderWrong::Magic) => 0,
            Self::Header(HeaderWrong::Length) => 1,
            Self::Header(HeaderWrong::Crc) => 2,
            Self::Header(HeaderWrong::Sums) => 3,
            Self::Header(HeaderWrong::OtherMedium) => 4,
            Self::Header(HeaderWrong::Disagrees) => 5,
            Self::Chunk(_) => 6,
            Self::Misdirected { .. } => 7,
            Self::Stale { .. } => 8,
            Self::Io(_) | Self::BadSector(_) => 9,
            Self::Invalid(_) => 10,
        }
    }

    /// The kind, as the label of a counter.
    pub fn kind(&self) -> &'static str {
        WRONG_KINDS.get(self.index()).copied().unwrap_or("invalid")
    }
}

/// The number of failed loads, by kind.
#[derive(Debug, Default)]
pub(super) struct WrongCounts([AtomicU64; WRONG_KINDS.len()]);

impl WrongCounts {
    pub(super) fn count(&self, wrong: &Wrong) {
        if let Some(counter) = self.0.get(wrong.index()) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn read(&self) -> [(&'static str, u64); WRONG_KINDS.len()] {
        let mut counts = WRONG_KINDS.map(|kind| (kind, 0));
        for (count, counter) in counts.iter_mut().zip(&self.0) {
            count.1 = counter.load(Ordering::Relaxed);
        }
        counts
    }
}

impl MediumRefused {
    /// The refusal's name, as the label of a counter.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Foreign => "foreign",
            Self::NewerFormat(_) => "newer_format",
            Self::Damaged => "damaged",
            Self::Shrunk { .. } => "shrunk",
            Self::TooSmall(_) => "too_small",
            Self::OtherCluster { .. } => "other_cluster",
            Self::NoRoom => "no_room",
            Self::Io(_) => "io",
        }
    }
}
