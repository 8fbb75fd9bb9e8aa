//! The SSD tier: the blocks with a copy on a medium, and the media.
//!
//! ```text
//!  memory   Directory ──┐
//!                       ├── one key, one version: a block may be in one of them or in both
//!  media    Tier ───────┘
//!            ├─ Directory   where each copy lies
//!            └─ Medium      ranges, zones, holder
//! ```
//!
//! The tier has a directory of its own. So eviction from memory never examines a block that lies
//! on a medium only, and a lookup in memory costs what it costs without media. A copy on a medium
//! is a [`Commit`] record whose segment is on a medium.
//!
//! ADR 0037 says why there are two directories.
//!
//! **Architecture Invariant:** the log decides which copy is current. Copies enter the tier in the
//! order of the log. A commit of a later version removes the earlier copy in the same order. So a
//! removed or replaced block never returns.
//!
//! **Architecture Invariant:** a range is taken again only after the removal of its last copy is
//! durable, and after no transfer uses it.

mod medium;
mod ring;

pub use medium::{Holder, Medium};
pub use ring::{Ring, Taken};

use crate::clock::BootInstant;
use crate::directory::{
    self, BlockId, BlockRef, Copies, Directory, NewBlock, Policy, Removal, Removed, Replica,
    UNPLACED, Verdict,
};
use crate::store::record::{self, Commit};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{KeyRef, SegmentId, Version};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The blocks on media, and the media.
#[derive(Debug)]
pub struct Tier {
    directory: Directory,
    media: RwLock<BTreeMap<SegmentId, Arc<Medium>>>,
    /// Whether there is a medium. Every call of a client asks, so it needs no lock.
    has_media: AtomicBool,
}

impl Tier {
    /// A tier without media. Its directory has the shards and the ticks of the memory's directory,
    /// which has the same seed.
    pub fn new(options: directory::Options, start: BootInstant, memory: &Directory) -> Self {
        // The order of eviction is the order of the zones, so the directory keeps no chains.
        let options = directory::Options {
            policy: Policy::Lru,
            ..options
        };
        Self {
            directory: Directory::new(options, start).as_tier_of(memory),
            media: RwLock::default(),
            has_media: AtomicBool::new(false),
        }
    }

    /// True when a commit is the record of a copy on a medium.
    pub fn is_about(commit: &Commit) -> bool {
        let first = commit.replicas.first();
        first.is_some_and(|(segment, _)| segment.is_on_medium())
    }

    /// The blocks with a copy on a medium.
    pub const fn directory(&self) -> &Directory {
        &self.directory
    }

    /// True if the tier never had a medium. Calls then skip it.
    pub fn is_empty(&self) -> bool {
        !self.has_media.load(Ordering::Acquire)
    }

    /// Every medium, by the id of its segment.
    pub fn media(&self) -> Vec<Arc<Medium>> {
        self.media.read().values().cloned().collect()
    }

    /// The medium with this segment.
    pub fn medium(&self, id: SegmentId) -> Option<Arc<Medium>> {
        self.media.read().get(&id).cloned()
    }

    /// Begins a term: from now on media are written.
    pub fn begin_term(&self) {
        for medium in self.media() {
            medium.begin_term(self.directory.next_tick());
        }
    }

    /// Records that a block of this version has left memory, with the block's last use. Returns
    /// false if the block has no copy.
    pub fn left_memory(&self, left: &Removed) -> bool {
        let mut has_copy = false;
        let key = left.key.as_ref();
        self.directory.visit(left.namespace, &[key], |_, block| {
            let copy = block.filter(|block| block.version() == left.version);
            if let Some(mut copy) = copy {
                has_copy = true;
                copy.touch(left.tick);
            }
        });
        has_copy
    }

