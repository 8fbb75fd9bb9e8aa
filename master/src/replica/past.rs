//! The sum of records that come shard by shard: what is left at the end, before it has a place.

use crate::store::record::{self, Commit, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, SegmentId, Version};
use std::cell::OnceCell;
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
}

impl Past {
    pub(super) fn apply(&mut self, record: Record) {
        match record {
            Record::Seed(secret) => {
                // There is one such record; a second would be a repetition of it.
                let _same = self.seed.set(secret.seed);
            }
            Record::VersionsGranted(granted) => self.versions = self.versions.max(granted.until),
            Record::Namespace(created) => self.namespaces.push(created),
            Record::Segment(segment) => {
                self.next_segment = self.next_segment.max(segment.id.0 + 1);
                self.segments.insert(segment.id, segment);
            }
            Record::SegmentGone(gone) => {
                self.segments.remove(&gone.id);
            }
            Record::IncarnationDropped(dropped) => self.dropped.push(dropped),
            Record::Commit(commit) => {
                self.blocks
                    .insert((commit.namespace, commit.key.clone()), commit);
            }
            Record::Remove(removed) => {
                let place = (removed.namespace, removed.key);
                if self
                    .blocks
                    .get(&place)
                    .is_some_and(|b| b.version == removed.version)
                {
                    self.blocks.remove(&place);
                }
            }
            Record::ReplicaGone(gone) => {
                if let Some(block) = self.blocks.get_mut(&(gone.namespace, gone.key))
                    && block.version == gone.version
                {
                    block
                        .replicas
                        .retain(|(segment, _)| *segment != gone.segment);
                }
            }
        }
    }
}
