//! The eviction orders of one stripe: one for all namespaces without settings, and one for each
//! tenant.
//!
//! A block belongs to one order, which its links name. Without tenants there is the common order
//! alone, and nothing else is looked at.

use super::entries::Entries;
use super::entry::QueueState;
use super::queues::{Queues, Rank};

/// The order of the namespaces without settings.
pub(super) const COMMON: u32 = 0;

/// The queues of one stripe, by order.
#[derive(Debug, Default)]
pub(super) struct Orders {
    common: Queues,
    /// The queues of order 1 and later ones. They appear with the stripe's first block of an order.
    tenants: Vec<Queues>,
}

impl Orders {
    #[inline]
    fn of(&mut self, entries: &Entries, slot: u32) -> &mut Queues {
        match entries.links(slot).order {
            COMMON => &mut self.common,
            order => self.tenant(order),
        }
    }

    #[cold]
    fn tenant(&mut self, order: u32) -> &mut Queues {
        let at = order as usize - 1;
        if self.tenants.len() <= at {
            self.tenants.resize_with(at + 1, Queues::default);
        }
        self.tenants.get_mut(at).expect("invariant: just grown")
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

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Queues> {
        std::iter::once(&mut self.common).chain(&mut self.tenants)
    }

    /// The number of orders, with the common one.
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.tenants.len() + 1).unwrap_or(u32::MAX)
    }

    /// See [`Queues::put`].
    pub(super) fn put(&mut self, entries: &mut Entries, slot: u32, soft_until: Option<u64>) {
        self.of(entries, slot).put(entries, slot, soft_until);
    }

    /// See [`Queues::put_frontier`].
    pub(super) fn put_frontier(&mut self, entries: &mut Entries, slot: u32) {
        self.of(entries, slot).put_frontier(entries, slot);
    }

    /// See [`Queues::park`].
    pub(super) fn park(&mut self, entries: &mut Entries, slot: u32, until: u64) {
        self.of(entries, slot).park(entries, slot, until);
    }

    /// See [`Queues::set_aside`].
    pub(super) fn set_aside(&mut self, entries: &mut Entries, slot: u32, group: u32) {
        self.of(entries, slot).set_aside(entries, slot, group);
    }

    /// See [`Queues::first_aside`]. It looks at every order.
    pub(super) fn first_aside(&self, group: u32) -> Option<u32> {
        self.all().find_map(|queues| queues.first_aside(group))
    }

    /// See [`Queues::take`].
    #[inline]
    pub(super) fn take(&mut self, entries: &mut Entries, slot: u32) {
        self.of(entries, slot).take(entries, slot);
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
        self.all().filter_map(Queues::next_timer).min()
    }

    /// See [`Queues::pop_timer`].
    pub(super) fn pop_timer(&mut self, now: u64) -> Option<u32> {
        self.all_mut().find_map(|queues| queues.pop_timer(now))
    }

    /// See [`Queues::memory_bytes`].
    pub(super) fn memory_bytes(&self) -> u64 {
        let own = self.tenants.capacity() * size_of::<Queues>();
        self.all().map(Queues::memory_bytes).sum::<u64>() + own as u64
    }

    /// See [`Queues::move_listed`].
    #[inline]
    pub(super) fn move_listed(&mut self, entries: &mut Entries, slot: u32, tick: u64) {
        self.of(entries, slot).move_listed(entries, slot, tick);
    }
}
