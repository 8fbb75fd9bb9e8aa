//! Where blocks lie, remembered for as long as the lease that came with the answer would have run.
//!
//! The lease itself ends with the read that asked for it, so a cached location has no lease. It serves only
//! reads that verify the checksum; a view needs a lease. If the extent was freed meanwhile, the checksum
//! differs, and the client asks the master again. At worst a cached location leads to the whole previous
//! version of a block, until the deadline passes. A location is used only in the epoch that gave it.

use crate::clock::BootTime;
use kvpool_seams::maps::MapHasher;
use kvpool_types::{
    Checksum, Epoch, Extent, HostId, Incarnation, Key, Length, NodeName, ReadRight, SegmentId,
    Version,
};
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A store node, as a reply of the master named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KnownNode {
    pub(crate) name: NodeName,
    pub(crate) incarnation: Incarnation,
    pub(crate) data_address: String,
    /// The Unix socket; empty when the node has none.
    pub(crate) shm_path: String,
    pub(crate) host: HostId,
}

/// One replica of a block.
#[derive(Clone, Debug)]
pub(crate) struct LocatedReplica {
    pub(crate) node: Arc<KnownNode>,
    pub(crate) extent: Extent,
    /// The permission to read it, if the node asks for one.
    pub(crate) right: Option<ReadRight>,
}

/// A lease that came with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leased {
    pub(crate) token: u64,
    /// When it ends, counted from when the request was sent.
    pub(crate) until: BootTime,
    pub(crate) ttl: Duration,
    /// The term whose master gave it: the token means nothing to another.
    pub(crate) epoch: Epoch,
    /// No block that it covers has a later version; 0: the master did not say.
    pub(crate) newest: Version,
}

/// Where a block lies.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    pub(crate) epoch: Epoch,
    pub(crate) version: Version,
    pub(crate) checksum: Checksum,
    pub(crate) length: Length,
    pub(crate) replicas: Vec<LocatedReplica>,
    /// `None`: unleased, good for verified copies and nothing else.
    pub(crate) lease: Option<Leased>,
}

impl Leased {
    /// Whether a location may still be taken from the cache: not in the last eighth of the lease.
    pub(crate) fn is_fresh(&self, now: BootTime) -> bool {
        self.until.left(now) > self.ttl / 8
    }

    /// Whether the lease still ran at `now`.
    pub(crate) fn runs(&self, now: BootTime) -> bool {
        !self.until.left(now).is_zero()
    }
}

impl Located {
    /// The replica that lies in `segment`.
    pub(crate) fn replica(&self, segment: SegmentId) -> Option<&LocatedReplica> {
        self.replicas
            .iter()
            .find(|replica| replica.extent.segment == segment)
    }
}

/// A location, without its lease, and that.
#[derive(Clone, Debug)]
struct Remembered {
    located: Arc<Located>,
    lease: Leased,
}

/// The locations that one client remembers.
#[derive(Debug)]
pub(crate) struct Locations {
    entries: Option<moka::sync::Cache<Key, Remembered, MapHasher>>,
    /// Whether anything was ever remembered: a client that only puts has nothing to forget.
    used: AtomicBool,
    /// Raised by every purge. An answer that was asked for before a purge is not remembered after
    /// it.
    purges: RwLock<u64>,
}

/// When a lookup was begun, in purges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun(u64);

impl Locations {
    /// Room for `capacity` locations; 0: none are kept.
    pub(crate) fn new(capacity: u64) -> Self {
        Self {
            entries: (capacity > 0).then(|| {
                moka::sync::Cache::builder()
                    .max_capacity(capacity)
                    .build_with_hasher(MapHasher::default())
            }),
            used: AtomicBool::new(false),
            purges: RwLock::new(0),
        }
    }

    fn used_entries(&self) -> Option<&moka::sync::Cache<Key, Remembered, MapHasher>> {
        let entries = self.entries.as_ref();
        entries.filter(|_| self.used.load(Ordering::Acquire))
    }

    /// What is known of `key` and may be used now, in `epoch`.
    pub(crate) fn get(&self, key: &Key, epoch: Epoch, now: BootTime) -> Option<Arc<Located>> {
        let entries = self.used_entries()?;
        let Remembered { located, lease } = entries.get(key)?;
        if lease.is_fresh(now) && located.epoch == epoch {
            return Some(located);
        }
        entries.invalidate(key);
        None
    }

