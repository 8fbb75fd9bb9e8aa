//! Pulls over the same network: one prefill process and one decode process.

use crate::memory::{sum, truth};
use crate::queue::Queue;
use crate::world::Report;
use kvpool_handoff::Moment;
use kvpool_handoff::pins::{PinOptions, PinOutcome, PullId};
use kvpool_handoff::pull::{
    PullAction, PullDesk, PullEvent, PullMode, PullOptions, PullReady, PullReceiver, PullStep,
    ToPullReceiver, ToPullSender,
};
use kvpool_handoff::room::PollState;
use kvpool_types::{Code, Incarnation};
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

const TTL: Duration = Duration::from_secs(20);
const TOTAL: u64 = 20;

#[derive(Clone, Debug)]
enum Event {
    Offer(u128),
    ToSender(Incarnation, ToPullSender),
    ToReceiver(Incarnation, ToPullReceiver),
    Sweep,
    Tick(PullId),
    Use(PullId),
    Allocate(PullId, u32),
    /// A read's request reaches prefill; its pages are read there.
    Reads(PullId, u32, Vec<u32>),
    Ends(Incarnation, PullId, PullEvent),
    Lost(Incarnation),
    Crash,
}

/// What prefill still holds of a pull, and what decode has read of it.
#[derive(Clone, Debug, Default)]
struct Ledger {
    released: BTreeSet<u32>,
    count: u32,
    is_offered: bool,
}

/// Decode's side of a pull.
struct Taken {
    machine: PullReceiver,
    dones: u32,
    allocated: u32,
    values: BTreeMap<u32, u64>,
    wanted: Vec<u32>,
    ended_at: Option<Moment>,
}

pub(crate) struct PullWorld {
    queue: Queue<Event>,
    desk: PullDesk,
    ledgers: BTreeMap<PullId, Ledger>,
    decode: Incarnation,
    taken: BTreeMap<PullId, Taken>,
    free: u32,
    report: Report,
    hasher: DefaultHasher,
}

impl PullWorld {
    pub(crate) fn new(seed: u64) -> Self {
        let mut queue = Queue::new(seed);
        for pull in 0..queue.chance.random_range(1..8) {
            let at = queue.millis(0, 3000);
            queue.after(at, Event::Offer(pull));
        }
        if queue.happens(queue.chances.crash) {
            let at = queue.millis(0, 5000);
            queue.after(at, Event::Crash);
        }
        let options = PinOptions {
            ttl: TTL,
            ..PinOptions::default()
        };
        Self {
            queue,
            desk: PullDesk::new(TOTAL, options),
            ledgers: BTreeMap::new(),
            decode: Incarnation(1),
            taken: BTreeMap::new(),
            free: 14,
            report: Report::default(),
            hasher: DefaultHasher::new(),
        }
    }

    pub(crate) fn run(mut self) -> Report {
        while self.report.violation.is_none()
            && let Some(event) = self.queue.next()
        {
            format!("{:?} {event:?}", self.queue.now.0).hash(&mut self.hasher);
            self.report.events += 1;
            self.step(event);
            let pinned: u64 = self.ledgers.values().map(Ledger::held).sum();
            if self.desk.pins().pinned() > pinned {
                self.violated("more pages are pinned than held".to_owned());
            }
            if self.report.events > 100_000 {
                self.violated("the world never comes to rest".to_owned());
            }
        }
        if self.report.violation.is_none() {
            self.check_end();
        }
        self.report.trace = self.hasher.finish();
        self.report
    }

    fn violated(&mut self, what: String) {
        self.report.violation.get_or_insert(what);
    }

