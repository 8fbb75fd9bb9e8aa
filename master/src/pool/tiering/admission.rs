//! Admission: which blocks a medium takes when its writes have a budget.
//!
//! A flash device wears with each write, so a medium may have a budget of bytes per day. Unused budget
//! accumulates for an hour, and at least up to half of a zone. While a quarter of a zone is left, every block is
//! admitted. Below that, a block is admitted if its parent has a copy or was admitted, because a chain is read
//! from its start. Below an eighth of a zone, only two kinds of blocks are admitted: hard-pinned blocks, and
//! blocks that were put again after the pool had lost them. The latter are used more than once. Random admission
//! would break chains and gain almost nothing. A hard-pinned block that is not admitted waits for the budget.
//! Others get no copy.
//!
//! A block that is larger than the remaining budget may overdraw it. The next blocks then wait until the debt
//! is repaid.

use super::super::Pool;
use super::lines::Waiting;
use super::transfers::Moved;
use crate::clock::BootInstant;
use crate::tier::Medium;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, Length, SegmentId, medium};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

const DAY: f64 = 24.0 * 3600.0;
/// The share of a zone that counts as a full budget.
const FULL: f64 = 0.5;
/// The seconds for which unused budget accumulates beyond a full budget. Any further unused budget is lost.
const COLLECTED: f64 = 3600.0;
/// The number of keys in each of two generations. A key takes 16 bytes.
const GENERATION: usize = 1 << 20;

/// The budgets of all media, and the keys of lost blocks.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// Whether any medium has a budget. If none has, no keys are kept.
    is_on: AtomicBool,
    budgets: Mutex<HashMap<SegmentId, Budget>>,
    lost: Mutex<Keys>,
    /// The keys of admitted blocks. Their copies are not in the tier until their stores end.
    admitted: Mutex<Keys>,
}

/// The bytes that may be written now, and the rate at which they grow.
#[derive(Debug)]
struct Budget {
    bytes_per_second: f64,
    /// The bytes of a full budget.
    full: f64,
    level: f64,
    at: BootInstant,
}

impl Budget {
    fn refill(&mut self, now: BootInstant) {
        let passed = now.since(self.at).as_secs_f64();
        let most = self.full.max(COLLECTED * self.bytes_per_second);
        self.level = (self.level + passed * self.bytes_per_second).min(most);
        self.at = now;
    }
}

/// Hashes of keys in two generations: the latest keys, and older ones.
#[derive(Debug, Default)]
struct Keys {
    hasher: RandomState,
    young: HashSet<u64>,
    old: HashSet<u64>,
}

impl Keys {
    fn hash(&self, namespace: NamespaceId, key: &Key) -> u64 {
        self.hasher.hash_one((namespace, key))
    }

    fn add(&mut self, namespace: NamespaceId, key: &Key) {
        if self.young.len() >= GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(self.hash(namespace, key));
    }

    fn has(&self, namespace: NamespaceId, key: &Key) -> bool {
        let hash = self.hash(namespace, key);
        self.young.contains(&hash) || self.old.contains(&hash)
    }

    fn take(&mut self, namespace: NamespaceId, key: &Key) -> bool {
        let hash = self.hash(namespace, key);
        self.young.remove(&hash) || self.old.remove(&hash)
    }
}

impl Admission {
    /// Sets a medium's budget in bytes per day; zero for none. The accumulated budget stays.
    pub(super) fn set_budget(&self, medium: &Medium, bytes_per_day: u64, now: BootInstant) {
        let mut budgets = self.budgets.lock();
        if bytes_per_day == 0 {
            budgets.remove(&medium.id);
        } else {
            #[allow(clippy::cast_precision_loss, reason = "a rate need not be exact")]
            let (per_day, full) = (bytes_per_day as f64, medium.zone.0 as f64 * FULL);
            let budget = budgets.entry(medium.id).or_insert(Budget {
                bytes_per_second: 0.0,
                full,
                level: 0.0,
                at: now,
            });
            budget.refill(now);
            budget.bytes_per_second = per_day / DAY;
            // A lower rate collects less.
            budget.refill(now);
        }
        self.is_on.store(!budgets.is_empty(), Ordering::Release);
    }

