//! Reservations: puts with granted room that are not committed yet.
//!
//! ```text
//!            insert                 begin_commit            finish
//!  (nothing) ───────► Granted ───────────────────► Committing ─────► (block is in the directory)
//!                       │ revoke, expire
//!                       ▼
//!                   extents to quarantine
//! ```
//!
//! **Architecture Invariant:** a commit publishes its block before its reservation ends. So a
//! thread that holds the reservations' lock and finds neither knows that the key is free.

use crate::accounts::{Accounts, Item};
use crate::clock::BootInstant;
use crate::directory::{Copies, Replica};
use crate::placement::Extents;
use crate::slab::{Rare, Slab};
use hashbrown::HashTable;
use kvpool_seams::maps::MapHasher;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{ClientId, Code, Key, KeyRef, Length, SegmentId, Version};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;

/// One open put.
#[derive(Clone, Debug)]
pub struct Pending {
    /// The id of the grants.
    pub version: Version,
    /// Length of the block in bytes.
    pub length: Length,
    /// The granted extents.
    pub replicas: Copies,
    /// The end of the grants.
    pub expires: BootInstant,
    /// The length of the soft pin from commit on.
    pub soft_pin: Option<std::time::Duration>,
    /// Whether the block is hard-pinned from commit on.
    pub hard_pin: bool,
    /// Whether the key had another block when the extents were granted, or got one back since.
    pub had_block: bool,
    /// The id of the request with the grant; 0 for none.
    pub request: u64,
    /// The client whose framed connection carried the request; `None` for a put that ends only with
    /// its grants.
    pub writer: Option<ClientId>,
    committing: bool,
}

impl Pending {
    /// The bytes of the granted extents.
    fn footprint(&self) -> u64 {
        Extents::rounded(self.length).0 * self.replicas.len() as u64
    }

    /// A put whose grants for `replicas` were just made.
    pub fn granted(version: Version, length: Length, replicas: Copies) -> Self {
        Self {
            version,
            length,
            replicas,
            expires: BootInstant(u64::MAX),
            soft_pin: None,
            hard_pin: false,
            had_block: false,
            request: 0,
            writer: None,
            committing: false,
        }
    }
}

/// The end of a put. Other puts of its key wait for it.
#[derive(Debug, Default)]
pub struct End {
    over: AtomicBool,
    told: Notify,
}

impl End {
    /// Waits until the put has ended: committed, revoked or expired.
    pub async fn reached(&self) {
        loop {
            let told = self.told.notified();
            if self.over.load(Ordering::Acquire) {
                return;
            }
            told.await;
        }
    }
}

/// Announces the end of a put on drop.
#[derive(Debug, Default)]
struct Watched(Option<Arc<End>>);

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(end) = &self.0 {
            end.over.store(true, Ordering::Release);
            end.told.notify_waiters();
        }
    }
}

/// The slot of an open put. It names the put until the put ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutId(u32);

/// Every open put, by key and by the end of its grants.
#[derive(Debug, Default)]
pub struct Reservations {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Put {
    namespace: NamespaceId,
    key: Key,
    hash: u64,
    expiry_batch: ExpiryBatchId,
    pending: Pending,
    watched: Watched,
}

impl Put {
    fn is_of(&self, namespace: NamespaceId, key: KeyRef<'_>) -> bool {
        self.namespace == namespace && self.key.as_ref() == key
    }
}

/// The end of a batch's grants and the batch's number.
type ExpiryBatchId = (BootInstant, u64);

/// The puts of one batch, which expire together.
#[derive(Debug, Default)]
struct ExpiryBatch {
    /// Slots of the puts. A slot may belong to another put after its own has ended.
    slots: Vec<u32>,
    /// The number of puts that have not ended.
    left: usize,
}

#[derive(Debug, Default)]
struct Inner {
    puts: Slab<Rare<Put>>,
    by_key: HashTable<u32>,
    hasher: MapHasher,
    expiry_batches: BTreeMap<ExpiryBatchId, ExpiryBatch>,
    next_expiry_batch: u64,
    accounts: Arc<Accounts>,
}

impl Inner {
    fn hash(&self, namespace: NamespaceId, key: KeyRef<'_>) -> u64 {
        self.hasher.hash_one((namespace, key))
    }

