//! Loads the metadata shard by shard, directly into the directory. No block is in memory twice.
//!
//! ```text
//!  snapshots ─► directory (extents not allocated) ─► parents linked ─► log ─► extents allocated ─► Standby
//! ```
//!
//! Snapshots have different positions in the log. So during the load two blocks may claim the same range, or
//! a block may name a segment that is gone. At the end of the log neither is possible, and the extents are
//! allocated then.
//!
//! ADR 0021 says why extents are allocated last.

use super::freed_ranges::FreedRanges;
use crate::clock::BootInstant;
use crate::directory::{
    self, Added, BlockId, Copies, Directory, NewBlock, Published, Removal, Removed, Replica,
    UNPLACED, Verdict,
};
use crate::namespaces::Namespaces;
use crate::store::record::{self, Commit, LeasedRanges, Record, UnleasedRanges};
use crate::store::{LogSeq, RecoveryError, ShardIndex, Target};
use crate::tier::Tier;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, KeyRef, Length, SegmentId, Version};
use std::collections::BTreeMap;

/// The number of blocks that are published together.
const BATCH: usize = 1024;

/// The parent of a block from a snapshot. The parent's shard may not be loaded yet.
struct Parent {
    namespace: NamespaceId,
    block: BlockId,
    version: Version,
    key: Key,
}

/// The extents on which leases ran at one position of the log. Leases of earlier positions have ended, or
/// their extents are in the log or in this list.
#[derive(Default)]
struct Leased {
    at: LogSeq,
    ranges: Vec<LeasedRanges>,
    /// Whether the load has passed the position and added the extents.
    is_added: bool,
}

/// The state of a load.
pub(super) struct Loading {
    options: directory::Options,
    start: BootInstant,
    pub(super) directory: Directory,
    pub(super) tier: Tier,
    pub(super) seed: Option<u64>,
    pub(super) versions: Version,
    pub(super) namespaces: Namespaces,
    pub(super) segments: BTreeMap<SegmentId, record::Segment>,
    /// Whether the load has found a copy on a medium.
    has_copies: bool,
    pub(super) media: BTreeMap<SegmentId, record::Medium>,
    pub(super) next_segment: u32,
    pub(super) dropped: Vec<record::IncarnationDropped>,
    /// The extents of removed blocks that the log and the snapshots still name. Leases on them may run.
    pub(super) left: FreedRanges,
    /// The list of the latest snapshot that has one.
    leased: Leased,
    /// The list in the snapshot that is being read.
    leased_there: Vec<LeasedRanges>,
    /// The parents of the blocks in each shard's snapshot.
    parents: BTreeMap<ShardIndex, Vec<Parent>>,
    /// The parents that are in no snapshot. The log may have them, since a shard's snapshot may be older than
    /// that of its children.
    absent_parents: Vec<Parent>,
    /// The commits that are published next, together.
    batch: Vec<Commit>,
    /// The highest version in the batch. The log has commits in the order in which they ended, not of their
    /// versions.
    highest: Version,
    /// The shard whose snapshot the batch is from; `None` for the log.
    batch_of: Option<ShardIndex>,
}

impl Loading {
    /// An empty load. The directory's seed is `guess` until a stored seed is read.
    pub(super) fn new(options: directory::Options, start: BootInstant) -> Self {
        let directory = Directory::new(options, start);
        Self {
            options,
            start,
            tier: Tier::new(options, start, &directory),
            directory,
            seed: None,
            versions: Version(0),
            namespaces: Namespaces::default(),
            segments: BTreeMap::new(),
            has_copies: false,
            media: BTreeMap::new(),
            next_segment: 1,
            dropped: Vec::new(),
            left: FreedRanges::default(),
            leased: Leased::default(),
            leased_there: Vec::new(),
            parents: BTreeMap::new(),
            absent_parents: Vec::new(),
            batch: Vec::new(),
            highest: Version(0),
            batch_of: None,
        }
    }

    /// Publishes the remaining commits.
    pub(super) fn finish(&mut self) {
        self.flush();
        let absent = std::mem::take(&mut self.absent_parents);
        self.link_parents(std::iter::once(absent));
        self.add_leased();
    }

    /// Links blocks to their parents, if the parents are loaded.
    fn link_parents(&mut self, parents: impl Iterator<Item = Vec<Parent>>) {
        let found = parents.map(|of_shard| {
            // The matches get a list of their own. A list that is filtered in place would keep the memory of
            // all keys.
            let mut found = Vec::with_capacity(of_shard.len());
            for parent in of_shard {
                match self.directory.find(parent.namespace, parent.key.as_ref()) {
                    Some(above) => found.push((parent.version, parent.block, above)),
                    None => self.absent_parents.push(parent),
                }
            }
            found
        });
        let found = found.collect();
        self.directory.link_found(found);
    }

