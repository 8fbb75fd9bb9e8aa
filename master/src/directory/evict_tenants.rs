//! Eviction when some namespaces have settings.
//!
//! The next victim is the oldest block of the first order that may give one:
//!
//! 1. namespaces above a soft quota come first, then the others;
//! 2. within each of these groups, the lowest priority comes first;
//! 3. within a priority, roots come first, then ordinary blocks, then soft-pinned blocks; the oldest first.
//!
//! A namespace at its guaranteed share gives no block. All namespaces without settings form one order with the
//! default priority.
//!
//! A heap holds the next victim of every order and stripe. Each step of a round builds the heap once, and then
//! pays for each evicted block only. ADR 0048 says why orders are separate.

use super::Directory;
use super::block::{BlockRef, Removed, Tick};
use super::evict::{Limits, Step};
use super::orders::COMMON;
use super::queues::Rank;
use crate::accounts::{Account, Accounts, Item};
use crate::clock::BootInstant;
use crate::placement::Extents;
use crate::tenant::Tenant;
use kvpool_types::ids::NamespaceId;
use kvpool_types::tenancy::DEFAULT_PRIORITY;
use kvpool_types::{Length, Setting};
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// The namespaces whose blocks may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// All namespaces, in the order of this module.
    Anyone,
    /// The tenant with this order, for its own puts. Its guaranteed share does not protect it.
    Own(u32),
}

/// The bytes and blocks that an eviction must free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Goal {
    /// The bytes of extents.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

/// How early the blocks of an order are evicted. Lower values go first.
pub(super) type Precedence = (bool, u64);

/// The next victim of one order and stripe, as it was when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    precedence: Precedence,
    rank: u8,
    tick: u64,
    stripe: usize,
    order: u32,
}

/// The tenants of one step, and the candidates.
struct Choice<'d> {
    directory: &'d Directory,
    tenants: Vec<(NamespaceId, Arc<Tenant>)>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl<'d> Choice<'d> {
    fn new(directory: &'d Directory, whose: Whose) -> Self {
        let mut choice = Self {
            directory,
            tenants: directory.accounts().tenants(),
            heap: BinaryHeap::new(),
        };
        for stripe in 0..directory.stripes.len() {
            match whose {
                Whose::Anyone => choice.look(stripe, None),
                Whose::Own(order) => choice.look(stripe, Some(order)),
            }
        }
        choice
    }

    fn account(&self, order: u32) -> Option<(&Account, &Tenant)> {
        let (id, tenant) = self.tenants.get((order as usize).checked_sub(1)?)?;
        Some((self.directory.accounts().of(*id), tenant))
    }

    fn precedence(&self, order: u32) -> Precedence {
        match self.account(order) {
            Some((account, tenant)) => precedence(account, tenant),
            None => OF_OTHERS,
        }
    }

    /// Reads the next victims of a stripe into the heap, of every order or of one.
    fn look(&mut self, stripe: usize, only: Option<u32>) {
        let mut found = smallvec::SmallVec::<[Candidate; 8]>::new();
        {
            let locked = self.directory.cell(stripe).lock_read();
            let orders = match only {
                Some(order) => order..order.saturating_add(1),
                None => COMMON..locked.queues.count(),
            };
            for order in orders {
                for rank in Rank::ALL {
                    if let Some((tick, _)) = locked.queues.first_of(order, rank) {
                        found.push(Candidate {
                            precedence: (false, 0),
                            rank: rank as u8,
                            tick,
                            stripe,
                            order,
                        });
                    }
                }
            }
        }
        for mut candidate in found {
            candidate.precedence = self.precedence(candidate.order);
            self.heap.push(Reverse(candidate));
        }
    }

    /// The first candidate that has not changed since it was read.
    fn next(&mut self) -> Option<Candidate> {
        loop {
            let Reverse(candidate) = self.heap.pop()?;
            let rank = candidate.rank();
            let first = {
                let locked = self.directory.cell(candidate.stripe).lock_read();
                locked.queues.first_of(candidate.order, rank)
            };
            let Some((tick, _)) = first else { continue };
            let now = Candidate {
                tick,
                precedence: self.precedence(candidate.order),
                ..candidate
            };
            if now == candidate {
                // A stripe that was read several times left the same candidate each time.
                while self.heap.peek() == Some(&Reverse(candidate)) {
                    self.heap.pop();
                }
                return Some(candidate);
            }
            self.heap.push(Reverse(now));
        }
    }
}

