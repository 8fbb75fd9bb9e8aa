//! Decode without pages: declines, the breaker of the process that declined, and pins that end.

use crate::world::{Event, World};
use kvpool_handoff::Moment;
use kvpool_handoff::pins::PinOptions;
use kvpool_handoff::room::{
    ReceiverEvent, RoomGeneration, RoomId, RoomOutcome, RoomTag, SenderAction, ToReceiver, ToSender,
};
use kvpool_types::{Code, Incarnation};
use std::time::Duration;

/// In a network without faults, every message that was under way at a decline has arrived after this time.
const SETTLED: Duration = Duration::from_millis(200);

/// How long prefill serves no new attempt of a process that declined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    from: Moment,
    until: Moment,
}

impl World {
    /// Decode aborts the attempts that it made, and declines the request.
    pub(crate) fn decline(&mut self, receiver: usize, room: usize) {
        let (id, code) = (self.requests[room].id, Code::Full);
        let process = &mut self.receivers[receiver];
        let asked = process.tags.get(&id).copied();
        if asked.is_some_and(|tag| process.taken[&tag].successes > 0) {
            return;
        }
        process.declined.insert(id);
        process.generation += 1;
        let tag = RoomTag {
            room: id,
            generation: RoomGeneration(process.generation),
        };
        self.report.declines += 1;
        let now = self.queue.now;
        self.declined_at.entry(id).or_insert(now);
        if let Some(tag) = asked {
            self.receiver_event(receiver, tag, ReceiverEvent::Abort { code });
        }
        if self.defects.loses_declines {
            return;
        }
        // Decode tells each sender once, and does not repeat the decline.
        for sender in 0..self.senders.len() {
            let session = self.senders[sender].session;
            self.tell_sender(receiver, sender, session, ToSender::Decline { tag, code });
        }
    }

    /// The checks that prefill's session makes before the desk takes a message. Returns the answer to a process
    /// whose breaker is open.
    /// open.
    pub(crate) fn breaker(
        &mut self,
        to: usize,
        session: Incarnation,
        message: &ToSender,
    ) -> Option<ToReceiver> {
        let (now, skips) = (self.queue.now, self.defects.no_breaker);
        let process = &mut self.senders[to];
        match message {
            ToSender::Decline { tag, .. } => {
                process.pins.trip(now, session);
                let until = now + PinOptions::default().back_off;
                let silence = process.silent.entry(session);
                let silence = silence.or_insert(Silence { from: now, until });
                if silence.until <= now {
                    silence.from = now;
                }
                silence.until = until;
                if !process.sources.contains_key(&tag.room) {
                    process.early_declines.push((tag.room, session));
                }
                None
            }
            ToSender::Offer(offer) => {
                let tag = offer.tag;
                process.asked.entry((session, tag)).or_insert(now);
                let until = process.pins.breaker(now, session)?;
                let room = process.desk.room(tag.room);
                let is_taken = room.is_some_and(|room| room.receiver(session, tag).is_some());
                if is_taken || skips {
                    return None;
                }
                process.desk.hold_back(now, session, offer);
                self.report.busy += 1;
                let retry_after = until - now;
                Some(ToReceiver::Busy { tag, retry_after })
            }
            _ => None,
        }
    }

    /// Whether the process of a decline has a place in the open room. `None` where a place is left, and for
    /// other messages and rooms.
    /// messages and rooms.
    pub(crate) fn has_place(
        &self,
        to: usize,
        session: Incarnation,
        message: &ToSender,
    ) -> Option<bool> {
        let ToSender::Decline { tag, .. } = message else {
            return None;
        };
        let room = self.senders[to].desk.room(tag.room)?;
        if room.outcome().is_some() || room.failure().is_some() {
            return None;
        }
        let places: Vec<_> = (0..room.receivers())
            .map(|place| room.receiver_session(place))
            .collect();
        if places.contains(&Some(session)) {
            return Some(true);
        }
        let is_full = places.iter().all(Option::is_some);
        is_full.then_some(false)
    }

    /// A decline ends the room of its process, and no other.
    pub(crate) fn check_decline(&mut self, to: usize, room: RoomId, has_place: Option<bool>) {
        let Some(has_place) = has_place else {
            return;
        };
        let machine = self.senders[to].desk.room(room);
        let has_failed = machine.is_none_or(|machine| machine.failure().is_some());
        if has_failed != has_place {
            return self.violated(format!(
                "{room:?}: a decline of a process with a place: {has_place}, has ended it: {has_failed}"
            ));
        }
        if has_failed {
            self.senders[to].given_up.insert(room);
        }
    }

