//! What is known of an extent that has been written whole.

use kvpool_types::{Checksum, Epoch, GrantId, Version};

/// A written extent.
#[derive(Debug)]
pub(super) struct Record {
    /// The epoch of the grant that it was written under.
    pub(super) epoch: Epoch,
    /// That grant.
    pub(super) grant: GrantId,
    /// The version of the block: the number of the grant, unless the block was copied here. 0: not known.
    pub(super) version: Version,
    /// The checksums of its chunks.
    pub(super) sums: Sums,
}

/// The chunk checksums of one extent. Most blocks of small pools have one chunk: it costs no
/// allocation.
#[derive(Debug)]
pub(super) enum Sums {
    /// An extent of at most one chunk.
    One(Checksum),
    /// A longer one.
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
