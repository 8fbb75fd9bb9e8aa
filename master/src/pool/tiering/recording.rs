//! The copies whose records are on their way to the log, by key.
//!
//! The tier gets a copy when its record is durable. Until then this table has the copy's place.

use super::Place;
use super::transfers::Moved;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, Version};
use smallvec::SmallVec;
use std::collections::HashMap;

/// What became of a copy that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its record is on its way to the log.
    Recorded,
    /// Another copy of the block stays, so this one is not needed.
    Second,
    /// The block has gone, or its key is being changed.
    Gone,
}

/// The copies of one key.
type Copies = SmallVec<[(Version, Place); 1]>;

/// The places of copies whose records are on their way to the log.
#[derive(Debug, Default)]
pub(super) struct Recording(HashMap<(NamespaceId, Key), Copies>);

impl Recording {
    /// Adds a copy whose record is sent to the log next.
    pub(super) fn begin(&mut self, block: &Moved, place: Place) {
        let copies = self.0.entry((block.namespace, block.key.clone()));
        copies.or_default().push((block.version, place));
    }

    /// Removes a copy, because the tier has it or the log has refused its record.
    pub(super) fn end(&mut self, block: &Moved, place: Place) {
        let key = (block.namespace, block.key.clone());
        let Some(copies) = self.0.get_mut(&key) else {
            return;
        };
        copies.retain(|copy| *copy != (block.version, place));
        if copies.is_empty() {
            self.0.remove(&key);
        }
    }

    /// The places of a block's copies.
    pub(super) fn places(&self, block: &Moved) -> SmallVec<[Place; 1]> {
        let copies = self.0.get(&(block.namespace, block.key.clone()));
        let of_version = copies.into_iter().flatten();
        of_version
            .filter(|(version, _)| *version == block.version)
            .map(|(_, place)| *place)
            .collect()
    }
}
