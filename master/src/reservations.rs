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
use crate::directory::Replica;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Key, KeyRef, Length, SegmentId, Version};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;

/// One put under way.
#[derive(Clone, Debug)]
pub struct Pending {
    /// The id of its grants.
    pub version: Version,
    /// The bytes of its block.
    pub length: Length,
    /// The extents that it may write.
    pub replicas: Vec<Replica>,
    /// When its grants end.
    pub expires: Millis,
    /// For how long its block is to be evicted last, from commit on.
    pub soft_pin: Option<std::time::Duration>,
    /// Whether its block is never to be evicted.
    pub hard_pin: bool,
    committing: bool,
}

impl Pending {
    /// A put that has just been granted `replicas`.
    pub fn granted(version: Version, length: Length, replicas: Vec<Replica>) -> Self {
        Self {
            version,
            length,
            replicas,
            expires: Millis(u64::MAX),
            soft_pin: None,
            hard_pin: false,
            committing: false,
        }
    }
}

type Owner = (NamespaceId, Key);

/// Every put under way, by key and by the end of its grants.
#[derive(Debug, Default)]
pub struct Reservations {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    by_key: HashMap<Owner, Pending>,
    by_expiry: BTreeSet<(Millis, Version)>,
    owners: HashMap<Version, Owner>,
}

/// The reservations, locked for a batch.
pub struct Locked<'a>(MutexGuard<'a, Inner>);

impl Reservations {
    /// Locks all of them for a batch.
    pub fn lock(&self) -> Locked<'_> {
        Locked(self.inner.lock())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.inner.lock().by_key.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes out those whose grants have ended, except those that are committing.
    pub fn take_expired(&self, now: Millis) -> Vec<Pending> {
        let mut inner = self.inner.lock();
        let mut expired = Vec::new();
        let mut skipped = Vec::new();
        while let Some(&(expires, version)) = inner.by_expiry.first() {
            if expires > now {
                break;
            }
            inner.by_expiry.pop_first();
            let owner = inner.owners.get(&version).cloned();
            let owner = owner.expect("invariant: every expiry has its owner");
            match inner.by_key.entry(owner) {
                Entry::Occupied(entry) if !entry.get().committing => {
                    expired.push(entry.remove());
                    inner.owners.remove(&version);
                }
                _ => skipped.push((expires, version)),
            }
        }
        inner.by_expiry.extend(skipped);
        expired
    }
}

impl Locked<'_> {
    /// Whether a put of the key is under way.
    pub fn is_pending(&self, namespace: NamespaceId, key: KeyRef<'_>) -> bool {
        self.0.by_key.contains_key(&(namespace, key.to_key()))
    }

    /// Adds a put. The key must not be pending.
    pub fn insert(&mut self, namespace: NamespaceId, key: KeyRef<'_>, pending: Pending) {
        let owner = (namespace, key.to_key());
        self.0.by_expiry.insert((pending.expires, pending.version));
        self.0.owners.insert(pending.version, owner.clone());
        let before = self.0.by_key.insert(owner, pending);
        debug_assert!(before.is_none(), "a key was reserved twice");
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
    ) -> Result<Pending, Code> {
        match self.0.by_key.get_mut(&(namespace, key.to_key())) {
            Some(pending) if pending.version == version => {
                if pending.committing {
                    return Err(Code::InProgress);
                }
                if pending.expires <= now {
                    return Err(Code::GrantEnded);
                }
                let known =
                    |segment: &SegmentId| pending.replicas.iter().any(|r| r.segment == *segment);
                if pending.length != length || !written.iter().all(known) {
                    return Err(Code::InvalidArgument);
                }
                pending.committing = true;
                Ok(pending.clone())
            }
            _ => Err(Code::GrantEnded),
        }
    }

    /// Ends a put that committed (`committing`), or that its owner revoked.
    pub fn take(
        &mut self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        committing: bool,
    ) -> Option<Pending> {
        let Entry::Occupied(entry) = self.0.by_key.entry((namespace, key.to_key())) else {
            return None;
        };
        if entry.get().version != version || entry.get().committing != committing {
            return None;
        }
        let pending = entry.remove();
        self.0.by_expiry.remove(&(pending.expires, version));
        self.0.owners.remove(&version);
        Some(pending)
    }

    /// Ends every put that was to write to one of `segments`, except those that are committing.
    pub fn take_on(&mut self, segments: &[SegmentId]) -> Vec<Pending> {
        let inner = &mut *self.0;
        let taken: Vec<Pending> = inner
            .by_key
            .extract_if(|_, pending| {
                !pending.committing
                    && pending
                        .replicas
                        .iter()
                        .any(|r| segments.contains(&r.segment))
            })
            .map(|(_, pending)| pending)
            .collect();
        for pending in &taken {
            inner.by_expiry.remove(&(pending.expires, pending.version));
            inner.owners.remove(&pending.version);
        }
        taken
    }
}
