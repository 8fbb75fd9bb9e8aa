//! The allocator: the choice of segments for the blocks of one batch.
//!
//! ADR 0019 says why free room decides.

use super::draws::Draws;
use super::{Extents, PlacementHints, Segment};
use crate::membership::StoreNode;
use crate::replica::Copies;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Incarnation, Length, NodeName};
use smallvec::SmallVec;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

/// Why no room was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// No node takes blocks now, or no node that takes blocks has a segment for a block this long.
    /// Another node may return.
    NoNodes,
    /// The block exceeds every segment, even an empty one.
    TooLarge,
    /// Eviction may make room.
    Full,
}

/// The candidate segments for the blocks of one batch, best first.
#[derive(Debug)]
pub struct Allocator<'a> {
    candidates: Vec<Candidate<'a>>,
    /// The namespace that pays for the blocks.
    namespace: NamespaceId,
    /// The number of replicas wanted for each block, at least one.
    wished: usize,
    /// For each node that takes blocks: the longest block that fits into one of its segments.
    longest_by_node: SmallVec<[u64; 8]>,
    /// The longest block that fits into any of them.
    longest: u64,
    /// The longest block that fits into any segment, including nodes that take no blocks now.
    longest_of_all: u64,
}

#[derive(Clone, Copy, Debug)]
struct Candidate<'a> {
    segment: &'a Arc<Segment>,
    rank: Rank,
}

/// The rank of a segment: preferred nodes first, then by turn.
#[derive(Clone, Copy, Debug)]
struct Rank {
    /// The place among the preferred nodes; their number for every other node.
    preference: usize,
    not_near: bool,
    turn: Turn,
}

/// The time at which a segment takes its next block, if it takes blocks at the rate of its free
/// room.
///
/// The first turn is drawn from the exponential distribution of that rate. So a segment's chance to
/// be first equals its share of the free room. Later turns are evenly spaced, so a batch spreads
/// over the segments by the same shares. All nodes therefore fill at the same pace, and a new empty
/// node does not take every put. A segment without room has its turn at infinity.
#[derive(Clone, Copy, Debug)]
struct Turn(f64);

impl Turn {
    fn first(segment: &Segment, draws: &Draws) -> Self {
        Self(draws.exponential() / free_room(segment))
    }

    fn next(self, segment: &Segment) -> Self {
        Self(self.0 + free_room(segment).recip())
    }
}

impl Rank {
    fn before(&self, other: &Self) -> Ordering {
        let wished = |rank: &Self| (rank.preference, rank.not_near);
        wished(self)
            .cmp(&wished(other))
            .then(self.turn.0.total_cmp(&other.turn.0))
    }
}

fn preference(hints: &PlacementHints, node: &NodeName) -> usize {
    let preferred = &hints.preferred;
    let place = preferred.iter().position(|name| name == node);
    place.unwrap_or(preferred.len())
}

/// The bytes that may still be used on a segment.
fn free_room(segment: &Segment) -> f64 {
    segment.limit.saturating_sub(segment.used()) as f64
}

impl<'a> Candidate<'a> {
    fn is_on(&self, node: &Arc<StoreNode>) -> bool {
        Arc::ptr_eq(&self.segment.node, node)
    }
}

impl<'a> Allocator<'a> {
    /// Removes the candidates on nodes that have begun to drain since this allocator was made.
    pub fn leave_out_nodes_that_drain(&mut self) {
        self.candidates
            .retain(|candidate| !candidate.segment.node.drains());
    }

    pub(super) fn new(
        segments: impl Iterator<Item = &'a Arc<Segment>>,
        hints: &PlacementHints,
        draws: &Draws,
        namespace: NamespaceId,
    ) -> Self {
        let mut longest_of_all = 0;
        let mut candidates: Vec<Candidate<'a>> = segments
            .inspect(|segment| longest_of_all = longest_of_all.max(segment.limit))
            .filter(|segment| segment.node.is_placeable())
            .map(|segment| {
                let node = &segment.node;
                Candidate {
                    segment,
                    rank: Rank {
                        preference: preference(hints, &node.name),
                        not_near: hints.host.is_none_or(|host| host != node.address().host),
                        turn: Turn::first(segment, draws),
                    },
                }
            })
            .collect();
        candidates.sort_unstable_by(|one, other| one.rank.before(&other.rank));
        let mut by_node: HashMap<Incarnation, u64> = HashMap::new();
        for Candidate { segment, .. } in &candidates {
            let longest = by_node.entry(segment.node.incarnation).or_default();
            *longest = segment.limit.max(*longest);
        }
        let longest_by_node: SmallVec<[u64; 8]> = by_node.into_values().collect();
        Self {
            wished: hints.replicas.max(1),
            longest: longest_by_node.iter().copied().max().unwrap_or(0),
            longest_by_node,
            longest_of_all,
            candidates,
            namespace,
        }
    }

    /// The number of replicas for a block of `length` bytes. It is the wanted number, but at least
    /// one, and at most one on each node that the block fits into.
    pub fn copies(&self, length: Length) -> usize {
        let rounded = Extents::rounded(length).0;
        let fit = |longest: &&u64| **longest >= rounded;
        let nodes = self.longest_by_node.iter().filter(fit);
        nodes.take(self.wished).count().max(1)
    }

