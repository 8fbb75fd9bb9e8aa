//! The disk of a node. It outlives the node's processes. What was written outlives a crash, and what was flushed
//! outlives a power cut.
//!
//! Superblocks and flushes are answered at once, because the node waits for them on the simulation's only thread.

use crate::budget::Ledger;
use crate::life::Life;
use crate::net::Net;
use crate::plan::{DiskFault, Process};
use kvpool_disk::medium::{Header, Superblock};
use kvpool_disk::{Completion, Engine, EngineKind, GRANULE, IoError, Op, Request};
use kvpool_types::medium::DATA_START;
use kvpool_types::{MediumId, Offset, Version};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// The unit of a device that tears no write inside of it, in bytes.
const SECTOR: usize = 512;
/// Of so many requests in 1000 a disk that fails does not do what it should.
const FAILING: u64 = 300;
/// So many transfers in a row must fail until a node takes its medium for gone.
const FAILURES: u32 = 8;

/// Granules by number; one that is absent is zero.
type Granules = BTreeMap<u64, Vec<u8>>;

/// See the module's documentation.
pub(crate) struct Ssd {
    node: usize,
    size: u64,
    net: Arc<Net>,
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) ledger: Ledger,
    /// Whether there is a copy of it, or it is one.
    has_twin: AtomicBool,
    /// See [`Ssd::harm`].
    is_harmed: AtomicBool,
    requests: AtomicU64,
    /// Two requests that were in flight for the same bytes, one of them a write.
    collision: Mutex<Option<String>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What a reader finds.
    granules: Granules,
    /// What a power cut may bring back: granules as they were at the last flush.
    durable: BTreeMap<u64, Option<Vec<u8>>>,
    /// The disk when a node began to use it.
    image: Granules,
    stalls_until: Option<Instant>,
    fails_until: Option<Instant>,
    full_until: Option<Instant>,
    loses_until: Option<Instant>,
    /// The granule of a superblock that takes no writes, and until when.
    bad_sector: Option<(u64, Instant)>,
    /// The device is gone until the node starts again.
    is_gone: bool,
    /// Whether this life of the node saw an error after which it may not use the medium any more.
    has_failed: bool,
    /// How many requests for data have failed in this life of the node.
    failures: u32,
    /// Whether a superblock was not read since both were whole: a node takes its place for a bad sector, and goes on
    /// with the other one.
    lost_a_superblock: bool,
}

impl std::fmt::Debug for Ssd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the disk of n{}", self.node)
    }
}

/// A disk as one process has it open.
#[derive(Debug)]
struct Opened {
    ssd: Arc<Ssd>,
    life: Life,
    in_flight: Mutex<Vec<InFlight>>,
    /// Whether the node is just told the end of a request for data.
    is_told: AtomicBool,
}

/// A request for data that has not ended.
#[derive(Debug)]
struct InFlight {
    number: u64,
    range: Range<u64>,
    writes: bool,
}

impl Opened {
    /// Notes a request that begins. Nobody writes where another request is in flight.
    fn begins(&self, op: &Op, offset: u64) -> u64 {
        let (writes, length) = match op {
            Op::Read(_) | Op::ReadInto(..) => (false, op.length()),
            Op::Write(_) => (true, op.length()),
            Op::Flush => (false, 0),
        };
        if writes {
            self.ssd.ledger.add(length);
        }
        let range = offset..offset + length;
        let mut in_flight = self.in_flight.lock();
        let meets = |other: &&InFlight| {
            (writes || other.writes)
                && range.start < other.range.end
                && other.range.start < range.end
        };
        let media = &self.ssd.net.media;
        let is_late =
            |writes: bool, range: &Range<u64>| !writes && media.is_late(self.ssd.node, range);
        let mut meeting = in_flight.iter().filter(meets);
        if let Some(other) =
            meeting.find(|other| !is_late(writes, &range) && !is_late(other.writes, &other.range))
        {
            let verb = |writes| if writes { "written" } else { "read" };
            *self.ssd.collision.lock() = Some(format!(
                "{range:?} of the disk of n{} is {} while {:?} is {}",
                self.ssd.node,
                verb(writes),
                other.range,
                verb(other.writes)
            ));
        }
        let number = self.ssd.requests.fetch_add(1, Ordering::Relaxed);
        in_flight.push(InFlight {
            number,
            range,
            writes,
        });
        number
    }