    /// Adds the extents in the list of the latest snapshot to the extents that blocks have left.
    fn add_leased(&mut self) {
        if !std::mem::replace(&mut self.leased.is_added, true) {
            for leased in &self.leased.ranges {
                self.left.add_all(leased);
            }
        }
    }

    /// Opens ranges that removed blocks left without a lease. In the log, the removals precede this record,
    /// and the next blocks in these ranges follow it.
    fn open(&mut self, unleased: &UnleasedRanges) {
        // Blocks that were replaced before this record must leave their ranges before it.
        self.flush();
        for (offset, length) in &unleased.ranges {
            self.left.take(unleased.segment, *offset, *length);
        }
    }

    /// Records that a segment id was used. Metadata from before ids were reserved has no other evidence.
    fn given(&mut self, id: SegmentId) {
        self.next_segment = self.next_segment.max(id.number().saturating_add(1));
    }

    /// Sets the stored seed. Returns false when blocks were already added under another one.
    fn reseed(&mut self, seed: u64) -> bool {
        if self.seed == Some(seed) {
            return true;
        }
        self.flush();
        if self.directory.blocks() + self.tier.directory().blocks() > 0 {
            return false;
        }
        self.seed = Some(seed);
        self.options.seed = seed;
        let directory = Directory::new(self.options, self.start);
        self.directory = directory.in_place_of(&self.directory);
        self.tier = Tier::new(self.options, self.start, &self.directory);
        true
    }

    /// Applies a record that concerns no block.
    fn system(&mut self, record: Record) {
        match record {
            Record::VersionsGranted(granted) => self.versions = self.versions.max(granted.until),
            Record::SegmentsGranted(granted) => {
                self.next_segment = self.next_segment.max(granted.until.0);
            }
            Record::Namespace(_) | Record::NamespaceSet(_) | Record::NamespaceGone(_) => {
                self.namespaces.apply(record);
            }
            Record::Segment(segment) => {
                self.given(segment.id);
                self.segments.insert(segment.id, segment);
            }
            Record::SegmentGone(gone) => {
                self.given(gone.id);
                self.segments.remove(&gone.id);
                self.media.remove(&gone.id);
            }
            Record::Medium(medium) => {
                self.given(medium.id);
                self.media.insert(medium.id, medium);
            }
            Record::IncarnationDropped(dropped) => self.dropped.push(dropped),
            Record::Seed(_)
            | Record::Commit(_)
            | Record::Remove(_)
            | Record::ReplicaGone(_)
            | Record::ReplicaAdded(_)
            | Record::LeasedRanges(_)
            | Record::UnleasedRanges(_) => {}
        }
    }

    /// Adds a commit to the batch.
    fn gather(&mut self, of: Option<ShardIndex>, commit: Commit) {
        // A block that was loaded from a medium is committed again under its version, and only the later
        // commit counts. The commits of one batch are published in no particular order.
        let may_repeat = self.has_copies && commit.version <= self.highest;
        if self.batch_of != of || self.batch.len() >= BATCH || may_repeat {
            self.flush();
            self.batch_of = of;
        }
        self.highest = self.highest.max(commit.version);
        self.batch.push(commit);
    }

