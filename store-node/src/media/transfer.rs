//! Transfers of blocks: from memory to a medium, back, or from one extent on media to another.

use super::disk::Front;
use super::health::Health;
use super::{Answers, Shared};
use kvpool_disk::medium::{
    Arrival, Expected, Invalid, Landing, Loaded, Medium, Staged, Stamp, StoreError, StoreNumber,
    Wanted, Wrong,
};
use kvpool_disk::{Buffer, IoError};
use kvpool_proto::{self as proto, node_message::Body as ToMaster};
use kvpool_transport::Slice;
use kvpool_transport::host::{Abort, Admission, Host, WriteGuard};
use kvpool_types::medium::{DATA_START, GRANULE};
use kvpool_types::{
    Checksum, Code, Epoch, Extent, Grant, GrantId, Incarnation, Length, Offset, SegmentId, Version,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a transfer waits for arena memory.
pub(super) const MEMORY_WAIT: Duration = Duration::from_secs(1);
/// The largest block in bytes that is verified on the disk's thread, if no other transfer is in progress. For
/// such a block, waking another thread would take longer.
const SHORT: Length = Length(2 << 20);

/// An order of the master, its term, and the session to answer.
#[derive(Debug)]
pub(super) struct TransferOrder {
    pub(super) transfer: proto::Transfer,
    pub(super) incarnation: Incarnation,
    pub(super) epoch: Epoch,
    pub(super) answers: Answers,
    /// When a load stops waiting for arena memory.
    pub(super) until: tokio::time::Instant,
}

/// Bytes of a load, read and not yet verified.
#[derive(Debug)]
pub(super) struct Arrived {
    order: Box<TransferOrder>,
    to: Extent,
    bytes: Unproved,
    health: Arc<Health>,
}

/// A load's bytes, which are not proved yet, by their place.
#[derive(Debug)]
enum Unproved {
    /// They are in arena memory.
    InArena(Arrival),
    /// They are in the block's own memory.
    InPlace(Landing, Arc<WriteHook>),
}

/// The guard of the memory into which a disk writes. The memory has it as a hook. So the fence waits until the
/// kernel no longer uses the memory, even if the request is given up.
struct WriteHook(Mutex<Option<Box<dyn WriteGuard>>>);

impl std::fmt::Debug for WriteHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WriteHook")
    }
}

/// An attached medium, its health, and its flag for unflushed stores.
struct Target {
    medium: Arc<Medium>,
    is_dirty: Arc<AtomicBool>,
    health: Arc<Health>,
}

impl Target {
    fn of(front: &Front, segment: SegmentId) -> Option<Self> {
        Some(Self {
            medium: front.attached(segment)?,
            is_dirty: Arc::clone(&front.is_dirty),
            health: Arc::clone(&front.health),
        })
    }
}

/// The medium and the memory of a load.
struct LoadTarget {
    target: Target,
    wanted: Wanted,
    memory: Destination,
}

/// The memory that a load fills.
enum Destination {
    /// A buffer of the arena for the header and the block.
    Arena(Buffer),
    /// A buffer for the header, and the block's own memory.
    InPlace(Buffer, Slice, Arc<WriteHook>),
}

/// The abort of a load does nothing, because no read of a disk can be stopped. The fence waits for its end.
struct Unstoppable;

impl Abort for Unstoppable {
    fn abort(&self) {}

    fn ends_soon(&self) -> bool {
        false
    }
}

impl TransferOrder {
    /// Whether the block goes from memory to a medium.
    pub(super) fn is_store(&self) -> bool {
        let extents = self.extents();
        extents.is_some_and(|(from, to)| !from.segment.is_on_medium() && to.segment.is_on_medium())
    }

    /// Whether the block goes from a medium to memory.
    pub(super) fn is_load(&self) -> bool {
        let extents = self.extents();
        extents.is_some_and(|(from, to)| from.segment.is_on_medium() && !to.segment.is_on_medium())
    }

    fn extents(&self) -> Option<(Extent, Extent)> {
        let extent = |range: Option<proto::ExtentRange>| {
            range.map(|range| Extent {
                segment: SegmentId(range.segment),
                offset: Offset(range.offset),
                length: Length(range.length),
            })
        };
        let (from, to) = (extent(self.transfer.from)?, extent(self.transfer.to)?);
        (from.length == to.length).then_some((from, to))
    }

