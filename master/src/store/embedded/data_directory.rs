//! The data directory: its layout, its lock, and the check before a new pool begins.

use super::identity::{self, Identity, StoreId, Unreadable};
use super::log::Log;
use super::segment::Active;
use super::{files, redb_import};
use crate::store::{LogSpan, OpenError, StoreError};
use kvpool_types::Epoch;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The paths of a store.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) root: PathBuf,
}

impl Layout {
    pub(super) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    pub(super) fn log(&self) -> PathBuf {
        self.root.join("log")
    }

    pub(super) fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    pub(super) fn old_file(&self) -> PathBuf {
        self.root.join(redb_import::FILE_NAME)
    }

    /// Every path that belongs to a store.
    fn all(&self) -> [PathBuf; 4] {
        let identity = self.root.join(identity::NAME);
        [identity, self.log(), self.snapshots(), self.old_file()]
    }

    pub(super) fn io(&self, source: io::Error) -> OpenError {
        if files::is_full(&source) {
            return OpenError::Store(files::failed(&self.root, "opening it", &source));
        }
        OpenError::Io {
            path: self.root.display().to_string(),
            source,
        }
    }

    fn damage(&self, reason: String) -> OpenError {
        OpenError::Damaged {
            directory: self.root.display().to_string(),
            reason,
        }
    }

    /// The error that refuses to open the store because of an unusable file.
    pub(super) fn damaged(&self, error: StoreError) -> OpenError {
        match error {
            StoreError::Corrupt { reason } => self.damage(reason),
            other => OpenError::Store(other),
        }
    }

    /// The identity of the store; `None` without the file.
    pub(super) fn identity(&self) -> Result<Option<Identity>, OpenError> {
        let path = self.root.join(identity::NAME);
        Identity::read(&self.root).map_err(|error| match error {
            Unreadable::Io(source) => self.io(source),
            Unreadable::Format(found) => OpenError::Format {
                path: path.display().to_string(),
                found,
                known: identity::FORMAT,
            },
            changed => self.damage(format!("{}: {changed}", path.display())),
        })
    }

    pub(super) fn has_old(&self) -> Result<bool, OpenError> {
        redb_import::is_due(&self.old_file()).map_err(|error| self.io(error))
    }

    /// Renames a store of format 1 beside a current store. Its content is not read.
    pub(super) fn move_old_aside(&self) -> Result<(), OpenError> {
        if !self.has_old()? {
            return Ok(());
        }
        let (old, unused) = (self.old_file(), self.old_file().with_extension("unused"));
        tracing::warn!(
            file = %old.display(), moved_to = %unused.display(),
            "a store of format 1 beside the current store is not used"
        );
        std::fs::rename(&old, &unused)
            .and_then(|()| redb_import::leave_note(&old))
            .map_err(|error| self.io(error))
    }

    /// Makes the store of a new pool, unless the directory holds a group or a snapshot.
    pub(super) fn begin(&self, segment: u64) -> Result<Identity, OpenError> {
        let io = |error| self.io(error);
        if self.holds_something()? {
            return Err(self.damage(format!(
                "the file {} is missing, but a log or a snapshot is present",
                self.root.join(identity::NAME).display()
            )));
        }
        for begun in [self.log(), self.snapshots()] {
            remove_if_there(&begun).map_err(io)?;
        }
        let identity = Identity {
            store: StoreId(kvpool_seams::random()),
            cluster: None,
            epoch: Epoch(0),
        };
        Log::create(&self.log(), identity.store, segment, LogSpan::default()).map_err(io)?;
        std::fs::create_dir_all(self.snapshots()).map_err(io)?;
        files::sync_directory(&self.root).map_err(io)?;
        identity.write(&self.root).map_err(io)?;
        redb_import::leave_note(&self.old_file()).map_err(io)?;
        tracing::info!(directory = %self.root.display(), "new metadata store created");
        Ok(identity)
    }

