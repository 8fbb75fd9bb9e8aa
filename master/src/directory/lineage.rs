//! The parents and children of blocks, as a forest. Only blocks with a parent or children have a node. The
//! forest is separate from the stripes because its links cross them.
//!
//! A node belongs to its block's entry and is removed with it. Every change happens under the lock of the
//! stripe of one of the blocks concerned. The other block is recognised by its node.

use super::BlockId;
use crate::slab::{NONE, Slab, Slot};
use kvpool_types::Version;

/// The number of ancestors that a check for cycles visits at most.
const LONGEST_WALK: usize = 4096;

/// Stands for the parent of a block that is about to be linked. `prev` and `next` then hold the block's
/// version.
const PENDING: u32 = u32::MAX - 1;

#[derive(Debug)]
struct LineageNode {
    block: u32,
    parent: u32,
    first_child: u32,
    /// The previous sibling.
    prev: u32,
    next: u32,
}

impl Slot for LineageNode {
    const CHUNK: usize = 1024;

    fn vacant(next: u32) -> Self {
        Self {
            block: NONE,
            parent: NONE,
            first_child: NONE,
            prev: NONE,
            next,
        }
    }

    fn next_vacant(&self) -> Option<u32> {
        (self.block == NONE).then_some(self.next)
    }
}

/// Work on blocks in other stripes that is due after a block has left.
#[derive(Debug, Default)]
pub(super) struct Aftermath {
    /// Parents that lost their last child.
    pub(super) leaves: Vec<BlockId>,
    /// Children that lost their parent.
    pub(super) roots: Vec<BlockId>,
}

/// The forest.
#[derive(Debug, Default)]
pub(super) struct Lineage {
    nodes: Slab<LineageNode>,
}

impl Lineage {
    /// Adds a node for a block without one.
    pub(super) fn add(&mut self, block: BlockId) -> u32 {
        let node = LineageNode {
            block: block.0,
            parent: NONE,
            first_child: NONE,
            prev: NONE,
            next: NONE,
        };
        self.nodes.insert(node)
    }

    /// Marks a block without a parent as about to be linked. Returns false when the block has a
    /// parent or the mark already.
    pub(super) fn announce(&mut self, node: u32, version: Version) -> bool {
        let node = self.nodes.at_mut(node);
        if node.parent != NONE {
            return false;
        }
        node.parent = PENDING;
        [node.prev, node.next] = halves(version);
        true
    }

    /// Removes the mark, if the node still belongs to the marked block.
    pub(super) fn withdraw(&mut self, node: u32, block: BlockId, version: Version) {
        if self.is_announced(node, block, version) {
            let node = self.nodes.at_mut(node);
            (node.parent, node.prev, node.next) = (NONE, NONE, NONE);
        }
    }

    /// Links a marked block under `parent`, unless the block has left or the link would close a
    /// cycle.
    pub(super) fn attach(
        &mut self,
        parent: u32,
        node: u32,
        block: BlockId,
        version: Version,
    ) -> bool {
        if !self.is_announced(node, block, version) || self.closes_circle(parent, node) {
            return false;
        }
        let sibling = std::mem::replace(&mut self.nodes.at_mut(parent).first_child, node);
        if let Some(sibling) = self.nodes.get_mut(sibling) {
            sibling.prev = node;
        }
        let node = self.nodes.at_mut(node);
        (node.parent, node.prev, node.next) = (parent, NONE, sibling);
        true
    }

    /// Removes the node of a block that leaves.
    pub(super) fn remove(&mut self, node: u32, aftermath: &mut Aftermath) {
        let LineageNode {
            parent,
            first_child,
            prev,
            next,
            ..
        } = self.nodes.remove(node);
        if let Some(parent) = self.nodes.get_mut(parent) {
            if parent.first_child == node {
                parent.first_child = next;
                if next == NONE {
                    aftermath.leaves.push(BlockId(parent.block));
                }
            }
            if let Some(prev) = self.nodes.get_mut(prev) {
                prev.next = next;
            }
            if let Some(next) = self.nodes.get_mut(next) {
                next.prev = prev;
            }
        }
        let mut child = first_child;
        while let Some(root) = self.nodes.get_mut(child) {
            child = std::mem::replace(&mut root.next, NONE);
            (root.parent, root.prev) = (NONE, NONE);
            aftermath.roots.push(BlockId(root.block));
        }
    }

    pub(super) fn has_children(&self, node: u32) -> bool {
        self.nodes
            .get(node)
            .is_some_and(|node| node.first_child != NONE)
    }

    /// The parent of a block, with its node.
    pub(super) fn parent(&self, node: u32) -> Option<(BlockId, u32)> {
        let parent = self.nodes.get(node)?.parent;
        Some((BlockId(self.nodes.get(parent)?.block), parent))
    }

