//! Segments of main memory.

use super::Segment;
use kvpool_transport::memory::{create_segment, read_only_fd};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Length, Offset};
use std::io;
use std::os::fd::OwnedFd;

/// A segment in a memfd, whose pages are all allocated from the start.
#[derive(Debug)]
pub(crate) struct Dram {
    fd: OwnedFd,
    region: Region,
}

impl Dram {
    /// Allocates `size` bytes of memory, in 2 MiB pages if `hugepages`. `name` shows in `/proc/PID/maps`.
    ///
    /// Fails with `OutOfMemory` when there is too little, and with `InvalidInput` when the size is
    /// zero or no multiple of the page size.
    pub(crate) fn allocate(size: Length, hugepages: bool, name: &str) -> io::Result<Self> {
        let (fd, region) = create_segment(size, hugepages, name)?;
        Ok(Self { fd, region })
    }
}

impl Segment for Dram {
    fn size(&self) -> Length {
        self.region.length()
    }

    fn memory(&self, from: Offset, length: Length) -> Option<Slice> {
        self.region.slice(from, length)
    }

    fn share(&self, writable: bool) -> io::Result<OwnedFd> {
        if writable {
            self.fd.try_clone()
        } else {
            read_only_fd(&self.fd)
        }
    }
}