    fn find(&self, namespace: NamespaceId, key: KeyRef<'_>) -> Option<u32> {
        let hash = self.hash(namespace, key);
        let is = |slot: &u32| self.puts.at(*slot).held().is_of(namespace, key);
        self.by_key.find(hash, is).copied()
    }

    fn put(&self, slot: u32) -> Option<&Put> {
        self.puts.get(slot).map(Rare::held)
    }

    /// Removes a put, but not from its expiry batch.
    fn remove(&mut self, slot: u32) -> Put {
        let put = self.puts.remove(slot).into_held();
        if let Ok(found) = self.by_key.find_entry(put.hash, |other| *other == slot) {
            found.remove();
        }
        let account = self.accounts.of(put.namespace);
        account.take_off(Item::Puts, 1);
        account.take_off(Item::Reserved, put.pending.footprint());
        put
    }

    /// Removes a put, also from its expiry batch.
    fn end(&mut self, slot: u32) -> Pending {
        let put = self.remove(slot);
        if let Some(expiry_batch) = self.expiry_batches.get_mut(&put.expiry_batch) {
            expiry_batch.left -= 1;
            if expiry_batch.left == 0 {
                self.expiry_batches.remove(&put.expiry_batch);
            }
        }
        put.pending
    }
}

/// The reservations, locked for a batch.
pub struct Locked<'a> {
    inner: MutexGuard<'a, Inner>,
    /// The expiry batch of the puts in this batch.
    expiry_batch: Option<ExpiryBatchId>,
}

impl Reservations {
    /// A table without open puts. `accounts` counts the puts that are added.
    pub fn new(accounts: Arc<Accounts>) -> Self {
        let inner = Inner {
            accounts,
            ..Inner::default()
        };
        Self {
            inner: Mutex::new(inner),
        }
    }

    /// Locks all reservations for a batch.
    pub fn lock(&self) -> Locked<'_> {
        Locked {
            inner: self.inner.lock(),
            expiry_batch: None,
        }
    }

    /// The number of open puts.
    pub fn len(&self) -> usize {
        self.inner.lock().puts.len() as usize
    }

    /// True without open puts.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes the puts whose grants have ended, except committing puts.
    pub fn take_expired(&self, now: BootInstant) -> Vec<Pending> {
        let mut inner = self.inner.lock();
        let mut expired = Vec::new();
        let mut committing = Vec::new();
        while let Some(entry) = inner.expiry_batches.first_entry()
            && entry.key().0 <= now
        {
            let (id, expiry_batch) = entry.remove_entry();
            let mut kept = ExpiryBatch::default();
            for slot in expiry_batch.slots {
                match inner.put(slot) {
                    Some(put) if put.expiry_batch != id => {}
                    Some(put) if put.pending.committing => kept.slots.push(slot),
                    Some(_) => expired.push(inner.remove(slot).pending),
                    None => {}
                }
            }
            kept.left = kept.slots.len();
            if kept.left > 0 {
                committing.push((id, kept));
            }
        }
        inner.expiry_batches.extend(committing);
        expired
    }
}

