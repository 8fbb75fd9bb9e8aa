//! Filling the page table of a mapping before its bytes are wanted.
//!
//! The pages of a segment exist from the start, but each process that maps it takes a fault for every
//! one that it touches first: a cold copy then runs at half the speed of a warm one.

// UNSAFETY: gives the kernel advice on mappings that a `Region` keeps for the time of the call.

use super::{Region, WeakRegion};
use kvpool_types::{Length, Offset};
use rustix::io::Errno;
use rustix::mm::Advice;

/// How much is populated by one call: about a millisecond's work, after which whoever wants the
/// mapping gone gets it gone.
const STEP: u64 = 4 << 20;

/// How far the populating of one mapping has come.
#[derive(Debug)]
pub(crate) struct Populate {
    region: WeakRegion,
    next: u64,
}

impl Populate {
    /// From the first byte on. Does not keep the region.
    pub(crate) fn of(region: &Region) -> Self {
        Self {
            region: region.downgrade(),
            next: 0,
        }
    }
}

/// Populates the next few MiB of a mapping of shared memory, for writing when it is writable; false
/// when there is no more to do: all is in place, the region is gone, or the kernel does not know how.
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
            tracing::debug!(%error, "a mapping is not populated before its first use");
            return false;
        }
    }
    true
}

/// Advises the kernel on a part of a mapping. For advices that leave every byte as it is.
pub(super) fn advise(region: &Region, from: u64, length: u64, advice: Advice) -> Result<(), Errno> {
    let whole = region.whole();
    let start = whole.range(Offset(from), Length(length));
    // SAFETY: the range lies inside the region, as `range` has checked, and the region is kept for
    // the time of the call. The advices given in this crate take no byte away and change none.
    unsafe { rustix::mm::madvise(start.cast(), Length(length).as_usize(), advice) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::create_segment;
    use std::os::fd::AsFd;

    /// How many bytes of a mapping are in the page table.
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
    fn what_is_dropped_is_populated_no_more() {
        let length = Length(2 * STEP);
        let (fd, _region) = create_segment(length, false, "kvpool-test").unwrap();
        let region = Region::map(fd.as_fd(), length, false).unwrap();
        let mut populate = Populate::of(&region);
        assert!(populate_step(&mut populate));
        drop(region);
        assert!(!populate_step(&mut populate));
    }
}
