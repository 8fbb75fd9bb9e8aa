//! What clients did, and what they may see of it.
//!
//! Every put writes bytes of its own, which name it. So a get shows which put it saw. The rules, for each get of a
//! key:
//!
//! 1. The bytes are those of one put of this key, whole.
//! 2. That put did not fail.
//! 3. No later put that stored its bytes, and no later removal, had ended long before the get began. Long is one lease
//!    and the time of a fail-over: until then a reader may use a location that it remembers. Later is what began when
//!    the put could no longer take effect, whatever was said of it.
//! 4. A version names one put.
//!
//! And for each key that a call finds present: some put of it may be there that no removal followed.

use crate::entropy::splitmix;
use crate::plan::Process;
use kvpool_types::Version;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// How long after its begin a change may take effect: its call ends, and what was slow on its way arrives. A store
/// that is full may hold it up longer.
const LATEST_EFFECT: Duration = Duration::from_secs(8);

/// What is answered at once takes no longer than this.
const ONE_ATTEMPT: Duration = Duration::from_millis(20);

/// The number of a put.
pub(crate) type PutNumber = u64;

/// What became of an operation that changes a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Running,
    /// It is done, at this time.
    Done(Instant),
    /// A put found the key present. The block may be its own: the answer to an earlier attempt was lost.
    Present,
    /// It changed nothing, and never will.
    Failed,
    /// It may be done, or may still be.
    Unknown,
}

/// A put or a removal.
#[derive(Clone, Copy, Debug)]
struct Change {
    begun: Instant,
    outcome: Outcome,
    /// The bytes of a put; `None`: a removal.
    length: Option<usize>,
    replaces: bool,
    /// How long its call took.
    took: Duration,
}

impl Change {
    /// When the change was in effect at the latest, if it was. What runs still has no such time.
    fn in_effect_by(&self, latest: Duration) -> Option<Instant> {
        match self.outcome {
            Outcome::Done(at) => Some(at),
            Outcome::Present | Outcome::Unknown => Some(self.begun + latest.max(self.took)),
            Outcome::Running | Outcome::Failed => None,
        }
    }

    /// Whether the change began after `earlier`, and all see it who begin at `begun`.
    fn follows(&self, earlier: Instant, grace: Duration, begun: Instant) -> bool {
        let is_seen = |seen: Instant| seen + grace < begun;
        self.begun > earlier && matches!(self.outcome, Outcome::Done(seen) if is_seen(seen))
    }
}

