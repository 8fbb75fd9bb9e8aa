//! Room for loads in the memory of a draining node.
//!
//! A draining node takes no blocks, so eviction for puts sets its blocks aside. Readers use its
//! media until it leaves, and each load needs room in its memory. A drain must lose no block. So
//! the evictor evicts a block there only if a copy will outlive the node's memory.

use super::super::Pool;
use super::Readable;
use crate::directory::{BlockRef, Removed, Single, Tick};
use crate::membership::StoreNode;
use crate::placement::extents::{Range, Use};
use crate::placement::{ExtentIndex, Extents, Segment};
use crate::replica::{BlockId, Replica};
use kvpool_proto::MediumState;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, Length, SegmentId, Version};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The least number of ranges that are examined together, last one first. The children of a chain lie behind
/// their parents.
const TOGETHER: usize = 64;
/// The most ranges that one call examines.
const MOST_RANGES: usize = 4096;

/// The room that a load needs in a segment.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Room {
    /// The bytes to free.
    pub(in crate::pool) bytes: u64,
    /// The contiguous bytes to free; zero if the segment has such a free range already.
    pub(in crate::pool) piece: Length,
}

/// The room that a search has found.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct Made {
    /// The bytes that become free.
    pub(in crate::pool) bytes: u64,
    /// Whether a long enough contiguous range becomes free, or is not needed.
    pub(in crate::pool) has_piece: bool,
}

/// The rules for blocks that may leave the memory of a draining node.
struct Leaving<'n> {
    /// The segment in which room is needed.
    segment: SegmentId,
    own: Vec<SegmentId>,
    /// The media whose copies can be read now.
    readable: Readable,
    /// The node's media that empty no zone any more, because the node has been told that all their copies
    /// stay.
    fixed: HashSet<SegmentId>,
    /// Media of draining nodes that were not told yet, each with the begin of the drain to it. Zones sealed
    /// before it are emptied one after another. `None` while the drain has not begun.
    emptied: HashMap<SegmentId, Option<Tick>>,
    /// The node, if copies on its own media count although the node is out of service.
    keeper: Option<&'n StoreNode>,
}

impl Pool {
    /// Evicts blocks of a segment of a draining node whose copies can be read. If contiguous room is needed,
    /// no block is evicted before a run of ranges is found. The search continues at `hand`, where the last
    /// call ended.
    pub(in crate::pool) fn evict_copied_on(
        self: &Arc<Self>,
        segment: &Arc<Segment>,
        room: Room,
        hand: &mut Option<ExtentIndex>,
    ) -> Made {
        let node = &segment.node;
        // A task that takes the node out of service moves blocks in memory, but not copies on its media. A task that
        // moves these finds them on the media again.
        let keeper = (!self.is_memory_moved_off(node)).then_some(&**node);
        // Zones are emptied under this lock, so the copy exists when its block leaves memory.
        let no_zone_is_emptied = self.tiering.tending.lock();
        let (fixed, emptied) = self.media_of_drains(node);
        let leaving = Leaving {
            segment: segment.id,
            own: node.segments(),
            readable: self.tiering.readable(),
            fixed,
            emptied,
            keeper,
        };
        let _until_submitted = self.evicting.read();
        let mut victims = Vec::new();
        let mut made = Made {
            bytes: 0,
            has_piece: room.piece.0 == 0,
        };
        let (mut looked, mut ends) = (0, 0);
        while looked < MOST_RANGES && ends < 2 && (made.bytes < room.bytes || !made.has_piece) {
            let needs_piece = !made.has_piece;
            let piece = if needs_piece { room.piece } else { Length(0) };
            let ranges = next_ranges(&segment.extents(), hand, piece);
            looked += ranges.len();
            ends += usize::from(hand.is_none());
            let chosen = match needs_piece {
                true => match self.find_piece(&ranges, piece, &leaving) {
                    Some(run) => run,
                    None => continue,
                },
                false => ranges.as_slice(),
            };
            made.has_piece = true;
            for range in chosen.iter().rev() {
                let Use::Block(block) = range.usage else {
                    continue;
                };
                if !needs_piece && made.bytes >= room.bytes {
                    break;
                }
                if let Some(removed) = self.evict_copied(*range, block, &leaving) {
                    made.bytes += range.length.0;
                    victims.push(removed);
                } else if needs_piece {
                    // The block was used since it was chosen. Evicting the rest would free no contiguous
                    // range.
                    made.has_piece = false;
                    break;
                }
            }
        }
        drop(no_zone_is_emptied);
        self.submit_victims(victims);
        made
    }