    /// Records a block that left the pool.
    pub(super) fn lost(&self, namespace: NamespaceId, key: &Key) {
        if self.is_on.load(Ordering::Acquire) {
            self.lost.lock().add(namespace, key);
        }
    }

    /// Whether a block that is put now was lost before.
    pub(super) fn was_lost(&self, namespace: NamespaceId, key: &Key) -> bool {
        self.is_on.load(Ordering::Acquire) && self.lost.lock().take(namespace, key)
    }

    /// The parent of a waiting block, if admission will need it.
    pub(super) fn parent(&self, parent: Option<&Key>) -> Option<Box<Key>> {
        let is_on = self.is_on.load(Ordering::Acquire);
        parent.filter(|_| is_on).cloned().map(Box::new)
    }

    /// Records a block whose store was ordered.
    pub(super) fn admitted(&self, namespace: NamespaceId, key: &Key) {
        if self.is_on.load(Ordering::Acquire) {
            self.admitted.lock().add(namespace, key);
        }
    }

    /// Subtracts written bytes from a medium's budget.
    pub(super) fn wrote(&self, medium: SegmentId, length: Length) {
        if let Some(budget) = self.budgets.lock().get_mut(&medium) {
            budget.level -= footprint(length);
        }
    }

    /// The accumulated budget of a medium, in proportion to a full budget. `None` without a budget.
    fn left(&self, medium: SegmentId, now: BootInstant) -> Option<f64> {
        let mut budgets = self.budgets.lock();
        let budget = budgets.get_mut(&medium)?;
        budget.refill(now);
        Some(budget.level / budget.full)
    }
}

#[allow(clippy::cast_precision_loss, reason = "a budget need not be exact")]
fn footprint(length: Length) -> f64 {
    medium::footprint(length).map_or(0.0, |bytes| bytes.0 as f64)
}

impl Pool {
    /// Whether a medium's budget is not used up.
    pub(super) fn may_write(&self, medium: &Medium) -> bool {
        let left = self.tiering.admission.left(medium.id, self.now());
        left.is_none_or(|left| left > 0.0)
    }

    /// Whether a block at the head of its queue may be written.
    pub(super) fn is_admitted(&self, medium: &Medium, waiting: &Waiting, block: &Moved) -> bool {
        let Some(left) = self.tiering.admission.left(medium.id, self.now()) else {
            return true;
        };
        let follows = || {
            let parent = waiting.parent.as_deref();
            parent.is_some_and(|parent| {
                let admitted = &self.tiering.admission.admitted;
                admitted.lock().has(block.namespace, parent)
                    || self.has_copy(block.namespace, parent.as_ref())
            })
        };
        let is_first = waiting.is_pinned || waiting.was_lost;
        left >= 0.5 || left > 0.0 && is_first || left >= 0.25 && follows()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn unused_budget_of_an_hour_is_kept() {
        let start = BootInstant(0);
        let mut budget = Budget {
            bytes_per_second: 10.0,
            full: 100.0,
            level: 0.0,
            at: start,
        };
        let minutes = |minutes: u64| start.after(Duration::from_secs(60 * minutes));
        for (at, level) in [(1, 600.0), (30, 18_000.0), (60, 36_000.0), (600, 36_000.0)] {
            budget.refill(minutes(at));
            assert!(
                (budget.level - level).abs() < 1.0,
                "{} after {at} min",
                budget.level
            );
        }
        // At a low rate a full budget is more than that of an hour.
        budget.bytes_per_second = 0.01;
        budget.refill(minutes(601));
        assert!(
            (budget.level - budget.full).abs() < 0.01,
            "{}",
            budget.level
        );
    }
}
