//! The store of a single master: a file in a directory of its own (redb; ADR 0003 says why).
//!
//! ```text
//!  meta      name             -> format, cluster id, epoch, last position, cut
//!  log       position         -> group
//!  snapshot  shard            -> position, generation
//!  part      generation, n    -> part
//! ```
//!
//! A snapshot's parts are written under a new generation in transactions of at most
//! [`STEP_BYTES`], so that appends get their turn between them. The last transaction points the
//! shard at the generation: that is the moment of replacement. Parts that no shard points at (of
//! the generation before, or of a snapshot that a crash cut short) are removed behind it or at the
//! next start.

use super::{
    LogSeq, LogSpan, MetadataStore, OpenError, ShardIndex, Snapshot, SnapshotPositions, StoreError,
};
use async_trait::async_trait;
use bytes::Bytes;
use bytesize::ByteSize;
use kvpool_types::{ClusterId, Epoch};
use parking_lot::{Mutex, RwLock};
use redb::{
    Database, DatabaseError, ReadTransaction, ReadableDatabase, ReadableTable, StorageError,
    TableDefinition, WriteTransaction,
};
use std::path::{Path, PathBuf};

const META: TableDefinition<'_, &str, u128> = TableDefinition::new("meta");
const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
const SNAPSHOT: TableDefinition<'_, u32, (u64, u64)> = TableDefinition::new("snapshot");
const PART: TableDefinition<'_, (u64, u32), &[u8]> = TableDefinition::new("part");

const FORMAT_KEY: &str = "format";
const CLUSTER_KEY: &str = "cluster";
const EPOCH_KEY: &str = "epoch";
const LAST_KEY: &str = "last";
const CUT_KEY: &str = "cut";
const GENERATION_KEY: &str = "generation";

const FORMAT: u64 = 1;
const FILE_NAME: &str = "metadata.redb";
/// The most bytes that one transaction of a snapshot writes (one part more at the most).
const STEP_BYTES: usize = 1 << 20;
/// The most parts or groups that one transaction removes.
const STEP_ENTRIES: usize = 64;

/// How the embedded store is opened.
#[derive(Clone, Debug)]
pub struct EmbeddedOptions {
    /// The directory of its file; made if it is not there.
    pub directory: PathBuf,
    /// How much of the file is kept in memory.
    pub cache: ByteSize,
}

impl EmbeddedOptions {
    /// The default options for a directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            cache: ByteSize::mib(16),
        }
    }
}

/// A [`MetadataStore`] in a local file. One process at a time may have it open.
#[derive(Debug)]
pub struct EmbeddedStore {
    path: PathBuf,
    /// `None` once closed.
    database: RwLock<Option<Database>>,
    /// Held while a snapshot is put: generations come one after another.
    snapshot: Mutex<()>,
}

impl EmbeddedStore {
    /// Opens the store, or makes a new one.
    pub fn open(options: &EmbeddedOptions) -> Result<Self, OpenError> {
        let path = options.directory.join(FILE_NAME);
        let io = |source| OpenError::Io {
            path: path.display().to_string(),
            source,
        };
        let corrupt = |e: StoreError| OpenError::Corrupt {
            path: path.display().to_string(),
            reason: e.to_string(),
        };
        std::fs::create_dir_all(&options.directory).map_err(io)?;
        let database = redb::Builder::new()
            .set_cache_size(usize::try_from(options.cache.as_u64()).unwrap_or(usize::MAX))
            .create(&path)
            .map_err(|e| open_error(&path, e))?;
        // The file's name has to be as durable as what is in it.
        std::fs::File::open(&options.directory)
            .and_then(|directory| directory.sync_all())
            .map_err(io)?;
        prepare(&database)
            .map_err(corrupt)
            .and_then(|found| match found {
                FORMAT => Ok(()),
                found => Err(OpenError::Format {
                    path: path.display().to_string(),
                    found,
                    known: FORMAT,
                }),
            })?;
        sweep(&database).map_err(corrupt)?;
        Ok(Self {
            path,
            database: RwLock::new(Some(database)),
            snapshot: Mutex::new(()),
        })
    }

