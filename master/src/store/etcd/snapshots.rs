//! Snapshots: the parts of one generation, and a pointer to it for each shard.
//!
//! Parts are put under a new generation. Then one transaction sets the pointer and deletes the parts of
//! earlier generations. An interrupted snapshot leaves parts. The shard's next snapshot deletes them, and so
//! does the sweep before a term's first snapshot or maintenance.

use super::keys::{Pointer, corrupt};
use super::log::{ReadSize, span};
use super::write::{Term, WhenFull, Written, settled};
use super::{EtcdStore, STEP_BYTES, STEP_KEYS};
use crate::store::{LogSeq, LogSpan, ShardIndex, Snapshot, SnapshotPositions, StoreError};
use bytes::Bytes;
use kvpool_etcd::Error;
use kvpool_etcd::kv::{Compare, Op};
use kvpool_types::Epoch;

/// State that is kept between snapshots. Its lock is held during a put, so puts are serial.
#[derive(Debug, Default)]
pub(super) struct State {
    /// The last term that has swept.
    swept: Epoch,
    /// The last generation that this process used.
    generation: u64,
}

impl EtcdStore {
    /// The position that each shard's snapshot contains, and its bytes.
    pub(super) async fn positions(&self) -> Result<SnapshotPositions, StoreError> {
        self.check_open()?;
        let pointers = self.pointers().await?;
        let position = |pointer: Pointer| (LogSeq(pointer.seq), pointer.bytes);
        Ok(pointers
            .into_iter()
            .map(|(shard, pointer)| (shard, position(pointer)))
            .collect())
    }

    async fn pointers(&self) -> Result<Vec<(ShardIndex, Pointer)>, StoreError> {
        let found = self.client.range(self.keys.pointers()).await?.kvs;
        let read = |found: &kvpool_etcd::kv::KeyValue| {
            let name = String::from_utf8_lossy(&found.key);
            let shard = self.keys.pointer_shard(&found.key);
            let shard = shard.ok_or_else(|| corrupt(&name, "is no name of a snapshot"))?;
            Ok((shard, Pointer::read(shard, &found.value)?))
        };
        found.iter().map(read).collect()
    }

    pub(super) async fn replace_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        parts: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        let term = self.term(epoch).await?;
        if let Some(part) = parts.iter().find(|part| part.len() > STEP_BYTES) {
            let size = part.len() as u64;
            return Err(StoreError::TooLarge { size });
        }
        let count = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        // The number of a part has four digits.
        if count > 1 << 16 {
            return Err(StoreError::TooLarge { size: bytes });
        }
        let mut state = self.snapshots.lock().await;
        self.sweep(term, &mut state).await?;
        self.span_with(seq).await?;
        // Above every generation of an earlier term: each of these terms ended before this
        // revision.
        let now = self.client.range(self.keys.pointers().limit(1).keys_only());
        let now = now.await?.revision.0.unsigned_abs();
        let generation = now.max(state.generation + 1);
        state.generation = generation;

