//! The sum of records that come shard by shard: what is left at the end, before it has a place.

use crate::store::record::{self, Commit, Places, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, Length, SegmentId, Version};
use std::cell::OnceCell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Past {
    pub(super) seed: OnceCell<u64>,
    pub(super) versions: Version,
    pub(super) namespaces: Vec<record::Namespace>,
    pub(super) segments: BTreeMap<SegmentId, record::Segment>,
    pub(super) next_segment: u32,
    pub(super) dropped: Vec<record::IncarnationDropped>,
    pub(super) blocks: HashMap<(NamespaceId, Key), Commit>,
    /// Extents that blocks have left, the last ones last, as far as the log still tells: leases on them may
    /// last.
    pub(super) left: Vec<(Places, Length)>,
}

impl Past {
    /// Notes that a segment id has been given. What was stored before ids were set aside tells in no other way.
    fn given(&mut self, id: SegmentId) {
        self.next_segment = self.next_segment.max(id.0.saturating_add(1));
    }

    pub(super) fn apply(&mut self, record: Record) {
        match record {
            Record::Seed(secret) => {
                // There is one such record; a second would be a repetition of it.
                let _same = self.seed.set(secret.seed);
            }
            Record::VersionsGranted(granted) => self.versions = self.versions.max(granted.until),
            Record::SegmentsGranted(granted) => {
                self.next_segment = self.next_segment.max(granted.until.0);
            }
            Record::Namespace(created) => self.namespaces.push(created),
            Record::Segment(segment) => {
                self.given(segment.id);
                self.segments.insert(segment.id, segment);
            }
            Record::SegmentGone(gone) => {
                self.given(gone.id);
                self.segments.remove(&gone.id);
            }
            Record::IncarnationDropped(dropped) => self.dropped.push(dropped),
            Record::Commit(commit) => {
                for (segment, _) in &commit.replicas {
                    self.given(*segment);
                }
                let place = (commit.namespace, commit.key.clone());
                if let Some(before) = self.blocks.insert(place, commit) {
                    self.left.push((before.replicas, before.length));
                }
            }
            Record::Remove(removed) => {
                if let Entry::Occupied(block) = self.blocks.entry((removed.namespace, removed.key))
                    && block.get().version == removed.version
                {
                    let block = block.remove();
                    self.left.push((block.replicas, block.length));
                }
            }
            Record::ReplicaGone(gone) => {
                if let Some(block) = self.blocks.get_mut(&(gone.namespace, gone.key))
                    && block.version == gone.version
                {
                    let (gone, others) = block
                        .replicas
                        .drain(..)
                        .partition(|(segment, _)| *segment == gone.segment);
                    block.replicas = others;
                    self.left.push((gone, block.length));
                }
            }
        }
    }
}
