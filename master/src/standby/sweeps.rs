//! Replicas whose segments are gone, and which are still in the directory.
//!
//! A leader drops the replicas of a segment some time after it has logged the end of the segment. Until then it adds
//! replicas to blocks that have no other one. A standby that dropped such a block at once would ignore the replica that
//! is logged next, and would lose the block.

use super::Standby;
use crate::clock::BootInstant;
use crate::directory::ReplicaStart;
use crate::placement::Segment;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// How long a replica may be late. A leader drops those of a segment within seconds.
const LATEST: Duration = Duration::from_secs(30);
/// A longer pause between two groups counts as this one. The standby itself may have paused, and then gets groups that
/// the leader logged long ago.
const FOLLOWS: Duration = Duration::from_secs(1);
/// The number of slots of a segment's table that one step of dropping the segment examines.
const STEP: u32 = 4096;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Sweeps {
    /// What is to be dropped, oldest first, and how long this standby had followed when it came.
    waiting: VecDeque<(Duration, Absent)>,
    /// How long this standby has followed the log. Pauses count in part.
    followed: Duration,
    last: BootInstant,
}

/// Replicas to drop.
#[derive(Debug)]
enum Absent {
    /// All on this segment.
    Segment(Arc<Segment>),
    /// Those that a load found on segments that were gone.
    Places(Vec<ReplicaStart>),
}

impl Sweeps {
    /// The segment is gone.
    pub(super) fn keep_segment(&mut self, segment: Arc<Segment>) {
        let absent = Absent::Segment(segment);
        self.waiting.push_back((self.followed, absent));
    }

    /// The segments of these replicas were gone when they were loaded.
    pub(super) fn keep_places(&mut self, places: Vec<ReplicaStart>) {
        if !places.is_empty() {
            self.waiting
                .push_back((self.followed, Absent::Places(places)));
        }
    }

    /// A group was applied.
    pub(super) fn follow(&mut self, now: BootInstant) {
        self.followed += now.since(self.last).min(FOLLOWS);
        self.last = now;
    }

    fn due(&mut self) -> Option<Absent> {
        let (since, _) = self.waiting.front()?;
        let is_due = self.followed.saturating_sub(*since) >= LATEST;
        is_due
            .then(|| self.waiting.pop_front())
            .flatten()
            .map(|(_, absent)| absent)
    }
}

impl Standby {
    /// Drops the replicas that have waited for long enough.
    pub(super) fn sweep(&mut self) {
        self.sweeps.follow(self.clock.now());
        while let Some(absent) = self.sweeps.due() {
            self.drop_absent(&absent);
        }
    }

    /// Drops all of them: the log has ended.
    pub(crate) fn sweep_all(&mut self) {
        while let Some((_, absent)) = self.sweeps.waiting.pop_front() {
            self.drop_absent(&absent);
        }
    }

    fn drop_absent(&self, absent: &Absent) {
        match absent {
            Absent::Segment(segment) => {
                let mut place = Some(0);
                while let Some(from) = place {
                    let extents = || segment.extents();
                    let id = segment.id;
                    (_, place) = self.directory.drop_segment(id, extents, from, STEP, |_| {});
                }
            }
            // Another block in the same slot has no replica there: nothing comes to a segment that is gone.
            Absent::Places(places) => {
                for place in places {
                    self.directory.drop_replica_at(place);
                }
            }
        }
    }
}
