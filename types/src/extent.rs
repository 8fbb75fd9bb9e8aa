//! Ranges of segments.

use crate::{Length, Offset, SegmentId};
use std::fmt;

/// A range of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The segment that contains the extent.
    pub segment: SegmentId,
    /// The first byte, relative to the segment.
    pub offset: Offset,
    /// The length in bytes.
    pub length: Length,
}

impl Extent {
    /// The offset after the last byte; `None` on overflow.
    pub const fn end(&self) -> Option<Offset> {
        match self.offset.0.checked_add(self.length.0) {
            Some(end) => Some(Offset(end)),
            None => None,
        }
    }

    /// Whether `inner` lies wholly inside this extent.
    pub fn contains(&self, inner: &Extent) -> bool {
        match (self.end(), inner.end()) {
            (Some(end), Some(inner_end)) => {
                self.segment == inner.segment && self.offset <= inner.offset && inner_end <= end
            }
            _ => false,
        }
    }

    /// Whether the two extents share a byte.
    pub fn overlaps(&self, other: &Extent) -> bool {
        match (self.end(), other.end()) {
            (Some(end), Some(other_end)) => {
                self.segment == other.segment && self.offset < other_end && other.offset < end
            }
            _ => self.segment == other.segment,
        }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}+{}", self.segment, self.offset, self.length)
    }
}
