//! Prefill's end of all pulls.

use super::{PullReady, ToPullReceiver, ToPullSender};
use crate::Moment;
use crate::pins::{FreedPin, PinLedger, PinOptions, PinOutcome, PullId};
use kvpool_types::{Code, Incarnation};
use std::collections::{BTreeMap, BTreeSet};

/// What prefill is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullAction {
    /// Send a message to a receiver's process.
    Send {
        /// The session of the process.
        to: Incarnation,
        /// The message.
        message: ToPullReceiver,
    },
    /// These pages of a pull are free: indices into its ready notice. No index comes twice.
    Release {
        /// The pull.
        pull: PullId,
        /// The indices.
        pages: Vec<u32>,
    },
}

#[derive(Clone, Debug)]
struct Offered {
    receiver: Incarnation,
    ready: PullReady,
    left: BTreeSet<u32>,
}

/// The pulls that prefill offers.
#[derive(Clone, Debug)]
pub struct PullDesk {
    pins: PinLedger,
    offered: BTreeMap<PullId, Offered>,
}

impl PullDesk {
    /// A desk over `total` pages.
    pub fn new(total: u64, options: PinOptions) -> Self {
        Self {
            pins: PinLedger::new(total, options),
            offered: BTreeMap::new(),
        }
    }

    /// The pins.
    pub const fn pins(&self) -> &PinLedger {
        &self.pins
    }

    /// Offers pages to a receiver. With [`PinOutcome::Waits`] the notice goes out once pins are
    /// freed. The other outcomes offer nothing, and leave the pages to the caller.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] for a notice without pages, or with a wrong number of checksums.
    pub fn offer(
        &mut self,
        now: Moment,
        receiver: Incarnation,
        ready: PullReady,
        out: &mut Vec<PullAction>,
    ) -> Result<PinOutcome, Code> {
        let count = u32::try_from(ready.pages.len()).map_err(|_| Code::InvalidArgument)?;
        if count == 0 || ready.sums.len() != ready.pages.len() {
            return Err(Code::InvalidArgument);
        }
        let (pull, pages) = (ready.pull, u64::from(count));
        let outcome = self.pins.pin(now, pull, receiver, pages);
        if matches!(outcome, PinOutcome::Pinned | PinOutcome::Waits) {
            let offered = Offered {
                receiver,
                ready,
                left: (0..count).collect(),
            };
            self.offered.insert(pull, offered);
        }
        if outcome == PinOutcome::Pinned {
            self.announce(pull, out);
        }
        self.announce_admitted(out);
        Ok(outcome)
    }

    /// Takes a message of a receiver's process.
    pub fn take(
        &mut self,
        now: Moment,
        from: Incarnation,
        message: ToPullSender,
        out: &mut Vec<PullAction>,
    ) {
        let (ToPullSender::Ack { pull, .. }
        | ToPullSender::Busy { pull }
        | ToPullSender::PullDone { pull }) = &message;
        let pull = *pull;
        let Some(offered) = self.offered.get_mut(&pull) else {
            if let ToPullSender::PullDone { .. } = message {
                self.pins.done(now, pull);
            }
            return;
        };
        // Another process cannot end a pull.
        if offered.receiver != from {
            return;
        }
        match message {
            ToPullSender::Ack { held, .. } => {
                let freed = held.into_iter().filter(|page| offered.left.remove(page));
                let freed: Vec<u32> = freed.collect();
                if !freed.is_empty() {
                    self.pins.unpin(now, pull, freed.len() as u64);
                    out.push(PullAction::Release { pull, pages: freed });
                }
            }
            ToPullSender::Busy { .. } => {
                self.pins.trip(now, from);
                self.pins.give_up(now, pull);
                self.release(pull, out);
            }
            ToPullSender::PullDone { .. } => {
                self.pins.done(now, pull);
                self.release(pull, out);
            }
        }
        self.announce_admitted(out);
    }

    /// Frees the pulls of a receiver whose connection is lost.
    pub fn lost(&mut self, now: Moment, receiver: Incarnation, out: &mut Vec<PullAction>) {
        self.pins.lost(now, receiver);
        let of =
            |(pull, offered): (&PullId, &Offered)| (offered.receiver == receiver).then_some(*pull);
        for pull in self.offered.iter().filter_map(of).collect::<Vec<_>>() {
            self.release(pull, out);
        }
        self.announce_admitted(out);
    }

    /// Gives one pull up, for example because its request was aborted.
    pub fn give_up(&mut self, now: Moment, pull: PullId, code: Code, out: &mut Vec<PullAction>) {
        self.pins.give_up(now, pull);
        self.abort(pull, code, out);
        self.announce_admitted(out);
    }

    /// Frees the pulls whose receivers never said done (P7). See [`PinLedger::next_sweep`].
    pub fn sweep(&mut self, now: Moment, out: &mut Vec<PullAction>) {
        for FreedPin { pull, .. } in self.pins.sweep(now) {
            self.abort(pull, Code::DeadlineExceeded, out);
        }
        self.announce_admitted(out);
    }

    fn abort(&mut self, pull: PullId, code: Code, out: &mut Vec<PullAction>) {
        if let Some(offered) = self.offered.get(&pull) {
            out.push(PullAction::Send {
                to: offered.receiver,
                message: ToPullReceiver::Abort { pull, code },
            });
        }
        self.release(pull, out);
    }

    fn announce(&self, pull: PullId, out: &mut Vec<PullAction>) {
        if let Some(offered) = self.offered.get(&pull) {
            out.push(PullAction::Send {
                to: offered.receiver,
                message: ToPullReceiver::Ready(offered.ready.clone()),
            });
        }
    }

    fn announce_admitted(&mut self, out: &mut Vec<PullAction>) {
        for pull in self.pins.admitted() {
            self.announce(pull, out);
        }
    }

    fn release(&mut self, pull: PullId, out: &mut Vec<PullAction>) {
        if let Some(offered) = self.offered.remove(&pull) {
            let pages: Vec<u32> = offered.left.into_iter().collect();
            if !pages.is_empty() {
                out.push(PullAction::Release { pull, pages });
            }
        }
    }
}
