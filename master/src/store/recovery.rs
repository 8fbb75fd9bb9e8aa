//! Recovery: reads the state that earlier terms made durable.
//!
//! The order is: the system snapshot, each shard's snapshot, then the log. A record of the log is
//! applied only to shards whose snapshot does not contain it. Snapshots have different positions,
//! so the state is consistent only at the end. Until then two blocks may share an extent, and a
//! block may lie on a segment that is gone.
//!
//! Memory holds one shard's snapshot, or a few megabytes of the log.

use super::record::{self, Record, RecordError};
use super::{LogRuns, LogSeq, LogSpan, MetadataStore, ShardIndex, Snapshot, StoreError};
use bytes::Bytes;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Key};
use std::collections::BTreeMap;

/// The bytes of the log read at once.
const READ_BYTES: u64 = 4 << 20;

/// Why the metadata is unreadable. The master does not start with a part of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecoveryError {
    /// The store did not answer, or failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A group of the log cannot be read.
    #[error("group {seq} of the metadata log cannot be read: {source}")]
    DamagedGroup {
        /// The group.
        seq: LogSeq,
        /// The reason.
        source: RecordError,
    },
    /// A chunk of a snapshot cannot be read.
    #[error("chunk {chunk} of the snapshot of {shard} at {seq} cannot be read: {source}")]
    DamagedSnapshot {
        /// The shard.
        shard: ShardIndex,
        /// The position that the snapshot contains.
        seq: LogSeq,
        /// The chunk, from 0.
        chunk: usize,
        /// The reason.
        source: RecordError,
    },
    /// The log lacks groups that no snapshot contains.
    #[error(
        "the metadata log lacks group {missing}, which the snapshot of {shard} does not contain"
    )]
    LostGroups {
        /// The first missing group.
        missing: LogSeq,
        /// A shard that needs the group.
        shard: ShardIndex,
    },
    /// The group changes the secret that maps keys to shards, although blocks are present.
    #[error(
        "group {seq} of the metadata log changes the directory's secret although blocks are present"
    )]
    Reseeded {
        /// The group.
        seq: LogSeq,
    },
    /// The snapshots were made with another number of shards.
    #[error("{shard} was stored with {stored} shards, but this version has {configured}")]
    ShardCount {
        /// The shard whose snapshot has that number.
        shard: ShardIndex,
        /// The number in the snapshot.
        stored: u32,
        /// The number of this version.
        configured: u32,
    },
}

impl RecoveryError {
    /// True when a later attempt may succeed without a change.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }

    /// The stable code.
    pub const fn code(&self) -> Code {
        match self {
            Self::Store(error) => error.code(),
            _ => Code::StoreFailed,
        }
    }
}

/// The positions of the log and the snapshots, which a journal continues from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogState {
    /// The positions in the log.
    pub span: LogSpan,
    /// The bytes of the log.
    pub runs: LogRuns,
    /// For each shard with a snapshot: the snapshot's position and bytes.
    pub snapshots: BTreeMap<ShardIndex, (LogSeq, u64)>,
}

/// The result of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The positions of the log and the snapshots.
    pub state: LogState,
    /// The number of records from snapshots.
    pub from_snapshots: u64,
    /// The number of records from the log.
    pub from_log: u64,
    /// The number of records of the log that a shard's snapshot already contains.
    pub skipped: u64,
}

/// The state that a recovery fills.
pub trait Target {
    /// The shard of a key.
    fn shard_of(&self, namespace: NamespaceId, key: &Key) -> ShardIndex;

    /// Forgets the applied state of a shard. The recovery reads the shard again, because a leader
    /// replaced its snapshot and cut the log behind it.
    fn forget(&mut self, shard: ShardIndex);

    /// Applies a record of a shard's snapshot.
    fn snapshot(&mut self, shard: ShardIndex, record: Record);

    /// All records of a shard's snapshot, which is at position `seq` of the log, have been applied.
    fn snapshot_ends(&mut self, _shard: ShardIndex, _seq: LogSeq) {}

    /// All snapshots have been applied. The log follows.
    fn snapshots_end(&mut self) {}

    /// Applies a record of the log.
    fn logged(&mut self, seq: LogSeq, record: Record) -> Result<(), RecoveryError>;

    /// Passes a record of the log that its shard's snapshot already contains.
    fn contained(&mut self, _record: &Record) {}
}

/// The most attempts to read state that a leader changes meanwhile.
const TRIES: u32 = 50;

/// Recovers the metadata into a target. After a failure part of it may have been applied.
///
/// A leader may write meanwhile: the result is the state at one position of the log.
pub async fn recover(
    store: &dyn MetadataStore,
    shards: u32,
    target: &mut impl Target,
) -> Result<Recovered, RecoveryError> {
    let mut load = Load {
        store,
        shards,
        target,
        recovered: Recovered::default(),
    };
    let mut lost = (LogSeq(0), ShardIndex::SYSTEM);
    for _ in 0..TRIES {
        load.missing_snapshots().await?;
        // The span is read after the snapshots, so the log's end is behind all of them.
        let span = load.store.log_span().await?;
        let old = load.behind(span.cut);
        if let Some(oldest) = old.iter().min_by_key(|shard| load.position(**shard)) {
            lost = (load.position(*oldest).next(), *oldest);
            old.into_iter().for_each(|shard| load.forget(shard));
            continue;
        }
        match load.log(span).await? {
            Ok(()) => return Ok(load.recovered),
            Err(Gap(missing)) => {
                let needs = load.all().find(|shard| load.position(*shard) < missing);
                lost = (missing, needs.unwrap_or(ShardIndex::SYSTEM));
                if missing > span.cut.next() {
                    // A part of the log has been applied and cannot be undone, so all shards are
                    // read again.
                    load.all().for_each(|shard| load.forget(shard));
                }
            }
        }
    }
    let (missing, shard) = lost;
    Err(RecoveryError::LostGroups { missing, shard })
}

