//! Transfers: a block goes from memory to a medium, or back.

use super::health::Health;
use super::{Answers, Shared};
use kvpool_disk::medium::{
    Arrival, Expected, Loaded, Order as StoreNumber, Staged, Stamp, StoreError, Wanted, Wrong,
};
use kvpool_disk::medium::{Invalid, Medium};
use kvpool_proto::{self as proto, node_message::Body as ToMaster};
use kvpool_transport::host::{Abort, Admission, Host};
use kvpool_types::medium::DATA_START;
use kvpool_types::{
    Checksum, Code, Epoch, Extent, Grant, GrantId, Incarnation, Length, Offset, SegmentId, Version,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a transfer waits for memory of the arena.
const ROOM: Duration = Duration::from_secs(1);

/// An order, the term that it belongs to, and where its answer goes.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) order: proto::Transfer,
    pub(super) incarnation: Incarnation,
    pub(super) epoch: Epoch,
    pub(super) answers: Answers,
}

/// Bytes of a load, read and not yet verified.
#[derive(Debug)]
pub(super) struct Arrived {
    order: Box<Order>,
    to: Extent,
    arrival: Arrival,
    health: Arc<Health>,
}

/// An attached medium, and what the node notes about it.
struct Target {
    medium: Arc<Medium>,
    is_dirty: Arc<AtomicBool>,
    health: Arc<Health>,
}

/// A copy into memory is short, so it is not interrupted: the fence waits for its end.
struct Short;

impl Abort for Short {
    fn abort(&self) {}
}

impl Order {
    fn extents(&self) -> Option<(Extent, Extent)> {
        let extent = |range: Option<proto::ExtentRange>| {
            range.map(|range| Extent {
                segment: SegmentId(range.segment),
                offset: Offset(range.offset),
                length: Length(range.length),
            })
        };
        let (from, to) = (extent(self.order.from)?, extent(self.order.to)?);
        (from.length == to.length).then_some((from, to))
    }

    fn answer(&self, code: Code) {
        let done = proto::TransferDone {
            ticket: self.order.ticket,
            code: code.to_wire().into(),
        };
        let done = proto::TransfersDone {
            transfers: vec![done],
        };
        // A failure means that the session has ended, and the ticket with it.
        let _ended = self.answers.send(ToMaster::TransfersDone(done));
    }
}

impl Shared {
    /// Begins a transfer. It ends with one answer.
    pub(super) fn begin_transfer(self: &Arc<Self>, order: Box<Order>) {
        let begun = match order.extents() {
            Some((from, to)) if from.segment.is_on_medium() => self.begin_load(order, from, to),
            Some((from, to)) if to.segment.is_on_medium() => self.begin_store(order, from, to),
            _ => Err((order, Code::Malformed)),
        };
        if let Err((order, code)) = begun {
            self.end(&order, code);
        }
    }

    fn end(&self, order: &Order, code: Code) {
        order.answer(code);
        self.ended();
    }

    fn attached(&self, segment: SegmentId) -> Option<Target> {
        self.disks.iter().find_map(|disk| {
            let disk = disk.lock();
            let medium = disk.attached(segment)?;
            Some(Target {
                medium,
                is_dirty: Arc::clone(&disk.is_dirty),
                health: Arc::clone(&disk.health),
            })
        })
    }

    fn begin_store(
        self: &Arc<Self>,
        order: Box<Order>,
        from: Extent,
        to: Extent,
    ) -> Result<(), (Box<Order>, Code)> {
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
        bytes.read_at(Offset(0), staged.data());
        self.store_staged(order, staged, to, target);
        Ok(())
    }

    /// Memory of the arena for a block that is stored.
    fn stage(&self, length: Length) -> Result<Staged, Code> {
        let until = Instant::now() + ROOM;
        match Staged::take(&self.arena, length.0, Some(until)) {
            Ok(Some(staged)) => Ok(staged),
            Ok(None) => Err(Code::Full),
            Err(_) => Err(Code::TooLarge),
        }
    }

