//! All rooms of one process, and the messages of rooms that it does not have.

use super::messages::{RoomOffer, ToReceiver, ToSender};
use super::receiver::{ReceiverAction, ReceiverEvent, RoomReceiver, RoomReceiverPlan};
use super::sender::{RoomSender, RoomSenderPlan, SenderAction, SenderEvent};
use super::{RoomId, RoomOutcome, RoomTag, Tombstones};
use crate::Moment;
use kvpool_types::{Code, Incarnation};
use std::collections::BTreeMap;
use std::time::Duration;

/// The bounds of a desk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeskOptions {
    /// The number of tombstones.
    pub tombstones: usize,
    /// The number of offers for rooms that the engine has not named yet.
    pub early_offers: usize,
    /// How long such an offer is kept. Its receiver repeats it.
    pub early_ttl: Duration,
}

impl Default for DeskOptions {
    fn default() -> Self {
        Self {
            tombstones: 65_536,
            early_offers: 4096,
            early_ttl: Duration::from_secs(30),
        }
    }
}

/// Decode's rooms.
#[derive(Clone, Debug)]
pub struct ReceiverDesk {
    session: Incarnation,
    rooms: BTreeMap<RoomTag, RoomReceiver>,
    tombstones: Tombstones,
}

impl ReceiverDesk {
    /// A desk of a process with this session.
    pub fn new(session: Incarnation, options: &DeskOptions) -> Self {
        Self {
            session,
            rooms: BTreeMap::new(),
            tombstones: Tombstones::new(options.tombstones),
        }
    }

    /// Opens a room.
    ///
    /// # Errors
    ///
    /// [`Code::StaleEpoch`] when the room's generation was used before.
    pub fn open(
        &mut self,
        now: Moment,
        plan: RoomReceiverPlan,
        out: &mut Vec<ReceiverAction>,
    ) -> Result<(), Code> {
        let tag = plan.tag;
        if self.rooms.contains_key(&tag) || !self.tombstones.admits(self.session, tag) {
            return Err(Code::StaleEpoch);
        }
        self.rooms.insert(tag, RoomReceiver::open(now, plan, out));
        Ok(())
    }

    /// An open room.
    pub fn room(&self, tag: RoomTag) -> Option<&RoomReceiver> {
        self.rooms.get(&tag)
    }

    /// All rooms that have no tombstone yet.
    pub fn rooms(&self) -> impl Iterator<Item = &RoomReceiver> {
        self.rooms.values()
    }

    /// How a room ended, while its tombstone is kept.
    pub fn outcome(&self, tag: RoomTag) -> Option<RoomOutcome> {
        let of_room = self.rooms.get(&tag).and_then(RoomReceiver::outcome);
        of_room.or_else(|| self.tombstones.outcome(self.session, tag))
    }

    /// Takes a message from a sender's process. An answer for that process is returned when the
    /// message belongs to no room here.
    pub fn take(
        &mut self,
        now: Moment,
        session: Incarnation,
        message: ToReceiver,
        out: &mut Vec<ReceiverAction>,
    ) -> Option<ToSender> {
        let tag = message.tag();
        if let Some(room) = self.rooms.get_mut(&tag) {
            if let Some(from) = room.sender(session) {
                let event = ReceiverEvent::Message { from, message };
                room.handle(now, event, out);
                self.bury(now, tag);
            }
            return None;
        }
        let outcome = self.tombstones.outcome(self.session, tag);
        match (message, outcome) {
            (ToReceiver::Done { .. }, Some(RoomOutcome::Success)) => {
                Some(ToSender::Complete { tag })
            }
            (ToReceiver::Abort { .. }, _) => Some(ToSender::Aborted { tag }),
            (
                ToReceiver::Chunk { .. } | ToReceiver::Done { .. } | ToReceiver::Accept { .. },
                Some(RoomOutcome::Failed(code)),
            ) => Some(ToSender::Abort { tag, code }),
            // A room of which nothing is known: its tombstone is gone.
            (ToReceiver::Chunk { .. } | ToReceiver::Done { .. }, None) => {
                let code = Code::GrantEnded;
                Some(ToSender::Abort { tag, code })
            }
            _ => None,
        }
    }

