//! All rooms of one process, and the answers to messages of rooms that the process does not have.

use super::given_up::{GivenUps, Left, LeftWhat, crowded};
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
    /// The most offers that wait for rooms which the engine has not named yet.
    pub early_offers: usize,
    /// How long an early offer is kept. Its receiver repeats the offer.
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
    /// A desk of the process with the incarnation `session`.
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

    /// Takes a message from a sender's process. Returns an answer for that process when the message belongs to
    /// no open room.
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
            // The desk knows nothing of the room any more: its tombstone is gone.
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
///
/// A room has a place for each of its receivers. The first process that asks for a place has it. Prefill learns
/// nothing else about the processes of a request. So a message ends a room under these conditions alone:
///
/// - Its process and attempt have a place in the room.
/// - It is an abort of an attempt that asked for a place. No other attempt has the place or asked for it.
/// - It is a decline of a process that asked for a place. No other process has the place or asked for it.
/// - It is a decline of a process that did not ask. A place of the room is left that no process asked for.
/// - It is an offer with other pages than the request's. No process has the place of the offer.
///
/// The desk keeps a message about a room that has not opened, and judges the message when the room opens. Only
/// then does the desk know the number of places.
#[derive(Clone, Debug)]
pub struct SenderDesk {
    options: DeskOptions,
    rooms: BTreeMap<RoomId, RoomSender>,
    early: Vec<EarlyOffer>,
    /// The attempts that were told to ask again later.
    held_back: BTreeMap<(Incarnation, RoomTag), HeldBack>,
    tombstones: Tombstones,
    ended: Vec<(RoomId, RoomOutcome)>,
    /// Requests that one side gave up and that the other side has not named yet.
    given_up: GivenUps,
}

/// An attempt that was told to ask again later.
#[derive(Clone, Copy, Debug)]
struct HeldBack {
    /// The attempt's place among the room's receivers.
    place: u32,
    until: Moment,
}

