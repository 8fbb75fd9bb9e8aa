//! The pages that offers pin, their limit, and the breaker of each receiver (rows P1, P5, P6).
//!
//! ```text
//!  offer ──► pins over the limit? ──► pinned ──► freed: decode has the pages, is lost or declines,
//!                   │ P5: waits,                       or the offer's deadline passes (P7)
//!                   │     first come, first served
//! ```
//!
//! A pin covers the pages of one room. Its owner frees it once, when no transfer reads the pages any more: the
//! ledger counts pages and knows no transfers.
//!
//! A breaker is independent of pins: any receiver may ask for an offer. The owner looks at
//! [`PinLedger::breaker`] when a receiver asks.

use crate::Moment;
use crate::room::RoomId;
use kvpool_types::Incarnation;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The settings of pins (row P1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinOptions {
    /// The share of pages that pins may not reserve, in percent: 0 to 100.
    pub reserve_percent: u8,
    /// How long a receiver is not served after it could not allocate pages.
    pub back_off: Duration,
}

impl Default for PinOptions {
    /// The documents' numbers: a reserve of 2 %, and 2.0 s.
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
    /// The request waits until pins are freed. [`PinLedger::admitted`] names it then.
    Waits,
    /// The room has a pin, or waits for one.
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

    /// Asks for a pin on `pages` pages. Requests that wait are served in their order.
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

    /// The requests that waited and are pinned now, oldest first. Each is named once.
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

    /// Notes that a receiver could not allocate pages. It is not served for the back-off (P6).
    pub fn trip(&mut self, now: Moment, receiver: Incarnation) {
        self.breakers.retain(|_, until| *until > now);
        self.breakers.insert(receiver, now + self.options.back_off);
    }

    /// Until when a receiver is not served. `None` for one whose breaker is closed.
    pub fn breaker(&self, now: Moment, receiver: Incarnation) -> Option<Moment> {
        let until = self.breakers.get(&receiver).copied();
        until.filter(|until| *until > now)
    }

    /// Forgets the breaker of a receiver whose process has ended.
    pub fn forget(&mut self, receiver: Incarnation) {
        self.breakers.remove(&receiver);
    }

    /// P5: new requests wait while the pins exceed the limit, so that the last one may pass it.
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