    /// `takes_no_writes`: the disk refuses all writes.
    fn answer(&self, code: Code, takes_no_writes: bool) {
        let done = proto::TransferDone {
            ticket: self.transfer.ticket,
            code: code.to_wire().into(),
            takes_no_writes,
        };
        let done = proto::TransfersDone {
            transfers: vec![done],
        };
        // A failure means that the session has ended, so the master has dropped the ticket.
        let _ended = self.answers.send(ToMaster::TransfersDone(done));
    }
}

/// Whether a disk can write straight into this extent. Another block is read into the arena, and copied. Segments begin
/// at the beginning of a page, so the memory of such an extent fits [`Wanted::fits`].
fn lies_in_granules(to: &Extent) -> bool {
    let whole = |bytes: u64| bytes.is_multiple_of(GRANULE);
    !to.segment.is_on_medium() && whole(to.offset.0) && whole(to.length.0)
}

impl Shared {
    /// Begins a transfer. It ends with one answer.
    pub(super) fn begin_transfer(self: &Arc<Self>, order: Box<TransferOrder>) {
        let begun = match order.extents() {
            Some((from, _)) if from.segment.is_on_medium() => {
                let mut work = self.work.lock();
                // Loads get arena memory in the order of their arrival.
                if !work.without_memory.is_empty() {
                    return work.without_memory.push_back(order);
                }
                drop(work);
                return self.begin_again(order);
            }
            Some((from, to)) if to.segment.is_on_medium() => self.begin_store(order, from, to),
            _ => Err((order, Code::Malformed)),
        };
        if let Err((order, code)) = begun {
            self.end(&order, code);
        }
    }

    /// Begins a load, or queues it until arena memory is free. The thread must not wait, since it also ends
    /// the loads that free memory.
    pub(super) fn begin_again(self: &Arc<Self>, order: Box<TransferOrder>) {
        let Some((from, to)) = order.extents() else {
            return self.end(&order, Code::Malformed);
        };
        let ended = self.work.lock().ended;
        let may_wait = tokio::time::Instant::now() < order.until;
        match self.load_target(&order, from, to, false) {
            Ok(target) => self.begin_load(order, to, target),
            Err(Code::Full) if may_wait => {
                let mut work = self.work.lock();
                work.without_memory.push_front(order);
                // A transfer that has ended since may have freed memory.
                work.ended_at_try = ended;
            }
            Err(code) => self.end(&order, code),
        }
    }

    /// Ends the loads that have waited too long for arena memory.
    pub(super) fn give_up_without_memory(&self) {
        let now = tokio::time::Instant::now();
        let late = {
            let mut work = self.work.lock();
            let orders = work.without_memory.drain(..);
            let (late, rest) = orders.partition(|order| order.until <= now);
            work.without_memory = rest;
            Vec::from(late)
        };
        for order in late {
            self.end(&order, Code::Full);
        }
    }

    /// Begins a load if it can begin without waiting; otherwise returns the order. Call this on threads that must
    /// not wait.
    pub(super) fn begin_at_once(
        self: &Arc<Self>,
        order: Box<TransferOrder>,
    ) -> Option<Box<TransferOrder>> {
        let Some((from, to)) = order.extents() else {
            return Some(order);
        };
        if self.work.lock().has_waiting_loads() {
            return Some(order);
        }
        match self.load_target(&order, from, to, true) {
            Ok(target) => {
                self.begin_load(order, to, target);
                None
            }
            Err(Code::Full) => Some(order),
            Err(code) => {
                self.end(&order, code);
                None
            }
        }
    }

    fn end(&self, order: &TransferOrder, code: Code) {
        order.answer(code, false);
        self.ended();
    }

    fn attached(&self, segment: SegmentId) -> Option<Target> {
        let mut fronts = self.fronts.iter();
        fronts.find_map(|front| Target::of(front, segment))
    }

    fn begin_store(
        self: &Arc<Self>,
        order: Box<TransferOrder>,
        from: Extent,
        to: Extent,
    ) -> Result<(), (Box<TransferOrder>, Code)> {
        let Some(target) = self.attached(to.segment) else {
            return Err((order, Code::Unreachable));
        };
        let bytes = match self.store.written(&from) {
            Ok(bytes) => bytes,
            Err(refused) => return Err((order, refused.code)),
        };
        let mut staged = match self.stage(from.length) {
            Ok(staged) => staged,
            Err(code) => return Err((order, code)),
        };
        staged.fill(|from, chunk| bytes.read_at(Offset(from), chunk));
        self.store_staged(order, staged, to, target);
        Ok(())
    }

