//! The choice of segments for the blocks of one batch.

use super::{Extents, Segment, Wish};
use crate::directory::Copies;
use crate::membership::Node;
use kvpool_types::Length;
use std::sync::Arc;

/// Why no room was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// No node is there that takes blocks, or that takes one so long: such a one may come back.
    NoNodes,
    /// The block would not fit into any segment, were it empty.
    TooLarge,
    /// Eviction may make room.
    Full,
}

/// The segments that the blocks of one batch can be placed on, those to try first in front.
#[derive(Debug)]
pub struct Room<'a> {
    candidates: Vec<Candidate<'a>>,
    copies: usize,
    /// The most bytes of a block that fit into any of them.
    longest: u64,
    /// The same of all segments, those of nodes that take no blocks now among them.
    longest_of_all: u64,
}

#[derive(Clone, Copy, Debug)]
struct Candidate<'a> {
    segment: &'a Arc<Segment>,
    rank: Rank,
}

/// Where a segment stands among the others: those that were wished for, then the emptiest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    not_preferred: bool,
    not_near: bool,
    /// In 1/65536 of its size.
    fullness: u128,
    id: u32,
}

impl<'a> Candidate<'a> {
    /// Brings the fullness up to date.
    fn look(&mut self) {
        let Segment { size, .. } = **self.segment;
        self.rank.fullness = u128::from(self.segment.used()) * 65_536 / u128::from(size.0.max(1));
    }

    fn is_on(&self, node: &Arc<Node>) -> bool {
        Arc::ptr_eq(&self.segment.node, node)
    }
}

impl<'a> Room<'a> {
    pub(super) fn new(segments: impl Iterator<Item = &'a Arc<Segment>>, wish: &Wish) -> Self {
        let mut longest_of_all = 0;
        let mut candidates: Vec<Candidate<'a>> = segments
            .inspect(|segment| longest_of_all = longest_of_all.max(segment.limit))
            .filter(|segment| segment.node.is_placeable())
            .map(|segment| {
                let node = &segment.node;
                let mut candidate = Candidate {
                    segment,
                    rank: Rank {
                        not_preferred: wish.preferred.as_ref() != Some(&node.name),
                        not_near: wish.host.is_none_or(|host| host != node.address().host),
                        fullness: 0,
                        id: segment.id.0,
                    },
                };
                candidate.look();
                candidate
            })
            .collect();
        candidates.sort_unstable_by_key(|candidate| candidate.rank);
        let nodes: std::collections::HashSet<*const Node> = candidates
            .iter()
            .map(|candidate| Arc::as_ptr(&candidate.segment.node))
            .collect();
        Self {
            copies: wish.replicas.clamp(1, nodes.len().max(1)),
            longest: candidates
                .iter()
                .map(|c| c.segment.limit)
                .max()
                .unwrap_or(0),
            longest_of_all,
            candidates,
        }
    }

    /// How many copies a block gets: those wished, or one on each node there is if these are fewer.
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// Finds room for `length` bytes on as many nodes as wished, or on all there are if these are
    /// fewer; all or none.
    pub fn allocate(&mut self, length: Length) -> Result<Copies, NoRoom> {
        if self.candidates.is_empty() {
            return Err(NoRoom::NoNodes);
        }
        let rounded = Extents::rounded(length).0;
        if rounded > self.longest {
            return Err(if rounded > self.longest_of_all {
                NoRoom::TooLarge
            } else {
                NoRoom::NoNodes
            });
        }
        let mut copies = Copies::new();
        let mut chosen: smallvec::SmallVec<[usize; 4]> = smallvec::SmallVec::new();
        for (at, candidate) in self.candidates.iter().enumerate() {
            let other = |at: &usize| self.candidates.get(*at);
            let mut others = chosen.iter().filter_map(other);
            if others.any(|other| other.is_on(&candidate.segment.node)) {
                continue;
            }
            if let Some(replica) = candidate.segment.allocate(length) {
                copies.push(replica);
                chosen.push(at);
                if chosen.len() == self.copies {
                    break;
                }
            }
        }
        if copies.len() < self.copies {
            for (replica, at) in copies.iter().zip(chosen) {
                if let Some(candidate) = self.candidates.get(at) {
                    candidate.segment.free(replica.extent);
                }
            }
            return Err(NoRoom::Full);
        }
        // From the last on, so that those in front stay where they were found.
        for at in chosen.into_iter().rev() {
            self.settle(at);
        }
        Ok(copies)
    }

    /// Moves a candidate that has become fuller behind those that are emptier now.
    fn settle(&mut self, mut at: usize) {
        if let Some(candidate) = self.candidates.get_mut(at) {
            candidate.look();
        }
        while let Some([one, next]) = self
            .candidates
            .get_mut(at..)
            .and_then(|c| c.first_chunk_mut())
            && next.rank < one.rank
        {
            std::mem::swap(one, next);
            at += 1;
        }
    }
}
