//! Placement: the segments of all nodes, their extents, and the choice of extents for new blocks.

mod allocator;
mod draws;
pub mod extents;
pub mod ledger;
mod moved;
pub mod quarantine;

pub use crate::replica::ExtentIndex;
pub use allocator::{Allocator, NoRoom};
pub use extents::Extents;
pub use ledger::Ledger;

use crate::accounts::{Accounts, Item};
use crate::membership::StoreNode;
use crate::replica::{BlockId, Replica};
use draws::Draws;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Extent, HostId, Length, Offset, SegmentId};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One segment of one node.
#[derive(Debug)]
pub struct Segment {
    /// The segment's id.
    pub id: SegmentId,
    /// The node that owns the memory.
    pub node: Arc<StoreNode>,
    /// The size in bytes.
    pub size: Length,
    /// The high watermark in bytes.
    limit: u64,
    extents: Mutex<Extents>,
    used: AtomicU64,
    quarantined: AtomicU64,
    stuck: AtomicU64,
}

impl Segment {
    /// A segment that is used up to `high_watermark`, a ratio up to 1.
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

    /// This segment, whose extents are charged to the namespaces of `accounts`.
    pub fn charging(mut self, accounts: &Arc<Accounts>) -> Self {
        let ledger = Ledger::new(Arc::clone(accounts), Item::Memory);
        self.extents = Mutex::new(self.extents.into_inner().with_ledger(ledger));
        self
    }

    /// The bytes that namespaces pay for: the used bytes less the quarantined ones.
    pub fn charged(&self) -> u64 {
        self.extents.lock().ledger().map_or(0, Ledger::total)
    }

    /// True if the charges equal the used bytes less the quarantined ones.
    fn is_balanced(&self, extents: &Extents) -> bool {
        let charged = extents.ledger().filter(|ledger| !ledger.is_closed());
        charged.is_none_or(|ledger| {
            ledger.total() + self.quarantined.load(Ordering::Acquire) == extents.used().0
        })
    }

    /// Bytes of blocks, grants and quarantine.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Bytes in quarantine.
    pub fn quarantined(&self) -> u64 {
        self.quarantined.load(Ordering::Acquire)
    }

    /// Bytes still used after the quarantine ends: blocks, grants, and stuck quarantined extents.
    pub fn used_after_quarantine(&self) -> u64 {
        let soon = self
            .quarantined()
            .saturating_sub(self.stuck.load(Ordering::Acquire));
        self.used().saturating_sub(soon)
    }

    /// The bytes to evict before another `length` bytes fit below the limit. Quarantined extents
    /// count as free, except stuck ones: they become free without another eviction.
    pub(crate) fn shortfall(&self, length: Length) -> u64 {
        (self.used_after_quarantine() + length.0).saturating_sub(self.limit)
    }

    /// Counts a quarantined extent as stuck.
    pub(crate) fn stick(&self, index: ExtentIndex) {
        let length = self.extents.lock().length(index).0;
        self.stuck.fetch_add(length, Ordering::AcqRel);
    }

    /// Counts a quarantined extent as no longer stuck.
    pub(crate) fn unstick(&self, index: ExtentIndex) {
        let length = self.extents.lock().length(index).0;
        let before = self.stuck.fetch_sub(length, Ordering::AcqRel);
        debug_assert!(before >= length, "invariant: an extent is unstuck once");
    }

