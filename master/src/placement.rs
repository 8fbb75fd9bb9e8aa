//! Where blocks are put: segments, their extents, and the choice among them.

mod allocator;
mod draws;
pub mod extents;
pub mod quarantine;

pub use crate::replica::ExtentIndex;
pub use allocator::{Allocator, NoRoom};
pub use extents::Extents;

use crate::membership::StoreNode;
use crate::replica::{BlockId, Replica};
use draws::Draws;
use kvpool_types::{HostId, Length, Offset, SegmentId};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One segment of one node.
#[derive(Debug)]
pub struct Segment {
    /// Its number.
    pub id: SegmentId,
    /// The node that owns its memory.
    pub node: Arc<StoreNode>,
    /// Its bytes.
    pub size: Length,
    /// The most bytes that may be used.
    limit: u64,
    extents: Mutex<Extents>,
    used: AtomicU64,
    quarantined: AtomicU64,
    stuck: AtomicU64,
}

impl Segment {
    /// A segment of which no more than `high_watermark` (a share, up to 1) may be used.
    pub fn new(id: SegmentId, node: Arc<StoreNode>, size: Length, high_watermark: f64) -> Self {
        Self {
            id,
            node,
            size,
            limit: share(size.0, high_watermark),
            extents: Mutex::new(Extents::new(size)),
            used: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
            stuck: AtomicU64::new(0),
        }
    }

    /// Bytes of blocks, grants and quarantine.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Bytes on their way to being free.
    pub fn quarantined(&self) -> u64 {
        self.quarantined.load(Ordering::Acquire)
    }

    /// Bytes that will be used once what is about to be free is: blocks, grants, and what is stuck in
    /// quarantine.
    pub fn used_after_quarantine(&self) -> u64 {
        let soon = self
            .quarantined()
            .saturating_sub(self.stuck.load(Ordering::Acquire));
        self.used().saturating_sub(soon)
    }

    /// How many bytes have to leave before another `length` fit below the limit. Quarantine counts as free, unless it
    /// is stuck: it becomes free without another eviction.
    pub(crate) fn shortfall(&self, length: Length) -> u64 {
        (self.used_after_quarantine() + length.0).saturating_sub(self.limit)
    }

    /// Notes that freeing an extent takes longer than it should.
    pub(crate) fn stick(&self, index: ExtentIndex) {
        let length = self.extents.lock().length(index).0;
        self.stuck.fetch_add(length, Ordering::AcqRel);
    }

    /// Notes that freeing an extent takes no longer than it should from now on.
    pub(crate) fn unstick(&self, index: ExtentIndex) {
        let length = self.extents.lock().length(index).0;
        self.stuck.fetch_sub(length, Ordering::AcqRel);
    }

    /// The most bytes that may be used.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The table of extents.
    pub fn extents(&self) -> parking_lot::MutexGuard<'_, Extents> {
        self.extents.lock()
    }

    fn allocate(&self, length: Length) -> Option<Replica> {
        let mut extents = self.extents.lock();
        let rounded = Extents::rounded(length).0;
        if extents.used().0 + rounded > self.limit {
            return None;
        }
        let (index, offset) = extents.allocate(length)?;
        self.used.store(extents.used().0, Ordering::Release);
        Some(Replica {
            segment: self.id,
            extent: index,
            offset,
        })
    }

    /// Whether `length` bytes could be granted now.
    pub fn gives_room(&self, length: Length) -> bool {
        let extents = self.extents.lock();
        let rounded = Extents::rounded(length);
        extents.used().0.saturating_add(rounded.0) <= self.limit
            && extents.largest_free() >= rounded
    }

    /// Marks a range as used that a recovered block or a held grant lies in.
    pub fn allocate_at(&self, offset: Offset, length: Length) -> Option<ExtentIndex> {
        let mut extents = self.extents.lock();
        let index = extents.allocate_at(offset, length)?;
        self.used.store(extents.used().0, Ordering::Release);
        Some(index)
    }

    /// Frees an extent that was taken for a block which does not lie there.
    pub(crate) fn let_go(&self, index: ExtentIndex) {
        self.free(index);
    }

    /// Notes that extents are on their way to being free.
    pub fn quarantine(&self, indexes: impl IntoIterator<Item = ExtentIndex>) {
        let mut extents = self.extents.lock();
        let mut bytes = 0;
        for index in indexes {
            extents.clear_owner(index);
            bytes += extents.length(index).0;
        }
        self.quarantined.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Frees an extent that nothing was ever granted on.
    fn free(&self, index: ExtentIndex) {
        let mut extents = self.extents.lock();
        extents.free(index);
        self.used.store(extents.used().0, Ordering::Release);
    }

    /// Frees extents at the end of their quarantine, each with whether it was stuck there; returns
    /// their bytes.
    pub(crate) fn free_quarantined(
        &self,
        items: impl Iterator<Item = (ExtentIndex, bool)> + Clone,
    ) -> u64 {
        let mut extents = self.extents.lock();
        let stuck = items.clone().filter(|(_, stuck)| *stuck);
        let stuck: u64 = stuck.map(|(index, _)| extents.length(index).0).sum();
        let bytes = extents.free_all(items.map(|(index, _)| index)).0;
        self.used.store(extents.used().0, Ordering::Release);
        drop(extents);
        self.quarantined.fetch_sub(bytes, Ordering::AcqRel);
        self.stuck.fetch_sub(stuck, Ordering::AcqRel);
        bytes
    }
}

