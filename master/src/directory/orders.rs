//! The eviction orders of one stripe: one for all namespaces without settings, and one for each
//! tenant.
//!
//! A block belongs to one order, which its links name. Without tenants only the common order exists.

use super::entries::Entries;
use super::entry::QueueState;
use super::queues::{Queues, Rank};
use std::collections::BTreeSet;

/// The order of the namespaces without settings.
pub(super) const COMMON: u32 = 0;

/// The queues of one stripe, by order.
#[derive(Debug, Default)]
pub(super) struct Orders {
    common: Queues,
    /// The queues of order 1 and later ones. They appear with the stripe's first block of an order.
    tenants: Vec<Queues>,
    /// The next timer of each tenant's order, with the order. The stripe's gauges show the first timer at
    /// every unlock, without a search over all orders.
    timers: BTreeSet<(u64, u32)>,
}

impl Orders {
    /// Changes the queues of a block's order.
    #[inline]
    fn change(
        &mut self,
        entries: &mut Entries,
        slot: u32,
        f: impl FnOnce(&mut Queues, &mut Entries),
    ) {
        match entries.links(slot).order {
            COMMON => f(&mut self.common, entries),
            order => self.change_tenant(order, |queues| f(queues, entries)),
        }
    }

    #[cold]
    fn change_tenant<T>(&mut self, order: u32, f: impl FnOnce(&mut Queues) -> T) -> T {
        let at = order as usize - 1;
        if self.tenants.len() <= at {
            self.tenants.resize_with(at + 1, Queues::default);
        }
        let queues = self.tenants.get_mut(at).expect("invariant: just grown");
        let before = queues.next_timer();
        let outcome = f(queues);
        let after = queues.next_timer();
        if before != after {
            if let Some(until) = before {
                self.timers.remove(&(until, order));
            }
            self.timers.extend(after.map(|until| (until, order)));
        }
        outcome
    }

    fn order(&self, order: u32) -> Option<&Queues> {
        match order {
            COMMON => Some(&self.common),
            order => self.tenants.get(order as usize - 1),
        }
    }

    /// Every order of this stripe.
    fn all(&self) -> impl Iterator<Item = &Queues> {
        std::iter::once(&self.common).chain(&self.tenants)
    }

