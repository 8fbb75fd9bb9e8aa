//! Publishing blocks and linking them to their parents.

use super::BlockId;
use super::block::{NewBlock, Published};
use super::cell::Locked;
use super::common::{Prepared, Preparer};
use super::entry::QueueState;
use super::interner::NOT_INTERNED;
use super::stripe_order::{Borrowed, Item};
use super::{Directory, Policy, Replica};
use crate::clock::BootInstant;
use crate::slab::NONE;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{KeyRef, Version};

/// A block and its parent, to be linked.
#[derive(Clone, Copy, Debug)]
pub struct Link<'a> {
    /// Namespace of both keys.
    pub namespace: NamespaceId,
    /// The block's slot.
    pub block: BlockId,
    /// Version of the block.
    pub version: Version,
    /// Key of the parent.
    pub parent: KeyRef<'a>,
}

impl Directory {
    /// Publishes blocks. A block is refused when its key has a later version, or the same version at the same
    /// extent. Blocks are linked to their parents that are present, also in the same batch. A block that
    /// replaces another keeps the existing link. The outcomes have the order of the blocks. A batch must not
    /// have two blocks of one key and one version, because its blocks are published from last to first.
    pub fn publish(&self, blocks: impl AsRef<[NewBlock]>) -> Vec<Published> {
        self.publish_until(blocks.as_ref(), None)
    }

    /// Publishes blocks that stay leased until `until`, whatever tokens are released meanwhile.
    /// Call [`super::BlockMut::settle`] for each block.
    pub fn publish_held(
        &self,
        blocks: &[NewBlock],
        until: BootInstant,
        now: BootInstant,
    ) -> Vec<Published> {
        let (until, now) = (self.common.relative(until), self.common.relative(now));
        self.publish_until(blocks, Some((until, now)))
    }

    fn publish_until(&self, blocks: &[NewBlock], held: Option<(u64, u64)>) -> Vec<Published> {
        let mut outcomes = vec![
            Published {
                id: None,
                replaced: None
            };
            blocks.len()
        ];
        let mut links = Vec::new();
        let items = (0u32..).zip(blocks).map(|(index, block)| {
            let Prepared { hash, affixes, .. } =
                Preparer::new(&self.common, block.namespace).prepare(block.key.as_ref());
            Item {
                hash,
                index,
                affixes,
            }
        });
        let mut scratch = Borrowed::take();
        let scratch = scratch.get();
        scratch.sort(self, items);
        for (stripe, group, _) in scratch.groups() {
            let mut stripe = self.lock(stripe);
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
                    affixes: item.affixes,
                };
                // Another version of the same key may have interned these affixes since the batch
                // was sorted.
                if key.affixes == NOT_INTERNED && matches!(key.key, KeyRef::Digest { .. }) {
                    key = Preparer::new(&self.common, block.namespace).prepare(key.key);
                }
                *outcome = self.publish_one(&mut stripe, block, &key, held);
                if let (Some(id), Some(parent)) = (outcome.id, &block.parent) {
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
        stripe: &mut Locked<'_>,
        block: &NewBlock,
        key: &Prepared<'_>,
        held: Option<(u64, u64)>,
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
        let (slot, replaced) = match stripe.find(key) {
            Some(slot) if is_refused(stripe, slot, block) => return refused,
            Some(slot) => {
                let replaced = stripe.replace(slot, block, length, &self.common);
                (slot, Some(Box::new(replaced)))
            }
            None => {
                let slot = stripe.insert(key, block, length, &self.common);
                if let Some(until) = block.leased_until {
                    let until = self.common.relative(until);
                    stripe.entries.at_mut(slot).hold(until, 0);
                }
                (slot, None)
            }
        };
        if let Some((until, now)) = held {
            stripe.entries.at_mut(slot).hold(until, now);
        }
        Published {
            id: Some(stripe.id(slot)),
            replaced,
        }
    }

    /// Links blocks to their parents in the order of the blocks' versions. Both must be present,
    /// and the block must have no parent yet. A recovery publishes blocks without parents and links
    /// them here; [`Directory::publish`] links by itself.
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
        let mut stripe = self.lock(self.common.stripe_of_hash(parent.hash));
        let linked = stripe
            .find(&parent)
            .is_some_and(|slot| self.attach(&mut stripe, slot, node, link.block, link.version));
        drop(stripe);
        if !linked {
            self.common
                .lineage
                .lock()
                .withdraw(node, link.block, link.version);
        }
    }

    /// Links an announced block under the block in `slot`.
    pub(super) fn attach(
        &self,
        stripe: &mut Locked<'_>,
        slot: u32,
        node: u32,
        block: BlockId,
        version: Version,
    ) -> bool {
        let id = stripe.id(slot);
        let rest = stripe.entries.rest_mut(slot);
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
            has_children_now(stripe, slot);
        }
        linked
    }

    /// Gives the block a marked node, so that it is recognised after its own stripe is unlocked.
    pub(super) fn announce(&self, block: BlockId, version: Version) -> Option<u32> {
        let (mut stripe, slot) = self.lock_block(block)?;
        let rest = stripe.entries.rest_mut(slot);
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

/// Takes a block that has its first child out of the queues.
fn has_children_now(stripe: &mut Locked<'_>, slot: u32) {
    match stripe.entries.at(slot).queue_state() {
        QueueState::Inner | QueueState::RootWithChildren => {}
        QueueState::Root => stripe
            .entries
            .at_mut(slot)
            .set_queue_state(QueueState::RootWithChildren),
        _ => {
            let stripe: &mut super::stripe::Stripe = stripe;
            stripe.queues.take(&mut stripe.entries, slot);
        }
    }
}

/// Whether the key has a later version, or this version at one of the new extents. A block that was loaded
/// from a medium has the same version at another extent.
fn is_refused(stripe: &Locked<'_>, slot: u32, block: &NewBlock) -> bool {
    let held = stripe.entries.rest(slot).version;
    let is_known = |new: &Replica| {
        let mut old = stripe.replicas(slot).to_vec().into_iter();
        old.any(|old| (old.segment, old.offset) == (new.segment, new.offset))
    };
    held > block.version || held == block.version && block.replicas.iter().any(is_known)
}
