//! Where one port of a link finds the node's memory.
//!
//! A pool's node tells of its segments once, and they stay. A peer's memory comes and goes, and is asked
//! for when it is first needed. A place that has gone meanwhile is refused by the peer's device, which
//! ends the link, and with it all that it knew.

use super::work::Remote;
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{Extent, Offset, SegmentId};
use parking_lot::RwLock;
use std::collections::BTreeMap;

/// How many places are remembered before all are asked for anew: those of a peer that registers other
/// memory for each transfer would grow without end.
const REMEMBERED: usize = 4096;

/// Registered ranges that do not overlap, by segment and by where in it they begin.
#[derive(Default)]
pub(super) struct Places(RwLock<BTreeMap<(SegmentId, u64), Registered>>);

impl Places {
    /// Those of segments that are registered whole.
    pub(super) fn of_segments<'a>(registered: impl Iterator<Item = &'a Registered>) -> Self {
        let segments = registered.map(|whole| ((whole.segment, 0), *whole));
        Self(RwLock::new(segments.collect()))
    }

    /// Remembers a range of memory whose offsets are its addresses, in place of what it overlaps. False
    /// when there can be no such range.
    pub(super) fn learn(&self, range: Registered) -> bool {
        let (segment, start) = (range.segment, range.address);
        let Some(end) = start.checked_add(range.length.0) else {
            return false;
        };
        let mut known = self.0.write();
        if known.len() >= REMEMBERED {
            known.clear();
        }
        while let Some((&key, other)) = known.range((segment, 0)..(segment, end)).next_back()
            && key.1.saturating_add(other.length.0) > start
        {
            known.remove(&key);
        }
        known.insert((segment, start), range);
        true
    }

    /// Where an extent is; `None` when it does not lie in one known range.
    pub(super) fn find(&self, extent: &Extent) -> Option<Remote> {
        let Offset(offset) = extent.offset;
        let known = self.0.read();
        let (&(_, start), range) = known
            .range((extent.segment, 0)..=(extent.segment, offset))
            .next_back()?;
        let inside = offset - start;
        let end = inside.checked_add(extent.length.0)?;
        (end <= range.length.0).then(|| Remote {
            address: range.address + inside,
            rkey: range.rkey,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Length;

    const MEMORY: SegmentId = SegmentId(0);

    fn range(address: u64, length: u64, rkey: u32) -> Registered {
        Registered {
            rail: 0,
            segment: MEMORY,
            address,
            length: Length(length),
            rkey,
        }
    }

    fn found(places: &Places, offset: u64, length: u64) -> Option<(u64, u32)> {
        let extent = Extent {
            segment: MEMORY,
            offset: Offset(offset),
            length: Length(length),
        };
        let found = places.find(&extent);
        found.map(|remote| (remote.address, remote.rkey))
    }

    #[test]
    fn offsets_of_segments_count_from_their_first_byte() {
        let other = Registered {
            segment: SegmentId(9),
            ..range(0x9000, 100, 3)
        };
        let places = Places::of_segments([range(0x5000, 100, 2), other].iter());
        assert_eq!(found(&places, 10, 90), Some((0x500a, 2)));
        assert_eq!(found(&places, 10, 91), None);
        assert_eq!(found(&places, 0, u64::MAX), None);
        assert_eq!(found(&places, u64::MAX, 2), None);
    }

    #[test]
    fn a_range_is_found_by_its_addresses_and_nothing_beside_it() {
        let places = Places::default();
        assert_eq!(found(&places, 0x1000, 1), None);
        assert!(places.learn(range(0x1000, 0x100, 1)));
        assert!(places.learn(range(0x1100, 0x100, 2)));
        assert_eq!(found(&places, 0x1000, 0x100), Some((0x1000, 1)));
        assert_eq!(found(&places, 0x11ff, 1), Some((0x11ff, 2)));
        for (from, length) in [(0xfff, 1), (0xfff, 2), (0x10ff, 2), (0x1200, 1)] {
            assert_eq!(found(&places, from, length), None, "{length} at {from:#x}");
        }
        assert!(!places.learn(range(u64::MAX, 2, 3)));
    }

    #[test]
    fn what_is_learned_takes_the_place_of_what_it_overlaps() {
        let places = Places::default();
        for (number, address) in [(1, 0x1000), (2, 0x1100), (3, 0x1200), (4, 0x1300)] {
            places.learn(range(address, 0x100, number));
        }
        // As when memory was given back and larger memory registered where it was.
        places.learn(range(0x1080, 0x200, 5));
        assert_eq!(found(&places, 0x1080, 0x200), Some((0x1080, 5)));
        assert_eq!(found(&places, 0x1000, 1), None);
        assert_eq!(found(&places, 0x1280, 1), None);
        assert_eq!(found(&places, 0x1300, 0x100), Some((0x1300, 4)));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let places = Places::default();
        for number in 0..=REMEMBERED as u64 {
            places.learn(range(number * 16, 16, 1));
        }
        assert_eq!(places.0.read().len(), 1);
        assert!(found(&places, REMEMBERED as u64 * 16, 16).is_some());
    }
}