    /// Adds a medium, or changes the medium with the same segment. An impossible record is logged
    /// and ignored, and so is every copy on the medium.
    pub fn set_medium(&self, record: record::Medium) {
        if let Some(known) = self.medium(record.id) {
            known.update(record);
            return;
        }
        let (id, name) = (record.id, record.medium);
        match Medium::new(record, self.directory.accounts()) {
            Some(medium) => {
                self.media.write().insert(id, Arc::new(medium));
                self.has_media.store(true, Ordering::Release);
            }
            None => tracing::error!(medium = %name, segment = %id,
                "medium left out: its zones do not fit its size"),
        }
    }

    /// Drops a medium and the copies on it. Returns the number of copies.
    pub fn drop_medium(&self, id: SegmentId) -> usize {
        let Some(medium) = self.media.write().remove(&id) else {
            return 0;
        };
        medium.extents().close_ledger();
        // `has_media` stays set: removals on their way to the log rely on it.
        let mut copies = 0;
        let mut place = Some(0);
        while let Some(from) = place {
            let extents = || medium.extents();
            let (dropped, next) = self
                .directory
                .drop_segment(id, extents, from, DROP_STEP, |_| {});
            copies += dropped.len();
            place = next;
        }
        copies
    }

    /// Adds a copy at its logged extent. It replaces the key's copy of this version or of an
    /// earlier one. Readers find one of the two copies at every moment. If the same copy is already
    /// at that extent, nothing changes: a standby may read a record twice. Returns false if the key
    /// has a later copy, or if the extent is not free.
    pub fn publish(&self, commit: Commit) -> bool {
        let Some((segment, offset)) = commit.replicas.first().copied() else {
            return false;
        };
        let Some(medium) = self.medium(segment) else {
            // An unknown medium has been dropped, and its copies with it.
            self.remove(commit.namespace, commit.key.as_ref(), |version| {
                version < commit.version
            });
            return false;
        };
        let (key, version) = (commit.key.clone(), commit.version);
        let namespace = commit.namespace;
        let take = || medium.allocate_at(offset, commit.length, namespace);
        let take_from_itself = || {
            // If a record is read again, the copy is already at this extent.
            self.remove(namespace, key.as_ref(), |other| other <= version);
            take()
        };
        let Some(extent) = take().or_else(take_from_itself) else {
            tracing::error!(key = %key.shown(), %segment, %offset,
                "copy dropped from the metadata: its range is not free or exceeds its medium");
            return false;
        };
        let replica = Replica {
            segment,
            extent,
            offset,
        };
        let tick = medium.used_at(offset, self.directory.ticks(1).of(0));
        let is_pinned = commit.hard_pin;
        let block = block_at(commit, replica, tick);
        let published = self.directory.publish([block]).into_iter().next();
        let Some((id, replaced)) = published.and_then(|new| Some((new.id?, new.replaced))) else {
            medium.free(&replica);
            return false;
        };
        medium.set_owner(extent, id, is_pinned);
        if let Some(replaced) = replaced {
            self.free(&replaced.replicas);
        }
        true
    }

    /// Removes a key's copy if `is_it` accepts its version, and frees its range.
    pub fn remove(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        is_it: impl Fn(Version) -> bool,
    ) -> Option<Removed> {
        if self.is_empty() {
            return None;
        }
        let allow = |block: &BlockRef<'_>| match is_it(block.version()) {
            true => Verdict::Remove,
            false => Verdict::Keep,
        };
        let outcomes = self.directory.remove(namespace, &[key], allow);
        let removed = outcomes.into_iter().find_map(|outcome| match outcome {
            Removal::Removed(removed) => Some(removed),
            Removal::Kept | Removal::Missing => None,
        })?;
        self.free(&removed.replicas);
        Some(removed)
    }

    /// Removes the copy in a slot if it has this version and `allow` accepts it, and frees its range.
    pub fn remove_copy(
        &self,
        copy: BlockId,
        version: Version,
        allow: impl FnOnce(&BlockRef<'_>) -> Verdict,
    ) -> Option<Removed> {
        let removed = self.directory.remove_by_id(copy, version, allow)?;
        self.free(&removed.replicas);
        Some(removed)
    }

    /// Removes the copy that a record names, and frees its range.
    pub fn copy_gone(&self, gone: &record::ReplicaGone) -> bool {
        let key = gone.key.as_ref();
        let is_it = |replica: &Replica| gone.is_at(replica);
        let dropped = self
            .directory
            .drop_where(gone.namespace, key, gone.version, is_it);
        let Some(dropped) = dropped else { return false };
        self.free(&[dropped.replica]);
        true
    }

    fn free(&self, copies: &[Replica]) {
        for copy in copies.iter().filter(|copy| copy.extent != UNPLACED) {
            if let Some(medium) = self.medium(copy.segment) {
                medium.free(copy);
            }
        }
    }

    /// The records of a shard's copies, for a snapshot.
    pub fn snapshot(&self, shard: u32) -> impl Iterator<Item = record::Record> {
        let blocks = self.directory.snapshot(shard).into_iter();
        blocks.map(|block| record::Record::Commit(block.into()))
    }
}

