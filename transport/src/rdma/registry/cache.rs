//! Caches registrations of memory whose owners do not register it.
//!
//! An entry belongs to one region, not to a range of addresses. Memory that is unmapped and mapped
//! again at the same address is another region, and never finds the old registration, which still
//! names the old pages. The cache holds regions weakly. Insertions drop entries of dropped regions,
//! and the owner sweeps the cache every second.

// UNSAFETY: registers ranges that it widens itself, inside the region of the given slice.
#![allow(unsafe_code, reason = "registers ranges of memory")]

use super::{Access, Registration};
use crate::memory::{Region, Slice, WeakRegion};
use crate::rdma::device::Device;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// Registrations are widened to multiples of this many bytes, inside the region, so that adjacent
/// slices share them.
const GRAIN: usize = 2 << 20;

/// The cache of one rail.
pub(in crate::rdma) struct Cache {
    intervals: Mutex<Intervals<Registration>>,
    most_ranges: usize,
    most_bytes: u64,
}

/// Ranges of regions, each with a handle. The ranges of one region do not overlap.
struct Intervals<H> {
    /// By the region's identity, then by the range's start.
    entries: BTreeMap<(usize, usize), Entry<H>>,
    bytes: u64,
    uses: u64,
}

struct Entry<H> {
    region: WeakRegion,
    end: usize,
    used: u64,
    handle: H,
}

impl Cache {
    pub(in crate::rdma) fn new(most_ranges: usize, most_bytes: u64) -> Self {
        Self {
            intervals: Mutex::new(Intervals::new()),
            most_ranges,
            most_bytes,
        }
    }

    /// A registration that covers the slice, for local use.
    pub(in crate::rdma) fn registration(
        &self,
        device: &Arc<Device>,
        slice: &Slice,
    ) -> io::Result<Registration> {
        let region = slice.region();
        let start = slice.as_ptr().addr();
        let end = start + slice.length().as_usize();
        let (start, end) = {
            let mut intervals = self.intervals.lock();
            if let Some(found) = intervals.find(region, start, end) {
                return Ok(found);
            }
            intervals.widen(region, start, end)
        };
        // SAFETY: the range lies in the region, which the caller's slice keeps alive meanwhile. If
        // the region is dropped before the registration, its pages stay locked and belong to nobody
        // else. No work request names them, because work requests keep their slices.
        let made = unsafe {
            Registration::of_range(
                device,
                start,
                end - start,
                slice.is_writable(),
                Access::Local,
                None,
            )
        }?;
        let dropped = {
            let mut intervals = self.intervals.lock();
            let mut dropped = intervals.insert(region, start, end, made.clone());
            dropped.extend(intervals.stale());
            dropped.extend(intervals.evict(
                self.most_ranges,
                self.most_bytes,
                Registration::is_sole,
            ));
            dropped
        };
        // Dropped outside the lock, because undoing a registration is slow.
        drop(dropped);
        Ok(made)
    }

    /// Drops the registrations of dropped regions.
    pub(in crate::rdma) fn sweep(&self) {
        let dropped = self.intervals.lock().stale();
        drop(dropped);
    }

    /// Whether the cache is empty.
    pub(in crate::rdma) fn is_empty(&self) -> bool {
        self.intervals.lock().entries.is_empty()
    }

    /// Drops the unused entries. Returns their number.
    pub(in crate::rdma) fn clear(&self) -> usize {
        let dropped = self.intervals.lock().evict(0, 0, Registration::is_sole);
        dropped.len()
    }
}

impl<H: Clone> Intervals<H> {
    fn new() -> Self {
        Self {
            entries: BTreeMap::new(),
            bytes: 0,
            uses: 0,
        }
    }

    /// The handle that covers a range of a region.
    fn find(&mut self, region: &Region, start: usize, end: usize) -> Option<H> {
        let id = region.identity();
        let (_, entry) = self.entries.range_mut((id, 0)..=(id, start)).next_back()?;
        // The entry's weak reference keeps its region's identity from being reused, so the entry
        // belongs to this region.
        if entry.end < end {
            return None;
        }
        self.uses += 1;
        entry.used = self.uses;
        Some(entry.handle.clone())
    }

    /// The range to register for a range that was not found: whole grains of the region, and all
    /// ranges that it overlaps.
    fn widen(&self, region: &Region, start: usize, end: usize) -> (usize, usize) {
        let whole = region.whole();
        let first = whole.as_ptr().addr();
        let last = first + whole.length().as_usize();
        let mut start = (start / GRAIN * GRAIN).max(first);
        let mut end = end.next_multiple_of(GRAIN).min(last);
        for (from, entry) in self.overlapping(region.identity(), start, end) {
            start = start.min(from);
            end = end.max(entry.end);
        }
        (start, end)
    }

    /// Inserts a range and removes the ranges that it overlaps.
    fn insert(&mut self, region: &Region, start: usize, end: usize, handle: H) -> Vec<H> {
        let id = region.identity();
        let overlapped: Vec<usize> = self
            .overlapping(id, start, end)
            .map(|(from, _)| from)
            .collect();
        let dropped = overlapped
            .into_iter()
            .filter_map(|from| self.remove((id, from)))
            .collect();
        self.uses += 1;
        self.bytes += (end - start) as u64;
        let entry = Entry {
            region: region.downgrade(),
            end,
            used: self.uses,
            handle,
        };
        self.entries.insert((id, start), entry);
        dropped
    }

    /// Removes the entries of dropped regions.
    fn stale(&mut self) -> Vec<H> {
        let gone: Vec<(usize, usize)> = self
            .entries
            .iter()
            .filter(|(_, entry)| !entry.region.is_alive())
            .map(|(key, _)| *key)
            .collect();
        gone.into_iter()
            .filter_map(|key| self.remove(key))
            .collect()
    }

    /// Removes idle entries, least recently used first, until the limits hold.
    fn evict(&mut self, ranges: usize, bytes: u64, is_idle: impl Fn(&H) -> bool) -> Vec<H> {
        let is_over = |it: &Self| it.entries.len() > ranges || it.bytes > bytes;
        if !is_over(self) {
            return Vec::new();
        }
        let mut idle: Vec<(u64, (usize, usize))> = self
            .entries
            .iter()
            .filter(|(_, entry)| is_idle(&entry.handle))
            .map(|(key, entry)| (entry.used, *key))
            .collect();
        idle.sort_unstable();
        let mut dropped = Vec::new();
        for (_, key) in idle {
            if !is_over(self) {
                break;
            }
            dropped.extend(self.remove(key));
        }
        dropped
    }

    fn overlapping(
        &self,
        id: usize,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (usize, &Entry<H>)> {
        // Entries do not overlap, so at most one starts before the range and reaches into it.
        let before = self.entries.range((id, 0)..(id, start)).next_back();
        let inside = self.entries.range((id, start)..(id, end));
        before
            .into_iter()
            .filter(move |(_, entry)| entry.end > start)
            .chain(inside)
            .map(|((_, from), entry)| (*from, entry))
    }

    fn remove(&mut self, key: (usize, usize)) -> Option<H> {
        let entry = self.entries.remove(&key)?;
        self.bytes -= (entry.end - key.1) as u64;
        Some(entry.handle)
    }
}

#[cfg(test)]
mod tests;