    /// The high watermark in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Locks the table of extents.
    pub fn extents(&self) -> parking_lot::MutexGuard<'_, Extents> {
        self.extents.lock()
    }

    fn allocate(&self, length: Length, namespace: NamespaceId) -> Option<Replica> {
        let mut extents = self.extents.lock();
        let rounded = Extents::rounded(length).0;
        if extents.used().0 + rounded > self.limit {
            return None;
        }
        let (index, offset) = extents.allocate(length)?;
        extents.charge(index, namespace);
        self.used.store(extents.used().0, Ordering::Release);
        debug_assert!(
            self.is_balanced(&extents),
            "invariant: charges follow extents"
        );
        Some(Replica {
            segment: self.id,
            extent: index,
            offset,
        })
    }

    /// True when `length` bytes could be granted now.
    pub fn gives_room(&self, length: Length) -> bool {
        let extents = self.extents.lock();
        let rounded = Extents::rounded(length);
        extents.used().0.saturating_add(rounded.0) <= self.limit
            && extents.largest_free() >= rounded
    }

    /// Allocates the range of a recovered block of a namespace. `None` unless the whole range is
    /// free.
    pub fn allocate_at(
        &self,
        offset: Offset,
        length: Length,
        namespace: NamespaceId,
    ) -> Option<ExtentIndex> {
        let mut extents = self.extents.lock();
        let index = extents.allocate_at(offset, length)?;
        extents.charge(index, namespace);
        self.used.store(extents.used().0, Ordering::Release);
        debug_assert!(
            self.is_balanced(&extents),
            "invariant: charges follow extents"
        );
        Some(index)
    }

    /// Allocates a range as quarantined. `None` unless the whole range is free.
    pub fn quarantine_at(&self, offset: Offset, length: Length) -> Option<ExtentIndex> {
        let mut extents = self.extents.lock();
        let index = extents.allocate_at(offset, length)?;
        self.count_quarantined(&extents, [index]);
        Some(index)
    }

    /// Allocates every free part of a range as quarantined, and returns their extents.
    pub fn quarantine_free_in(&self, offset: Offset, length: Length) -> Vec<(ExtentIndex, Extent)> {
        let mut extents = self.extents.lock();
        let parts = extents.allocate_free_in(offset, length);
        self.count_quarantined(&extents, parts.iter().map(|(index, _)| *index));
        let extent = |(index, offset)| {
            let extent = Extent {
                segment: self.id,
                offset,
                length: extents.length(index),
            };
            (index, extent)
        };
        parts.into_iter().map(extent).collect()
    }

    /// Counts extents that were allocated as quarantined.
    fn count_quarantined(&self, extents: &Extents, indexes: impl IntoIterator<Item = ExtentIndex>) {
        let bytes: u64 = indexes
            .into_iter()
            .map(|index| extents.length(index).0)
            .sum();
        self.used.store(extents.used().0, Ordering::Release);
        self.quarantined.fetch_add(bytes, Ordering::AcqRel);
        debug_assert!(
            self.is_balanced(extents),
            "invariant: charges follow extents"
        );
    }

    /// Frees an extent that was allocated for a block of another location.
    pub(crate) fn let_go(&self, index: ExtentIndex) {
        self.free(index);
    }

    /// Counts extents as quarantined, removes their owners, and ends their charges.
    pub fn quarantine(&self, indexes: impl IntoIterator<Item = ExtentIndex>) {
        let mut extents = self.extents.lock();
        let mut bytes = 0;
        for index in indexes {
            extents.clear_owner(index);
            extents.discharge(index);
            let length = extents.length(index).0;
            debug_assert!(length > 0, "invariant: a quarantined extent is in use");
            bytes += length;
        }
        self.quarantined.fetch_add(bytes, Ordering::AcqRel);
        debug_assert!(
            self.is_balanced(&extents),
            "invariant: charges follow extents"
        );
    }

    /// Frees an extent that was never granted.
    fn free(&self, index: ExtentIndex) {
        let mut extents = self.extents.lock();
        extents.free(index);
        self.used.store(extents.used().0, Ordering::Release);
        debug_assert!(
            self.is_balanced(&extents),
            "invariant: charges follow extents"
        );
    }

    /// Frees extents at the end of their quarantine, each with its stuck flag. Returns their bytes.
    pub(crate) fn free_quarantined(
        &self,
        items: impl Iterator<Item = (ExtentIndex, bool)> + Clone,
    ) -> u64 {
        let mut extents = self.extents.lock();
        let stuck = items.clone().filter(|(_, stuck)| *stuck);
        let stuck: u64 = stuck.map(|(index, _)| extents.length(index).0).sum();
        let bytes = extents.free_all(items.map(|(index, _)| index)).0;
        self.used.store(extents.used().0, Ordering::Release);
        let before = self.quarantined.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(
            self.is_balanced(&extents),
            "invariant: charges follow extents"
        );
        drop(extents);
        debug_assert!(
            before >= bytes,
            "invariant: an extent leaves quarantine once"
        );
        let before = self.stuck.fetch_sub(stuck, Ordering::AcqRel);
        debug_assert!(before >= stuck, "invariant: stuck bytes were counted");
        bytes
    }
}