/// What a put asks of its placement.
#[derive(Clone, Debug, Default)]
pub struct PlacementHints {
    /// How many nodes are to hold a copy.
    pub replicas: usize,
    /// The node to try first.
    pub preferred: Option<kvpool_types::NodeName>,
    /// Then nodes on this machine.
    pub host: Option<HostId>,
}

/// How full the pool is, over the nodes that blocks can be placed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of all segments.
    pub capacity: u64,
    /// Bytes of blocks, grants and quarantine.
    pub used: u64,
    /// Bytes on their way to being free.
    pub quarantined: u64,
    /// Bytes that will be used once what is about to be free is.
    pub used_after_quarantine: u64,
    /// The most bytes that may be used.
    pub limit: u64,
}

/// Every segment of every node.
#[derive(Debug, Default)]
pub struct Placement {
    segments: RwLock<BTreeMap<SegmentId, Arc<Segment>>>,
    draws: Draws,
}

/// The segments, locked for reading for one batch. A thread takes this once at a time: where it did again
/// while somebody waits to change the table, each would wait for the other.
pub struct Segments<'a> {
    table: RwLockReadGuard<'a, BTreeMap<SegmentId, Arc<Segment>>>,
    draws: &'a Draws,
}

impl Segments<'_> {
    /// One segment.
    pub fn get(&self, id: SegmentId) -> Option<&Arc<Segment>> {
        self.table.get(&id)
    }

    /// Every segment, by number.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.table.values()
    }

    /// How full the pool is.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for segment in self.iter().filter(|s| s.node.is_placeable()) {
            usage.capacity += segment.size.0;
            usage.used += segment.used();
            usage.quarantined += segment.quarantined();
            usage.used_after_quarantine += segment.used_after_quarantine();
            usage.limit += segment.limit;
        }
        usage
    }

    /// On how many nodes, `most` at most, `length` bytes could be granted now.
    pub fn gives_room_on(&self, length: Length, most: usize) -> usize {
        let mut nodes: smallvec::SmallVec<[*const StoreNode; 4]> = smallvec::SmallVec::new();
        for segment in self.iter().filter(|s| s.node.is_placeable()) {
            let node = Arc::as_ptr(&segment.node);
            if nodes.len() == most {
                break;
            }
            if !nodes.contains(&node) && segment.gives_room(length) {
                nodes.push(node);
            }
        }
        nodes.len()
    }

    /// What blocks with this wish can be placed on now.
    pub fn allocator(&self, hints: &PlacementHints) -> Allocator<'_> {
        Allocator::new(self.iter(), hints, self.draws)
    }

    /// Takes room back that was found and never granted.
    pub fn release(&self, replicas: &[Replica]) {
        for replica in replicas {
            if let Some(segment) = self.get(replica.segment) {
                segment.free(replica.extent);
            }
        }
    }

    /// Records which blocks lie in which extents, for eviction by neighbourhood.
    pub fn set_owners<'r>(&self, owned: impl Iterator<Item = (&'r Replica, BlockId)>) {
        // Blocks of one batch lie together: the table of one segment is locked for all of them.
        let mut open: Option<(SegmentId, MutexGuard<'_, Extents>)> = None;
        for (replica, block) in owned {
            if open.as_ref().is_none_or(|(id, _)| *id != replica.segment) {
                // No two tables are ever locked at once.
                drop(open.take());
                open = self
                    .get(replica.segment)
                    .map(|segment| (segment.id, segment.extents.lock()));
            }
            if let Some((_, extents)) = &mut open {
                extents.set_owner(replica.extent, block);
            }
        }
    }
}

impl Placement {
    /// Locks the table of segments for reading.
    pub fn segments(&self) -> Segments<'_> {
        Segments {
            table: self.segments.read(),
            draws: &self.draws,
        }
    }

    pub(crate) fn insert(&self, segment: Arc<Segment>) {
        self.segments.write().insert(segment.id, segment);
    }

    pub(crate) fn remove(&self, id: SegmentId) -> Option<Arc<Segment>> {
        self.segments.write().remove(&id)
    }

    /// The segments that blocks can be placed on now.
    pub fn placeable(&self) -> HashSet<SegmentId> {
        let segments = self.segments.read();
        let placeable = segments.values().filter(|s| s.node.is_placeable());
        placeable.map(|segment| segment.id).collect()
    }

    /// How full the pool is.
    pub fn usage(&self) -> Usage {
        self.segments().usage()
    }
}

/// `ratio` (from 0 to 1) of `bytes`, rounded down to what an f64 can tell apart.
pub fn share(bytes: u64, ratio: f64) -> u64 {
    if ratio >= 1.0 {
        return bytes;
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a byte count lies between zero and that count"
    )]
    let share = (bytes as f64 * ratio) as u64;
    share.min(bytes)
}
