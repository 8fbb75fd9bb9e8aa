//! The loads in progress, and the lookups that wait for them.
//!
//! Once all loads of a lookup are in progress, only the end of the last one wakes it. If every end of a load woke it,
//! each lookup would look at all of its loads for each load of others.
//!
//! A lookup that is not woken cannot lease its loaded blocks, and eviction would take them. So the end of a load
//! leases the block for the lookups that wait for the load.

use super::super::Pool;
use super::Traffic;
use super::transfers::{Moved, Transfer};
use crate::clock::BootInstant;
use crate::replica::{BlockId, Replica};
use kvpool_types::{Code, Key, Length, Version};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use tokio::sync::Notify;

/// The most copies whose failed load is remembered. Beyond it all are forgotten.
const MOST_FAILED: usize = 4096;

/// A load in progress.
#[derive(Debug)]
pub(super) struct OpenLoad {
    /// The ticket of its transfer. The next load of the same copy has another one.
    pub(super) ticket: u64,
    /// The extent in memory that the block is loaded to.
    pub(super) to: Replica,
    pub(super) length: Length,
    awaiters: SmallVec<[Awaiter; 1]>,
}

impl OpenLoad {
    pub(super) fn new(ticket: u64, to: Replica, length: Length) -> Self {
        Self {
            ticket,
            to,
            length,
            awaiters: SmallVec::new(),
        }
    }

    /// Takes each lookup that has no lease yet. The caller leases the block for it.
    fn take_unleased(&mut self) -> SmallVec<[Awaiter; 1]> {
        let awaiters = self.awaiters.iter_mut();
        let unleased = awaiters.filter(|awaiter| !awaiter.is_leased);
        let taken = unleased.map(|awaiter| {
            awaiter.is_leased = true;
            awaiter.clone()
        });
        taken.collect()
    }
}

/// A lookup that waits for a load, with the index of the block's key in the lookup.
#[derive(Clone, Debug)]
struct Awaiter {
    awaited: Weak<Awaited>,
    index: usize,
    /// Whether the end of the load leases, or has leased, the block for the lookup.
    is_leased: bool,
}

impl Awaiter {
    fn is(&self, awaited: &Arc<Awaited>, index: usize) -> bool {
        std::ptr::eq(self.awaited.as_ptr(), Arc::as_ptr(awaited)) && self.index == index
    }
}

/// The loads that one lookup waits for.
#[derive(Debug)]
pub(super) struct Awaited {
    /// The token of the leases on the loaded blocks.
    token: BootInstant,
    /// The number of loads that must end before the lookup is woken. It is set while the traffic is locked.
    left: AtomicUsize,
    ended: Notify,
    /// By the index of its key: each block that a load's end has leased for the lookup. `None` when the wait is over.
    pub(super) leased: Mutex<Option<BTreeMap<usize, (Key, Version)>>>,
}

impl Awaited {
    pub(super) fn new(token: BootInstant) -> Self {
        Self {
            token,
            left: AtomicUsize::new(0),
            ended: Notify::new(),
            leased: Mutex::new(Some(BTreeMap::new())),
        }
    }

    /// Waits until the loads of the last call of [`Traffic::await_loads`] have ended. It may return earlier.
    pub(super) async fn all_ended(&self) {
        self.ended.notified().await;
    }

    /// Counts the end of a load.
    fn one_ended(&self) {
        // A load of a medium that became unreadable ends too, but the lookup no longer counts it. The same holds for a
        // load that left the table just before the count was set. The lookup is then woken early, and counts again.
        let less = |left: usize| Some(left.saturating_sub(1));
        let before = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        if before.is_ok_and(|before| before <= 1) {
            self.ended.notify_one();
        }
    }

    /// Takes over the lease of an ended load.
    pub(super) fn take(&self, index: usize) -> Option<(Key, Version)> {
        self.leased.lock().as_mut()?.remove(&index)
    }

    /// Ends the wait, and takes over all leases. Loads that end later lease no block for the lookup.
    pub(super) fn close(&self) -> BTreeMap<usize, (Key, Version)> {
        self.leased.lock().take().unwrap_or_default()
    }
}

