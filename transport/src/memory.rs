//! Memory that bytes are moved from and to.
//!
//! A [`Region`] owns a range of memory and is shared by counting; a [`Slice`] is a part of one. Other
//! processes and threads may change the bytes at any time, so neither ever gives out a `&[u8]`:
//! bytes are copied in and out.

use kvpool_types::{Length, Offset};

/// The total length of scattered memory.
pub fn total_length(slices: &[Slice]) -> Length {
    Length(slices.iter().map(|slice| slice.length().0).sum())
}

/// A range of memory, shared by counting; freed or unmapped when the last clone is gone.
#[derive(Clone, Debug)]
pub struct Region {}

/// A part of a region.
#[derive(Clone, Debug)]
pub struct Slice {}

impl Region {
    /// Zeroed memory of this process.
    pub fn allocate(length: Length) -> Self {
        let _ = length;
        unimplemented!()
    }
    /// The whole region.
    pub fn whole(&self) -> Slice {
        unimplemented!()
    }
    /// The bytes of the region.
    pub fn length(&self) -> Length {
        unimplemented!()
    }
    /// A part of it; `None` when it does not lie inside.
    pub fn slice(&self, from: Offset, length: Length) -> Option<Slice> {
        let _ = (from, length);
        unimplemented!()
    }
}

impl From<Vec<u8>> for Region {
    fn from(_: Vec<u8>) -> Self {
        unimplemented!()
    }
}

impl Slice {
    /// The bytes of the slice.
    pub fn length(&self) -> Length {
        unimplemented!()
    }
    /// A part of it; `None` when it does not lie inside.
    pub fn slice(&self, from: Offset, length: Length) -> Option<Slice> {
        let _ = (from, length);
        unimplemented!()
    }
    /// Copies bytes out, from `from` on. Panics unless they lie inside.
    pub fn read_at(&self, from: Offset, out: &mut [u8]) {
        let _ = (from, out);
        unimplemented!()
    }
    /// Copies bytes in, from `from` on. Panics unless they lie inside a writable region.
    pub fn write_at(&self, from: Offset, bytes: &[u8]) {
        let _ = (from, bytes);
        unimplemented!()
    }
    /// Copies all bytes out.
    pub fn to_vec(&self) -> Vec<u8> {
        unimplemented!()
    }
}
