//! A block never leaves before the blocks behind it in its chain: what leads to a block stays as long as the block.

use crate::load::{name, parent_of};
use crate::plan::{Plan, tenant_name};
use kvpool_master::pool::Pool;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{SegmentId, Version};
use std::collections::BTreeMap;
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

impl Chains {
    /// Looks at the leader's blocks. Returns those whose parent has left before them. It is excused when blocks have
    /// just left with a node: the parent may have moved there since the look before.
    pub(crate) fn look(&mut self, pool: &Pool, plan: &Plan, is_excused: bool) -> Vec<Orphan> {
        let stored = pool.stored_blocks().into_iter();
        let stored: BTreeMap<(NamespaceId, String), (Version, Vec<SegmentId>)> = stored
            .map(|block| {
                let places = block.replicas.iter().map(|replica| replica.segment);
                let named = (block.namespace, block.key.to_string());
                (named, (block.version, places.collect()))
            })
            .collect();
        let mut now: BTreeMap<u64, Version> = BTreeMap::new();
        let mut places: BTreeMap<u64, Vec<SegmentId>> = BTreeMap::new();
        for tenant in 0..plan.tenants.len() {
            let Ok(namespace) = pool.namespace(&tenant_name(tenant)) else {
                continue;
            };
            for key in plan.keys_of(tenant) {
                if let Some((version, at)) = stored.get(&(namespace, name(key).to_string())) {
                    now.insert(key, *version);
                    places.insert(key, at.clone());
                }
            }
        }
        let segments = pool.placement.segments();
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
                    let is_new = self.seen.get(key) != Some(child);
                    let before = self.seen.get(&parent);
                    if let Some(version) = before.filter(|before| now.get(&parent) == Some(before))
                        && is_new
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
            if let Some(at) = parent_of(*key).and_then(|parent| places.get(&parent)) {
                link.places.clone_from(at);
            }
        }
        self.seen = now;
        orphans
    }
}