impl Candidate {
    fn rank(&self) -> Rank {
        let all = Rank::ALL.into_iter();
        let mut same = all.filter(|rank| *rank as u8 == self.rank);
        same.next().unwrap_or(Rank::Ordinary)
    }
}

/// The precedence of namespaces without settings.
const OF_OTHERS: Precedence = (true, DEFAULT_PRIORITY);

fn precedence(account: &Account, tenant: &Tenant) -> Precedence {
    (!is_above_soft(account, tenant), tenant.priority())
}

/// How early the blocks of a namespace are evicted.
pub(super) fn precedence_of(accounts: &Accounts, id: NamespaceId) -> Precedence {
    let tenant = accounts.tenant(id);
    tenant.map_or(OF_OTHERS, |tenant| precedence(accounts.of(id), tenant))
}

fn is_above_soft(account: &Account, tenant: &Tenant) -> bool {
    let is_above = |setting, used| tenant.get(setting).is_some_and(|soft| used > soft);
    let bytes = account.get(Item::Resident) + account.get(Item::Reserved);
    is_above(Setting::MemorySoft, bytes)
        || is_above(
            Setting::BlocksSoft,
            account.get(Item::Blocks) + account.get(Item::Puts),
        )
}

/// Whether a namespace would fall below its guaranteed share without `bytes` of its blocks.
pub(super) fn is_guaranteed(accounts: &Accounts, id: NamespaceId, bytes: u64) -> bool {
    let share = accounts
        .tenant(id)
        .and_then(|tenant| tenant.get(Setting::Guaranteed));
    share.is_some_and(|share| accounts.of(id).get(Item::Resident) < share.saturating_add(bytes))
}

impl Directory {
    /// [`Directory::evict_before`] when some namespaces have settings.
    pub(super) fn evict_in_order(
        &self,
        goal: Goal,
        whose: Whose,
        limits: &Limits<'_>,
    ) -> Vec<Removed> {
        self.wake(limits.now);
        let mut evicted = Vec::new();
        let mut freed = Goal::default();
        let mut choice = Choice::new(self, whose);
        while freed.bytes < goal.bytes || freed.blocks < goal.blocks {
            let Some(next) = choice.next() else { break };
            let only = (next.order != COMMON || whose != Whose::Anyone).then_some(next.order);
            let is_later = Cell::new(false);
            let keeps = |block: &BlockRef<'_>| {
                let keeps_share = whose == Whose::Anyone
                    && next.order != COMMON
                    && is_guaranteed(self.accounts(), block.namespace(), footprint(block));
                // A block that its namespace's share keeps delays no other block.
                is_later.set(!keeps_share && limits.is_later(block));
                keeps_share || is_later.get()
            };
            let (step, touched) =
                self.evict_first(next.stripe, next.order, next.rank(), limits, &keeps);
            match step {
                Step::Kept if is_later.get() && next.tick >= limits.before.0 => break,
                // The order has no further victim. Its remaining candidates are skipped.
                Step::Kept if !is_later.get() => continue,
                // The candidate has left or was used. The stripe has another one.
                Step::Kept | Step::Aside => {}
                Step::Evicted(removed) => {
                    freed.bytes += removed.footprint_on(limits.gives_room);
                    freed.blocks += 1;
                    evicted.push(removed);
                }
            }
            choice.look(next.stripe, only.or(Some(COMMON)));
            for block in touched {
                let stripe = self.common.stripe_of(block);
                if stripe != next.stripe {
                    choice.look(stripe, Some(next.order));
                }
            }
        }
        evicted
    }

    /// Evicts blocks of one tenant whose last use is before a tick, until they reach `goal`. This serves the
    /// tenant's own puts.
    pub fn evict_own(
        &self,
        order: u32,
        before: Tick,
        goal: Goal,
        now: BootInstant,
    ) -> Vec<Removed> {
        let limits = Limits {
            now,
            before,
            gives_room: &|_| true,
        };
        self.evict_in_order(goal, Whose::Own(order), &limits)
    }

    /// The next victim when some namespaces have settings: the length of one extent, and the tick.
    pub(super) fn first_in_order(&self) -> Option<(u64, u64)> {
        let mut choice = Choice::new(self, Whose::Anyone);
        loop {
            let next = choice.next()?;
            let stripe = self.cell(next.stripe).lock_read();
            let (tick, slot) = stripe.queues.first_of(next.order, next.rank())?;
            let block = BlockRef {
                common: &self.common,
                stripe: &stripe,
                slot,
            };
            let length = Extents::rounded(Length(block.length().0)).0;
            let kept = next.order != COMMON
                && is_guaranteed(self.accounts(), block.namespace(), footprint(&block));
            if !kept {
                return Some((length, tick));
            }
        }
    }

    /// Moves the blocks of a namespace to its order, after it got its first settings. If the namespace has
    /// any block, this reads every slot. Returns the number of slots that were read.
    pub fn reorder_of(&self, namespace: NamespaceId) -> u64 {
        match self.accounts().of(namespace).get(Item::Blocks) {
            0 => 0,
            _ => self.reorder(),
        }
    }

    /// Moves blocks to the orders of their namespaces, after namespaces got their first settings.
    /// Returns the number of slots that were read.
    pub fn reorder(&self) -> u64 {
        let mut read = 0;
        for cell in &self.stripes {
            let mut from = 0;
            loop {
                let mut stripe = cell.lock();
                let end = stripe.entries.high().min(from + REORDER_STEP);
                if from >= end {
                    break;
                }
                for slot in from..end {
                    if stripe.entries.get(slot).is_some() {
                        stripe.correct_order(slot, &self.common);
                    }
                }
                read += u64::from(end - from);
                from = end;
            }
        }
        read
    }
}

