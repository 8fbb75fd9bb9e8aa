//! When to take a snapshot of which shard, and where to cut the log.

use super::JournalOptions;
use crate::store::{LogSeq, LogState, ShardIndex};
use std::collections::VecDeque;

/// What a group takes in the store besides its bytes, roughly.
const GROUP_OVERHEAD: u64 = 64;
/// Neighbouring groups are counted together up to this size, so that small ones take no room here.
const RUN_BYTES: u64 = 64 << 10;

/// Follows the sizes of the log and of the snapshots.
#[derive(Debug)]
pub(super) struct Retention {
    /// Runs of groups that are not cut yet: the last position of each, and its bytes.
    runs: VecDeque<(LogSeq, u64)>,
    log_bytes: u64,
    shards: Vec<Held>,
    least_bytes: u64,
    ratio: u64,
    /// Nothing is due until the log has this size: set when a snapshot failed.
    pause_until: u64,
}

#[derive(Debug)]
struct Held {
    shard: ShardIndex,
    seq: LogSeq,
    bytes: u64,
}

/// A snapshot to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// The shard to capture.
    pub(super) shard: ShardIndex,
    /// Where the log may be cut once that snapshot is put.
    pub(super) cut: LogSeq,
}

impl Retention {
    pub(super) fn new(state: &LogState, shards: u32, options: &JournalOptions) -> Self {
        let held = |shard| {
            let (seq, bytes) = state.snapshots.get(&shard).copied().unwrap_or_default();
            Held { shard, seq, bytes }
        };
        let all = [ShardIndex::SYSTEM]
            .into_iter()
            .chain((0..shards).map(ShardIndex));
        let mut retention = Self {
            runs: VecDeque::new(),
            log_bytes: 0,
            shards: all.map(held).collect(),
            least_bytes: options.log_bytes.as_u64(),
            ratio: options.log_ratio,
            pause_until: 0,
        };
        for (seq, bytes) in &state.groups {
            retention.appended(*seq, *bytes);
        }
        retention
    }

    /// Counts a group that was appended.
    pub(super) fn appended(&mut self, seq: LogSeq, bytes: u64) {
        let bytes = bytes + GROUP_OVERHEAD;
        self.log_bytes += bytes;
        match self.runs.back_mut() {
            Some((last, run)) if *run + bytes <= RUN_BYTES => {
                *last = seq;
                *run += bytes;
            }
            _ => self.runs.push_back((seq, bytes)),
        }
    }

    /// The snapshot to take next with the log ending at `last`, if the log has grown too large.
    pub(super) fn due(&self, last: LogSeq) -> Option<Due> {
        let budget = self
            .least_bytes
            .max(self.ratio.saturating_mul(self.snapshot_bytes()));
        if self.log_bytes <= budget.max(self.pause_until) {
            return None;
        }
        let oldest = self.shards.iter().min_by_key(|held| held.seq)?;
        let others = self.shards.iter().filter(|held| held.shard != oldest.shard);
        let cut = others.map(|held| held.seq).min().unwrap_or(last);
        Some(Due {
            shard: oldest.shard,
            cut,
        })
    }

    /// Notes that a shard's snapshot was put and the log was cut.
    pub(super) fn put(&mut self, shard: ShardIndex, seq: LogSeq, bytes: u64, cut: LogSeq) {
        self.pause_until = 0;
        if let Some(held) = self.shards.iter_mut().find(|held| held.shard == shard) {
            (held.seq, held.bytes) = (seq, bytes);
        }
        while let Some((last, bytes)) = self.runs.front().copied()
            && last <= cut
        {
            self.log_bytes -= bytes;
            self.runs.pop_front();
        }
    }

    /// Notes that a snapshot failed: none is due until the log has grown by a quarter.
    pub(super) fn failed(&mut self) {
        self.pause_until = self.log_bytes + self.log_bytes / 4;
    }

    fn snapshot_bytes(&self) -> u64 {
        self.shards.iter().map(|held| held.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytesize::ByteSize;

    fn retention(shards: u32) -> Retention {
        let options = JournalOptions {
            log_bytes: ByteSize::b(1000),
            ..JournalOptions::default()
        };
        Retention::new(&LogState::default(), shards, &options)
    }

    #[test]
    fn the_oldest_snapshot_is_replaced_first_and_bounds_the_cut() {
        let mut retention = retention(2);
        assert_eq!(retention.due(LogSeq(0)), None);
        retention.appended(LogSeq(1), 2000);
        let mut taken = Vec::new();
        while let Some(due) = retention.due(LogSeq(1)) {
            taken.push(due);
            retention.put(due.shard, LogSeq(1), 10, due.cut);
        }
        let cuts = [LogSeq(0), LogSeq(0), LogSeq(1)];
        let shards = [ShardIndex::SYSTEM, ShardIndex(0), ShardIndex(1)];
        let expected: Vec<Due> = shards
            .into_iter()
            .zip(cuts)
            .map(|(shard, cut)| Due { shard, cut })
            .collect();
        assert_eq!(taken, expected);
        assert_eq!(retention.log_bytes, 0);
    }

    #[test]
    fn the_log_may_grow_to_a_multiple_of_the_snapshots() {
        let mut retention = retention(1);
        retention.put(ShardIndex(0), LogSeq(1), 10_000, LogSeq(0));
        retention.appended(LogSeq(2), 20_000 - GROUP_OVERHEAD);
        assert_eq!(retention.due(LogSeq(2)), None);
        retention.appended(LogSeq(3), 1);
        assert!(retention.due(LogSeq(3)).is_some());
    }

    #[test]
    fn a_failed_snapshot_is_tried_again_when_the_log_has_grown() {
        let mut retention = retention(1);
        retention.appended(LogSeq(1), 2000);
        retention.failed();
        assert_eq!(retention.due(LogSeq(1)), None);
        retention.appended(LogSeq(2), 2000);
        assert!(retention.due(LogSeq(2)).is_some());
    }

    #[test]
    fn small_groups_are_counted_in_runs() {
        let mut retention = retention(1);
        for seq in 1..=10_000 {
            retention.appended(LogSeq(seq), 70);
        }
        assert!(retention.runs.len() < 30, "{} runs", retention.runs.len());
    }
}
