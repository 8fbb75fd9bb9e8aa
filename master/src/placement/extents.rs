//! The table of one segment's extents: free ranges, ranges in use, and their owners.
//!
//! ```text
//!  address order   [ owned ][ held ][   free   ][ owned ][ free ]     doubly linked nodes
//!  free ranges     by (length, offset): best fit, lowest address first; by offset: any range
//! ```
//!
//! Nodes cover the segment without gaps. So a node's length is the distance to the next node and is
//! not stored. Two free nodes are never neighbours. Lengths are rounded up to [`GRANULE`].
//!
//! A long extent of whole pages begins at a page if one of the shortest ranges has room for that. A disk can then
//! write straight into it.

use super::ledger::Ledger;
use crate::replica::{BlockId, ExtentIndex};
use crate::slab::{NONE, Slab, Slot};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Length, Offset, medium};
use std::collections::{BTreeMap, BTreeSet};

/// The unit of offsets and lengths, in bytes: a cache line.
pub const GRANULE: u64 = 64;

/// The granules of a page, the unit in which disks read.
const PAGE: u64 = medium::GRANULE / GRANULE;
/// How many free ranges are tried for a page's beginning.
const MOST_TRIED: usize = 8;
/// The least granules of an extent that begins at a page. Beside small blocks, most gaps would stay unused, and puts
/// would find no range in spite of free bytes.
const LEAST_ALIGNED: u64 = 8 * PAGE;

/// The largest segment that the packed offsets can address.
const MAX_GRANULES: u64 = (1 << 48) - 1;

const FREE: u32 = u32::MAX;
const HELD: u32 = u32::MAX - 1;

/// The tenant of a free range, and of an extent that no namespace pays for. Ids of namespaces are
/// below 2^31.
const NOBODY: u32 = u32::MAX;

/// The use of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The range can be allocated.
    Free,
    /// A grant, a quarantined extent, or a node's held range.
    Held,
    /// A replica of a block.
    Block(BlockId),
}

/// One range of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The slot in the table.
    pub index: ExtentIndex,
    /// The offset in the segment, in bytes.
    pub offset: Offset,
    /// The length in bytes.
    pub length: Length,
    /// The use of the range.
    pub usage: Use,
}

/// Packed into 24 bytes, because each replica in the pool has one.
#[derive(Debug)]
struct ExtentNode {
    offset_low: u32,
    offset_high: u16,
    vacant: bool,
    owner: u32,
    prev: u32,
    next: u32,
    /// The namespace that pays for the extent, or [`NOBODY`].
    tenant: u32,
}

impl ExtentNode {
    fn new(granule: u64, owner: u32, prev: u32, next: u32) -> Self {
        let [a, b, c, d, e, f, ..] = granule.to_le_bytes();
        Self {
            offset_low: u32::from_le_bytes([a, b, c, d]),
            offset_high: u16::from_le_bytes([e, f]),
            vacant: false,
            owner,
            prev,
            next,
            tenant: NOBODY,
        }
    }

    fn granule(&self) -> u64 {
        u64::from(self.offset_high) << 32 | u64::from(self.offset_low)
    }
}

impl Slot for ExtentNode {
    const CHUNK: usize = 1024;

    fn vacant(next: u32) -> Self {
        Self {
            vacant: true,
            ..Self::new(0, FREE, NONE, next)
        }
    }

    fn next_vacant(&self) -> Option<u32> {
        self.vacant.then_some(self.next)
    }
}

/// The extents of one segment.
#[derive(Debug)]
pub struct Extents {
    nodes: Slab<ExtentNode>,
    first: u32,
    /// The counts below are in granules.
    capacity: u64,
    used: u64,
    free_by_length: BTreeSet<(u64, u64, u32)>,
    free_by_offset: BTreeMap<u64, u32>,
    ledger: Option<Ledger>,
}

impl Extents {
    /// A free segment of `size` bytes, rounded down to a granule and to 16 PiB.
    pub fn new(size: Length) -> Self {
        let mut extents = Self {
            nodes: Slab::default(),
            first: NONE,
            capacity: (size.0 / GRANULE).min(MAX_GRANULES),
            used: 0,
            free_by_length: BTreeSet::new(),
            free_by_offset: BTreeMap::new(),
            ledger: None,
        };
        if extents.capacity > 0 {
            extents.first = extents.nodes.insert(ExtentNode::new(0, FREE, NONE, NONE));
            extents.index_free(extents.first);
        }
        extents
    }

