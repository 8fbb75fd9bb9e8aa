//! Performs the events and actions on the network, the transport and the engine of each process.

use crate::memory::sum;
use crate::world::{Event, World};
use kvpool_handoff::room::{
    ChunkBody, ReceiverAction, ReceiverEvent, RoomId, RoomTag, SenderAction, SenderEvent,
};
use kvpool_types::{Code, Incarnation};
use std::time::Duration;

impl World {
    pub(crate) fn step(&mut self, event: Event) {
        let now = self.queue.now;
        match event {
            Event::OpenReceiver { receiver, room } => self.open_receiver(receiver, room),
            Event::OpenSender { sender, room } => self.open_sender(sender, room),
            Event::Produced {
                sender,
                room,
                rectangle,
            } => {
                let id = self.requests[room].id;
                let event = match rectangle {
                    Some(rectangle) => SenderEvent::Produced(rectangle),
                    None => SenderEvent::ProducedAll,
                };
                self.sender_event(sender, id, event);
            }
            Event::ToSender {
                from,
                from_session,
                to,
                to_session,
                message,
            } => {
                if self.senders[to].session != to_session {
                    return;
                }
                let (tag, mut out) = (message.tag(), Vec::new());
                if let Some(busy) = self.breaker(to, from_session, &message) {
                    return self.tell_receiver(to, from, from_session, busy);
                }
                let has_place = self.has_place(to, from_session, &message);
                let desk = &mut self.senders[to].desk;
                if let Some(message) = desk.take(now, from_session, message, &mut out) {
                    self.tell_receiver(to, from, from_session, message);
                }
                self.check_decline(to, tag.room, has_place);
                self.perform_sender(to, tag.room, out);
            }
            Event::ToReceiver {
                from,
                from_session,
                to,
                to_session,
                message,
            } => {
                if self.receivers[to].session != to_session {
                    return;
                }
                let (tag, mut out) = (message.tag(), Vec::new());
                let desk = &mut self.receivers[to].desk;
                if let Some(message) = desk.take(now, from_session, message, &mut out) {
                    self.tell_sender(to, from, from_session, message);
                }
                self.perform_receiver(to, tag, out);
            }
            Event::Arrives(write) => self.arrives(write),
            Event::Lands(write) => self.lands(write),
            Event::Ends { write, outcome } => self.ends(&write, outcome),
            Event::Verified {
                receiver,
                session,
                tag,
                chunks,
            } => {
                if self.receivers[receiver].session != session {
                    return;
                }
                let memory = &self.receivers[receiver].memory;
                let epoch = tag.generation.0;
                let is_equal = chunks.iter().all(|(sender, chunk)| {
                    sum(&memory.read(epoch, *sender, &chunk.body)) == chunk.checksum
                });
                let aux = chunks
                    .iter()
                    .filter(|(_, chunk)| chunk.body == ChunkBody::Aux);
                let is_own_room = aux.into_iter().all(|(sender, chunk)| {
                    memory.read(epoch, *sender, &chunk.body) == [tag.room.0]
                });
                let skips = self.defects.no_verification;
                let event = ReceiverEvent::Verified {
                    is_equal: is_equal || skips,
                    is_own_room: is_own_room || skips,
                };
                self.receiver_event(receiver, tag, event);
            }
            Event::ReceiverTick { receiver } => self.tick_receiver(receiver),
            Event::SenderTick { sender } => self.tick_sender(sender),
            Event::Link {
                sender,
                receiver,
                is_up,
            } => self.link(sender, receiver, is_up),
            Event::CrashSender { sender } => {
                let gone = self.senders[sender].session;
                self.senders[sender] = self.new_sender();
                if self.queue.happens(0.7) {
                    let delay = self.queue.millis(0, 1000);
                    self.queue.after(delay, Event::SenderLost { session: gone });
                }
            }
            Event::CrashReceiver { receiver } => {
                let gone = self.receivers[receiver].session;
                self.receivers[receiver] = self.new_receiver();
                if self.queue.happens(0.7) {
                    let delay = self.queue.millis(0, 1000);
                    self.queue
                        .after(delay, Event::ReceiverLost { session: gone });
                }
            }
            Event::SenderLost { session } => {
                for (receiver, tag, from) in self.rooms_with_sender(session) {
                    self.receiver_event(receiver, tag, ReceiverEvent::PeerLost { from });
                }
            }
            Event::ReceiverLost { session } => {
                for (sender, room, from) in self.rooms_with_receiver(session) {
                    self.sender_event(sender, room, SenderEvent::PeerLost { from });
                }
            }
            Event::AbortSender { sender, room } => {
                let (id, code) = (self.requests[room].id, Code::Draining);
                self.sender_event(sender, id, SenderEvent::Abort { code });
            }
            Event::AbortReceiver { receiver, room } => {
                let (id, code) = (self.requests[room].id, Code::Draining);
                if let Some(tag) = self.receivers[receiver].tags.get(&id).copied() {
                    self.receiver_event(receiver, tag, ReceiverEvent::Abort { code });
                }
            }
            Event::Decline { receiver, room } => self.decline(receiver, room),
            Event::Deadline { room } => self.check_deadline(room),
        }
    }

