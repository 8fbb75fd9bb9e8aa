//! The pages that prefill keeps until a receiver has them (rows P1, P5, P6, P7, P8, P10).
//!
//! ```text
//!  put ──► breaker of the receiver open? ──► pins over the limit? ──► pinned ──► done, lost,
//!              │ P6: refused, 2.0 s              │ P5: waits, first          ttl ──► freed
//!                                                │     come, first served
//! ```
//!
//! A pin covers the pages of one pull or room at one receiver. Its pages are freed exactly once:
//! when the receiver says done, when its connection is lost, or by the sweep (P7).
//!
//! The ledger counts pages. It does not know whether a transfer still reads them: the owner of a
//! pin first ends its transfers, then calls [`PinLedger::done`].

use crate::Moment;
use kvpool_types::Incarnation;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// The name of one pull, or of one room's pages: unique among the pins of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PullId(pub u128);

/// The settings of pins (row P1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinOptions {
    /// The share of pages that pins may not reserve, in percent: 0 to 100.
    pub reserve_percent: u8,
    /// How long a pin may wait for its done.
    pub ttl: Duration,
    /// How long nothing is offered to a receiver after it could not allocate.
    pub back_off: Duration,
    /// The most early dones that are kept.
    pub early_dones: usize,
}

impl Default for PinOptions {
    /// The documents' numbers: a reserve of 2 %, 360 s, 2.0 s.
    fn default() -> Self {
        Self {
            reserve_percent: 2,
            ttl: Duration::from_secs(360),
            back_off: Duration::from_secs(2),
            early_dones: 4096,
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
    /// The receiver could not allocate a short time ago: ask again at this moment.
    BackOff(Moment),
    /// The receiver has said done already: there is nothing to send (P8).
    IsDone,
    /// This pull has a pin, or waits for one.
    Repeated,
}

/// The pages that a sweep or a lost receiver freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreedPin {
    /// The pull.
    pub pull: PullId,
    /// The number of its pages that were still pinned.
    pub pages: u64,
}

#[derive(Clone, Copy, Debug)]
struct Pin {
    /// `None` while any receiver may ask for the pages.
    receiver: Option<Incarnation>,
    pages: u64,
    until: Moment,
}

#[derive(Clone, Copy, Debug)]
struct WaitingPin {
    pull: PullId,
    receiver: Option<Incarnation>,
    pages: u64,
}

/// The pins of one sender.
#[derive(Clone, Debug)]
pub struct PinLedger {
    options: PinOptions,
    limit: u64,
    pinned: u64,
    pins: BTreeMap<PullId, Pin>,
    waiting: VecDeque<WaitingPin>,
    admitted: Vec<PullId>,
    breakers: BTreeMap<Incarnation, Moment>,
    early: BTreeSet<PullId>,
    early_order: VecDeque<PullId>,
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
            early: BTreeSet::new(),
            early_order: VecDeque::new(),
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

    /// Asks for a pin on `pages` pages for a receiver. A request that waits is served in the order
    /// of the requests.
    pub fn pin(
        &mut self,
        now: Moment,
        pull: PullId,
        receiver: Incarnation,
        pages: u64,
    ) -> PinOutcome {
        self.pin_for(now, pull, Some(receiver), pages)
    }

    /// As [`PinLedger::pin`], for the receiver that will ask for the pages. No breaker holds the pin back:
    /// the caller looks at [`PinLedger::breaker`] when a receiver asks.
    pub fn pin_for_any(&mut self, now: Moment, pull: PullId, pages: u64) -> PinOutcome {
        self.pin_for(now, pull, None, pages)
    }

    fn pin_for(
        &mut self,
        now: Moment,
        pull: PullId,
        receiver: Option<Incarnation>,
        pages: u64,
    ) -> PinOutcome {
        if self.pins.contains_key(&pull) || self.waiting.iter().any(|other| other.pull == pull) {
            return PinOutcome::Repeated;
        }
        if self.early.remove(&pull) {
            self.early_order.retain(|other| *other != pull);
            return PinOutcome::IsDone;
        }
        if let Some(until) = receiver.and_then(|receiver| self.breaker(now, receiver)) {
            return PinOutcome::BackOff(until);
        }
        // Requests whose breaker has closed meanwhile come first.
        self.admit(now);
        if self.is_over_limit() {
            self.waiting.push_back(WaitingPin {
                pull,
                receiver,
                pages,
            });
            return PinOutcome::Waits;
        }
        self.take(now, pull, receiver, pages);
        PinOutcome::Pinned
    }

    /// The requests that waited and are pinned now, oldest first. Each is named once.
    pub fn admitted(&mut self) -> Vec<PullId> {
        std::mem::take(&mut self.admitted)
    }

