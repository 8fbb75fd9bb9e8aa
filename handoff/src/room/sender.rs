//! Prefill's end of a room.

mod events;
mod target;

pub use events::{RoomSenderPlan, SenderAction, SenderEvent};

use super::messages::{MAX_LACKS, RoomOffer, RoomRoot, ToReceiver, ToSender};
use super::{PageRectangle, PollState, RoomId, RoomOutcome, RoomTag};
use crate::Moment;
use kvpool_types::{Checksum, Code, Incarnation};
use std::collections::BTreeSet;
use std::time::Duration;
use target::{Target, WriteState};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// A failure has begun to end the writes.
    Closing(Code),
    Ended(RoomOutcome),
}

/// Prefill's end of a room, on one rank.
#[derive(Clone, Debug)]
pub struct RoomSender {
    plan: RoomSenderPlan,
    targets: Vec<Target>,
    produced: Vec<PageRectangle>,
    has_all: bool,
    phase: Phase,
    holds_pages: bool,
    state_until: Moment,
    repeats_until: Moment,
}

impl RoomSender {
    /// Opens a room and waits for the receivers' offers. The caller keeps the pages pinned until
    /// [`SenderAction::ReleasePages`].
    pub fn open(now: Moment, plan: RoomSenderPlan) -> Self {
        Self {
            targets: vec![Target::default(); plan.receivers],
            produced: Vec::new(),
            has_all: false,
            phase: Phase::Open,
            holds_pages: true,
            state_until: (now + plan.limits.bootstrapping).min(plan.deadline),
            repeats_until: plan.deadline,
            plan,
        }
    }

    /// The room.
    pub const fn room(&self) -> RoomId {
        self.plan.room
    }

    /// The poll state of this rank.
    pub fn poll(&self) -> PollState {
        match self.phase {
            Phase::Ended(RoomOutcome::Success) => PollState::Success,
            Phase::Ended(RoomOutcome::Failed(_)) | Phase::Closing(_) => PollState::Failed,
            Phase::Open if self.targets.iter().any(|target| target.offer.is_none()) => {
                PollState::Bootstrapping
            }
            Phase::Open if self.targets.iter().any(Target::has_begun) => PollState::Transferring,
            Phase::Open => PollState::WaitingForInput,
        }
    }

    /// How the room ended, once it has.
    pub const fn outcome(&self) -> Option<RoomOutcome> {
        match self.phase {
            Phase::Ended(outcome) => Some(outcome),
            Phase::Open | Phase::Closing(_) => None,
        }
    }

    /// Why the room has failed or is failing.
    pub const fn failure(&self) -> Option<Code> {
        match self.phase {
            Phase::Closing(code) | Phase::Ended(RoomOutcome::Failed(code)) => Some(code),
            _ => None,
        }
    }

    /// Whether no other use may change the room's pages yet.
    pub const fn holds_pages(&self) -> bool {
        self.holds_pages
    }

    /// Whether tombstones can take the room's place.
    pub fn is_over(&self, now: Moment) -> bool {
        match self.phase {
            Phase::Ended(RoomOutcome::Success) => true,
            Phase::Ended(RoomOutcome::Failed(_)) => {
                now >= self.repeats_until || self.targets.iter().all(|target| !target.needs_abort())
            }
            Phase::Open | Phase::Closing(_) => false,
        }
    }

    /// How long the room waits for offers.
    pub(super) const fn patience(&self) -> Duration {
        self.plan.limits.bootstrapping
    }

    /// The attempts that receivers have offered, for tombstones.
    pub fn tags(&self) -> impl Iterator<Item = (Incarnation, RoomTag)> {
        let of = |target: &Target| Some((target.session?, target.tag()?));
        self.targets.iter().filter_map(of)
    }

    /// The index of the receiver with this session and attempt.
    pub fn receiver(&self, session: Incarnation, tag: RoomTag) -> Option<usize> {
        let is = |target: &Target| target.session == Some(session) && target.tag() == Some(tag);
        self.targets.iter().position(is)
    }

    /// The number of receivers.
    pub fn receivers(&self) -> usize {
        self.targets.len()
    }

    /// The session of a receiver that has made an offer.
    pub fn receiver_session(&self, receiver: usize) -> Option<Incarnation> {
        self.targets.get(receiver)?.session
    }

