//! Putting blocks in their places: those of a whole past, and those of one group of the log.

use super::Replica;
use super::freed::Left;
use super::past::Past;
use crate::directory::{Copies, NewBlock, Published, Replica as Copy};
use crate::membership::Node;
use crate::placement::Segment;
use crate::store::record::{self, Commit, Places};
use kvpool_types::{GrantKey, Length};
use std::sync::Arc;

/// How many blocks are published at once.
const BATCH: usize = 4096;

impl Replica {
    /// Fills the empty replica with what is left of the past.
    pub(super) fn restore(&mut self, past: Past) {
        for created in past.namespaces {
            self.namespaces.insert(created.id, created.namespace);
        }
        for dropped in past.dropped {
            self.members
                .drop_incarnation(&dropped.node, dropped.incarnation);
        }
        // By number, which is the order in which a node offers its segments.
        for segment in past.segments.into_values() {
            self.add_segment(segment);
        }
        let mut blocks: Vec<Commit> = past.blocks.into_values().collect();
        // In the order in which they were granted, so that parents come before their children and
        // what was written last counts as used last.
        blocks.sort_unstable_by_key(|block| block.version);
        let mut blocks = blocks.into_iter().peekable();
        while blocks.peek().is_some() {
            let batch: Vec<Commit> = blocks.by_ref().take(BATCH).collect();
            self.publish(batch);
        }
        for (places, length) in past.left.into_iter().rev() {
            self.keep_shut(&places, length);
        }
    }

    /// Keeps extents shut that a block has left before this was loaded, where nothing else lies now.
    fn keep_shut(&mut self, places: &Places, length: Length) {
        let segments = self.placement.segments();
        for (id, offset) in places {
            if let Some(segment) = segments.get(*id)
                && let Some(index) = segment.allocate_at(*offset, length)
            {
                self.lately.keep(Left {
                    segment: Arc::clone(segment),
                    index,
                    offset: *offset,
                    length,
                    since: self.clock.now(),
                });
            }
        }
    }

    /// Adds a segment, and its node if it is the first of that incarnation.
    pub(super) fn add_segment(&mut self, segment: record::Segment) {
        self.next_segment = self.next_segment.max(segment.id.0.saturating_add(1));
        let node = match self.members.get(&segment.node) {
            Some(node) if node.incarnation == segment.incarnation => node,
            _ => {
                let key = GrantKey(rand::random());
                let now = self.clock.now();
                let node = Arc::new(Node::new(segment.node, segment.incarnation, key, now));
                self.members.insert(Arc::clone(&node));
                node
            }
        };
        node.add_segment(segment.id);
        let high = self.high_watermark;
        self.placement
            .insert(Arc::new(Segment::new(segment.id, node, segment.size, high)));
    }

    /// Makes blocks visible where they lie; what each replaced is returned in their order. The last
    /// one counts as used last. A block none of whose segments is there any more only ends the
    /// version before it.
    pub(super) fn publish(&mut self, commits: Vec<Commit>) -> Vec<Published> {
        let ticks = self.directory.ticks(commits.len());
        let count = commits.len();
        let mut placed = Vec::with_capacity(count);
        for (at, block) in commits.into_iter().enumerate() {
            let replicas = self.place(&block);
            if replicas.is_empty() {
                self.take_out_older(&block);
                continue;
            }
            placed.push(NewBlock {
                namespace: block.namespace,
                key: block.key,
                version: block.version,
                length: block.length,
                checksum: block.checksum,
                replicas,
                parent: block.parent,
                soft_pin_until: None,
                hard_pin: block.hard_pin,
                tick: ticks.of(count - 1 - at),
            });
        }
        let published = self.directory.publish(&placed);
        let segments = self.placement.segments();
        let owned = published
            .iter()
            .zip(&placed)
            .flat_map(|(published, block)| {
                let id = published.id;
                block.replicas.iter().filter_map(move |r| Some((r, id?)))
            });
        segments.set_owners(owned);
        drop(segments);
        // A commit that is older than what is there takes no room.
        for (published, block) in published.iter().zip(&placed) {
            if published.id.is_none() {
                self.placement.segments().release(&block.replicas);
            }
        }
        published
    }

    /// Takes the extents that a block lies in.
    fn place(&mut self, block: &Commit) -> Copies {
        let segments = self.placement.segments();
        let mut replicas = Copies::new();
        for (id, offset) in &block.replicas {
            // A segment that is not there has gone, and the copy with it.
            let Some(segment) = segments.get(*id) else {
                continue;
            };
            self.lately.give_up(*id, *offset, block.length);
            match segment.allocate_at(*offset, block.length) {
                Some(extent) => replicas.push(Copy {
                    segment: *id,
                    extent,
                    offset: *offset,
                }),
                None => tracing::error!(
                    key = %block.key,
                    segment = %id,
                    %offset,
                    "two blocks are said to lie in one place: the later one is left out"
                ),
            }
        }
        replicas
    }
}
