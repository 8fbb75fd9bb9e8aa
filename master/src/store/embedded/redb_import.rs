//! Migration of a store of format 1, one redb file, to the current format.
//!
//! ```text
//!  meta      name             -> format, cluster id, epoch, last position, cut
//!  log       position         -> group
//!  snapshot  shard            -> position, generation
//!  part      generation, n    -> chunk
//! ```
//!
//! ADR 0003 describes format 1, ADR 0025 the current one.

use super::data_directory::Layout;
use super::identity::{Identity, StoreId};
use super::log::Log;
use super::snapshots::Snapshots;
use crate::store::{LogSeq, LogSpan, OpenError, ShardIndex, StoreError};
use bytes::Bytes;
use kvpool_types::{ClusterId, Epoch};
use redb::{DatabaseError, ReadTransaction, ReadableDatabase, StorageError, TableDefinition};
use std::path::Path;

const META: TableDefinition<'_, &str, u128> = TableDefinition::new("meta");
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const SNAPSHOT: TableDefinition<'_, u32, (u64, u64)> = TableDefinition::new("snapshot");
const PART: TableDefinition<'_, (u64, u32), &[u8]> = TableDefinition::new("part");

/// The file of format 1.
pub(super) const FILE_NAME: &str = "metadata.redb";
const FORMAT: u64 = 1;
/// The file's new content. A kvmaster that knows only format 1 refuses it.
const NOTE: &[u8] =
    b"This pool's metadata was carried over into the files beside this one, by a later kvmaster.\n";

/// True when the directory has a file of format 1.
pub(super) fn is_due(path: &Path) -> std::io::Result<bool> {
    match std::fs::metadata(path) {
        Ok(file) => Ok(file.len() != NOTE.len() as u64 || std::fs::read(path)? != NOTE),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Copies a file of format 1 into files of the current format beside it. The identity is written
/// last; until then the old file is the store.
pub(super) fn carry(layout: &Layout, cache: usize, segment: u64) -> Result<Identity, OpenError> {
    let path = layout.old_file();
    let corrupt = |error: StoreError| match error {
        full @ StoreError::DirectoryFull { .. } => OpenError::Store(full),
        error => OpenError::Damaged {
            directory: layout.root.display().to_string(),
            reason: format!("{}: {error}", path.display()),
        },
    };
    // A crash may have interrupted an earlier migration. Or the old file was put back into a
    // current store that lost its identity. The two cases look alike, so nothing is removed.
    let begun = [layout.log(), layout.snapshots()];
    if begun.iter().any(|directory| directory.exists()) {
        let aside = layout.move_aside(begun.clone())?;
        tracing::warn!(
            moved_to = %aside.display(),
            "a log or snapshots without an identity beside a store of format 1 are not used"
        );
    }
    let database = redb::Builder::new()
        .set_cache_size(cache)
        .open(&path)
        .map_err(|e| open_error(layout, &path, e))?;
    let t = database.begin_read().map_err(failed).map_err(corrupt)?;
    let found = get(&t, "format").map_err(corrupt)?;
    if found != Some(FORMAT.into()) {
        return Err(OpenError::Format {
            path: path.display().to_string(),
            found: found
                .and_then(|found| u64::try_from(found).ok())
                .unwrap_or(0),
            known: FORMAT,
        });
    }
    let identity = copy(&t, layout, segment).map_err(|error| {
        // Only this attempt made these files, and a full disk needs their space.
        for begun in begun {
            let _next_start_moves_it = std::fs::remove_dir_all(begun);
        }
        corrupt(error)
    })?;
    drop(t);
    drop(database);
    identity.write(&layout.root).map_err(|e| layout.io(e))?;
    leave_note(&path).map_err(|e| layout.io(e))?;
    tracing::info!(
        directory = %layout.root.display(), store = %identity.store,
        "metadata migrated from format 1"
    );
    Ok(identity)
}

/// Replaces the file by the note, when its content is no longer needed.
pub(super) fn leave_note(path: &Path) -> std::io::Result<()> {
    use std::io::Write as _;
    super::files::replace(path, |mut file| file.write_all(NOTE))
}

fn copy(t: &ReadTransaction, layout: &Layout, segment: u64) -> Result<Identity, StoreError> {
    let number = |name: &str| -> Result<u64, StoreError> {
        let value = get(t, name)?.unwrap_or(0);
        u64::try_from(value).map_err(|_| StoreError::Corrupt {
            reason: format!("{name} is {value}"),
        })
    };
    let stored = get(t, "cluster")?;
    let identity = Identity {
        store: StoreId(kvpool_seams::random()),
        cluster: stored.map(ClusterId),
        epoch: Epoch(number("epoch")?),
    };
    let (cut, last) = (LogSeq(number("cut")?), LogSeq(number("last")?));
    let span = LogSpan { cut, last: cut };
    let mut log = Log::create(&layout.log(), identity.store, segment, span)
        .map_err(|e| super::files::failed(&layout.root, "the log cannot be made", &e))?;
    let groups = t.open_table(LOG).map_err(failed)?;
    for entry in groups.range(cut.0 + 1..).map_err(failed)? {
        let (seq, group) = entry.map_err(failed)?;
        let expected = log.span().last.next();
        if LogSeq(seq.value()) != expected {
            return Err(StoreError::Corrupt {
                reason: format!("group {expected} is missing"),
            });
        }
        log.append(identity.epoch, group.value())?;
    }
    if log.span().last != last {
        return Err(StoreError::Corrupt {
            reason: format!("the log ends at {} and should at {last}", log.span().last),
        });
    }
    let mut snapshots = Snapshots::open(&layout.snapshots(), identity.store)?;
    let pointers = t.open_table(SNAPSHOT).map_err(failed)?;
    let stored = t.open_table(PART).map_err(failed)?;
    for entry in pointers.range(0..).map_err(failed)? {
        let (shard, pointer) = entry.map_err(failed)?;
        let (seq, generation) = pointer.value();
        let mut chunks = Vec::new();
        for chunk in stored
            .range((generation, 0)..=(generation, u32::MAX))
            .map_err(failed)?
        {
            chunks.push(Bytes::copy_from_slice(chunk.map_err(failed)?.1.value()));
        }
        let shard = ShardIndex(shard.value());
        let written = snapshots.writer().write(shard, LogSeq(seq), &chunks)?;
        snapshots.take(written)?;
    }
    snapshots.settle()?;
    Ok(identity)
}

fn get(t: &ReadTransaction, name: &str) -> Result<Option<u128>, StoreError> {
    let table = t.open_table(META).map_err(failed)?;
    Ok(table.get(name).map_err(failed)?.map(|value| value.value()))
}

fn failed(error: impl Into<redb::Error>) -> StoreError {
    match error.into() {
        redb::Error::Corrupted(reason) => StoreError::Corrupt { reason },
        error => StoreError::Corrupt {
            reason: error.to_string(),
        },
    }
}

fn open_error(layout: &Layout, path: &Path, error: DatabaseError) -> OpenError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => OpenError::InUse {
            path: path.display().to_string(),
        },
        DatabaseError::Storage(StorageError::Io(source))
            if source.kind() != std::io::ErrorKind::InvalidData =>
        {
            layout.io(source)
        }
        error => OpenError::Damaged {
            directory: layout.root.display().to_string(),
            reason: format!(
                "{} is not a readable metadata store: {error}",
                path.display()
            ),
        },
    }
}