    /// A buffer of the arena for a block that is stored.
    fn stage(&self, length: Length) -> Result<Staged, Code> {
        let until = kvpool_seams::end_of_wait(MEMORY_WAIT);
        match Staged::take(&self.arena, length.0, Some(until)) {
            Ok(Some(staged)) => Ok(staged),
            Ok(None) => Err(Code::Full),
            Err(_) => Err(Code::TooLarge),
        }
    }

    /// Stores a block that is in an arena buffer. The transfer ends when the store ends.
    fn store_staged(
        self: &Arc<Self>,
        order: Box<TransferOrder>,
        staged: Staged,
        to: Extent,
        target: Target,
    ) {
        let stamp = Stamp {
            offset: to.offset.0 + DATA_START,
            number: StoreNumber(order.transfer.version),
            version: Version(order.transfer.version),
            checksum: Checksum(order.transfer.checksum),
        };
        let shared = Arc::clone(self);
        let length = to.length;
        let Target {
            medium,
            is_dirty,
            health,
        } = target;
        let request = health.begin();
        medium.store(staged, stamp, move |stored| {
            health.finished(request);
            match &stored {
                Ok(()) => health.note(Ok(())),
                Err(StoreError::Io(error)) => health.note(Err(error)),
                Err(StoreError::Invalid(_)) => {}
            }
            let code = match &stored {
                Ok(()) => {
                    is_dirty.store(true, Ordering::Release);
                    shared.store.metrics().media_stored(length);
                    Code::Ok
                }
                // The block was evicted and its memory has other bytes now, or it is damaged.
                Err(StoreError::Invalid(Invalid::Checksum)) => Code::ChecksumMismatch,
                Err(error) => {
                    tracing::warn!(%error, extent = %to, "block not stored on the medium");
                    Code::Unreachable
                }
            };
            // The state of the medium is told later than the end of the store. A drain must not end in between.
            let is_refused = matches!(
                &stored,
                Err(StoreError::Io(IoError::NoSpace | IoError::ReadOnly))
            );
            order.answer(code, is_refused);
            shared.ended();
        });
    }

    /// Prepares a load without waiting for arena memory, and admits a load in place as a write. With `at_once`
    /// it does not overtake others that wait for memory. The error is `Full` if the arena has no memory now.
    fn load_target(
        &self,
        order: &TransferOrder,
        from: Extent,
        to: Extent,
        at_once: bool,
    ) -> Result<LoadTarget, Code> {
        let expected = Expected {
            number: None,
            version: Version(order.transfer.version),
            length: from.length.0,
            checksum: Checksum(order.transfer.checksum),
        };
        let wanted = Wanted::new(from.offset.0 + DATA_START, expected);
        let wanted = wanted.map_err(|_| Code::TooLarge)?;
        let target = self.attached(from.segment).ok_or(Code::Unreachable)?;
        // A reader waits for a load. No caller waits for a store, so a load may overtake it.
        let memory = match lies_in_granules(&to) {
            true => {
                let header = wanted.take_header(&self.arena, !at_once);
                let header = header.ok_or(Code::Full)?;
                let guard = self.admit(order, to)?;
                let memory = guard.parts().first().cloned().ok_or(Code::Internal)?;
                let hook = Arc::new(WriteHook(Mutex::new(Some(guard))));
                Destination::InPlace(header, memory.with_hook(hook.clone()), hook)
            }
            false => {
                let buffer = match at_once {
                    true => wanted.take(&self.arena, None),
                    false => wanted.take_first(&self.arena),
                };
                Destination::Arena(buffer.ok_or(Code::Full)?)
            }
        };
        Ok(LoadTarget {
            target,
            memory,
            wanted,
        })
    }

    fn begin_load(self: &Arc<Self>, order: Box<TransferOrder>, to: Extent, target: LoadTarget) {
        let LoadTarget {
            target: Target { medium, health, .. },
            wanted,
            memory,
        } = target;
        let shared = Arc::clone(self);
        let request = health.begin();
        let arrived = move |bytes| {
            health.finished(request);
            let arrived = Arrived {
                order,
                to,
                bytes,
                health,
            };
            let is_short = to.length <= SHORT && !to.segment.is_on_medium();
            if is_short && shared.is_last() {
                return shared.end_load(arrived);
            }
            // A worker verifies it, since the disk's thread has other completions to serve.
            shared.push(super::Job::Arrived(Box::new(arrived)));
        };
        match memory {
            Destination::Arena(buffer) => {
                medium.load_into_arena(wanted, buffer, |arrival| {
                    arrived(Unproved::InArena(arrival));
                });
            }
            Destination::InPlace(header, memory, hook) => {
                medium.load_into(wanted, header, memory, |landing| {
                    arrived(Unproved::InPlace(landing, hook));
                });
            }
        }
    }

