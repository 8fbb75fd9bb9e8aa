//! Reading back what an earlier life of the master made durable.
//!
//! First what belongs to no shard: its snapshot, and from the log all that came after it. Then
//! each shard's snapshot, and from the log what came after that one. So when a record names a
//! namespace, that is known; and when it names a segment that is not known, that segment has gone
//! and the replica with it. A commit all of whose replicas have gone still ends the version before.

use super::record::{self, Record, RecordError};
use super::{LogSeq, LogSpan, MetadataStore, ShardIndex, Snapshot, StoreError};
use bytes::Bytes;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Key};
use std::collections::{BTreeMap, VecDeque};

/// The bytes of the log that are read at once.
const READ_BYTES: u64 = 4 << 20;

/// Why the metadata could not be read back. The master does not start on part of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecoveryError {
    /// The store did not answer, or failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A group of the log cannot be read.
    #[error("group {seq} of the metadata log is damaged: {source}")]
    DamagedGroup {
        /// The group.
        seq: LogSeq,
        /// What is wrong with it.
        source: RecordError,
    },
    /// A part of a snapshot cannot be read.
    #[error("part {part} of the snapshot of {shard} at {seq} is damaged: {source}")]
    DamagedSnapshot {
        /// The shard.
        shard: ShardIndex,
        /// The position that the snapshot contains.
        seq: LogSeq,
        /// The part, from 0.
        part: usize,
        /// What is wrong with it.
        source: RecordError,
    },
    /// Groups that no snapshot contains are not there.
    #[error(
        "the metadata log lacks group {missing}, which the snapshot of {shard} does not contain"
    )]
    LostGroups {
        /// The first group that is missing.
        missing: LogSeq,
        /// A shard that needs it.
        shard: ShardIndex,
    },
    /// The directory was cut into another number of shards when the snapshots were made.
    #[error("{shard} was stored as one of {stored} shards, the directory has {configured} now")]
    ShardCount {
        /// The shard whose snapshot says so.
        shard: ShardIndex,
        /// The number of shards then.
        stored: u32,
        /// The number of shards now.
        configured: u32,
    },
}

impl RecoveryError {
    /// Whether a later try may succeed with nothing changed.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }

    /// The stable code of it.
    pub const fn code(&self) -> Code {
        match self {
            Self::Store(error) => error.code(),
            _ => Code::StoreFailed,
        }
    }
}

/// Where the log and the snapshots stand: what a journal goes on from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogState {
    /// The positions that the log holds.
    pub span: LogSpan,
    /// The groups of the log: position and bytes.
    pub groups: VecDeque<(LogSeq, u64)>,
    /// Of each shard that has a snapshot: the position that it contains, and its bytes.
    pub snapshots: BTreeMap<ShardIndex, (LogSeq, u64)>,
}

/// What was read back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Where the log and the snapshots stand.
    pub state: LogState,
    /// The records that came from snapshots.
    pub from_snapshots: u64,
    /// The records that came from the log.
    pub from_log: u64,
    /// The records of the log that a shard's snapshot contains already.
    pub skipped: u64,
}

/// How often what a leader changes meanwhile is read again before this is given up.
const TRIES: u32 = 50;

/// Reads everything back: calls `apply` for each record in an order in which they can be applied.
/// A later record about a key replaces what an earlier one said.
///
/// `shard_of` says which of the directory's `shards` shards a key belongs to. When this fails,
/// part of the records may have been applied.
///
/// A leader may write meanwhile: what is read is the state at one position of the log, whatever comes
/// behind it.
pub async fn recover(
    store: &dyn MetadataStore,
    shards: u32,
    shard_of: impl Fn(NamespaceId, &Key) -> ShardIndex,
    mut apply: impl FnMut(Record),
) -> Result<Recovered, RecoveryError> {
    let Stored {
        snapshots,
        span,
        groups,
    } = Stored::read(store, shards).await?;
    let mut recovered = Recovered::default();
    recovered.state.span = span;
    let mut load = Load {
        shards,
        apply: &mut apply,
        recovered: &mut recovered,
    };
    let (system, others): (Vec<_>, Vec<_>) = snapshots
        .into_iter()
        .partition(|(shard, _)| *shard == ShardIndex::SYSTEM);
    for (shard, snapshot) in system {
        load.snapshot(shard, snapshot)?;
    }
    load.log(&groups, |record| {
        record.place().is_none().then_some(ShardIndex::SYSTEM)
    })?;
    for (shard, snapshot) in others {
        load.snapshot(shard, snapshot)?;
    }
    load.log(&groups, |record| {
        record
            .place()
            .map(|(namespace, key)| shard_of(namespace, key))
    })?;
    Ok(recovered)
}

/// Everything that is stored, as it lies there: snapshots none of which is behind the log's cut or ahead
/// of its end, and the whole log between these.
struct Stored {
    snapshots: BTreeMap<ShardIndex, Snapshot>,
    span: LogSpan,
    groups: Vec<(LogSeq, Bytes)>,
}

