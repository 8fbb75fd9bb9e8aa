//! Rooms: parts of this process's memory that one key opens until the room is closed.
//!
//! ```text
//!  views ──open──► RoomPass (epoch, key) ──► peers write by (view, offset)
//!    └─ RoomRows: rows of one length and stride; a writer sees them as one run of bytes
//!  close ──► no new write ──► present ones end, or are ended ──► ClosedRoom: what was written
//! ```
//!
//! Epoch 0 of a grant is the session, which reaches every exposed range. Every other epoch is a
//! room: its grants are signed with the room's own key and reach the room's views alone. A writer
//! learns no address. One grant covers any number of rows. ADR 0050 says why.

use super::exposed::{ActiveReceives, DrainLatch, DrainToken, ExposeError, StillTouched};
use super::room_writes::{RoomWrite, RoomWrites};
use crate::checksum::whole_sum_shared;
use crate::memory::Slice;
use kvpool_types::{
    Checksum, Code, Epoch, Extent, Grant, GrantKey, GrantSigner, Incarnation, Length, Offset,
    SegmentId,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long aborted receives may take to end.
const FENCE_GRACE: Duration = Duration::from_secs(2);
/// The interval of aborts. A receive may have been admitted before the room was closed, and be listed only
/// after the first abort.
const ABORT_AGAIN: Duration = Duration::from_millis(10);
/// The segment of a room's first view. Lower segments belong to the session.
const FIRST_VIEW: u32 = 16;

/// The right to write into one room of one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomPass {
    /// The room: 63 random bits, never 0.
    pub epoch: Epoch,
    /// The key that signs writes into the room.
    pub key: GrantKey,
}

/// Rows of memory with one length, at equal distances.
#[derive(Clone, Debug)]
pub struct RoomRows {
    /// The memory from the first byte of the first row on.
    pub memory: Slice,
    /// The bytes from the start of one row to the start of the next.
    pub stride: u64,
    /// The number of rows.
    pub count: u64,
    /// The bytes of one row.
    pub length: u64,
}

impl From<Slice> for RoomRows {
    /// One row.
    fn from(memory: Slice) -> Self {
        let length = memory.length().0;
        Self {
            memory,
            stride: length,
            count: 1,
            length,
        }
    }
}

impl RoomRows {
    /// The bytes of all rows; `None` when the rows overlap, or leave the memory.
    fn bytes(&self) -> Option<u64> {
        let is_apart = self.stride >= self.length || self.count == 1;
        let last = self.count.checked_sub(1)?.checked_mul(self.stride)?;
        let end = last.checked_add(self.length)?;
        let is_inside = end <= self.memory.length().0;
        (self.length > 0 && is_apart && is_inside).then_some(self.count * self.length)
    }
}

/// A part of a room's memory, which writers see as one run of bytes.
#[derive(Clone, Debug)]
pub struct RoomView {
    /// The rows, each with the offset of its first byte in the view.
    rows: Vec<(u64, RoomRows)>,
    length: u64,
}

impl RoomView {
    /// A view over rows, in order. The rows of one room must not overlap.
    ///
    /// # Errors
    ///
    /// [`ExposeError::Unfit`] for no rows, an empty row, rows that leave their memory or overlap
    /// each other by a short stride, and read-only memory.
    pub fn new(rows: Vec<RoomRows>) -> Result<Self, ExposeError> {
        let mut view = Self {
            rows: Vec::with_capacity(rows.len()),
            length: 0,
        };
        for each in rows {
            let bytes = each.bytes().filter(|_| each.memory.is_writable());
            let bytes = bytes.ok_or(ExposeError::Unfit)?;
            let begin = view.length;
            view.length = begin.checked_add(bytes).ok_or(ExposeError::Unfit)?;
            view.rows.push((begin, each));
        }
        if view.length == 0 {
            return Err(ExposeError::Unfit);
        }
        Ok(view)
    }

    /// The bytes of all rows.
    pub const fn length(&self) -> Length {
        Length(self.length)
    }

    /// The memory of a range of the view, in order; `None` when it leaves the view.
    pub fn parts(&self, from: Offset, length: Length) -> Option<Vec<Slice>> {
        let end = from.0.checked_add(length.0)?;
        if end > self.length {
            return None;
        }
        let first = self.rows.partition_point(|(begin, _)| *begin <= from.0);
        let mut parts = Vec::new();
        let mut at = from.0;
        for (begin, rows) in self.rows.get(first.saturating_sub(1)..)? {
            while at < end {
                let within = at - begin;
                let (row, into) = (within / rows.length, within % rows.length);
                if row >= rows.count {
                    break;
                }
                let taken = (rows.length - into).min(end - at);
                let place = Offset(row * rows.stride + into);
                parts.push(rows.memory.slice(place, Length(taken))?);
                at += taken;
            }
        }
        Some(parts)
    }

    fn with_hook(&self, hook: &Arc<DrainToken>) -> Self {
        let hooked = |(begin, rows): &(u64, RoomRows)| {
            let memory = rows.memory.clone().with_hook(hook.clone());
            (
                *begin,
                RoomRows {
                    memory,
                    ..rows.clone()
                },
            )
        };
        Self {
            rows: self.rows.iter().map(hooked).collect(),
            length: self.length,
        }
    }
}

