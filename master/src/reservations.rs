//! Puts that have been granted room and have not committed.
//!
//! ```text
//!            insert                 begin_commit            finish
//!  (nothing) ───────► Granted ───────────────────► Committing ─────► (block is in the directory)
//!                       │ revoke, expire
//!                       ▼
//!                   extents to quarantine
//! ```
//!
//! **Architecture Invariant:** a commit publishes its block before its reservation ends, so whoever
//! finds neither under the reservation's lock knows that the key is free.

use crate::clock::Millis;
use crate::directory::slab::{Rare, Slab};
use crate::directory::{Copies, Replica};
use hashbrown::{DefaultHashBuilder, HashTable};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{ClientId, Code, Key, KeyRef, Length, SegmentId, Version};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;

/// One put under way.
#[derive(Clone, Debug)]
pub struct Pending {
    /// The id of its grants.
    pub version: Version,
    /// The bytes of its block.
    pub length: Length,
    /// The extents that it may write.
    pub replicas: Copies,
    /// When its grants end.
    pub expires: Millis,
    /// For how long its block is to be evicted last, from commit on.
    pub soft_pin: Option<std::time::Duration>,
    /// Whether its block is never to be evicted.
    pub hard_pin: bool,
    /// What names the request that it was granted to; 0: nothing.
    pub request: u64,
    /// Over whose framed connection it was granted; `None`: it ends with its grants alone.
    pub writer: Option<ClientId>,
    committing: bool,
}

impl Pending {
    /// A put that has just been granted `replicas`.
    pub fn granted(version: Version, length: Length, replicas: Copies) -> Self {
        Self {
            version,
            length,
            replicas,
            expires: Millis(u64::MAX),
            soft_pin: None,
            hard_pin: false,
            request: 0,
            writer: None,
            committing: false,
        }
    }
}

/// The end of a put, for those who wait for its key.
#[derive(Debug, Default)]
pub struct End {
    over: AtomicBool,
    told: Notify,
}

impl End {
    /// Waits until the put has ended, in whatever way.
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

/// Tells the end of a put when the put is taken out.
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

/// The place of a put among those under way. It names the put until that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutId(u32);

/// Every put under way, by key and by the end of its grants.
#[derive(Debug, Default)]
pub struct Reservations {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Put {
    namespace: NamespaceId,
    key: Key,
    hash: u64,
    lot: LotId,
    pending: Pending,
    watched: Watched,
}

impl Put {
    fn is_of(&self, namespace: NamespaceId, key: KeyRef<'_>) -> bool {
        self.namespace == namespace && self.key.as_ref() == key
    }
}

/// A lot by the end of its grants, and then by its number.
type LotId = (Millis, u64);

/// The puts that one batch was granted together: they expire together.
#[derive(Debug, Default)]
struct Lot {
    /// The places of its puts; those that have ended since may be others' now.
    places: Vec<u32>,
    /// How many have not ended.
    left: usize,
}

#[derive(Debug, Default)]
struct Inner {
    puts: Slab<Rare<Put>>,
    by_key: HashTable<u32>,
    hasher: DefaultHashBuilder,
    lots: BTreeMap<LotId, Lot>,
    next_lot: u64,
}

impl Inner {
    fn hash(&self, namespace: NamespaceId, key: KeyRef<'_>) -> u64 {
        self.hasher.hash_one((namespace, key))
    }

    fn find(&self, namespace: NamespaceId, key: KeyRef<'_>) -> Option<u32> {
        let hash = self.hash(namespace, key);
        let is = |place: &u32| self.puts.at(*place).held().is_of(namespace, key);
        self.by_key.find(hash, is).copied()
    }

    fn put(&self, place: u32) -> Option<&Put> {
        self.puts.get(place).map(Rare::held)
    }

    /// Takes a put out, but for its place in its lot.
    fn remove(&mut self, place: u32) -> Put {
        let put = self.puts.remove(place).into_held();
        if let Ok(found) = self.by_key.find_entry(put.hash, |other| *other == place) {
            found.remove();
        }
        put
    }

    /// Takes a put out.
    fn end(&mut self, place: u32) -> Pending {
        let put = self.remove(place);
        if let Some(lot) = self.lots.get_mut(&put.lot) {
            lot.left -= 1;
            if lot.left == 0 {
                self.lots.remove(&put.lot);
            }
        }
        put.pending
    }
}

/// The reservations, locked for a batch.
pub struct Locked<'a> {
    inner: MutexGuard<'a, Inner>,
    /// The lot that puts of this batch go into.
    lot: Option<LotId>,
}

impl Reservations {
    /// Locks all of them for a batch.
    pub fn lock(&self) -> Locked<'_> {
        Locked {
            inner: self.inner.lock(),
            lot: None,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.inner.lock().puts.len() as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes out those whose grants have ended, except those that are committing.
    pub fn take_expired(&self, now: Millis) -> Vec<Pending> {
        let mut inner = self.inner.lock();
        let mut expired = Vec::new();
        let mut committing = Vec::new();
        while let Some(entry) = inner.lots.first_entry()
            && entry.key().0 <= now
        {
            let (id, lot) = entry.remove_entry();
            let mut kept = Lot::default();
            for place in lot.places {
                match inner.put(place) {
                    Some(put) if put.lot != id => {}
                    Some(put) if put.pending.committing => kept.places.push(place),
                    Some(_) => expired.push(inner.remove(place).pending),
                    None => {}
                }
            }
            kept.left = kept.places.len();
            if kept.left > 0 {
                committing.push((id, kept));
            }
        }
        inner.lots.extend(committing);
        expired
    }
}

impl Locked<'_> {
    /// Whether a put of the key is under way.
    pub fn is_pending(&self, namespace: NamespaceId, key: KeyRef<'_>) -> bool {
        self.inner.find(namespace, key).is_some()
    }