impl Stored {
    /// Reads snapshots, then where the log stands, then the log. A leader that replaces a snapshot and
    /// cuts the log in between makes what was read too old: only that is read again.
    async fn read(store: &dyn MetadataStore, shards: u32) -> Result<Self, RecoveryError> {
        let mut snapshots = BTreeMap::new();
        let mut lost = (LogSeq(0), ShardIndex::SYSTEM);
        for _ in 0..TRIES {
            for shard in store.snapshots().await? {
                if !snapshots.contains_key(&shard)
                    && let Some(snapshot) = store.read_snapshot(shard).await?
                {
                    snapshots.insert(shard, snapshot);
                }
            }
            // Read after the snapshots, so the log's end is behind all of them.
            let span = store.log_span().await?;
            let all = || (0..shards).map(ShardIndex).chain([ShardIndex::SYSTEM]);
            let position = |shard: &ShardIndex| {
                let snapshot: Option<&Snapshot> = snapshots.get(shard);
                snapshot.map_or(LogSeq(0), |snapshot| snapshot.seq)
            };
            let old: Vec<ShardIndex> = all().filter(|shard| position(shard) < span.cut).collect();
            if let Some(oldest) = old.iter().min_by_key(|shard| position(shard)) {
                lost = (position(oldest).next(), *oldest);
                for shard in old {
                    snapshots.remove(&shard);
                }
                continue;
            }
            match read_log(store, span).await? {
                Ok(groups) => {
                    return Ok(Self {
                        snapshots,
                        span,
                        groups,
                    });
                }
                Err(Gap(missing)) => {
                    let needs = all().find(|shard| position(shard) < missing);
                    lost = (missing, needs.unwrap_or(ShardIndex::SYSTEM));
                }
            }
        }
        let (missing, shard) = lost;
        Err(RecoveryError::LostGroups { missing, shard })
    }
}

/// The first group that is not where it should be.
struct Gap(LogSeq);

/// The groups of a span, unless the first ones have been cut meanwhile.
async fn read_log(
    store: &dyn MetadataStore,
    span: LogSpan,
) -> Result<Result<Vec<(LogSeq, Bytes)>, Gap>, RecoveryError> {
    let mut all = Vec::new();
    let mut expected = span.cut.next();
    while expected <= span.last {
        let groups = store.read_log(LogSeq(expected.0 - 1), READ_BYTES).await?;
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
            all.push((seq, group));
            expected = seq.next();
        }
    }
    Ok(Ok(all))
}

struct Load<'a, A> {
    shards: u32,
    apply: &'a mut A,
    recovered: &'a mut Recovered,
}

impl<A: FnMut(Record)> Load<'_, A> {
    fn snapshot(&mut self, shard: ShardIndex, snapshot: Snapshot) -> Result<(), RecoveryError> {
        let seq = snapshot.seq;
        for (part, bytes) in snapshot.parts.iter().enumerate() {
            let decoded =
                record::decode(bytes).map_err(|source| RecoveryError::DamagedSnapshot {
                    shard,
                    seq,
                    part,
                    source,
                })?;
            if decoded.shards != self.shards {
                return Err(RecoveryError::ShardCount {
                    shard,
                    stored: decoded.shards,
                    configured: self.shards,
                });
            }
            self.recovered.from_snapshots += decoded.records.len() as u64;
            decoded.records.into_iter().for_each(&mut *self.apply);
        }
        let bytes = snapshot.parts.iter().map(|part| part.len() as u64).sum();
        self.recovered.state.snapshots.insert(shard, (seq, bytes));
        Ok(())
    }

    /// Applies the log's records to which `wanted` gives a shard, unless that shard's snapshot
    /// contains them.
    fn log(
        &mut self,
        groups: &[(LogSeq, Bytes)],
        wanted: impl Fn(&Record) -> Option<ShardIndex>,
    ) -> Result<(), RecoveryError> {
        self.recovered.state.groups.clear();
        for (seq, group) in groups {
            self.group(*seq, group, &wanted)?;
        }
        Ok(())
    }

    fn group(
        &mut self,
        seq: LogSeq,
        group: &Bytes,
        wanted: impl Fn(&Record) -> Option<ShardIndex>,
    ) -> Result<(), RecoveryError> {
        let decoded =
            record::decode(group).map_err(|source| RecoveryError::DamagedGroup { seq, source })?;
        self.recovered
            .state
            .groups
            .push_back((seq, group.len() as u64));
        for record in decoded.records {
            let Some(shard) = wanted(&record) else {
                continue;
            };
            if seq <= self.position(shard) {
                self.recovered.skipped += 1;
            } else {
                self.recovered.from_log += 1;
                (self.apply)(record);
            }
        }
        Ok(())
    }

    /// The position that a shard's snapshot contains.
    fn position(&self, shard: ShardIndex) -> LogSeq {
        self.recovered
            .state
            .snapshots
            .get(&shard)
            .map_or(LogSeq(0), |(seq, _)| *seq)
    }
}