    fn rooms_with_sender(&self, session: Incarnation) -> Vec<(usize, RoomTag, usize)> {
        let mut all = Vec::new();
        for (receiver, process) in self.receivers.iter().enumerate() {
            for room in process.desk.rooms() {
                all.extend(
                    room.sender(session)
                        .map(|from| (receiver, room.tag(), from)),
                );
            }
        }
        all
    }

    fn rooms_with_receiver(&self, session: Incarnation) -> Vec<(usize, RoomId, usize)> {
        let mut all = Vec::new();
        for (sender, process) in self.senders.iter().enumerate() {
            for room in process.desk.rooms() {
                let of = room.tags().find(|(of, _)| *of == session);
                let from = of.and_then(|(_, tag)| room.receiver(session, tag));
                all.extend(from.map(|from| (sender, room.room(), from)));
            }
        }
        all
    }

    fn link(&mut self, sender: usize, receiver: usize, is_up: bool) {
        let (of_sender, of_receiver) = (
            self.senders[sender].session,
            self.receivers[receiver].session,
        );
        for (at, tag, from) in self.rooms_with_sender(of_sender) {
            if at == receiver {
                let session = of_sender;
                let event = match is_up {
                    true => ReceiverEvent::LinkUp { from, session },
                    false => ReceiverEvent::LinkBroken { from },
                };
                self.receiver_event(receiver, tag, event);
            }
        }
        for (at, room, from) in self.rooms_with_receiver(of_receiver) {
            if at == sender {
                let session = of_receiver;
                let event = match is_up {
                    true => SenderEvent::LinkUp { from, session },
                    false => SenderEvent::LinkBroken { from },
                };
                self.sender_event(sender, room, event);
            }
        }
    }

    pub(crate) fn tell_sender(
        &mut self,
        from: usize,
        to: usize,
        to_session: Incarnation,
        message: kvpool_handoff::room::ToSender,
    ) {
        let from_session = self.receivers[from].session;
        self.queue.transmit(Event::ToSender {
            from,
            from_session,
            to,
            to_session,
            message,
        });
    }

    pub(crate) fn tell_receiver(
        &mut self,
        from: usize,
        to: usize,
        to_session: Incarnation,
        message: kvpool_handoff::room::ToReceiver,
    ) {
        let from_session = self.senders[from].session;
        self.queue.transmit(Event::ToReceiver {
            from,
            from_session,
            to,
            to_session,
            message,
        });
    }