    /// Stores a block that lies in the arena. The transfer ends with it.
    fn store_staged(
        self: &Arc<Self>,
        order: Box<Order>,
        staged: Staged,
        to: Extent,
        target: Target,
    ) {
        let stamp = Stamp {
            offset: to.offset.0 + DATA_START,
            order: StoreNumber(order.order.version),
            version: Version(order.order.version),
            checksum: Checksum(order.order.checksum),
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
            health.note(match &stored {
                Err(StoreError::Io(error)) => Err(error),
                _ => Ok(()),
            });
            let code = match &stored {
                Ok(()) => {
                    is_dirty.store(true, Ordering::Release);
                    shared.store.metrics().media_stored(length);
                    Code::Ok
                }
                // The block was evicted, and its memory has other bytes now; or it is damaged.
                Err(StoreError::Invalid(Invalid::Checksum)) => Code::ChecksumMismatch,
                Err(error) => {
                    tracing::warn!(%error, extent = %to, "block not stored on the medium");
                    Code::Unreachable
                }
            };
            shared.end(&order, code);
        });
    }

    fn begin_load(
        self: &Arc<Self>,
        order: Box<Order>,
        from: Extent,
        to: Extent,
    ) -> Result<(), (Box<Order>, Code)> {
        let Some(target) = self.attached(from.segment) else {
            return Err((order, Code::Unreachable));
        };
        let expected = Expected {
            order: None,
            version: Version(order.order.version),
            length: from.length.0,
            checksum: Checksum(order.order.checksum),
        };
        let Ok(wanted) = Wanted::whole(from.offset.0 + DATA_START, expected) else {
            return Err((order, Code::TooLarge));
        };
        let Some(room) = wanted.take(&self.arena, Some(Instant::now() + ROOM)) else {
            return Err((order, Code::Full));
        };
        let shared = Arc::clone(self);
        let Target { medium, health, .. } = target;
        let request = health.begin();
        medium.load(wanted, room, move |arrival| {
            health.finished(request);
            // Verified on a worker: the disk's thread has other completions.
            shared.push(super::Job::Arrived(Box::new(Arrived {
                order,
                to,
                arrival,
                health,
            })));
        });
        Ok(())
    }

    pub(super) fn end_load(self: &Arc<Self>, arrived: Arrived) {
        let Arrived {
            order,
            to,
            arrival,
            health,
        } = arrived;
        let verified = arrival.verify();
        health.note(match &verified {
            Err(Wrong::Io(error)) => Err(error),
            _ => Ok(()),
        });
        let code = match verified {
            Ok(loaded) if to.segment.is_on_medium() => match self.move_on(order, to, &loaded) {
                Ok(()) => return,
                Err((failed, code)) => return self.end(&failed, code),
            },
            Ok(loaded) => self.write(&order, to, &loaded),
            Err(wrong) => {
                let from = order.order.from;
                tracing::warn!(%wrong, kind = wrong.kind(), ?from,
                    "block on the medium is not what was stored");
                self.store.metrics().media_wrong(wrong.kind());
                match wrong {
                    Wrong::Invalid(_) => Code::Unreachable,
                    _ => Code::ChecksumMismatch,
                }
            }
        };
        self.end(&order, code);
    }

    /// Stores verified bytes at another place of a medium.
    fn move_on(
        self: &Arc<Self>,
        order: Box<Order>,
        to: Extent,
        bytes: &[u8],
    ) -> Result<(), (Box<Order>, Code)> {
        let Some(target) = self.attached(to.segment) else {
            return Err((order, Code::Unreachable));
        };
        let mut staged = match self.stage(to.length) {
            Ok(staged) => staged,
            Err(code) => return Err((order, code)),
        };
        staged.data().copy_from_slice(bytes);
        self.store_staged(order, staged, to, target);
        Ok(())
    }

    /// Writes verified bytes into memory as a put would.
    fn write(&self, order: &Order, to: Extent, loaded: &Loaded) -> Code {
        let Ok(mac) = order.order.grant.as_ref().try_into() else {
            return Code::GrantRefused;
        };
        let grant = Grant {
            extent: to,
            epoch: order.epoch,
            id: GrantId(order.order.grant_id),
            mac,
        };
        match self
            .store
            .admit_write(order.incarnation, &grant, Arc::new(Short))
        {
            Admission::Refuse(refused) => refused.code,
            Admission::Write(guard) => {
                guard.target().write_at(Offset(0), loaded);
                let code = guard.finish(loaded.chunks().to_vec());
                if code == Code::Ok {
                    self.store.metrics().media_loaded(to.length);
                }
                code
            }
        }
    }
}
