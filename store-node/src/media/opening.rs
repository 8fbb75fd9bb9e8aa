//! Opens the media at the start of the node, and refuses media that the node must not use.

use super::disk::Disk;
use super::{LOCK_PATIENCE, Media, SsdConfig};
use crate::serve::Store;
use kvpool_disk::medium::{Formatted, MediumRefused};
use kvpool_disk::{Arena, Engine, OpenError, Options, open, open_in};
use kvpool_types::MediumId;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The memory in bytes for transfers in progress, over all media. A block may be as long as the largest zone.
pub(super) const ARENA: usize = 257 << 20;

/// Why the media cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// A device or file cannot be opened.
    #[error(transparent)]
    Open(#[from] kvpool_disk::OpenError),
    /// The content of a device or file cannot be used.
    #[error("{}: {source}", path.display())]
    Refused {
        /// The device or file.
        path: PathBuf,
        /// The reason.
        source: MediumRefused,
    },
    /// Two paths lead to the same file or device.
    #[error("{} and {} are the same file or device: take one of the two paths out of --ssd",
        first.display(), second.display())]
    SameFile {
        /// A path.
        first: PathBuf,
        /// The other path.
        second: PathBuf,
    },
    /// Two devices or files hold the same medium.
    #[error("{} and {} hold the same medium {medium}: one is a copy of the other; take the copy out of --ssd",
        first.display(), second.display())]
    Twins {
        /// A device or file.
        first: PathBuf,
        /// The other device or file.
        second: PathBuf,
        /// The id of the medium.
        medium: MediumId,
    },
    /// The system has no free memory or cannot start a thread.
    #[error("media need memory and threads: {0}")]
    System(#[from] std::io::Error),
}

impl Media {
    /// Opens the media. Blocks on the devices.
    pub(crate) fn open(config: &[SsdConfig], store: Store) -> Result<Self, MediaError> {
        let arena = Arena::new(ARENA)?;
        let mut disks = Vec::with_capacity(config.len());
        for one in config {
            if !one.in_directory {
                refuse_same_file(&disks, &one.path)?;
            }
            let options = Options {
                size: one.size.map(|size| size.0),
                patience: LOCK_PATIENCE,
                ..Options::default()
            };
            let (path, engine) = match one.in_directory {
                true => open_in(&one.path, &options, &arena)?,
                false => (one.path.clone(), open_file(one, &options, &arena)?),
            };
            let disk = Disk::read(one, path.clone(), engine, &arena)
                .map_err(|source| MediaError::Refused { path, source })?;
            refuse_twin(&disks, &disk)?;
            disks.push(disk);
        }
        let mut media = Self::of(disks, arena, store);
        media.start_workers()?;
        Ok(media)
    }
}

/// Refuses a path to a file or device that the node has open already. Its lock would be waited for in vain.
fn refuse_same_file(disks: &[Disk], path: &Path) -> Result<(), MediaError> {
    let Some(own) = identity(path) else {
        return Ok(());
    };
    match disks
        .iter()
        .find(|other| identity(other.path()) == Some(own))
    {
        None => Ok(()),
        Some(other) => Err(MediaError::SameFile {
            first: other.path().to_owned(),
            second: path.to_owned(),
        }),
    }
}

/// The numbers that all paths of a file or device have in common. `None` if nothing is there.
fn identity(path: &Path) -> Option<(bool, u64, u64)> {
    let found = std::fs::metadata(path).ok()?;
    // A device may have several entries, each with an inode of its own.
    Some(match found.file_type().is_block_device() {
        true => (true, 0, found.rdev()),
        false => (false, found.dev(), found.ino()),
    })
}

/// Refuses a medium that another of the node's disks holds too, since the master could not tell the two
/// apart.
fn refuse_twin(disks: &[Disk], disk: &Disk) -> Result<(), MediaError> {
    let Some(medium) = disk.id() else {
        return Ok(());
    };
    match disks.iter().find(|other| other.id() == Some(medium)) {
        None => Ok(()),
        Some(other) => Err(MediaError::Twins {
            first: other.path().to_owned(),
            second: disk.path().to_owned(),
            medium,
        }),
    }
}

/// Opens a device or file. A file with content grows only after the content was checked. A file that is not
/// kvpool's stays unchanged.
fn open_file(
    one: &SsdConfig,
    options: &Options,
    arena: &Arc<Arena>,
) -> Result<Arc<dyn Engine>, MediaError> {
    let found = std::fs::metadata(&one.path).ok();
    let held = found.filter(|found| found.is_file() && found.len() > 0);
    let grows = held.is_some_and(|found| options.size.is_some_and(|size| size > found.len()));
    if grows && !one.reset {
        let as_it_is = Options {
            size: None,
            ..*options
        };
        let refused = |source| MediaError::Refused {
            path: one.path.clone(),
            source,
        };
        let too_small = |error| match error {
            OpenError::Size { .. } => refused(MediumRefused::Foreign),
            error => error.into(),
        };
        let engine = open(&one.path, &as_it_is, arena).map_err(too_small)?;
        match Formatted::open(engine, Arc::clone(arena)) {
            Ok(_) => tracing::warn!(
                path = %one.path.display(),
                size = options.size,
                "the file grows, so it is formatted anew: the blocks on it are dropped"
            ),
            Err(MediumRefused::TooSmall(_)) => return Err(refused(MediumRefused::Foreign)),
            Err(error) => return Err(refused(error)),
        }
    }
    Ok(open(&one.path, options, arena)?)
}
