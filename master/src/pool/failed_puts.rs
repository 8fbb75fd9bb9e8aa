//! Counts the puts that have finally failed.
//!
//! A client retries a refused block until the put's timeout. No call reports that the client gave
//! up. So a retryable refusal counts as a failure when no put has asked for its key for [`QUIET`].
//! Any other refusal counts as a failure at once.

use super::Pool;
use crate::clock::BootInstant;
use crate::metrics::is_refusal;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{Code, KeyRef};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The time without an attempt after which a put has failed. It is twenty times the longest pause of a client between
/// two attempts.
const QUIET: Duration = Duration::from_secs(5);
/// The least time between two scans of all refusals.
const LOOK: Duration = Duration::from_secs(1);
/// The most refusals kept: about 3 MiB. Further ones count as failures at once.
const MOST: usize = 1 << 16;

/// The retryable refusals.
#[derive(Debug, Default)]
pub(super) struct FailedPuts {
    refusals: Mutex<Refusals>,
    /// The number of refusals. If it is 0, the scan takes no lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Refusals {
    /// The refusals by the hash of namespace and key. Two keys with one hash count as one.
    by_hash: HashMap<u64, Refusal>,
    hasher: RandomState,
    looked: BootInstant,
}

#[derive(Clone, Copy, Debug)]
struct Refusal {
    code: Code,
    at: BootInstant,
}

impl Refusals {
    fn hash(&self, namespace: NamespaceId, key: KeyRef<'_>) -> u64 {
        self.hasher.hash_one((namespace, key))
    }
}

impl FailedPuts {
    /// Forgets the refusals of these keys, because a put asks for them.
    fn begin<'k>(&self, namespace: NamespaceId, keys: impl Iterator<Item = KeyRef<'k>>) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut refusals = self.refusals.lock();
        for key in keys {
            let hash = refusals.hash(namespace, key);
            refusals.by_hash.remove(&hash);
        }
        self.count.store(refusals.by_hash.len(), Ordering::Release);
    }

    /// Records the refusals among the codes of these keys. Returns the codes that count as failures
    /// at once.
    fn note<'k>(
        &self,
        namespace: NamespaceId,
        answered: impl Iterator<Item = (KeyRef<'k>, Code)>,
        now: BootInstant,
    ) -> Vec<Code> {
        let mut refused = answered.filter(|(_, code)| is_refusal(*code)).peekable();
        let mut failed = Vec::new();
        if refused.peek().is_none() {
            return failed;
        }
        let mut refusals = self.refusals.lock();
        for (key, code) in refused {
            let hash = refusals.hash(namespace, key);
            let has_room = refusals.by_hash.len() < MOST || refusals.by_hash.contains_key(&hash);
            if code.is_retryable() && has_room {
                let refusal = Refusal { code, at: now };
                refusals.by_hash.insert(hash, refusal);
            } else {
                failed.push(code);
            }
        }
        self.count.store(refusals.by_hash.len(), Ordering::Release);
        failed
    }

    /// Removes the refusals whose keys no put has asked for in [`QUIET`], and returns their codes.
    fn take_failed(&self, now: BootInstant) -> Vec<Code> {
        let mut failed = Vec::new();
        if self.count.load(Ordering::Acquire) == 0 {
            return failed;
        }
        let mut refusals = self.refusals.lock();
        if now.since(refusals.looked) < LOOK {
            return failed;
        }
        refusals.looked = now;
        refusals.by_hash.retain(|_, refusal| {
            let is_open = now.since(refusal.at) < QUIET;
            if !is_open {
                failed.push(refusal.code);
            }
            is_open
        });
        self.count.store(refusals.by_hash.len(), Ordering::Release);
        failed
    }
}

impl Pool {
    /// Records that a put asks for room for these keys. The put may have asked before.
    pub(crate) fn put_asks(&self, namespace: NamespaceId, keys: &KeyBatch<'_>) {
        self.failed_puts.begin(namespace, keys.iter());
    }

    /// Records the answer to a put, with one code per key.
    pub(crate) fn put_answered(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        codes: impl Iterator<Item = Code>,
    ) {
        let answered = keys.iter().zip(codes);
        let failed = self.failed_puts.note(namespace, answered, self.now());
        self.metrics.puts_failed(failed.into_iter());
    }

    /// Counts the puts that have failed since the last scan.
    pub(super) fn count_failed_puts(&self, now: BootInstant) {
        let failed = self.failed_puts.take_failed(now);
        self.metrics.puts_failed(failed.into_iter());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Key;

    const SPACE: NamespaceId = NamespaceId(3);

    fn at(millis: u64) -> BootInstant {
        BootInstant(1_000_000 + millis)
    }

    fn begin(puts: &FailedPuts, key: &Key) {
        puts.begin(SPACE, std::iter::once(key.as_ref()));
    }

    fn note(puts: &FailedPuts, key: &Key, code: Code, millis: u64) -> Vec<Code> {
        puts.note(SPACE, std::iter::once((key.as_ref(), code)), at(millis))
    }

    fn keys<const COUNT: usize>(names: [&str; COUNT]) -> [Key; COUNT] {
        names.map(|name| Key::parse(name).unwrap())
    }

    #[test]
    fn a_block_that_is_refused_many_times_fails_once_and_only_when_its_client_gave_up() {
        let puts = FailedPuts::default();
        let [fails, succeeds] = keys(["fails", "succeeds"]);
        for attempt in 0..40 {
            let now = attempt * 250;
            for key in [&fails, &succeeds] {
                begin(&puts, key);
                assert_eq!(note(&puts, key, Code::Full, now), []);
            }
            assert_eq!(puts.take_failed(at(now)), [], "they are tried again");
        }
        begin(&puts, &succeeds);
        assert_eq!(note(&puts, &succeeds, Code::Ok, 10_000), []);
        assert_eq!(puts.take_failed(at(60_000)), [Code::Full]);
        assert_eq!(puts.take_failed(at(120_000)), []);
        assert_eq!(puts.count.load(Ordering::Acquire), 0);
    }

    /// The master may hold an attempt for longer than the quiet time.
    #[test]
    fn a_put_that_waits_in_the_master_has_not_failed() {
        let puts = FailedPuts::default();
        let [key] = keys(["key"]);
        note(&puts, &key, Code::NoNodes, 0);
        begin(&puts, &key);
        assert_eq!(puts.take_failed(at(60_000)), []);
        note(&puts, &key, Code::Full, 60_000);
        assert_eq!(puts.take_failed(at(70_000)), [Code::Full]);
    }

    #[test]
    fn a_refusal_for_good_is_a_failure_at_once_and_a_present_block_is_none() {
        let puts = FailedPuts::default();
        let [key] = keys(["key"]);
        assert_eq!(note(&puts, &key, Code::OverQuota, 0), [Code::OverQuota]);
        assert_eq!(note(&puts, &key, Code::Exists, 0), []);
        assert_eq!(puts.take_failed(at(60_000)), []);
    }

    #[test]
    fn the_refusals_that_are_kept_are_bounded() {
        let puts = FailedPuts::default();
        let many: Vec<Key> = (0..MOST)
            .map(|n| Key::parse(&n.to_string()).unwrap())
            .collect();
        let full = many.iter().map(|key| (key.as_ref(), Code::Full));
        assert_eq!(puts.note(SPACE, full, at(0)), []);
        let [known, further] = keys(["0", "further"]);
        assert_eq!(note(&puts, &known, Code::NoNodes, 1), []);
        assert_eq!(note(&puts, &further, Code::Full, 1), [Code::Full]);
        assert_eq!(puts.take_failed(at(60_000)).len(), MOST);
    }
}
