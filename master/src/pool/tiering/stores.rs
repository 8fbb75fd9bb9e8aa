//! The stores in progress, by key.
//!
//! A block may be evicted while it is stored. Its copy is still worth recording, unless its key was put or
//! removed meanwhile. A put replaces the key's entry in this table or removes it. So does a removal that
//! found nothing to remove. A store without an entry leaves no copy.

use super::transfers::Moved;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, SegmentId, Version};
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;

/// The stores in progress.
#[derive(Debug, Default)]
pub(super) struct Stores(HashMap<(NamespaceId, Key), Store>);

#[derive(Debug)]
struct Store {
    version: Version,
    /// The media to which the block is being stored.
    media: SmallVec<[SegmentId; 2]>,
    left_memory: bool,
}

/// What happened to a block during its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meanwhile {
    /// The block was not evicted.
    Stayed,
    /// The block was evicted, and its key has not changed since.
    Evicted,
    /// The block's key was put or removed.
    Changed,
}

impl Stores {
    /// Begins a store to a medium.
    pub(super) fn begin(&mut self, block: &Moved, medium: SegmentId) {
        let place = (block.namespace, block.key.clone());
        match self.0.get_mut(&place) {
            Some(store) if store.version == block.version => store.media.push(medium),
            _ => {
                let new = Store {
                    version: block.version,
                    media: smallvec![medium],
                    left_memory: false,
                };
                self.0.insert(place, new);
            }
        }
    }

    /// The media to which a block is being stored.
    pub(super) fn media(&self, block: &Moved) -> &[SegmentId] {
        let store = self.0.get(&(block.namespace, block.key.clone()));
        let store = store.filter(|store| store.version == block.version);
        store.map_or(&[], |store| store.media.as_slice())
    }

    pub(super) fn meanwhile(&self, block: &Moved) -> Meanwhile {
        let store = self.0.get(&(block.namespace, block.key.clone()));
        match store.filter(|store| store.version == block.version) {
            Some(store) if store.left_memory => Meanwhile::Evicted,
            Some(_) => Meanwhile::Stayed,
            None => Meanwhile::Changed,
        }
    }

    /// Ends a store to a medium.
    pub(super) fn end(&mut self, block: &Moved, medium: SegmentId) -> Meanwhile {
        let meanwhile = self.meanwhile(block);
        let place = (block.namespace, block.key.clone());
        if let Some(store) = self.0.get_mut(&place)
            && store.version == block.version
        {
            if let Some(at) = store.media.iter().position(|one| *one == medium) {
                store.media.swap_remove(at);
            }
            if store.media.is_empty() {
                self.0.remove(&place);
            }
        }
        meanwhile
    }

    /// Records that a block was evicted. Returns false when no store of it is in progress.
    pub(super) fn left_memory(
        &mut self,
        namespace: NamespaceId,
        key: &Key,
        version: Version,
    ) -> bool {
        let store = self.0.get_mut(&(namespace, key.clone()));
        let store = store.filter(|store| store.version == version);
        store.map(|store| store.left_memory = true).is_some()
    }

    /// Records that a key now has this version. Stores of other versions leave no copy. Stores of this
    /// version do, since the block has only got another replica.
    pub(super) fn version_changed(&mut self, namespace: NamespaceId, key: &Key, version: Version) {
        // Every put calls this, and few puts have a key that is being stored.
        if self.0.is_empty() {
            return;
        }
        let place = (namespace, key.clone());
        let store = self.0.get(&place);
        if store.is_some_and(|store| store.version != version) {
            self.0.remove(&place);
        }
    }

    /// Records that a key was removed. Its stores in progress leave no copy.
    pub(super) fn key_changed(&mut self, namespace: NamespaceId, key: &Key) {
        if !self.0.is_empty() {
            self.0.remove(&(namespace, key.clone()));
        }
    }

    /// Removes the entries of all evicted blocks. Their stores leave no copy.
    pub(super) fn end_of_evicted(&mut self) {
        self.0.retain(|_, store| !store.left_memory);
    }
}
