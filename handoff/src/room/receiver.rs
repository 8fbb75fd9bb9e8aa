//! Decode's end of a room.

mod events;

pub use events::{ReceiverAction, ReceiverEvent, RoomReceiverPlan, SenderShare};

use super::messages::{ChunkBody, MAX_LACKS, RoomChunk, RoomOffer, RoomRoot, ToReceiver, ToSender};
use super::{CellBitmap, PollState, RoomOutcome, RoomTag};
use crate::Moment;
use kvpool_types::{Code, Incarnation};
use std::collections::BTreeMap;
use std::time::Duration;

/// The most chunks of one sender.
const MAX_CHUNKS: u32 = 1 << 20;

/// The progress of one sender.
#[derive(Clone, Debug)]
struct Share {
    plan: SenderShare,
    is_accepted: bool,
    has_aborted: bool,
    bitmap: CellBitmap,
    has_aux: bool,
    chunks: BTreeMap<u32, RoomChunk>,
    done: Option<(u32, RoomRoot)>,
    next_retry: Moment,
    broken_until: Option<Moment>,
}

impl Share {
    /// Whether the sender is done and all chunks of its count have arrived.
    fn has_all_chunks(&self) -> bool {
        self.done
            .is_some_and(|(count, _)| self.chunks.len() as u64 >= u64::from(count))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// The room is being closed. Then it ends with this outcome.
    Closing(RoomOutcome),
    Verifying,
    Ended(RoomOutcome),
}

/// Decode's end of a room, on one rank.
#[derive(Clone, Debug)]
pub struct RoomReceiver {
    plan: RoomReceiverPlan,
    shares: Vec<Share>,
    phase: Phase,
    /// Whether the room still holds the pages. They belong to the engine after success, and are free after a
    /// failure.
    holds_pages: bool,
    /// The deadline of the present state.
    state_until: Moment,
    /// The time until which aborts are repeated.
    repeats_until: Moment,
}

impl RoomReceiver {
    /// Opens a room and offers its pages.
    pub fn open(now: Moment, plan: RoomReceiverPlan, out: &mut Vec<ReceiverAction>) -> Self {
        let share = |of: &SenderShare| {
            let bitmap = CellBitmap::new(of.rectangle.without_held(plan.held));
            Share {
                plan: of.clone(),
                is_accepted: false,
                has_aborted: false,
                bitmap,
                has_aux: false,
                chunks: BTreeMap::new(),
                done: None,
                next_retry: now + plan.limits.retry,
                broken_until: None,
            }
        };
        let room = Self {
            shares: plan.senders.iter().map(share).collect(),
            phase: Phase::Open,
            holds_pages: true,
            state_until: (now + plan.limits.bootstrapping).min(plan.deadline),
            repeats_until: plan.deadline,
            plan,
        };
        for to in 0..room.shares.len() {
            room.offer(now, to, out);
        }
        room
    }

    /// The room's tag.
    pub const fn tag(&self) -> RoomTag {
        self.plan.tag
    }

    /// The poll state of this rank.
    pub fn poll(&self) -> PollState {
        match self.phase {
            Phase::Ended(RoomOutcome::Success) => PollState::Success,
            Phase::Ended(RoomOutcome::Failed(_)) | Phase::Closing(RoomOutcome::Failed(_)) => {
                PollState::Failed
            }
            Phase::Closing(RoomOutcome::Success) | Phase::Verifying => PollState::Transferring,
            Phase::Open if self.shares.iter().any(|share| !share.is_accepted) => {
                PollState::Bootstrapping
            }
            Phase::Open if self.shares.iter().any(|share| !share.chunks.is_empty()) => {
                PollState::Transferring
            }
            Phase::Open => PollState::WaitingForInput,
        }
    }

    /// How the room ended, once it has.
    pub const fn outcome(&self) -> Option<RoomOutcome> {
        match self.phase {
            Phase::Ended(outcome) => Some(outcome),
            Phase::Open | Phase::Closing(_) | Phase::Verifying => None,
        }
    }

    /// Why the room has failed or is failing.
    pub const fn failure(&self) -> Option<Code> {
        match self.phase {
            Phase::Closing(RoomOutcome::Failed(code)) | Phase::Ended(RoomOutcome::Failed(code)) => {
                Some(code)
            }
            _ => None,
        }
    }

    /// Whether no other room may use the room's pages yet.
    pub const fn holds_pages(&self) -> bool {
        self.holds_pages
    }

