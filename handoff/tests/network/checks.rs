//! The rules that hold in every world.

use crate::memory::truth;
use crate::world::World;
use kvpool_handoff::room::{ChunkBody, PageRectangle, PollState, RoomId, RoomOutcome, RoomTag};

impl World {
    /// Success implies right bytes. A room succeeds at most once.
    pub(crate) fn check_success(&mut self, receiver: usize, tag: RoomTag) {
        let request = self
            .requests
            .iter()
            .find(|request| request.id == tag.room)
            .cloned();
        let (senders, layers) = (self.senders.len(), self.layers);
        let process = &mut self.receivers[receiver];
        // A late message may name a room of an earlier incarnation.
        let Some(taken) = process.taken.get_mut(&tag) else {
            return;
        };
        let is_success = process.desk.outcome(tag) == Some(RoomOutcome::Success);
        if !is_success || taken.successes > 0 {
            return;
        }
        taken.successes += 1;
        let releases = taken.releases;
        let request = request.expect("a room has a request");
        let epoch = tag.generation.0;
        for sender in 0..senders {
            for page in request.held..request.pages {
                for layer in 0..layers {
                    let body = ChunkBody::Pages(PageRectangle {
                        pages: page..page + 1,
                        layers: layer..layer + 1,
                    });
                    let found = process.memory.read(epoch, sender, &body);
                    if found != [truth(tag.room.0, sender, page, layer)] {
                        let text = format!("{tag} succeeded with wrong bytes in page {page}");
                        return self.violated(text);
                    }
                }
            }
        }
        if releases > 0 {
            return self.violated(format!("{tag} succeeded after its pages were given back"));
        }
        process.memory.keep(epoch);
        self.report.successes += 1;
        self.check_alike(tag);
    }

    /// A sender's success implies that every receiver succeeded.
    pub(crate) fn check_sender_success(&mut self, sender: usize, room: RoomId) {
        let process = &self.senders[sender];
        let Some(machine) = process.desk.room(room) else {
            return;
        };
        if machine.outcome() != Some(RoomOutcome::Success) {
            return;
        }
        let tags: Vec<_> = machine.tags().collect();
        for (session, tag) in tags {
            let lives = self
                .receivers
                .iter()
                .find(|receiver| receiver.session == session);
            let succeeded = lives.is_none_or(|process| process.taken[&tag].successes == 1);
            if !succeeded {
                self.violated(format!("{tag}: its sender succeeded, its receiver did not"));
            }
        }
    }

    /// Both ends have ended by the deadline.
    pub(crate) fn check_deadline(&mut self, room: usize) {
        let id = self.requests[room].id;
        let is_final = |poll| matches!(poll, PollState::Failed | PollState::Success);
        let of_senders = self
            .senders
            .iter()
            .filter_map(|process| process.desk.room(id));
        let of_receivers = self
            .receivers
            .iter()
            .flat_map(|process| process.desk.rooms());
        let of_receivers = of_receivers.filter(|machine| machine.tag().room == id);
        let polls = of_senders.map(|machine| machine.poll());
        let polls = polls.chain(of_receivers.map(|machine| machine.poll()));
        let late: Vec<_> = polls.filter(|poll| !is_final(*poll)).collect();
        if !late.is_empty() {
            self.violated(format!("{id:?} is {late:?} after its deadline"));
        }
    }

    /// All pages and pins have been given back exactly once, and no process keeps a room.
    pub(crate) fn check_end(&mut self) {
        self.check_pins();
        let mut broken = Vec::new();
        for process in &self.senders {
            for (room, source) in &process.sources {
                if source.releases != 1 || source.under_way != 0 {
                    broken.push(format!("{room:?} was given back {} times", source.releases));
                }
            }
            broken.extend(
                process
                    .desk
                    .rooms()
                    .map(|room| format!("{:?} stays", room.room())),
            );
        }
        for process in &self.receivers {
            for (tag, taken) in &process.taken {
                if taken.successes + taken.releases != 1 {
                    broken.push(format!("{tag} ended as {taken:?}"));
                }
                self.report.failures += u64::from(taken.releases);
            }
            broken.extend(
                process
                    .desk
                    .rooms()
                    .map(|room| format!("{} stays", room.tag())),
            );
        }
        if let Some(first) = broken.into_iter().next() {
            self.violated(first);
        }
    }
}
