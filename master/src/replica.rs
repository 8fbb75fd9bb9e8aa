//! Where a replica of a block lies, in the terms that the directory and the placement share.

use kvpool_types::{Offset, SegmentId};
use smallvec::SmallVec;

/// The place of a block in the directory. It names the block until that is removed; then it may
/// come to name another, so whoever keeps one checks the version too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// The place of an extent in its segment's table. It names the extent until that is freed; then it
/// may come to name another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentIndex(pub u32);

/// Where one copy of a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// The segment.
    pub segment: SegmentId,
    /// The place in the segment's table of extents.
    pub extent: ExtentIndex,
    /// Where in the segment it begins.
    pub offset: Offset,
}

/// The copies of a block, owned. Nearly every block has one, for which nothing is allocated.
pub type Copies = SmallVec<[Replica; 1]>;
