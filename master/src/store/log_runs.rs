//! The bytes of the log after each position, in little memory: a standby follows millions of
//! groups.

use super::LogSeq;
use std::collections::VecDeque;

/// The approximate bytes that the store adds to each group.
pub(crate) const GROUP_OVERHEAD: u64 = 64;
/// The size up to which neighbouring groups are counted as one run, so that small groups take no
/// memory here.
const RUN_BYTES: u64 = 64 << 10;

/// The groups of the log as runs of neighbours: the last position and the bytes of each run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogRuns {
    runs: VecDeque<(LogSeq, u64)>,
    bytes: u64,
}

impl LogRuns {
    /// Counts the next group.
    pub(crate) fn push(&mut self, seq: LogSeq, bytes: u64) {
        let bytes = bytes + GROUP_OVERHEAD;
        self.bytes += bytes;
        match self.runs.back_mut() {
            Some((last, run)) if *run + bytes <= RUN_BYTES => {
                *last = seq;
                *run += bytes;
            }
            _ => self.runs.push_back((seq, bytes)),
        }
    }

    /// Forgets the groups through `cut`. A partly cut run counts whole.
    pub(crate) fn forget(&mut self, cut: LogSeq) {
        while let Some((last, bytes)) = self.runs.front().copied()
            && last <= cut
        {
            self.bytes -= bytes;
            self.runs.pop_front();
        }
    }

    /// The bytes of the log.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// True for an empty log.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_groups_are_counted_in_runs() {
        let mut runs = LogRuns::default();
        for seq in 1..=10_000 {
            runs.push(LogSeq(seq), 70);
        }
        assert!(runs.len() < 30, "{} runs", runs.len());
        runs.forget(LogSeq(9_999));
        assert_eq!(runs.len(), 1, "the last run is not over");
        runs.forget(LogSeq(10_000));
        assert_eq!((runs.len(), runs.bytes()), (0, 0));
    }
}