/// All operations on one key.
#[derive(Debug, Default)]
struct OfKey {
    changes: BTreeMap<PutNumber, Change>,
    versions: BTreeMap<u64, PutNumber>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct History {
    keys: BTreeMap<u64, OfKey>,
    next: PutNumber,
    grace: Duration,
    latest: Duration,
}

/// The bytes that put `number` of `key` writes.
pub(crate) fn bytes_of(key: u64, number: PutNumber, length: usize) -> Vec<u8> {
    let mut state = number ^ (key << 40) ^ 0x5bd1_e995;
    let mut bytes = Vec::with_capacity(length + 24);
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&key.to_le_bytes());
    while bytes.len() < length {
        bytes.extend_from_slice(&splitmix(&mut state).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

impl History {
    /// An empty history. A change is seen by all `grace` after its end. The store may hold one up for `held_up`.
    pub(crate) fn new(grace: Duration, held_up: Duration) -> Self {
        Self {
            grace,
            latest: LATEST_EFFECT + held_up,
            ..Self::default()
        }
    }

    /// A put of `length` bytes, or a removal, begins.
    pub(crate) fn begin(&mut self, key: u64, length: Option<usize>, replaces: bool) -> PutNumber {
        self.next += 1;
        let change = Change {
            begun: Instant::now(),
            outcome: Outcome::Running,
            length,
            replaces,
            took: Duration::ZERO,
        };
        let changes = &mut self.keys.entry(key).or_default().changes;
        changes.insert(self.next, change);
        self.next
    }

    pub(crate) fn end(&mut self, key: u64, number: PutNumber, outcome: Outcome) {
        let of_key = self.keys.entry(key).or_default();
        if let Some(change) = of_key.changes.get_mut(&number) {
            change.outcome = outcome;
            change.took = change.begun.elapsed();
        }
    }

    /// The keys of acknowledged puts, once nothing runs.
    pub(crate) fn stored(&self) -> Vec<u64> {
        let is_stored = |change: &Change| {
            let is_there = matches!(change.outcome, Outcome::Done(_) | Outcome::Present);
            change.length.is_some() && is_there
        };
        let keys = self.keys.iter();
        let stored = keys.filter(|(_, of_key)| of_key.changes.values().any(is_stored));
        stored.map(|(key, _)| *key).collect()
    }

    /// Whether somebody removed or replaced blocks of the key after `since`, or may have.
    pub(crate) fn may_have_left(&self, key: u64, since: Instant) -> bool {
        self.changes_of(key).any(|(_, change)| {
            let takes_none = matches!(change.outcome, Outcome::Done(_)) && !change.replaces;
            !takes_none && self.may_have_acted(change, since)
        })
    }

    /// Whether somebody put, removed or replaced blocks of the key after `since`, or may have.
    pub(crate) fn may_have_changed(&self, key: u64, since: Instant) -> bool {
        self.may_have_changed_beside(key, since, None)
    }

    /// The same, but for one change.
    pub(crate) fn may_have_changed_beside(
        &self,
        key: u64,
        since: Instant,
        known: Option<PutNumber>,
    ) -> bool {
        let mut others = self
            .changes_of(key)
            .filter(|(number, _)| known != Some(*number));
        others.any(|(_, change)| self.may_have_acted(change, since))
    }

    /// Whether a change of the key may have taken what was there at `since` and not at `until`. `None` while such a
    /// change runs. An earlier attempt of a removal that failed may have taken it.
    pub(crate) fn may_have_taken(&self, key: u64, since: Instant, until: Instant) -> Option<bool> {
        let changes = self.changes_of(key).map(|(_, change)| change);
        let early: Vec<&Change> = changes.filter(|change| change.begun <= until).collect();
        let runs = |change: &&Change| change.outcome == Outcome::Running;
        let may_have_removed = |change: &Change| {
            let has_failed = change.outcome == Outcome::Failed && change.length.is_none();
            has_failed && change.begun + change.took > since
        };
        let has_taken = |change: &&Change| {
            !runs(change) && (self.may_have_acted(change, since) || may_have_removed(change))
        };
        if early.iter().any(has_taken) {
            return Some(true);
        }
        (!early.iter().any(runs)).then_some(false)
    }

    /// All changes of a key.
    fn changes_of(&self, key: u64) -> impl Iterator<Item = (PutNumber, &Change)> {
        let of_key = self.keys.get(&key).into_iter();
        let changes = of_key.flat_map(|of_key| &of_key.changes);
        changes.map(|(number, change)| (*number, change))
    }

    /// Whether a change took effect after `since`, or may have. One that runs may.
    fn may_have_acted(&self, change: &Change, since: Instant) -> bool {
        match change.outcome {
            Outcome::Running => true,
            Outcome::Done(at) => at > since,
            Outcome::Unknown => self.may_be_late(change, since),
            // An earlier attempt may have had no answer, and its commit is done all the same.
            Outcome::Present => change.took > ONE_ATTEMPT && self.may_be_late(change, since),
            Outcome::Failed => false,
        }
    }

    /// Whether a change without an answer may have taken effect after `since`.
    fn may_be_late(&self, change: &Change, since: Instant) -> bool {
        change.begun + self.latest > since
    }

    /// Whether one who asks at `begun` may find a block of the key: some put may be there that no removal followed.
    pub(crate) fn may_be_there(&self, key: u64, begun: Instant) -> bool {
        let Some(of_key) = self.keys.get(&key) else {
            return false;
        };
        let changes = || of_key.changes.values();
        let is_removed = |effect: Instant| {
            let mut removals = changes().filter(|change| change.length.is_none());
            removals.any(|removal| removal.follows(effect, self.grace, begun))
        };
        changes().any(|put| {
            let is_put = put.length.is_some() && put.outcome != Outcome::Failed;
            is_put && !put.in_effect_by(self.latest).is_some_and(is_removed)
        })
    }

    /// Whether a removal of the key was answered, and no put of it may have taken effect since that removal began.
    pub(crate) fn is_removed(&self, key: u64) -> bool {
        let Some(of_key) = self.keys.get(&key) else {
            return false;
        };
        let changes = || of_key.changes.values();
        let is_done = |change: &&Change| {
            change.length.is_none() && matches!(change.outcome, Outcome::Done(_))
        };
        let last = changes().filter(is_done).map(|removal| removal.begun).max();
        last.is_some_and(|begun| {
            let mut puts = changes().filter(|change| change.length.is_some());
            puts.all(|put| self.is_over_by(put, begun))
        })
    }

    /// Whether a put took effect before `begun`, or never.
    fn is_over_by(&self, put: &Change, begun: Instant) -> bool {
        match put.outcome {
            Outcome::Running => false,
            Outcome::Failed => true,
            Outcome::Done(at) => at < begun,
            // A put that was answered at once has found a block.
            Outcome::Present if put.took <= ONE_ATTEMPT => true,
            Outcome::Present | Outcome::Unknown => put.begun + self.latest.max(put.took) < begun,
        }
    }

    /// Judges what a get saw, which `who` began at `begun`.
    pub(crate) fn see(
        &mut self,
        who: Process,
        key: u64,
        begun: Instant,
        bytes: &[u8],
        version: Version,
    ) -> Result<PutNumber, String> {
        let wrong =
            |what: String| Err(format!("{who} gets key {key} of version {version}: {what}"));
        let (Some(number), Some(named)) = (number_at(bytes, 0), number_at(bytes, 8)) else {
            return wrong(format!("{} bytes that nobody put", bytes.len()));
        };
        let latest = self.latest;
        let Some(of_key) = self.keys.get_mut(&key) else {
            return wrong("nobody ever put it".to_owned());
        };
        let Some(put) = of_key.changes.get(&number).copied() else {
            return wrong(format!("wrong bytes, of put {number} of key {named}"));
        };
        let length = put.length.unwrap_or(0);
        if bytes != bytes_of(key, number, length) {
            return wrong(format!(
                "wrong bytes, {} of them, where put {number} wrote {length}",
                bytes.len()
            ));
        }
        if put.outcome == Outcome::Failed {
            return wrong(format!("put {number}, which has failed, is visible"));
        }
        let first = *of_key.versions.entry(version.0).or_insert(number);
        if first != number {
            return wrong(format!("it names put {first} and put {number}"));
        }
        let Some(done) = put.in_effect_by(latest) else {
            return Ok(number);
        };
        for (later, change) in &of_key.changes {
            // A put that stores its bytes found no block of its key.
            if let Outcome::Done(seen) = change.outcome
                && change.follows(done, self.grace, begun)
            {
                return wrong(format!(
                    "put {number} is visible, {} ms after the end of {} {later}, which came after it",
                    (begun - seen).as_millis(),
                    if change.length.is_none() {
                        "removal"
                    } else {
                        "put"
                    },
                ));
            }
        }
        Ok(number)
    }
}

fn number_at(bytes: &[u8], at: usize) -> Option<u64> {
    let number = bytes.get(at..)?.first_chunk()?;
    Some(u64::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHO: Process = Process::Client(0);

    fn seen(history: &mut History, number: PutNumber, version: u64) -> Result<PutNumber, String> {
        let bytes = bytes_of(1, number, 100);
        history.see(WHO, 1, Instant::now(), &bytes, Version(version))
    }

    #[tokio::test(start_paused = true)]
    async fn a_replaced_put_may_be_seen_for_one_grace_and_not_longer() {
        let mut history = History::new(Duration::from_secs(1), Duration::ZERO);
        let first = history.begin(1, Some(100), false);
        history.end(1, first, Outcome::Done(Instant::now()));
        tokio::time::advance(Duration::from_millis(5)).await;
        let second = history.begin(1, Some(100), true);
        history.end(1, second, Outcome::Done(Instant::now()));
        tokio::time::advance(Duration::from_millis(900)).await;
        assert_eq!(seen(&mut history, first, 1), Ok(first));
        tokio::time::advance(Duration::from_millis(200)).await;
        assert!(seen(&mut history, first, 1).unwrap_err().contains("of put"));
        assert_eq!(seen(&mut history, second, 2), Ok(second));
        assert!(
            seen(&mut history, second, 1)
                .unwrap_err()
                .contains("it names")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_put_of_unknown_outcome_is_over_some_time_after_its_begin() {
        let mut history = History::new(Duration::from_secs(1), Duration::ZERO);
        let late = history.begin(1, Some(100), false);
        history.end(1, late, Outcome::Unknown);
        let early = history.begin(1, None, true);
        history.end(1, early, Outcome::Done(Instant::now()));
        tokio::time::advance(LATEST_EFFECT + Duration::from_secs(2)).await;
        assert_eq!(seen(&mut history, late, 1), Ok(late));
        assert!(history.may_be_there(1, Instant::now()));

        let removal = history.begin(1, None, true);
        history.end(1, removal, Outcome::Done(Instant::now()));
        tokio::time::advance(Duration::from_secs(2)).await;
        let wrong = seen(&mut history, late, 1).unwrap_err();
        assert!(wrong.contains("after the end of removal"), "{wrong}");
        assert!(!history.may_be_there(1, Instant::now()));
        assert!(!history.may_be_there(2, Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_removed_key_is_one_that_no_put_may_have_brought_back() {
        let mut history = History::new(Duration::ZERO, Duration::ZERO);
        let moment = || tokio::time::advance(Duration::from_millis(5));
        let put = history.begin(1, Some(100), false);
        history.end(1, put, Outcome::Done(Instant::now()));
        moment().await;
        assert!(!history.is_removed(1));
        let removal = history.begin(1, None, true);
        assert!(!history.is_removed(1), "it runs");
        history.end(1, removal, Outcome::Done(Instant::now()));
        assert!(history.is_removed(1) && !history.is_removed(2));
        moment().await;
        let again = history.begin(1, Some(100), false);
        assert!(!history.is_removed(1), "a put runs");
        history.end(1, again, Outcome::Failed);
        assert!(history.is_removed(1));
        let late = history.begin(1, Some(100), false);
        history.end(1, late, Outcome::Unknown);
        moment().await;
        for expected in [false, true] {
            let removal = history.begin(1, None, true);
            history.end(1, removal, Outcome::Done(Instant::now()));
            assert_eq!(history.is_removed(1), expected);
            tokio::time::advance(LATEST_EFFECT).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_puts_and_strange_bytes_are_noticed() {
        let mut history = History::new(Duration::ZERO, Duration::ZERO);
        let put = history.begin(1, Some(100), false);
        history.end(1, put, Outcome::Failed);
        assert!(
            seen(&mut history, put, 1)
                .unwrap_err()
                .contains("has failed")
        );
        assert!(
            seen(&mut history, put + 1, 1)
                .unwrap_err()
                .contains("wrong bytes")
        );
        let mut bytes = bytes_of(1, put, 100);
        bytes[50] ^= 1;
        let wrong = history.see(WHO, 1, Instant::now(), &bytes, Version(1));
        assert!(wrong.unwrap_err().contains("wrong bytes"));
    }
}