    /// The end of the put of the key that is under way.
    pub fn end_of(&mut self, namespace: NamespaceId, key: KeyRef<'_>) -> Option<Arc<End>> {
        let place = self.inner.find(namespace, key)?;
        let put = self.inner.puts.at_mut(place).held_mut();
        Some(Arc::clone(put.watched.0.get_or_insert_default()))
    }

    /// Looks at the puts of some keys, for nothing but to have them in the processor's caches: of a
    /// batch that was granted on another core each would else be waited for alone.
    pub fn look_at<'k>(&self, namespace: NamespaceId, keys: impl Iterator<Item = KeyRef<'k>>) {
        let inner = &*self.inner;
        let seen = keys.fold(0, |seen, key| {
            let place = inner
                .by_key
                .find(inner.hash(namespace, key), |_| true)
                .copied();
            let put = place.and_then(|place| inner.put(place));
            put.map_or(seen, |put| {
                seen ^ put.hash ^ put.pending.version.0 ^ put.pending.expires.0
            })
        });
        std::hint::black_box(seen);
    }

    /// Adds a put. The key must not be pending.
    pub fn insert(&mut self, namespace: NamespaceId, key: KeyRef<'_>, pending: Pending) {
        let inner = &mut *self.inner;
        debug_assert!(
            inner.find(namespace, key).is_none(),
            "a key was reserved twice"
        );
        let lot = match self.lot {
            Some(lot) if lot.0 == pending.expires => lot,
            _ => {
                inner.next_lot += 1;
                *self.lot.insert((pending.expires, inner.next_lot))
            }
        };
        let hash = inner.hash(namespace, key);
        let place = inner.puts.insert(Rare::Held(Put {
            namespace,
            key: key.to_key(),
            hash,
            lot,
            pending,
            watched: Watched::default(),
        }));
        let puts = &inner.puts;
        inner
            .by_key
            .insert_unique(hash, place, |place| puts.at(*place).held().hash);
        let lot = inner.lots.entry(lot).or_default();
        lot.places.push(place);
        lot.left += 1;
    }

    /// Marks a put as committing and returns it, so that it can neither expire nor be revoked.
    pub fn begin_commit(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        length: Length,
        written: &[SegmentId],
        now: Millis,
    ) -> Result<(PutId, Pending), Code> {
        let place = self.inner.find(namespace, key).ok_or(Code::GrantEnded)?;
        let pending = &mut self.inner.puts.at_mut(place).held_mut().pending;
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
        Ok((PutId(place), pending.clone()))
    }

    /// The same of puts that are committing.
    pub fn look_at_committing(&self, ids: impl Iterator<Item = PutId>) {
        let seen = ids.fold(0, |seen, PutId(place)| {
            let put = self.inner.put(place);
            put.map_or(seen, |put| seen ^ put.hash ^ put.pending.version.0)
        });
        std::hint::black_box(seen);
    }

    /// Ends a put that was committing.
    pub fn finish(&mut self, id: PutId, version: Version) -> Option<Pending> {
        let Pending {
            version: there,
            committing,
            ..
        } = self.inner.put(id.0)?.pending;
        (there == version && committing).then(|| self.inner.end(id.0))
    }

    /// Ends a put that its owner revoked; not one that is committing.
    pub fn revoke(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
    ) -> Option<Pending> {
        let place = self.inner.find(namespace, key)?;
        let pending = &self.inner.puts.at(place).held().pending;
        let revocable = pending.version == version && !pending.committing;
        revocable.then(|| self.inner.end(place))
    }

    /// Ends the put of a key that was granted to one of these requests, which are sorted: its owner never heard of the
    /// grant. Not one that is committing.
    pub fn take_lost(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        requests: &[u64],
    ) -> Option<Pending> {
        if requests.is_empty() {
            return None;
        }
        let place = self.inner.find(namespace, key)?;
        let pending = &self.inner.puts.at(place).held().pending;
        let is_lost = pending.request != 0 && requests.binary_search(&pending.request).is_ok();
        (is_lost && !pending.committing).then(|| self.inner.end(place))
    }

    /// Ends every put that was to write to one of `segments`, except those that are committing.
    pub fn take_on(&mut self, segments: &[SegmentId]) -> Vec<Pending> {
        let on = |replica: &Replica| segments.contains(&replica.segment);
        self.take_where(|pending| pending.replicas.iter().any(on))
    }

    /// Ends every put of one of `clients`, except those that are committing.
    pub fn take_of(&mut self, clients: &[ClientId]) -> Vec<Pending> {
        self.take_where(|pending| pending.writer.is_some_and(|w| clients.contains(&w)))
    }

    fn take_where(&mut self, ends: impl Fn(&Pending) -> bool) -> Vec<Pending> {
        let places: Vec<u32> = (0..self.inner.puts.high())
            .filter(|place| {
                let put = self.inner.put(*place);
                put.is_some_and(|put| !put.pending.committing && ends(&put.pending))
            })
            .collect();
        places
            .into_iter()
            .map(|place| self.inner.end(place))
            .collect()
    }
}

#[cfg(test)]
mod tests;
