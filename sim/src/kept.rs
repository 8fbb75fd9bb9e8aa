//! Where nothing takes blocks, one that was there stays there, at any leader.

use crate::plan::{Plan, tenant_name};
use crate::sight::Sight;
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
    pub(crate) fn look(
        &mut self,
        sight: &Sight<'_>,
        plan: &Plan,
        tenant: usize,
    ) -> Result<(), String> {
        if sight.pool.namespace(&tenant_name(tenant)).is_err() {
            return Ok(());
        }
        for key in plan.keys_of(tenant) {
            let forms = [sight.block(key), sight.copy(key)];
            let now = forms.into_iter().flatten().map(|form| form.version).max();
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
