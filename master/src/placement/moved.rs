//! Leases that protect a replica which has left its block.
//!
//! A move takes a replica off a block that readers hold leases on. The extent stays shut until these leases end. A
//! long read renews its lease at the block, and goes on where the replica was. So the renewal has to keep that extent
//! shut as well. Later readers are sent elsewhere, and their leases do not count here.

use crate::clock::BootInstant;
use kvpool_types::{Offset, SegmentId, Version};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where a replica was.
type Place = (SegmentId, Offset);

/// A replica that has left, or is about to.
#[derive(Clone, Debug)]
struct Moved {
    place: Place,
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

/// See the module's documentation. It holds only replicas that were under a lease when they left, until their
/// extents leave the quarantine's delay.
#[derive(Debug, Default)]
pub struct MovedLeases {
    count: AtomicUsize,
    moved: Mutex<BTreeMap<Version, Vec<Moved>>>,
}

impl MovedLeases {
    /// A replica of this version is about to leave. No lease on it has a token beyond `latest`.
    pub fn leaves(&self, version: Version, place: Place, latest: BootInstant) {
        let mut moved = self.moved.lock();
        moved.entry(version).or_default().push(Moved {
            place,
            last_token: latest,
            renewed: Vec::new(),
        });
        self.count.store(moved.len(), Ordering::Release);
    }

    /// The replica has left, and its last lease was until `last_token`.
    pub fn left(&self, version: Version, place: Place, last_token: BootInstant, now: BootInstant) {
        let mut moved = self.moved.lock();
        let known = moved.get_mut(&version).into_iter().flatten();
        for one in known.filter(|one| one.place == place) {
            one.last_token = last_token;
        }
        drop(moved);
        self.held_until(version, place, now);
    }

    /// The replica has not left.
    pub fn stays(&self, version: Version, place: Place) {
        self.forget(&mut self.moved.lock(), version, place);
    }

    /// A lease on this version was renewed: from `token`, it is now `until`.
    pub fn renewed(&self, version: Version, token: BootInstant, until: BootInstant) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut moved = self.moved.lock();
        for one in moved.get_mut(&version).into_iter().flatten() {
            if token <= one.last_token || one.renewed.contains(&token) {
                one.renewed.push(until);
            }
        }
    }

    /// When the last lease on a replica ends that was at `place`; `None` when it has ended. Then nothing more is
    /// known of the replica.
    pub fn held_until(
        &self,
        version: Version,
        place: Place,
        now: BootInstant,
    ) -> Option<BootInstant> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut moved = self.moved.lock();
        let there = moved.get(&version).into_iter().flatten();
        let until = there
            .filter(|one| one.place == place)
            .map(Moved::until)
            .max();
        let held = until.filter(|until| *until > now);
        if until.is_some() && held.is_none() {
            self.forget(&mut moved, version, place);
        }
        held
    }

    fn forget(&self, moved: &mut BTreeMap<Version, Vec<Moved>>, version: Version, place: Place) {
        if let Entry::Occupied(mut known) = moved.entry(version) {
            known.get_mut().retain(|one| one.place != place);
            if known.get().is_empty() {
                known.remove();
            }
        }
        self.count.store(moved.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = (SegmentId(1), Offset(4096));
    const V: Version = Version(7);

    #[test]
    fn only_leases_from_before_the_move_keep_its_extent_shut() {
        let leases = MovedLeases::default();
        let at = BootInstant;
        leases.leaves(V, PLACE, at(300));
        leases.left(V, PLACE, at(200), at(0));
        assert_eq!(leases.held_until(V, PLACE, at(0)), Some(at(200)));
        // Another version, and a lease that was given after the move.
        leases.renewed(Version(8), at(150), at(900));
        leases.renewed(V, at(250), at(900));
        assert_eq!(leases.held_until(V, PLACE, at(0)), Some(at(200)));
        leases.renewed(V, at(200), at(400));
        leases.renewed(V, at(400), at(600));
        assert_eq!(leases.held_until(V, PLACE, at(300)), Some(at(600)));
        assert_eq!(leases.held_until(V, (SegmentId(1), Offset(0)), at(0)), None);
        // What is over is forgotten.
        assert_eq!(leases.held_until(V, PLACE, at(600)), None);
        assert!(leases.moved.lock().is_empty());
    }

    #[test]
    fn nothing_is_kept_of_a_replica_without_a_lease_or_that_stays() {
        let leases = MovedLeases::default();
        let at = BootInstant;
        leases.leaves(V, PLACE, at(300));
        leases.left(V, PLACE, at(0), at(10));
        leases.leaves(V, PLACE, at(300));
        leases.stays(V, PLACE);
        assert!(leases.moved.lock().is_empty());
        assert_eq!(leases.count.load(Ordering::Acquire), 0);
    }
}