impl Traffic {
    /// Registers a lookup that waits for these loads only. Each load has the index of its key. The caller has seen
    /// them in progress, and has kept the traffic locked since.
    pub(super) fn await_loads(
        &mut self,
        awaited: &Arc<Awaited>,
        loads: impl Iterator<Item = (usize, (BlockId, Version))>,
    ) {
        let mut left = 0;
        // Only loads refer to the lookup weakly. A search is needed only if one of them does already.
        let is_new = Arc::weak_count(awaited) == 0;
        for (index, load) in loads {
            let Some(load) = self.loading.get_mut(&load) else {
                continue;
            };
            left += 1;
            let mut awaiters = load.awaiters.iter();
            if !is_new && awaiters.any(|awaiter| awaiter.is(awaited, index)) {
                continue;
            }
            // A load of a disk that hangs may outlast many lookups. They leave the list before it grows.
            if load.awaiters.len() == load.awaiters.capacity() {
                load.awaiters
                    .retain(|awaiter| awaiter.awaited.strong_count() > 0);
            }
            load.awaiters.push(Awaiter {
                awaited: Arc::downgrade(awaited),
                index,
                is_leased: false,
            });
        }
        awaited.left.store(left, Ordering::Relaxed);
    }

    /// Records that a node could not load a copy. A lookup takes the copy for unreadable only if `code` is about the
    /// copy.
    pub(super) fn load_failed(&mut self, transfer: &Transfer, code: Code) {
        if !is_about_copy(code) {
            if let Some(load) = transfer.loading() {
                self.failed.remove(&load);
            }
            return;
        }
        if self.failed.len() >= MOST_FAILED {
            self.failed.clear();
        }
        self.failed.extend(transfer.loading());
    }
}

/// Whether another load of the copy would fail too, or its medium has failed. Otherwise the node had no memory for the
/// load, or its extent or its term has ended.
const fn is_about_copy(code: Code) -> bool {
    let is_of_medium = matches!(code, Code::Unreachable | Code::ChecksumMismatch);
    is_of_medium || !code.is_retryable()
}

impl Pool {
    /// Ends a load whose block is in memory, and leases the block for the lookups that wait for it.
    pub(super) fn load_succeeded(&self, transfer: &Transfer) {
        let Some(load) = transfer.loading() else {
            return;
        };
        // A lookup leases a block itself if it finds the load ended and no lease. So the lease comes before the end.
        // More lookups may come meanwhile. The load ends in a moment in which each of them has its lease.
        let ended = loop {
            let mut traffic = self.tiering.traffic.lock();
            traffic.failed.remove(&load);
            let Some(open) = traffic.loading.get_mut(&load) else {
                break None;
            };
            let unleased = open.take_unleased();
            if unleased.is_empty() {
                traffic.may_leave(transfer.place);
                break traffic.loading.remove(&load);
            }
            drop(traffic);
            for awaiter in &unleased {
                self.lease_for(awaiter, &transfer.block);
            }
        };
        self.count_end(ended);
    }

    /// Ends a load that brought no block to memory.
    pub(super) fn load_ended(&self, transfer: &Transfer) {
        let Some(load) = transfer.loading() else {
            return;
        };
        let ended = self.tiering.traffic.lock().loading.remove(&load);
        self.count_end(ended);
    }

    /// Tells the lookups that a load has ended.
    fn count_end(&self, ended: Option<OpenLoad>) {
        for awaiter in ended.into_iter().flat_map(|load| load.awaiters) {
            if let Some(awaited) = awaiter.awaited.upgrade() {
                awaited.one_ended();
            }
        }
        self.tiering.loaded.notify_waiters();
    }

    fn lease_for(&self, awaiter: &Awaiter, block: &Moved) {
        let Some(awaited) = awaiter.awaited.upgrade() else {
            return;
        };
        // Kept locked until the lease is entered. A lookup that closes meanwhile would not release it.
        let mut leased = awaited.leased.lock();
        if let Some(leased) = leased.as_mut()
            && self.lease_loaded(block, awaited.token)
        {
            leased.insert(awaiter.index, (block.key.clone(), block.version));
        }
    }

    /// Leases a loaded block. Returns false when it is not in memory.
    pub(super) fn lease_loaded(&self, block: &Moved, token: BootInstant) -> bool {
        let now = self.now();
        let keys = [block.key.as_ref()];
        let mut is_there = false;
        self.directory.visit(block.namespace, &keys, |_, found| {
            if let Some(mut found) = found.filter(|found| found.version() == block.version) {
                found.lease(token, now);
                is_there = true;
            }
        });
        is_there
    }
}
