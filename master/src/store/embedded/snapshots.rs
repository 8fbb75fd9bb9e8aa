//! Snapshots: one file for each shard, replaced whole.
//!
//! ```text
//!  magic │ store u128 │ shard u32 │ chunks u32 │ position u64 │ (length u64, CRC u64) a chunk │ CRC │ chunks
//! ```

use super::files;
use super::identity::StoreId;
use crate::store::record::crc;
use crate::store::{LogSeq, ShardIndex, Snapshot, SnapshotPositions, StoreError};
use bytes::Bytes;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

const MAGIC: u64 = u64::from_le_bytes(*b"KVPSNAP2");
/// The bytes before the table of chunks.
const FIXED: usize = 40;
/// The bytes of the table for each chunk.
const ENTRY: usize = 16;
/// The bytes of a snapshot between two flushes. A flush of the log waits for at most this many bytes.
const STEP_BYTES: usize = 1 << 20;
/// The most chunks of a valid file.
const MOST_CHUNKS: u32 = 1 << 24;

/// The snapshots of one store.
#[derive(Debug)]
pub(super) struct Snapshots {
    directory: PathBuf,
    store: StoreId,
    /// The position and bytes of each shard's snapshot, which are read often.
    positions: SnapshotPositions,
    /// Whether the entries of the snapshots' directory are durable.
    is_settled: bool,
}

/// The head of a file.
struct Head {
    seq: LogSeq,
    /// The length and CRC of each chunk.
    chunks: Vec<(u64, u64)>,
}

impl Snapshots {
    /// Reads the heads of the snapshots in a directory, which is created if missing.
    pub(super) fn open(directory: &Path, store: StoreId) -> Result<Self, StoreError> {
        let failed =
            |error: io::Error| files::failed(directory, "the snapshots cannot be opened", &error);
        std::fs::create_dir_all(directory).map_err(failed)?;
        let mut positions = SnapshotPositions::new();
        for entry in std::fs::read_dir(directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|e| e == files::PARTIAL) {
                std::fs::remove_file(&path).map_err(failed)?;
                continue;
            }
            let Some(shard) = shard_of(&path) else {
                continue;
            };
            let (_, head) = open(&path, store, shard)?;
            let bytes = head.chunks.iter().map(|(length, _)| length).sum();
            positions.insert(shard, (head.seq, bytes));
        }
        Ok(Self {
            directory: directory.to_owned(),
            store,
            positions,
            // A crash may have come after a replacement and before its flush.
            is_settled: false,
        })
    }

    pub(super) const fn positions(&self) -> &SnapshotPositions {
        &self.positions
    }

    pub(super) fn writer(&self) -> Writer {
        Writer {
            directory: self.directory.clone(),
            store: self.store,
        }
    }

    /// Replaces the shard's last snapshot by a written one. Until [`Snapshots::settle`] a crash may
    /// bring the last one back. The log is not cut before that, so either one is valid.
    pub(super) fn take(&mut self, written: Written) -> Result<(), StoreError> {
        let path = self.directory.join(name(written.shard));
        std::fs::rename(&written.partial, &path).map_err(|error| {
            files::failed(&self.directory, "a snapshot cannot be replaced", &error)
        })?;
        self.is_settled = false;
        let place = (written.seq, written.bytes);
        self.positions.insert(written.shard, place);
        Ok(())
    }

    /// Makes every replacement durable, before the log is cut.
    pub(super) fn settle(&mut self) -> Result<(), StoreError> {
        if !self.is_settled {
            files::sync_directory(&self.directory).map_err(|error| {
                files::failed(&self.directory, "a snapshot cannot be replaced", &error)
            })?;
            self.is_settled = true;
        }
        Ok(())
    }

    /// Reads a shard's snapshot.
    pub(super) fn read(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        if !self.positions.contains_key(&shard) {
            return Ok(None);
        }
        let path = self.directory.join(name(shard));
        let (mut file, head) = open(&path, self.store, shard)?;
        let mut chunks = Vec::with_capacity(head.chunks.len());
        for (number, (length, expected)) in head.chunks.iter().enumerate() {
            let mut chunk = vec![0; usize::try_from(*length).unwrap_or(usize::MAX)];
            file.read_exact(&mut chunk)
                .map_err(|error| damaged(&path, &format!("chunk {number}: {error}")))?;
            if crc(&chunk) != *expected {
                return Err(damaged(
                    &path,
                    &format!("chunk {number} of the snapshot of {shard} has changed"),
                ));
            }
            chunks.push(Bytes::from(chunk));
        }
        Ok(Some(Snapshot {
            seq: head.seq,
            chunks,
        }))
    }
}

/// Writes snapshots while the store is in use.
pub(super) struct Writer {
    directory: PathBuf,
    store: StoreId,
}

/// A snapshot in a partial file, which is removed unless it replaces the shard's last one.
pub(super) struct Written {
    partial: PathBuf,
    shard: ShardIndex,
    pub(super) seq: LogSeq,
    bytes: u64,
}

impl Drop for Written {
    fn drop(&mut self) {
        // Removing fails if the file has replaced the last snapshot, since its name has changed.
        let _taken = std::fs::remove_file(&self.partial);
    }
}