    /// Checks an offer.
    ///
    /// # Errors
    ///
    /// [`Code::InProgress`] for a second attempt while the first attempt is open. [`Code::OutOfRange`] for a
    /// receiver that does not exist.
    pub fn may_offer(
        &self,
        receiver: usize,
        session: Incarnation,
        tag: RoomTag,
    ) -> Result<(), Code> {
        let target = self.targets.get(receiver).ok_or(Code::OutOfRange)?;
        let is_same = target.session == Some(session) && target.tag() == Some(tag);
        match self.phase == Phase::Open && (target.offer.is_none() || is_same) {
            true => Ok(()),
            false => Err(Code::InProgress),
        }
    }

    /// Whether an offer has exactly the pages of the request that its receiver lacks.
    pub fn fits(&self, offer: &RoomOffer) -> bool {
        let rectangle = self.plan.rectangle.without_held(offer.held);
        offer.held <= self.plan.rectangle.pages.end && rectangle.pages.len() == offer.pages as usize
    }

    /// The offer of a receiver.
    pub fn offer(&self, receiver: usize) -> Option<&RoomOffer> {
        self.targets.get(receiver)?.offer.as_ref()
    }

    /// The latest moment at which [`SenderEvent::Tick`] has work.
    pub fn next_wake(&self) -> Option<Moment> {
        match self.phase {
            Phase::Open => {
                let most = self.plan.cells_under_way;
                let targets = self.targets.iter();
                let targets = targets.filter_map(|target| target.next_wake(most));
                targets.chain([self.state_until]).min()
            }
            Phase::Closing(_) => None,
            Phase::Ended(RoomOutcome::Success) => None,
            Phase::Ended(RoomOutcome::Failed(_)) => {
                let unanswered = self.targets.iter().filter(|target| target.needs_abort());
                let retries = unanswered.map(|target| target.next_retry);
                retries.chain([self.repeats_until]).min()
            }
        }
    }

    /// Takes an event. Appends the actions to `out`, in order.
    pub fn handle(&mut self, now: Moment, event: SenderEvent, out: &mut Vec<SenderAction>) {
        match event {
            SenderEvent::Message {
                from,
                session,
                message,
            } => self.take(now, from, session, message, out),
            SenderEvent::Produced(rectangle) => self.produced(now, rectangle, out),
            SenderEvent::ProducedAll => {
                self.has_all = true;
                self.advance_all(now, out);
                // A rank whose bytes no receiver needs is done.
                self.settle(out);
            }
            SenderEvent::Written { to, id, outcome } => self.written(now, (to, id), outcome, out),
            SenderEvent::WritesEnded => {
                if let Phase::Closing(code) = self.phase {
                    self.end_failed(now, code, out);
                }
            }
            SenderEvent::LinkUp { from, session } => {
                let Some(target) = self.targets.get_mut(from) else {
                    return;
                };
                if target.session.is_some_and(|known| known != session) {
                    target.is_gone = true;
                    return self.fail(now, Code::WrongIncarnation, out);
                }
                target.broken_until = None;
                target.next_retry = now;
                self.advance(now, from, out);
            }
            SenderEvent::LinkBroken { from } => {
                let until = now + self.plan.limits.grace;
                if let Some(target) = self.targets.get_mut(from) {
                    target.broken_until.get_or_insert(until);
                }
            }
            SenderEvent::PeerLost { from } => {
                if let Some(target) = self.targets.get_mut(from) {
                    target.is_gone = true;
                    if !target.is_complete {
                        self.fail(now, Code::Unreachable, out);
                    }
                }
            }
            SenderEvent::Abort { code } => self.fail(now, code, out),
            SenderEvent::Tick => self.tick(now, out),
        }
    }