    /// These extents, whose charges go to `ledger`.
    pub fn with_ledger(self, ledger: Ledger) -> Self {
        Self {
            ledger: Some(ledger),
            ..self
        }
    }

    /// The charges; `None` for extents that no namespace pays for.
    pub const fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Charges a namespace for an extent that was just allocated.
    pub fn charge(&mut self, index: ExtentIndex, namespace: NamespaceId) {
        let bytes = self.length(index).0;
        let (Some(ledger), Some(node)) = (&mut self.ledger, self.nodes.get_mut(index.0)) else {
            return;
        };
        debug_assert_eq!(node.tenant, NOBODY, "invariant: an extent is charged once");
        if bytes > 0 {
            node.tenant = namespace.0;
            ledger.charge(namespace, bytes);
        }
    }

    /// Ends the charge of an extent that stays in use.
    pub fn discharge(&mut self, index: ExtentIndex) {
        let bytes = self.length(index).0;
        let (Some(ledger), Some(node)) = (&mut self.ledger, self.nodes.get_mut(index.0)) else {
            return;
        };
        let tenant = std::mem::replace(&mut node.tenant, NOBODY);
        if tenant != NOBODY {
            ledger.discharge(NamespaceId(tenant), bytes);
        }
    }

    /// Ends every charge, because the segment has left the pool.
    pub fn close_ledger(&mut self) {
        if let Some(ledger) = &mut self.ledger {
            ledger.close();
        }
    }

    /// The longest block whose extent has at most `room` bytes.
    pub const fn rounded_down(room: Length) -> Length {
        Length(room.0 - room.0 % GRANULE)
    }

    /// The bytes that an extent of `length` bytes occupies.
    pub const fn rounded(length: Length) -> Length {
        Length(granules(length).saturating_mul(GRANULE))
    }

    /// Allocates from the shortest free range that `length` bytes fit into; among equals, the
    /// first. `None` when no range is long enough, or for zero bytes.
    ///
    /// Eight or more whole pages begin at a page, in the shortest range that allows it. If the first
    /// `MOST_TRIED` ranges do not allow it, they begin in the shortest range that they fit into.
    pub fn allocate(&mut self, length: Length) -> Option<(ExtentIndex, Offset)> {
        let wanted = granules(length);
        if wanted == 0 {
            return None;
        }
        let is_aligned = wanted >= LEAST_ALIGNED && length.0.is_multiple_of(medium::GRANULE);
        let unit = if is_aligned { PAGE } else { 1 };
        let mut fitting = self.free_by_length.range((wanted, 0, 0)..).copied();
        let tightest = fitting.next()?;
        let tried = std::iter::once(tightest).chain(fitting).take(MOST_TRIED);
        let aligned = tried.map(|(span, start, node)| {
            let first = start.next_multiple_of(unit);
            (start + span >= first + wanted).then_some((first, node))
        });
        let (_, start, node) = tightest;
        let (start, node) = aligned.flatten().next().unwrap_or((start, node));
        let node = self.carve(node, start, wanted);
        Some((ExtentIndex(node), Offset(start * GRANULE)))
    }

    /// Allocates one given range. `None` unless all of it is free and its offset is a multiple of
    /// [`GRANULE`].
    pub fn allocate_at(&mut self, offset: Offset, length: Length) -> Option<ExtentIndex> {
        let (start, wanted) = (offset.0 / GRANULE, granules(length));
        if !offset.0.is_multiple_of(GRANULE) || wanted == 0 {
            return None;
        }
        let (&free_start, &node) = self.free_by_offset.range(..=start).next_back()?;
        let end = start.checked_add(wanted)?;
        if end > free_start + self.span(node) {
            return None;
        }
        Some(ExtentIndex(self.carve(node, start, wanted)))
    }

