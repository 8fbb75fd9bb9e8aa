//! The processes of a world, and the faults that happen to them.

use crate::declines::Silence;
use crate::memory::{Memory, RoomEpoch};
use crate::queue::{Chances, Queue};
use kvpool_handoff::Moment;
use kvpool_handoff::pins::{PinLedger, PinOptions};
use kvpool_handoff::room::{
    ChunkBody, DeskOptions, PageRectangle, ReceiverDesk, ReceiverEvent, RoomChunk, RoomGeneration,
    RoomId, RoomKey, RoomLimits, RoomReceiverPlan, RoomSenderPlan, RoomTag, SenderDesk,
    SenderEvent, SenderShare, ToReceiver, ToSender,
};
use kvpool_types::{Checksum, Code, Incarnation};
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// Mechanisms that a test switches off, to show that the checks notice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Defects {
    pub(crate) no_fence: bool,
    pub(crate) no_wait: bool,
    pub(crate) no_verification: bool,
    pub(crate) no_breaker: bool,
    /// No decline arrives.
    pub(crate) loses_declines: bool,
}

/// The result of one world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) trace: u64,
    pub(crate) events: u64,
    pub(crate) successes: u64,
    pub(crate) failures: u64,
    /// The number of declines that processes of decode sent.
    pub(crate) declines: u64,
    /// The numbers of prefill's rooms that ended by a decline, and by a deadline.
    pub(crate) declined: u64,
    pub(crate) late: u64,
    /// The number of offers of processes whose breakers were open.
    pub(crate) busy: u64,
    pub(crate) violation: Option<String>,
}

/// A write on its way. Its values are read at the sender when they are placed, as a network card does. If the
/// sender has given the write up, the values are those of the time when it was sent.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) sender: usize,
    pub(crate) sender_session: Incarnation,
    pub(crate) receiver: usize,
    pub(crate) session: Incarnation,
    pub(crate) epoch: u64,
    pub(crate) room: RoomId,
    pub(crate) id: u32,
    pub(crate) body: ChunkBody,
    pub(crate) early: Option<Vec<u64>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    OpenReceiver {
        receiver: usize,
        room: usize,
    },
    OpenSender {
        sender: usize,
        room: usize,
    },
    Produced {
        sender: usize,
        room: usize,
        rectangle: Option<PageRectangle>,
    },
    ToSender {
        from: usize,
        from_session: Incarnation,
        to: usize,
        to_session: Incarnation,
        message: ToSender,
    },
    ToReceiver {
        from: usize,
        from_session: Incarnation,
        to: usize,
        to_session: Incarnation,
        message: ToReceiver,
    },
    Arrives(Write),
    Lands(Write),
    Ends {
        write: Write,
        outcome: Result<Checksum, Code>,
    },
    Verified {
        receiver: usize,
        session: Incarnation,
        tag: RoomTag,
        chunks: Vec<(usize, RoomChunk)>,
    },
    ReceiverTick {
        receiver: usize,
    },
    SenderTick {
        sender: usize,
    },
    Link {
        sender: usize,
        receiver: usize,
        is_up: bool,
    },
    CrashSender {
        sender: usize,
    },
    CrashReceiver {
        receiver: usize,
    },
    SenderLost {
        session: Incarnation,
    },
    ReceiverLost {
        session: Incarnation,
    },
    AbortSender {
        sender: usize,
        room: usize,
    },
    AbortReceiver {
        receiver: usize,
        room: usize,
    },
    Decline {
        receiver: usize,
        room: usize,
    },
    Deadline {
        room: usize,
    },
}

/// The request of a room.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) id: RoomId,
    pub(crate) pages: u32,
    pub(crate) held: u32,
    pub(crate) begin: Moment,
    pub(crate) deadline: Moment,
}

/// A room's pages at a sender, as the sender's pins see them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    pub(crate) releases: u32,
    pub(crate) under_way: usize,
    pub(crate) is_cancelled: bool,
}