    fn read<T>(
        &self,
        read: impl FnOnce(&ReadTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let guard = self.database.read();
        let database = guard.as_ref().ok_or(StoreError::Closed)?;
        read(&database.begin_read().map_err(failed)?)
    }

    /// Runs one transaction. It is durable when this returns `Ok`; if `change` refuses, it leaves
    /// nothing behind.
    fn write<T>(
        &self,
        change: impl FnOnce(&WriteTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let guard = self.database.read();
        let database = guard.as_ref().ok_or(StoreError::Closed)?;
        let transaction = database.begin_write().map_err(failed)?;
        let changed = change(&transaction)?;
        transaction.commit().map_err(failed)?;
        Ok(changed)
    }

    /// Removes the parts of a generation that no shard points at.
    fn remove_parts(&self, epoch: Epoch, generation: u64) -> Result<(), StoreError> {
        loop {
            let more = self.write(|t| {
                check_epoch(t, epoch)?;
                remove_some_parts(t, generation)
            })?;
            if !more {
                return Ok(());
            }
        }
    }
}

/// The number of a snapshot that begins.
fn next_generation(t: &WriteTransaction) -> Result<u64, StoreError> {
    let generation = get(t, GENERATION_KEY)?.unwrap_or(0) + 1;
    set(t, GENERATION_KEY, generation.into())?;
    Ok(generation)
}

/// Writes about [`STEP_BYTES`] of a generation's parts.
fn write_some_parts<'a>(
    t: &WriteTransaction,
    generation: u64,
    numbered: &mut impl Iterator<Item = (u32, &'a Bytes)>,
) -> Result<(), StoreError> {
    let mut table = t.open_table(PART).map_err(failed)?;
    let mut bytes = 0;
    while bytes < STEP_BYTES
        && let Some((number, part)) = numbered.next()
    {
        table
            .insert((generation, number), part.as_ref())
            .map_err(failed)?;
        bytes += part.len();
    }
    Ok(())
}

/// Makes a generation the snapshot of a shard, and begins to remove the one that it replaces; answers
/// that if it has parts left.
fn point_at(
    t: &WriteTransaction,
    shard: ShardIndex,
    seq: LogSeq,
    generation: u64,
) -> Result<Option<u64>, StoreError> {
    check_inside(t, seq)?;
    let mut table = t.open_table(SNAPSHOT).map_err(failed)?;
    let replaced = table.insert(shard.0, (seq.0, generation)).map_err(failed)?;
    match replaced.map(|pointer| pointer.value().1) {
        Some(replaced) if remove_some_parts(t, replaced)? => Ok(Some(replaced)),
        _ => Ok(None),
    }
}

/// Removes at most [`STEP_ENTRIES`] parts of a generation; true if there may be more.
fn remove_some_parts(t: &WriteTransaction, generation: u64) -> Result<bool, StoreError> {
    let mut table = t.open_table(PART).map_err(failed)?;
    let mut removed = 0;
    table
        .retain_in((generation, 0)..=(generation, u32::MAX), |_, _| {
            let keep = removed == STEP_ENTRIES;
            removed += usize::from(!keep);
            keep
        })
        .map_err(failed)?;
    Ok(removed == STEP_ENTRIES)
}

/// Removes the parts of snapshots that a crash cut short.
fn sweep(database: &Database) -> Result<(), StoreError> {
    let t = database.begin_write().map_err(failed)?;
    let mut used = Vec::new();
    for entry in t
        .open_table(SNAPSHOT)
        .map_err(failed)?
        .iter()
        .map_err(failed)?
    {
        used.push(entry.map_err(failed)?.1.value().1);
    }
    let mut from = 0;
    loop {
        let next = {
            let table = t.open_table(PART).map_err(failed)?;
            let first = table.range((from, 0)..).map_err(failed)?.next();
            first
                .transpose()
                .map_err(failed)?
                .map(|(key, _)| key.value().0)
        };
        let Some(generation) = next else { break };
        if !used.contains(&generation) {
            while remove_some_parts(&t, generation)? {}
        }
        from = generation + 1;
    }
    t.commit().map_err(failed)
}

/// Makes the tables of a new file; answers the file's format.
fn prepare(database: &Database) -> Result<u64, StoreError> {
    let t = database.begin_write().map_err(failed)?;
    let format = get(&t, FORMAT_KEY)?;
    if format.is_none() {
        set(&t, FORMAT_KEY, FORMAT.into())?;
        t.open_table(LOG).map_err(failed)?;
        t.open_table(SNAPSHOT).map_err(failed)?;
        t.open_table(PART).map_err(failed)?;
    }
    t.commit().map_err(failed)?;
    Ok(format.unwrap_or(FORMAT))
}

fn narrow(name: &str, value: u128) -> Result<u64, StoreError> {
    u64::try_from(value).map_err(|_| StoreError::Corrupt {
        reason: format!("{name} is {value}"),
    })
}

fn get(t: &WriteTransaction, name: &str) -> Result<Option<u64>, StoreError> {
    let table = t.open_table(META).map_err(failed)?;
    let value = table.get(name).map_err(failed)?.map(|v| v.value());
    value.map(|value| narrow(name, value)).transpose()
}

fn set(t: &WriteTransaction, name: &str, value: u128) -> Result<(), StoreError> {
    let mut table = t.open_table(META).map_err(failed)?;
    table.insert(name, value).map_err(failed)?;
    Ok(())
}

fn check_epoch(t: &WriteTransaction, asked: Epoch) -> Result<(), StoreError> {
    let current = Epoch(get(t, EPOCH_KEY)?.unwrap_or(0));
    if asked == current {
        Ok(())
    } else {
        Err(StoreError::Fenced { asked, current })
    }
}

fn span(t: &WriteTransaction) -> Result<LogSpan, StoreError> {
    Ok(LogSpan {
        cut: LogSeq(get(t, CUT_KEY)?.unwrap_or(0)),
        last: LogSeq(get(t, LAST_KEY)?.unwrap_or(0)),
    })
}

fn check_inside(t: &WriteTransaction, asked: LogSeq) -> Result<LogSpan, StoreError> {
    let LogSpan { cut, last } = span(t)?;
    if (cut..=last).contains(&asked) {
        Ok(LogSpan { cut, last })
    } else {
        Err(StoreError::OutsideLog { asked, cut, last })
    }
}

#[async_trait]
impl MetadataStore for EmbeddedStore {
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError> {
        self.write(|t| {
            let mut table = t.open_table(META).map_err(failed)?;
            let stored = table.get(CLUSTER_KEY).map_err(failed)?.map(|v| v.value());
            if let Some(stored) = stored {
                return Ok(ClusterId(stored));
            }
            table.insert(CLUSTER_KEY, fresh.0).map_err(failed)?;
            Ok(fresh)
        })
    }

    async fn epoch(&self) -> Result<Epoch, StoreError> {
        self.read(|t| {
            let table = t.open_table(META).map_err(failed)?;
            let value = table.get(EPOCH_KEY).map_err(failed)?.map(|v| v.value());
            Ok(Epoch(narrow(EPOCH_KEY, value.unwrap_or(0))?))
        })
    }

    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError> {
        self.write(|t| {
            let last = get(t, EPOCH_KEY)?.unwrap_or(0);
            let epoch = last
                .checked_add(1)
                .ok_or_else(|| StoreError::Corrupt {
                    reason: format!("no epoch is left after {last}"),
                })?
                .max(at_least.0);
            set(t, EPOCH_KEY, epoch.into())?;
            Ok(Epoch(epoch))
        })
    }

    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError> {
        self.write(|t| {
            check_epoch(t, epoch)?;
            let last = span(t)?.last;
            if seq != last.next() {
                return Err(StoreError::Gap { asked: seq, last });
            }
            let mut log = t.open_table(LOG).map_err(failed)?;
            log.insert(seq.0, group.as_ref()).map_err(failed)?;
            set(t, LAST_KEY, seq.0.into())
        })
    }

    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.read(|t| {
            let table = t.open_table(META).map_err(failed)?;
            let position = |name: &str| -> Result<LogSeq, StoreError> {
                let value = table.get(name).map_err(failed)?.map(|v| v.value());
                Ok(LogSeq(narrow(name, value.unwrap_or(0))?))
            };
            Ok(LogSpan {
                cut: position(CUT_KEY)?,
                last: position(LAST_KEY)?,
            })
        })
    }

    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        self.read(|t| {
            let log = t.open_table(LOG).map_err(failed)?;
            let mut groups = Vec::new();
            let mut bytes = 0;
            for entry in log.range(after.0.saturating_add(1)..).map_err(failed)? {
                let (seq, group) = entry.map_err(failed)?;
                let group = Bytes::copy_from_slice(group.value());
                bytes += group.len() as u64;
                if bytes > limit_bytes && !groups.is_empty() {
                    break;
                }
                groups.push((LogSeq(seq.value()), group));
            }
            Ok(groups)
        })
    }

    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        parts: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        let _one_at_a_time = self.snapshot.lock();
        let mut numbered = (0u32..).zip(&parts).peekable();
        let mut begun = None;
        let left = loop {
            // A small snapshot takes one transaction in all.
            let step = self.write(|t| {
                check_epoch(t, epoch)?;
                let generation = begun.map_or_else(|| next_generation(t), Ok)?;
                write_some_parts(t, generation, &mut numbered)?;
                let ends = numbered.peek().is_none();
                let left = ends.then(|| point_at(t, shard, seq, generation));
                Ok((generation, left.transpose()?))
            });
            match step {
                Ok((generation, None)) => begun = Some(generation),
                Ok((_, Some(left))) => break left,
                // Whether the shard points at the new generation is unknown: the next start finds out.
                Err(error @ StoreError::Unavailable { .. }) => return Err(error),
                Err(refused) => {
                    if let Some(generation) = begun {
                        self.remove_parts(epoch, generation)?;
                    }
                    return Err(refused);
                }
            }
        };
        match left {
            Some(replaced) => self.remove_parts(epoch, replaced),
            None => Ok(()),
        }
    }

    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        self.read(|t| {
            let table = t.open_table(SNAPSHOT).map_err(failed)?;
            let pointer = table.get(shard.0).map_err(failed)?.map(|v| v.value());
            let Some((seq, generation)) = pointer else {
                return Ok(None);
            };
            let table = t.open_table(PART).map_err(failed)?;
            let range = (generation, 0)..=(generation, u32::MAX);
            let parts = table
                .range(range)
                .map_err(failed)?
                .map(|entry| Ok(Bytes::copy_from_slice(entry.map_err(failed)?.1.value())))
                .collect::<Result<_, StoreError>>()?;
            Ok(Some(Snapshot {
                seq: LogSeq(seq),
                parts,
            }))
        })
    }

    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        self.read(|t| {
            let table = t.open_table(SNAPSHOT).map_err(failed)?;
            table
                .iter()
                .map_err(failed)?
                .map(|entry| Ok(ShardIndex(entry.map_err(failed)?.0.value())))
                .collect()
        })
    }

    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError> {
        self.read(|t| {
            let (table, parts) = (t.open_table(SNAPSHOT), t.open_table(PART));
            let (table, parts) = (table.map_err(failed)?, parts.map_err(failed)?);
            let mut positions = SnapshotPositions::new();
            for entry in table.iter().map_err(failed)? {
                let (shard, pointer) = entry.map_err(failed)?;
                let (seq, generation) = pointer.value();
                let mut bytes = 0;
                let range = (generation, 0)..=(generation, u32::MAX);
                for part in parts.range(range).map_err(failed)? {
                    bytes += part.map_err(failed)?.1.value().len() as u64;
                }
                positions.insert(ShardIndex(shard.value()), (LogSeq(seq), bytes));
            }
            Ok(positions)
        })
    }

    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        loop {
            let done = self.write(|t| {
                check_epoch(t, epoch)?;
                let LogSpan { cut, last } = span(t)?;
                if through > last {
                    return Err(StoreError::OutsideLog {
                        asked: through,
                        cut,
                        last,
                    });
                }
                let step = LogSeq(through.0.min(cut.0.saturating_add(STEP_ENTRIES as u64)));
                if step > cut {
                    let mut log = t.open_table(LOG).map_err(failed)?;
                    log.retain_in(..=step.0, |_, _| false).map_err(failed)?;
                    set(t, CUT_KEY, step.0.into())?;
                }
                Ok(step >= through)
            })?;
            if done {
                return Ok(());
            }
        }
    }

    async fn size_on_disk(&self) -> Result<u64, StoreError> {
        let metadata = std::fs::metadata(&self.path).map_err(|e| StoreError::Unavailable {
            reason: e.to_string(),
        })?;
        Ok(metadata.len())
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.database.write().take();
        Ok(())
    }
}

fn failed(error: impl Into<redb::Error>) -> StoreError {
    match error.into() {
        redb::Error::Corrupted(reason) => StoreError::Corrupt { reason },
        redb::Error::ValueTooLarge(size) => StoreError::TooLarge { size: size as u64 },
        redb::Error::DatabaseClosed => StoreError::Closed,
        error => StoreError::Unavailable {
            reason: error.to_string(),
        },
    }
}

fn open_error(path: &Path, error: DatabaseError) -> OpenError {
    let path = path.display().to_string();
    match error {
        DatabaseError::DatabaseAlreadyOpen => OpenError::InUse { path },
        DatabaseError::Storage(StorageError::Io(source))
            if source.kind() != std::io::ErrorKind::InvalidData =>
        {
            OpenError::Io { path, source }
        }
        error => OpenError::Corrupt {
            path,
            reason: error.to_string(),
        },
    }
}