impl Locked<'_> {
    /// True when the key has an open put.
    pub fn is_pending(&self, namespace: NamespaceId, key: KeyRef<'_>) -> bool {
        self.inner.find(namespace, key).is_some()
    }

    /// True when the key has an open put of another version.
    pub fn has_other_put(&self, namespace: NamespaceId, key: KeyRef<'_>, version: Version) -> bool {
        let slot = self.inner.find(namespace, key);
        let put = slot.and_then(|slot| self.inner.put(slot));
        put.is_some_and(|put| put.pending.version != version)
    }

    /// The end of the key's open put.
    pub fn end_of(&mut self, namespace: NamespaceId, key: KeyRef<'_>) -> Option<Arc<End>> {
        let slot = self.inner.find(namespace, key)?;
        let put = self.inner.puts.at_mut(slot).held_mut();
        Some(Arc::clone(put.watched.0.get_or_insert_default()))
    }

    /// The end of the key's put of another version, if that put is committing.
    pub fn end_of_commit(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
    ) -> Option<Arc<End>> {
        let slot = self.inner.find(namespace, key)?;
        let pending = &self.inner.put(slot)?.pending;
        let replaces = pending.committing && pending.version != version;
        replaces.then(|| self.end_of(namespace, key)).flatten()
    }

    /// Notes that memory gets the key's block of this version back. A put of another version then counts it as a block
    /// that the key had. Returns false, and notes nothing, if that put is committing.
    pub fn note_return(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
    ) -> bool {
        let Some(slot) = self.inner.find(namespace, key) else {
            return true;
        };
        let pending = &mut self.inner.puts.at_mut(slot).held_mut().pending;
        if pending.version == version {
            return true;
        }
        pending.had_block |= !pending.committing;
        !pending.committing
    }

    /// Prefetches the puts of some keys into the processor's caches. Without this, puts that
    /// another core granted would be read one cache miss after another.
    pub fn prefetch<'k>(&self, namespace: NamespaceId, keys: impl Iterator<Item = KeyRef<'k>>) {
        let inner = &*self.inner;
        let seen = keys.fold(0, |seen, key| {
            let slot = inner
                .by_key
                .find(inner.hash(namespace, key), |_| true)
                .copied();
            let put = slot.and_then(|slot| inner.put(slot));
            put.map_or(seen, |put| {
                seen ^ put.hash ^ put.pending.version.0 ^ put.pending.expires.0
            })
        });
        std::hint::black_box(seen);
    }

    /// Adds a put. The key must have no open put.
    pub fn insert(&mut self, namespace: NamespaceId, key: KeyRef<'_>, pending: Pending) {
        let inner = &mut *self.inner;
        debug_assert!(
            inner.find(namespace, key).is_none(),
            "a key was reserved twice"
        );
        let expiry_batch = match self.expiry_batch {
            Some(expiry_batch) if expiry_batch.0 == pending.expires => expiry_batch,
            _ => {
                inner.next_expiry_batch += 1;
                *self
                    .expiry_batch
                    .insert((pending.expires, inner.next_expiry_batch))
            }
        };
        let account = inner.accounts.of(namespace);
        account.add(Item::Puts, 1);
        account.add(Item::Reserved, pending.footprint());
        let hash = inner.hash(namespace, key);
        let slot = inner.puts.insert(Rare::Held(Put {
            namespace,
            key: key.to_key(),
            hash,
            expiry_batch,
            pending,
            watched: Watched::default(),
        }));
        let puts = &inner.puts;
        inner
            .by_key
            .insert_unique(hash, slot, |slot| puts.at(*slot).held().hash);
        let expiry_batch = inner.expiry_batches.entry(expiry_batch).or_default();
        expiry_batch.slots.push(slot);
        expiry_batch.left += 1;
    }

    /// Marks a put as committing and returns it, so that it can neither expire nor be revoked.
    ///
    /// # Errors
    ///
    /// [`Code::GrantEnded`] without an open put of this version. [`Code::InProgress`] when the put
    /// is already committing. [`Code::InvalidArgument`] when the length or a segment is not that of
    /// the grants.
    pub fn begin_commit(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        length: Length,
        written: &[SegmentId],
        now: BootInstant,
    ) -> Result<(PutId, Pending), Code> {
        let slot = self.inner.find(namespace, key).ok_or(Code::GrantEnded)?;
        let pending = &mut self.inner.puts.at_mut(slot).held_mut().pending;
        if pending.version != version {
            return Err(Code::GrantEnded);
        }
        if pending.committing {
            return Err(Code::InProgress);
        }
        if pending.expires <= now {
            return Err(Code::GrantEnded);
        }
        let known = |segment: &SegmentId| pending.replicas.iter().any(|r| r.segment == *segment);
        if pending.length != length || !written.iter().all(known) {
            return Err(Code::InvalidArgument);
        }
        pending.committing = true;
        Ok((PutId(slot), pending.clone()))
    }

    /// Prefetches the puts of some ids.
    pub fn prefetch_committing(&self, ids: impl Iterator<Item = PutId>) {
        let seen = ids.fold(0, |seen, PutId(slot)| {
            let put = self.inner.put(slot);
            put.map_or(seen, |put| seen ^ put.hash ^ put.pending.version.0)
        });
        std::hint::black_box(seen);
    }

    /// Ends a committing put.
    pub fn finish(&mut self, id: PutId, version: Version) -> Option<Pending> {
        let Pending {
            version: there,
            committing,
            ..
        } = self.inner.put(id.0)?.pending;
        (there == version && committing).then(|| self.inner.end(id.0))
    }

    /// Ends a put at its owner's request, unless it is committing.
    pub fn revoke(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
    ) -> Option<Pending> {
        let slot = self.inner.find(namespace, key)?;
        let pending = &self.inner.puts.at(slot).held().pending;
        let revocable = pending.version == version && !pending.committing;
        revocable.then(|| self.inner.end(slot))
    }

    /// Ends the put of a key if one of these sorted requests was granted it. The put's owner asks
    /// again, because it never received the grant or could not write under it. A committing put
    /// stays.
    pub fn take_back(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        requests: &[u64],
    ) -> Option<Pending> {
        if requests.is_empty() {
            return None;
        }
        let slot = self.inner.find(namespace, key)?;
        let pending = &self.inner.puts.at(slot).held().pending;
        let is_named = pending.request != 0 && requests.binary_search(&pending.request).is_ok();
        (is_named && !pending.committing).then(|| self.inner.end(slot))
    }

    /// Ends every put with a grant on one of `segments`, except committing puts.
    pub fn take_on(&mut self, segments: &[SegmentId]) -> Vec<Pending> {
        let on = |replica: &Replica| segments.contains(&replica.segment);
        self.take_where(|pending| pending.replicas.iter().any(on))
    }

    /// Whether a put has a grant on one of `segments`, committing puts included.
    pub fn has_on(&self, segments: &[SegmentId]) -> bool {
        let mut puts = (0..self.inner.puts.high()).filter_map(|slot| self.inner.put(slot));
        puts.any(|put| {
            let mut replicas = put.pending.replicas.iter();
            replicas.any(|replica| segments.contains(&replica.segment))
        })
    }

    /// Ends every put of one of `clients`, except committing puts.
    pub fn take_of(&mut self, clients: &[ClientId]) -> Vec<Pending> {
        self.take_where(|pending| pending.writer.is_some_and(|w| clients.contains(&w)))
    }

    /// Passes every open put with its namespace to `see`, committing puts included.
    pub(crate) fn each(&self, mut see: impl FnMut(NamespaceId, &Pending)) {
        let puts = (0..self.inner.puts.high()).filter_map(|slot| self.inner.put(slot));
        puts.for_each(|put| see(put.namespace, &put.pending));
    }

    /// The bytes of all granted extents.
    pub fn bytes(&self) -> u64 {
        let puts = (0..self.inner.puts.high()).filter_map(|slot| self.inner.put(slot));
        puts.map(|put| put.pending.footprint()).sum()
    }

    /// Ends every put of a namespace, except committing puts.
    pub fn take_in(&mut self, namespace: NamespaceId) -> Vec<Pending> {
        self.take_puts(|put| put.namespace == namespace)
    }

    fn take_where(&mut self, ends: impl Fn(&Pending) -> bool) -> Vec<Pending> {
        self.take_puts(|put| ends(&put.pending))
    }

    fn take_puts(&mut self, ends: impl Fn(&Put) -> bool) -> Vec<Pending> {
        let slots: Vec<u32> = (0..self.inner.puts.high())
            .filter(|slot| {
                let put = self.inner.put(*slot);
                put.is_some_and(|put| !put.pending.committing && ends(put))
            })
            .collect();
        slots.into_iter().map(|slot| self.inner.end(slot)).collect()
    }
}

#[cfg(test)]
mod tests;