    /// Allocates every free part of a range, in the order of addresses, and returns the extents.
    /// The range is rounded out to [`GRANULE`].
    pub fn allocate_free_in(
        &mut self,
        offset: Offset,
        length: Length,
    ) -> Vec<(ExtentIndex, Offset)> {
        let end = offset.0.saturating_add(length.0).div_ceil(GRANULE);
        let mut at = offset.0 / GRANULE;
        let mut parts = Vec::new();
        while at < end {
            let before = self.free_by_offset.range(..=at).next_back();
            let here = before.filter(|(start, node)| **start + self.span(**node) > at);
            let next = || self.free_by_offset.range(at..end).next();
            let Some((&free_start, &node)) = here.or_else(next) else {
                break;
            };
            let start = at.max(free_start);
            at = end.min(free_start + self.span(node));
            let part = self.carve(node, start, at - start);
            parts.push((ExtentIndex(part), Offset(start * GRANULE)));
        }
        parts
    }

    /// Frees an extent and joins it with free neighbours. Returns its bytes; zero for an index
    /// without an extent in use.
    pub fn free(&mut self, index: ExtentIndex) -> Length {
        self.free_all([index])
    }

    /// [`Extents::free`] for several extents. Neighbours cost least in the order of their
    /// addresses: the joined range is indexed once.
    pub fn free_all(&mut self, indexes: impl IntoIterator<Item = ExtentIndex>) -> Length {
        let mut freed = 0;
        // The last freed range, which is not indexed yet.
        let mut open: Option<u32> = None;
        for ExtentIndex(mut node) in indexes {
            let Some(&ExtentNode {
                prev, next, owner, ..
            }) = self.nodes.get(node)
            else {
                continue;
            };
            if owner == FREE {
                continue;
            }
            self.discharge(ExtentIndex(node));
            let span = self.span(node);
            self.used -= span;
            freed += span;
            self.nodes.at_mut(node).owner = FREE;
            if self.is_free(next) {
                self.close(next, &mut open);
                self.absorb_next(node);
            }
            if self.is_free(prev) {
                self.close(prev, &mut open);
                self.absorb_next(prev);
                node = prev;
            }
            if let Some(before) = open.replace(node) {
                self.index_free(before);
            }
        }
        if let Some(last) = open {
            self.index_free(last);
        }
        Length(freed * GRANULE)
    }

    /// Sets the owner of an extent. A free range stays unchanged.
    pub fn set_owner(&mut self, index: ExtentIndex, block: BlockId) {
        self.set_use(index, block.0);
    }

    /// Removes the owner of an extent that stays in use.
    pub fn clear_owner(&mut self, index: ExtentIndex) {
        self.set_use(index, HELD);
    }

    /// The block that owns an extent.
    pub fn owner(&self, index: ExtentIndex) -> Option<BlockId> {
        match self.range(index)?.usage {
            Use::Block(block) => Some(block),
            Use::Free | Use::Held => None,
        }
    }

    /// The bytes of an extent; zero for an index without an extent in use.
    pub fn length(&self, index: ExtentIndex) -> Length {
        match self.range(index) {
            Some(range) if range.usage != Use::Free => range.length,
            _ => Length(0),
        }
    }

    /// The range of an index, free or not.
    pub fn range(&self, index: ExtentIndex) -> Option<Range> {
        let node = self.nodes.get(index.0)?;
        Some(Range {
            index,
            offset: Offset(node.granule() * GRANULE),
            length: Length(self.span(index.0) * GRANULE),
            usage: match node.owner {
                FREE => Use::Free,
                HELD => Use::Held,
                block => Use::Block(BlockId(block)),
            },
        })
    }

    /// The next range in address order.
    pub fn next(&self, index: ExtentIndex) -> Option<Range> {
        self.range(ExtentIndex(self.nodes.get(index.0)?.next))
    }

    /// The previous range in address order.
    pub fn prev(&self, index: ExtentIndex) -> Option<Range> {
        self.range(ExtentIndex(self.nodes.get(index.0)?.prev))
    }

