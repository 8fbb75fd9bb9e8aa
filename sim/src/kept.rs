//! Where nothing takes blocks, one that was there stays there, at any leader.

use crate::load::name;
use crate::plan::{Plan, tenant_name};
use kvpool_master::pool::Pool;
use kvpool_types::Version;
use std::collections::BTreeMap;

/// The versions at the last look, by the numbers of their keys. A lost block is hidden by the next put of its key, so
/// that a look at the end would miss it.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    seen: BTreeMap<u64, Version>,
}

impl Kept {
    /// Looks at the leader's blocks of a namespace, in memory and on disks.
    pub(crate) fn look(&mut self, pool: &Pool, plan: &Plan, tenant: usize) -> Result<(), String> {
        let Ok(namespace) = pool.namespace(&tenant_name(tenant)) else {
            return Ok(());
        };
        let stored = pool.stored_blocks().into_iter();
        let stored = stored.chain(pool.stored_copies());
        let of_it = stored.filter(|block| block.namespace == namespace);
        let mut there: BTreeMap<String, Version> = BTreeMap::new();
        for block in of_it {
            let version = there.entry(block.key.to_string()).or_default();
            *version = (*version).max(block.version);
        }
        for key in plan.keys_of(tenant) {
            let now = there.get(&name(key).to_string()).copied();
            let before = self.seen.get(&key).copied();
            match (before, now) {
                (Some(before), None) => {
                    return Err(format!(
                        "the block of key {key}, version {before}, has left the pool, and nothing took it"
                    ));
                }
                (Some(before), Some(now)) if now < before => {
                    return Err(format!(
                        "key {key} has version {now} again, after version {before}"
                    ));
                }
                (_, Some(now)) => {
                    self.seen.insert(key, now);
                }
                (None, None) => {}
            }
        }
        Ok(())
    }
}
