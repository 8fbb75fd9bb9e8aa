//! Leases that protect a replica which has left its block.
//!
//! A replica may leave a block that readers hold leases on: it was moved, or the block was loaded elsewhere. The
//! extent stays shut until these leases end. A long read would renew its lease at the block and go on where the
//! replica was. So a renewal that is for a location is refused, and the reader asks where the block lies now. It is
//! refused for one TTL at most, which is also how long a standby keeps a freed extent shut.

use crate::clock::BootInstant;
use kvpool_types::Version;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How much longer than its leases a note is kept: a renewal may have taken the time before it looks.
const MARGIN: Duration = Duration::from_secs(10);

/// One replica that has left, or is about to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "say whether the replica has left"]
pub struct Leaving {
    version: Version,
    number: u64,
}

#[derive(Debug, Default)]
struct Notes {
    last: u64,
    /// By version and number, the highest token of a lease that was given while the replica was there.
    tokens: BTreeMap<(Version, u64), BootInstant>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct MovedLeases {
    count: AtomicUsize,
    notes: Mutex<Notes>,
}

impl MovedLeases {
    /// A replica of this version is about to leave. No lease on it has a token beyond `latest`.
    pub fn leaves(&self, version: Version, latest: BootInstant) -> Leaving {
        let mut notes = self.notes.lock();
        notes.last += 1;
        let number = notes.last;
        notes.tokens.insert((version, number), latest);
        self.count.store(notes.tokens.len(), Ordering::Release);
        Leaving { version, number }
    }

    /// The replica has left, and its last lease was until `last_token`.
    pub fn left(&self, leaving: Leaving, last_token: BootInstant) {
        let mut notes = self.notes.lock();
        let Leaving { version, number } = leaving;
        notes.tokens.insert((version, number), last_token);
    }

    /// The replica has not left.
    pub fn stays(&self, leaving: Leaving) {
        let mut notes = self.notes.lock();
        let Leaving { version, number } = leaving;
        notes.tokens.remove(&(version, number));
        self.count.store(notes.tokens.len(), Ordering::Release);
    }

    /// Whether a lease on this version with this token may be for an extent that the replica has left.
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