    fn ended(&self, number: u64) {
        self.in_flight.lock().retain(|one| one.number != number);
    }
}

/// A handle for requests in flight.
#[derive(Clone, Debug)]
struct Handle(Arc<Opened>);

impl Ssd {
    pub(crate) fn new(node: usize, bytes: u64, net: &Arc<Net>) -> Arc<Self> {
        Arc::new(Self {
            node,
            size: DATA_START + bytes,
            net: Arc::clone(net),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            ledger: Ledger::default(),
            has_twin: AtomicBool::new(false),
            is_harmed: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            collision: Mutex::default(),
            state: Mutex::default(),
        })
    }

    /// Opens the disk for one life of the node. Its earlier life has ended, and no request of it is in flight.
    pub(crate) fn open(self: &Arc<Self>, life: &Life) -> Arc<dyn Engine> {
        self.ledger.begin();
        let mut state = self.state.lock();
        state.is_gone = false;
        state.has_failed = false;
        state.failures = 0;
        state.image = state.granules.clone();
        drop(state);
        Arc::new(Handle(Arc::new(Opened {
            ssd: Arc::clone(self),
            life: life.clone(),
            in_flight: Mutex::default(),
            is_told: AtomicBool::new(false),
        })))
    }

    /// The disk goes wrong in this way, for a while.
    pub(crate) fn inflict(&self, fault: DiskFault, wait: Duration) {
        let until = Some(Instant::now() + wait);
        if fault != DiskFault::Stalls {
            self.harm();
        }
        if fault == DiskFault::Rots {
            self.net.media.note_damage(self.node);
        }
        let mut state = self.state.lock();
        // An earlier fault may go on for longer.
        match fault {
            DiskFault::Stalls => state.stalls_until = until.max(state.stalls_until),
            DiskFault::Fails => state.fails_until = until.max(state.fails_until),
            DiskFault::IsFull => state.full_until = until.max(state.full_until),
            DiskFault::IsGone => (state.is_gone, state.has_failed) = (true, true),
            DiskFault::Rots => state.rot(&self.net.dice),
            DiskFault::LosesFlushes => state.loses_until = until.max(state.loses_until),
            DiskFault::BadSector => state.bad_sector = state.damaged_superblock().zip(until),
        }
    }

    /// The power fails: what was not flushed may be lost, also in part.
    pub(crate) fn cut_power(&self) {
        self.harm();
        self.net.media.note_damage(self.node);
        self.state.lock().lose_unflushed(&self.net.dice);
    }

    /// The disk is as it was when the node began to use it, as after a restored snapshot.
    pub(crate) fn roll_back(&self) {
        self.harm();
        self.net.media.note_damage(self.node);
        let mut state = self.state.lock();
        state.granules = state.image.clone();
        state.durable.clear();
        state.lost_a_superblock = false;
    }

    /// The disk is a new one. No other node has a copy of it.
    pub(crate) fn become_blank(&self) {
        self.harm();
        self.has_twin.store(false, Ordering::Relaxed);
        self.net.media.note_new_disk(self.node);
        let mut state = self.state.lock();
        state.granules.clear();
        state.image.clear();
        state.durable.clear();
        state.lost_a_superblock = false;
    }

