//! Replicas that are still in the directory although their segments are gone.
//!
//! A leader drops the replicas of a segment some time after it has logged the segment's end. Until then it
//! adds new replicas to blocks whose only replica is there. If a standby dropped such a block at once, it
//! would ignore the new replica that is logged next, and lose the block.

use super::Standby;
use crate::clock::BootInstant;
use crate::directory::ReplicaStart;
use crate::placement::Segment;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// How long after a segment's end a replica may be added. A leader drops the segment's replicas within
/// seconds.
const LATEST: Duration = Duration::from_secs(30);
/// The longest pause between two groups that counts as following. A longer pause counts as this long. The
/// standby itself may have paused, and then receives groups that the leader logged long ago.
const FOLLOWS: Duration = Duration::from_secs(1);
/// The number of slots of a segment's table, or of replicas, that one step examines. A standby takes one step for
/// each group. While it drops the replicas of a large node, it must still follow the log and hear of elections.
const STEP: u32 = 4096;

/// The replicas to drop, and how long this standby has followed the log.
#[derive(Debug, Default)]
pub(super) struct Sweeps {
    /// The replicas to drop, oldest first, each with the value of `followed` when it was added.
    waiting: VecDeque<(Duration, Absent)>,
    /// How long this standby has followed the log, with long pauses shortened.
    followed: Duration,
    last: BootInstant,
}

/// Replicas to drop.
#[derive(Debug)]
enum Absent {
    /// All replicas on this segment, from this slot of its table on.
    Segment(Arc<Segment>, u32),
    /// Replicas that a load found on segments that were gone.
    Places(Vec<ReplicaStart>),
}

impl Sweeps {
    /// Adds the replicas of a segment that is gone.
    pub(super) fn keep_segment(&mut self, segment: Arc<Segment>) {
        let absent = Absent::Segment(segment, 0);
        self.waiting.push_back((self.followed, absent));
    }

    /// Adds replicas whose segments were gone when they were loaded.
    pub(super) fn keep_places(&mut self, places: Vec<ReplicaStart>) {
        if !places.is_empty() {
            self.waiting
                .push_back((self.followed, Absent::Places(places)));
        }
    }

    /// Records that a group was applied.
    pub(super) fn follow(&mut self, now: BootInstant) {
        self.followed += now.since(self.last).min(FOLLOWS);
        self.last = now;
    }

    fn due(&mut self) -> Option<(Duration, Absent)> {
        let (since, _) = self.waiting.front()?;
        let is_due = self.followed.saturating_sub(*since) >= LATEST;
        is_due.then(|| self.waiting.pop_front()).flatten()
    }
}

impl Standby {
    /// Takes one step of dropping the replicas that have waited for [`LATEST`].
    pub(super) fn sweep(&mut self) {
        self.sweeps.follow(self.clock.now());
        if let Some((since, absent)) = self.sweeps.due()
            && let Some(rest) = self.drop_step(absent)
        {
            self.sweeps.waiting.push_front((since, rest));
        }
    }

    /// Drops all of them, because the log has ended.
    pub(crate) fn sweep_all(&mut self) {
        while let Some((_, absent)) = self.sweeps.waiting.pop_front() {
            let mut left = Some(absent);
            while let Some(absent) = left {
                left = self.drop_step(absent);
            }
        }
    }

    /// Drops some replicas, and returns the rest.
    ///
    /// A slot of the directory may have another block by now, also one that was put between two steps. That block
    /// has no replica there, since no replica is added to a segment that is gone.
    fn drop_step(&self, absent: Absent) -> Option<Absent> {
        match absent {
            Absent::Segment(segment, from) => {
                let extents = || segment.extents();
                let id = segment.id;
                let (_, next) = self.directory.drop_segment(id, extents, from, STEP, |_| {});
                next.map(|next| Absent::Segment(segment, next))
            }
            Absent::Places(mut places) => {
                let step = places.len().saturating_sub(STEP as usize);
                for place in places.split_off(step) {
                    self.directory.drop_replica_at(&place);
                }
                (!places.is_empty()).then_some(Absent::Places(places))
            }
        }
    }
}
