//! Making blocks visible, and linking them to their parents.

use super::batch::{Borrowed, Item};
use super::block::{BlockId, NewBlock, Published};
use super::cell::Locked;
use super::common::{Prepared, Preparer};
use super::entry::Place;
use super::slab::NONE;
use super::spaces::NO_SPACE;
use super::{Directory, Policy};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{KeyRef, Version};

/// A block and its parent, to be linked.
#[derive(Clone, Copy, Debug)]
pub struct Link<'a> {
    /// The namespace of both.
    pub namespace: NamespaceId,
    /// Where the block is.
    pub block: BlockId,
    /// The block's version.
    pub version: Version,
    /// The parent's key.
    pub parent: KeyRef<'a>,
}

impl Directory {
    /// Makes blocks visible, each unless its key is there with the same or a later version. New
    /// keys are linked to the parents that are present then, among them those of the same batch.
    /// Outcomes come in the order of the blocks.
    pub fn publish(&self, blocks: impl AsRef<[NewBlock]>) -> Vec<Published> {
        let blocks = blocks.as_ref();
        let mut outcomes = vec![
            Published {
                id: None,
                replaced: None
            };
            blocks.len()
        ];
        let mut links = Vec::new();
        let items = (0u32..).zip(blocks).map(|(index, block)| {
            let Prepared { hash, space, .. } =
                Preparer::new(&self.common, block.namespace).prepare(block.key.as_ref());
            Item { hash, index, space }
        });
        let mut scratch = Borrowed::take();
        let scratch = scratch.get();
        scratch.sort(self, items);
        for (shard, group, _) in scratch.groups() {
            let mut shard = self.lock(shard);
            for item in group {
                let index = item.index as usize;
                let (Some(block), Some(outcome)) = (blocks.get(index), outcomes.get_mut(index))
                else {
                    continue;
                };
                let mut key = Prepared {
                    namespace: block.namespace,
                    key: block.key.as_ref(),
                    hash: item.hash,
                    space: item.space,
                };
                // Affixes that were new when the batch was sorted may have come with another version of
                // the same key since.
                if key.space == NO_SPACE && matches!(key.key, KeyRef::Digest { .. }) {
                    key = Preparer::new(&self.common, block.namespace).prepare(key.key);
                }
                *outcome = self.publish_one(&mut shard, block, &key);
                if let (Some(id), None, Some(parent)) =
                    (outcome.id, &outcome.replaced, &block.parent)
                {
                    links.push(Link {
                        namespace: block.namespace,
                        block: id,
                        version: block.version,
                        parent: parent.as_ref(),
                    });
                }
            }
        }
        self.link(&mut links);
        outcomes
    }

    fn publish_one(
        &self,
        shard: &mut Locked<'_>,
        block: &NewBlock,
        key: &Prepared<'_>,
    ) -> Published {
        let refused = Published {
            id: None,
            replaced: None,
        };
        let Ok(length @ 1..) = u32::try_from(block.length.0) else {
            return refused;
        };
        if block.replicas.is_empty() {
            return refused;
        }
        match shard.find(key) {
            Some(slot) if shard.entries.rest(slot).version >= block.version => refused,
            Some(slot) => {
                let replaced = shard.replace(slot, block, length, &self.common);
                Published {
                    id: Some(shard.id(slot)),
                    replaced: Some(Box::new(replaced)),
                }
            }
            None => {
                let slot = shard.insert(key, block, length, &self.common);
                Published {
                    id: Some(shard.id(slot)),
                    replaced: None,
                }
            }
        }
    }

    /// Links blocks to their parents, in the order of their versions: those that are still there,
    /// have no parent yet, and whose parent is there. For blocks that were made visible without
    /// their parents, as in a recovery shard by shard; [`Directory::publish`] does it by itself.
    pub fn link(&self, links: &mut [Link<'_>]) {
        if self.common.policy == Policy::Lru {
            return;
        }
        // A parent is nearly always older than its children. Linked first, it has no children yet,
        // and a link to a block without children needs no walk up the chain.
        links.sort_unstable_by_key(|link| link.version);
        for link in links {
            self.link_one(link);
        }
    }

    fn link_one(&self, link: &Link<'_>) {
        let Some(node) = self.announce(link.block, link.version) else {
            return;
        };
        let parent = Preparer::new(&self.common, link.namespace).prepare(link.parent);
        let mut shard = self.lock(self.common.shard_of_hash(parent.hash));
        let linked = shard
            .find(&parent)
            .is_some_and(|slot| self.attach(&mut shard, slot, node, link.block, link.version));
        drop(shard);
        if !linked {
            self.common
                .lineage
                .lock()
                .withdraw(node, link.block, link.version);
        }
    }

    /// Links a block that was announced under the one in `slot`.
    pub(super) fn attach(
        &self,
        shard: &mut Locked<'_>,
        slot: u32,
        node: u32,
        block: BlockId,
        version: Version,
    ) -> bool {
        let id = shard.id(slot);
        let rest = shard.entries.rest_mut(slot);
        let mut lineage = self.common.lineage.lock();
        if rest.lineage == NONE {
            if id == block {
                return false;
            }
            rest.lineage = lineage.add(id);
        }
        let linked = lineage.attach(rest.lineage, node, block, version);
        drop(lineage);
        if linked {
            has_children_now(shard, slot);
        }
        linked
    }

    /// Gives the block a node, marked so that it is recognised when its own shard is let go.
    pub(super) fn announce(&self, block: BlockId, version: Version) -> Option<u32> {
        let (mut shard, slot) = self.lock_block(block)?;
        let rest = shard.entries.rest_mut(slot);
        if rest.version != version {
            return None;
        }
        let mut lineage = self.common.lineage.lock();
        if rest.lineage == NONE {
            rest.lineage = lineage.add(block);
        }
        lineage
            .announce(rest.lineage, version)
            .then_some(rest.lineage)
    }
}

/// Takes a block that has got its first child out of the queues.
fn has_children_now(shard: &mut Locked<'_>, slot: u32) {
    match shard.entries.at(slot).place() {
        Place::Inner | Place::Frontier => {}
        Place::Orphan => shard.entries.at_mut(slot).set_place(Place::Frontier),
        _ => {
            let shard: &mut super::shard::Shard = shard;
            shard.queues.take(&mut shard.entries, slot);
        }
    }
}