    /// Whether a tombstone can take the room's place.
    pub fn is_over(&self, now: Moment) -> bool {
        match self.phase {
            Phase::Ended(RoomOutcome::Success) => true,
            Phase::Ended(RoomOutcome::Failed(_)) => {
                now >= self.repeats_until || self.shares.iter().all(|share| share.has_aborted)
            }
            Phase::Open | Phase::Closing(_) | Phase::Verifying => false,
        }
    }

    /// The index of the sender with this session.
    pub fn sender(&self, session: Incarnation) -> Option<usize> {
        let is = |share: &Share| share.plan.session == Some(session);
        self.shares.iter().position(is)
    }

    /// The latest moment at which [`ReceiverEvent::Tick`] has work.
    pub fn next_wake(&self) -> Option<Moment> {
        let retries = self.shares.iter().filter(|share| self.repeats_to(share));
        let retries = retries.map(|share| share.next_retry);
        let broken = self.shares.iter().filter_map(|share| share.broken_until);
        match self.phase {
            Phase::Open => retries.chain(broken).chain([self.state_until]).min(),
            Phase::Closing(RoomOutcome::Success) | Phase::Verifying => Some(self.state_until),
            Phase::Closing(RoomOutcome::Failed(_)) => retries.min(),
            Phase::Ended(RoomOutcome::Failed(_)) => retries.chain([self.repeats_until]).min(),
            Phase::Ended(RoomOutcome::Success) => None,
        }
    }

    /// Takes an event. Appends the actions to `out`, in order.
    pub fn handle(&mut self, now: Moment, event: ReceiverEvent, out: &mut Vec<ReceiverAction>) {
        match event {
            ReceiverEvent::Message { from, message } if message.tag() == self.plan.tag => {
                self.take(now, from, message, out);
            }
            ReceiverEvent::Message { .. } => {}
            ReceiverEvent::LinkUp { from, session } => self.link_up(now, from, session, out),
            ReceiverEvent::LinkBroken { from } => {
                let until = now + self.plan.limits.grace;
                if let Some(share) = self.shares.get_mut(from) {
                    share.broken_until.get_or_insert(until);
                }
            }
            ReceiverEvent::PeerLost { from } => {
                if let Some(share) = self.shares.get_mut(from) {
                    share.has_aborted = true;
                    self.fail(now, Code::Unreachable, out);
                }
            }
            ReceiverEvent::Fenced => self.fenced(now, out),
            ReceiverEvent::Verified {
                is_equal,
                is_own_room,
            } => self.verified(now, is_equal && is_own_room, out),
            ReceiverEvent::Abort { code } => self.fail(now, code, out),
            ReceiverEvent::Tick => self.tick(now, out),
        }
    }

    fn take(
        &mut self,
        now: Moment,
        from: usize,
        message: ToReceiver,
        out: &mut Vec<ReceiverAction>,
    ) {
        let retry = self.plan.limits.retry;
        let Some(share) = self.shares.get_mut(from) else {
            return;
        };
        match message {
            ToReceiver::Accept { .. } => {
                let is_new = !std::mem::replace(&mut share.is_accepted, true);
                if is_new && self.phase == Phase::Open && self.all_accepted() {
                    self.state_until = (now + self.plan.limits.waiting).min(self.plan.deadline);
                }
            }
            ToReceiver::Busy { retry_after, .. } => share.next_retry = now + retry.max(retry_after),
            ToReceiver::Refuse { code, .. } => {
                share.has_aborted = true;
                self.fail(now, code, out);
            }
            ToReceiver::Chunk { chunk, .. } => self.chunk(now, from, chunk, out),
            ToReceiver::Done { chunks, root, .. } => self.done(now, from, (chunks, root), out),
            ToReceiver::Abort { code, .. } => {
                self.fail(now, code, out);
                // An answer must not come before the fence: the sender may reuse its pages after it.
                if !self.holds_pages {
                    let tag = self.plan.tag;
                    send(from, ToSender::Aborted { tag }, out);
                }
            }
            ToReceiver::Aborted { .. } => {
                share.has_aborted = true;
                // A sender that has ended its writes sends nothing more, so the room cannot succeed.
                self.fail(now, Code::GrantEnded, out);
            }
        }
    }