    /// The disk holds what `source` held when its node began to use it.
    pub(crate) fn become_copy_of(&self, source: &Self) {
        let image = source.state.lock().image.clone();
        // It may have become blank since the order for this copy.
        self.has_twin.store(true, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.granules = image;
        state.durable.clear();
        state.lost_a_superblock = false;
    }

    /// One of the two is a copy of the other. No master takes both.
    pub(crate) fn twins(&self, source: &Self) {
        for twin in [self, source] {
            twin.has_twin.store(true, Ordering::Relaxed);
            twin.harm();
            twin.net.media.note_damage(twin.node);
        }
    }

    /// Something happens that may take copies from it, or keep them from being written.
    pub(crate) fn harm(&self) {
        self.is_harmed.store(true, Ordering::Relaxed);
    }

    /// Whether something like that has happened.
    pub(crate) fn is_harmed(&self) -> bool {
        self.is_harmed.load(Ordering::Relaxed)
    }

    /// Ends all faults that end by themselves.
    pub(crate) fn heal(&self) {
        let mut state = self.state.lock();
        (state.stalls_until, state.fails_until, state.full_until) = (None, None, None);
        (state.loses_until, state.bad_sector) = (None, None);
    }

    /// Whether the medium is to be in use: the node has no reason to give it up, and no other node has a copy.
    pub(crate) fn is_sound(&self) -> bool {
        !self.state.lock().may_be_given_up() && !self.has_twin.load(Ordering::Relaxed)
    }

    /// Whether both superblocks may be damaged, by a bad sector and one more fault.
    pub(crate) fn may_be_damaged(&self) -> bool {
        self.state.lock().lost_a_superblock
    }

    /// What two requests did with the same bytes at a time.
    pub(crate) fn collision(&self) -> Option<String> {
        self.collision.lock().clone()
    }

    /// Whether requests may fail now.
    pub(crate) fn is_failing(&self) -> bool {
        let fails = self.state.lock().fails_until;
        fails.is_some_and(|until| Instant::now() < until)
    }

    /// Whether the disk has this medium: the newest superblock names it.
    pub(crate) fn has_medium(&self, medium: MediumId) -> bool {
        let state = self.state.lock();
        let places = [0u64, 1].into_iter();
        let superblocks =
            places.filter_map(|place| Superblock::decode(state.granules.get(&place)?).ok());
        let newest = superblocks.max_by_key(|superblock| superblock.sequence);
        newest.is_some_and(|newest| newest.medium == medium)
    }

    /// Whether the header of a copy of this version is at this offset of the bytes for blocks.
    pub(crate) fn has_header(&self, offset: Offset, version: Version) -> bool {
        let state = self.state.lock();
        let granule = state
            .granules
            .get(&((DATA_START + offset.0) / GRANULE as u64));
        let header = granule.and_then(|bytes| Header::decode(bytes).ok());
        header.is_some_and(|header| header.version == version)
    }

    /// When a request that begins now is done.
    fn done_at(&self) -> Instant {
        let dice = &self.net.dice;
        let noise = self.net.noise();
        let takes = match () {
            () if dice.chance(noise.slow) => dice.micros(10_000, 2_000_000),
            // Other requests overtake it, and the medium is not called slow yet.
            () if dice.chance(noise.slow_disk) => dice.micros(100_000, 1_400_000),
            () => dice.micros(30, 2_000),
        };
        let stalls = self.state.lock().stalls_until;
        stalls.unwrap_or_else(Instant::now).max(Instant::now()) + takes
    }

    fn note(&self, op: &Op, offset: u64) {
        let length = op.length();
        let (what, counter) = match op {
            Op::Read(_) | Op::ReadInto(..) => ("reads", &self.reads),
            Op::Write(_) => ("writes", &self.writes),
            Op::Flush => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let line = format_args!("{what} {length} bytes of its disk at {offset}").to_string();
        self.net.trace.note(Process::Node(self.node), line);
    }

    /// A node that is told of a failure reads its superblocks at once, to see whether the disk answers. It gives
    /// nothing up for such a probe.
    fn perform(&self, mut op: Op, offset: u64, is_probe: bool) -> Completion {
        let mut state = self.state.lock();
        let result = match &mut op {
            Op::Read(_) | Op::ReadInto(..) => {
                let range = offset..offset + op.length();
                let outcome = state.outcome(&self.net, false, range.end, self.size);
                if !is_probe {
                    state.note_error(offset >= DATA_START, &outcome);
                }
                if matches!(outcome, Err(IoError::Medium(_))) {
                    self.net.media.cannot_read(self.node, &range);
                }
                if !is_probe {
                    state.note_superblock(offset, &outcome);
                }
                let mut bytes = vec![0; usize::try_from(op.length()).unwrap_or_default()];
                for (granule, chunk) in numbers(offset).zip(bytes.chunks_mut(GRANULE)) {
                    if let Some(bytes) = state.granules.get(&granule) {
                        chunk.copy_from_slice(bytes);
                    }
                }
                op.fill(&bytes);
                outcome
            }
            Op::Write(buffer) => {
                let outcome =
                    state.outcome(&self.net, true, offset + buffer.len() as u64, self.size);
                state.note_error(offset >= DATA_START, &outcome);
                let count = match outcome {
                    Ok(()) => usize::MAX,
                    Err(IoError::Medium(_)) => self.net.dice.index(buffer.len() / GRANULE),
                    Err(_) => 0,
                };
                state.write(offset, buffer, count);
                outcome
            }
            Op::Flush => {
                let outcome = state.outcome(&self.net, true, 0, self.size);
                state.note_error(false, &outcome);
                match outcome {
                    Ok(()) => state.durable.clear(),
                    // The kernel forgets what it could not write.
                    Err(_) => {
                        self.net.media.note_damage(self.node);
                        state.lose_unflushed(&self.net.dice);
                    }
                }
                outcome
            }
        };
        Completion::of(op, result)
    }
}

/// The numbers of granules from an offset on.
fn numbers(offset: u64) -> impl Iterator<Item = u64> {
    offset / GRANULE as u64..
}

impl State {
    /// What the device says to a request that ends at byte `end`. A flush ends at byte 0.
    fn outcome(&self, net: &Net, writes: bool, end: u64, size: u64) -> Result<(), IoError> {
        let now = Instant::now();
        let lasts = |until: Option<Instant>| until.is_some_and(|until| now < until);
        if end > size {
            Err(IoError::OutOfRange)
        } else if self.is_gone {
            Err(IoError::Gone(io::ErrorKind::NotFound.into()))
        } else if writes && lasts(self.full_until) {
            Err(IoError::NoSpace)
        } else if writes && self.must_fail(end)
            || lasts(self.fails_until) && net.dice.chance(FAILING)
        {
            Err(IoError::Medium(io::Error::other("EIO")))
        } else {
            Ok(())
        }
    }

    /// Notes what the device said to a request: for the data of blocks, or for a superblock or a flush. A failed
    /// transfer alone makes a node give up no medium.
    fn note_error(&mut self, is_data: bool, outcome: &Result<(), IoError>) {
        match outcome {
            Ok(()) => {}
            Err(IoError::Medium(_)) if is_data => self.failures += 1,
            Err(_) => self.has_failed = true,
        }
    }

    /// Whether this life of the node may have given the medium up. Each failed transfer has at least one failed
    /// request.
    fn may_be_given_up(&self) -> bool {
        self.has_failed || self.failures >= FAILURES
    }

    /// Whether flushes fail now, or writes to this place. A flush ends at byte 0.
    fn must_fail(&self, end: u64) -> bool {
        let now = Instant::now();
        match end {
            0 => self.loses_until.is_some_and(|until| now < until),
            end => self.bad_sector.is_some_and(|(granule, until)| {
                now < until && end == (granule + 1) * GRANULE as u64
            }),
        }
    }

    /// Whether there is a superblock at this granule.
    fn is_whole(&self, place: u64) -> bool {
        let granule = self.granules.get(&place);
        granule.is_some_and(|bytes| Superblock::decode(bytes).is_ok())
    }

    /// The granule of the superblock that is not whole, if the other one is.
    fn damaged_superblock(&self) -> Option<u64> {
        match (self.is_whole(0), self.is_whole(1)) {
            (false, true) => Some(0),
            (true, false) => Some(1),
            _ => None,
        }
    }

    /// Notes what became of a read of a superblock.
    fn note_superblock(&mut self, offset: u64, outcome: &Result<(), IoError>) {
        match outcome {
            _ if offset >= 2 * GRANULE as u64 => {}
            Err(IoError::Medium(_)) => self.lost_a_superblock = true,
            _ if self.is_whole(0) && self.is_whole(1) => self.lost_a_superblock = false,
            _ => {}
        }
    }

    /// Writes the first `count` granules of `bytes`.
    fn write(&mut self, offset: u64, bytes: &[u8], count: usize) {
        for (granule, chunk) in numbers(offset).zip(bytes.chunks(GRANULE)).take(count) {
            let before = self.granules.insert(granule, chunk.to_vec());
            self.durable.entry(granule).or_insert(before);
        }
    }

    /// Of each granule that was not flushed, some sectors at its front are kept, and the rest is as before.
    fn lose_unflushed(&mut self, dice: &crate::dice::Dice) {
        for (granule, before) in std::mem::take(&mut self.durable) {
            let sectors = GRANULE / SECTOR;
            let kept = match dice.below(4) {
                0 => dice.index(sectors),
                1 | 2 => 0,
                _ => sectors,
            };
            let before = before.unwrap_or_else(|| vec![0; GRANULE]);
            if let Some(now) = self.granules.get_mut(&granule) {
                let rest = now.iter_mut().zip(&before).skip(kept * SECTOR);
                rest.for_each(|(now, before)| *now = *before);
            }
        }
    }

    /// Bits flip at some places of the data, or two of its granules are swapped.
    fn rot(&mut self, dice: &crate::dice::Dice) {
        let first = DATA_START / GRANULE as u64;
        let data: Vec<u64> = self
            .granules
            .range(first..)
            .map(|(number, _)| *number)
            .collect();
        let some = || data.get(dice.index(data.len())).copied();
        for _ in 0..dice.between(1, 8) {
            let (Some(one), Some(other)) = (some(), some()) else {
                return;
            };
            if dice.chance(300) {
                let (first, second) = (self.granules.remove(&one), self.granules.remove(&other));
                self.granules.extend(first.map(|bytes| (other, bytes)));
                self.granules.extend(second.map(|bytes| (one, bytes)));
            } else if let Some(bytes) = self.granules.get_mut(&one)
                && let Some(byte) = bytes.get_mut(dice.index(GRANULE))
            {
                *byte ^= 1 << dice.below(8);
            }
        }
    }
}

impl Handle {
    /// A request that is in flight when its process dies is done in part, and its answer reaches nobody.
    async fn run(self, number: u64, Request { op, offset, done }: Request) {
        let Opened { ssd, life, .. } = &*self.0;
        let at = ssd.done_at();
        let lives = life.run(async {
            sleep_until(at).await;
            ssd.net.running(Process::Node(ssd.node)).await;
        });
        if lives.await.is_none() {
            if let Op::Write(buffer) = op {
                let count = ssd.net.dice.index(buffer.len() / GRANULE + 1);
                ssd.state.lock().write(offset, &buffer, count);
            }
            return;
        }
        ssd.note(&op, offset);
        let completion = ssd.perform(op, offset, false);
        self.0.ended(number);
        self.0.is_told.store(true, Ordering::Relaxed);
        done(completion);
        self.0.is_told.store(false, Ordering::Relaxed);
    }
}

impl Engine for Handle {
    fn submit(&self, request: Request) {
        let is_data = (request.op.is_read() || matches!(request.op, Op::Write(_)))
            && request.offset >= DATA_START;
        if is_data {
            let number = self.0.begins(&request.op, request.offset);
            tokio::spawn(self.clone().run(number, request));
        } else {
            let Request { op, offset, done } = request;
            let is_probe = op.is_read() && self.0.is_told.load(Ordering::Relaxed);
            done(self.0.ssd.perform(op, offset, is_probe));
        }
    }

    fn size(&self) -> u64 {
        self.0.ssd.size
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Memory
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken() -> Result<(), IoError> {
        Err(IoError::Medium(io::Error::other("EIO")))
    }

    #[test]
    fn a_medium_is_given_up_after_many_failed_transfers_or_one_failed_superblock() {
        let mut state = State::default();
        for _ in 1..FAILURES {
            state.note_error(true, &broken());
            state.note_error(true, &Ok(()));
        }
        assert!(!state.may_be_given_up());
        state.note_error(true, &broken());
        assert!(state.may_be_given_up());
        for (is_data, outcome) in [
            (false, broken()),
            (true, Err(IoError::NoSpace)),
            (true, Err(IoError::Gone(io::ErrorKind::NotFound.into()))),
        ] {
            let mut state = State::default();
            state.note_error(is_data, &outcome);
            assert!(state.may_be_given_up(), "{outcome:?}");
        }
    }
}
