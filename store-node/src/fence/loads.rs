//! Loads whose records may not be durable yet.
//!
//! A master lets readers read a block as soon as it is loaded from a medium. The record of the block's extent
//! is durable some milliseconds later. If the master dies before that, its successor knows neither the extent
//! nor the leases on it. The node knows the extent, and names it when it registers.
//!
//! The node no longer names a load when its extent is fenced or its incarnation ends. The same holds once the
//! master of its term reports that the record is durable. The master reports this for all loads below a grant
//! id.

use super::record::Record;
use super::{Fence, Span, extent};
use kvpool_types::{Epoch, Extent, GrantId, Version};
use std::collections::BTreeMap;

/// The most loads that are kept. Beyond that, the loads of the earliest term with the lowest grant ids are
/// forgotten.
const MOST: usize = 1 << 18;

/// Loads whose records may not be durable, by term and grant id. A load is forgotten with the fence's record of
/// its extent. So each load that is kept is still at its extent.
#[derive(Debug, Default)]
pub(super) struct Unrecorded {
    loads: BTreeMap<(Epoch, GrantId), Span>,
    /// Whether a load was ever forgotten because of [`MOST`].
    was_full: bool,
}

impl Unrecorded {
    fn add(&mut self, grant: GrantId, epoch: Epoch, span: Span) {
        self.loads.insert((epoch, grant), span);
        if self.loads.len() > MOST {
            self.loads.pop_first();
            if !std::mem::replace(&mut self.was_full, true) {
                tracing::warn!(
                    most = MOST,
                    "too many loads are without a durable record to remember all of them"
                );
            }
        }
    }

    /// Forgets the load that wrote this extent, if a load did. The fence no longer has the record.
    pub(super) fn forget(&mut self, removed: &Record) {
        self.loads.remove(&(removed.epoch, removed.grant));
    }

    /// Forgets the loads of a term below a grant id. Looks at no load of another term.
    fn end(&mut self, epoch: Epoch, below: GrantId) {
        let over = self.loads.range((epoch, GrantId(0))..(epoch, below));
        for load in over.map(|(load, _)| *load).collect::<Vec<_>>() {
            self.loads.remove(&load);
        }
    }
}

impl Fence {
    /// Records that a copy of `version` was loaded to `extent` under `grant`. Version 0 as in
    /// [`Fence::is_copy_of`].
    pub(crate) fn is_load_of(&mut self, extent: &Extent, grant: GrantId, version: Version) {
        let noted = self.note_copy(extent, grant, |record| {
            record.version = version;
            record.epoch
        });
        let says = self
            .term
            .as_ref()
            .is_some_and(|term| term.says_what_is_recorded);
        if let Some((span, epoch)) = noted.filter(|_| says) {
            self.unrecorded.add(grant, epoch, span);
        }
    }

    /// Forgets loads of this term below `below`, whose records are durable.
    pub(crate) fn loads_recorded(&mut self, below: GrantId) {
        let epoch = self.epoch();
        self.unrecorded.end(epoch, below);
    }

    /// The extents of loads whose records may not be durable, under the present segment numbers.
    pub(crate) fn loaded(&self) -> Vec<Extent> {
        let ids = self.segment_ids();
        let loads = self.unrecorded.loads.values();
        loads
            .filter_map(|span| Some(extent(*ids.get(span.segment.0)?, span.range)))
            .collect()
    }
}
