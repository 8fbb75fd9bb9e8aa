//! Rooms: sets of extents of this process's memory that one key opens for a while.
//!
//! Epoch 0 of a grant is the session, which reaches every exposed range. Every other epoch is a
//! room: its grants are signed with the room's own key and reach the room's extents alone. A room's
//! memory need not be exposed. ADR 0050 says why.

use super::exposed::{ActiveReceives, DrainLatch, DrainToken, ExposeError, StillTouched};
use crate::memory::Slice;
use kvpool_types::{Code, Epoch, Grant, GrantKey, GrantSigner, Incarnation, Offset};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long aborted receives may take to end.
const FENCE_GRACE: Duration = Duration::from_secs(2);
/// The time between two aborts, for a receive that was admitted before the room was closed and is
/// listed after the first abort.
const ABORT_AGAIN: Duration = Duration::from_millis(10);

/// The right to write into one room of one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomPass {
    /// The room: 63 random bits, never 0.
    pub epoch: Epoch,
    /// The key that signs writes into the room.
    pub key: GrantKey,
}

struct MemoryRoom {
    /// By address. All have the hook that trips the latch.
    extents: BTreeMap<u64, Slice>,
    signer: GrantSigner,
    drained: Arc<DrainLatch>,
    receives: Arc<ActiveReceives>,
}

/// The open rooms of a session.
#[derive(Default)]
pub(super) struct MemoryRooms(Mutex<HashMap<Epoch, MemoryRoom>>);

impl MemoryRooms {
    /// Opens a room over extents that do not overlap. The caller gives the same memory to no other
    /// room meanwhile.
    pub(super) fn open(&self, memory: Vec<Slice>) -> Result<RoomPass, ExposeError> {
        let drained = Arc::<DrainLatch>::default();
        let token = Arc::new(DrainToken(Arc::clone(&drained)));
        let mut extents: BTreeMap<u64, Slice> = BTreeMap::new();
        for slice in memory {
            let (address, length) = (slice.as_ptr().addr() as u64, slice.length().0);
            if length == 0 || !slice.is_writable() {
                return Err(ExposeError::Unfit);
            }
            let before = extents.range(..address + length).next_back();
            if let Some((other, known)) = before
                && other + known.length().0 > address
            {
                return Err(ExposeError::Overlap {
                    address,
                    length,
                    other: *other,
                });
            }
            extents.insert(address, slice.with_hook(token.clone()));
        }
        drop(token);
        if extents.is_empty() {
            return Err(ExposeError::Unfit);
        }
        let key = GrantKey(rand::random());
        let room = MemoryRoom {
            extents,
            signer: key.signer(),
            drained,
            receives: Arc::default(),
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
    /// aborts their connections. False when the room is not open.
    pub(super) fn close(&self, epoch: Epoch, patience: Duration) -> Result<bool, StillTouched> {
        let Some(room) = self.0.lock().remove(&epoch) else {
            return Ok(false);
        };
        let MemoryRoom {
            extents,
            drained,
            receives,
            ..
        } = room;
        let first = extents.keys().next().copied().unwrap_or(0);
        drop(extents);
        let is_fenced = fence(&drained, &receives, patience);
        if is_fenced {
            return Ok(true);
        }
        Err(StillTouched(first))
    }

    /// The memory of a grant, and the receives into its room.
    pub(super) fn admit(
        &self,
        session: Incarnation,
        grant: &Grant,
    ) -> Result<(Slice, Arc<ActiveReceives>), Code> {
        let rooms = self.0.lock();
        let room = rooms.get(&grant.epoch).ok_or(Code::GrantEnded)?;
        if !room.signer.verify(session, grant) {
            return Err(Code::GrantRefused);
        }
        let (address, length) = (grant.extent.offset.0, grant.extent.length);
        let before = room.extents.range(..=address).next_back();
        let (start, extent) = before.ok_or(Code::OutOfRange)?;
        let part = extent.slice(Offset(address - start), length);
        let part = part.ok_or(Code::OutOfRange)?;
        Ok((part, Arc::clone(&room.receives)))
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
