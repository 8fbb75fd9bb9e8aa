//! Leases that protect a replica which has left its block.
//!
//! A move takes a replica off a block that readers hold leases on. The extent stays shut until these leases end. A
//! long read renews its lease at the block, and goes on where the replica was. So the renewal has to keep that extent
//! shut as well. Later readers are sent elsewhere, and their leases do not count here.

use crate::clock::BootInstant;
use kvpool_types::{Offset, SegmentId, Version};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A replica that has left.
#[derive(Clone, Debug)]
struct Moved {
    version: Version,
    place: (SegmentId, Offset),
    /// Leases with tokens up to this one were given while the replica was there.
    last_token: BootInstant,
    /// What such leases became when they were renewed.
    renewed: Vec<BootInstant>,
}

impl Moved {
    fn until(&self) -> BootInstant {
        let renewed = self.renewed.iter().copied();
        renewed.max().unwrap_or_default().max(self.last_token)
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct MovedLeases {
    count: AtomicUsize,
    moved: Mutex<Vec<Moved>>,
}

impl MovedLeases {
    /// A replica of this version leaves `place`. Leases with tokens up to `last_token` may be on it. Noted before it
    /// leaves with the latest token that a lease can have, and then with the latest that there was.
    pub fn note(
        &self,
        version: Version,
        place: (SegmentId, Offset),
        last_token: BootInstant,
        now: BootInstant,
    ) {
        let mut moved = self.moved.lock();
        moved.retain(|one| one.until() > now);
        match moved
            .iter_mut()
            .find(|one| one.version == version && one.place == place)
        {
            Some(known) => known.last_token = last_token,
            None => moved.push(Moved {
                version,
                place,
                last_token,
                renewed: Vec::new(),
            }),
        }
        self.count.store(moved.len(), Ordering::Release);
    }

    /// A lease on this version was renewed: from `token`, it is now `until`.
    pub fn renewed(&self, version: Version, token: BootInstant, until: BootInstant) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut moved = self.moved.lock();
        for one in moved.iter_mut().filter(|one| one.version == version) {
            if token <= one.last_token || one.renewed.contains(&token) {
                one.renewed.push(until);
            }
        }
    }

    /// When the last lease on a replica that was at `place` ends.
    pub fn held_until(&self, place: (SegmentId, Offset)) -> Option<BootInstant> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let moved = self.moved.lock();
        let there = moved.iter().filter(|one| one.place == place);
        there.map(Moved::until).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: (SegmentId, Offset) = (SegmentId(1), Offset(4096));

    #[test]
    fn only_leases_from_before_the_move_keep_its_extent_shut() {
        let leases = MovedLeases::default();
        let at = BootInstant;
        leases.note(Version(7), PLACE, at(300), at(0));
        leases.note(Version(7), PLACE, at(200), at(0));
        assert_eq!(leases.held_until(PLACE), Some(at(200)));
        // Another version, and a lease that was given after the move.
        leases.renewed(Version(8), at(150), at(900));
        leases.renewed(Version(7), at(250), at(900));
        assert_eq!(leases.held_until(PLACE), Some(at(200)));
        leases.renewed(Version(7), at(200), at(400));
        leases.renewed(Version(7), at(400), at(600));
        assert_eq!(leases.held_until(PLACE), Some(at(600)));
        assert_eq!(leases.held_until((SegmentId(1), Offset(0))), None);
        // What is over is forgotten.
        leases.note(Version(9), PLACE, at(650), at(600));
        leases.renewed(Version(7), at(600), at(800));
        assert_eq!(leases.held_until(PLACE), Some(at(650)));
    }
}
