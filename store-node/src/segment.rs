//! The memory that a node contributes, cut into segments. Disks are in `media`.

mod dram;

pub(crate) use dram::Dram;

use kvpool_transport::Slice;
use kvpool_types::{Length, Offset};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

/// A contiguous range of the node's storage. What lies where in it, and who may touch it, is not a
/// segment's business.
pub(crate) trait Segment: Send + Sync + fmt::Debug {
    /// Its bytes.
    fn size(&self) -> Length;

    /// The memory of a part of it; `None` when the part does not lie inside.
    fn memory(&self, from: Offset, length: Length) -> Option<Slice>;

    /// A descriptor that another process of this host can map, read-only unless `writable`.
    fn share(&self, writable: bool) -> io::Result<OwnedFd>;
}