    fn chunk(&mut self, now: Moment, from: usize, chunk: RoomChunk, out: &mut Vec<ReceiverAction>) {
        if self.phase != Phase::Open {
            return;
        }
        let Some(share) = self.shares.get_mut(from) else {
            return;
        };
        // A sender that sends chunks has accepted, even if its Accept was lost.
        share.is_accepted = true;
        match share.chunks.get(&chunk.id) {
            Some(known) if *known == chunk => return,
            Some(_) => return self.fail(now, Code::Malformed, out),
            None => {}
        }
        let is_fit = chunk.id < MAX_CHUNKS
            && match &chunk.body {
                ChunkBody::Pages(rectangle) => share.bitmap.mark(rectangle),
                ChunkBody::Aux => {
                    share.plan.wants_aux && !std::mem::replace(&mut share.has_aux, true)
                }
            };
        if !is_fit {
            return self.fail(now, Code::Malformed, out);
        }
        share.chunks.insert(chunk.id, chunk);
        self.state_until = (now + self.plan.limits.stalled).min(self.plan.deadline);
        self.settle(now, out);
    }

    fn done(
        &mut self,
        now: Moment,
        from: usize,
        done: (u32, RoomRoot),
        out: &mut Vec<ReceiverAction>,
    ) {
        if self.phase != Phase::Open {
            return;
        }
        let Some(share) = self.shares.get_mut(from) else {
            return;
        };
        share.is_accepted = true;
        if done.0 > MAX_CHUNKS || share.done.is_some_and(|known| known != done) {
            return self.fail(now, Code::Malformed, out);
        }
        share.done = Some(done);
        let missing = (0..done.0).filter(|id| !share.chunks.contains_key(id));
        let chunks: Vec<u32> = missing.take(MAX_LACKS).collect();
        if !chunks.is_empty() {
            let tag = self.plan.tag;
            return send(from, ToSender::Lacks { tag, chunks }, out);
        }
        self.settle(now, out);
    }

    /// Closes the room once the part of every sender is complete.
    fn settle(&mut self, now: Moment, out: &mut Vec<ReceiverAction>) {
        if !self.shares.iter().all(Share::has_all_chunks) {
            return;
        }
        for share in &self.shares {
            let has_aux = share.has_aux == share.plan.wants_aux;
            if !share.bitmap.is_full() || !has_aux {
                return self.fail(now, Code::Malformed, out);
            }
            let root = RoomRoot::of(self.plan.tag, share.chunks.values());
            if share.done.is_some_and(|(_, wanted)| wanted != root) {
                return self.fail(now, Code::ChecksumMismatch, out);
            }
        }
        self.phase = Phase::Closing(RoomOutcome::Success);
        self.state_until = (now + self.plan.limits.closing).min(self.plan.deadline);
        out.push(ReceiverAction::CloseRoom);
    }

    fn fenced(&mut self, now: Moment, out: &mut Vec<ReceiverAction>) {
        match self.phase {
            // A repeated or late write may have changed bytes after their announcement. After the fence no
            // write can change them, so the comparison is final.
            Phase::Closing(RoomOutcome::Success) => {
                self.phase = Phase::Verifying;
                let all = (0..).zip(&self.shares).flat_map(|(from, share)| {
                    let chunks = share.chunks.values().cloned();
                    chunks.map(move |chunk| (from, chunk))
                });
                out.push(ReceiverAction::Verify(all.collect()));
            }
            Phase::Closing(failed @ RoomOutcome::Failed(_)) => self.end_failed(now, failed, out),
            Phase::Open | Phase::Verifying | Phase::Ended(_) => {}
        }
    }

    fn verified(&mut self, now: Moment, is_right: bool, out: &mut Vec<ReceiverAction>) {
        if self.phase != Phase::Verifying {
            return;
        }
        if !is_right {
            return self.fail(now, Code::ChecksumMismatch, out);
        }
        self.phase = Phase::Ended(RoomOutcome::Success);
        self.holds_pages = false;
        let tag = self.plan.tag;
        for to in 0..self.shares.len() {
            send(to, ToSender::Complete { tag }, out);
        }
    }

    fn fail(&mut self, now: Moment, code: Code, out: &mut Vec<ReceiverAction>) {
        let failed = RoomOutcome::Failed(code);
        match self.phase {
            Phase::Ended(_) | Phase::Closing(RoomOutcome::Failed(_)) => return,
            Phase::Open => out.push(ReceiverAction::CloseRoom),
            Phase::Closing(RoomOutcome::Success) | Phase::Verifying => {}
        }
        self.repeats_until = now + self.plan.limits.closing;
        self.tell_abort(now, code, out);
        match self.phase {
            // The room was fenced before the comparison, so no second close is needed.
            Phase::Verifying => self.end_failed(now, failed, out),
            _ => self.phase = Phase::Closing(failed),
        }
    }