        let mut numbered = (0u32..).zip(parts).peekable();
        while numbered.peek().is_some() {
            let mut txn = self.fenced(term);
            let (mut step_bytes, mut step_keys) = (0, 0);
            while let Some((number, part)) = numbered
                .next_if(|(_, part)| step_keys < STEP_KEYS && step_bytes + part.len() <= STEP_BYTES)
            {
                step_keys += 1;
                step_bytes += part.len();
                txn = txn.then(Op::put(self.keys.part(shard, generation, number), part));
            }
            let written = self.write(term, txn, step_bytes as u64, WhenFull::Fail);
            settled(epoch, written.await?)?;
        }
        let pointer = Pointer {
            seq: seq.0,
            generation,
            parts: count,
            bytes,
        };
        self.point(term, shard, pointer).await
    }

    /// The positions that the log holds. An error if `seq` is not one of them.
    async fn span_with(&self, seq: LogSeq) -> Result<LogSpan, StoreError> {
        let span = span(&self.client, &self.keys).await?;
        if seq < span.cut || seq > span.last {
            return Err(StoreError::OutsideLog {
                asked: seq,
                cut: span.cut,
                last: span.last,
            });
        }
        Ok(span)
    }

    /// Sets a shard's pointer, if the log holds the position in it.
    async fn point(
        &self,
        term: Term,
        shard: ShardIndex,
        pointer: Pointer,
    ) -> Result<(), StoreError> {
        let seq = LogSeq(pointer.seq);
        let value =
            serde_json::to_vec(&pointer).map_err(|e| corrupt("a pointer", &e.to_string()))?;
        loop {
            let span = self.span_with(seq).await?;
            // The condition still holds as when the span was read: the next group exists, or there is none.
            let behind = self.keys.log(LogSeq(seq.0.saturating_add(1)));
            let holds = if seq == span.last {
                Compare::absent(behind)
            } else {
                Compare::present(behind)
            };
            let txn = self
                .fenced(term)
                .when(holds)
                .then(Op::put(self.keys.pointer(shard), value.clone()))
                .then(Op::delete(
                    self.keys.parts_before(shard, pointer.generation),
                ));
            let written = self.write(term, txn, value.len() as u64, WhenFull::Fail);
            match written.await? {
                Written::Refused(_) => {}
                written => return settled(term.epoch, written),
            }
        }
    }

    pub(super) async fn load_snapshot(
        &self,
        shard: ShardIndex,
    ) -> Result<Option<Snapshot>, StoreError> {
        let mut before = None;
        loop {
            let Some(found) = self.client.get(self.keys.pointer(shard)).await? else {
                return Ok(None);
            };
            let pointer = Pointer::read(shard, &found.value)?;
            if let Some(parts) = self.load_parts(shard, pointer).await? {
                let seq = LogSeq(pointer.seq);
                return Ok(Some(Snapshot { seq, chunks: parts }));
            }
            // The snapshot was replaced during the read, so the pointer has changed.
            if before.replace(pointer) == Some(pointer) {
                return Err(corrupt(&format!("the snapshot of {shard}"), "lacks parts"));
            }
        }
    }

    /// The parts of a snapshot; `None` if a part is missing.
    async fn load_parts(
        &self,
        shard: ShardIndex,
        pointer: Pointer,
    ) -> Result<Option<Vec<Bytes>>, StoreError> {
        let mut parts = Vec::new();
        let mut size = ReadSize::of_pieces();
        while let Ok(number) = u32::try_from(parts.len())
            && number < pointer.parts
        {
            let range = self.keys.parts_from(shard, pointer.generation, number);
            let read = match self.client.range(range.limit(size.count())).await {
                Err(Error::Unavailable { .. }) if size.shrink() => continue,
                read => read?.kvs,
            };
            if read.is_empty() {
                return Ok(None);
            }
            parts.extend(read.into_iter().map(|part| part.value));
        }
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        Ok((bytes == pointer.bytes).then_some(parts))
    }

    /// Deletes the parts that no pointer names, once per term.
    async fn sweep(&self, term: Term, state: &mut State) -> Result<(), StoreError> {
        if state.swept == term.epoch {
            return Ok(());
        }
        let pointers = self.pointers().await?;
        let kept: Vec<_> = pointers
            .iter()
            .map(|(shard, pointer)| (*shard, pointer.generation))
            .collect();
        for ranges in self.keys.parts_but(&kept).chunks(STEP_KEYS) {
            let txn = ranges.iter().fold(self.fenced(term), |txn, range| {
                txn.then(Op::delete(range.clone()))
            });
            settled(term.epoch, self.write(term, txn, 0, WhenFull::Fail).await?)?;
        }
        state.swept = term.epoch;
        Ok(())
    }

    /// [`EtcdStore::sweep`], unless a snapshot is being put, which begins with a sweep.
    pub(super) async fn sweep_now(&self, epoch: Epoch) -> Result<(), StoreError> {
        let term = self.term(epoch).await?;
        match self.snapshots.try_lock() {
            Ok(mut state) => self.sweep(term, &mut state).await,
            Err(_) => Ok(()),
        }
    }
}
