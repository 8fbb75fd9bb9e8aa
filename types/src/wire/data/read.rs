//! The codec of reads, and of other requests that name extents in the same way.

use super::{Meta, extent, list_of, put_extent};
use crate::grant::MAC_BYTES;
use crate::wire::{DecodeError, Reader};
use crate::{Extent, Incarnation, Length, Offset, ReadRight, Version};

/// A flag in the item count of a request. If it is set, every item ends with a byte that says whether a read
/// right follows.
const HAS_RIGHTS: u32 = 1 << 31;

/// A read of one range of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadItem {
    /// The whole extent, as the master named it.
    pub extent: Extent,
    /// The first byte to read, relative to the extent.
    pub from: Offset,
    /// The number of bytes to read.
    pub length: Length,
    /// The permission to read, for a node that requires one.
    pub right: Option<ReadRight>,
}

impl ReadItem {
    /// The whole extent, without a permission.
    pub const fn whole(extent: Extent) -> Self {
        Self {
            extent,
            from: Offset(0),
            length: extent.length,
            right: None,
        }
    }

    /// The same range with this permission.
    #[must_use]
    pub const fn with(self, right: Option<ReadRight>) -> Self {
        Self { right, ..self }
    }
}

/// Reads ranges of extents of one incarnation. The answer's payload holds the bytes of the
/// successful items, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The incarnation that holds the extents.
    pub incarnation: Incarnation,
    /// The ranges to read.
    pub items: Vec<ReadItem>,
}

impl Meta for ReadRequest {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.incarnation.to_bytes());
        // Nodes of earlier versions do not know the flag, and require no permission.
        let has_rights = self.items.iter().any(|item| item.right.is_some());
        let count = u32::try_from(self.items.len()).unwrap_or(u32::MAX);
        let mark = if has_rights { HAS_RIGHTS } else { 0 };
        out.extend_from_slice(&(count | mark).to_le_bytes());
        for item in &self.items {
            put_extent(out, &item.extent);
            out.extend_from_slice(&item.from.0.to_le_bytes());
            out.extend_from_slice(&item.length.0.to_le_bytes());
            if has_rights {
                put_right(out, item.right.as_ref());
            }
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes, "read request");
        let incarnation = Incarnation(r.u128()?);
        let count = r.u32()?;
        let has_rights = count & HAS_RIGHTS != 0;
        let items = list_of(&mut r, count & !HAS_RIGHTS, |r| {
            Ok(ReadItem {
                extent: extent(r)?,
                from: Offset(r.u64()?),
                length: Length(r.u64()?),
                right: if has_rights { right(r)? } else { None },
            })
        })?;
        r.finish()?;
        Ok(Self { incarnation, items })
    }
}

/// Appends a byte that says whether there is a right, and then the right's fields.
fn put_right(out: &mut Vec<u8>, right: Option<&ReadRight>) {
    let Some(right) = right else {
        return out.push(0);
    };
    out.push(1);
    out.extend_from_slice(&right.version.0.to_le_bytes());
    out.extend_from_slice(&right.deadline_ms.to_le_bytes());
    out.extend_from_slice(&right.mac);
}

fn right(r: &mut Reader<'_>) -> Result<Option<ReadRight>, DecodeError> {
    match r.u8()? {
        0 => Ok(None),
        1 => Ok(Some(ReadRight {
            version: Version(r.u64()?),
            deadline_ms: r.u64()?,
            mac: *r.array::<MAC_BYTES>()?,
        })),
        other => Err(DecodeError::BadValue {
            what: "read right",
            value: other.into(),
        }),
    }
}