    pub(super) fn children(&self, node: u32) -> impl Iterator<Item = (BlockId, u32)> + '_ {
        let mut child = self.nodes.get(node).map_or(NONE, |node| node.first_child);
        std::iter::from_fn(move || {
            let (at, node) = (child, self.nodes.get(child)?);
            child = node.next;
            Some((BlockId(node.block), at))
        })
    }

    /// A block and all its descendants, parents before children; `None` for more than `limit`
    /// blocks.
    pub(super) fn family(&self, block: BlockId, node: u32, limit: usize) -> Option<Vec<BlockId>> {
        let mut family = vec![(block, node)];
        let mut at = 0;
        while let Some(&(_, node)) = family.get(at) {
            for child in self.children(node) {
                if family.len() == limit {
                    return None;
                }
                family.push(child);
            }
            at += 1;
        }
        Some(family.into_iter().map(|(block, _)| block).collect())
    }

    /// The number of blocks with a node.
    pub(super) fn len(&self) -> u32 {
        self.nodes.len()
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.nodes.memory_bytes()
    }

    fn is_announced(&self, node: u32, block: BlockId, version: Version) -> bool {
        self.nodes.get(node).is_some_and(|node| {
            node.parent == PENDING
                && node.block == block.0
                && [node.prev, node.next] == halves(version)
        })
    }

    /// True when `node` is `parent` or an ancestor of it. A node without children is no ancestor,
    /// so a chain that grows at its end costs no walk.
    fn closes_circle(&self, parent: u32, node: u32) -> bool {
        if parent == node {
            return true;
        }
        if !self.has_children(node) {
            return false;
        }
        let mut at = parent;
        for _ in 0..LONGEST_WALK {
            match self.nodes.get(at) {
                Some(above) if at != node => at = above.parent,
                Some(_) => return true,
                None => return false,
            }
        }
        true
    }
}

fn halves(version: Version) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = version.0.to_le_bytes();
    [
        u32::from_le_bytes([a, b, c, d]),
        u32::from_le_bytes([e, f, g, h]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(lineage: &mut Lineage, parent: u32, node: u32) -> bool {
        let block = BlockId(lineage.nodes.at(node).block);
        lineage.announce(node, Version(1)) && {
            let linked = lineage.attach(parent, node, block, Version(1));
            lineage.withdraw(node, block, Version(1));
            linked
        }
    }

    #[test]
    fn no_circle_is_ever_closed() {
        let mut lineage = Lineage::default();
        let [a, b, c] = [0, 1, 2].map(|block| lineage.add(BlockId(block)));
        assert!(!link(&mut lineage, a, a));
        assert!(link(&mut lineage, b, c));
        assert!(link(&mut lineage, a, b));
        assert!(
            !link(&mut lineage, c, a),
            "an ancestor under its descendant"
        );
        assert!(
            lineage.announce(a, Version(2)),
            "and the mark of the failed link is gone"
        );
        assert!(!link(&mut lineage, a, c), "never linked again");
    }

    #[test]
    fn a_link_announced_for_a_block_that_left_hits_no_other() {
        let mut lineage = Lineage::default();
        let parent = lineage.add(BlockId(0));
        let node = lineage.add(BlockId(1));
        assert!(lineage.announce(node, Version(5)));
        lineage.remove(node, &mut Aftermath::default());
        assert_eq!(lineage.add(BlockId(1)), node, "the same places again");
        assert!(lineage.announce(node, Version(6)));
        assert!(!lineage.attach(parent, node, BlockId(1), Version(5)));
        assert!(lineage.attach(parent, node, BlockId(1), Version(6)));
    }

    #[test]
    fn leaving_tells_the_parent_and_the_children() {
        let mut lineage = Lineage::default();
        let nodes: Vec<u32> = (0..5).map(|block| lineage.add(BlockId(block))).collect();
        assert!(link(&mut lineage, nodes[0], nodes[1]));
        for child in &nodes[2..] {
            assert!(link(&mut lineage, nodes[1], *child));
        }
        let mut aftermath = Aftermath::default();
        lineage.remove(nodes[3], &mut aftermath);
        assert!(aftermath.leaves.is_empty() && aftermath.roots.is_empty());
        let children: Vec<_> = lineage
            .children(nodes[1])
            .map(|(block, _)| block.0)
            .collect();
        assert_eq!(children, [4, 2]);
        lineage.remove(nodes[1], &mut aftermath);
        assert_eq!(aftermath.leaves, [BlockId(0)]);
        assert_eq!(aftermath.roots, [BlockId(4), BlockId(2)]);
        assert!(lineage.parent(nodes[2]).is_none() && !lineage.has_children(nodes[0]));
    }
}