    fn end_failed(&mut self, now: Moment, failed: RoomOutcome, out: &mut Vec<ReceiverAction>) {
        self.phase = Phase::Ended(failed);
        self.repeats_until = self.repeats_until.max(now + self.plan.limits.retry);
        self.holds_pages = false;
        out.push(ReceiverAction::ReleasePages);
        let tag = self.plan.tag;
        for to in 0..self.shares.len() {
            send(to, ToSender::Aborted { tag }, out);
        }
    }

    fn tell_abort(&mut self, now: Moment, code: Code, out: &mut Vec<ReceiverAction>) {
        let (tag, next_retry) = (self.plan.tag, now + self.plan.limits.retry);
        for (to, share) in self.shares.iter_mut().enumerate() {
            if !share.has_aborted {
                share.next_retry = next_retry;
                send(to, ToSender::Abort { tag, code }, out);
            }
        }
    }

    fn link_up(
        &mut self,
        now: Moment,
        from: usize,
        session: Incarnation,
        out: &mut Vec<ReceiverAction>,
    ) {
        let Some(share) = self.shares.get_mut(from) else {
            return;
        };
        let is_new_life = share.plan.session.is_some_and(|known| known != session);
        if is_new_life && share.is_accepted {
            // The next incarnation of the process knows nothing of the room.
            share.has_aborted = true;
            return self.fail(now, Code::WrongIncarnation, out);
        }
        // The room does not depend on an incarnation that had not accepted.
        share.plan.session = Some(session);
        if (share.broken_until.take().is_some() || is_new_life) && self.phase == Phase::Open {
            // Repeats the offer, because the earlier one may be lost. A sender whose room has ended answers
            // with its outcome.
            self.offer(now, from, out);
        }
    }

    fn tick(&mut self, now: Moment, out: &mut Vec<ReceiverAction>) {
        let is_live = !matches!(
            self.phase,
            Phase::Ended(_) | Phase::Closing(RoomOutcome::Failed(_))
        );
        if is_live && now >= self.state_until {
            return self.fail(now, Code::DeadlineExceeded, out);
        }
        let is_broken = |share: &Share| share.broken_until.is_some_and(|until| now >= until);
        if self.phase == Phase::Open && self.shares.iter().any(is_broken) {
            return self.fail(now, Code::Unreachable, out);
        }
        for to in 0..self.shares.len() {
            let Some(share) = self.shares.get(to) else {
                continue;
            };
            if now < share.next_retry || !self.repeats_to(share) {
                continue;
            }
            match self.phase {
                Phase::Open => self.offer(now, to, out),
                Phase::Closing(RoomOutcome::Failed(code))
                | Phase::Ended(RoomOutcome::Failed(code))
                    if now < self.repeats_until =>
                {
                    let tag = self.plan.tag;
                    send(to, ToSender::Abort { tag, code }, out);
                }
                _ => {}
            }
            if let Some(share) = self.shares.get_mut(to) {
                share.next_retry = now + self.plan.limits.retry;
            }
        }
    }

    /// Whether the room must repeat a message to this sender: an offer or an abort.
    fn repeats_to(&self, share: &Share) -> bool {
        match self.phase {
            Phase::Open => !share.is_accepted,
            Phase::Closing(RoomOutcome::Failed(_)) | Phase::Ended(RoomOutcome::Failed(_)) => {
                !share.has_aborted
            }
            _ => false,
        }
    }

    fn all_accepted(&self) -> bool {
        self.shares.iter().all(|share| share.is_accepted)
    }

    fn offer(&self, now: Moment, to: usize, out: &mut Vec<ReceiverAction>) {
        let Some(share) = self.shares.get(to) else {
            return;
        };
        let offer = RoomOffer {
            tag: self.plan.tag,
            receiver: share.plan.receiver,
            epoch: self.plan.epoch,
            key: self.plan.key,
            held: self.plan.held,
            pages: self.plan.pages,
            view: share.plan.view,
            wants_aux: share.plan.wants_aux,
            time_left: self.plan.deadline - now,
        };
        send(to, ToSender::Offer(offer), out);
    }

    /// The time that the room has left.
    pub fn time_left(&self, now: Moment) -> Duration {
        self.plan.deadline - now
    }
}

fn send(to: usize, message: ToSender, out: &mut Vec<ReceiverAction>) {
    out.push(ReceiverAction::Send { to, message });
}
