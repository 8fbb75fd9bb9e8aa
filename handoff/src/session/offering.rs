//! Prefill's offers: which offers pin their pages, which wait, and which end before they open a room (rows P5,
//! P6, P8, P10).
//!
//! ```text
//!  offer ──► declined before? ──► PinLedger ──► pinned ──► a room (`sending`)
//!                │ P8: ends           │ P5: waits           │
//!                                     └── deadline: Full ◄──┴── the end of a room admits the next offer
//! ```
//!
//! An offer that waits ends early when one of its receivers gives up or declines. It also ends when all
//! processes that asked for it are lost. [`SenderDesk`](crate::room::SenderDesk) tells which processes are its
//! receivers.

use super::agent::Agent;
use super::handle::TransferCell;
use super::sending::SendCall;
use crate::Moment;
use crate::pins::PinOutcome;
use crate::room::{
    PageRectangle, PollState, RoomId, SenderAction, SenderEvent, ToReceiver, ToSender,
};
use crate::wire::HandoffMessage;
use kvpool_types::{Code, Incarnation};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The longest pause of an attempt whose process has an open breaker. The desk forgets an attempt that does not
/// ask again for [`DeskOptions::early_ttl`](crate::room::DeskOptions::early_ttl), which is longer.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// An offer that waits until other offers free their pins.
pub(super) struct WaitingOffer {
    call: SendCall,
    cell: Arc<TransferCell>,
}

impl Agent {
    /// Pins the pages of an offer and opens its room, or lets the offer wait.
    pub(super) fn offer(&mut self, call: SendCall, cell: Arc<TransferCell>) {
        let (now, id) = (self.now(), call.room);
        let given_up = self.senders.expect(now, id, call.receivers);
        self.publish_ended();
        if let Some(code) = given_up {
            return self.end_offer(id, &cell, code);
        }
        let pages = call.pages.len() as u64;
        match self.pins.pin(id, pages) {
            PinOutcome::Waits => {
                self.waiting_offers.fetch_add(1, Ordering::Relaxed);
                self.waiting.insert(id, WaitingOffer { call, cell });
            }
            _ => self.open_offer(call, cell),
        }
    }

    /// Opens the room of an offer whose pages are pinned. All of its pages are computed.
    fn open_offer(&mut self, call: SendCall, cell: Arc<TransferCell>) {
        let (id, count) = (call.room, call.pages.len());
        self.pinned.fetch_add(count as u64, Ordering::Relaxed);
        self.open_sending(call, cell);
        if count > 0 {
            let rectangle = PageRectangle {
                pages: 0..u32::try_from(count).unwrap_or(u32::MAX),
                layers: self.memory.layers(),
            };
            self.sender_event(id, SenderEvent::Produced(rectangle));
        }
        self.produced_all(id, &[]);
    }

    /// Opens the rooms of offers that waited and now have pins.
    pub(super) fn open_admitted(&mut self) {
        loop {
            let admitted = self.pins.admitted();
            if admitted.is_empty() {
                return;
            }
            for room in admitted {
                if let Some(WaitingOffer { call, cell }) = self.waiting.remove(&room) {
                    self.waiting_offers.fetch_sub(1, Ordering::Relaxed);
                    self.open_offer(call, cell);
                }
            }
        }
    }

    /// Ends the waiting offers whose deadlines have passed.
    pub(super) fn end_late_offers(&mut self) {
        let now = Instant::now();
        let waiting = self.waiting.iter();
        let late = waiting.filter(|(_, offer)| offer.call.times.deadline <= now);
        for room in late.map(|(room, _)| *room).collect::<Vec<_>>() {
            self.end_waiting(room, Code::Full);
        }
    }

    /// The first deadline of a waiting offer.
    pub(super) fn next_late_offer(&self) -> Option<Moment> {
        let deadlines = self.waiting.values().map(|offer| offer.call.times.deadline);
        deadlines.min().map(|deadline| self.moment(deadline))
    }

    /// Connects to a process that asks for a room, to learn of its death.
    pub(super) fn watch_asker(&mut self, now: Moment, from: Incarnation, address: &str) {
        self.peers.know(address);
        // The process lives, so an earlier loss no longer counts. If prefill cannot reach the process, that is
        // noted again.
        self.lost
            .retain(|session, at| *session != from || *at > now);
    }

    /// Notes the moment at which a process that asked for a room counts as lost, unless its connection comes
    /// back.
    pub(super) fn note_lost(&mut self, session: Incarnation, at: Moment) {
        let now = self.now();
        if self.senders.asked(now).any(|(_, by)| by == session) {
            let noted = self.lost.entry(session).or_insert(at);
            *noted = at.min(*noted);
        }
    }

