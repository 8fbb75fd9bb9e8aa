//! The blocks that were put in this term, while the lease floor lasts.
//!
//! After a restart or a fail-over no master knows the leases of the term before. Blocks of that
//! term count as leased until one lease TTL has passed. Blocks put since then have no such leases,
//! so only they may be evicted meanwhile. Eviction takes the oldest put first, since these blocks
//! are few and hardly used.
//!
//! ADR 0022 says why the floor does not protect these blocks.

use crate::clock::BootInstant;
use crate::directory::{BlockId, Directory, Removed, Single, Tick};
use kvpool_types::{SegmentId, Version};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// The most blocks remembered: 16 MiB of memory. Any further block stays in memory until the
/// floor's end.
const MOST: usize = 1 << 20;
/// The number of blocks that one step examines.
const STEP: usize = 1 << 16;

/// The blocks, oldest put first.
#[derive(Debug, Default)]
pub(super) struct RecentPuts(Mutex<VecDeque<(BlockId, Version)>>);

impl RecentPuts {
    /// Records blocks that were just put.
    pub(super) fn put(&self, blocks: impl Iterator<Item = (BlockId, Version)>) {
        let mut fresh = self.0.lock();
        let left = MOST.saturating_sub(fresh.len());
        fresh.extend(blocks.take(left));
    }

    /// Forgets all blocks, because the floor has passed.
    pub(super) fn forget(&self) {
        let mut fresh = self.0.lock();
        if fresh.capacity() > 0 {
            *fresh = VecDeque::new();
        }
    }

    /// Evicts blocks of this queue whose last use is before a tick. Ends with the first block at
    /// which the freed extents on segments that `gives_room` accepts reach `goal` bytes.
    pub(super) fn evict(
        &self,
        directory: &Directory,
        before: Tick,
        goal: u64,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Vec<Removed> {
        let (mut evicted, mut bytes) = (Vec::new(), 0);
        let mut looks = self.0.lock().len().min(STEP);
        while bytes < goal && looks > 0 {
            looks -= 1;
            // Publishing pushes here while it holds a stripe's lock. So this lock is never held
            // while a stripe's lock is taken.
            let Some((id, version)) = self.0.lock().pop_front() else {
                break;
            };
            match directory.evict_block(id, version, before, now, &gives_room) {
                Single::Evicted(removed) => {
                    bytes += removed.footprint_on(&gives_room);
                    evicted.push(removed);
                }
                Single::Stays => self.0.lock().push_back((id, version)),
                Single::Gone => {}
            }
        }
        evicted
    }
}
