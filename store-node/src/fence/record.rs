//! The record of an extent that was written as a whole.

use kvpool_types::{Checksum, Epoch, GrantId, Version};

/// A written extent.
#[derive(Debug)]
pub(super) struct Record {
    /// The epoch of the grant under which the extent was written.
    pub(super) epoch: Epoch,
    /// The grant's id.
    pub(super) grant: GrantId,
    /// The version of the block. It equals the grant's id, unless the block was copied here. 0: not known.
    pub(super) version: Version,
    /// The checksums of the block's chunks.
    pub(super) sums: Sums,
}

/// The chunk checksums of one extent. A block of one chunk, which is the usual case in small pools, needs no
/// allocation.
#[derive(Debug)]
pub(super) enum Sums {
    /// An extent of at most one chunk.
    One(Checksum),
    /// A longer extent.
    Many(Box<[Checksum]>),
}

impl From<Vec<Checksum>> for Sums {
    fn from(sums: Vec<Checksum>) -> Self {
        match sums.as_slice() {
            [one] => Self::One(*one),
            _ => Self::Many(sums.into()),
        }
    }
}

impl FromIterator<Checksum> for Sums {
    fn from_iter<I: IntoIterator<Item = Checksum>>(sums: I) -> Self {
        let mut sums = sums.into_iter();
        let Some(first) = sums.next() else {
            return Self::Many(Box::default());
        };
        match sums.next() {
            None => Self::One(first),
            Some(second) => Self::Many([first, second].into_iter().chain(sums).collect()),
        }
    }
}

impl Sums {
    pub(super) fn to_vec(&self) -> Vec<Checksum> {
        match self {
            Self::One(one) => vec![*one],
            Self::Many(many) => many.to_vec(),
        }
    }
}
