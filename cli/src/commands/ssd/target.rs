//! A disk, partition or file, and its content.

use anyhow::Context as _;
use kvpool_disk::medium::{Formatted, MediumRefused, Opened, Superblock};
use kvpool_disk::{Arena, Engine, GRANULE, OpenError, Options, open};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The memory for reads and writes.
const ARENA: usize = 8 << 20;

/// An open device or file. Meanwhile no other process that uses kvpool can open it, except to read a file.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) arena: Arc<Arena>,
}

/// The content of a device.
#[derive(Debug)]
pub(super) enum Content {
    Blank,
    Medium(Formatted),
    /// Bytes that are no medium of this release.
    Refused(MediumRefused),
}

/// A node, another command, or the system has the device or file.
#[derive(Debug, thiserror::Error)]
pub(super) enum InUse {
    #[error("{} is in use by another process, such as a kvstore-node: stop it first", .0.display())]
    Locked(PathBuf),
    #[error(
        "{} is in use: by a process, such as a kvstore-node, or by a mount, swap, a volume or an array. End that \
         use first",
        .0.display()
    )]
    Device(PathBuf),
}

impl Target {
    /// Opens a device or file. Only with a size it makes a missing file.
    pub(super) fn open(path: &Path, size: Option<u64>) -> anyhow::Result<Self> {
        Self::open_with(
            path,
            &Options {
                size,
                ..Options::default()
            },
        )
    }

    /// Opens a device or file for reads alone. Nothing can be written to it.
    pub(super) fn open_to_read(path: &Path) -> anyhow::Result<Self> {
        Self::open_with(
            path,
            &Options {
                read_only: true,
                ..Options::default()
            },
        )
    }

    fn open_with(path: &Path, options: &Options) -> anyhow::Result<Self> {
        let arena = Arena::new(ARENA).context("no memory for reads")?;
        let engine = open(path, options, &arena).map_err(|error| match error {
            OpenError::Busy { path } => anyhow::Error::from(InUse::Locked(path)),
            OpenError::DeviceBusy { path } => InUse::Device(path).into(),
            other => other.into(),
        })?;
        Ok(Self { engine, arena })
    }

    /// Reads the content of the device.
    pub(super) fn content(&self) -> anyhow::Result<Content> {
        match Formatted::open(Arc::clone(&self.engine), Arc::clone(&self.arena)) {
            Ok(Opened::Blank) => Ok(Content::Blank),
            Ok(Opened::Formatted(medium)) => Ok(Content::Medium(medium)),
            Err(refused @ (MediumRefused::Io(_) | MediumRefused::NoRoom)) => Err(refused.into()),
            Err(refused) => Ok(Content::Refused(refused)),
        }
    }
}

/// The newer superblock of a device that another process has open; `None` when neither is readable.
pub(super) fn peek(path: &Path) -> Option<Superblock> {
    let mut both = vec![0; 2 * GRANULE];
    File::open(path).ok()?.read_exact(&mut both).ok()?;
    let copies = both.chunks(GRANULE).map(Superblock::decode);
    copies
        .flatten()
        .max_by_key(|superblock| superblock.sequence)
}

/// Foreign content, recognised by the magic bytes of common formats.
pub(super) fn foreign_kind(path: &Path) -> &'static str {
    const UNKNOWN: &str = "bytes that are not kvpool's";
    const MARKS: [(usize, &[u8], &str); 7] = [
        (0, b"XFSB", "an XFS filesystem"),
        (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
        (0x438, b"\x53\xef", "an ext2, ext3 or ext4 filesystem"),
        (0x1_0040, b"_BHRfS_M", "a btrfs filesystem"),
        (0x200, b"LABELONE", "a physical volume of LVM"),
        (0x200, b"EFI PART", "a partition table (GPT)"),
        (0x1fe, b"\x55\xaa", "a partition table or boot sector (MBR)"),
    ];
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(128 << 10).read_to_end(&mut start));
    if read.is_err() {
        return UNKNOWN;
    }
    let has = |at: usize, mark: &[u8]| start.get(at..).is_some_and(|rest| rest.starts_with(mark));
    let known = MARKS.iter().find(|(at, mark, _)| has(*at, mark));
    known.map_or(UNKNOWN, |(_, _, name)| name)
}
