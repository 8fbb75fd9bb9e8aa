//! A copy on a disk that goes right and has room stays until its key changes.

use crate::load::name;
use crate::plan::{DiskFault, Fault, Plan, tenant_name};
use crate::world::World;
use kvpool_master::pool::Pool;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{SegmentId, Version};
use std::collections::BTreeMap;
use tokio::time::Instant;

/// The copies that should stay at the last look, by the numbers of their keys. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    seen: BTreeMap<u64, (Version, SegmentId)>,
    at: Option<Instant>,
}

/// A copy that has left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost {
    pub(crate) key: u64,
    pub(crate) version: Version,
    /// When it was seen last.
    pub(crate) since: Instant,
}

/// Whether nothing in this history takes copies from the disk of the node.
fn is_right(plan: &Plan, node: usize) -> bool {
    let mut faults = plan.faults.iter().map(|(_, fault)| *fault);
    !faults.any(|fault| match fault {
        Fault::PowerCut(who, _) | Fault::RolledBack(who, _) | Fault::Cloned(_, who, _) => {
            who == node
        }
        Fault::Disk(who, fault, _) => who == node && fault != DiskFault::Stalls,
        _ => false,
    })
}

/// Whether the blocks of a namespace stay but for changes of their keys.
fn is_kept(plan: &Plan, tenant: usize) -> bool {
    let mut faults = plan.faults.iter().map(|(_, fault)| *fault);
    !faults
        .any(|fault| matches!(fault, Fault::Delete(who, _) | Fault::Quota(who, _) if who == tenant))
}

impl Copies {
    /// Looks at the leader's copies. Returns those that have left since the last look.
    pub(crate) fn look(&mut self, pool: &Pool, world: &World) -> Vec<Lost> {
        let plan = &world.plan;
        // No zone was written twice until half of the disk was written. A zone may end with room for no block.
        let right: Vec<String> = (0..plan.nodes)
            .filter(|node| is_right(plan, *node))
            .filter(|node| {
                let written = world.ssds.get(*node).map(|ssd| ssd.written());
                written.is_some_and(|bytes| bytes + 2 * plan.longest_block < plan.disk_bytes / 2)
            })
            .map(|node| format!("n{node}"))
            .collect();
        let media: Vec<SegmentId> = pool
            .media()
            .into_iter()
            .filter(|medium| right.contains(&medium.record.node.0))
            .map(|medium| medium.record.id)
            .collect();
        let copies = pool.stored_copies().into_iter();
        let copies: BTreeMap<(NamespaceId, String), (Version, Option<SegmentId>)> = copies
            .map(|copy| {
                let mut places = copy.replicas.iter().map(|at| at.segment);
                let on = places.find(|medium| media.contains(medium));
                let place = (copy.namespace, copy.key.to_string());
                (place, (copy.version, on))
            })
            .collect();
        let (mut now, mut stay) = (BTreeMap::new(), BTreeMap::new());
        for tenant in 0..plan.tenants.len() {
            let namespace = pool.namespace(&tenant_name(tenant));
            let Some(namespace) = namespace.ok().filter(|_| is_kept(plan, tenant)) else {
                continue;
            };
            for key in plan.keys_of(tenant) {
                let copy = copies.get(&(namespace, name(key).to_string()));
                if let Some((version, on)) = copy {
                    now.insert(key, *version);
                    if let Some(medium) = on {
                        stay.insert(key, (*version, *medium));
                    }
                }
            }
        }
        let since = self.at.replace(Instant::now());
        let before = std::mem::replace(&mut self.seen, stay);
        let lost = before.into_iter().filter_map(|(key, (version, medium))| {
            // A disk that was written much since the last look may have taken the copy's zone.
            let has_left = media.contains(&medium) && now.get(&key) != Some(&version);
            has_left.then_some(Lost {
                key,
                version,
                since: since?,
            })
        });
        lost.collect()
    }
}