/// The slots of a medium's table that one step of dropping the medium examines.
const DROP_STEP: u32 = 4096;

/// The directory's entry of a copy.
fn block_at(commit: Commit, replica: Replica, tick: directory::Tick) -> NewBlock {
    NewBlock {
        namespace: commit.namespace,
        key: commit.key,
        version: commit.version,
        length: commit.length,
        checksum: commit.checksum,
        replicas: Copies::from_slice(&[replica]),
        parent: None,
        soft_pin_until: None,
        hard_pin: commit.hard_pin,
        tick,
        leased_until: None,
    }
}

/// Loading: copies arrive before their ranges are allocated, as blocks in memory do.
impl Tier {
    /// Enters a copy without allocating its range.
    pub(crate) fn stage(&self, commit: Commit) {
        let Some((segment, offset)) = commit.replicas.first().copied() else {
            return;
        };
        let (key, version) = (commit.key.clone(), commit.version);
        // A copy that moved has two records of one version. The later record is the right one.
        self.stage_out(commit.namespace, key.as_ref(), |other| other <= version);
        let replica = Replica {
            segment,
            extent: UNPLACED,
            offset,
        };
        let tick = self.directory.ticks(1).of(0);
        self.directory.publish([block_at(commit, replica, tick)]);
    }

    /// Removes a staged copy if `is_it` accepts its version.
    pub(crate) fn stage_out(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        is_it: impl Fn(Version) -> bool,
    ) {
        let allow = |block: &BlockRef<'_>| match is_it(block.version()) {
            true => Verdict::Remove,
            false => Verdict::Keep,
        };
        self.directory.remove(namespace, &[key], allow);
    }

    /// Removes every copy of a durable shard.
    pub(crate) fn forget_shard(&self, shard: u32) {
        self.directory.forget_shard(shard);
    }

    /// Takes the ranges of all staged copies. A copy on an absent medium, or one whose range another
    /// copy has, is dropped.
    pub(crate) fn place_staged(&self) {
        for place in self.directory.replica_starts() {
            let Some(found) = self.directory.summary(place.block) else {
                continue;
            };
            let medium = self.medium(place.segment);
            let extent = medium
                .as_ref()
                .and_then(|medium| medium.allocate_at(place.offset, found.length, found.namespace));
            match (medium, extent) {
                (Some(medium), Some(extent)) => {
                    medium.set_owner(extent, place.block, found.is_pinned);
                    self.directory.set_extent(&place, extent);
                }
                (medium, _) => {
                    let dropped = self.directory.drop_replica_at(&place);
                    if let (Some(dropped), Some(_)) = (dropped, medium) {
                        tracing::error!(key = %dropped.key.shown(), segment = %place.segment, offset = %place.offset,
                            "copy dropped from the metadata: its range overlaps another copy or exceeds its medium");
                    }
                }
            }
        }
        self.directory.order_by_version();
    }
}
