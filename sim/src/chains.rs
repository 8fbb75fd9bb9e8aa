//! A block never leaves before the blocks behind it in its chain: what leads to a block stays as long as the block.

use crate::load::{name, parent_of};
use crate::plan::{Plan, tenant_name};
use kvpool_master::pool::Pool;
use kvpool_types::Version;
use kvpool_types::ids::NamespaceId;
use std::collections::BTreeMap;
use tokio::time::Instant;

/// A block that was put while the block before it was there.
#[derive(Clone, Copy, Debug)]
struct Link {
    child: Version,
    parent: Version,
    since: Instant,
}

/// The chains that were seen. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    /// The blocks at the last look.
    seen: BTreeMap<u64, Version>,
    links: BTreeMap<u64, Link>,
}

/// A block whose parent has left: the numbers of their keys, and since when they were linked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Orphan {
    pub(crate) key: u64,
    pub(crate) parent: u64,
    pub(crate) since: Instant,
}

impl Chains {
    /// Looks at the leader's blocks. Returns those whose parent has left before them.
    pub(crate) fn look(&mut self, pool: &Pool, plan: &Plan) -> Vec<Orphan> {
        let stored = pool.stored_blocks().into_iter();
        let versions: BTreeMap<(NamespaceId, String), Version> = stored
            .map(|block| ((block.namespace, block.key.to_string()), block.version))
            .collect();
        let mut now: BTreeMap<u64, Version> = BTreeMap::new();
        for tenant in 0..plan.tenants.len() {
            let Ok(namespace) = pool.namespace(&tenant_name(tenant)) else {
                continue;
            };
            let present = plan.keys_of(tenant).filter_map(|key| {
                let version = versions.get(&(namespace, name(key).to_string()))?;
                Some((key, *version))
            });
            now.extend(present);
        }
        self.links
            .retain(|key, link| now.get(key) == Some(&link.child));
        let mut orphans = Vec::new();
        for (key, child) in &now {
            let Some(parent) = parent_of(*key) else {
                continue;
            };
            match self.links.get(key).copied() {
                Some(link) if !now.contains_key(&parent) => {
                    self.links.remove(key);
                    let since = link.since;
                    orphans.push(Orphan {
                        key: *key,
                        parent,
                        since,
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
                            since: Instant::now(),
                        };
                        self.links.insert(*key, link);
                    }
                }
            }
        }
        self.seen = now;
        orphans
    }
}