/// The extent of a range of a view, as a grant names it.
pub(super) fn view_extent(view: u32, offset: Offset, length: Length) -> Option<Extent> {
    Some(Extent {
        segment: SegmentId(view.checked_add(FIRST_VIEW)?),
        offset,
        length,
    })
}

/// A room after its end: nothing writes into it any more.
#[derive(Clone, Debug)]
pub struct ClosedRoom {
    views: Vec<RoomView>,
    writes: RoomWrites,
}

impl ClosedRoom {
    /// The checksum of the present bytes in a range of a view. If each byte was written once, it follows from
    /// the checksums of the writes. Otherwise the memory is read. `None` when the range exceeds the view.
    pub fn sum(&self, view: u32, from: Offset, length: Length) -> Option<Checksum> {
        if let Some(known) = self.writes.sum(view, from, length) {
            return Some(known);
        }
        let parts = self.views.get(view as usize)?.parts(from, length)?;
        Some(whole_sum_shared(&parts))
    }
}

struct MemoryRoom {
    /// Without the hook, for the caller of `close`.
    bare: Vec<RoomView>,
    /// With the hook that trips the latch. Empty once the room is being closed.
    views: Vec<RoomView>,
    signer: GrantSigner,
    drained: Arc<DrainLatch>,
    receives: Arc<ActiveReceives>,
    writes: Arc<Mutex<RoomWrites>>,
}

/// The open rooms of a session.
#[derive(Default)]
pub(super) struct MemoryRooms(Mutex<HashMap<Epoch, MemoryRoom>>);

/// The memory that one write may fill.
pub(super) struct AdmittedWrite {
    pub(super) parts: Vec<Slice>,
    pub(super) receives: Arc<ActiveReceives>,
    pub(super) noted: RoomWrite,
}

impl MemoryRooms {
    /// Opens a room over views. The caller gives the same memory to no other room meanwhile.
    pub(super) fn open(&self, bare: Vec<RoomView>) -> Result<RoomPass, ExposeError> {
        if bare.is_empty() {
            return Err(ExposeError::Unfit);
        }
        let drained = Arc::<DrainLatch>::default();
        let token = Arc::new(DrainToken(Arc::clone(&drained)));
        let views = bare.iter().map(|view| view.with_hook(&token)).collect();
        drop(token);
        let key = GrantKey(rand::random());
        let room = MemoryRoom {
            bare,
            views,
            signer: key.signer(),
            drained,
            receives: Arc::default(),
            writes: Arc::default(),
        };
        let mut rooms = self.0.lock();
        let epoch = loop {
            let epoch = Epoch(rand::random::<u64>() >> 1);
            if epoch != Epoch(0) && !rooms.contains_key(&epoch) {
                break epoch;
            }
        };
        rooms.insert(epoch, room);
        Ok(RoomPass { epoch, key })
    }

    /// Admits no new write into a room, and waits until the present ones end. After `patience` it
    /// aborts their connections. `None` when the room is not open. After an error the caller may
    /// call again.
    pub(super) fn close(
        &self,
        epoch: Epoch,
        patience: Duration,
    ) -> Result<Option<ClosedRoom>, StillTouched> {
        let (drained, receives) = {
            let mut rooms = self.0.lock();
            let Some(room) = rooms.get_mut(&epoch) else {
                return Ok(None);
            };
            room.views = Vec::new();
            (Arc::clone(&room.drained), Arc::clone(&room.receives))
        };
        if !fence(&drained, &receives, patience) {
            return Err(StillTouched(epoch.0));
        }
        let room = self.0.lock().remove(&epoch);
        Ok(room.map(|room| ClosedRoom {
            views: room.bare,
            writes: room.writes.lock().clone(),
        }))
    }

    /// The memory of a grant.
    pub(super) fn admit(&self, session: Incarnation, grant: &Grant) -> Result<AdmittedWrite, Code> {
        let rooms = self.0.lock();
        let room = rooms.get(&grant.epoch);
        let room = room.filter(|room| !room.views.is_empty());
        let room = room.ok_or(Code::GrantEnded)?;
        if !room.signer.verify(session, grant) {
            return Err(Code::GrantRefused);
        }
        let Extent {
            segment,
            offset,
            length,
        } = grant.extent;
        let view = segment.0.checked_sub(FIRST_VIEW).ok_or(Code::OutOfRange)?;
        let parts = room.views.get(view as usize).filter(|_| length > Length(0));
        let parts = parts.and_then(|view| view.parts(offset, length));
        let parts = parts.ok_or(Code::OutOfRange)?;
        Ok(AdmittedWrite {
            parts,
            receives: Arc::clone(&room.receives),
            noted: RoomWrites::begin(&room.writes, view, offset, length),
        })
    }
}

/// Waits until nothing holds a part of a room that admits no more.
fn fence(drained: &DrainLatch, receives: &ActiveReceives, patience: Duration) -> bool {
    let patient_until = Instant::now() + patience;
    if drained.wait_until(patient_until) {
        return true;
    }
    let end = Instant::now() + FENCE_GRACE;
    loop {
        receives.abort();
        if drained.wait_until(end.min(Instant::now() + ABORT_AGAIN)) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
    }
}
