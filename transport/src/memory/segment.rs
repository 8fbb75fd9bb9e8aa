//! Memory of a store node that other processes can map.

use super::Region;
use super::populate::advise;
use kvpool_types::{Length, Offset};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::Advice;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Bytes that one call populates, so that a signal does not undo a long call.
const POPULATE_STEP: u64 = 1 << 30;
/// The smallest page. Touching one byte in each page populates a mapping.
const PAGE: u64 = 4096;
/// The size of a requested hugepage.
const HUGEPAGE: u64 = 2 << 20;

/// Creates a memfd of exactly `length` bytes, allocates all its pages now, and maps it writable.
///
/// The descriptor is sealed against size changes, so a process that has mapped it never faults on a
/// missing page. `name` shows in `/proc/PID/maps`.
///
/// # Errors
///
/// `OutOfMemory` when memory is short; where possible this is detected before any page is taken.
/// `InvalidInput` when the length is zero or no multiple of the page size.
pub fn create_segment(
    length: Length,
    hugepages: bool,
    name: &str,
) -> io::Result<(OwnedFd, Region)> {
    let page = if hugepages { HUGEPAGE } else { PAGE };
    if length.0 == 0 || !length.0.is_multiple_of(page) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a segment of {length} bytes: it must be a multiple of {page} and not empty"),
        ));
    }
    if !hugepages {
        check_available(length)?;
    }
    let size = if hugepages {
        MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB
    } else {
        MemfdFlags::empty()
    };
    let (fd, region) = create_sealed(length, size, name).map_err(|e| lack(length, hugepages, e))?;
    populate(&fd, &region).map_err(|e| lack(length, hugepages, e))?;
    Ok((fd, region))
}

/// Creates a memfd of a few pages for other processes to map, sealed like a segment.
pub(crate) fn create_small(length: Length, name: &str) -> io::Result<(OwnedFd, Region)> {
    create_sealed(length, MemfdFlags::empty(), name)
}

fn create_sealed(length: Length, size: MemfdFlags, name: &str) -> io::Result<(OwnedFd, Region)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | size;
    let fd = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&fd, length.0)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let region = Region::map_inherited(fd.as_fd(), length, true)?;
    Ok((fd, region))
}

/// A second descriptor of the same memory, which can be mapped for reading only.
///
/// # Errors
///
/// The error of opening `/proc/self/fd/N`.
pub fn read_only_fd(fd: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Allocates all pages of the region. Too little memory gives an error, not a signal.
fn populate(fd: &OwnedFd, region: &Region) -> io::Result<()> {
    // Transparent hugepages are used where the host's setting allows them for shared memory.
    if let Err(error) = advise(region, 0, region.length().0, Advice::LinuxHugepage) {
        tracing::debug!(%error, "no transparent hugepages for this segment");
    }
    let mut from = 0;
    while from < region.length().0 {
        let length = POPULATE_STEP.min(region.length().0 - from);
        match advise(region, from, length, Advice::LinuxPopulateWrite) {
            Ok(()) => from += length,
            Err(Errno::INTR | Errno::AGAIN) => {}
            // The kernel is older than this advice.
            Err(Errno::INVAL) => return populate_by_hand(fd, region),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Allocating the file's pages fails where touching them would raise a signal. Touching them
/// afterwards only fills the page table.
fn populate_by_hand(fd: &OwnedFd, region: &Region) -> io::Result<()> {
    rustix::fs::fallocate(
        fd,
        rustix::fs::FallocateFlags::empty(),
        0,
        region.length().0,
    )?;
    let whole = region.whole();
    for page in 0..region.length().0 / PAGE {
        whole.write_at(Offset(page * PAGE), &[0]);
    }
    Ok(())
}

fn lack(length: Length, hugepages: bool, error: io::Error) -> io::Error {
    let errno = Errno::from_io_error(&error);
    if matches!(
        errno,
        Some(Errno::NOMEM | Errno::FAULT | Errno::NOSPC | Errno::HWPOISON)
    ) {
        let hint = if hugepages {
            " of hugepages (see /proc/sys/vm/nr_hugepages)"
        } else {
            ""
        };
        io::Error::new(
            io::ErrorKind::OutOfMemory,
            format!("{length} bytes{hint} cannot be allocated: {error}"),
        )
    } else {
        error
    }
}

/// Fails when the host or the control group has less memory left than `length`. Without this check,
/// a segment that is too large would make the kernel kill some process.
fn check_available(length: Length) -> io::Result<()> {
    let host = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| mem_available(&text));
    let group = group_available();
    for (left, whose) in [(host, "the host"), (group, "the control group")] {
        if let Some(left) = left
            && left < length.0
        {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!(
                    "{length} bytes cannot be allocated: {whose} has {left} bytes of memory left"
                ),
            ));
        }
    }
    Ok(())
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The memory that is left in the process's control group (version 2); `None` without a limit.
fn group_available() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group = Path::new("/sys/fs/cgroup").join(own);
    let number = |file: &str| -> Option<u64> {
        let text = std::fs::read_to_string(group.join(file)).ok()?;
        text.trim().parse().ok()
    };
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let text = "MemTotal:       100 kB\nMemAvailable:    42 kB\nBuffers: 1 kB\n";
        assert_eq!(mem_available(text), Some(42 * 1024));
        assert_eq!(mem_available("MemTotal: 100 kB\n"), None);
    }

    #[test]
    fn a_segment_is_backed_when_it_is_made() {
        let length = Length(64 << 20);
        let (fd, region) = create_segment(length, false, "kvpool-test").unwrap();
        assert_eq!(region.length(), length);
        let stat = rustix::fs::fstat(&fd).unwrap();
        assert_eq!(u64::try_from(stat.st_blocks).unwrap() * 512, length.0);
    }

    #[test]
    fn populating_by_hand_backs_all_of_it() {
        let length = Length(4 << 20);
        let fd = rustix::fs::memfd_create("kvpool-test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, length.0).unwrap();
        let region = Region::map_inherited(fd.as_fd(), length, true).unwrap();
        populate_by_hand(&fd, &region).unwrap();
        let stat = rustix::fs::fstat(&fd).unwrap();
        assert_eq!(u64::try_from(stat.st_blocks).unwrap() * 512, length.0);
    }

    #[test]
    fn a_segment_larger_than_memory_is_an_error() {
        let error = create_segment(Length(1 << 50), false, "kvpool-test").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory, "{error}");
    }

    #[test]
    fn odd_and_empty_lengths_are_refused() {
        for length in [0, 1, 4095, 4097] {
            let error = create_segment(Length(length), false, "kvpool-test").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
        let error = create_segment(Length(4096), true, "kvpool-test").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn the_size_of_a_segment_cannot_change() {
        let (fd, _region) = create_segment(Length(8192), false, "kvpool-test").unwrap();
        assert_eq!(rustix::fs::ftruncate(&fd, 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 12288), Err(Errno::PERM));
    }

    #[test]
    fn a_read_only_descriptor_maps_read_only() {
        let (fd, region) = create_segment(Length(8192), false, "kvpool-test").unwrap();
        let read_only = read_only_fd(&fd).unwrap();
        let error = Region::map(read_only.as_fd(), Length(8192), true).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::ACCESS));
        let view = Region::map(read_only.as_fd(), Length(8192), false).unwrap();
        region.whole().write_at(Offset(5000), b"seen");
        let mut seen = [0; 4];
        view.whole().read_at(Offset(5000), &mut seen);
        assert_eq!(&seen, b"seen");
        assert!(!view.is_writable());
    }
}
