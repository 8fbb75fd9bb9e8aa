//! The blocks that were put in this term, while a floor of leases lasts.
//!
//! After a restart or a fail-over nobody knows the leases of the term before. Its blocks count as leased until one
//! lease has passed. Blocks that were put since have no such leases, so they alone may be evicted meanwhile: oldest
//! put first, since they are few and have hardly been used.
//!
//! ADR 0022 says why the floor does not protect these blocks.

use crate::clock::BootInstant;
use crate::directory::{BlockId, Directory, Removed, Single};
use kvpool_types::{SegmentId, Version};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// The most blocks that are remembered: 16 MiB of memory. More wait for the floor's end.
const MOST: usize = 1 << 20;
/// How many blocks one step looks at.
const STEP: usize = 1 << 16;

/// Those blocks, oldest put first.
#[derive(Debug, Default)]
pub(super) struct Fresh(Mutex<VecDeque<(BlockId, Version)>>);

impl Fresh {
    /// Remembers blocks that have been put now.
    pub(super) fn put(&self, blocks: impl Iterator<Item = (BlockId, Version)>) {
        let mut fresh = self.0.lock();
        let left = MOST.saturating_sub(fresh.len());
        fresh.extend(blocks.take(left));
    }

    /// Remembers none: the floor has passed.
    pub(super) fn forget(&self) {
        let mut fresh = self.0.lock();
        if fresh.capacity() > 0 {
            *fresh = VecDeque::new();
        }
    }

    /// Evicts up to `goal` bytes of them on segments that `gives_room` names, and not a block more.
    pub(super) fn evict(
        &self,
        directory: &Directory,
        goal: u64,
        now: BootInstant,
        gives_room: impl Fn(SegmentId) -> bool,
    ) -> Vec<Removed> {
        let (mut evicted, mut bytes) = (Vec::new(), 0);
        let mut looks = self.0.lock().len().min(STEP);
        while bytes < goal && looks > 0 {
            looks -= 1;
            // Publishing pushes here: the lock is not held while a shard is.
            let Some((id, version)) = self.0.lock().pop_front() else {
                break;
            };
            match directory.evict_block(id, version, now, &gives_room) {
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