    /// Frees all pages of a pull. Returns their number: 0 for a repeated done. A done of a pull
    /// that has no pin yet is kept for it (P8).
    pub fn done(&mut self, now: Moment, pull: PullId) -> u64 {
        if let Some(pin) = self.pins.remove(&pull) {
            self.free(now, pin.pages);
            return pin.pages;
        }
        let waited = self.waiting.len();
        self.waiting.retain(|other| other.pull != pull);
        if self.waiting.len() == waited && self.early.insert(pull) {
            self.early_order.push_back(pull);
            if self.early_order.len() > self.options.early_dones
                && let Some(oldest) = self.early_order.pop_front()
            {
                self.early.remove(&oldest);
            }
        }
        0
    }

    /// Frees a pin without keeping an early done: the sender itself gives the pull up.
    pub fn give_up(&mut self, now: Moment, pull: PullId) -> u64 {
        self.waiting.retain(|other| other.pull != pull);
        self.admitted.retain(|other| *other != pull);
        let pages = self.pins.remove(&pull).map_or(0, |pin| pin.pages);
        self.free(now, pages);
        pages
    }

    /// Frees some pages of a pull, because the receiver has them already (P3). Returns their
    /// number, which the pin bounds.
    pub fn unpin(&mut self, now: Moment, pull: PullId, pages: u64) -> u64 {
        let Some(pin) = self.pins.get_mut(&pull) else {
            return 0;
        };
        let freed = pages.min(pin.pages);
        pin.pages -= freed;
        self.free(now, freed);
        freed
    }

    /// Notes that a receiver could not allocate. Nothing is offered to it for the back-off (P6).
    pub fn trip(&mut self, now: Moment, receiver: Incarnation) {
        self.breakers.insert(receiver, now + self.options.back_off);
    }

    /// Until when nothing is offered to a receiver. `None` for one whose breaker is closed.
    pub fn breaker(&self, now: Moment, receiver: Incarnation) -> Option<Moment> {
        let until = self.breakers.get(&receiver).copied();
        until.filter(|until| *until > now)
    }

    /// Frees the pins of a receiver whose connection is lost, and forgets its requests.
    pub fn lost(&mut self, now: Moment, receiver: Incarnation) -> Vec<FreedPin> {
        self.waiting
            .retain(|other| other.receiver != Some(receiver));
        self.breakers.remove(&receiver);
        self.free_where(now, |pin| pin.receiver == Some(receiver))
    }

    /// Frees the pins whose receivers never said done (P7), and forgets breakers that have closed.
    pub fn sweep(&mut self, now: Moment) -> Vec<FreedPin> {
        self.breakers.retain(|_, until| *until > now);
        let freed = self.free_where(now, |pin| pin.until <= now);
        self.admit(now);
        freed
    }

    /// When the next sweep has work.
    pub fn next_sweep(&self) -> Option<Moment> {
        let pins = self.pins.values().map(|pin| pin.until);
        // A request that waits for a breaker alone.
        let waits = |request: &WaitingPin| self.breakers.get(&request.receiver?).copied();
        let breakers = self.waiting.iter().filter_map(waits);
        pins.chain(breakers).min()
    }

    fn free_where(&mut self, now: Moment, ends: impl Fn(&Pin) -> bool) -> Vec<FreedPin> {
        let ended = self.pins.iter().filter(|(_, pin)| ends(pin));
        let freed: Vec<FreedPin> = ended
            .map(|(pull, pin)| FreedPin {
                pull: *pull,
                pages: pin.pages,
            })
            .collect();
        for each in &freed {
            self.pins.remove(&each.pull);
            self.free(now, each.pages);
        }
        freed
    }

    /// P5: new puts wait while the pins exceed the limit, so that the last one may pass it.
    fn is_over_limit(&self) -> bool {
        self.pinned > self.limit
    }

    fn take(&mut self, now: Moment, pull: PullId, receiver: Option<Incarnation>, pages: u64) {
        self.pinned += pages;
        let until = now + self.options.ttl;
        let pin = Pin {
            receiver,
            pages,
            until,
        };
        self.pins.insert(pull, pin);
    }

    fn free(&mut self, now: Moment, pages: u64) {
        self.pinned -= pages;
        self.admit(now);
    }

    /// Pins for the requests that wait, oldest first, but not for a receiver whose breaker is open.
    fn admit(&mut self, now: Moment) {
        while !self.is_over_limit() {
            let breaker = |receiver| self.breaker(now, receiver);
            let can_go = |request: &WaitingPin| request.receiver.and_then(breaker).is_none();
            let first = self.waiting.iter().position(can_go);
            let Some(next) = first.and_then(|first| self.waiting.remove(first)) else {
                break;
            };
            self.take(now, next.pull, next.receiver, next.pages);
            self.admitted.push(next.pull);
        }
    }
}

#[cfg(test)]
mod tests;