pub(crate) struct SenderProcess {
    pub(crate) session: Incarnation,
    pub(crate) desk: SenderDesk,
    pub(crate) sources: BTreeMap<RoomId, Source>,
    pub(crate) pins: PinLedger,
    /// The end of the back-off of each process of decode that declined.
    pub(crate) silent: BTreeMap<Incarnation, Silence>,
    /// The time at which each attempt asked first, and the attempts that were accepted.
    pub(crate) asked: BTreeMap<(Incarnation, RoomTag), Moment>,
    pub(crate) accepted: BTreeSet<(Incarnation, RoomTag)>,
    /// The declines that came before their rooms opened.
    pub(crate) early_declines: Vec<(RoomId, Incarnation)>,
    /// The rooms that ended by a decline.
    pub(crate) given_up: BTreeSet<RoomId>,
    pub(crate) tick: Option<Moment>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) successes: u32,
    pub(crate) releases: u32,
}

pub(crate) struct ReceiverProcess {
    pub(crate) session: Incarnation,
    pub(crate) desk: ReceiverDesk,
    pub(crate) memory: Memory,
    pub(crate) taken: BTreeMap<RoomTag, Taken>,
    pub(crate) tags: BTreeMap<RoomId, RoomTag>,
    pub(crate) declined: BTreeSet<RoomId>,
    pub(crate) generation: u64,
    pub(crate) tick: Option<Moment>,
}

pub(crate) struct World {
    pub(crate) queue: Queue<Event>,
    pub(crate) defects: Defects,
    pub(crate) layers: u32,
    pub(crate) requests: Vec<Request>,
    pub(crate) senders: Vec<SenderProcess>,
    pub(crate) receivers: Vec<ReceiverProcess>,
    pub(crate) report: Report,
    /// The time of the first decline of each room.
    pub(crate) declined_at: BTreeMap<RoomId, Moment>,
    /// Whether the network has no faults.
    pub(crate) is_calm: bool,
    sessions: u128,
    is_printing: bool,
    hasher: DefaultHasher,
}

fn limits() -> RoomLimits {
    RoomLimits {
        bootstrapping: Duration::from_secs(8),
        waiting: Duration::from_secs(8),
        stalled: Duration::from_secs(6),
        closing: Duration::from_secs(4),
        ..RoomLimits::default()
    }
}

impl World {
    pub(crate) fn new(seed: u64, defects: Defects) -> Self {
        Self::with(Queue::new(seed), defects)
    }

    pub(crate) fn without_faults(seed: u64) -> Self {
        let mut queue = Queue::new(seed);
        queue.chances = Chances::NONE;
        Self::with(queue, Defects::default())
    }

    /// A faulty network in which processes of decode decline.
    pub(crate) fn with_declines(seed: u64, defects: Defects) -> Self {
        let mut queue = Queue::new(seed);
        queue.chances.decline = 0.2;
        Self::with(queue, defects)
    }

    /// The same declines without other faults.
    pub(crate) fn with_declines_alone(seed: u64, defects: Defects) -> Self {
        let mut queue = Queue::new(seed);
        queue.chances = Chances {
            decline: 0.2,
            ..Chances::NONE
        };
        let world = Self::with(queue, defects);
        Self {
            is_calm: true,
            ..world
        }
    }

    fn with(mut queue: Queue<Event>, defects: Defects) -> Self {
        let chance = &mut queue.chance;
        let (senders, receivers) = (chance.random_range(1..4), chance.random_range(1..4));
        let layers = chance.random_range(1..4);
        let rooms: u64 = chance.random_range(1..5);
        let mut requests = Vec::new();
        for number in 0..rooms {
            let pages = chance.random_range(1..6);
            let begin = Moment(Duration::from_millis(chance.random_range(0..3000)));
            let length = Duration::from_millis(chance.random_range(9000..15_000));
            requests.push(Request {
                id: RoomId(1000 + number),
                pages,
                held: chance.random_range(0..=pages) / 2,
                begin,
                deadline: begin + length,
            });
        }
        let mut world = Self {
            queue,
            defects,
            layers,
            requests,
            senders: Vec::new(),
            receivers: Vec::new(),
            report: Report::default(),
            declined_at: BTreeMap::new(),
            is_calm: false,
            sessions: 0,
            is_printing: false,
            hasher: DefaultHasher::new(),
        };
        for _ in 0..senders {
            let process = world.new_sender();
            world.senders.push(process);
        }
        for _ in 0..receivers {
            let process = world.new_receiver();
            world.receivers.push(process);
        }
        world.plan_requests();
        world.plan_faults();
        world
    }