    /// All ranges in address order.
    pub fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        let first = self.range(ExtentIndex(self.first));
        std::iter::successors(first, |range| self.next(range.index))
    }

    /// The free ranges, longest first.
    pub fn longest_free(&self) -> impl Iterator<Item = Range> + '_ {
        self.free_by_length
            .iter()
            .rev()
            .filter_map(|&(_, _, node)| self.range(ExtentIndex(node)))
    }

    /// The owned extents among up to `limit` slots from `from` on, with their blocks, and the next
    /// slot if there are more. The order is by slot, which allocation and freeing do not change. So
    /// paging passes every extent that stays in use exactly once.
    pub fn owners(&self, from: u32, limit: u32) -> (Vec<(ExtentIndex, BlockId)>, Option<u32>) {
        let end = self.nodes.high().min(from.saturating_add(limit));
        let owned = (from..end)
            .filter_map(|place| Some((ExtentIndex(place), self.owner(ExtentIndex(place))?)))
            .collect();
        (owned, (end < self.nodes.high()).then_some(end))
    }

    /// The bytes in use, with rounding.
    pub fn used(&self) -> Length {
        Length(self.used * GRANULE)
    }

    /// The bytes that can be used.
    pub fn capacity(&self) -> Length {
        Length(self.capacity * GRANULE)
    }

    /// The number of free ranges.
    pub fn free_ranges(&self) -> usize {
        self.free_by_offset.len()
    }

    /// The length of the longest free range.
    pub fn largest_free(&self) -> Length {
        Length(
            self.free_by_length
                .last()
                .map_or(0, |(span, ..)| span * GRANULE),
        )
    }

    /// The bytes of memory of the nodes.
    pub fn memory_bytes(&self) -> u64 {
        self.nodes.memory_bytes()
    }

    /// Cuts `[start, start + wanted)` out of a free node and marks it as in use.
    fn carve(&mut self, free: u32, start: u64, wanted: u64) -> u32 {
        self.unindex_free(free);
        let free_start = self.nodes.at(free).granule();
        let free_end = free_start + self.span(free);
        let node = if start > free_start {
            let node = self.split(free, start);
            self.index_free(free);
            node
        } else {
            free
        };
        if start + wanted < free_end {
            let rest = self.split(node, start + wanted);
            self.index_free(rest);
        }
        self.nodes.at_mut(node).owner = HELD;
        self.used += wanted;
        node
    }

    /// Splits a free node at `granule` and returns the second half.
    fn split(&mut self, node: u32, granule: u64) -> u32 {
        let next = self.nodes.at(node).next;
        let part = self
            .nodes
            .insert(ExtentNode::new(granule, FREE, node, next));
        self.nodes.at_mut(node).next = part;
        if let Some(next) = self.nodes.get_mut(next) {
            next.prev = part;
        }
        part
    }

    /// Extends a node over the next one.
    fn absorb_next(&mut self, node: u32) {
        let gone = self.nodes.at(node).next;
        let next = self.nodes.remove(gone).next;
        self.nodes.at_mut(node).next = next;
        if let Some(next) = self.nodes.get_mut(next) {
            next.prev = node;
        }
    }

    fn span(&self, node: u32) -> u64 {
        let node = self.nodes.at(node);
        let end = self
            .nodes
            .get(node.next)
            .map_or(self.capacity, ExtentNode::granule);
        end - node.granule()
    }

    fn is_free(&self, node: u32) -> bool {
        self.nodes.get(node).is_some_and(|node| node.owner == FREE)
    }

    /// Removes a free node from the indexes, unless it is the open one, which is not indexed.
    fn close(&mut self, node: u32, open: &mut Option<u32>) {
        if *open == Some(node) {
            *open = None;
        } else {
            self.unindex_free(node);
        }
    }

    fn set_use(&mut self, index: ExtentIndex, owner: u32) {
        if let Some(node) = self.nodes.get_mut(index.0)
            && node.owner != FREE
        {
            node.owner = owner;
        }
    }

    fn index_free(&mut self, node: u32) {
        let (start, span) = (self.nodes.at(node).granule(), self.span(node));
        self.free_by_length.insert((span, start, node));
        self.free_by_offset.insert(start, node);
    }

    fn unindex_free(&mut self, node: u32) {
        let (start, span) = (self.nodes.at(node).granule(), self.span(node));
        self.free_by_length.remove(&(span, start, node));
        self.free_by_offset.remove(&start);
    }
}

const fn granules(length: Length) -> u64 {
    length.0.div_ceil(GRANULE)
}

#[cfg(test)]
mod tests;