    /// The last run of neighbours among these ranges that is as long as the piece. Each of them is free or
    /// may be evicted.
    fn find_piece<'r>(
        &self,
        ranges: &'r [Range],
        piece: Length,
        leaving: &Leaving<'_>,
    ) -> Option<&'r [Range]> {
        let (mut end, mut bytes) = (ranges.len(), 0);
        let mut blocks = HashSet::new();
        for (at, range) in ranges.iter().enumerate().rev() {
            let gives = match range.usage {
                Use::Free => true,
                Use::Held => false,
                Use::Block(block) => {
                    // The children lie behind their parents, and are evicted first.
                    let may_leave = self.may_leave(*range, block, leaving, &blocks);
                    blocks.insert(block);
                    may_leave
                }
            };
            if !gives {
                (end, bytes) = (at, 0);
                blocks.clear();
                continue;
            }
            bytes += range.length.0;
            if bytes >= piece.0 {
                return ranges.get(at..end);
            }
        }
        None
    }

    /// The node's media if the node was told, and the media that drains empty.
    fn media_of_drains(
        &self,
        node: &Arc<StoreNode>,
    ) -> (HashSet<SegmentId>, HashMap<SegmentId, Option<Tick>>) {
        let (mut fixed, mut emptied) = (HashSet::new(), HashMap::new());
        let demotions = self.tiering.demotions.lock();
        let traffic = self.tiering.traffic.lock();
        for (id, used) in &traffic.uses {
            let line = demotions.nodes.get(&used.node.incarnation);
            let drain = line.and_then(|line| Some((line.drains?, line.is_told)));
            // An operator's drain does not begin a drain to the node's media before the node's own signal.
            // Nor does a drain begin to a medium without space.
            let begins = used.node.drains()
                && !used.node.leaves()
                && used.state != MediumState::MediumReadOnly;
            match drain {
                Some((_, true)) if Arc::ptr_eq(&used.node, node) => {
                    fixed.insert(*id);
                }
                Some((since, false)) => {
                    emptied.insert(*id, Some(since));
                }
                None if begins => {
                    emptied.insert(*id, None);
                }
                Some((_, true)) | None => {}
            }
        }
        (fixed, emptied)
    }

    /// Whether the block of a range may be evicted once the blocks in `before` have left.
    fn may_leave(
        &self,
        range: Range,
        block: BlockId,
        leaving: &Leaving<'_>,
        before: &HashSet<BlockId>,
    ) -> bool {
        let Some(version) = self.copied_version(range, block, leaving) else {
            return false;
        };
        let (now, here) = (self.now(), |id: SegmentId| id == leaving.segment);
        let leaves = |child: BlockId| before.contains(&child);
        self.directory
            .may_evict_block(block, version, now, here, leaves)
    }

    /// Evicts the block of a range, if its copy can be read and outlives the memory of the node.
    fn evict_copied(&self, range: Range, block: BlockId, leaving: &Leaving<'_>) -> Option<Removed> {
        let version = self.copied_version(range, block, leaving)?;
        let (now, here) = (self.now(), |id: SegmentId| id == leaving.segment);
        match self
            .directory
            .evict_block(block, version, Tick::MAX, now, here)
        {
            Single::Evicted(removed) => Some(removed),
            Single::Stays | Single::Gone => None,
        }
    }

    /// The version of the block of a range, if its copy can be read and outlives the memory of the node.
    fn copied_version(
        &self,
        range: Range,
        block: BlockId,
        leaving: &Leaving<'_>,
    ) -> Option<Version> {
        let version = self.directory.version_of(block)?;
        if self.now() < self.lease_floor_of(version) {
            return None;
        }
        // A replica on another node would stay, so the block would not be evicted.
        let read = |block: BlockRef<'_>| {
            let replicas = block.replicas();
            let is_here = |r: &Replica| r.segment == leaving.segment && r.extent == range.index;
            let is_own = replicas.iter().all(|r| leaving.own.contains(&r.segment));
            (is_own && replicas.iter().any(is_here)).then(|| (block.namespace(), block.key()))
        };
        let found = self.directory.read_block(block, version, read);
        let (namespace, key) = found.flatten()?;
        if !self.has_lasting_copy(namespace, &key, version, leaving) {
            return None;
        }
        Some(version)
    }

    /// Whether a block has a copy that can be read, counts as kept, and is in no zone that is emptied soon.
    /// Both the next zone and the zones of a drain are emptied.
    fn has_lasting_copy(
        &self,
        namespace: NamespaceId,
        key: &Key,
        version: Version,
        leaving: &Leaving<'_>,
    ) -> bool {
        let mut found = None;
        self.tier
            .directory()
            .visit(namespace, &[key.as_ref()], |_, block| {
                let copy = block.filter(|block| block.version() == version);
                let first = |block: BlockRef<'_>| {
                    Some((block.replicas().first().copied()?, block.length()))
                };
                found = copy.and_then(|copy| first(copy.view()));
            });
        let is_readable =
            |(at, length): &(Replica, Length)| leaving.readable.has(at.segment, *length);
        let Some((at, _)) = found.filter(is_readable) else {
            return false;
        };
        let Some(medium) = self.tier.medium(at.segment) else {
            return false;
        };
        let zone = medium.zone_of(at.offset);
        let stays = match leaving.emptied.get(&at.segment) {
            None => zone != medium.next_zone() || leaving.fixed.contains(&at.segment),
            // The drain fills the written zone, and stops before the first zone that it has sealed itself.
            Some(since) => {
                since.is_some_and(|since| zone == medium.cursor() || medium.sealed(zone) >= since)
            }
        };
        stays && self.keeps_copies(at.segment, leaving.keeper)
    }
}

/// The next ranges of a segment in address order: enough for four pieces, and at least [`TOGETHER`]. Moves
/// the hand to one piece before their end, since a piece may lie across that end. The hand is `None` at the
/// end of the segment.
fn next_ranges(extents: &Extents, hand: &mut Option<ExtentIndex>, piece: Length) -> Vec<Range> {
    let first = hand.and_then(|hand| extents.range(hand));
    let mut next = first.or_else(|| extents.iter().next());
    let (mut ranges, mut bytes) = (Vec::new(), 0);
    while let Some(range) = next {
        if ranges.len() >= MOST_RANGES || ranges.len() >= TOGETHER && bytes >= 4 * piece.0 {
            break;
        }
        bytes += range.length.0;
        ranges.push(range);
        next = extents.next(range.index);
    }
    *hand = next.map(|range| {
        let (mut from, mut again) = (range.index, 0);
        // The hand never goes back beyond the middle, so each call makes progress.
        for range in ranges.iter().skip(ranges.len() / 2).rev() {
            if again >= piece.0 {
                break;
            }
            (from, again) = (range.index, again + range.length.0);
        }
        from
    });
    ranges
}
