//! The choice of the shards to capture, and of the position at which to cut the log.
//!
//! ADR 0002 says when a shard is captured.

use super::JournalOptions;
use crate::store::{LogRuns, LogSeq, LogState, ShardIndex};

/// The sizes of the log and of the snapshots.
#[derive(Debug)]
pub(super) struct Retention {
    /// The groups that are not cut yet.
    log: LogRuns,
    shards: Vec<ShardSnapshot>,
    least_bytes: u64,
    ratio: u64,
    /// The size up to which the snapshots of several shards are written together.
    capture_bytes: u64,
    /// After a failed snapshot, the size of the log below which none is due.
    pause_until: u64,
}

#[derive(Debug)]
struct ShardSnapshot {
    shard: ShardIndex,
    seq: LogSeq,
    bytes: u64,
}

/// Snapshots to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// The shards to capture.
    pub(super) shards: Vec<ShardIndex>,
    /// The position to cut the log at after these snapshots.
    pub(super) cut: LogSeq,
}

impl Retention {
    pub(super) fn new(state: &LogState, shards: u32, options: &JournalOptions) -> Self {
        let held = |shard| {
            let (seq, bytes) = state.snapshots.get(&shard).copied().unwrap_or_default();
            ShardSnapshot { shard, seq, bytes }
        };
        let all = [ShardIndex::SYSTEM]
            .into_iter()
            .chain((0..shards).map(ShardIndex));
        Self {
            log: state.runs.clone(),
            shards: all.map(held).collect(),
            least_bytes: options.log_bytes.as_u64(),
            ratio: options.log_ratio,
            capture_bytes: options.capture_bytes.as_u64(),
            pause_until: 0,
        }
    }

    /// Counts an appended group.
    pub(super) fn appended(&mut self, seq: LogSeq, bytes: u64) {
        self.log.push(seq, bytes);
    }

    /// True if the log is so large that a snapshot is due.
    pub(super) fn is_due(&self) -> bool {
        let budget = self
            .least_bytes
            .max(self.ratio.saturating_mul(self.snapshot_bytes()));
        self.log.bytes() > budget.max(self.pause_until)
    }

    /// The next snapshots for a log that ends at `last`: the oldest, and more while all are small.
    pub(super) fn due(&self, last: LogSeq) -> Due {
        let mut oldest: Vec<&ShardSnapshot> = self.shards.iter().collect();
        oldest.sort_by_key(|held| held.seq);
        // Keys spread evenly over the shards, so each shard has grown by at most its share of the
        // log.
        let growth = self.log.bytes() / self.shards.len() as u64;
        let mut foreseen = 0;
        let together = oldest.iter().take_while(|held| {
            foreseen += held.bytes + growth;
            foreseen <= self.capture_bytes
        });
        let (due, others) = oldest.split_at(together.count().max(1));
        Due {
            shards: due.iter().map(|held| held.shard).collect(),
            cut: others.first().map_or(last, |held| held.seq),
        }
    }

    /// Records new snapshots with their bytes, and the cut of the log.
    pub(super) fn put(&mut self, snapshots: &[(ShardIndex, u64)], seq: LogSeq, cut: LogSeq) {
        self.pause_until = 0;
        for (shard, bytes) in snapshots {
            if let Some(held) = self.shards.iter_mut().find(|held| held.shard == *shard) {
                (held.seq, held.bytes) = (seq, *bytes);
            }
        }
        self.log.forget(cut);
    }

    /// Records a failed snapshot. The next one is due when the log has grown by a quarter.
    pub(super) fn failed(&mut self) {
        self.pause_until = self.log.bytes() + self.log.bytes() / 4;
    }

    fn snapshot_bytes(&self) -> u64 {
        self.shards.iter().map(|held| held.bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::log_runs::GROUP_OVERHEAD;
    use bytesize::ByteSize;

    const CAPTURE_BYTES: u64 = 1 << 20;

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
        assert!(!retention.is_due());
        let large = 3 * CAPTURE_BYTES;
        retention.appended(LogSeq(1), large);
        let mut taken = Vec::new();
        while retention.is_due() {
            let due = retention.due(LogSeq(1));
            retention.put(&[(due.shards[0], 10)], LogSeq(1), due.cut);
            taken.push(due);
        }
        let cuts = [LogSeq(0), LogSeq(0), LogSeq(1)];
        let shards = [ShardIndex::SYSTEM, ShardIndex(0), ShardIndex(1)];
        let expected: Vec<Due> = shards
            .into_iter()
            .zip(cuts)
            .map(|(shard, cut)| Due {
                shards: vec![shard],
                cut,
            })
            .collect();
        assert_eq!(taken, expected);
        assert_eq!(retention.log.bytes(), 0);
    }

    #[test]
    fn small_shards_are_captured_together() {
        let mut retention = retention(3);
        retention.put(&[(ShardIndex(1), CAPTURE_BYTES)], LogSeq(5), LogSeq(0));
        retention.put(&[(ShardIndex(2), 10)], LogSeq(6), LogSeq(0));
        retention.appended(LogSeq(7), 20_000);
        let due = retention.due(LogSeq(7));
        assert_eq!(
            due.shards,
            [ShardIndex::SYSTEM, ShardIndex(0)],
            "one more would be large"
        );
        assert_eq!(due.cut, LogSeq(5));
        let both = [(ShardIndex::SYSTEM, 10), (ShardIndex(0), 10)];
        retention.put(&both, LogSeq(7), due.cut);
        let large = retention.due(LogSeq(7));
        assert_eq!(large.shards, [ShardIndex(1)], "the oldest in any case");
        retention.put(&[(ShardIndex(1), 10)], LogSeq(7), large.cut);
        let all = retention.due(LogSeq(7));
        assert_eq!((all.shards.len(), all.cut), (4, LogSeq(7)));
    }

    #[test]
    fn the_log_may_grow_to_a_multiple_of_the_snapshots() {
        let mut retention = retention(1);
        retention.put(&[(ShardIndex(0), 10_000)], LogSeq(1), LogSeq(0));
        retention.appended(LogSeq(2), 20_000 - GROUP_OVERHEAD);
        assert!(!retention.is_due());
        retention.appended(LogSeq(3), 1);
        assert!(retention.is_due());
    }

    #[test]
    fn a_failed_snapshot_is_tried_again_when_the_log_has_grown() {
        let mut retention = retention(1);
        retention.appended(LogSeq(1), 2000);
        retention.failed();
        assert!(!retention.is_due());
        retention.appended(LogSeq(2), 2000);
        assert!(retention.is_due());
    }
}