    fn step(&mut self, event: Event) {
        let (now, mut out) = (self.queue.now, Vec::new());
        match event {
            Event::Offer(number) => self.offer(PullId(number)),
            Event::ToSender(from, message) => {
                self.desk.take(now, from, message, &mut out);
                self.perform(out);
            }
            Event::Sweep => {
                self.desk.sweep(now, &mut out);
                self.perform(out);
            }
            Event::Lost(session) => {
                self.desk.lost(now, session, &mut out);
                self.perform(out);
            }
            Event::Crash => {
                // Prefill may learn of it, or not: then the sweep frees the pins.
                if self.queue.happens(0.5) {
                    let delay = self.queue.millis(0, 1000);
                    self.queue.after(delay, Event::Lost(self.decode));
                }
                self.decode = Incarnation(self.decode.0 + 1);
                self.taken.clear();
                self.free = 14;
            }
            Event::ToReceiver(to, message) if to == self.decode => match message {
                ToPullReceiver::Ready(ready) => self.ready(&ready),
                ToPullReceiver::Abort { pull, code } => self.give(pull, PullEvent::Abort(code)),
            },
            Event::Tick(pull) => self.give(pull, PullEvent::Tick),
            Event::Use(pull) => self.give(pull, PullEvent::Use),
            Event::Ends(session, pull, event) if session == self.decode => self.give(pull, event),
            Event::Allocate(pull, count) => {
                let fits = count <= self.free;
                if let Some(taken) = self.taken.get_mut(&pull) {
                    if fits {
                        self.free -= count;
                        taken.allocated = count;
                    }
                    self.give(pull, PullEvent::Allocated(fits));
                }
            }
            Event::Reads(pull, chunk, pages) => self.reads(pull, chunk, &pages),
            Event::ToReceiver(..) | Event::Ends(..) => {}
        }
    }

    fn offer(&mut self, pull: PullId) {
        let count = self.queue.chance.random_range(1..8);
        let value = |page| truth(u64::try_from(pull.0).unwrap(), 0, page, 0);
        let ready = PullReady {
            pull,
            mode: match self.queue.happens(0.5) {
                true => PullMode::Delayed,
                false => PullMode::Eager,
            },
            pages: (0..count).collect(),
            sums: (0..count).map(|page| sum(&[value(page)])).collect(),
            ttl: TTL,
        };
        let mut out = Vec::new();
        let outcome = self
            .desk
            .offer(self.queue.now, self.decode, ready, &mut out);
        let is_offered = matches!(outcome, Ok(PinOutcome::Pinned | PinOutcome::Waits));
        let ledger = Ledger {
            count,
            is_offered,
            ..Ledger::default()
        };
        self.ledgers.insert(pull, ledger);
        self.perform(out);
    }

    /// Performs what prefill asks for.
    fn perform(&mut self, actions: Vec<PullAction>) {
        for action in actions {
            match action {
                PullAction::Send { to, message } => {
                    self.queue.transmit(Event::ToReceiver(to, message));
                }
                PullAction::Release { pull, pages } => {
                    let ledger = self.ledgers.get_mut(&pull).unwrap();
                    let twice = pages.into_iter().any(|page| !ledger.released.insert(page));
                    if twice {
                        self.violated(format!("{pull:?} was given back twice"));
                    }
                }
            }
        }
        if let Some(sweep) = self.desk.pins().next_sweep() {
            self.queue.at(sweep, Event::Sweep);
        }
    }

    fn ready(&mut self, ready: &PullReady) {
        // A notice that comes twice is known by its pull.
        if self.taken.contains_key(&ready.pull) {
            return;
        }
        let count = u32::try_from(ready.pages.len()).unwrap();
        let held: Vec<u32> = (0..self.queue.chance.random_range(0..=count) / 2).collect();
        let options = PullOptions {
            chunk_pages: 2,
            margin: Duration::from_secs(5),
        };
        let mut out = Vec::new();
        let machine = PullReceiver::begin(self.queue.now, ready, &held, options, &mut out);
        let taken = Taken {
            machine: machine.expect("a well-formed notice"),
            dones: 0,
            allocated: 0,
            values: BTreeMap::new(),
            wanted: (0..count).filter(|page| !held.contains(page)).collect(),
            ended_at: None,
        };
        if let Some(wake) = taken.machine.next_wake() {
            self.queue.at(wake, Event::Tick(ready.pull));
        }
        self.taken.insert(ready.pull, taken);
        if ready.mode == PullMode::Delayed && self.queue.happens(0.8) {
            let delay = self.queue.millis(0, 6000);
            self.queue.after(delay, Event::Use(ready.pull));
        }
        self.steps(ready.pull, out);
    }

    fn give(&mut self, pull: PullId, event: PullEvent) {
        let mut out = Vec::new();
        if let Some(taken) = self.taken.get_mut(&pull) {
            taken.machine.handle(self.queue.now, event, &mut out);
            self.steps(pull, out);
        }
    }

