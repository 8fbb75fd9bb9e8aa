//! Loads whose records may not be durable.
//!
//! A master lets readers at a block as soon as it is back from a medium. The record of its place is durable some
//! milliseconds later. A master that dies before that leaves a successor that knows neither the place nor the
//! leases on it. The node knows the place, and says so when it registers.
//!
//! A load is forgotten when its extent is fenced, when its life ends, or when the master of its term says that its
//! record is durable. That master says so for all loads below a grant.

use super::{Fence, extent};
use kvpool_types::{Epoch, Extent, GrantId, Version};
use std::cmp::Reverse;
use std::collections::HashMap;

/// The most loads that a node names. Among more it names those under the highest grants.
const MOST_NAMED: usize = 1 << 18;

/// Below which grant the loads of each term need no mention. A term whose master does not say has no entry.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    below: HashMap<Epoch, GrantId>,
}

impl Recorded {
    fn are_recorded(&self, epoch: Epoch, grant: GrantId) -> bool {
        self.below.get(&epoch).is_none_or(|below| grant < *below)
    }
}

impl Fence {
    /// Notes that a copy of `version` was loaded to `extent` under `grant`. Version 0 as in [`Fence::is_copy_of`].
    pub(crate) fn is_load_of(&mut self, extent: &Extent, grant: GrantId, version: Version) {
        self.note_copy(extent, grant, |record| {
            record.version = version;
            record.is_load = true;
        });
    }

    /// Notes that the master of this term needs no mention of loads below `below`.
    pub(crate) fn loads_recorded(&mut self, below: GrantId) {
        let epoch = self.epoch();
        let known = self.recorded.below.entry(epoch).or_insert(below);
        *known = below.max(*known);
    }

    /// The extents of loads whose records may not be durable, under the present segment numbers.
    pub(crate) fn loaded(&self) -> Vec<Extent> {
        let named = self.segment_ids().iter().zip(&self.spaces);
        let mut loaded: Vec<(GrantId, Extent)> = named
            .flat_map(|(&segment, space)| {
                let loads = space.records.iter().filter(|(_, record)| {
                    record.is_load && !self.recorded.are_recorded(record.epoch, record.grant)
                });
                loads.map(move |(range, record)| (record.grant, extent(segment, range)))
            })
            .collect();
        if loaded.len() > MOST_NAMED {
            tracing::warn!(
                loads = loaded.len(),
                named = MOST_NAMED,
                "too many loads are without a durable record to name all of them"
            );
            loaded.sort_unstable_by_key(|(grant, _)| Reverse(*grant));
            loaded.truncate(MOST_NAMED);
        }
        loaded.into_iter().map(|(_, extent)| extent).collect()
    }

    /// Forgets every load, for the life that knew them is over.
    pub(super) fn forget_loads(&mut self) {
        self.recorded = Recorded::default();
    }
}
