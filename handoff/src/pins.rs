//! The pages that offers pin, their limit, and the breaker of each receiver (rows P1, P5, P6).
//!
//! ```text
//!  offer ──► pins over the limit? ──► pinned ──► freed: decode has the pages, is lost or declines,
//!                   │ P5: waits,                       or the offer's deadline passes (P7)
//!                   │     first come, first served
//! ```
//!
//! A pin covers the pages of one room. Its owner frees the pin once, when no transfer reads the pages any more.
//! The ledger counts pages and knows no transfers.
//!
//! A breaker is independent of pins. It concerns a receiver, and a pin concerns an offer. The owner looks at
//! [`PinLedger::breaker`] when a receiver asks for a room.

use crate::Moment;
use crate::room::RoomId;
use kvpool_types::Incarnation;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The settings of pins (row P1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinOptions {
    /// The share of the limit that offers must leave free, in percent: 0 to 100.
    pub reserve_percent: u8,
    /// How long prefill does not serve a receiver that could not allocate pages.
    pub back_off: Duration,
}

impl Default for PinOptions {
    /// The documents' defaults: a reserve of 2 % and a back-off of 2.0 s.
    fn default() -> Self {
        Self {
            reserve_percent: 2,
            back_off: Duration::from_secs(2),
        }
    }
}

/// The outcome of a request for a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinOutcome {
    /// The pages are pinned.
    Pinned,
    /// The request waits until other rooms free their pins. Then [`PinLedger::admitted`] returns its room.
    Waits,
    /// The room has a pin or waits for one already.
    Repeated,
}

/// The pins of one prefill rank.
#[derive(Clone, Debug)]
pub struct PinLedger {
    options: PinOptions,
    limit: u64,
    pinned: u64,
    pins: BTreeMap<RoomId, u64>,
    waiting: VecDeque<(RoomId, u64)>,
    admitted: Vec<RoomId>,
    breakers: BTreeMap<Incarnation, Moment>,
}

impl PinLedger {
    /// A ledger over `total` pages.
    pub fn new(total: u64, options: PinOptions) -> Self {
        let kept = u64::from(options.reserve_percent.min(100));
        let limit = u128::from(total) * u128::from(100 - kept) / 100;
        Self {
            options,
            limit: u64::try_from(limit).expect("invariant: a share of the total"),
            pinned: 0,
            pins: BTreeMap::new(),
            waiting: VecDeque::new(),
            admitted: Vec::new(),
            breakers: BTreeMap::new(),
        }
    }

    /// The number of pinned pages.
    pub const fn pinned(&self) -> u64 {
        self.pinned
    }

    /// The number of requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Asks for a pin on `pages` pages. Waiting requests are served first come, first served.
    pub fn pin(&mut self, room: RoomId, pages: u64) -> PinOutcome {
        if self.pins.contains_key(&room) || self.waiting.iter().any(|(other, _)| *other == room) {
            return PinOutcome::Repeated;
        }
        if self.is_over_limit() {
            self.waiting.push_back((room, pages));
            return PinOutcome::Waits;
        }
        self.take(room, pages);
        PinOutcome::Pinned
    }

    /// The rooms that waited and are pinned now, oldest first. Each room is returned once.
    pub fn admitted(&mut self) -> Vec<RoomId> {
        std::mem::take(&mut self.admitted)
    }

    /// Frees all pages of a room, or ends its wait. Returns the number of pages that were pinned: 0 for a room
    /// without a pin.
    pub fn free(&mut self, room: RoomId) -> u64 {
        self.waiting.retain(|(other, _)| *other != room);
        self.admitted.retain(|other| *other != room);
        let pages = self.pins.remove(&room).unwrap_or(0);
        self.pinned -= pages;
        while !self.is_over_limit()
            && let Some((next, pages)) = self.waiting.pop_front()
        {
            self.take(next, pages);
            self.admitted.push(next);
        }
        pages
    }

    /// Opens the breaker of a receiver that could not allocate pages: prefill does not serve it for the
    /// back-off (P6).
    pub fn trip(&mut self, now: Moment, receiver: Incarnation) {
        self.breakers.retain(|_, until| *until > now);
        self.breakers.insert(receiver, now + self.options.back_off);
    }

    /// The end of a receiver's back-off. `None` while its breaker is closed.
    pub fn breaker(&self, now: Moment, receiver: Incarnation) -> Option<Moment> {
        let until = self.breakers.get(&receiver).copied();
        until.filter(|until| *until > now)
    }

    /// Forgets the breaker of a receiver whose process has ended.
    pub fn forget(&mut self, receiver: Incarnation) {
        self.breakers.remove(&receiver);
    }

    /// P5: a new request waits only while the pins exceed the limit. So the last admitted request may pass the
    /// limit.
    fn is_over_limit(&self) -> bool {
        self.pinned > self.limit
    }

    fn take(&mut self, room: RoomId, pages: u64) {
        self.pinned += pages;
        self.pins.insert(room, pages);
    }
}

#[cfg(test)]
mod tests;
