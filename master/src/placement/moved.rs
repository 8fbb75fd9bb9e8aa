//! Leases that protect a replica which has left its block.
//!
//! A replica may leave a block that readers hold leases on: it was moved, or the block was loaded
//! elsewhere. The extent stays in quarantine until these leases end. A long read would renew its
//! lease at the block and go on reading the old extent. So the master refuses to renew a lease for
//! that location, and the reader asks for the block's new one. The master refuses for at most one
//! lease TTL. A standby keeps a freed extent in quarantine for the same time.

use crate::clock::BootInstant;
use kvpool_types::Version;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How much longer than its leases a note is kept. A renewal may have read the clock this long
/// before it looks the note up.
const MARGIN: Duration = Duration::from_secs(10);

/// A replica that has left its block, or is about to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "say whether the replica has left"]
pub struct Leaving {
    version: Version,
    number: u64,
}

#[derive(Debug, Default)]
struct Notes {
    last: u64,
    /// By version and number: the highest token of a lease that was granted while the block had the
    /// replica.
    tokens: BTreeMap<(Version, u64), BootInstant>,
}

/// The highest lease tokens of replicas that have left, or are about to.
#[derive(Debug, Default)]
pub struct MovedLeases {
    count: AtomicUsize,
    notes: Mutex<Notes>,
}

impl MovedLeases {
    /// Records that a replica of this version is about to leave. No lease on it has a token beyond
    /// `latest`.
    pub fn leaves(&self, version: Version, latest: BootInstant) -> Leaving {
        let mut notes = self.notes.lock();
        notes.last += 1;
        let number = notes.last;
        notes.tokens.insert((version, number), latest);
        self.count.store(notes.tokens.len(), Ordering::Release);
        Leaving { version, number }
    }

    /// Records that the replica has left. `last_token` is the token of its last lease.
    pub fn left(&self, leaving: Leaving, last_token: BootInstant) {
        let mut notes = self.notes.lock();
        let Leaving { version, number } = leaving;
        notes.tokens.insert((version, number), last_token);
    }

    /// Records that the replica has not left.
    pub fn stays(&self, leaving: Leaving) {
        let mut notes = self.notes.lock();
        let Leaving { version, number } = leaving;
        notes.tokens.remove(&(version, number));
        self.count.store(notes.tokens.len(), Ordering::Release);
    }

    /// Whether a lease on this version with this token may protect an extent that the replica has
    /// left.
    pub fn may_be_elsewhere(&self, version: Version, token: BootInstant) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let notes = self.notes.lock();
        let mut of_version = notes.tokens.range((version, 0)..=(version, u64::MAX));
        of_version.any(|(_, last)| token <= *last)
    }

    /// Forgets replicas whose leases are long over.
    pub fn forget(&self, now: BootInstant) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut notes = self.notes.lock();
        notes.tokens.retain(|_, last| last.after(MARGIN) > now);
        self.count.store(notes.tokens.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: Version = Version(7);

    fn at(second: u64) -> BootInstant {
        BootInstant(second * 1000)
    }

    #[test]
    fn only_leases_from_before_the_replica_left_may_be_elsewhere() {
        let leases = MovedLeases::default();
        let leaving = leases.leaves(V, at(30));
        assert!(leases.may_be_elsewhere(V, at(30)));
        leases.left(leaving, at(20));
        assert!(leases.may_be_elsewhere(V, at(20)));
        assert!(!leases.may_be_elsewhere(V, at(25)), "given afterwards");
        assert!(!leases.may_be_elsewhere(Version(8), at(20)));
    }

    #[test]
    fn a_replica_that_stays_takes_nothing_from_another_that_left() {
        let leases = MovedLeases::default();
        let first = leases.leaves(V, at(30));
        leases.left(first, at(20));
        let second = leases.leaves(V, at(40));
        leases.stays(second);
        assert!(leases.may_be_elsewhere(V, at(20)));
        assert!(!leases.may_be_elsewhere(V, at(25)));
    }

    #[test]
    fn what_is_long_over_is_forgotten() {
        let leases = MovedLeases::default();
        let leaving = leases.leaves(V, at(30));
        leases.left(leaving, at(20));
        leases.forget(at(29));
        assert!(leases.may_be_elsewhere(V, at(20)));
        leases.forget(at(30));
        assert!(leases.notes.lock().tokens.is_empty());
        assert!(!leases.may_be_elsewhere(V, at(20)));
    }
}
