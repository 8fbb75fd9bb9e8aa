//! The copies whose records are on their way to the log, by key.
//!
//! The tier gets a copy when its record is durable. Until then this table has the copy's place.

use super::super::Pool;
use super::Place;
use super::transfers::{Direction, Moved, Transfer};
use crate::directory::Removed;
use crate::store::journal::Ack;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, Version};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;

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
        self.places_of(block.namespace, &block.key, block.version)
    }

    /// [`Recording::places`] for a block that may have left memory.
    fn places_of(
        &self,
        namespace: NamespaceId,
        key: &Key,
        version: Version,
    ) -> SmallVec<[Place; 1]> {
        if self.0.is_empty() {
            return SmallVec::new();
        }
        let copies = self.0.get(&(namespace, key.clone()));
        let of_version = copies.into_iter().flatten();
        of_version
            .filter(|(other, _)| *other == version)
            .map(|(_, place)| *place)
            .collect()
    }
}

impl Pool {
    /// Whether the record of a block's copy is on its way to the log, and the copy will outlive the block's memory.
    /// If the log refuses the record, [`Pool::give_up_refused`] counts the block as lost.
    pub(super) fn is_being_recorded(&self, block: &Removed) -> bool {
        let places = {
            let traffic = self.tiering.traffic.lock();
            let recording = &traffic.recording;
            recording.places_of(block.namespace, &block.key, block.version)
        };
        let mut media = places.iter().map(|at| at.medium);
        media.any(|medium| self.keeps_copies(medium, None))
    }

    /// Ends a transfer whose copy is not recorded, because another copy of the block stays.
    ///
    /// The record of that copy may still be on its way to the log. The log may refuse the record, or the node of that
    /// copy may begin to leave. Then a block that is in memory is stored again. A move whose copy is still at its
    /// old place is repeated. Until this is known the zones stay busy: no drain ends, and no zone loses that copy.
    pub(super) fn end_second(self: &Arc<Self>, transfer: &Transfer) {
        let (block, medium) = (&transfer.block, transfer.place.medium);
        let on_their_way = self.tiering.traffic.lock().recording.places(block);
        let is_logged = on_their_way.is_empty() && self.has_good_copy_beside(block, medium);
        if is_logged {
            self.leave_zones(transfer);
            if let Direction::Forward { .. } = transfer.direction {
                self.forwarded(transfer, true);
            }
            return;
        }
        let (pool, of) = (Arc::clone(self), transfer.clone());
        // The journal calls back in the order of the log.
        self.journal()
            .submit_now(Vec::new(), Ack::Durable, move |_| {
                if let Direction::Forward { from } = of.direction {
                    pool.leave_zones(&of);
                    return pool.forwarded(&of, !pool.lies_at(&of.block, from));
                }
                if !pool.has_good_copy_beside(&of.block, medium) {
                    let _is_queued = pool.store_again(&of);
                }
                pool.leave_zones(&of);
                pool.tiering.wake();
            });
    }
}
