//! Hard quotas of namespaces: puts and lookups make room among their own blocks, wait, and then
//! fail.
//!
//! A put at its quota does not wait in the queue of waiting puts, where it would block other
//! namespaces. It notes its need, and the evictor evicts the namespace's own oldest blocks. The
//! charge of a block ends when the block leaves the directory. So the put continues before the
//! quarantine of the extents ends.

use super::Pool;
use super::evictor::StoreOrders;
use crate::accounts::{Account, Hold, Item};
use crate::directory::{Goal, Removed};
use crate::placement::Extents;
use crate::tenant::Tenant;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Length, Setting, medium};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// How often a put at its quota checks whether the quota takes a block. Some charges end without an
/// event.
const QUOTA_POLL: Duration = Duration::from_millis(20);
/// The longest time between two passes of such a put. More frequent passes would lock out other
/// puts.
pub(super) const QUOTA_PASS: Duration = Duration::from_millis(200);
/// The bytes after which a step gives its victims to the journal.
const STEP: Goal = Goal {
    bytes: 8 << 20,
    blocks: 1024,
};

/// The namespace is at its hard quota of media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AtMediaQuota;

/// A hard quota of memory or blocks that does not take a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OverQuota {
    /// The code of the quota.
    pub(super) code: Code,
    /// True if the quotas would not take the block even in an empty namespace.
    pub(super) is_final: bool,
}

/// Stands in place of a put's number for loads without a waiting lookup.
const LOADS: u64 = 0;

/// The needs of all waiting puts and lookups, which their quotas do not take yet.
#[derive(Debug, Default)]
pub(super) struct QuotaQueue(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    needs: BTreeMap<(NamespaceId, u64), Goal>,
}

/// A put or lookup that waits for its quota. Dropping it removes its need.
pub(super) struct QuotaWait<'a> {
    queue: &'a QuotaQueue,
    place: (NamespaceId, u64),
}

impl Drop for QuotaWait<'_> {
    fn drop(&mut self) {
        self.queue.0.lock().needs.remove(&self.place);
    }
}

impl QuotaWait<'_> {
    /// Updates the need.
    pub(super) fn set(&self, need: Goal) {
        self.queue.0.lock().needs.insert(self.place, need);
    }
}

impl QuotaQueue {
    /// True while no put and no lookup waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().needs.is_empty()
    }

    /// Adds a put or lookup with its need.
    pub(super) fn enter(&self, namespace: NamespaceId, need: Goal) -> QuotaWait<'_> {
        let mut waiting = self.0.lock();
        waiting.next += 1;
        let place = (namespace, waiting.next);
        waiting.needs.insert(place, need);
        QuotaWait { queue: self, place }
    }

    /// Adds the need of a load without a waiting lookup. The evictor's next look removes it.
    pub(super) fn note_load(&self, namespace: NamespaceId, need: Goal) {
        let mut waiting = self.0.lock();
        // The same load may ask many times before the evictor's next look, so the maximum counts.
        let noted = waiting.needs.entry((namespace, LOADS)).or_default();
        noted.bytes = noted.bytes.max(need.bytes);
        noted.blocks = noted.blocks.max(need.blocks);
    }

    fn forget_loads(&self, namespace: NamespaceId) {
        self.0.lock().needs.remove(&(namespace, LOADS));
    }

    /// The sum of the needs of a namespace.
    fn needs(&self, namespace: NamespaceId) -> Goal {
        let waiting = self.0.lock();
        let own = waiting.needs.range((namespace, 0)..=(namespace, u64::MAX));
        own.fold(Goal::default(), |sum, (_, need)| Goal {
            bytes: sum.bytes.saturating_add(need.bytes),
            blocks: sum.blocks.saturating_add(need.blocks),
        })
    }
}

/// The hard quota that `need` would exceed; `None` if it fits.
pub(super) fn broken_quota(account: &Account, tenant: &Tenant, need: Goal) -> Option<Code> {
    let exceeds = |setting, used: u64, more: u64| {
        let hard = tenant.get(setting);
        more > 0 && hard.is_some_and(|hard| used.saturating_add(more) > hard)
    };
    if exceeds(Setting::MemoryHard, account.get(Item::Memory), need.bytes) {
        return Some(Code::MemoryQuota);
    }
    exceeds(Setting::BlocksHard, blocks_of(account), need.blocks).then_some(Code::BlocksQuota)
}

/// True if the quotas would not take `need` even in an empty namespace.
pub(super) fn never_fits(tenant: &Tenant, need: Goal) -> bool {
    let below = |setting, least| tenant.get(setting).is_some_and(|hard| hard < least);
    below(Setting::MemoryHard, need.bytes) || below(Setting::BlocksHard, need.blocks)
}

fn blocks_of(account: &Account) -> u64 {
    account.get(Item::Blocks) + account.get(Item::Puts) + account.get(Item::Loading)
}

/// The blocks and bytes that must leave before the quotas take `need`.
fn excess(account: &Account, tenant: &Tenant, need: Goal) -> Goal {
    let above = |setting, used: u64, more: u64| {
        let hard = tenant.get(setting);
        hard.map_or(0, |hard| {
            used.saturating_add(more.min(hard)).saturating_sub(hard)
        })
    };
    Goal {
        bytes: above(Setting::MemoryHard, account.get(Item::Memory), need.bytes),
        blocks: above(Setting::BlocksHard, blocks_of(account), need.blocks),
    }
}

