//! The pages of one decode process, and the epochs under which they may be written.

use kvpool_handoff::room::{ChunkBody, RoomTag};
use kvpool_types::Checksum;
use std::collections::{BTreeMap, BTreeSet};

/// The value of a page that belongs to no room. A write into such a page destroys it.
pub(crate) const CANARY: u64 = 0xdead_beef;

/// The bytes of one page and layer from one sender, or of a slot of metadata.
pub(crate) fn truth(room: u64, sender: usize, page: u32, layer: u32) -> u64 {
    let mut value = 0xcbf2_9ce4_8422_2325u64;
    for part in [room, sender as u64, u64::from(page), u64::from(layer)] {
        value = (value ^ part).wrapping_mul(0x0100_0000_01b3);
        value ^= value >> 29;
    }
    value
}

/// The checksum of values in order.
pub(crate) fn sum(values: &[u64]) -> Checksum {
    let fold = |sum: u64, value: &u64| (sum.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9);
    Checksum(values.iter().fold(17, fold))
}

/// The cells of a chunk, as (page, layer) of the request. Metadata is one cell beyond all pages.
pub(crate) fn cells(body: &ChunkBody) -> Vec<(u32, u32)> {
    match body {
        ChunkBody::Aux => vec![(u32::MAX, 0)],
        ChunkBody::Pages(rectangle) => {
            let pages = rectangle.pages.clone();
            let layers = rectangle.layers.clone();
            pages
                .flat_map(|page| layers.clone().map(move |layer| (page, layer)))
                .collect()
        }
    }
}

/// One room at the transport of a decode process.
#[derive(Clone, Debug)]
pub(crate) struct RoomEpoch {
    pub(crate) tag: RoomTag,
    pub(crate) is_open: bool,
    /// The writes that were admitted and have not ended.
    pub(crate) under_way: usize,
    pub(crate) held: u32,
    pub(crate) pages: Vec<u32>,
}

/// The memory of a decode process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    /// The epoch that each page belongs to.
    owners: BTreeMap<u32, u64>,
    /// The values, by page of the process, layer and sender.
    values: BTreeMap<(u32, u32, usize), u64>,
    /// The slots of metadata, by epoch and sender.
    aux: BTreeMap<(u64, usize), u64>,
    pub(crate) epochs: BTreeMap<u64, RoomEpoch>,
    free: BTreeSet<u32>,
}

impl Memory {
    pub(crate) fn with_pages(count: u32) -> Self {
        Self {
            free: (0..count).collect(),
            ..Self::default()
        }
    }

    /// Takes all pages for a room, or none.
    pub(crate) fn reserve(&mut self, epoch: u64, count: usize) -> Option<Vec<u32>> {
        if self.free.len() < count {
            return None;
        }
        let pages: Vec<u32> = self.free.iter().copied().take(count).collect();
        for page in &pages {
            self.free.remove(page);
            self.owners.insert(*page, epoch);
        }
        Some(pages)
    }

    /// Gives the pages of a room back, and erases their values.
    pub(crate) fn release(&mut self, epoch: u64) {
        for page in self.epochs[&epoch].pages.clone() {
            self.owners.remove(&page);
            self.values.retain(|(of, _, _), _| *of != page);
            self.free.insert(page);
        }
    }

    /// The engine takes the pages of a room that has succeeded.
    pub(crate) fn keep(&mut self, epoch: u64) {
        for page in &self.epochs[&epoch].pages {
            self.owners.remove(page);
        }
    }

    fn page(&self, epoch: u64, page: u32) -> u32 {
        let room = &self.epochs[&epoch];
        room.pages[(page - room.held) as usize]
    }

    /// Writes values. The error names the broken rule.
    pub(crate) fn place(
        &mut self,
        epoch: u64,
        sender: usize,
        body: &ChunkBody,
        values: &[u64],
    ) -> Result<(), String> {
        for ((page, layer), value) in cells(body).into_iter().zip(values) {
            if page == u32::MAX {
                self.aux.insert((epoch, sender), *value);
                continue;
            }
            let at = self.page(epoch, page);
            if self.owners.get(&at) != Some(&epoch) {
                return Err(format!(
                    "page {at} was written after its room {epoch} was closed"
                ));
            }
            self.values.insert((at, layer, sender), *value);
        }
        Ok(())
    }

    pub(crate) fn read(&self, epoch: u64, sender: usize, body: &ChunkBody) -> Vec<u64> {
        let value = |(page, layer)| match page {
            u32::MAX => self.aux.get(&(epoch, sender)),
            _ => self.values.get(&(self.page(epoch, page), layer, sender)),
        };
        let read = cells(body).into_iter().map(value);
        read.map(|value| value.copied().unwrap_or(CANARY)).collect()
    }
}