impl Writer {
    /// Writes a snapshot, durably.
    pub(super) fn write(
        &self,
        shard: ShardIndex,
        seq: LogSeq,
        chunks: &[Bytes],
    ) -> Result<Written, StoreError> {
        let written = Written {
            partial: self
                .directory
                .join(name(shard))
                .with_extension(files::PARTIAL),
            shard,
            seq,
            bytes: chunks.iter().map(|chunk| chunk.len() as u64).sum(),
        };
        let write = || -> io::Result<()> {
            let mut file = File::create(&written.partial)?;
            file.write_all(&self.head(shard, seq, chunks))?;
            let mut unflushed = 0;
            for chunk in chunks {
                file.write_all(chunk)?;
                unflushed += chunk.len();
                if unflushed >= STEP_BYTES {
                    file.sync_data()?;
                    unflushed = 0;
                }
            }
            file.sync_all()
        };
        write().map_err(|error| {
            files::failed(&self.directory, "a snapshot cannot be written", &error)
        })?;
        Ok(written)
    }

    fn head(&self, shard: ShardIndex, seq: LogSeq, chunks: &[Bytes]) -> Vec<u8> {
        let mut out = Vec::with_capacity(FIXED + chunks.len() * ENTRY + 8);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&self.store.0.to_le_bytes());
        out.extend_from_slice(&shard.0.to_le_bytes());
        let count = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
        out.extend_from_slice(&count.to_le_bytes());
        out.extend_from_slice(&seq.0.to_le_bytes());
        for chunk in chunks {
            out.extend_from_slice(&(chunk.len() as u64).to_le_bytes());
            out.extend_from_slice(&crc(chunk).to_le_bytes());
        }
        let own = crc(&out);
        out.extend_from_slice(&own.to_le_bytes());
        out
    }
}

/// The name of a shard's file.
fn name(shard: ShardIndex) -> String {
    if shard == ShardIndex::SYSTEM {
        "system.snapshot".to_owned()
    } else {
        format!("{:08}.snapshot", shard.0)
    }
}

/// The shard in the name of a file.
fn shard_of(path: &Path) -> Option<ShardIndex> {
    if path.extension()? != "snapshot" {
        return None;
    }
    match path.file_stem()?.to_str()? {
        "system" => Some(ShardIndex::SYSTEM),
        number => number.parse().ok().map(ShardIndex),
    }
}

fn damaged(path: &Path, reason: &str) -> StoreError {
    StoreError::Corrupt {
        reason: format!("{}: {reason}", path.display()),
    }
}

/// Opens a shard's snapshot and reads its head; the file stands at the first chunk.
fn open(path: &Path, store: StoreId, shard: ShardIndex) -> Result<(File, Head), StoreError> {
    let mut file = File::open(path).map_err(|error| StoreError::Unavailable {
        reason: format!("{}: {error}", path.display()),
    })?;
    let length = file.metadata().map_or(0, |metadata| metadata.len());
    let short = |_| {
        damaged(
            path,
            &format!("the file has {length} bytes, more were written"),
        )
    };
    let mut fixed = vec![0; FIXED];
    file.read_exact(&mut fixed).map_err(short)?;
    let word = |bytes: &[u8], at: usize| {
        let word = bytes.get(at..at + 8).and_then(|w| w.try_into().ok());
        word.map_or(0, u64::from_le_bytes)
    };
    let both = word(&fixed, 24).to_le_bytes();
    let (low, high) = both.split_at(4);
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    let (its_shard, count) = (ShardIndex(number(low)), number(high));
    let fits = u64::from(count) * ENTRY as u64 <= length;
    if word(&fixed, 0) != MAGIC || count > MOST_CHUNKS || !fits {
        return Err(damaged(path, "the file does not begin like a snapshot"));
    }
    let mut table = vec![0; count as usize * ENTRY + 8];
    file.read_exact(&mut table).map_err(short)?;
    let own = word(&table, table.len() - 8);
    table.truncate(table.len() - 8);
    let covered = [fixed.as_slice(), table.as_slice()].concat();
    if own != crc(&covered) {
        return Err(damaged(path, "the head of the snapshot has changed"));
    }
    let its = StoreId(u128::from(word(&fixed, 8)) | u128::from(word(&fixed, 16)) << 64);
    if its != store {
        return Err(damaged(
            path,
            &format!("the file is of store {its}, the directory is of store {store}"),
        ));
    }
    if its_shard != shard {
        return Err(damaged(path, &format!("the file belongs to {its_shard}")));
    }
    let entries = table.as_chunks::<ENTRY>().0.iter();
    let chunks: Vec<(u64, u64)> = entries.map(|e| (word(e, 0), word(e, 8))).collect();
    let bytes = chunks
        .iter()
        .try_fold(0u64, |sum, (length, _)| sum.checked_add(*length));
    let whole = (FIXED + table.len() + 8) as u64;
    if bytes.and_then(|bytes| bytes.checked_add(whole)) != Some(length) {
        return Err(damaged(
            path,
            &format!("the file has {length} bytes, others were written"),
        ));
    }
    let seq = LogSeq(word(&fixed, 32));
    Ok((file, Head { seq, chunks }))
}
