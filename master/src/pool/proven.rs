//! Replicas that a report called damaged, and that their nodes found right.
//!
//! A report hides its replica until the node has read it again. A reader with a broken network, or a hostile one, would
//! keep a block hidden for ever, and its node busy. So a replica that was found right is not hidden again for a while.
//! Readers compare checksums all the same.

use crate::clock::BootInstant;
use kvpool_seams::maps::HashMap;
use kvpool_types::{Offset, SegmentId, Version};
use std::time::Duration;

/// How long a replica counts as right after its node has read it.
pub(super) const HOLDS: Duration = Duration::from_secs(10);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Proven(HashMap<(SegmentId, Offset), (Version, BootInstant)>);

impl Proven {
    /// A node has found the bytes of `version` at this place right.
    pub(super) fn note(&mut self, place: (SegmentId, Offset), version: Version, now: BootInstant) {
        self.0.retain(|_, (_, proven)| now.since(*proven) < HOLDS);
        self.0.insert(place, (version, now));
    }

    /// Whether they were found right lately.
    pub(super) fn has(
        &self,
        place: (SegmentId, Offset),
        version: Version,
        now: BootInstant,
    ) -> bool {
        self.0
            .get(&place)
            .is_some_and(|(right, proven)| *right == version && now.since(*proven) < HOLDS)
    }
}