    pub(crate) fn printing(mut self) -> Self {
        self.is_printing = true;
        self
    }

    fn session(&mut self) -> Incarnation {
        self.sessions += 1;
        Incarnation(self.sessions)
    }

    pub(crate) fn new_sender(&mut self) -> SenderProcess {
        SenderProcess {
            session: self.session(),
            desk: SenderDesk::new(DeskOptions::default()),
            sources: BTreeMap::new(),
            pins: PinLedger::new(u64::MAX, PinOptions::default()),
            silent: BTreeMap::new(),
            asked: BTreeMap::new(),
            accepted: BTreeSet::new(),
            early_declines: Vec::new(),
            given_up: BTreeSet::new(),
            tick: None,
        }
    }

    pub(crate) fn new_receiver(&mut self) -> ReceiverProcess {
        let session = self.session();
        let options = DeskOptions {
            tombstones: 3,
            ..DeskOptions::default()
        };
        ReceiverProcess {
            session,
            desk: ReceiverDesk::new(session, &options),
            memory: Memory::with_pages(12),
            taken: BTreeMap::new(),
            tags: BTreeMap::new(),
            declined: BTreeSet::new(),
            // The generations of two incarnations differ.
            generation: u64::try_from(session.0).unwrap() * 1000,
            tick: None,
        }
    }

    fn plan_requests(&mut self) {
        for room in 0..self.requests.len() {
            let Request {
                begin, deadline, ..
            } = self.requests[room];
            for receiver in 0..self.receivers.len() {
                let at = begin + self.queue.millis(0, 300);
                self.queue.at(at, Event::OpenReceiver { receiver, room });
                if self.queue.happens(self.queue.chances.abort) {
                    let at = begin + self.queue.millis(0, 4000);
                    self.queue.at(at, Event::AbortReceiver { receiver, room });
                }
                self.plan_declines(receiver, room);
            }
            for sender in 0..self.senders.len() {
                let at = begin + self.queue.millis(0, 600);
                self.queue.at(at, Event::OpenSender { sender, room });
                self.plan_production(sender, room, at);
                if self.queue.happens(self.queue.chances.abort) {
                    let at = begin + self.queue.millis(0, 4000);
                    self.queue.at(at, Event::AbortSender { sender, room });
                }
            }
            self.queue.at(
                deadline + Duration::from_millis(20),
                Event::Deadline { room },
            );
        }
    }

    /// Prefill computes chunk by chunk, and in each chunk layer by layer or all layers at once.
    fn plan_production(&mut self, sender: usize, room: usize, from: Moment) {
        let (mut at, mut page) = (from, 0);
        let pages = self.requests[room].pages;
        while page < pages {
            let end = self.queue.chance.random_range(page + 1..=pages);
            let layers = 0..self.layers;
            let steps = match self.queue.happens(0.5) {
                true => layers.map(|layer| layer..layer + 1).collect(),
                false => vec![layers],
            };
            for layers in steps {
                at = at + self.queue.millis(0, 200);
                let rectangle = Some(PageRectangle {
                    pages: page..end,
                    layers,
                });
                self.queue.at(
                    at,
                    Event::Produced {
                        sender,
                        room,
                        rectangle,
                    },
                );
            }
            page = end;
        }
        let last = at + self.queue.millis(0, 5);
        self.queue.at(
            last,
            Event::Produced {
                sender,
                room,
                rectangle: None,
            },
        );
    }

    fn plan_faults(&mut self) {
        for sender in 0..self.senders.len() {
            if self.queue.happens(self.queue.chances.crash) {
                let at = self.queue.millis(0, 9000);
                self.queue.after(at, Event::CrashSender { sender });
            }
            for receiver in 0..self.receivers.len() {
                if self.queue.happens(self.queue.chances.broken_link) {
                    let (at, gap) = (self.queue.millis(0, 6000), self.queue.millis(1, 1500));
                    for (at, is_up) in [(at, false), (at + gap, true)] {
                        self.queue.after(
                            at,
                            Event::Link {
                                sender,
                                receiver,
                                is_up,
                            },
                        );
                    }
                }
            }
        }
        for receiver in 0..self.receivers.len() {
            if self.queue.happens(self.queue.chances.crash) {
                let at = self.queue.millis(0, 9000);
                self.queue.after(at, Event::CrashReceiver { receiver });
            }
        }
    }