    fn take(
        &mut self,
        now: Moment,
        from: usize,
        session: Incarnation,
        message: ToSender,
        out: &mut Vec<SenderAction>,
    ) {
        let tag = message.tag();
        if let ToSender::Offer(offer) = message {
            return self.offered(now, from, session, offer, out);
        }
        let Some(target) = self.targets.get_mut(from) else {
            return;
        };
        if target.tag() != Some(tag) || target.session != Some(session) {
            return;
        }
        match message {
            // The branch above takes offers, and the desk takes declines.
            ToSender::Offer(_) | ToSender::Decline { .. } => {}
            ToSender::Complete { .. } => {
                if self.phase == Phase::Open && target.done.is_some() {
                    target.is_complete = true;
                    self.settle(out);
                }
            }
            ToSender::Lacks { chunks, .. } => {
                if self.phase == Phase::Open {
                    let chunks: BTreeSet<u32> = chunks.into_iter().take(MAX_LACKS).collect();
                    for id in chunks {
                        if let Some(chunk) = target.announced(id) {
                            send(from, ToReceiver::Chunk { tag, chunk }, out);
                        }
                    }
                    target.next_retry = now;
                    self.state_until = self.stalled_at(now);
                    self.advance(now, from, out);
                }
            }
            ToSender::Abort { code, .. } => {
                // After an abort the receiver sends nothing more that needs an answer. It waits for the
                // sender's answer.
                self.fail(now, code, out);
                if !self.holds_pages {
                    send(from, ToReceiver::Aborted { tag }, out);
                }
            }
            ToSender::Aborted { .. } => {
                target.has_aborted = true;
                self.fail(now, Code::GrantEnded, out);
            }
        }
    }

    fn offered(
        &mut self,
        now: Moment,
        from: usize,
        session: Incarnation,
        offer: RoomOffer,
        out: &mut Vec<SenderAction>,
    ) {
        let tag = offer.tag;
        let Some(target) = self.targets.get_mut(from) else {
            return;
        };
        match (self.phase, target.tag()) {
            (Phase::Open, Some(known)) if known == tag && target.session == Some(session) => {
                send(from, ToReceiver::Accept { tag }, out);
                target.next_retry = now;
                self.advance(now, from, out);
            }
            (Phase::Open, None) => {
                target.session = Some(session);
                for rectangle in &self.produced {
                    let chunk_cells = self.plan.chunk_cells;
                    target.add(&rectangle.without_held(offer.held), chunk_cells);
                }
                self.plan.deadline = self.plan.deadline.min(now + offer.time_left);
                target.offer = Some(offer);
                send(from, ToReceiver::Accept { tag }, out);
                if self.targets.iter().all(|target| target.offer.is_some()) {
                    self.state_until = now + self.plan.limits.waiting;
                }
                self.state_until = self.state_until.min(self.plan.deadline);
                self.advance(now, from, out);
            }
            // The desk has refused every other offer: see `may_offer`.
            _ => {}
        }
    }

    fn produced(&mut self, now: Moment, rectangle: PageRectangle, out: &mut Vec<SenderAction>) {
        if self.phase != Phase::Open || self.has_all {
            return;
        }
        if rectangle.is_empty() || !self.plan.rectangle.contains(&rectangle) {
            return self.fail(now, Code::OutOfRange, out);
        }
        for target in &mut self.targets {
            if let Some(offer) = &target.offer {
                let held = offer.held;
                target.add(&rectangle.without_held(held), self.plan.chunk_cells);
            }
        }
        self.produced.push(rectangle);
        self.advance_all(now, out);
    }

    fn written(
        &mut self,
        now: Moment,
        (to, id): (usize, u32),
        outcome: Result<Checksum, Code>,
        out: &mut Vec<SenderAction>,
    ) {
        let retry_at = now + self.plan.limits.retry;
        let Some(target) = self.targets.get_mut(to) else {
            return;
        };
        if target.state(id) != Some(WriteState::UnderWay) {
            return;
        }
        match outcome {
            Ok(checksum) => {
                target.set(id, WriteState::InPlace(checksum));
                if self.phase != Phase::Open {
                    return;
                }
                self.state_until = self.stalled_at(now);
                let tag = self.targets.get(to).and_then(Target::tag);
                let chunk = self.targets.get(to).and_then(|target| target.announced(id));
                if let (Some(tag), Some(chunk)) = (tag, chunk) {
                    send(to, ToReceiver::Chunk { tag, chunk }, out);
                }
                self.advance(now, to, out);
            }
            Err(code) => {
                target.set(id, WriteState::Waits(retry_at));
                // The receiver never opens a closed room again. Any other retryable error may pass.
                if !code.is_retryable() || code == Code::GrantEnded {
                    self.fail(now, code, out);
                }
            }
        }
    }

