//! The blocks of one stripe, by slot, in columns.
//!
//! ```text
//!  slot ─┬─► Entry   64 bytes: key, recency, lease, the replica
//!        ├─► Rest    24 bytes: version, checksum, length, lineage
//!        └─► Links   12 bytes: neighbours in the list, the order
//! ```

use super::entry::{Entry, Links, Rest};
use crate::slab::NONE;

/// The number of blocks in one chunk of a column.
const CHUNK: usize = 64;

/// Blocks at stable slots.
#[derive(Debug)]
pub(super) struct Entries {
    entries: Column<Entry>,
    rests: Column<Rest>,
    links: Column<Links>,
    vacant: u32,
    high: u32,
    len: u32,
}

impl Default for Entries {
    fn default() -> Self {
        Self {
            entries: Column::default(),
            rests: Column::default(),
            links: Column::default(),
            vacant: NONE,
            high: 0,
            len: 0,
        }
    }
}

impl Entries {
    /// Stores a block and returns its slot.
    pub(super) fn insert(&mut self, entry: Entry, rest: Rest) -> u32 {
        self.len += 1;
        let slot = self.vacant_slot();
        *self.entries.at_mut(slot) = entry;
        *self.rests.at_mut(slot) = rest;
        *self.links.at_mut(slot) = Links::UNLINKED;
        slot
    }

    fn vacant_slot(&mut self) -> u32 {
        if self.vacant != NONE {
            let next = self.entries.at(self.vacant).next_vacant();
            let next = next.expect("invariant: only vacant slots are linked");
            return std::mem::replace(&mut self.vacant, next);
        }
        let slot = self.high;
        self.high = slot
            .checked_add(1)
            .filter(|high| *high != NONE)
            .expect("invariant: memory ends before the slots do");
        if (slot as usize).is_multiple_of(CHUNK) {
            self.entries.grow(|| Entry::vacant(NONE));
            self.rests.grow(Rest::default);
            self.links.grow(|| Links::UNLINKED);
        }
        slot
    }

    /// Removes a block, which must not be in the list.
    pub(super) fn remove(&mut self, slot: u32) -> Entry {
        let vacant = Entry::vacant(self.vacant);
        self.vacant = slot;
        self.len -= 1;
        std::mem::replace(self.at_mut(slot), vacant)
    }

    /// The block in a slot; `None` for a vacant slot.
    #[inline]
    pub(super) fn get(&self, slot: u32) -> Option<&Entry> {
        let entry = self.entries.get(slot)?;
        entry.next_vacant().is_none().then_some(entry)
    }

    /// The block in an occupied slot.
    #[inline]
    pub(super) fn at(&self, slot: u32) -> &Entry {
        self.get(slot).expect("invariant: what is linked is there")
    }

    /// The block in an occupied slot.
    #[inline]
    pub(super) fn at_mut(&mut self, slot: u32) -> &mut Entry {
        let entry = self.entries.at_mut(slot);
        assert!(
            entry.next_vacant().is_none(),
            "invariant: what is linked is there"
        );
        entry
    }

    /// The [`Rest`] of the block in an occupied slot.
    pub(super) fn rest(&self, slot: u32) -> &Rest {
        self.rests.at(slot)
    }

    /// The [`Rest`] of the block in an occupied slot.
    pub(super) fn rest_mut(&mut self, slot: u32) -> &mut Rest {
        self.rests.at_mut(slot)
    }

    /// The list neighbours of the block in an occupied slot.
    #[inline]
    pub(super) fn links(&self, slot: u32) -> Links {
        *self.links.at(slot)
    }

    /// The list neighbours of the block in an occupied slot.
    #[inline]
    pub(super) fn links_mut(&mut self, slot: u32) -> &mut Links {
        self.links.at_mut(slot)
    }

    /// Reads a slot, if it exists, to bring its cache line into the processor's cache.
    #[inline]
    pub(super) fn read(&self, slot: u32) -> u32 {
        let entry = self.entries.get(slot).map_or(0, |entry| entry.affixes);
        entry ^ self.links.get(slot).map_or(0, |links| links.next)
    }

    /// The number of blocks.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// The first slot that was never used.
    pub(super) fn high(&self) -> u32 {
        self.high
    }

    /// The bytes of all columns.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.entries.memory_bytes() + self.rests.memory_bytes() + self.links.memory_bytes()
    }
}

/// Values in chunks. A value never moves, and less than one chunk is unused.
#[derive(Debug)]
struct Column<T> {
    chunks: Vec<Box<[T; CHUNK]>>,
}

impl<T> Default for Column<T> {
    fn default() -> Self {
        Self { chunks: Vec::new() }
    }
}

impl<T> Column<T> {
    fn grow(&mut self, fill: impl FnMut() -> T) {
        let mut chunk = Vec::with_capacity(CHUNK);
        chunk.resize_with(CHUNK, fill);
        let chunk = Box::try_from(chunk).ok();
        self.chunks
            .push(chunk.expect("invariant: a chunk has its length"));
    }

    #[inline]
    fn get(&self, slot: u32) -> Option<&T> {
        let slot = slot as usize;
        self.chunks.get(slot / CHUNK)?.get(slot % CHUNK)
    }

    #[inline]
    fn at(&self, slot: u32) -> &T {
        self.get(slot).expect("invariant: slots are below the high")
    }

    #[inline]
    fn at_mut(&mut self, slot: u32) -> &mut T {
        let slot = slot as usize;
        self.chunks
            .get_mut(slot / CHUNK)
            .and_then(|chunk| chunk.get_mut(slot % CHUNK))
            .expect("invariant: slots are below the high")
    }

    fn memory_bytes(&self) -> u64 {
        let chunks = self.chunks.len() * CHUNK * size_of::<T>();
        (chunks + self.chunks.capacity() * size_of::<Box<[T; CHUNK]>>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::{Checksum, Version};

    fn insert(entries: &mut Entries, n: u64) -> u32 {
        entries.insert(Entry::new(), Rest::new(Version(n), Checksum(n), 1))
    }

    #[test]
    fn slots_are_stable_and_reused() {
        let mut entries = Entries::default();
        let slots: Vec<u32> = (0..1000).map(|n| insert(&mut entries, n)).collect();
        entries.remove(slots[7]);
        entries.links_mut(slots[500]).next = 3;
        entries.remove(slots[500]);
        assert!(entries.get(slots[7]).is_none() && entries.get(1000).is_none());
        assert_eq!((entries.len(), entries.high()), (998, 1000));
        assert_eq!(insert(&mut entries, 2000), slots[500]);
        assert_eq!(
            entries.links(slots[500]).next,
            NONE,
            "nothing of the one before"
        );
        assert_eq!(insert(&mut entries, 2001), slots[7]);
        assert_eq!(insert(&mut entries, 2002), 1000);
        assert_eq!(entries.rest(slots[999]).version, Version(999));
        assert_eq!(entries.rest(slots[7]).version, Version(2001));
    }
}
