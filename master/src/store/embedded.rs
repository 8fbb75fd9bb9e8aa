//! The store of a single master: a directory of its own (ADR 0025 says why no database).
//!
//! ```text
//!  identity            the pool's id and its latest term
//!  log/NNNN.log        segments of the log, written ahead of their use, frames with CRCs
//!  snapshots/SHARD     one file for each shard, replaced whole
//! ```
//!
//! * An append is one write and one flush, over bytes that were written before. It needs no space
//!   on the disk and changes no metadata of the filesystem. A failed flush is undone, durably,
//!   before any other write. If that fails too, the store writes nothing more.
//! * A CRC covers every byte. Every file names its store, and every segment names its successor. If
//!   a file is damaged, missing or foreign, the error names it and the position, and the store does
//!   not open.
//! * A start writes the last segments again before it accepts them: perhaps only the page cache has
//!   their bytes.
//! * The directory is locked while the store is open. A store whose files were moved stops
//!   ([`EmbeddedStore::check`]).
//!
//! **Architecture Invariant:** an existing pool never becomes a new one unless the operator says so
//! ([`set_aside`]).

mod data_directory;
mod files;
mod frame;
mod identity;
mod log;
mod redb_import;
mod segment;
mod snapshots;
mod survey;
#[cfg(test)]
mod tests;

use super::{
    LogSeq, LogSpan, MetadataStore, OpenError, ShardIndex, Snapshot, SnapshotPositions, StoreError,
};
use async_trait::async_trait;
use bytes::Bytes;
use bytesize::ByteSize;
pub use data_directory::set_aside;
use data_directory::{Layout, LockedDirectory};
use identity::Identity;
use kvpool_types::{ClusterId, Epoch};
use log::Log;
use parking_lot::Mutex;
use snapshots::Snapshots;
use std::path::PathBuf;

/// The size of a segment of the log: about 70,000 blocks.
const SEGMENT: ByteSize = ByteSize::mib(4);

/// Options of the embedded store.
#[derive(Clone, Debug)]
pub struct EmbeddedOptions {
    /// The directory of the files, created if missing.
    pub directory: PathBuf,
    /// The memory for the one-time migration of a store of format 1.
    pub cache: ByteSize,
    /// The size of a segment of the log, which is allocated at once.
    pub segment: ByteSize,
}

impl EmbeddedOptions {
    /// The default options for a directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            cache: ByteSize::mib(16),
            segment: SEGMENT,
        }
    }
}

/// A [`MetadataStore`] in a local directory. One process at a time may have it open.
#[derive(Debug)]
pub struct EmbeddedStore {
    layout: Layout,
    /// `None` once closed.
    open: Mutex<Option<Open>>,
    /// Held while a snapshot is put: snapshots are put one after another.
    snapshot: Mutex<()>,
}

#[derive(Debug)]
struct Open {
    identity: Identity,
    log: Log,
    snapshots: Snapshots,
    place: LockedDirectory,
}

impl EmbeddedStore {
    /// Opens the store, or creates one in a directory without a store.
    ///
    /// # Errors
    ///
    /// [`OpenError`] when another process has the directory open, when a file is damaged, missing
    /// or foreign, or when the filesystem failed.
    pub fn open(options: &EmbeddedOptions) -> Result<Self, OpenError> {
        let layout = Layout::new(&options.directory);
        let segment = options.segment.as_u64();
        let mut place = LockedDirectory::lock(&layout)?;
        let identity = match layout.identity()? {
            Some(identity) => {
                layout.move_old_aside()?;
                identity
            }
            None if layout.has_old()? => {
                let cache = usize::try_from(options.cache.as_u64()).unwrap_or(usize::MAX);
                redb_import::carry(&layout, cache, segment)?
            }
            None => layout.begin(segment)?,
        };
        let damaged = |error: StoreError| layout.damaged(error);
        let log = Log::open(&layout.log(), identity.store, segment).map_err(damaged)?;
        let snapshots = Snapshots::open(&layout.snapshots(), identity.store).map_err(damaged)?;
        check_reach(&layout, log.span(), &snapshots).map_err(damaged)?;
        place.watch(&layout).map_err(|error| layout.io(error))?;
        let identity = Identity {
            epoch: identity.epoch.max(log.epoch()),
            ..identity
        };
        Ok(Self {
            layout,
            open: Mutex::new(Some(Open {
                identity,
                log,
                snapshots,
                place,
            })),
            snapshot: Mutex::new(()),
        })
    }

    /// Checks that the files are still where they were opened. After a move, another kvmaster could
    /// write there unnoticed.
    ///
    /// # Errors
    ///
    /// [`StoreError`] names the file that was moved or replaced.
    pub fn check(&self) -> Result<(), StoreError> {
        self.with(|open| open.place.check(&self.layout, open.log.active()))
    }

    /// Writes a new identity file.
    fn identify(&self, open: &mut Open, identity: Identity) -> Result<(), StoreError> {
        let root = &self.layout.root;
        let failed =
            |error: std::io::Error| files::failed(root, "its identity cannot be stored", &error);
        identity.write(root).map_err(failed)?;
        open.identity = identity;
        open.place.watch(&self.layout).map_err(failed)
    }