    pub(crate) fn run(mut self) -> Report {
        while self.report.violation.is_none()
            && let Some(event) = self.queue.next()
        {
            let line = format!("{:?} {event:?}", self.queue.now.0);
            if self.is_printing {
                println!("{line}");
            }
            line.hash(&mut self.hasher);
            self.report.events += 1;
            self.step(event);
            if self.report.events > 200_000 {
                self.violated("the world never comes to rest".to_owned());
            }
        }
        if self.report.violation.is_none() {
            self.check_end();
        }
        self.report.trace = self.hasher.finish();
        self.report
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.report.violation.get_or_insert(what);
    }

    pub(crate) fn open_receiver(&mut self, receiver: usize, room: usize) {
        let request = self.requests[room].clone();
        if self.receivers[receiver].declined.contains(&request.id) {
            return;
        }
        let (now, layers) = (self.queue.now, self.layers);
        let senders = self
            .senders
            .iter()
            .enumerate()
            .map(|(index, sender)| SenderShare {
                session: Some(sender.session),
                rectangle: PageRectangle {
                    pages: 0..request.pages,
                    layers: 0..layers,
                },
                receiver: u32::try_from(receiver).unwrap(),
                view: 0,
                wants_aux: index == 0,
            });
        let senders: Vec<SenderShare> = senders.collect();
        let process = &mut self.receivers[receiver];
        process.generation += 1;
        let epoch = process.generation;
        let count = (request.pages - request.held) as usize;
        let Some(pages) = process.memory.reserve(epoch, count) else {
            return;
        };
        let tag = RoomTag {
            room: request.id,
            generation: RoomGeneration(epoch),
        };
        process.tags.insert(request.id, tag);
        process.taken.insert(tag, crate::world::Taken::default());
        let room_epoch = RoomEpoch {
            tag,
            is_open: true,
            under_way: 0,
            held: request.held,
            pages: pages.clone(),
        };
        process.memory.epochs.insert(epoch, room_epoch);
        let plan = RoomReceiverPlan {
            tag,
            epoch,
            key: RoomKey([7; 32]),
            held: request.held,
            pages: u32::try_from(count).unwrap(),
            senders,
            limits: limits(),
            deadline: request.deadline,
        };
        let mut out = Vec::new();
        process.desk.open(now, plan, &mut out).unwrap();
        self.perform_receiver(receiver, tag, out);
    }

    pub(crate) fn open_sender(&mut self, sender: usize, room: usize) {
        let request = &self.requests[room];
        let plan = RoomSenderPlan {
            room: request.id,
            rectangle: PageRectangle {
                pages: 0..request.pages,
                layers: 0..self.layers,
            },
            receivers: self.receivers.len(),
            limits: limits(),
            deadline: request.deadline,
            // Small chunks, so that the engine's rectangles are split and wait for their turn.
            chunk_cells: 3,
            cells_under_way: 5,
        };
        let (id, pages, mut out) = (request.id, u64::from(request.pages), Vec::new());
        let process = &mut self.senders[sender];
        process.sources.insert(id, Source::default());
        process.pins.pin(id, pages);
        let answers = process.desk.open(self.queue.now, plan, &mut out).unwrap();
        for (session, answer) in answers {
            let mut receivers = self.receivers.iter();
            if let Some(to) = receivers.position(|receiver| receiver.session == session) {
                self.tell_receiver(sender, to, session, answer);
            }
        }
        self.perform_sender(sender, id, out);
        self.check_early_declines(sender, id);
    }

    pub(crate) fn receiver_event(&mut self, receiver: usize, tag: RoomTag, event: ReceiverEvent) {
        let mut out = Vec::new();
        let now = self.queue.now;
        self.receivers[receiver]
            .desk
            .handle(now, tag, event, &mut out);
        self.perform_receiver(receiver, tag, out);
    }

    pub(crate) fn sender_event(&mut self, sender: usize, room: RoomId, event: SenderEvent) {
        let mut out = Vec::new();
        let now = self.queue.now;
        self.senders[sender].desk.handle(now, room, event, &mut out);
        self.perform_sender(sender, room, out);
    }
}
