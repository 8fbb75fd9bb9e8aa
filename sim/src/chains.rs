//! A block never leaves before the blocks behind it in its chain: what leads to a block stays as long as the block.

use crate::load::parent_of;
use crate::sight::Sight;
use kvpool_master::directory::StoredBlock;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, SegmentId, Version};
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// A block that was put while the block before it was there.
#[derive(Clone, Debug)]
struct Link {
    child: Version,
    parent: Version,
    /// When both were last there.
    seen: Instant,
    /// Where the parent was at the last look.
    places: Vec<SegmentId>,
}

/// The chains that were seen. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    /// The blocks at the last look.
    seen: BTreeMap<u64, Version>,
    links: BTreeMap<u64, Link>,
}

/// A block whose parent has left: the numbers of their keys, and when both were last seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Orphan {
    pub(crate) key: u64,
    pub(crate) parent: u64,
    pub(crate) seen: Instant,
}

/// Blocks and those before them in their chains, by their versions.
pub(crate) type Behind = BTreeMap<Version, Version>;

/// The links of blocks in memory.
pub(crate) fn links_of(blocks: &[StoredBlock]) -> Behind {
    let of = |block: &StoredBlock, key: &Key| (block.namespace, key.to_string());
    let versions: BTreeMap<(NamespaceId, String), Version> = blocks
        .iter()
        .map(|block| (of(block, &block.key), block.version))
        .collect();
    let links = blocks.iter().filter_map(|block| {
        let parent = versions.get(&of(block, block.parent.as_ref()?))?;
        Some((block.version, *parent))
    });
    links.collect()
}

impl Chains {
    /// A link that a leader lacks, though it has both blocks: the child's version, and the parent's. A parent that was
    /// put after its child is left out: whether the two are linked depends on how a leader has read the log.
    pub(crate) fn lost_at(
        &self,
        blocks: &[StoredBlock],
        before: &Behind,
    ) -> Option<(Version, Version)> {
        let there: BTreeSet<Version> = blocks.iter().map(|block| block.version).collect();
        let now = links_of(blocks);
        let mut known = self.links.values().map(|link| (link.child, link.parent));
        known.find(|(child, parent)| {
            before.get(child) == Some(parent)
                && there.contains(child)
                && there.contains(parent)
                && now.get(child) != Some(parent)
        })
    }

    /// Looks at the leader's blocks. Returns those whose parent has left before them. It is excused when blocks have
    /// just left with a node: the parent may have moved there since the look before.
    pub(crate) fn look(&mut self, sight: &Sight<'_>, is_excused: bool) -> Vec<Orphan> {
        let now: BTreeMap<u64, Version> = sight
            .blocks()
            .map(|(key, block)| (key, block.version))
            .collect();
        let segments = sight.pool.placement.segments();
        let is_lost = |link: &Link| {
            link.places
                .iter()
                .all(|place| segments.get(*place).is_none())
        };
        self.links
            .retain(|key, link| now.get(key) == Some(&link.child));
        let mut orphans = Vec::new();
        for (key, child) in &now {
            let Some(parent) = parent_of(*key) else {
                continue;
            };
            match self.links.get(key).cloned() {
                // It went with its node.
                Some(link) if !now.contains_key(&parent) && (is_excused || is_lost(&link)) => {
                    self.links.remove(key);
                }
                Some(link) if !now.contains_key(&parent) => {
                    self.links.remove(key);
                    orphans.push(Orphan {
                        key: *key,
                        parent,
                        seen: link.seen,
                    });
                }
                // Another block of the parent's key: nothing is known of it.
                Some(link) if now.get(&parent) != Some(&link.parent) => {
                    self.links.remove(key);
                }
                Some(_) => {}
                None => {
                    // One that is back, because the log has its eviction not, may have been put before its parent.
                    let is_new = self.seen.get(key) != Some(child);
                    let before = self.seen.get(&parent);
                    if let Some(version) = before.filter(|before| now.get(&parent) == Some(before))
                        && is_new
                        && *version < *child
                    {
                        let link = Link {
                            child: *child,
                            parent: *version,
                            seen: Instant::now(),
                            places: Vec::new(),
                        };
                        self.links.insert(*key, link);
                    }
                }
            }
        }
        for (key, link) in &mut self.links {
            link.seen = Instant::now();
            if let Some(parent) = parent_of(*key).and_then(|parent| sight.block(parent)) {
                link.places.clear();
                let places = parent.replicas.iter().map(|replica| replica.segment);
                link.places.extend(places);
            }
        }
        self.seen = now;
        orphans
    }
}