    /// The waiting offers whose processes have all lost their connections. Each has the moment at which the
    /// last of these processes counts as lost.
    fn deserted(&self) -> Vec<(RoomId, Moment)> {
        if self.lost.is_empty() || self.waiting.is_empty() {
            return Vec::new();
        }
        let mut last: BTreeMap<RoomId, Option<Moment>> = BTreeMap::new();
        for (room, session) in self.senders.asked(self.now()) {
            let at = self.lost.get(&session).copied();
            let all = last.entry(room).or_insert(at);
            *all = all.zip(at).map(|(one, other)| one.max(other));
        }
        let waits = |room: &RoomId| self.waiting.contains_key(room);
        let last = last.into_iter().filter(|(room, _)| waits(room));
        last.filter_map(|(room, at)| Some((room, at?))).collect()
    }

    /// Ends the waiting offers whose processes are all lost. No process would take their pages.
    pub(super) fn end_deserted_offers(&mut self) {
        let now = self.now();
        for (room, at) in self.deserted() {
            if at <= now {
                self.end_waiting(room, Code::Unreachable);
            }
        }
    }

    /// The moment at which the next waiting offer has lost all its processes.
    pub(super) fn next_deserted_offer(&self) -> Option<Moment> {
        self.deserted().into_iter().map(|(_, at)| at).min()
    }

    /// Ends the waiting offers, because the session closes.
    pub(super) fn end_waiting_offers(&mut self, code: Code) {
        for room in self.waiting.keys().copied().collect::<Vec<_>>() {
            self.end_waiting(room, code);
        }
    }

    /// Ends a waiting offer if it is the caller's. Another offer may have its number by now.
    pub(super) fn end_own_offer(&mut self, id: RoomId, cell: &Arc<TransferCell>, code: Code) {
        let waiting = self.waiting.get(&id);
        if waiting.is_some_and(|offer| Arc::ptr_eq(&offer.cell, cell)) {
            self.end_waiting(id, code);
        }
    }

    /// Ends a waiting offer. Does nothing if no offer of this number waits.
    pub(super) fn end_waiting(&mut self, room: RoomId, code: Code) {
        let Some(WaitingOffer { call, cell }) = self.waiting.remove(&room) else {
            return;
        };
        self.waiting_offers.fetch_sub(1, Ordering::Relaxed);
        self.pins.free(room);
        self.end_offer(call.room, &cell, code);
    }

    /// Ends an offer that has no room, and tells the processes that asked for the offer.
    fn end_offer(&mut self, id: RoomId, cell: &TransferCell, code: Code) {
        let now = self.now();
        let answers = self.senders.refuse(now, id, code);
        self.answer_receivers(answers);
        // This must come before the caller learns of the end: the caller may offer the same number again.
        self.close_number(id);
        cell.change(|state| {
            state.poll = PollState::Failed;
            state.failure = Some(code);
            state.is_released = true;
        });
    }

    /// The reason to end a waiting offer, if `message` gives its request up and its process has a place in the
    /// request.
    pub(super) fn gives_up(
        &self,
        now: Moment,
        from: Incarnation,
        message: &ToSender,
    ) -> Option<Code> {
        let (code, attempt) = match message {
            ToSender::Abort { tag, code } => (*code, Some(*tag)),
            ToSender::Decline { code, .. } => (*code, None),
            _ => return None,
        };
        let id = message.tag().room;
        let receivers = self.waiting.get(&id)?.call.receivers;
        let may_end = (self.senders).may_end(now, (from, attempt), (id, receivers));
        may_end.then_some(code)
    }

    /// A receiver's process declines a request. A process without pages opens its breaker (row P6). With
    /// `ends_offer` the waiting offer of the request ends after this call, and answers all processes that
    /// asked: see `gives_up`.
    pub(super) fn declined(
        &mut self,
        now: Moment,
        (from, message): (Incarnation, ToSender),
        ends_offer: bool,
        out: &mut Vec<SenderAction>,
    ) {
        let ToSender::Decline { code, .. } = message else {
            return;
        };
        if code == Code::Full {
            self.pins.trip(now, from);
        }
        if !ends_offer {
            // The declining process has no place in the offer, which continues. A decline has no answer.
            self.senders.take(now, from, message, out);
        }
    }

    /// The answer to a receiver that asks while its breaker is open: ask again when the breaker is closed, or
    /// earlier.
    pub(super) fn held_back(
        &self,
        now: Moment,
        from: Incarnation,
        message: &ToSender,
    ) -> Option<ToReceiver> {
        let ToSender::Offer(offer) = message else {
            return None;
        };
        let tag = offer.tag;
        let until = self.pins.breaker(now, from)?;
        let room = self.senders.room(tag.room);
        if room.is_some_and(|room| room.receiver(from, tag).is_some()) {
            // The room accepted the attempt before, so only the answer was lost.
            return None;
        }
        let retry_after = (until - now).min(ASK_AGAIN);
        Some(ToReceiver::Busy { tag, retry_after })
    }

    pub(super) fn answer_receivers(&mut self, answers: Vec<(Incarnation, ToReceiver)>) {
        for (session, answer) in answers {
            if let Some(address) = self.addresses.get(&session) {
                let answer = HandoffMessage::ToReceiver(answer);
                self.peers.send(address, Some(session), &answer);
            }
        }
    }
}
