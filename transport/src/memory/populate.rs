//! Fills the page table of a mapping before its bytes are used.
//!
//! The pages of a segment exist from the start. But each process that maps it takes a page fault at
//! the first touch of each page: a cold copy runs at half the speed of a warm copy.

// UNSAFETY: gives the kernel advice on mappings that a `Region` keeps alive during the call.

use super::{Region, WeakRegion};
use kvpool_types::{Length, Offset};
use rustix::io::Errno;
use rustix::mm::Advice;

/// Bytes that one call populates, about a millisecond of work. A mapping that is being dropped
/// waits for one call at most.
const STEP: u64 = 4 << 20;

/// The progress of populating one mapping.
#[derive(Debug)]
pub(crate) struct Populate {
    region: WeakRegion,
    next: u64,
}

impl Populate {
    /// Starts at the first byte. Holds the region weakly.
    pub(crate) fn of(region: &Region) -> Self {
        Self {
            region: region.downgrade(),
            next: 0,
        }
    }
}

/// Populates the next few MiB of a mapping of shared memory; for writing when it is writable. False
/// when nothing is left to do: all pages are in place, the region was dropped, or the kernel lacks
/// the advice.
pub(crate) fn populate_step(populate: &mut Populate) -> bool {
    let Some(region) = populate.region.upgrade() else {
        return false;
    };
    let length = STEP.min(region.length().0 - populate.next);
    if length == 0 {
        return false;
    }
    let advice = if region.is_writable() {
        Advice::LinuxPopulateWrite
    } else {
        Advice::LinuxPopulateRead
    };
    match advise(&region, populate.next, length, advice) {
        Ok(()) => populate.next += length,
        Err(Errno::INTR | Errno::AGAIN) => {}
        Err(error) => {
            tracing::debug!(%error, "populating a mapping stopped: its first use takes page faults");
            return false;
        }
    }
    true
}

/// Advises the kernel on a part of a mapping. Only for advice that leaves every byte unchanged.
pub(super) fn advise(region: &Region, from: u64, length: u64, advice: Advice) -> Result<(), Errno> {
    let whole = region.whole();
    let start = whole.range(Offset(from), Length(length));
    // SAFETY: the range lies inside the region, as `range` has checked, and the region lives during
    // the call. The kinds of advice given in this crate remove and change no byte.
    unsafe { rustix::mm::madvise(start.cast(), Length(length).as_usize(), advice) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::create_segment;
    use std::os::fd::AsFd;

    /// The number of bytes of a mapping that are in the page table.
    fn resident(region: &Region) -> u64 {
        let start = format!("{:x}-", region.whole().as_ptr().addr());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = maps
            .lines()
            .skip_while(|line| !line.starts_with(&start))
            .find_map(|line| line.strip_prefix("Rss:"))
            .unwrap();
        let kib: u64 = own.trim().strip_suffix(" kB").unwrap().parse().unwrap();
        kib << 10
    }

    #[test]
    fn a_mapping_is_resident_once_it_is_populated() {
        let length = Length(3 * STEP + 8192);
        let (fd, _region) = create_segment(length, false, "kvpool-test").unwrap();
        for writable in [false, true] {
            let region = Region::map(fd.as_fd(), length, writable).unwrap();
            assert_eq!(resident(&region), 0);
            let mut populate = Populate::of(&region);
            assert!(populate_step(&mut populate));
            let first = resident(&region);
            assert!((STEP..length.0).contains(&first), "{first}");
            while populate_step(&mut populate) {}
            assert_eq!(resident(&region), length.0);
        }
    }

    #[test]
    fn a_dropped_mapping_is_populated_no_further() {
        let length = Length(2 * STEP);
        let (fd, _region) = create_segment(length, false, "kvpool-test").unwrap();
        let region = Region::map(fd.as_fd(), length, false).unwrap();
        let mut populate = Populate::of(&region);
        assert!(populate_step(&mut populate));
        drop(region);
        assert!(!populate_step(&mut populate));
    }
}
