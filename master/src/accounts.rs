//! The usage of each namespace, exact at every moment.
//!
//! ```text
//!  Extents (memory) ── charge, discharge ──► Account.memory   ┐
//!  Extents (medium) ── charge, discharge ──► Account.media    ├─ one Account a namespace
//!  Directory ───────── insert, remove ─────► Account.blocks   │
//!  Tier ────────────── insert, remove ─────► Account.copies   ┘
//! ```
//!
//! A namespace pays for every extent that holds one of its blocks, and for every extent that one of
//! its puts, loads or copies may write. It pays for each replica, with the rounding of extents. The
//! charge of a reservation begins with its grant. No namespace pays for an extent in quarantine.
//! The charge of a range on a medium begins with the record of its copy.
//!
//! **Architecture Invariant:** the charges of a segment change under the lock of its table of
//! extents. So they always equal the used bytes less the quarantined ones.
//!
//! ADR 0047 says why extents carry the charge.

use crate::tenant::Tenant;
use kvpool_types::NamespaceSettings;
use kvpool_types::ids::NamespaceId;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const LEAF_BITS: u32 = 6;
const MIDDLE_BITS: u32 = 13;
const TOP_BITS: u32 = 32 - LEAF_BITS - MIDDLE_BITS;

/// The present usage of one namespace.
#[derive(Debug, Default)]
pub struct Account {
    memory: AtomicU64,
    media: AtomicU64,
    blocks: AtomicU64,
    copies: AtomicU64,
    puts: AtomicU64,
    reserved: AtomicU64,
    resident: AtomicU64,
    storing: AtomicU64,
    loading: AtomicU64,
    /// Set once the namespace has settings.
    tenant: OnceLock<Arc<Tenant>>,
    /// True once the namespace is deleted, and while it is being deleted.
    is_closed: AtomicBool,
}

/// The numbers of an [`Account`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    /// Bytes of the extents in memory that the namespace's blocks and open puts hold.
    pub memory: u64,
    /// Bytes of the ranges on media that hold copies of its blocks, with their headers.
    pub media: u64,
    /// Blocks in memory.
    pub blocks: u64,
    /// Copies on media.
    pub copies: u64,
    /// Open puts.
    pub puts: u64,
    /// The bytes of [`Balance::memory`] that open puts hold.
    pub reserved: u64,
    /// The bytes of [`Balance::memory`] that blocks hold. Loads and copies in progress hold the
    /// rest.
    pub resident: u64,
}

/// A number of an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// [`Balance::memory`].
    Memory,
    /// [`Balance::media`].
    Media,
    /// [`Balance::blocks`].
    Blocks,
    /// [`Balance::copies`].
    Copies,
    /// [`Balance::puts`].
    Puts,
    /// [`Balance::reserved`].
    Reserved,
    /// [`Balance::resident`].
    Resident,
    /// Bytes of copies to media in progress. Counted only in a namespace with a quota of media.
    Storing,
    /// Blocks that are being loaded to memory. Counted only in a namespace with a quota of blocks.
    Loading,
}

impl Account {
    const fn item(&self, item: Item) -> &AtomicU64 {
        match item {
            Item::Memory => &self.memory,
            Item::Media => &self.media,
            Item::Blocks => &self.blocks,
            Item::Copies => &self.copies,
            Item::Puts => &self.puts,
            Item::Reserved => &self.reserved,
            Item::Resident => &self.resident,
            Item::Storing => &self.storing,
            Item::Loading => &self.loading,
        }
    }

    /// One number.
    pub fn get(&self, item: Item) -> u64 {
        self.item(item).load(Ordering::Acquire)
    }

    /// All numbers. They are read one after another, so they may differ by changes in between.
    pub fn balance(&self) -> Balance {
        Balance {
            memory: self.get(Item::Memory),
            media: self.get(Item::Media),
            blocks: self.get(Item::Blocks),
            copies: self.get(Item::Copies),
            puts: self.get(Item::Puts),
            reserved: self.get(Item::Reserved),
            resident: self.get(Item::Resident),
        }
    }

    /// The settings; `None` when the namespace never had any.
    pub fn tenant(&self) -> Option<&Arc<Tenant>> {
        self.tenant.get()
    }

    /// True while the namespace may not get blocks, because it is being deleted.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Refuses new blocks of the namespace, or takes them again.
    pub fn close(&self, is_closed: bool) {
        self.is_closed.store(is_closed, Ordering::Release);
    }

    /// Adds `count`.
    pub fn add(&self, item: Item, count: u64) {
        self.item(item).fetch_add(count, Ordering::AcqRel);
    }

    /// Subtracts `count`, which was added before.
    pub fn take_off(&self, item: Item, count: u64) {
        let before = self.item(item).fetch_sub(count, Ordering::AcqRel);
        debug_assert!(before >= count, "invariant: {item:?} was added before");
    }
}

/// Bytes that count as an item of an account until this value is dropped.
#[derive(Debug)]
pub struct Hold {
    accounts: Arc<Accounts>,
    namespace: NamespaceId,
    item: Item,
    bytes: u64,
}