/// The slots that one lock of a stripe covers while blocks change their order.
const REORDER_STEP: u32 = 512;

fn footprint(block: &BlockRef<'_>) -> u64 {
    Extents::rounded(block.length()).0 * block.replicas().len() as u64
}

#[cfg(test)]
mod tests {
    use super::super::{Options, Policy};
    use super::*;
    use crate::directory::NewBlock;
    use crate::replica::{ExtentIndex, Replica};
    use kvpool_types::{Checksum, Key, NamespaceSettings, Offset, SegmentId, Version};

    const TENANT: NamespaceId = NamespaceId(3);

    fn directory(blocks: u64, namespace: NamespaceId) -> Directory {
        let options = Options {
            stripes: 4,
            policy: Policy::Prefix,
            ..Options::new(7)
        };
        let directory = Directory::new(options, BootInstant(1));
        for n in 0..blocks {
            let block = NewBlock {
                namespace,
                key: Key::parse(&format!("key-{n}")).unwrap(),
                version: Version(n + 1),
                length: Length(64),
                checksum: Checksum(n),
                replicas: smallvec::smallvec![Replica {
                    segment: SegmentId(1),
                    extent: ExtentIndex(u32::try_from(n).unwrap()),
                    offset: Offset(n * 64),
                }],
                parent: None,
                soft_pin_until: None,
                hard_pin: false,
                tick: directory.ticks(1).of(0),
                leased_until: None,
            };
            directory.publish([block]);
        }
        directory
    }

    /// Each eviction looks at its stripe again. The candidates that a look leaves in the heap must
    /// not accumulate: each eviction would then pay for all evictions before it.
    #[test]
    fn a_stripe_that_is_looked_at_often_leaves_one_candidate() {
        let directory = directory(100, TENANT);
        let settings = NamespaceSettings::default().with(Setting::Priority, 3);
        directory.accounts().set(TENANT, &settings);
        directory.reorder();
        let mut choice = Choice::new(&directory, Whose::Anyone);
        let once = choice.heap.len();
        for _ in 0..1000 {
            (0..directory.stripes.len()).for_each(|stripe| choice.look(stripe, None));
        }
        for _ in 0..directory.stripes.len() {
            assert!(choice.next().is_some());
        }
        assert!(choice.heap.len() < once, "{} are left", choice.heap.len());
    }

    #[test]
    fn only_a_namespace_with_blocks_is_put_in_order() {
        let directory = directory(100, TENANT);
        let settings = NamespaceSettings::default().with(Setting::Priority, 3);
        let accounts = directory.accounts();
        assert!(accounts.set(NamespaceId(8), &settings));
        assert_eq!(directory.reorder_of(NamespaceId(8)), 0, "it has no block");
        assert!(accounts.set(TENANT, &settings));
        assert_eq!(directory.reorder_of(TENANT), 100);
        let goal = Goal {
            bytes: 64,
            blocks: 1,
        };
        let order = accounts.tenant(TENANT).unwrap().order;
        let evicted = directory.evict_own(order, Tick::MAX, goal, BootInstant(1));
        assert_eq!(evicted.len(), 1, "its blocks are in its order");
    }
}
