//! Loads whose records may not be durable.
//!
//! A master lets readers at a block as soon as it is back from a medium. The record of its place is durable some
//! milliseconds later. A master that dies before that leaves a successor that knows neither the place nor the
//! leases on it. The node knows the place, and says so when it registers.
//!
//! A load is named no more when its extent is fenced, when its life ends, or when the master of its term says that its
//! record is durable. That master says so for all loads below a grant.

use super::{Fence, Span, extent};
use kvpool_types::{Epoch, Extent, GrantId, Version};
use std::collections::BTreeMap;

/// The most loads that a node remembers here: those under the highest grants.
const MOST: usize = 1 << 18;

/// Loads whose records may not be durable, by their grants. Those whose extent was fenced or written since are
/// passed over when they are named.
#[derive(Debug, Default)]
pub(super) struct Unrecorded {
    loads: BTreeMap<GrantId, (Epoch, Span)>,
    /// Set when one was forgotten for want of room.
    was_full: bool,
}

impl Unrecorded {
    fn add(&mut self, grant: GrantId, epoch: Epoch, span: Span) {
        self.loads.insert(grant, (epoch, span));
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

    /// Forgets the loads of a term below a grant. Grants of earlier terms are lower.
    fn end(&mut self, epoch: Epoch, below: GrantId) {
        let lower = self.loads.range(..below);
        let over = lower.filter(|(_, (of, _))| *of == epoch);
        for grant in over.map(|(grant, _)| *grant).collect::<Vec<_>>() {
            self.loads.remove(&grant);
        }
    }
}

impl Fence {
    /// Notes that a copy of `version` was loaded to `extent` under `grant`. Version 0 as in [`Fence::is_copy_of`].
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

    /// Notes that the master of this term needs no mention of loads below `below`.
    pub(crate) fn loads_recorded(&mut self, below: GrantId) {
        let epoch = self.epoch();
        self.unrecorded.end(epoch, below);
    }

    /// The extents of loads whose records may not be durable, under the present segment numbers.
    pub(crate) fn loaded(&self) -> Vec<Extent> {
        let ids = self.segment_ids();
        let loads = self.unrecorded.loads.iter();
        loads
            .filter_map(|(grant, (epoch, span))| {
                let record = self.spaces.get(span.segment.0)?.records.get(span.range)?;
                let is_there = record.grant == *grant && record.epoch == *epoch;
                let id = ids.get(span.segment.0).filter(|_| is_there)?;
                Some(extent(*id, span.range))
            })
            .collect()
    }
}
