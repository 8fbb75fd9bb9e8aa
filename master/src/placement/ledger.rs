//! The charges of one segment: how many of its bytes each namespace pays for.

use crate::accounts::{Accounts, Item};
use kvpool_seams::maps::HashMap;
use kvpool_types::ids::NamespaceId;
use std::sync::Arc;

/// The charges of one segment or medium, which also count in the accounts of the pool.
#[derive(Debug)]
pub struct Ledger {
    accounts: Arc<Accounts>,
    item: Item,
    /// Bytes by namespace; none is zero.
    charges: HashMap<NamespaceId, u64>,
    total: u64,
    /// The segment has left the pool.
    is_closed: bool,
}

impl Ledger {
    /// A ledger without charges, which count as `item`.
    pub fn new(accounts: Arc<Accounts>, item: Item) -> Self {
        Self {
            accounts,
            item,
            charges: HashMap::default(),
            total: 0,
            is_closed: false,
        }
    }

    /// The bytes of all charges.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// True after the account was closed.
    pub const fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn charge(&mut self, namespace: NamespaceId, bytes: u64) {
        if self.is_closed {
            return;
        }
        *self.charges.entry(namespace).or_default() += bytes;
        self.total += bytes;
        self.accounts.of(namespace).add(self.item, bytes);
    }

    pub(super) fn discharge(&mut self, namespace: NamespaceId, bytes: u64) {
        if self.is_closed {
            return;
        }
        if let Some(charged) = self.charges.get_mut(&namespace) {
            debug_assert!(*charged >= bytes, "invariant: an extent is discharged once");
            *charged -= bytes;
            if *charged == 0 {
                self.charges.remove(&namespace);
            }
        }
        self.total -= bytes;
        self.accounts.of(namespace).take_off(self.item, bytes);
    }

    /// Ends every charge, because the segment has left the pool.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        for (namespace, bytes) in self.charges.drain() {
            self.accounts.of(namespace).take_off(self.item, bytes);
        }
        self.total = 0;
    }
}
