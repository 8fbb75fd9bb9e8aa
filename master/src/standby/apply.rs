//! Applies the log as it grows.

use super::freed_ranges::FreedRanges;
use super::recently_freed::FreedExtent;
use super::{ApplyError, Standby};
use crate::directory::{self, Directory, Dropped, Removal, Removed, Replica, Verdict};
use crate::store::LogSeq;
use crate::store::record::{self, Commit, Record};
use crate::tier::Tier;
use kvpool_types::{KeyRef, Length, SegmentId, Version};
use std::collections::HashSet;
use std::sync::Arc;

impl Standby {
    /// Applies the group after the last applied one. After an error the standby must be loaded again.
    pub fn apply(&mut self, seq: LogSeq, group: &[u8]) -> Result<(), ApplyError> {
        let applied = self.applied();
        if seq != applied.next() {
            return Err(ApplyError::Gap {
                found: seq,
                applied,
            });
        }
        let decoded =
            record::decode(group).map_err(|source| ApplyError::Damaged { seq, source })?;
        // Consecutive commits are published together.
        let mut commits: Vec<Commit> = Vec::new();
        let mut versions = HashSet::new();
        for record in decoded.records {
            match record {
                Record::Commit(commit)
                    if !Tier::is_about(&commit) && !self.comes_back(&commit, &versions) =>
                {
                    versions.insert(commit.version);
                    commits.push(commit);
                    continue;
                }
                _ => {}
            }
            self.commit(std::mem::take(&mut commits));
            versions.clear();
            self.apply_one(seq, record)?;
        }
        self.commit(commits);
        self.state.span.last = seq;
        self.state.runs.push(seq, group.len() as u64);
        self.recently_freed.tick(self.clock.now());
        self.sweep();
        Ok(())
    }

    /// Whether a block is committed again, at another extent, because it was loaded from a medium. It may be
    /// in memory, or among the commits of these versions, which are not published yet. The next commit may
    /// use the extent that the block leaves. So such a commit is published by itself.
    fn comes_back(&self, commit: &Commit, unpublished: &HashSet<Version>) -> bool {
        let found = || {
            let block = self.directory.find(commit.namespace, commit.key.as_ref())?;
            self.directory.summary(block)
        };
        !self.tier.is_empty()
            && (unpublished.contains(&commit.version)
                || found().is_some_and(|block| block.version == commit.version))
    }

    /// Drops the groups that were cut from the log, and records the snapshots that replace them.
    pub fn note(
        &mut self,
        cut: LogSeq,
        snapshots: impl IntoIterator<Item = (crate::store::ShardIndex, (LogSeq, u64))>,
    ) {
        self.forget(cut);
        self.state.snapshots = snapshots.into_iter().collect();
    }

    /// Drops the groups that were cut from the log. A standby calls this regularly, because it may follow for
    /// months.
    pub fn forget(&mut self, cut: LogSeq) {
        if cut > self.state.span.cut {
            self.state.span.cut = cut;
            self.state.runs.forget(cut);
        }
    }

    /// The number of runs of groups that this standby keeps.
    pub fn remembered(&self) -> usize {
        self.state.runs.len()
    }

    fn commit(&mut self, commits: Vec<Commit>) {
        if commits.is_empty() {
            return;
        }
        for block in &commits {
            let older = |version| version < block.version;
            self.tier.remove(block.namespace, block.key.as_ref(), older);
        }
        let published = self.publish(commits);
        for replaced in published.into_iter().filter_map(|p| p.replaced) {
            self.freed(&replaced);
        }
    }

    fn apply_one(&mut self, seq: LogSeq, record: Record) -> Result<(), ApplyError> {
        match record {
            Record::Commit(commit) if Tier::is_about(&commit) => {
                self.tier.publish(commit);
            }
            Record::Commit(commit) => self.commit(vec![commit]),
            Record::Remove(gone) if !gone.places.is_empty() => self.leave_places(&gone),
            Record::Remove(gone) => {
                if gone.everywhere {
                    let is_it = |version| version == gone.version;
                    self.tier.remove(gone.namespace, gone.key.as_ref(), is_it);
                }
                let removed = self.take_out(gone.namespace, gone.key.as_ref(), |version| {
                    version == gone.version
                });
                match removed {
                    Some(removed) if gone.unleased => self.open(&removed.replicas),
                    Some(removed) => self.freed(&removed),
                    None => {}
                }
            }
            Record::ReplicaGone(gone) if gone.segment.is_on_medium() => {
                self.tier.copy_gone(&gone);
            }
            Record::ReplicaGone(gone) => {
                let dropped = self.directory.drop_where(
                    gone.namespace,
                    gone.key.as_ref(),
                    gone.version,
                    |replica| gone.is_at(replica),
                );
                if let Some(dropped) = dropped {
                    self.freed_copies(&[dropped.replica], dropped.length);
                }
            }
            Record::ReplicaAdded(added) => self.add_replica(&added),
            Record::Namespace(_) | Record::NamespaceSet(_) | Record::NamespaceGone(_) => {
                self.namespaces.apply(record.clone());
                self.set_accounts(&record);
            }
            Record::Segment(segment) => self.add_segment(segment),
            Record::SegmentGone(gone) if gone.id.is_on_medium() => {
                self.tier.drop_medium(gone.id);
            }
            Record::SegmentGone(gone) => self.drop_segment(gone.id),
            Record::Medium(medium) => self.set_medium(medium),
            Record::IncarnationDropped(dropped) => self
                .members
                .drop_incarnation(&dropped.node, dropped.incarnation),
            Record::Seed(secret) => self.reseed(seq, secret.seed)?,
            Record::LeasedRanges(leased) => self.shut_leased(&leased),
            Record::UnleasedRanges(unleased) => {
                for (offset, length) in unleased.ranges {
                    self.recently_freed
                        .give_up(unleased.segment, offset, length);
                }
            }
            Record::VersionsGranted(granted) => {
                self.versions = self.versions.max(granted.until);
            }
            Record::SegmentsGranted(granted) => {
                self.next_segment = self.next_segment.max(granted.until.0);
            }
        }
        Ok(())
    }