    /// True if the directory holds a group or a snapshot. An interrupted first start leaves
    /// neither.
    fn holds_something(&self) -> Result<bool, OpenError> {
        let entries = |directory: PathBuf| match std::fs::read_dir(directory) {
            Ok(entries) => entries
                .map(|entry| entry.map(|entry| entry.path()))
                .collect::<io::Result<Vec<PathBuf>>>(),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        let finished = |path: &&PathBuf| path.extension().is_none_or(|e| e != files::PARTIAL);
        let snapshots = entries(self.snapshots()).map_err(|error| self.io(error))?;
        let log = entries(self.log()).map_err(|error| self.io(error))?;
        let is_begun = |path: &&PathBuf| {
            let read = super::segment::read(path);
            read.is_ok_and(|read| read.header.number == 1 && read.groups.is_empty())
        };
        let something = |path: &&PathBuf| finished(path) && !is_begun(path);
        Ok(snapshots.iter().any(|path| finished(&path)) || log.iter().any(|path| something(&path)))
    }

    /// Moves files and directories of the store into a new directory inside the store, and returns
    /// its path.
    pub(super) fn move_aside(
        &self,
        paths: impl IntoIterator<Item = PathBuf>,
    ) -> Result<PathBuf, OpenError> {
        let io = |error| self.io(error);
        let mut number = 1;
        let aside = loop {
            let aside = self.root.join(format!("set-aside-{number}"));
            match std::fs::create_dir(&aside) {
                Ok(()) => break aside,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(io(error)),
            }
        };
        for path in paths {
            let Some(name) = path.file_name() else {
                continue;
            };
            match std::fs::rename(&path, aside.join(name)) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(error)),
                _ => {}
            }
        }
        files::sync_directory(&aside).map_err(io)?;
        files::sync_directory(&self.root).map_err(io)?;
        Ok(aside)
    }

    /// The bytes of all files.
    pub(super) fn size(&self) -> io::Result<u64> {
        let mut bytes = 0;
        for directory in [self.root.clone(), self.log(), self.snapshots()] {
            for entry in std::fs::read_dir(directory)? {
                // A file may disappear during the loop.
                bytes += match entry?.metadata() {
                    Ok(metadata) if metadata.is_file() => metadata.len(),
                    _ => 0,
                };
            }
        }
        Ok(bytes)
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The identity of a file or directory. A move does not change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inode(u64, u64);

impl Inode {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self(metadata.dev(), metadata.ino())
    }

    fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::of(&std::fs::metadata(path)?))
    }
}

/// Creates the directory, if there is none, with access for this user only, since it holds keys and names of
/// namespaces. Missing parent directories get the usual permissions.
fn make(root: &Path) -> io::Result<()> {
    if let Some(parent) = root.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::DirBuilder::new().mode(0o700).create(root) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && root.is_dir() => Ok(()),
        made => made,
    }
}

/// A locked directory: no other process has it open.
#[derive(Debug)]
pub(super) struct LockedDirectory {
    /// The lock is on the directory itself, so it stays when files are moved or removed.
    directory: File,
    identity: Option<Inode>,
}

impl LockedDirectory {
    /// Locks the directory, which is created if missing.
    pub(super) fn lock(layout: &Layout) -> Result<Self, OpenError> {
        let io = |error| layout.io(error);
        make(&layout.root).map_err(io)?;
        let directory = File::open(&layout.root).map_err(io)?;
        if let Some(parent) = layout.root.parent().filter(|p| !p.as_os_str().is_empty()) {
            // The directory's name must be as durable as its files.
            match files::sync_directory(parent) {
                // Listing the parent may be forbidden and is not needed: a journaling filesystem
                // writes the name when the directory itself is flushed.
                Err(error) if error.kind() == ErrorKind::PermissionDenied => directory.sync_all(),
                flushed => flushed,
            }
            .map_err(io)?;
        }
        match directory.try_lock() {
            Ok(()) => Ok(Self {
                directory,
                identity: None,
            }),
            Err(TryLockError::WouldBlock) => Err(OpenError::InUse {
                path: layout.root.display().to_string(),
            }),
            Err(TryLockError::Error(error)) => Err(io(error)),
        }
    }

    /// Records the current identity file.
    pub(super) fn watch(&mut self, layout: &Layout) -> io::Result<()> {
        self.identity = Some(Inode::at(&layout.root.join(identity::NAME))?);
        Ok(())
    }

    /// Checks that the directory, its identity and the log are still in place.
    pub(super) fn check(&self, layout: &Layout, active: &Active) -> Result<(), StoreError> {
        let identity = layout.root.join(identity::NAME);
        let held = |file: &File| file.metadata().ok().map(|metadata| Inode::of(&metadata));
        let expected = [
            (&layout.root, held(&self.directory)),
            (&identity, self.identity),
            (&active.path, held(&active.file)),
        ];
        for (path, inode) in expected {
            if Inode::at(path).ok() != inode {
                return Err(StoreError::Moved {
                    path: path.display().to_string(),
                });
            }
        }
        Ok(())
    }
}

/// Moves the files of a store into a new directory inside it, so that the next start makes a new
/// store. Returns the new directory.
///
/// # Errors
///
/// [`OpenError`] when another process has the directory open, or when a file cannot be moved.
pub fn set_aside(directory: &Path) -> Result<PathBuf, OpenError> {
    let layout = Layout::new(directory);
    let _place = LockedDirectory::lock(&layout)?;
    layout.move_aside(layout.all())
}
