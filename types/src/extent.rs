//! Ranges of segments.

use crate::{Length, Offset, SegmentId};
use std::fmt;

/// A range of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The segment that holds it.
    pub segment: SegmentId,
    /// Where in the segment it begins.
    pub offset: Offset,
    /// How many bytes it spans.
    pub length: Length,
}

impl Extent {
    /// The first offset past the extent; `None` when it would overflow.
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

    /// Whether the two share a byte.
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