impl Pool {
    /// The hard quota for which a block of the namespace is refused with `code`, and its value. `None` if the code is
    /// not about a quota.
    pub fn refusing_quota(&self, namespace: NamespaceId, code: Code) -> Option<(Setting, u64)> {
        let tenant = self.directory.accounts().tenant(namespace)?;
        let quota = match (code, tenant.get(Setting::BlocksHard)) {
            // A namespace that may have no block at all refuses every block, whatever its length.
            (Code::BlocksQuota, _) | (Code::OverQuota, Some(0)) => Setting::BlocksHard,
            (Code::MemoryQuota | Code::OverQuota, _) => Setting::MemoryHard,
            _ => return None,
        };
        Some((quota, tenant.get(quota)?))
    }

    /// The longest block that the pool takes, in bytes.
    pub fn longest_block(&self) -> u64 {
        let segments = self.placement.segments();
        let limits = segments.iter().map(|segment| segment.limit());
        let longest = Extents::rounded_down(Length(limits.max().unwrap_or(0)));
        longest.0.min(self.config.max_block_size.as_u64())
    }

    /// Runs `take`, which uses up `need` of the namespace's hard quotas, unless the need exceeds
    /// them. No other put, load or pull of the namespace uses the quotas meanwhile.
    pub(super) fn below_quota<T>(
        &self,
        namespace: NamespaceId,
        need: Goal,
        take: impl FnOnce() -> T,
    ) -> Result<T, OverQuota> {
        let accounts = self.directory.accounts();
        let Some(tenant) = accounts.tenant(namespace) else {
            return Ok(take());
        };
        let _one_at_a_time = tenant.taking.lock();
        match broken_quota(accounts.of(namespace), tenant, need) {
            None => Ok(take()),
            Some(code) => Err(OverQuota {
                code,
                is_final: never_fits(tenant, need),
            }),
        }
    }

    /// Counts a block that is about to be loaded, when its namespace has a quota of blocks.
    pub(super) fn hold_block_quota(&self, namespace: NamespaceId) -> Option<Arc<Hold>> {
        let accounts = self.directory.accounts();
        let tenant = accounts.tenant(namespace)?;
        tenant.get(Setting::BlocksHard)?;
        let hold = Hold::new(accounts, namespace, Item::Loading, 1);
        Some(Arc::new(hold))
    }

    /// Updates the noted need of a put or lookup; `None` removes it.
    pub(super) fn wait_for_quota<'a>(
        &'a self,
        namespace: NamespaceId,
        need: Goal,
        waiting: &mut Option<QuotaWait<'a>>,
    ) {
        if need == Goal::default() {
            *waiting = None;
            return;
        }
        match waiting {
            Some(waiting) => waiting.set(need),
            None => *waiting = Some(self.quotas.enter(namespace, need)),
        }
        self.evictor_wake.wake();
    }

    /// Waits until the namespace's hard quotas take `need`. Without a need, waits forever.
    pub(super) async fn quota_takes(&self, namespace: NamespaceId, need: Option<Goal>) {
        let Some(need) = need else {
            return std::future::pending().await;
        };
        let accounts = self.directory.accounts();
        let is_held_back = || {
            let tenant = accounts.tenant(namespace);
            let broken = |tenant| broken_quota(accounts.of(namespace), tenant, need);
            tenant.is_some_and(|tenant| broken(tenant).is_some())
        };
        loop {
            tokio::time::sleep(QUOTA_POLL).await;
            if !is_held_back() {
                return;
            }
        }
    }

    /// Charges a copy that is about to be written on a medium, if its namespace has a quota of
    /// media. An error if the quota does not take it.
    pub(super) fn hold_media_quota(
        &self,
        namespace: NamespaceId,
        length: Length,
    ) -> Result<Option<Arc<Hold>>, AtMediaQuota> {
        let accounts = self.directory.accounts();
        let tenant = accounts.tenant(namespace);
        let Some(hard) = tenant.and_then(|tenant| tenant.get(Setting::MediaHard)) else {
            return Ok(None);
        };
        let bytes = medium::footprint(length).unwrap_or(length).0;
        // A copy in progress is charged when it is recorded.
        let account = accounts.of(namespace);
        let used = account.get(Item::Media) + account.get(Item::Storing);
        if used.saturating_add(bytes) > hard {
            return Err(AtMediaQuota);
        }
        let hold = Hold::new(accounts, namespace, Item::Storing, bytes);
        Ok(Some(Arc::new(hold)))
    }

    /// Evicts blocks of the namespaces that are above their hard quotas, or whose puts wait for
    /// them. Only the evictor calls this.
    pub(super) fn make_quota_room(self: &Arc<Self>, orders: &mut StoreOrders) {
        let accounts = self.directory.accounts();
        // Leases of the last term, which this term does not know, may run on every block.
        if !accounts.has_tenants() || self.now() < self.lease_floor {
            return;
        }
        for (namespace, tenant) in accounts.tenants() {
            let need = self.quotas.needs(namespace);
            self.quotas.forget_loads(namespace);
            let account = accounts.of(namespace);
            let mut left = excess(account, &tenant, need);
            while left != Goal::default() && !self.is_stopping() {
                let step = Goal {
                    bytes: left.bytes.min(STEP.bytes),
                    blocks: left.blocks.min(STEP.blocks),
                };
                let before = orders.before(self);
                let until_submitted = self.evicting.read();
                let victims = self
                    .directory
                    .evict_own(tenant.order, before, step, self.now());
                if victims.is_empty() {
                    drop(until_submitted);
                    if orders.repeat(self) {
                        continue;
                    }
                    break;
                }
                let bytes: u64 = victims.iter().map(Removed::footprint).sum();
                left.bytes = left.bytes.saturating_sub(bytes);
                left.blocks = left.blocks.saturating_sub(victims.len() as u64);
                self.submit_victims(victims);
            }
        }
    }
}
