//! One term: its epoch, and the deadline until which its master may act.

use crate::clock::BootInstant;
use kvpool_types::Epoch;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A term. Past its deadline the master may answer reads but change nothing, until the term is
/// renewed. An ended term is never renewed.
///
/// The deadline is on the clock since boot. So a master that was stopped finds the deadline passed
/// when it continues.
#[derive(Debug)]
pub struct Term {
    /// The epoch of the term.
    pub epoch: Epoch,
    deadline: AtomicU64,
}

/// A term without a deadline.
const NEVER: u64 = u64::MAX;
/// The term has ended.
const OVER: u64 = 0;

impl Term {
    /// A term without a deadline: the only master of an embedded store.
    pub const fn unlimited(epoch: Epoch) -> Self {
        Self {
            epoch,
            deadline: AtomicU64::new(NEVER),
        }
    }

    /// A term that needs a renewal before `deadline`.
    pub const fn until(epoch: Epoch, deadline: BootInstant) -> Self {
        Self {
            epoch,
            deadline: AtomicU64::new(deadline.0),
        }
    }

    /// True while the master may grant and change anything.
    pub fn leads(&self, now: BootInstant) -> bool {
        now.0 < self.deadline.load(Ordering::Acquire)
    }

    /// Moves the deadline later. An ended term stays ended.
    pub fn renew(&self, deadline: BootInstant) {
        // The update fails for an ended term and for an earlier deadline.
        let _kept = self
            .deadline
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                (now != OVER && now < deadline.0).then_some(deadline.0)
            });
    }

    /// Ends the term.
    pub fn end(&self) {
        self.deadline.store(OVER, Ordering::Release);
    }

    /// True for an ended term.
    pub fn is_over(&self) -> bool {
        self.deadline.load(Ordering::Acquire) == OVER
    }

    /// The time until the deadline; `None` without a deadline.
    pub fn left(&self, now: BootInstant) -> Option<Duration> {
        let deadline = self.deadline.load(Ordering::Acquire);
        (deadline != NEVER).then(|| BootInstant(deadline).since(now))
    }

    /// The time since the deadline passed.
    pub fn overdue(&self, now: BootInstant) -> Duration {
        now.since(BootInstant(self.deadline.load(Ordering::Acquire)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_past_its_deadline_does_not_lead_until_renewed() {
        let term = Term::until(Epoch(3), BootInstant(100));
        assert!(term.leads(BootInstant(99)));
        assert!(!term.leads(BootInstant(100)));
        term.renew(BootInstant(200));
        assert!(term.leads(BootInstant(199)));
        // A late answer has an earlier deadline.
        term.renew(BootInstant(150));
        assert!(term.leads(BootInstant(199)));
        assert_eq!(term.overdue(BootInstant(260)), Duration::from_millis(60));
    }

    #[test]
    fn an_ended_term_is_never_renewed() {
        let term = Term::until(Epoch(3), BootInstant(100));
        term.end();
        term.renew(BootInstant(500));
        assert!(!term.leads(BootInstant(1)));
        assert!(term.is_over());
        let unlimited = Term::unlimited(Epoch(1));
        assert!(unlimited.leads(BootInstant(u64::MAX - 1)));
        unlimited.end();
        assert!(!unlimited.leads(BootInstant(0)));
    }
}