    /// If a process of decode declined a room before it opened, the room has failed as soon as it opens.
    pub(crate) fn check_early_declines(&mut self, sender: usize, id: RoomId) {
        let process = &self.senders[sender];
        let machine = process.desk.room(id);
        let lives = |session: Incarnation| {
            let mut receivers = self.receivers.iter();
            // The next incarnation of the process may have its place.
            receivers.position(|receiver| receiver.session == session)
        };
        // An earlier incarnation may have asked for the same place and may be held back.
        let mut asked = process.asked.keys();
        if asked.any(|(of, tag)| tag.room == id && lives(*of).is_none()) {
            return;
        }
        let of_room = process.early_declines.iter();
        let of_room = of_room.filter(|(room, _)| *room == id);
        let mut places = of_room.filter_map(|(_, session)| lives(*session));
        let has_no_offer = |place: usize| machine.is_none_or(|room| room.offer(place).is_none());
        if !places.any(has_no_offer) {
            return;
        }
        if machine.is_some_and(|room| room.failure().is_none()) {
            return self.violated(format!("{id:?} opens, though it was declined"));
        }
        self.senders[sender].given_up.insert(id);
    }

    /// After a decline a room moves no further byte, and its process is not served for the back-off.
    pub(crate) fn check_served(&mut self, sender: usize, room: RoomId, action: &SenderAction) {
        let now = self.queue.now;
        let process = &mut self.senders[sender];
        let moves = match action {
            SenderAction::Write { .. } => true,
            SenderAction::Send { message, .. } => matches!(
                message,
                ToReceiver::Accept { .. } | ToReceiver::Chunk { .. } | ToReceiver::Done { .. }
            ),
            _ => false,
        };
        if moves && process.given_up.contains(&room) {
            return self.violated(format!("{room:?} was declined: {action:?}"));
        }
        let SenderAction::Send { to, message } = action else {
            return;
        };
        let ToReceiver::Accept { tag } = message else {
            return;
        };
        let machine = process.desk.room(room);
        let Some(session) = machine.and_then(|machine| machine.receiver_session(*to)) else {
            return;
        };
        if !process.accepted.insert((session, *tag)) {
            return;
        }
        let Some(silence) = process.silent.get(&session) else {
            return;
        };
        let asked = process.asked.get(&(session, *tag));
        if now < silence.until && asked.is_some_and(|asked| *asked >= silence.from) {
            self.violated(format!("{tag} is served while its process has no pages"));
        }
    }

    /// Without faults, no end succeeds after a decline has arrived.
    pub(crate) fn check_alike(&mut self, tag: RoomTag) {
        let now = self.queue.now;
        let declined_at = self.declined_at.get(&tag.room);
        let is_late = declined_at.is_some_and(|at| now > *at + SETTLED);
        if self.is_calm && is_late {
            self.violated(format!("{tag} succeeded after it was declined"));
        }
    }

    /// No pin is left, and a room that was declined has failed.
    pub(crate) fn check_pins(&mut self) {
        let mut broken = Vec::new();
        for process in &mut self.senders {
            if process.pins.pinned() != 0 {
                broken.push(format!("{} pages stay pinned", process.pins.pinned()));
            }
            for (room, outcome) in process.desk.take_ended() {
                match outcome {
                    RoomOutcome::Failed(Code::Full) => self.report.declined += 1,
                    RoomOutcome::Failed(Code::DeadlineExceeded) => self.report.late += 1,
                    RoomOutcome::Failed(_) => {}
                    RoomOutcome::Success if process.given_up.contains(&room) => {
                        broken.push(format!("{room:?} succeeded after it was declined"));
                    }
                    RoomOutcome::Success => {}
                }
            }
        }
        if let Some(first) = broken.into_iter().next() {
            self.violated(first);
        }
    }

    /// Chooses the declines of a request.
    pub(crate) fn plan_declines(&mut self, receiver: usize, room: usize) {
        let chance = self.queue.chances.decline;
        // The other worlds must draw the same numbers as before.
        if chance > 0.0 && self.queue.happens(chance) {
            let at = self.requests[room].begin + self.queue.millis(0, 2000);
            self.queue.at(at, Event::Decline { receiver, room });
        }
    }
}