    /// Removes a block's replicas from the extents that it left. The block may be in memory again at another
    /// extent.
    fn leave_places(&mut self, gone: &record::Remove) {
        let key = gone.key.as_ref();
        let left = self
            .directory
            .drop_places(gone.namespace, key, gone.version, &gone.places);
        for Dropped {
            replica, length, ..
        } in left
        {
            match gone.unleased {
                true => self.open(&[replica]),
                false => self.freed_copies(&[replica], length),
            }
        }
    }

    /// The first term makes the seed. A standby that was loaded earlier has only a guess.
    fn reseed(&mut self, seq: LogSeq, seed: u64) -> Result<(), ApplyError> {
        if seed != self.seed {
            if self.directory.blocks() > 0 {
                return Err(ApplyError::Reseeded { seq });
            }
            self.seed = seed;
            self.options = directory::Options {
                seed,
                ..self.options
            };
            let directory = Directory::new(self.options, self.clock.now());
            self.directory = directory.in_place_of(&self.directory);
            self.tier = Tier::new(self.options, self.clock.now(), &self.directory);
        }
        self.is_seed_stored = true;
        Ok(())
    }

    /// Removes what the key had before a block whose extents cannot be allocated: an earlier version. If all
    /// segments of the block are gone, the same version is removed too. The block was then loaded from a medium to
    /// such a segment, and has left its earlier extent.
    pub(super) fn take_out_older(&mut self, block: &Commit) {
        let is_gone = {
            let segments = self.placement.segments();
            let mut places = block.replicas.iter();
            places.all(|(segment, _)| segments.get(*segment).is_none())
        };
        let older = self.take_out(block.namespace, block.key.as_ref(), |version| {
            version < block.version || is_gone && version == block.version
        });
        if let Some(older) = older {
            self.freed(&older);
        }
    }

    fn take_out(
        &mut self,
        namespace: kvpool_types::ids::NamespaceId,
        key: KeyRef<'_>,
        is_it: impl Fn(Version) -> bool,
    ) -> Option<Removed> {
        let outcomes = self.directory.remove(namespace, &[key], |block| {
            if is_it(block.version()) {
                Verdict::Remove
            } else {
                Verdict::Keep
            }
        });
        outcomes.into_iter().find_map(|outcome| match outcome {
            Removal::Removed(removed) => Some(removed),
            Removal::Kept | Removal::Missing => None,
        })
    }

    /// Frees extents without a lease. When a node registers with the next leader, it reports the extents that
    /// a process still holds.
    fn open(&mut self, copies: &[Replica]) {
        let segments = self.placement.segments();
        for copy in copies {
            if let Some(segment) = segments.get(copy.segment) {
                segment.quarantine([copy.extent]);
                segment.free_quarantined([(copy.extent, false)].into_iter());
            }
        }
    }

    fn drop_segment(&mut self, id: SegmentId) {
        if let Some(segment) = self.placement.remove(id) {
            self.recently_freed.forget(id);
            self.sweeps.keep_segment(segment);
        }
    }

    /// Keeps ranges closed that blocks left before the snapshot from which this standby was loaded.
    fn shut_leased(&mut self, leased: &record::LeasedRanges) {
        let mut ranges = FreedRanges::default();
        ranges.add_all(leased);
        for (offset, length) in &leased.ranges {
            self.recently_freed
                .leave_out(&mut ranges, leased.segment, *offset, *length);
        }
        self.keep_shut(ranges);
    }

    fn freed(&mut self, removed: &Removed) {
        self.freed_copies(&removed.replicas, removed.length);
    }

    pub(super) fn freed_copies(&mut self, copies: &[Replica], length: Length) {
        let segments = self.placement.segments();
        for copy in copies {
            if let Some(segment) = segments.get(copy.segment) {
                self.recently_freed.keep(FreedExtent {
                    segment: Arc::clone(segment),
                    index: copy.extent,
                    offset: copy.offset,
                    length,
                    since: self.clock.now(),
                });
            }
        }
    }
}