    /// The number of orders, with the common one.
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.tenants.len() + 1).unwrap_or(u32::MAX)
    }

    /// See [`Queues::put`].
    pub(super) fn put(&mut self, entries: &mut Entries, slot: u32, soft_until: Option<u64>) {
        self.change(entries, slot, |queues, entries| {
            queues.put(entries, slot, soft_until)
        });
    }

    /// See [`Queues::put_frontier`].
    pub(super) fn put_frontier(&mut self, entries: &mut Entries, slot: u32) {
        self.change(entries, slot, |queues, entries| {
            queues.put_frontier(entries, slot)
        });
    }

    /// See [`Queues::park`].
    pub(super) fn park(&mut self, entries: &mut Entries, slot: u32, until: u64) {
        self.change(entries, slot, |queues, entries| {
            queues.park(entries, slot, until)
        });
    }

    /// See [`Queues::set_aside`].
    pub(super) fn set_aside(&mut self, entries: &mut Entries, slot: u32, group: u32) {
        self.change(entries, slot, |queues, entries| {
            queues.set_aside(entries, slot, group)
        });
    }

    /// See [`Queues::first_aside`]. Searches every order.
    pub(super) fn first_aside(&self, group: u32) -> Option<u32> {
        self.all().find_map(|queues| queues.first_aside(group))
    }

    /// See [`Queues::is_aside`]. Searches every order.
    pub(super) fn is_aside(&self, slot: u32) -> bool {
        self.all().any(|queues| queues.is_aside(slot))
    }

    /// See [`Queues::take`].
    #[inline]
    pub(super) fn take(&mut self, entries: &mut Entries, slot: u32) {
        self.change(entries, slot, |queues, entries| queues.take(entries, slot));
    }

    /// Moves a block to another order. It keeps its pins, its parent and its children.
    pub(super) fn change_order(
        &mut self,
        entries: &mut Entries,
        slot: u32,
        order: u32,
        soft_until: Option<u64>,
    ) {
        let state = entries.at(slot).queue_state();
        self.take(entries, slot);
        entries.links_mut(slot).order = order;
        match state {
            QueueState::Inner => {}
            QueueState::RootWithChildren => self.put_frontier(entries, slot),
            QueueState::Listed
            | QueueState::Stray
            | QueueState::Root
            | QueueState::Soft
            | QueueState::Parked
            | QueueState::Fixed => self.put(entries, slot, soft_until),
        }
    }

    /// The next victim of a rank of the common order, with its tick.
    #[inline]
    pub(super) fn first(&self, rank: Rank) -> Option<(u64, u32)> {
        self.common.first(rank)
    }

    /// The next victim of a rank of an order, with its tick.
    pub(super) fn first_of(&self, order: u32, rank: Rank) -> Option<(u64, u32)> {
        self.order(order)?.first(rank)
    }

    /// The next victims of a rank, one of each order, with their ticks.
    pub(super) fn firsts(&self, rank: Rank) -> impl Iterator<Item = (u64, u32)> {
        self.all().filter_map(move |queues| queues.first(rank))
    }

    /// See [`Queues::next_timer`].
    pub(super) fn next_timer(&self) -> Option<u64> {
        let first = self.timers.first().map(|(until, _)| *until);
        self.common.next_timer().into_iter().chain(first).min()
    }

    /// See [`Queues::pop_timer`].
    pub(super) fn pop_timer(&mut self, now: u64) -> Option<u32> {
        if let Some(slot) = self.common.pop_timer(now) {
            return Some(slot);
        }
        let (_, order) = self.timers.first().filter(|(until, _)| *until <= now)?;
        let order = *order;
        self.change_tenant(order, |queues| queues.pop_timer(now))
    }

    /// See [`Queues::memory_bytes`].
    pub(super) fn memory_bytes(&self) -> u64 {
        let own = self.tenants.capacity() * size_of::<Queues>() + self.timers.len() * 24;
        self.all().map(Queues::memory_bytes).sum::<u64>() + own as u64
    }

    /// See [`Queues::move_listed`].
    #[inline]
    pub(super) fn move_listed(&mut self, entries: &mut Entries, slot: u32, tick: u64) {
        self.change(entries, slot, |queues, entries| {
            queues.move_listed(entries, slot, tick)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::{Entry, Rest};
    use super::*;
    use kvpool_types::{Checksum, Version};

    fn entry(entries: &mut Entries, order: u32, tick: u64) -> u32 {
        let mut entry = Entry::new();
        entry.set_tick(tick);
        let slot = entries.insert(entry, Rest::new(Version(1), Checksum(1), 1));
        entries.links_mut(slot).order = order;
        slot
    }

    #[test]
    fn the_timers_of_all_orders_end_in_their_order() {
        let (mut orders, mut entries) = (Orders::default(), Entries::default());
        let ends = [
            (COMMON, 30),
            (1, 20),
            (7, 10),
            (7, 40),
            (2, 50),
            (COMMON, 60),
        ];
        let mut slots = Vec::new();
        for (order, until) in ends {
            let slot = entry(&mut entries, order, until);
            orders.park(&mut entries, slot, until);
            slots.push(slot);
        }
        // This block is taken out before its timer ends.
        orders.take(&mut entries, slots[4]);
        assert_eq!(orders.timers.len(), 2, "one for each tenant that has any");
        let mut ended = Vec::new();
        for at in [9, 10, 20, 30, 40, 50, 60, 70] {
            let is_due = orders.next_timer().is_some_and(|until| until <= at);
            let popped = orders.pop_timer(at);
            assert_eq!(popped.is_some(), is_due, "at {at}");
            if let Some(slot) = popped {
                ended.push((at, slot));
            }
            assert_eq!(orders.pop_timer(at), None);
        }
        let want = [
            (10, slots[2]),
            (20, slots[1]),
            (30, slots[0]),
            (40, slots[3]),
            (60, slots[5]),
        ];
        assert_eq!(ended, want);
        assert!(orders.timers.is_empty() && orders.next_timer().is_none());
    }

    /// A stripe shows its next timer at every unlock, whatever the number of tenants.
    #[test]
    fn the_next_timer_costs_the_same_with_many_tenants() {
        let time = |tenants: u32| {
            let (mut orders, mut entries) = (Orders::default(), Entries::default());
            for order in 1..=tenants {
                let slot = entry(&mut entries, order, 1);
                orders.park(&mut entries, slot, u64::from(order));
            }
            // The shortest of several measurements: the machine may be busy.
            let rounds = (0..10).map(|_| {
                let begun = tokio::time::Instant::now();
                for _ in 0..2000 {
                    assert_eq!(std::hint::black_box(&orders).next_timer(), Some(1));
                }
                begun.elapsed()
            });
            rounds.min().unwrap()
        };
        let (few, many) = (time(2), time(4000));
        assert!(
            many < few * 20,
            "{few:?} with two tenants, {many:?} with 4000"
        );
    }
}