    /// Gives one room an event.
    pub fn handle(
        &mut self,
        now: Moment,
        tag: RoomTag,
        event: ReceiverEvent,
        out: &mut Vec<ReceiverAction>,
    ) {
        if let Some(room) = self.rooms.get_mut(&tag) {
            room.handle(now, event, out);
            self.bury(now, tag);
        }
    }

    fn bury(&mut self, now: Moment, tag: RoomTag) {
        let Some(room) = self.rooms.get(&tag) else {
            return;
        };
        if let Some(outcome) = room.outcome().filter(|_| room.is_over(now)) {
            self.tombstones.bury(self.session, tag, outcome);
            self.rooms.remove(&tag);
        }
    }
}

/// An offer for a room that the engine has not named yet.
#[derive(Clone, Debug)]
struct EarlyOffer {
    session: Incarnation,
    offer: RoomOffer,
    until: Moment,
}

/// Prefill's rooms.
#[derive(Clone, Debug)]
pub struct SenderDesk {
    options: DeskOptions,
    rooms: BTreeMap<RoomId, RoomSender>,
    early: Vec<EarlyOffer>,
    /// The attempts that were told to ask again later, and until when that counts.
    held_back: BTreeMap<(Incarnation, RoomTag), Moment>,
    tombstones: Tombstones,
    ended: Vec<(RoomId, RoomOutcome)>,
    /// Rooms that one side gave up, for the other side that has not named them yet.
    given_up: BTreeMap<RoomId, GivenUp>,
}

/// Who gave a room up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GivenUpBy {
    Sender,
    /// One attempt of a receiver. The next attempt goes on.
    Attempt,
    /// A receiver, for the whole request.
    Receiver,
}

/// Who gave a room up, and why.
#[derive(Clone, Copy, Debug)]
struct GivenUp {
    by: GivenUpBy,
    code: Code,
    until: Moment,
}

impl SenderDesk {
    /// A desk without rooms.
    pub fn new(options: DeskOptions) -> Self {
        Self {
            options,
            rooms: BTreeMap::new(),
            early: Vec::new(),
            held_back: BTreeMap::new(),
            tombstones: Tombstones::new(options.tombstones),
            ended: Vec::new(),
            given_up: BTreeMap::new(),
        }
    }

    /// Opens a room, and gives it the offers that came before (row G18). Returns the answers for processes whose
    /// offers the room refuses, by their sessions.
    ///
    /// # Errors
    ///
    /// [`Code::InProgress`] when the room is open.
    pub fn open(
        &mut self,
        now: Moment,
        plan: RoomSenderPlan,
        out: &mut Vec<SenderAction>,
    ) -> Result<Vec<(Incarnation, ToReceiver)>, Code> {
        let id = plan.room;
        self.bury_if_ended(now, id);
        if self.rooms.contains_key(&id) {
            return Err(Code::InProgress);
        }
        self.rooms.insert(id, RoomSender::open(now, plan));
        let (mine, rest) = std::mem::take(&mut self.early)
            .into_iter()
            .filter(|early| early.until > now)
            .partition(|early| early.offer.tag.room == id);
        self.early = rest;
        let mine: Vec<EarlyOffer> = mine;
        // A receiver may have given the request up already. What this room ends with is noted anew.
        let given_up = self.given_up.remove(&id);
        let mut answers = Vec::new();
        for EarlyOffer { session, offer, .. } in mine {
            // Nobody knew the pages of the room when the offer came: `take` judges it now. Decode that gets no
            // answer would wait for its whole patience.
            let answer = self.take(now, session, ToSender::Offer(offer), out);
            answers.extend(answer.map(|answer| (session, answer)));
        }
        let given_up = given_up.filter(|it| it.by != GivenUpBy::Sender && now < it.until);
        if let Some(GivenUp { code, .. }) = given_up {
            self.handle(now, id, SenderEvent::Abort { code }, out);
        }
        Ok(answers)
    }

