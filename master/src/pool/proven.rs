//! Replicas that a reader reported as damaged, and that their nodes found intact.
//!
//! A report hides its replica until the node has re-verified it. A reader with a broken network, or
//! a hostile reader, could keep a block hidden forever and keep its node busy. So the master does
//! not hide such a replica again for [`HOLDS`]. Readers compare checksums in any case.

use crate::clock::BootInstant;
use kvpool_seams::maps::HashMap;
use kvpool_types::{Offset, SegmentId, Version};
use std::time::Duration;

/// How long a replica counts as intact after its node has verified it.
pub(super) const HOLDS: Duration = Duration::from_secs(10);

/// By location: the version that its node found intact, and when it did.
#[derive(Debug, Default)]
pub(super) struct Proven(HashMap<(SegmentId, Offset), (Version, BootInstant)>);

impl Proven {
    /// Records that a node has found the bytes of `version` at this location intact.
    pub(super) fn note(&mut self, place: (SegmentId, Offset), version: Version, now: BootInstant) {
        self.0.retain(|_, (_, proven)| now.since(*proven) < HOLDS);
        self.0.insert(place, (version, now));
    }

    /// Whether the bytes of `version` at this location were found intact lately.
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
