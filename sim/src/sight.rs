//! What the checks see of a leader at one moment: its blocks and copies by the numbers of their keys.

use crate::load::number_of;
use crate::plan::{Plan, TENANT_KEYS, tenant_name};
use kvpool_master::directory::StoredBlock;
use kvpool_master::pool::Pool;
use kvpool_master::pool::audit::Survey;
use kvpool_types::ids::NamespaceId;
use std::collections::BTreeMap;

/// The numbers of keys, and where their blocks stand in a list.
type Places = BTreeMap<u64, usize>;

/// The namespaces of the plan by their ids.
type Tenants = BTreeMap<NamespaceId, usize>;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Sight<'p> {
    pub(crate) pool: &'p Pool,
    pub(crate) survey: Survey,
    memory: Places,
    media: Places,
    tenants: Tenants,
}

/// The number of the block's key, if it is one of the plan's keys.
fn key_of(block: &StoredBlock, plan: &Plan, tenants: &Tenants) -> Option<u64> {
    let tenant = *tenants.get(&block.namespace)?;
    let key = tenant as u64 * TENANT_KEYS + number_of(&block.key)?;
    plan.keys_of(tenant).contains(&key).then_some(key)
}

/// The plan's keys among the blocks.
fn places(blocks: &[StoredBlock], plan: &Plan, tenants: &Tenants) -> Places {
    let all = blocks.iter().enumerate();
    let keys = all.filter_map(|(at, block)| Some((key_of(block, plan, tenants)?, at)));
    keys.collect()
}

impl<'p> Sight<'p> {
    pub(crate) fn of(pool: &'p Pool, plan: &Plan) -> Self {
        let survey = pool.survey();
        let tenants: Tenants = (0..plan.tenants.len())
            .filter_map(|tenant| Some((pool.namespace(&tenant_name(tenant)).ok()?, tenant)))
            .collect();
        Self {
            memory: places(&survey.blocks, plan, &tenants),
            media: places(&survey.copies, plan, &tenants),
            pool,
            survey,
            tenants,
        }
    }

    /// The number of the key of a block, which the leader need not have.
    pub(crate) fn key_of(&self, block: &StoredBlock, plan: &Plan) -> Option<u64> {
        key_of(block, plan, &self.tenants)
    }

    /// The key's block in memory.
    pub(crate) fn block(&self, key: u64) -> Option<&StoredBlock> {
        self.survey.blocks.get(*self.memory.get(&key)?)
    }

    /// The key's copy on a medium.
    pub(crate) fn copy(&self, key: u64) -> Option<&StoredBlock> {
        self.survey.copies.get(*self.media.get(&key)?)
    }

    /// The keys that have a block in memory, in order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u64, &StoredBlock)> {
        let all = self.memory.iter();
        all.filter_map(|(key, at)| Some((*key, self.survey.blocks.get(*at)?)))
    }

    /// The keys that have a copy on a medium, in order.
    pub(crate) fn copies(&self) -> impl Iterator<Item = (u64, &StoredBlock)> {
        let all = self.media.iter();
        all.filter_map(|(key, at)| Some((*key, self.survey.copies.get(*at)?)))
    }
}