    fn flush(&mut self) {
        let commits = std::mem::take(&mut self.batch);
        self.highest = Version(0);
        if commits.is_empty() {
            return;
        }
        let of = self.batch_of;
        let ticks = self.directory.ticks(commits.len());
        let mut parents = Vec::new();
        let mut blocks = Vec::with_capacity(commits.len());
        for (at, commit) in commits.into_iter().enumerate() {
            let copy = |(segment, offset): &(SegmentId, _)| Replica {
                segment: *segment,
                extent: UNPLACED,
                offset: *offset,
            };
            let replicas: Copies = commit.replicas.iter().map(copy).collect();
            // A parent in a shard that is not loaded yet is linked after the last snapshot.
            let (parent, later) = match of {
                None => (commit.parent, None),
                Some(_) => (None, commit.parent),
            };
            parents.push(later);
            blocks.push(NewBlock {
                namespace: commit.namespace,
                key: commit.key,
                version: commit.version,
                length: commit.length,
                checksum: commit.checksum,
                replicas,
                parent,
                soft_pin_until: None,
                hard_pin: commit.hard_pin,
                // A shard loads its blocks from last to first. The first blocks get later ticks, so that all
                // of them stay in the list. A tick that does not fit the list costs 30 bytes in a set until
                // the order is built.
                tick: ticks.of(at),
                leased_until: None,
            });
        }
        let published = self.directory.publish(&blocks);
        if let Some(shard) = of {
            let found = published.iter().zip(&blocks).zip(parents);
            let known = self.parents.entry(shard).or_default();
            known.extend(found.filter_map(|((published, block), key)| {
                Some(Parent {
                    namespace: block.namespace,
                    block: published.id?,
                    version: block.version,
                    key: key?,
                })
            }));
        }
        if of.is_none() {
            // The range was granted again, so the leases on its last block have ended. If one of these blocks
            // has left since, its removal follows in the log.
            for block in &blocks {
                self.takes(block);
            }
            for (Published { id, replaced }, block) in published.into_iter().zip(&blocks) {
                if id.is_none() {
                    // The batch contains a later version of the key, which replaces this one.
                    self.left_by(&block.replicas, block.length);
                }
                if let Some(replaced) = replaced {
                    self.leaves(&replaced);
                }
            }
        }
    }

    /// Adds a copy on a medium. Its range is allocated when all records are read.
    fn copy_found(&mut self, commit: Commit) {
        for (id, _) in &commit.replicas {
            self.given(*id);
        }
        self.has_copies = true;
        self.tier.stage(commit);
    }

    fn copy_leaves(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        is_it: impl Fn(Version) -> bool,
    ) {
        if self.has_copies {
            self.tier.stage_out(namespace, key, is_it);
        }
    }

    fn leaves(&mut self, removed: &Removed) {
        self.left_by(&removed.replicas, removed.length);
    }

    fn left_by(&mut self, replicas: &[Replica], length: Length) {
        for replica in replicas {
            self.left.add(replica.segment, replica.offset, length);
        }
    }

    fn takes(&mut self, block: &NewBlock) {
        for replica in &block.replicas {
            self.left
                .take(replica.segment, replica.offset, block.length);
        }
    }

    fn block_logged(&mut self, record: Record) {
        match record {
            Record::Commit(commit) if Tier::is_about(&commit) => self.copy_found(commit),
            Record::Commit(commit) => {
                let (key, version) = (commit.key.as_ref(), commit.version);
                self.copy_leaves(commit.namespace, key, |other| other < version);
                for (id, _) in &commit.replicas {
                    self.given(*id);
                }
                // The segments of the block may be gone: the snapshot of the system shard may be later than
                // this record. The block stays until all records are read, because another replica may
                // follow.
                self.gather(None, commit);
            }
            Record::Remove(gone) => {
                if gone.everywhere {
                    let is_it = |version| version == gone.version;
                    self.copy_leaves(gone.namespace, gone.key.as_ref(), is_it);
                }
                self.flush();
                self.orphans(&gone);
                if !gone.places.is_empty() {
                    self.leave_places(&gone);
                    return;
                }
                let is_it = |block: &directory::BlockRef<'_>| {
                    if block.version() == gone.version {
                        Verdict::Remove
                    } else {
                        Verdict::Keep
                    }
                };
                let outcomes = self
                    .directory
                    .remove(gone.namespace, &[gone.key.as_ref()], is_it);
                for outcome in outcomes {
                    // When a node registers, it reports the extents that a process still holds.
                    if let Removal::Removed(removed) = outcome
                        && !gone.unleased
                    {
                        self.leaves(&removed);
                    }
                }
            }
            Record::ReplicaGone(gone) if gone.segment.is_on_medium() => {
                self.tier.copy_gone(&gone);
            }
            Record::ReplicaGone(gone) => {
                self.flush();
                let dropped = self.directory.drop_where(
                    gone.namespace,
                    gone.key.as_ref(),
                    gone.version,
                    |replica| gone.is_at(replica),
                );
                if let Some(dropped) = dropped {
                    let replica = dropped.replica;
                    self.left
                        .add(replica.segment, replica.offset, dropped.length);
                }
            }
            Record::ReplicaAdded(added) => {
                self.given(added.segment);
                self.flush();
                self.add_replica(&added);
            }
            _ => {}
        }
    }

    /// Removes a block's replicas from the extents that it left. The block may be in memory again at another
    /// extent.
    fn leave_places(&mut self, gone: &record::Remove) {
        let key = gone.key.as_ref();
        let left = self
            .directory
            .drop_places(gone.namespace, key, gone.version, &gone.places);
        // If the block had no lease, the extents can be free. A registering node reports those that a process
        // still holds.
        for dropped in left.into_iter().filter(|_| !gone.unleased) {
            let replica = dropped.replica;
            self.left
                .add(replica.segment, replica.offset, dropped.length);
        }
    }

    /// Records the children of a block that leaves. They may be from later snapshots. Their parent is then
    /// the key's next block, which comes later in the log.
    fn orphans(&mut self, gone: &record::Remove) {
        let (namespace, key) = (gone.namespace, gone.key.as_ref());
        let children = self.directory.children(namespace, key, gone.version);
        let orphans = children.into_iter().map(|(version, block)| Parent {
            namespace,
            block,
            version,
            key: gone.key.clone(),
        });
        self.absent_parents.extend(orphans);
    }

    fn add_replica(&mut self, added: &record::ReplicaAdded) {
        let replica = Replica {
            segment: added.segment,
            extent: UNPLACED,
            offset: added.offset,
        };
        let key = added.key.as_ref();
        let outcome = self
            .directory
            .add_replica(added.namespace, key, added.version, replica);
        if let Added::To(block) = outcome
            && let Some(found) = self.directory.summary(block)
        {
            self.left.take(added.segment, added.offset, found.length);
        }
    }
}