    /// Performs what decode asks for.
    fn steps(&mut self, pull: PullId, steps: Vec<PullStep>) {
        let session = self.decode;
        for step in steps {
            match step {
                PullStep::Send(message) => {
                    let taken = self.taken.get_mut(&pull).unwrap();
                    taken.dones += u32::from(matches!(message, ToPullSender::PullDone { .. }));
                    self.queue.transmit(Event::ToSender(session, message));
                }
                PullStep::Allocate(count) => {
                    self.queue
                        .after(Duration::ZERO, Event::Allocate(pull, count));
                }
                PullStep::Read { chunk, pages, .. } => {
                    let delay = self.queue.delay();
                    self.queue.after(delay, Event::Reads(pull, chunk, pages));
                }
                PullStep::Scatter { chunk, .. } => {
                    let delay = self.queue.millis(0, 20);
                    let event = PullEvent::Scattered(chunk);
                    self.queue.after(delay, Event::Ends(session, pull, event));
                }
                PullStep::CancelReads => {}
                PullStep::ReleasePages => {
                    let taken = self.taken.get_mut(&pull).unwrap();
                    self.free += std::mem::take(&mut taken.allocated);
                }
            }
        }
        let taken = self.taken.get_mut(&pull).unwrap();
        if !taken.machine.is_over() || taken.ended_at.is_some() {
            return;
        }
        taken.ended_at = Some(self.queue.now);
        if taken.machine.poll() == PollState::Success {
            let number = u64::try_from(pull.0).unwrap();
            let right = |page: &u32| taken.values.get(page) == Some(&truth(number, 0, *page, 0));
            if !taken.wanted.iter().all(right) {
                return self.violated(format!("{pull:?} succeeded with wrong bytes"));
            }
            self.report.successes += 1;
            // The engine uses its pages for a while.
            let pages = std::mem::take(&mut taken.allocated);
            self.free += pages;
        } else {
            self.report.failures += 1;
        }
    }

    /// Reads pages at prefill. What has been given back holds something else.
    fn reads(&mut self, pull: PullId, chunk: u32, pages: &[u32]) {
        let Some(ledger) = self.ledgers.get(&pull) else {
            return;
        };
        let number = u64::try_from(pull.0).unwrap();
        let mut outcome = Ok(());
        let mut values = BTreeMap::new();
        for page in pages {
            let is_gone = ledger.released.contains(page);
            let flips = self.queue.happens(self.queue.chances.flipped);
            let right = truth(number, 0, *page, 0);
            let value = if is_gone || flips { right ^ 1 } else { right };
            // The transport compares each page with the checksum of the notice.
            if sum(&[value]) != sum(&[right]) {
                outcome = Err(Code::ChecksumMismatch);
            }
            values.insert(*page, value);
        }
        if self.queue.happens(self.queue.chances.write_fails) {
            outcome = Err(Code::Unreachable);
        }
        if let Some(taken) = self.taken.get_mut(&pull) {
            taken.values.extend(values);
        }
        let delay = self.queue.delay();
        let event = PullEvent::Read(chunk, outcome);
        self.queue
            .after(delay, Event::Ends(self.decode, pull, event));
    }

    fn check_end(&mut self) {
        let mut broken = Vec::new();
        if (self.desk.pins().pinned(), self.desk.pins().waiting()) != (0, 0) {
            broken.push("pins do not return to 0".to_owned());
        }
        for (pull, ledger) in &self.ledgers {
            if ledger.is_offered && ledger.held() > 0 {
                broken.push(format!("{pull:?} holds pages"));
            }
        }
        for (pull, taken) in &self.taken {
            let was_busy = taken.machine.failure() == Some(Code::Full);
            if taken.ended_at.is_none() || taken.dones != u32::from(!was_busy) {
                broken.push(format!("{pull:?} said done {} times", taken.dones));
            }
        }
        if self.free != 14 {
            broken.push(format!("{} of 14 pages of decode are free", self.free));
        }
        if let Some(first) = broken.into_iter().next() {
            self.violated(first);
        }
    }
}

impl Ledger {
    fn held(&self) -> u64 {
        match self.is_offered {
            true => u64::from(self.count) - self.released.len() as u64,
            false => 0,
        }
    }
}
