//! What a change of replicas may take: never the last replica on a node that can be read and that stays.

use crate::sight::Sight;
use kvpool_master::directory::StoredBlock;
use kvpool_types::{Incarnation, SegmentId, Version};
use std::collections::{BTreeMap, BTreeSet};

/// How a node stood at a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    is_readable: bool,
    is_connected: bool,
    drains: bool,
}

impl Standing {
    const fn stays(self) -> bool {
        self.is_readable && self.is_connected && !self.drains
    }

    /// Whether a reason against the node held at both looks.
    const fn never_stayed(self, later: Self) -> bool {
        !self.is_readable && !later.is_readable
            || !self.is_connected && !later.is_connected
            || self.drains && later.drains
    }
}

/// The nodes at a look.
type Standings = BTreeMap<Incarnation, Standing>;

/// What was seen at the last look at a leader.
#[derive(Debug, Default)]
pub(crate) struct Replicas {
    epoch: u64,
    nodes: Standings,
    /// The nodes of each block's replicas, and its version.
    blocks: BTreeMap<u64, (Version, Vec<Incarnation>)>,
}

impl Replicas {
    /// Looks at the leader's blocks in memory. A block had a replica on a node that can be read and stays, and still
    /// does. Then it has one on such a node now.
    pub(crate) fn look(&mut self, sight: &Sight<'_>) -> Result<(), String> {
        let segments = sight.pool.placement.segments();
        let mut homes: BTreeMap<SegmentId, Incarnation> = BTreeMap::new();
        let mut nodes = Standings::new();
        for segment in segments.iter() {
            let node = &segment.node;
            homes.insert(segment.id, node.incarnation);
            let standing = Standing {
                is_readable: node.is_readable(),
                is_connected: node.is_connected(),
                drains: node.drains(),
            };
            nodes.insert(node.incarnation, standing);
        }
        let nodes_of = |block: &StoredBlock| -> Vec<Incarnation> {
            let replicas = block.replicas.iter();
            replicas
                .filter_map(|at| homes.get(&at.segment).copied())
                .collect()
        };
        let blocks: BTreeMap<u64, (Version, Vec<Incarnation>)> = sight
            .blocks()
            .map(|(key, block)| (key, (block.version, nodes_of(block))))
            .collect();
        // A block that comes back from a disk may meet a pull of itself.
        let mut all = blocks.iter().filter(|_| !sight.pool.has_media());
        let twice =
            all.find(|(_, (_, nodes))| nodes.iter().collect::<BTreeSet<_>>().len() < nodes.len());
        if let Some((key, (version, nodes))) = twice {
            return Err(format!(
                "the block of key {key}, version {version}, has two replicas on one node: {nodes:?}"
            ));
        }
        let epoch = sight.pool.epoch.0;
        let before = std::mem::replace(
            self,
            Self {
                epoch,
                nodes,
                blocks,
            },
        );
        if before.epoch != epoch {
            return Ok(());
        }
        let now = &self.nodes;
        // A node that left since the last look may have taken a replica by a move before. The replica left with it.
        let mut nodes = before.nodes.iter();
        if nodes.any(|(node, then)| then.stays() && !now.contains_key(node)) {
            return Ok(());
        }
        let stayed = |node: &Incarnation| {
            let both = before.nodes.get(node).zip(now.get(node));
            both.is_some_and(|(then, now)| then.stays() && now.stays())
        };
        let never_stayed = |node: &Incarnation| match (before.nodes.get(node), now.get(node)) {
            (Some(then), Some(now)) => then.never_stayed(*now),
            // A node that is gone by now.
            (Some(then), None) => !then.stays(),
            (None, _) => false,
        };
        for (key, (version, places)) in &self.blocks {
            // On a node that has left since the last look, and may have stayed until then.
            if places.is_empty() {
                continue;
            }
            // A block that comes back from a disk is in the memory of the disk's node.
            if sight
                .copy(*key)
                .is_some_and(|copy| copy.version == *version)
            {
                continue;
            }
            let had = before.blocks.get(key).filter(|(had, _)| had == version);
            if let Some((_, had)) = had
                && had.iter().any(stayed)
                && places.iter().all(never_stayed)
                && had.iter().all(|node| stayed(node) || never_stayed(node))
            {
                return Err(format!(
                    "the block of key {key}, version {version}, was on the nodes {had:?}, of which one stays, and has \
                     replicas only on nodes that leave or cannot be read: {places:?}"
                ));
            }
        }
        Ok(())
    }
}