impl Hold {
    /// Adds `bytes` to an item.
    pub fn new(accounts: &Arc<Accounts>, namespace: NamespaceId, item: Item, bytes: u64) -> Self {
        accounts.of(namespace).add(item, bytes);
        Self {
            accounts: Arc::clone(accounts),
            namespace,
            item,
            bytes,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let account = self.accounts.of(self.namespace);
        account.take_off(self.item, self.bytes);
    }
}

type Leaf = Box<[Account]>;
type Middle = Box<[OnceLock<Leaf>]>;

/// The accounts of all namespaces. An account is made at its first use and stays, because ids are
/// never reused. Reading an account needs no lock.
#[derive(Debug)]
pub struct Accounts {
    top: Box<[OnceLock<Middle>]>,
    /// The namespaces that have or had settings. A tenant's order of eviction follows from its
    /// position here.
    tenants: RwLock<Vec<(NamespaceId, Arc<Tenant>)>>,
    /// True once there is a tenant. Without tenants no call pays for tenancy.
    has_tenants: AtomicBool,
}

impl Default for Accounts {
    fn default() -> Self {
        Self {
            top: empty(1 << TOP_BITS),
            tenants: RwLock::default(),
            has_tenants: AtomicBool::new(false),
        }
    }
}

fn empty<T>(count: usize) -> Box<[OnceLock<T>]> {
    (0..count).map(|_| OnceLock::new()).collect()
}

/// The indexes of an id in the three levels of the table.
const fn places(id: NamespaceId) -> (usize, usize, usize) {
    let number = id.0;
    (
        (number >> (LEAF_BITS + MIDDLE_BITS)) as usize,
        (number >> LEAF_BITS) as usize & ((1 << MIDDLE_BITS) - 1),
        number as usize & ((1 << LEAF_BITS) - 1),
    )
}

impl Accounts {
    /// The account of a namespace.
    pub fn of(&self, id: NamespaceId) -> &Account {
        let (top, middle, leaf) = places(id);
        let account = self.top.get(top).and_then(|middles| {
            let middles = middles.get_or_init(|| empty(1 << MIDDLE_BITS));
            let leaves = middles.get(middle)?.get_or_init(|| {
                let accounts = 0..1 << LEAF_BITS;
                accounts.map(|_| Account::default()).collect()
            });
            leaves.get(leaf)
        });
        account.expect("invariant: the levels cover every id")
    }

    /// The usage of a namespace; zeros for a namespace that never used anything.
    pub fn balance(&self, id: NamespaceId) -> Balance {
        let (top, middle, leaf) = places(id);
        let account = self.top.get(top).and_then(|middles| {
            let leaves = middles.get()?.get(middle)?.get()?;
            leaves.get(leaf)
        });
        account.map(Account::balance).unwrap_or_default()
    }

    /// Sets the settings of a namespace. Returns true if it had none before.
    pub fn set(&self, id: NamespaceId, settings: &NamespaceSettings) -> bool {
        let account = self.of(id);
        if let Some(tenant) = account.tenant() {
            tenant.set(settings);
            return false;
        }
        if settings.is_empty() {
            return false;
        }
        let mut tenants = self.tenants.write();
        let order = u32::try_from(tenants.len() + 1).unwrap_or(u32::MAX);
        let tenant = Arc::new(Tenant::new(order, settings));
        tenants.push((id, Arc::clone(&tenant)));
        let is_new = account.tenant.set(tenant).is_ok();
        self.has_tenants.store(true, Ordering::Release);
        is_new
    }

    /// True once a namespace had settings.
    #[inline]
    pub fn has_tenants(&self) -> bool {
        self.has_tenants.load(Ordering::Acquire)
    }

    /// The settings of a namespace; `None` when it never had any. Costs one load without tenants.
    #[inline]
    pub fn tenant(&self, id: NamespaceId) -> Option<&Arc<Tenant>> {
        if self.has_tenants() {
            self.of(id).tenant()
        } else {
            None
        }
    }

    /// The namespaces that have or had settings, in the order of their orders of eviction.
    pub fn tenants(&self) -> Vec<(NamespaceId, Arc<Tenant>)> {
        self.tenants.read().clone()
    }

    /// The sums over all namespaces.
    pub fn total(&self) -> Balance {
        let middles = self.top.iter().filter_map(OnceLock::get);
        let leaves = middles.flat_map(|middle| middle.iter().filter_map(OnceLock::get));
        leaves.flatten().fold(Balance::default(), |sum, account| {
            let one = account.balance();
            Balance {
                memory: sum.memory + one.memory,
                media: sum.media + one.media,
                blocks: sum.blocks + one.blocks,
                copies: sum.copies + one.copies,
                puts: sum.puts + one.puts,
                reserved: sum.reserved + one.reserved,
                resident: sum.resident + one.resident,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_an_account_of_its_own() {
        let accounts = Accounts::default();
        let ids = [0, 1, 63, 64, 65_535, 1 << 19, u32::MAX];
        for (count, id) in (1..).zip(ids) {
            accounts.of(NamespaceId(id)).add(Item::Blocks, count);
        }
        for (count, id) in (1..).zip(ids) {
            assert_eq!(accounts.balance(NamespaceId(id)).blocks, count, "{id}");
        }
        assert_eq!(accounts.balance(NamespaceId(2)), Balance::default());
        assert_eq!(accounts.balance(NamespaceId(1 << 30)), Balance::default());
        assert_eq!(accounts.total().blocks, (1..=7).sum::<u64>());
    }
}