    /// Prepares for a room that may open later: an earlier room of its number refuses no receiver any more.
    /// Returns the reason when a receiver has given the room up already (row P8).
    pub fn expect(&mut self, now: Moment, id: RoomId) -> Option<Code> {
        self.bury_if_ended(now, id);
        let given_up = self.given_up.remove(&id);
        let given_up = given_up.filter(|it| it.by != GivenUpBy::Sender && now < it.until);
        given_up.map(|it| it.code)
    }

    /// Ends a room that has not opened. Returns the answers for the processes that asked for it.
    pub fn refuse(
        &mut self,
        now: Moment,
        id: RoomId,
        code: Code,
    ) -> Vec<(Incarnation, ToReceiver)> {
        let (mine, rest) = std::mem::take(&mut self.early)
            .into_iter()
            .partition(|early| early.offer.tag.room == id);
        self.early = rest;
        let keep = self.options.early_ttl;
        self.give_up(now, id, (code, GivenUpBy::Sender), keep);
        let mine: Vec<EarlyOffer> = mine;
        for EarlyOffer { session, offer, .. } in &mine {
            // An abort of this attempt may be under way. It says nothing about the next room of this number.
            let outcome = RoomOutcome::Failed(code);
            self.tombstones.bury(*session, offer.tag, outcome);
        }
        self.bury_held_back(id, code);
        let answer = |early: EarlyOffer| {
            let tag = early.offer.tag;
            (early.session, ToReceiver::Refuse { tag, code })
        };
        mine.into_iter().map(answer).collect()
    }

    /// Notes that an attempt of a receiver is told to ask again later. It ends with the room, as an early offer does.
    pub fn hold_back(&mut self, now: Moment, receiver: Incarnation, tag: RoomTag) {
        let attempt = (receiver, tag);
        let most = self.options.early_offers;
        if self.held_back.len() >= most && !self.held_back.contains_key(&attempt) {
            self.held_back.retain(|_, until| now < *until);
        }
        if self.held_back.len() < most || self.held_back.contains_key(&attempt) {
            let until = now + self.options.early_ttl;
            self.held_back.insert(attempt, until);
        }
    }

    /// Buries the attempts at a room that were told to ask again later. Their aborts may be under way, and say
    /// nothing about the next room of this number.
    fn bury_held_back(&mut self, id: RoomId, code: Code) {
        let tombstones = &mut self.tombstones;
        self.held_back.retain(|(session, tag), _| {
            let ends = tag.room == id;
            if ends {
                tombstones.bury(*session, *tag, RoomOutcome::Failed(code));
            }
            !ends
        });
    }

    /// Puts tombstones in the place of a room that has ended, so that its number is free. Its last
    /// messages may be lost: the other ends have deadlines of their own.
    pub fn bury_if_ended(&mut self, now: Moment, id: RoomId) {
        let outcome = self.rooms.get(&id).and_then(RoomSender::outcome);
        if let Some(outcome) = outcome {
            self.bury_with(now, id, outcome);
        }
    }

    /// Whether an attempt of a receiver is known to have ended.
    pub fn has_ended(&self, receiver: Incarnation, tag: RoomTag) -> bool {
        self.tombstones.outcome(receiver, tag).is_some()
    }

    /// The rooms that have not opened, each with a process that asks for it. A process that has not repeated its
    /// offer for [`DeskOptions::early_ttl`] asks no more.
    pub fn asked(&self, now: Moment) -> impl Iterator<Item = (RoomId, Incarnation)> {
        let early = self.early.iter().filter(move |early| early.until > now);
        early.map(|early| (early.offer.tag.room, early.session))
    }

