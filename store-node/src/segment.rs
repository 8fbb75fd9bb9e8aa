//! The memory that a node contributes, divided into segments. Disks are in `media`.

mod dram;

pub(crate) use dram::Dram;

use kvpool_transport::Slice;
use kvpool_types::{Length, Offset};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

/// A contiguous range of the node's memory. A segment does not know its extents or who may touch them.
pub(crate) trait Segment: Send + Sync + fmt::Debug {
    /// The size of the segment in bytes.
    fn size(&self) -> Length;

    /// The memory of a part of the segment; `None` when the part exceeds the segment.
    fn memory(&self, from: Offset, length: Length) -> Option<Slice>;

    /// A descriptor that another process of this host can map, read-only unless `writable`.
    fn share(&self, writable: bool) -> io::Result<OwnedFd>;
}