/// The first group that is not at its position.
struct Gap(LogSeq);

struct Load<'a, T> {
    store: &'a dyn MetadataStore,
    shards: u32,
    target: &'a mut T,
    recovered: Recovered,
}

impl<T: Target> Load<'_, T> {
    /// The system shard and every other shard.
    fn all(&self) -> impl Iterator<Item = ShardIndex> + use<T> {
        std::iter::once(ShardIndex::SYSTEM).chain((0..self.shards).map(ShardIndex))
    }

    /// The position of a shard's snapshot.
    fn position(&self, shard: ShardIndex) -> LogSeq {
        let applied = self.recovered.state.snapshots.get(&shard);
        applied.map_or(LogSeq(0), |(seq, _)| *seq)
    }

    /// The shards that lack groups which were cut.
    fn behind(&self, cut: LogSeq) -> Vec<ShardIndex> {
        self.all()
            .filter(|shard| self.position(*shard) < cut)
            .collect()
    }

    fn forget(&mut self, shard: ShardIndex) {
        self.recovered.state.snapshots.remove(&shard);
        self.target.forget(shard);
    }

    /// Applies the snapshots that are not applied yet. The system's snapshot comes first, since it
    /// has the secret that maps keys to shards. Without a system snapshot no snapshot counts. A
    /// crash has then restored the time before the first snapshots, and the log was not cut yet, so
    /// it has every record.
    async fn missing_snapshots(&mut self) -> Result<(), RecoveryError> {
        let stored = self.store.snapshots().await?;
        let applied = &self.recovered.state.snapshots;
        let has_system =
            stored.contains(&ShardIndex::SYSTEM) || applied.contains_key(&ShardIndex::SYSTEM);
        if !has_system {
            return Ok(());
        }
        let mut missing: Vec<ShardIndex> = stored
            .into_iter()
            .filter(|shard| !applied.contains_key(shard))
            .collect();
        missing.sort_by_key(|shard| *shard != ShardIndex::SYSTEM);
        for shard in missing {
            if let Some(snapshot) = self.store.read_snapshot(shard).await? {
                self.snapshot(shard, snapshot)?;
            }
        }
        Ok(())
    }

    fn snapshot(&mut self, shard: ShardIndex, snapshot: Snapshot) -> Result<(), RecoveryError> {
        let seq = snapshot.seq;
        let mut size = 0;
        // Each chunk is freed after it was applied.
        for (chunk, bytes) in snapshot.chunks.into_iter().enumerate() {
            let decoded =
                record::decode(&bytes).map_err(|source| RecoveryError::DamagedSnapshot {
                    shard,
                    seq,
                    chunk,
                    source,
                })?;
            if decoded.shards != self.shards {
                return Err(RecoveryError::ShardCount {
                    shard,
                    stored: decoded.shards,
                    configured: self.shards,
                });
            }
            size += bytes.len() as u64;
            self.recovered.from_snapshots += decoded.records.len() as u64;
            for record in decoded.records {
                self.target.snapshot(shard, record);
            }
        }
        self.target.snapshot_ends(shard, seq);
        self.recovered.state.snapshots.insert(shard, (seq, size));
        Ok(())
    }

    /// Applies the log through the end of `span`, unless its first groups were cut meanwhile.
    async fn log(&mut self, span: LogSpan) -> Result<Result<(), Gap>, RecoveryError> {
        self.recovered.state.span = span;
        self.recovered.state.runs = LogRuns::default();
        let mut expected = span.cut.next();
        while expected <= span.last {
            let after = LogSeq(expected.0 - 1);
            let groups = self.store.read_log(after, READ_BYTES).await?;
            if groups.is_empty() {
                return Ok(Err(Gap(expected)));
            }
            for (seq, group) in groups {
                if seq > span.last {
                    break;
                }
                if seq != expected {
                    return Ok(Err(Gap(expected)));
                }
                if seq == span.cut.next() {
                    self.target.snapshots_end();
                }
                self.group(seq, &group)?;
                expected = seq.next();
            }
        }
        if span.last == span.cut {
            self.target.snapshots_end();
        }
        Ok(Ok(()))
    }

    fn group(&mut self, seq: LogSeq, group: &Bytes) -> Result<(), RecoveryError> {
        let decoded =
            record::decode(group).map_err(|source| RecoveryError::DamagedGroup { seq, source })?;
        self.recovered.state.runs.push(seq, group.len() as u64);
        for record in decoded.records {
            let shard = record
                .place()
                .map_or(ShardIndex::SYSTEM, |(namespace, key)| {
                    self.target.shard_of(namespace, key)
                });
            if seq <= self.position(shard) {
                self.recovered.skipped += 1;
                self.target.contained(&record);
            } else {
                self.recovered.from_log += 1;
                self.target.logged(seq, record)?;
            }
        }
        Ok(())
    }
}