/// An attempt that asked for a place in a room and has none yet.
#[derive(Clone, Copy, Debug)]
struct Ask {
    session: Incarnation,
    tag: RoomTag,
    /// The place that the attempt asked for.
    place: u32,
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
            given_up: GivenUps::new(options.early_offers),
        }
    }

    /// Opens a room, and gives it the early offers (row G18). Returns an answer for each offer that the room
    /// refuses, with the session of its process.
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
        let (receivers, room) = (plan.receivers, RoomSender::open(now, plan));
        let (mine, rest) = std::mem::take(&mut self.early)
            .into_iter()
            .filter(|early| early.until > now)
            .partition(|early| early.offer.tag.room == id);
        self.early = rest;
        let mut mine: Vec<EarlyOffer> = mine;
        // An offer that does not fit ends the room. It must not do so where another process has the place, so
        // it comes last.
        mine.sort_by_key(|early| !room.fits(&early.offer));
        self.rooms.insert(id, room);
        // The note of an earlier room of this number must not refuse receivers of this room.
        self.given_up.admit(id);
        let left = self.given_up.take_left(now, id);
        let mut answers = Vec::new();
        for EarlyOffer { session, offer, .. } in mine {
            // When the offer came, prefill did not know the pages of the room. `take` judges the offer now:
            // without an answer decode would wait for its whole patience.
            let answer = self.take(now, session, ToSender::Offer(offer), out);
            answers.extend(answer.map(|answer| (session, answer)));
        }
        if let Some(code) = self.left_by(now, (id, receivers), &left) {
            self.handle(now, id, SenderEvent::Abort { code }, out);
        }
        Ok(answers)
    }

    /// Prepares for a room with `receivers` receivers that may open later. An earlier room of the same number
    /// refuses no receiver any more. Returns the reason when a receiver has given the room up already (row P8).
    pub fn expect(&mut self, now: Moment, id: RoomId, receivers: usize) -> Option<Code> {
        self.bury_if_ended(now, id);
        self.given_up.admit(id);
        let left = self.given_up.take_left(now, id);
        self.left_by(now, (id, receivers), &left)
    }

    /// The reason of the first process that gave the room up and has a place in it. A process that gave up an
    /// attempt and asks again in another attempt has not given the room up.
    fn left_by(&self, now: Moment, room: (RoomId, usize), left: &[Left]) -> Option<Code> {
        let ends = |left: &&Left| {
            let is_own = |ask: &Ask| left.what == LeftWhat::Request && ask.session == left.session;
            self.is_left(now, room, left.place, is_own)
        };
        left.iter().find(ends).map(|left| left.code)
    }

    /// Whether a message of a process ends a room with `receivers` receivers, which need not be open. With an
    /// attempt, the message aborts this attempt. Without one, it speaks for the whole process.
    pub fn may_end(
        &self,
        now: Moment,
        (session, attempt): (Incarnation, Option<RoomTag>),
        (id, receivers): (RoomId, usize),
    ) -> bool {
        let is_own = |ask: &Ask| ask.session == session && attempt.is_none_or(|tag| tag == ask.tag);
        let place = self.asks(now, id).find(is_own).map(|ask| ask.place);
        // An attempt that did not ask, or that has ended, is no part of the request.
        let may = place.is_some() || attempt.is_none();
        may && self.is_left(now, (id, receivers), place, is_own)
    }

    /// Whether `place` is free: no receiver has it, and no ask except the own asks wants it. Without a `place`:
    /// whether the room has a free place.
    fn is_left(
        &self,
        now: Moment,
        (id, receivers): (RoomId, usize),
        place: Option<u32>,
        is_own: impl Fn(&Ask) -> bool,
    ) -> bool {
        let room = self.rooms.get(&id);
        let others: Vec<u32> = (self.asks(now, id).filter(|ask| !is_own(ask)))
            .map(|ask| ask.place)
            .collect();
        let is_free = |place: &u32| {
            let has_offer = room.is_some_and(|room| room.offer(*place as usize).is_some());
            !has_offer && !others.contains(place)
        };
        let receivers = u32::try_from(receivers).unwrap_or(u32::MAX);
        let mut all = 0..receivers;
        match place {
            Some(place) => place < receivers && is_free(&place),
            None => all.any(|place| is_free(&place)),
        }
    }

    /// The attempts that asked for a room and have no place in it.
    fn asks(&self, now: Moment, id: RoomId) -> impl Iterator<Item = Ask> {
        let early = self.early.iter();
        let early = early.filter(move |early| early.offer.tag.room == id && early.until > now);
        let early = early.map(|early| Ask {
            session: early.session,
            tag: early.offer.tag,
            place: early.offer.receiver,
        });
        let held_back = self.held_back.iter();
        let held_back = held_back.filter(move |((_, tag), it)| tag.room == id && now < it.until);
        early.chain(held_back.map(|((session, tag), it)| Ask {
            session: *session,
            tag: *tag,
            place: it.place,
        }))
    }

    /// Ends a room that has not opened. Returns the answers for the processes that asked for the room.
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
        self.given_up.refuse(now, id, code, keep);
        // The notes of its receivers were about this room.
        self.given_up.take_left(now, id);
        let mine: Vec<EarlyOffer> = mine;
        for EarlyOffer { session, offer, .. } in &mine {
            // The attempt's abort may be under way. It must not end the next room of this number.
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

    /// Notes that a receiver's attempt is told to ask again later. The note ends with the room, as an early
    /// offer does.
    pub fn hold_back(&mut self, now: Moment, receiver: Incarnation, offer: &RoomOffer) {
        let attempt = (receiver, offer.tag);
        let most = self.options.early_offers;
        if self.held_back.len() >= most && !self.held_back.contains_key(&attempt) {
            self.held_back.retain(|_, it| now < it.until);
            let all = self.held_back.keys().map(|(session, _)| *session);
            if let Some(of) = crowded(all, receiver).filter(|_| self.held_back.len() >= most) {
                let of_process = self.held_back.iter().filter(|((it, _), _)| *it == of);
                let oldest = of_process.min_by_key(|(_, it)| it.until);
                let oldest = oldest.map(|(attempt, _)| *attempt);
                if let Some(oldest) = oldest {
                    self.held_back.remove(&oldest);
                }
            }
        }
        if self.held_back.len() < most || self.held_back.contains_key(&attempt) {
            let (place, until) = (offer.receiver, now + self.options.early_ttl);
            self.held_back.insert(attempt, HeldBack { place, until });
        }
    }

    /// Buries the attempts at a room that were told to ask again later. Their aborts may be under way, and must
    /// not end the next room of this number.
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

    /// Replaces a room that has ended by tombstones, so that its number is free. The room's last messages may
    /// be lost: the other ends have deadlines of their own.
    pub fn bury_if_ended(&mut self, now: Moment, id: RoomId) {
        let outcome = self.rooms.get(&id).and_then(RoomSender::outcome);
        if let Some(outcome) = outcome {
            self.bury_with(now, id, outcome);
        }
    }

    /// Whether an attempt of a receiver is known to have ended.
    #[cfg(test)]
    pub(super) fn has_ended(&self, receiver: Incarnation, tag: RoomTag) -> bool {
        self.tombstones.outcome(receiver, tag).is_some()
    }

    /// The rooms that have not opened, each with a process that asks for it. A process asks no more when it has
    /// not repeated its offer for [`DeskOptions::early_ttl`].
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

    /// Takes a message from a receiver's process. Returns an answer for that process when the message belongs
    /// to no open room.
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
        if matches!(message, ToSender::Offer(_)) {
            // The attempt asks again. If it is served now, it must not ask for a place in the next room of this
            // number.
            self.held_back.remove(&(session, tag));
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
            let ToSender::Abort { code, .. } = message else {
                return None;
            };
            // The abort counts if the room told this attempt to ask again later. The abort of an unknown
            // attempt ends no room.
            let receivers = room.receivers();
            let ends = self.may_end(now, (session, Some(tag)), (tag.room, receivers));
            self.tombstones
                .bury(session, tag, RoomOutcome::Failed(code));
            self.held_back.remove(&(session, tag));
            if ends {
                self.handle(now, tag.room, SenderEvent::Abort { code }, out);
            }
            return Some(ToReceiver::Aborted { tag });
        };
        if let ToSender::Offer(offer) = &message {
            // The offer names a receiver, so an attempt without a place in the room can be refused.
            if let Err(code) = room.may_offer(from, session, tag) {
                return Some(ToReceiver::Refuse { tag, code });
            }
            if !room.fits(offer) {
                // The two ends mean different requests, so neither end can succeed.
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

    /// The rooms that tombstones have replaced since the last call of this method.
    pub fn take_ended(&mut self) -> Vec<(RoomId, RoomOutcome)> {
        std::mem::take(&mut self.ended)
    }

    /// Forgets the offers of a process that has ended.
    pub fn forget(&mut self, session: Incarnation) {
        self.early.retain(|early| early.session != session);
        self.held_back.retain(|(of, _), _| *of != session);
        self.tombstones.forget(session);
    }

    /// A receiver's process declines a request. The request ends for all of its receivers if the process has a
    /// place in it, as [`SenderDesk`] says.
    fn declined(
        &mut self,
        now: Moment,
        (from, id): (Incarnation, RoomId),
        code: Code,
        out: &mut Vec<SenderAction>,
    ) {
        if let Some(room) = self.rooms.get(&id) {
            let receivers = room.receivers();
            let has_place = (0..receivers).any(|to| room.receiver_session(to) == Some(from));
            if has_place || self.may_end(now, (from, None), (id, receivers)) {
                self.handle(now, id, SenderEvent::Abort { code }, out);
            }
            return;
        }
        if self.given_up.refused(now, id).is_some() {
            // Another rank of decode declined this request before. The decline must not end the next request of
            // this number.
            return;
        }
        let own: Vec<Ask> = (self.asks(now, id))
            .filter(|ask| ask.session == from)
            .collect();
        // An attempt of the process that asks again is refused. Its abort must not end the next room of this
        // number.
        for Ask { session, tag, .. } in &own {
            let outcome = RoomOutcome::Failed(code);
            self.tombstones.bury(*session, *tag, outcome);
            self.held_back.remove(&(*session, *tag));
        }
        self.early
            .retain(|early| early.session != from || early.offer.tag.room != id);
        let left = Left {
            session: from,
            what: LeftWhat::Request,
            place: own.first().map(|ask| ask.place),
            code,
        };
        let keep = self.options.early_ttl;
        self.given_up.leave(now, id, left, keep);
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
                let refused = self.given_up.refused(now, tag.room);
                let refused = refused.or_else(|| self.given_up.asks_again(now, tag.room, session));
                if let Some(code) = refused {
                    return Some(ToReceiver::Refuse { tag, code });
                }
                self.early.retain(|early| {
                    early.until > now && (early.session, early.offer.tag) != (session, tag)
                });
                if !self.has_room_for(now, session) {
                    self.hold_back(now, session, &offer);
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
                let is_own = |ask: &Ask| (ask.session, ask.tag) == (session, tag);
                let ask = self.asks(now, tag.room).find(is_own);
                self.early
                    .retain(|early| (early.session, early.offer.tag) != (session, tag));
                self.held_back.remove(&(session, tag));
                // The abort of an attempt that did not ask must not end the room that may open.
                if let Some(Ask { place, .. }) = ask {
                    let left = Left {
                        session,
                        what: LeftWhat::Attempt,
                        place: Some(place),
                        code,
                    };
                    let keep = self.options.early_ttl;
                    self.given_up.leave(now, tag.room, left, keep);
                }
                // The offer may arrive after its abort: the tombstone then refuses it.
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

    /// Whether the desk has room for one more early offer of a process. Without room, the process with the most
    /// early offers gives up its oldest, if it has more than this process would have.
    fn has_room_for(&mut self, now: Moment, session: Incarnation) -> bool {
        if self.early.len() < self.options.early_offers {
            return true;
        }
        let all = self.early.iter().map(|early| early.session);
        let Some(of) = crowded(all, session) else {
            return false;
        };
        // Early offers are in the order of their arrival.
        if let Some(oldest) = self.early.iter().position(|early| early.session == of) {
            let EarlyOffer { session, offer, .. } = self.early.remove(oldest);
            self.hold_back(now, session, &offer);
        }
        true
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
                // A receiver may ask as late as the room would have waited for it.
                let keep = self.options.early_ttl.max(room.patience());
                self.given_up.refuse(now, id, code, keep);
            }
            self.ended.push((id, outcome));
        }
    }
}