    /// An error if `length` bytes could not be placed even after eviction.
    pub fn judge(&self, length: Length) -> Result<(), NoRoom> {
        if self.candidates.is_empty() {
            return Err(NoRoom::NoNodes);
        }
        let rounded = Extents::rounded(length).0;
        if rounded <= self.longest {
            Ok(())
        } else if rounded > self.longest_of_all {
            Err(NoRoom::TooLarge)
        } else {
            Err(NoRoom::NoNodes)
        }
    }

    /// Allocates `length` bytes on [`Allocator::copies`] nodes; all or none.
    pub fn allocate(&mut self, length: Length) -> Result<Copies, NoRoom> {
        self.judge(length)?;
        let wanted = self.copies(length);
        let mut copies = Copies::new();
        let mut chosen: SmallVec<[usize; 4]> = SmallVec::new();
        for (at, candidate) in self.candidates.iter().enumerate() {
            let other = |at: &usize| self.candidates.get(*at);
            let mut others = chosen.iter().filter_map(other);
            if others.any(|other| other.is_on(&candidate.segment.node)) {
                continue;
            }
            if let Some(replica) = candidate.segment.allocate(length, self.namespace) {
                copies.push(replica);
                chosen.push(at);
                if chosen.len() == wanted {
                    break;
                }
            }
        }
        if copies.len() < wanted {
            for (replica, at) in copies.iter().zip(chosen) {
                if let Some(candidate) = self.candidates.get(at) {
                    candidate.segment.free(replica.extent);
                }
            }
            return Err(NoRoom::Full);
        }
        // From the last to the first, so that the positions of the others stay valid.
        for at in chosen.into_iter().rev() {
            self.requeue(at);
        }
        Ok(copies)
    }

    /// Moves a candidate that took a block behind the candidates with an earlier turn.
    fn requeue(&mut self, mut at: usize) {
        if let Some(candidate) = self.candidates.get_mut(at) {
            candidate.rank.turn = candidate.rank.turn.next(candidate.segment);
        }
        while let Some([one, next]) = self
            .candidates
            .get_mut(at..)
            .and_then(|c| c.first_chunk_mut())
            && next.rank.before(&one.rank).is_lt()
        {
            std::mem::swap(one, next);
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootInstant;
    use crate::membership::Reported;
    use kvpool_types::{GrantKey, NodeName, SegmentId};
    use std::collections::BTreeMap;

    const BLOCK: Length = Length(1 << 10);

    fn segment(number: u32, blocks: u64) -> Arc<Segment> {
        let name = NodeName(format!("n{number}"));
        let key = GrantKey([0; 32]);
        let node = StoreNode::new(name, Incarnation(number.into()), key, BootInstant(0));
        node.heard(BootInstant(0), Some(Reported::default()));
        let size = Length(blocks * BLOCK.0);
        Arc::new(Segment::new(SegmentId(number), Arc::new(node), size, 1.0))
    }

    fn allocator<'a>(segments: &'a [Arc<Segment>], draws: &Draws) -> Allocator<'a> {
        let hints = PlacementHints::default();
        Allocator::new(segments.iter(), &hints, draws, NamespaceId(0))
    }

    /// The number of blocks that each segment receives from these batches.
    fn fill(segments: &[Arc<Segment>], draws: &Draws, batches: &[usize]) -> BTreeMap<u32, usize> {
        let mut taken = BTreeMap::new();
        for batch in batches {
            let mut allocator = allocator(segments, draws);
            for _ in 0..*batch {
                for replica in allocator.allocate(BLOCK).expect("there is room") {
                    *taken.entry(replica.segment.0).or_default() += 1;
                }
            }
        }
        taken
    }

    #[test]
    fn an_empty_node_does_not_take_every_put() {
        let draws = Draws::new(1);
        let old: Vec<_> = (1..=3).map(|number| segment(number, 8192)).collect();
        fill(&old, &draws, &[3 * 4096]);
        let all = [old, vec![segment(4, 8192)]].concat();
        // The batch takes less than a fifth of the pool, so the shares stay about the same: 2 of 5
        // for the empty segment.
        let taken = fill(&all, &draws, &[1; 800]);
        assert!((240..400).contains(&taken[&4]), "{taken:?}");
        for number in 1..=3 {
            assert!((100..240).contains(&taken[&number]), "{taken:?}");
        }
    }

    #[test]
    fn a_batch_is_spread_over_segments_by_their_free_room() {
        let draws = Draws::new(2);
        let segments = [segment(1, 3000), segment(2, 1000)];
        let taken = fill(&segments, &draws, &[400]);
        assert!((280..=320).contains(&taken[&1]), "{taken:?}");
    }

    #[test]
    fn every_segment_is_filled_to_its_last_block() {
        let draws = Draws::new(3);
        let segments = [segment(1, 500), segment(2, 40), segment(3, 7)];
        let taken = fill(&segments, &draws, &[13; 547 / 13]);
        let rest = fill(&segments, &draws, &[547 % 13]);
        assert_eq!(taken.values().chain(rest.values()).sum::<usize>(), 547);
        let mut allocator = allocator(&segments, &draws);
        assert_eq!(allocator.allocate(BLOCK).unwrap_err(), NoRoom::Full);
    }
}