/// The wishes of a put about the nodes of its replicas.
#[derive(Clone, Debug, Default)]
pub struct PlacementHints {
    /// The number of nodes with a replica.
    pub replicas: usize,
    /// The nodes to try first, in this order.
    pub preferred: Vec<kvpool_types::NodeName>,
    /// The host whose nodes come next.
    pub host: Option<HostId>,
}

/// The usage of the pool, over the nodes that take blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of all segments.
    pub capacity: u64,
    /// Bytes of blocks, grants and quarantine.
    pub used: u64,
    /// Bytes in quarantine.
    pub quarantined: u64,
    /// Bytes still used after the quarantine ends.
    pub used_after_quarantine: u64,
    /// The high watermark in bytes.
    pub limit: u64,
}

/// Every segment of every node.
#[derive(Debug, Default)]
pub struct Placement {
    segments: RwLock<BTreeMap<SegmentId, Arc<Segment>>>,
    draws: Draws,
}

/// The table of segments, read-locked for one batch. A thread takes this lock only once at a time:
/// a second lock would wait behind a waiting writer, and the writer for the first lock.
pub struct Segments<'a> {
    table: RwLockReadGuard<'a, BTreeMap<SegmentId, Arc<Segment>>>,
    draws: &'a Draws,
}

impl Segments<'_> {
    /// The segment with this id.
    pub fn get(&self, id: SegmentId) -> Option<&Arc<Segment>> {
        self.table.get(&id)
    }

    /// Every segment, by id.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.table.values()
    }

    /// The usage of the pool.
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

    /// The number of nodes, up to `most`, where `length` bytes could be granted now.
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

    /// Allocates `length` bytes on a node, on the segment with the most free room.
    pub fn allocate_on(
        &self,
        node: &Arc<StoreNode>,
        length: Length,
        namespace: NamespaceId,
    ) -> Option<Replica> {
        let mut own: smallvec::SmallVec<[&Arc<Segment>; 4]> = self
            .iter()
            .filter(|segment| Arc::ptr_eq(&segment.node, node))
            .collect();
        own.sort_by_key(|segment| segment.used() as i128 - i128::from(segment.limit));
        own.into_iter()
            .find_map(|segment| segment.allocate(length, namespace))
    }

    /// An allocator of blocks of a namespace, over the segments that fit these hints.
    pub fn allocator(&self, hints: &PlacementHints, namespace: NamespaceId) -> Allocator<'_> {
        Allocator::new(self.iter(), hints, self.draws, namespace)
    }

    /// Frees extents that were allocated but never granted.
    pub fn release(&self, replicas: &[Replica]) {
        for replica in replicas {
            if let Some(segment) = self.get(replica.segment) {
                segment.free(replica.extent);
            }
        }
    }

    /// Records the owner of each extent, for the eviction of neighbours.
    pub fn set_owners<'r>(&self, owned: impl Iterator<Item = (&'r Replica, BlockId)>) {
        // Blocks of one batch lie together, so one lock of a segment's table serves several blocks.
        let mut open: Option<(SegmentId, MutexGuard<'_, Extents>)> = None;
        for (replica, block) in owned {
            if open.as_ref().is_none_or(|(id, _)| *id != replica.segment) {
                // A thread never locks the tables of two segments at once.
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
        segment.node.gives_extents(segment.limit);
        self.segments.write().insert(segment.id, segment);
    }

    pub(crate) fn remove(&self, id: SegmentId) -> Option<Arc<Segment>> {
        let segment = self.segments.write().remove(&id)?;
        segment.extents.lock().close_ledger();
        Some(segment)
    }

    /// The segments that take new blocks now.
    pub fn placeable(&self) -> HashSet<SegmentId> {
        let segments = self.segments.read();
        let placeable = segments.values().filter(|s| s.node.is_placeable());
        placeable.map(|segment| segment.id).collect()
    }

    /// The usage of the pool.
    pub fn usage(&self) -> Usage {
        self.segments().usage()
    }
}

/// The share `ratio` (0 to 1) of `bytes`, rounded down to the precision of an f64.
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