    fn advance_all(&mut self, now: Moment, out: &mut Vec<SenderAction>) {
        for to in 0..self.targets.len() {
            self.advance(now, to, out);
        }
    }

    /// Starts the writes that can start. Sends `Done` once all chunks are in place.
    fn advance(&mut self, now: Moment, to: usize, out: &mut Vec<SenderAction>) {
        if self.phase != Phase::Open {
            return;
        }
        let retry = self.plan.limits.retry;
        let Some(target) = self.targets.get_mut(to) else {
            return;
        };
        let Some(tag) = target.tag().filter(|_| !target.is_complete) else {
            return;
        };
        for (id, body) in target.start(now, self.plan.cells_under_way) {
            out.push(SenderAction::Write { to, id, body });
        }
        if !self.has_all || !target.all_in_place() {
            return;
        }
        let sends_aux = target.offer.as_ref().is_some_and(|it| it.wants_aux);
        if sends_aux && !target.has_aux {
            // Metadata follows the pages (row C9).
            target.add_aux();
            return self.advance(now, to, out);
        }
        if target.done.is_none() {
            let chunks = target.all_announced();
            let count = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
            target.done = Some((count, RoomRoot::of(tag, chunks.iter())));
            target.next_retry = now;
        }
        if now >= target.next_retry
            && let Some((chunks, root)) = target.done
        {
            target.next_retry = now + retry;
            send(to, ToReceiver::Done { tag, chunks, root }, out);
        }
    }

    fn settle(&mut self, out: &mut Vec<SenderAction>) {
        if self.phase == Phase::Open && self.targets.iter().all(|target| target.is_complete) {
            self.phase = Phase::Ended(RoomOutcome::Success);
            self.release(out);
        }
    }

    fn fail(&mut self, now: Moment, code: Code, out: &mut Vec<SenderAction>) {
        if self.phase != Phase::Open {
            return;
        }
        self.phase = Phase::Closing(code);
        self.repeats_until = now + self.plan.limits.closing;
        for (to, target) in self.targets.iter_mut().enumerate() {
            target.next_retry = now + self.plan.limits.retry;
            if let Some(tag) = target.tag().filter(|_| target.needs_abort()) {
                send(to, ToReceiver::Abort { tag, code }, out);
            }
        }
        if self.targets.iter().any(Target::writes) {
            out.push(SenderAction::CancelWrites);
        } else {
            self.end_failed(now, code, out);
        }
    }

    fn end_failed(&mut self, now: Moment, code: Code, out: &mut Vec<SenderAction>) {
        self.phase = Phase::Ended(RoomOutcome::Failed(code));
        self.repeats_until = self.repeats_until.max(now + self.plan.limits.retry);
        self.release(out);
        for (to, target) in self.targets.iter().enumerate() {
            if let Some(tag) = target.tag() {
                send(to, ToReceiver::Aborted { tag }, out);
            }
        }
    }

    fn release(&mut self, out: &mut Vec<SenderAction>) {
        if std::mem::replace(&mut self.holds_pages, false) {
            out.push(SenderAction::ReleasePages);
        }
    }

    fn tick(&mut self, now: Moment, out: &mut Vec<SenderAction>) {
        match self.phase {
            Phase::Open if now >= self.state_until => self.fail(now, Code::DeadlineExceeded, out),
            Phase::Open if self.targets.iter().any(|target| target.is_broken(now)) => {
                self.fail(now, Code::Unreachable, out);
            }
            Phase::Open => self.advance_all(now, out),
            Phase::Ended(RoomOutcome::Failed(code)) if now < self.repeats_until => {
                let retry = self.plan.limits.retry;
                for (to, target) in self.targets.iter_mut().enumerate() {
                    if let Some(tag) = target.tag()
                        && target.needs_abort()
                        && now >= target.next_retry
                    {
                        target.next_retry = now + retry;
                        send(to, ToReceiver::Abort { tag, code }, out);
                    }
                }
            }
            Phase::Closing(_) | Phase::Ended(_) => {}
        }
    }

    fn stalled_at(&self, now: Moment) -> Moment {
        (now + self.plan.limits.stalled).min(self.plan.deadline)
    }
}

fn send(to: usize, message: ToReceiver, out: &mut Vec<SenderAction>) {
    out.push(SenderAction::Send { to, message });
}
