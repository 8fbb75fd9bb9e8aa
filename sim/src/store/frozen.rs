//! What was durable at one moment. It answers at once, and takes nothing.

use super::{Disk, State};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_master::store::{
    LogSeq, LogSpan, MetadataStore, ShardIndex, Snapshot, SnapshotPositions, StoreError,
};
use kvpool_types::{ClusterId, Epoch};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Frozen {
    span: LogSpan,
    log: BTreeMap<LogSeq, Bytes>,
    snapshots: BTreeMap<ShardIndex, Snapshot>,
    /// What the first read of each snapshot finds in place of these.
    earlier: Mutex<BTreeMap<ShardIndex, Snapshot>>,
}

impl State {
    pub(super) const fn span(&self) -> LogSpan {
        LogSpan {
            cut: self.cut,
            last: self.last,
        }
    }
}

impl Disk {
    /// Whether a term has written the log last, up to this position.
    pub(crate) fn ends_at(&self, term: Epoch, position: LogSeq) -> bool {
        let state = self.state.lock();
        state.epoch == term && state.last == position
    }

    /// The groups of the log behind a position; `None` when the log begins later.
    pub(crate) fn groups_behind(&self, applied: LogSeq) -> Option<Vec<(LogSeq, Bytes)>> {
        let state = self.state.lock();
        let groups = state.log.range(applied.next()..);
        let groups = groups.map(|(seq, group)| (*seq, group.clone()));
        (applied >= state.cut).then(|| groups.collect())
    }

    /// The position of the log's last group, if no later term than `term` has begun.
    pub(crate) fn end_of(&self, term: Epoch) -> Option<LogSeq> {
        let state = self.state.lock();
        (state.epoch == term).then_some(state.last)
    }

    /// How many snapshots were written.
    pub(crate) fn snapshots_written(&self) -> u64 {
        self.state.lock().snapshots_written
    }

    /// Returns once a group is in the log that ends a segment.
    pub(crate) async fn a_segment_ends(&self) {
        self.segment_ended.notified().await;
    }

    /// What is durable now. With `reverts`, each snapshot that was not flushed is the one before.
    pub(crate) fn frozen(&self, reverts: bool) -> Frozen {
        let state = self.state.lock();
        let mut snapshots = state.snapshots.clone();
        for (shard, before) in state.unflushed.iter().filter(|_| reverts) {
            match before {
                Some(before) => snapshots.insert(*shard, before.clone()),
                None => snapshots.remove(shard),
            };
        }
        Frozen {
            span: state.span(),
            log: state.log.clone(),
            snapshots,
            earlier: Mutex::default(),
        }
    }

    /// The same for a standby whose load takes long beside a busy leader. It reads the snapshots of the last such call
    /// first. Once it looks at the log, some of them are too old, and it reads them again.
    pub(crate) fn frozen_late(&self) -> Frozen {
        let frozen = self.frozen(false);
        let now = frozen.snapshots.clone();
        let earlier = std::mem::replace(&mut *self.seen_late.lock(), now);
        *frozen.earlier.lock() = earlier;
        frozen
    }
}

#[async_trait]
impl MetadataStore for Frozen {
    async fn cluster_id(&self, _: ClusterId) -> Result<ClusterId, StoreError> {
        Err(StoreError::Closed)
    }

    async fn epoch(&self) -> Result<Epoch, StoreError> {
        Err(StoreError::Closed)
    }

    async fn begin_epoch(&self, _: Epoch) -> Result<Epoch, StoreError> {
        Err(StoreError::Closed)
    }

    async fn append(&self, _: Epoch, _: LogSeq, _: Bytes) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }

    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        Ok(self.span)
    }

    async fn read_log(&self, after: LogSeq, _: u64) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        let groups = self.log.range(after.next()..);
        Ok(groups.map(|(seq, group)| (*seq, group.clone())).collect())
    }

    async fn put_snapshot(
        &self,
        _: Epoch,
        _: ShardIndex,
        _: LogSeq,
        _: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }

    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        let earlier = self.earlier.lock().remove(&shard);
        Ok(earlier.or_else(|| self.snapshots.get(&shard).cloned()))
    }

    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        Ok(self.snapshots.keys().copied().collect())
    }

    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError> {
        let sized = self.snapshots.iter().map(|(shard, snapshot)| {
            let bytes = snapshot.chunks.iter().map(|chunk| chunk.len() as u64).sum();
            (*shard, (snapshot.seq, bytes))
        });
        Ok(sized.collect())
    }

    async fn truncate_log(&self, _: Epoch, _: LogSeq) -> Result<(), StoreError> {
        Err(StoreError::Closed)
    }

    async fn size_on_disk(&self) -> Result<u64, StoreError> {
        Ok(0)
    }

    async fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }
}
