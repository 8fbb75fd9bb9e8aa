//! The location of a block's replica: the types that the directory and the placement share.

use kvpool_types::{Offset, SegmentId};
use smallvec::SmallVec;

/// The slot of a block in the directory. After the block's removal the directory may give the slot
/// to another block, so a caller that keeps an id also compares the version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// The slot of an extent in its segment's table. After the extent is freed the table may give the
/// slot to another extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentIndex(pub u32);

/// The location of one replica of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// The segment that holds the replica.
    pub segment: SegmentId,
    /// The extent's slot in the segment's table.
    pub extent: ExtentIndex,
    /// The offset in the segment, in bytes.
    pub offset: Offset,
}

/// The replicas of a block, owned. Nearly every block has one replica, which needs no allocation.
pub type Copies = SmallVec<[Replica; 1]>;
