//! Writes from a sender's memory into a receiver's pages, under the receiver's epochs.

use crate::memory::{sum, truth};
use crate::world::{Event, Source, World, Write};
use kvpool_handoff::room::{ChunkBody, ReceiverEvent, RoomId, SenderEvent};
use kvpool_types::{Checksum, Code};
use std::time::Duration;

impl World {
    pub(crate) fn write(
        &mut self,
        sender: usize,
        room: RoomId,
        to: usize,
        id: u32,
        body: ChunkBody,
    ) {
        let process = &mut self.senders[sender];
        let offer = process.desk.room(room).and_then(|room| room.offer(to));
        let Some(epoch) = offer.map(|offer| offer.epoch) else {
            return self.violated("a write before its offer".to_owned());
        };
        process.sources.get_mut(&room).unwrap().under_way += 1;
        let write = Write {
            sender,
            sender_session: process.session,
            receiver: to,
            session: self.receivers[to].session,
            epoch,
            room,
            id,
            body,
            early: None,
        };
        let failed = Event::Ends {
            write: write.clone(),
            outcome: Err(Code::Unreachable),
        };
        if self.queue.happens(self.queue.chances.write_fails) {
            let delay = self.queue.millis(0, 500);
            return self.queue.after(delay, failed);
        }
        let delay = self.queue.delay();
        if self.queue.happens(self.queue.chances.late_write) {
            // The sender gives the write up, but its bytes are still under way. They may land after the sender
            // has sent the same bytes again.
            let early = Some(self.values(&write));
            let delay = self.queue.millis(0, 3000);
            self.queue.after(Duration::ZERO, failed);
            return self
                .queue
                .after(delay, Event::Arrives(Write { early, ..write }));
        }
        self.queue.after(delay, Event::Arrives(write));
    }

    /// The bytes of a write, as they are at its sender now.
    fn values(&mut self, write: &Write) -> Vec<u64> {
        let process = &self.senders[write.sender];
        let source = process.sources.get(&write.room);
        let is_there = process.session == write.sender_session
            && source.is_some_and(|source| source.releases == 0);
        if process.session == write.sender_session && !is_there {
            self.violated(format!(
                "{:?} was read after its pages were given back",
                write.room
            ));
        }
        let value = |(page, layer)| match (is_there, page) {
            (false, _) => 0xbad,
            (true, u32::MAX) => write.room.0,
            (true, _) => truth(write.room.0, write.sender, page, layer),
        };
        crate::memory::cells(&write.body)
            .into_iter()
            .map(value)
            .collect()
    }

    pub(crate) fn arrives(&mut self, write: Write) {
        let process = &mut self.receivers[write.receiver];
        let room = process.memory.epochs.get_mut(&write.epoch);
        match room {
            Some(room) if process.session == write.session && room.is_open => {
                room.under_way += 1;
                // A stalled writer keeps its receive in progress.
                let delay = self.queue.delay();
                self.queue.after(delay, Event::Lands(write));
            }
            _ => {
                let delay = self.queue.delay();
                let outcome = Err(Code::GrantEnded);
                self.queue.after(delay, Event::Ends { write, outcome });
            }
        }
    }

    pub(crate) fn lands(&mut self, write: Write) {
        let sender_lives = self.senders[write.sender].session == write.sender_session;
        if self.receivers[write.receiver].session != write.session {
            let outcome = Err(Code::Unreachable);
            return self
                .queue
                .after(Duration::ZERO, Event::Ends { write, outcome });
        }
        let is_whole = sender_lives || write.early.is_some();
        let mut outcome: Result<Checksum, Code> = Err(Code::Unreachable);
        if is_whole {
            let right = write.early.clone().unwrap_or_else(|| self.values(&write));
            let mut values = right.clone();
            outcome = Ok(sum(&right));
            let flips = match write.early.is_some() {
                true => 5.0 * self.queue.chances.flipped,
                false => self.queue.chances.flipped,
            };
            if self.queue.happens(flips) {
                values[0] ^= 1;
                outcome = Err(Code::ChecksumMismatch);
            }
            let memory = &mut self.receivers[write.receiver].memory;
            if let Err(broken) = memory.place(write.epoch, write.sender, &write.body, &values) {
                self.violated(broken);
            }
        }
        let room = self.receivers[write.receiver]
            .memory
            .epochs
            .get_mut(&write.epoch)
            .unwrap();
        room.under_way -= 1;
        let (tag, is_fenced) = (room.tag, !room.is_open && room.under_way == 0);
        if is_fenced && !self.defects.no_fence {
            self.receiver_event(write.receiver, tag, ReceiverEvent::Fenced);
        }
        let delay = self.queue.delay();
        self.queue.after(delay, Event::Ends { write, outcome });
    }

    pub(crate) fn ends(&mut self, write: &Write, outcome: Result<Checksum, Code>) {
        let process = &mut self.senders[write.sender];
        // The sender ignores the end of a write that it has given up.
        if process.session != write.sender_session || write.early.is_some() {
            return;
        }
        let Some(source) = process.sources.get_mut(&write.room) else {
            return;
        };
        source.under_way -= 1;
        let Source {
            under_way,
            is_cancelled,
            ..
        } = *source;
        let (to, id) = (write.receiver, write.id);
        self.sender_event(
            write.sender,
            write.room,
            SenderEvent::Written { to, id, outcome },
        );
        if is_cancelled && under_way == 0 && !self.defects.no_wait {
            self.sender_event(write.sender, write.room, SenderEvent::WritesEnded);
        }
    }
}