impl Target for Loading {
    fn shard_of(&self, namespace: NamespaceId, key: &Key) -> ShardIndex {
        ShardIndex(self.directory.shard_of_key(namespace, key.as_ref()))
    }

    fn forget(&mut self, shard: ShardIndex) {
        self.flush();
        if shard == ShardIndex::SYSTEM {
            // The next snapshot contains all namespaces that are left. If a deleted namespace stayed here, it
            // would keep its name from the next namespace of this name.
            self.namespaces = Namespaces::default();
            self.segments.clear();
            self.media.clear();
            self.dropped.clear();
        } else {
            self.parents.remove(&shard);
            self.absent_parents.clear();
            self.directory.forget_shard(shard.0);
            self.tier.forget_shard(shard.0);
            self.left = FreedRanges::default();
            self.leased.is_added = false;
        }
    }

    fn snapshot(&mut self, shard: ShardIndex, record: Record) {
        match record {
            Record::Seed(secret) => {
                // There is one such record. A second record would repeat it.
                self.reseed(secret.seed);
            }
            Record::LeasedRanges(leased) => self.leased_there.push(leased),
            Record::Commit(commit) if Tier::is_about(&commit) => self.copy_found(commit),
            Record::Commit(commit) => {
                for (id, _) in &commit.replicas {
                    self.given(*id);
                }
                self.gather(Some(shard), commit);
            }
            record => self.system(record),
        }
    }

    fn snapshot_ends(&mut self, shard: ShardIndex, seq: LogSeq) {
        self.flush();
        let ranges = std::mem::take(&mut self.leased_there);
        if seq > self.leased.at {
            self.leased = Leased {
                at: seq,
                ranges,
                is_added: false,
            };
        }
        if let Some(parents) = self.parents.get_mut(&shard) {
            parents.shrink_to_fit();
        }
    }

    fn snapshots_end(&mut self) {
        self.flush();
        // The keys of each shard are freed as soon as their blocks are found.
        let parents = std::mem::take(&mut self.parents);
        self.link_parents(parents.into_values());
    }

    fn logged(&mut self, seq: LogSeq, record: Record) -> Result<(), RecoveryError> {
        if seq > self.leased.at && !self.leased.is_added {
            // This must not happen earlier: earlier records would remove these ranges again.
            self.flush();
            self.add_leased();
        }
        match record {
            Record::LeasedRanges(leased) => {
                self.flush();
                self.left.add_all(&leased);
            }
            Record::UnleasedRanges(unleased) => self.open(&unleased),
            Record::Seed(secret) => {
                if !self.reseed(secret.seed) {
                    return Err(RecoveryError::Reseeded { seq });
                }
            }
            record if record.place().is_some() => self.block_logged(record),
            record => self.system(record),
        }
        Ok(())
    }

    fn contained(&mut self, record: &Record) {
        match record {
            Record::Segment(segment) => self.given(segment.id),
            Record::SegmentGone(gone) => self.given(gone.id),
            Record::Medium(medium) => self.given(medium.id),
            // The removal may be in a shard with an earlier snapshot.
            Record::UnleasedRanges(unleased) => self.open(unleased),
            _ => {}
        }
    }
}