    pub(super) fn end_load(self: &Arc<Self>, arrived: Arrived) {
        let Arrived {
            order,
            to,
            bytes,
            health,
        } = arrived;
        let (health, from) = (&health, order.transfer.from);
        let noted = |wrong: &Wrong| {
            match wrong {
                Wrong::Io(error) => health.note(Err(error)),
                // A bad sector is no failure of the device, and without a read there is no outcome.
                Wrong::BadSector(_) | Wrong::Invalid(_) => {}
                _ => health.note(Ok(())),
            }
            tracing::warn!(%wrong, kind = wrong.kind(), ?from,
                "block on the medium is not what was stored");
            self.store.metrics().media_wrong(wrong.kind());
            match wrong {
                Wrong::Invalid(_) => Code::Unreachable,
                // The whole device may fail or be gone, and return with all its blocks.
                Wrong::Io(_) => Code::Unreachable,
                _ => Code::ChecksumMismatch,
            }
        };
        let written = match bytes {
            Unproved::InArena(arrival) if to.segment.is_on_medium() => {
                let moved = match arrival.verify() {
                    Ok(loaded) => {
                        health.note(Ok(()));
                        self.move_on(order, to, loaded)
                    }
                    Err(wrong) => Err((order, noted(&wrong))),
                };
                if let Err((order, code)) = moved {
                    self.end(&order, code);
                }
                return;
            }
            Unproved::InArena(arrival) => self.write(&order, to, arrival),
            Unproved::InPlace(landing, hook) => self.prove(&order, to, landing, &hook),
        };
        let code = written.inspect(|_| health.note(Ok(())));
        self.end(&order, code.unwrap_or_else(|wrong| noted(&wrong)));
    }

    /// Verifies a block where it lies. Readers can read it only afterwards.
    fn prove(
        &self,
        order: &TransferOrder,
        to: Extent,
        landing: Landing,
        hook: &WriteHook,
    ) -> Result<Code, Wrong> {
        // After an error the kernel may still use the memory, whose hook keeps the guard.
        let chunks = landing.verify()?;
        let guard = hook.0.lock().take();
        let code = guard.map_or(Code::Internal, |guard| guard.finish(chunks));
        self.note_load(order, to, code, true);
        Ok(code)
    }

    fn note_load(&self, order: &TransferOrder, to: Extent, code: Code, in_place: bool) {
        if code == Code::Ok {
            let (grant, version) = (order.transfer.grant_id, order.transfer.version);
            self.store.is_load_of(&to, GrantId(grant), Version(version));
            self.store.metrics().media_loaded(to.length, in_place);
        }
    }

    /// Stores verified bytes at another extent of a medium.
    fn move_on(
        self: &Arc<Self>,
        order: Box<TransferOrder>,
        to: Extent,
        loaded: Loaded,
    ) -> Result<(), (Box<TransferOrder>, Code)> {
        let Some(target) = self.attached(to.segment) else {
            return Err((order, Code::Unreachable));
        };
        let staged = Staged::from_loaded(loaded);
        self.store_staged(order, staged, to, target);
        Ok(())
    }

    /// Writes a block into memory as a put would: each chunk after it is verified. Readers can read the block
    /// only after its last chunk.
    fn write(&self, order: &TransferOrder, to: Extent, arrival: Arrival) -> Result<Code, Wrong> {
        let guard = match self.admit(order, to) {
            Ok(guard) => guard,
            Err(code) => return arrival.give_up().map(|()| code),
        };
        let chunks = arrival.deliver(|from, chunk| guard.write_at(Offset(from), chunk))?;
        let code = guard.finish(chunks);
        self.note_load(order, to, code, false);
        Ok(code)
    }

    fn admit(&self, order: &TransferOrder, to: Extent) -> Result<Box<dyn WriteGuard>, Code> {
        let mac = order.transfer.grant.as_ref().try_into();
        let grant = Grant {
            extent: to,
            epoch: order.epoch,
            id: GrantId(order.transfer.grant_id),
            mac: mac.map_err(|_| Code::GrantRefused)?,
        };
        match self
            .store
            .admit_write(order.incarnation, &grant, Arc::new(Unstoppable))
        {
            Admission::Refuse(refused) => Err(refused.code),
            Admission::Write(guard) => Ok(guard),
        }
    }
}