    pub(crate) fn perform_receiver(
        &mut self,
        receiver: usize,
        tag: RoomTag,
        actions: Vec<ReceiverAction>,
    ) {
        let epoch = tag.generation.0;
        for action in actions {
            match action {
                // Sender `to` of every room is process `to`. The room knows the session of that process.
                ReceiverAction::Send { to, message } => {
                    let session = self.senders[to].session;
                    self.tell_sender(receiver, to, session, message);
                }
                ReceiverAction::CloseRoom => {
                    let room = self.receivers[receiver]
                        .memory
                        .epochs
                        .get_mut(&epoch)
                        .unwrap();
                    room.is_open = false;
                    if room.under_way == 0 || self.defects.no_fence {
                        self.receiver_event(receiver, tag, ReceiverEvent::Fenced);
                    }
                }
                ReceiverAction::Verify(chunks) => {
                    let (delay, session) =
                        (self.queue.millis(0, 30), self.receivers[receiver].session);
                    self.queue.after(
                        delay,
                        Event::Verified {
                            receiver,
                            session,
                            tag,
                            chunks,
                        },
                    );
                }
                ReceiverAction::ReleasePages => {
                    let process = &mut self.receivers[receiver];
                    process.memory.release(epoch);
                    process.taken.entry(tag).or_default().releases += 1;
                }
            }
        }
        self.check_success(receiver, tag);
        let next = self.receivers[receiver]
            .desk
            .rooms()
            .filter_map(|room| room.next_wake())
            .min();
        let at = next.map(|next| next.max(self.queue.now + Duration::from_millis(1)));
        if let Some(at) = at
            && self.receivers[receiver].tick.is_none_or(|tick| at < tick)
        {
            self.receivers[receiver].tick = Some(at);
            self.queue.at(at, Event::ReceiverTick { receiver });
        }
    }

    fn tick_receiver(&mut self, receiver: usize) {
        self.receivers[receiver].tick = None;
        let now = self.queue.now;
        let due = self.receivers[receiver].desk.rooms();
        let due = due.filter(|room| room.next_wake().is_some_and(|wake| wake <= now));
        for tag in due.map(|room| room.tag()).collect::<Vec<_>>() {
            self.receiver_event(receiver, tag, ReceiverEvent::Tick);
            let room = self.receivers[receiver].desk.room(tag);
            if room.is_some_and(|room| room.next_wake().is_some_and(|wake| wake <= now)) {
                self.violated(format!("{tag} has work left after a tick"));
            }
        }
        self.perform_receiver_wake(receiver);
    }

    fn perform_receiver_wake(&mut self, receiver: usize) {
        let tag = self.receivers[receiver]
            .desk
            .rooms()
            .next()
            .map(|room| room.tag());
        if let Some(tag) = tag {
            self.perform_receiver(receiver, tag, Vec::new());
        }
    }

    fn tick_sender(&mut self, sender: usize) {
        self.senders[sender].tick = None;
        let now = self.queue.now;
        let due = self.senders[sender].desk.rooms();
        let due = due.filter(|room| room.next_wake().is_some_and(|wake| wake <= now));
        for room in due.map(|room| room.room()).collect::<Vec<_>>() {
            self.sender_event(sender, room, SenderEvent::Tick);
            let machine = self.senders[sender].desk.room(room);
            if machine.is_some_and(|room| room.next_wake().is_some_and(|wake| wake <= now)) {
                self.violated(format!("{room:?} has work left after a tick"));
            }
        }
        self.perform_sender(sender, RoomId(0), Vec::new());
    }

    pub(crate) fn perform_sender(
        &mut self,
        sender: usize,
        room: RoomId,
        actions: Vec<SenderAction>,
    ) {
        for action in actions {
            self.check_served(sender, room, &action);
            match action {
                SenderAction::Send { to, message } => {
                    let session = self.receivers[to].session;
                    self.tell_receiver(sender, to, session, message);
                }
                SenderAction::Write { to, id, body } => self.write(sender, room, to, id, body),
                SenderAction::CancelWrites => {
                    let source = self.senders[sender].sources.get_mut(&room).unwrap();
                    source.is_cancelled = true;
                    if source.under_way == 0 || self.defects.no_wait {
                        self.sender_event(sender, room, SenderEvent::WritesEnded);
                    }
                }
                SenderAction::ReleasePages => {
                    let process = &mut self.senders[sender];
                    process.pins.free(room);
                    process.sources.get_mut(&room).unwrap().releases += 1;
                    self.check_sender_success(sender, room);
                }
            }
        }
        let next = self.senders[sender]
            .desk
            .rooms()
            .filter_map(|room| room.next_wake())
            .min();
        let at = next.map(|next| next.max(self.queue.now + Duration::from_millis(1)));
        if let Some(at) = at
            && self.senders[sender].tick.is_none_or(|tick| at < tick)
        {
            self.senders[sender].tick = Some(at);
            self.queue.at(at, Event::SenderTick { sender });
        }
    }
}