    /// An open room.
    pub fn room(&self, id: RoomId) -> Option<&RoomSender> {
        self.rooms.get(&id)
    }

    /// All rooms that have no tombstones yet.
    pub fn rooms(&self) -> impl Iterator<Item = &RoomSender> {
        self.rooms.values()
    }

    /// Takes a message from a receiver's process. An answer for that process is returned when the
    /// message belongs to no room here.
    pub fn take(
        &mut self,
        now: Moment,
        session: Incarnation,
        message: ToSender,
        out: &mut Vec<SenderAction>,
    ) -> Option<ToReceiver> {
        let tag = message.tag();
        if let ToSender::Decline { code, .. } = message {
            self.declined(now, (session, tag.room), code, out);
            return None;
        }
        let outcome = self.tombstones.outcome(session, tag);
        let is_open = |room: &RoomSender| room.receiver(session, tag).is_some();
        let is_open = self.rooms.get(&tag.room).is_some_and(is_open);
        match (&message, outcome) {
            (ToSender::Offer(_), _) if !is_open && !self.tombstones.admits(session, tag) => {
                let code = match outcome {
                    Some(RoomOutcome::Failed(code)) => code,
                    _ => Code::StaleEpoch,
                };
                return Some(ToReceiver::Refuse { tag, code });
            }
            (ToSender::Abort { .. }, Some(_)) => return Some(ToReceiver::Aborted { tag }),
            _ => {}
        }
        let Some(room) = self.rooms.get_mut(&tag.room) else {
            return self.without_room(now, session, message);
        };
        let from = match &message {
            ToSender::Offer(offer) => Some(offer.receiver as usize),
            _ => room.receiver(session, tag),
        };
        let Some(from) = from else {
            return match message {
                ToSender::Abort { .. } => self.without_room(now, session, message),
                _ => None,
            };
        };
        if let ToSender::Offer(offer) = &message {
            // A process that is no receiver of the room has no index to answer to.
            if let Err(code) = room.may_offer(from, session, tag) {
                return Some(ToReceiver::Refuse { tag, code });
            }
            if !room.fits(offer) {
                // The two ends mean different requests: neither can end well.
                let code = Code::OutOfRange;
                room.handle(now, SenderEvent::Abort { code }, out);
                self.bury(now, tag.room);
                return Some(ToReceiver::Refuse { tag, code });
            }
        }
        let event = SenderEvent::Message {
            from,
            session,
            message,
        };
        room.handle(now, event, out);
        self.bury(now, tag.room);
        None
    }

    /// Gives one room an event.
    pub fn handle(
        &mut self,
        now: Moment,
        id: RoomId,
        event: SenderEvent,
        out: &mut Vec<SenderAction>,
    ) {
        if let Some(room) = self.rooms.get_mut(&id) {
            room.handle(now, event, out);
            self.bury(now, id);
        }
    }

    /// The rooms that tombstones have replaced since the last call.
    pub fn take_ended(&mut self) -> Vec<(RoomId, RoomOutcome)> {
        std::mem::take(&mut self.ended)
    }

    /// Forgets what a process offered that has ended.
    pub fn forget(&mut self, session: Incarnation) {
        self.early.retain(|early| early.session != session);
        self.held_back.retain(|(of, _), _| *of != session);
        self.tombstones.forget(session);
    }