    fn with<T>(&self, f: impl FnOnce(&mut Open) -> Result<T, StoreError>) -> Result<T, StoreError> {
        f(self.open.lock().as_mut().ok_or(StoreError::Closed)?)
    }
}

/// Refuses a snapshot beyond the end of the log. Such a log has lost groups, and later groups would
/// get positions that the snapshot already contains.
fn check_reach(layout: &Layout, log: LogSpan, snapshots: &Snapshots) -> Result<(), StoreError> {
    let positions = snapshots.positions().iter();
    let beyond = positions.filter(|(_, (seq, _))| *seq > log.last).max();
    let Some((shard, (seq, _))) = beyond else {
        return Ok(());
    };
    Err(StoreError::Corrupt {
        reason: format!(
            "{}: the snapshot of {shard} contains group {seq}, and the log ends at group {}: the log is older",
            layout.snapshots().display(),
            log.last
        ),
    })
}

impl Open {
    fn check_epoch(&self, asked: Epoch) -> Result<(), StoreError> {
        let current = self.identity.epoch;
        if asked == current {
            Ok(())
        } else {
            Err(StoreError::Fenced { asked, current })
        }
    }

    fn check_inside(&self, asked: LogSeq) -> Result<(), StoreError> {
        let LogSpan { cut, last } = self.log.span();
        if (cut..=last).contains(&asked) {
            Ok(())
        } else {
            Err(StoreError::OutsideLog { asked, cut, last })
        }
    }
}

#[async_trait]
impl MetadataStore for EmbeddedStore {
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError> {
        self.with(|open| match open.identity.cluster {
            Some(stored) => Ok(stored),
            None => {
                let cluster = Some(fresh);
                self.identify(
                    open,
                    Identity {
                        cluster,
                        ..open.identity
                    },
                )?;
                Ok(fresh)
            }
        })
    }

    async fn epoch(&self) -> Result<Epoch, StoreError> {
        self.with(|open| Ok(open.identity.epoch))
    }

    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError> {
        self.with(|open| {
            let last = open.identity.epoch;
            let next = last.0.checked_add(1).ok_or_else(|| StoreError::Corrupt {
                reason: format!("no epoch is left after {last}"),
            })?;
            let identity = Identity {
                epoch: Epoch(next).max(at_least),
                ..open.identity
            };
            match self.identify(open, identity) {
                // A kvmaster that starts on a full disk must still serve gets. Therefore the log
                // reserves space for a term.
                Err(StoreError::DirectoryFull { .. }) => {
                    open.log.begin_epoch(identity.epoch)?;
                    open.identity.epoch = identity.epoch;
                    // The identity file may have been replaced before the disk was full.
                    let failed = |error| files::failed(&self.layout.root, "its identity", &error);
                    open.place.watch(&self.layout).map_err(failed)?;
                }
                outcome => outcome?,
            }
            Ok(identity.epoch)
        })
    }

    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError> {
        self.with(|open| {
            open.check_epoch(epoch)?;
            let last = open.log.span().last;
            if seq != last.next() {
                return Err(StoreError::Gap { asked: seq, last });
            }
            open.log.append(epoch, &group)
        })
    }

    fn tidy_after_append(&self) {
        // If another thread holds the lock, it is appending and will tidy up afterwards.
        if let Some(mut open) = self.open.try_lock()
            && let Some(open) = open.as_mut()
        {
            open.log.mark_end();
        }
    }

    async fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        self.with(|open| open.log.make_room(bytes))
    }

    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.with(|open| Ok(open.log.span()))
    }

    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        // The lock is held so that no segment is reused during the read.
        self.with(|open| open.log.read(after, limit_bytes))
    }

    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        chunks: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        let _one_at_a_time = self.snapshot.lock();
        let allowed = |open: &Open| {
            open.check_epoch(epoch)?;
            open.check_inside(seq)
        };
        let writer = self.with(|open| {
            allowed(open)?;
            Ok(open.snapshots.writer())
        })?;
        // Appends continue during this write.
        let written = writer.write(shard, seq, &chunks)?;
        self.with(|open| {
            allowed(open)?;
            open.snapshots.take(written)
        })
    }

    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        self.with(|open| open.snapshots.read(shard))
    }

    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        self.with(|open| Ok(open.snapshots.positions().keys().copied().collect()))
    }

    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError> {
        self.with(|open| Ok(open.snapshots.positions().clone()))
    }

    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        self.with(|open| {
            open.check_epoch(epoch)?;
            let LogSpan { cut, last } = open.log.span();
            if through > last {
                return Err(StoreError::OutsideLog {
                    asked: through,
                    cut,
                    last,
                });
            }
            if through > cut {
                open.snapshots.settle()?;
            }
            open.log.cut(epoch, through)
        })
    }

    async fn size_on_disk(&self) -> Result<u64, StoreError> {
        self.layout
            .size()
            .map_err(|error| files::failed(&self.layout.root, "its size is not known", &error))
    }

    async fn close(&self) -> Result<(), StoreError> {
        let Some(mut open) = self.open.lock().take() else {
            return Ok(());
        };
        open.log
            .close()
            .map_err(|error| files::failed(&self.layout.root, "the log cannot be closed", &error))
    }
}