    /// To be asked before a lookup is sent.
    pub(crate) fn begin(&self) -> Begun {
        Begun(*self.purges.read())
    }

    /// Remembers the answer of a lookup, unless something was purged since it began.
    pub(crate) fn insert(&self, begun: Begun, key: &Key, located: &Arc<Located>) {
        if let (Some(entries), Some(lease)) = (&self.entries, located.lease) {
            let purges = self.purges.read();
            if *purges == begun.0 {
                self.used.store(true, Ordering::Release);
                let located = Arc::new(Located {
                    lease: None,
                    ..(**located).clone()
                });
                entries.insert(key.clone(), Remembered { located, lease });
            }
        }
    }

    /// Forgets one key because what was remembered of it did not work.
    pub(crate) fn forget(&self, key: &Key) {
        if let Some(entries) = self.used_entries() {
            entries.invalidate(key);
        }
    }

    /// Forgets keys that this client changed, and every answer still on its way.
    pub(crate) fn purge<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) {
        *self.purges.write() += 1;
        for key in keys {
            self.forget(key);
        }
    }

    /// Forgets everything, and every answer still on its way.
    pub(crate) fn purge_all(&self) {
        *self.purges.write() += 1;
        if let Some(entries) = &self.entries {
            entries.invalidate_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(epoch: u64, until: BootTime) -> Arc<Located> {
        Arc::new(Located {
            epoch: Epoch(epoch),
            version: Version(1),
            checksum: Checksum(0),
            length: Length(1),
            replicas: Vec::new(),
            lease: Some(Leased {
                token: 1,
                until,
                ttl: Duration::from_secs(8),
                epoch: Epoch(epoch),
                newest: Version(1),
            }),
        })
    }

    fn key() -> Key {
        Key::parse("k").unwrap()
    }

    #[test]
    fn a_location_is_used_only_before_its_lease_ends() {
        let cache = Locations::new(10);
        let now = BootTime::now();
        let until = now.after(Duration::from_secs(8));
        cache.insert(cache.begin(), &key(), &located(1, until));
        let at = |secs| now.after(Duration::from_secs(secs));
        assert!(cache.get(&key(), Epoch(1), at(6)).is_some());
        assert!(cache.get(&key(), Epoch(1), at(7)).is_none());
        // It is gone for good, not merely hidden.
        assert!(cache.get(&key(), Epoch(1), now).is_none());
    }

    #[test]
    fn a_location_of_another_epoch_is_not_used() {
        let cache = Locations::new(10);
        let now = BootTime::now();
        let until = now.after(Duration::from_secs(8));
        cache.insert(cache.begin(), &key(), &located(1, until));
        assert!(cache.get(&key(), Epoch(2), now).is_none());
    }

    #[test]
    fn an_unleased_location_is_not_remembered() {
        let cache = Locations::new(10);
        let now = BootTime::now();
        let unleased = Arc::new(Located {
            lease: None,
            ..(*located(1, now)).clone()
        });
        cache.insert(cache.begin(), &key(), &unleased);
        assert!(cache.get(&key(), Epoch(1), now).is_none());
    }

    #[test]
    fn an_answer_that_a_purge_overtook_is_not_remembered() {
        let cache = Locations::new(10);
        let now = BootTime::now();
        let until = now.after(Duration::from_secs(8));
        let begun = cache.begin();
        cache.purge([&key()]);
        cache.insert(begun, &key(), &located(1, until));
        assert!(cache.get(&key(), Epoch(1), now).is_none());
        cache.insert(cache.begin(), &key(), &located(1, until));
        assert!(cache.get(&key(), Epoch(1), now).is_some());
        cache.purge([&key()]);
        assert!(cache.get(&key(), Epoch(1), now).is_none());
    }

    #[test]
    fn locations_that_are_never_read_again_take_bounded_memory() {
        let cache = Locations::new(100);
        let until = BootTime::now().after(Duration::from_secs(8));
        for n in 0..10_000 {
            let key = Key::parse(&format!("k{n}")).unwrap();
            cache.insert(cache.begin(), &key, &located(1, until));
        }
        let entries = cache.entries.as_ref().unwrap();
        entries.run_pending_tasks();
        assert!(entries.entry_count() <= 100, "{}", entries.entry_count());
    }
}