    /// A receiver wants nothing of a request: the request ends for all of its receivers.
    fn declined(
        &mut self,
        now: Moment,
        (from, id): (Incarnation, RoomId),
        code: Code,
        out: &mut Vec<SenderAction>,
    ) {
        if let Some(room) = self.rooms.get(&id) {
            // The session of a receiver that has not asked yet is unknown: it may be this one.
            let mut receivers = (0..room.receivers()).map(|to| room.receiver_session(to));
            if receivers.any(|of| of.is_none_or(|of| of == from)) {
                self.handle(now, id, SenderEvent::Abort { code }, out);
            }
            return;
        }
        let ended = |it: &GivenUp| it.by == GivenUpBy::Sender && now < it.until;
        if self.given_up.get(&id).is_some_and(ended) {
            // Another rank of decode declined the same request: the next request of this number goes on.
            return;
        }
        // Their processes ask again, and are refused. Their aborts say nothing about the next room of this number.
        let tombstones = &mut self.tombstones;
        self.early.retain(|early| {
            let ends = early.offer.tag.room == id;
            if ends {
                tombstones.bury(early.session, early.offer.tag, RoomOutcome::Failed(code));
            }
            !ends
        });
        self.bury_held_back(id, code);
        let keep = self.options.early_ttl;
        self.give_up(now, id, (code, GivenUpBy::Receiver), keep);
    }

    fn without_room(
        &mut self,
        now: Moment,
        session: Incarnation,
        message: ToSender,
    ) -> Option<ToReceiver> {
        let tag = message.tag();
        match message {
            ToSender::Offer(offer) => {
                match self.given_up.get(&tag.room) {
                    Some(it) if it.by != GivenUpBy::Attempt && now < it.until => {
                        let code = it.code;
                        return Some(ToReceiver::Refuse { tag, code });
                    }
                    // The receiver tries again.
                    Some(_) => drop(self.given_up.remove(&tag.room)),
                    None => {}
                }
                self.early.retain(|early| {
                    early.until > now && (early.session, early.offer.tag) != (session, tag)
                });
                if self.early.len() >= self.options.early_offers {
                    self.hold_back(now, session, tag);
                    let retry_after = Duration::from_secs(1);
                    return Some(ToReceiver::Busy { tag, retry_after });
                }
                self.early.push(EarlyOffer {
                    session,
                    offer,
                    until: now + self.options.early_ttl,
                });
                None
            }
            ToSender::Abort { code, .. } => {
                self.early
                    .retain(|early| (early.session, early.offer.tag) != (session, tag));
                let keep = self.options.early_ttl;
                self.give_up(now, tag.room, (code, GivenUpBy::Attempt), keep);
                // The offer may still be under way: it must find the abort.
                self.tombstones
                    .bury(session, tag, RoomOutcome::Failed(code));
                Some(ToReceiver::Aborted { tag })
            }
            ToSender::Complete { .. }
            | ToSender::Lacks { .. }
            | ToSender::Aborted { .. }
            | ToSender::Decline { .. } => None,
        }
    }

    /// Keeps in mind that a room was given up, for the side that has not named it yet.
    fn give_up(
        &mut self,
        now: Moment,
        room: RoomId,
        (code, by): (Code, GivenUpBy),
        keep: Duration,
    ) {
        if self.given_up.len() >= self.options.early_offers {
            self.given_up.retain(|_, it| now < it.until);
        }
        if self.given_up.len() < self.options.early_offers {
            let given_up = GivenUp {
                by,
                code,
                until: now + keep,
            };
            self.given_up.insert(room, given_up);
        }
    }

    fn bury(&mut self, now: Moment, id: RoomId) {
        let Some(room) = self.rooms.get(&id) else {
            return;
        };
        if let Some(outcome) = room.outcome().filter(|_| room.is_over(now)) {
            self.bury_with(now, id, outcome);
        }
    }

    /// Puts tombstones in the place of a room.
    fn bury_with(&mut self, now: Moment, id: RoomId, outcome: RoomOutcome) {
        if let Some(room) = self.rooms.remove(&id) {
            for (session, tag) in room.tags() {
                self.tombstones.bury(session, tag, outcome);
            }
            if let RoomOutcome::Failed(code) = outcome {
                self.bury_held_back(id, code);
                // A receiver may come as late as the room would have waited for it.
                let keep = self.options.early_ttl.max(room.patience());
                self.give_up(now, id, (code, GivenUpBy::Sender), keep);
            }
            self.ended.push((id, outcome));
        }
    }
}
