//! A cache of block locations. An entry lives as long as the lease of its lookup would have run.
//!
//! The read that asked for the lease releases it, so no lease protects a cached location. Only reads that
//! verify the checksum use the cache; a view needs a lease. If the extent was freed meanwhile, the checksum
//! differs, and the client asks the master again. At worst, until the deadline passes, a cached location
//! leads to the whole previous version of a block. A location is used only in the epoch that gave it.

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

/// A store node, as a reply of the master describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KnownNode {
    pub(crate) name: NodeName,
    pub(crate) incarnation: Incarnation,
    pub(crate) data_address: String,
    /// The path of the node's Unix socket; empty when it has none.
    pub(crate) shm_path: String,
    pub(crate) host: HostId,
}

/// One replica of a block.
#[derive(Clone, Debug)]
pub(crate) struct LocatedReplica {
    pub(crate) node: Arc<KnownNode>,
    pub(crate) extent: Extent,
    /// The permission to read the replica, if the node requires one.
    pub(crate) right: Option<ReadRight>,
}

/// The lease in a lookup's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leased {
    pub(crate) token: u64,
    /// When the lease ends, counted from when the request was sent.
    pub(crate) until: BootTime,
    pub(crate) ttl: Duration,
    /// The term whose master gave the lease. Other masters do not know its token.
    pub(crate) epoch: Epoch,
    /// An upper bound of the versions of the leased blocks; 0 when the master did not state it.
    pub(crate) newest: Version,
}

/// The location of a block: its version and replicas.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    pub(crate) epoch: Epoch,
    pub(crate) version: Version,
    pub(crate) checksum: Checksum,
    pub(crate) length: Length,
    pub(crate) replicas: Vec<LocatedReplica>,
    /// The lease of the lookup. `None` for a location without a lease, which serves verified reads only.
    pub(crate) lease: Option<Leased>,
}

impl Leased {
    /// Whether the location may be taken from the cache. It may not in the last eighth of the lease TTL.
    pub(crate) fn is_fresh(&self, now: BootTime) -> bool {
        self.until.left(now) > self.ttl / 8
    }

    /// Whether the lease was unexpired at `now`.
    pub(crate) fn runs(&self, now: BootTime) -> bool {
        !self.until.left(now).is_zero()
    }
}

impl Located {
    /// The replica in `segment`.
    pub(crate) fn replica(&self, segment: SegmentId) -> Option<&LocatedReplica> {
        self.replicas
            .iter()
            .find(|replica| replica.extent.segment == segment)
    }
}

/// A cached location, stored without its lease, and the lease's end.
#[derive(Clone, Debug)]
struct Remembered {
    located: Arc<Located>,
    lease: Leased,
}

/// The locations that one client remembers.
#[derive(Debug)]
pub(crate) struct Locations {
    entries: Option<moka::sync::Cache<Key, Remembered, MapHasher>>,
    /// Whether the cache was ever used. A client that only puts has nothing to purge.
    used: AtomicBool,
    /// The number of purges so far. The answer of a lookup that began before a purge is not cached after it.
    purges: RwLock<u64>,
}

/// The number of purges when a lookup began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun(u64);

impl Locations {
    /// A cache for `capacity` locations; 0 disables it.
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

    /// The cached location of `key`, if it may be used in `epoch` at `now`.
    pub(crate) fn get(&self, key: &Key, epoch: Epoch, now: BootTime) -> Option<Arc<Located>> {
        let entries = self.used_entries()?;
        let Remembered { located, lease } = entries.get(key)?;
        if lease.is_fresh(now) && located.epoch == epoch {
            return Some(located);
        }
        entries.invalidate(key);
        None
    }

    /// Marks the beginning of a lookup. Call this before the request is sent.
    pub(crate) fn begin(&self) -> Begun {
        Begun(*self.purges.read())
    }

    /// Caches the answer of a lookup, unless a purge happened since the lookup began.
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

    /// Drops the location of one key, because a read at this location failed.
    pub(crate) fn forget(&self, key: &Key) {
        if let Some(entries) = self.used_entries() {
            entries.invalidate(key);
        }
    }

    /// Drops the locations of keys that this client changed. Answers of lookups in progress are not
    /// cached.
    pub(crate) fn purge<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) {
        *self.purges.write() += 1;
        for key in keys {
            self.forget(key);
        }
    }

    /// Drops all locations. Answers of lookups in progress are not cached.
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
        // The location was removed; it is not merely too old to use.
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
