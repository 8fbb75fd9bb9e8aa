//! What the log and the snapshots say, and its compact form.
//!
//! A group of the log and a chunk of a snapshot have one form, which needs nothing outside it:
//!
//! ```text
//! group  = u8:format u8:checksum algorithm varint:shards varint:count record*count u64:CRC-64
//! record = u8:tag fields [varint:length later fields]
//!        | u8:EXTENDED|flags varint:kind str:version varint:length fields
//! place  = varint:entry [varint:namespace u8:form [str:prefix str:suffix]]    of a key
//! ```
//!
//! A key is the number of an entry in the group's dictionary, then 32 bytes of digest or the text. An entry has
//! a namespace and the text around the digest; it is spelled out at its first use. A version is its
//! distance from the version before. So a block of one replica costs about 55 bytes. `shards` is the number of
//! shards that the directory was cut into when a snapshot was made; 0 in the log. The CRC covers everything before
//! it.
//!
//! **What a later version may add** (ADR 0020). A new kind of record is *extended*: its fields are a protobuf
//! message behind its length. A reader that does not know the kind skips it. At a record marked
//! as required it stops instead, and names the version that wrote the record. A record of an old kind may carry later
//! fields, marked in its tag: a reader that does not know them skips them.

mod decode;
mod encode;
mod extended;
#[cfg(test)]
mod tests;

pub use decode::{Decoded, RecordError, decode};
pub use encode::{Encoder, encode_group, encode_snapshot};

use kvpool_types::ids::NamespaceId;
use kvpool_types::namespace;
use kvpool_types::{Checksum, Incarnation, Key, Length, NodeName, Offset, SegmentId, Version};
use smallvec::SmallVec;

/// Where a block's replicas begin: segments, and offsets in them.
pub type Places = SmallVec<[(SegmentId, Offset); 1]>;

/// A block became visible, in place of any earlier version of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The namespace of the key.
    pub namespace: NamespaceId,
    /// The block's key.
    pub key: Key,
    /// The committed version.
    pub version: Version,
    /// The block's length.
    pub length: Length,
    /// The checksum of its bytes.
    pub checksum: Checksum,
    /// Where its replicas begin; each spans `length`.
    pub replicas: Places,
    /// The previous block of its chain, in the same namespace.
    pub parent: Option<Key>,
    /// Whether it is never evicted.
    pub hard_pin: bool,
}

/// A block left the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remove {
    /// The namespace of the key.
    pub namespace: NamespaceId,
    /// The block's key.
    pub key: Key,
    /// The version that left; another one stays.
    pub version: Version,
    /// Whether nobody held a lease on it: its extents need not wait for leases after a load.
    pub unleased: bool,
}

/// One of several replicas of a block was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaGone {
    /// The namespace of the key.
    pub namespace: NamespaceId,
    /// The block's key.
    pub key: Key,
    /// The version whose replica is gone; another one keeps its own.
    pub version: Version,
    /// The segment that held it.
    pub segment: SegmentId,
}

/// A namespace was created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its number.
    pub id: NamespaceId,
    /// Its fields.
    pub namespace: namespace::Namespace,
}

/// A segment was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its number.
    pub id: SegmentId,
    /// The node that it is on.
    pub node: NodeName,
    /// The life of the node that it belongs to.
    pub incarnation: Incarnation,
    /// Its place among the node's segments, from 0.
    pub index: u32,
    /// Its size.
    pub size: Length,
}

/// A segment went for ever, with every replica on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentGone {
    /// Its number.
    pub id: SegmentId,
}

/// A node's incarnation was given up: it is never accepted again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncarnationDropped {
    /// The node.
    pub node: NodeName,
    /// The life that was dropped.
    pub incarnation: Incarnation,
}

/// The secret under which the directory hashes keys, made once, so that every life of the master
/// cuts the directory into the same shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed {
    /// The secret.
    pub seed: u64,
}

/// Versions below `until` may have been given to grants. Later terms begin at it, so no two grants ever share
/// a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionsGranted {
    /// The first version that has not been given.
    pub until: Version,
}

/// Segment ids below `until` may have been given. New segments get ids from it on, so no two segments ever
/// share an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentsGranted {
    /// The first id that has not been given.
    pub until: SegmentId,
}

/// One change of what the master knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// A block became visible.
    Commit(Commit),
    /// A block left.
    Remove(Remove),
    /// A replica left.
    ReplicaGone(ReplicaGone),
    /// A namespace was created.
    Namespace(Namespace),
    /// A segment was registered.
    Segment(Segment),
    /// A segment went.
    SegmentGone(SegmentGone),
    /// An incarnation was given up.
    IncarnationDropped(IncarnationDropped),
    /// The directory's secret was made.
    Seed(Seed),
    /// Versions were set aside for grants.
    VersionsGranted(VersionsGranted),
    /// Segment ids were set aside for new segments.
    SegmentsGranted(SegmentsGranted),
}

impl Record {
    /// The key that the record is about, which says in which shard it belongs; `None` when it is
    /// about no block and belongs to [`super::ShardIndex::SYSTEM`].
    pub const fn place(&self) -> Option<(NamespaceId, &Key)> {
        match self {
            Self::Commit(Commit { namespace, key, .. })
            | Self::Remove(Remove { namespace, key, .. })
            | Self::ReplicaGone(ReplicaGone { namespace, key, .. }) => Some((*namespace, key)),
            Self::Namespace(_)
            | Self::Segment(_)
            | Self::SegmentGone(_)
            | Self::IncarnationDropped(_)
            | Self::Seed(_)
            | Self::VersionsGranted(_)
            | Self::SegmentsGranted(_) => None,
        }
    }
}

/// The form that this version writes, and the only one that it reads.
const FORMAT: u8 = 1;

/// The bytes of the CRC at a group's end.
const CRC_BYTES: usize = 8;

const COMMIT: u8 = 1;
const REMOVE: u8 = 2;
const REPLICA_GONE: u8 = 3;
const NAMESPACE: u8 = 4;
const SEGMENT: u8 = 5;
const SEGMENT_GONE: u8 = 6;
const INCARNATION_DROPPED: u8 = 7;
const SEED: u8 = 8;
const VERSIONS_GRANTED: u8 = 9;
/// A record whose kind follows: every kind that came after format 1.
const EXTENDED: u8 = 10;

/// The low bits of a tag byte, which hold the tag; the others are flags.
const TAG_MASK: u8 = 0x0f;
/// Of any kind but an extended one: fields of a later version follow, behind their length.
const HAS_LATER_FIELDS: u8 = 0x80;
/// Of an extended record: who does not know its kind may not go on.
const REQUIRED: u8 = 0x10;
const HARD_PIN: u8 = 0x10;
/// Of the first byte of a removal's later fields: nobody held a lease.
const UNLEASED: u8 = 1;
const HAS_PARENT: u8 = 0x20;
/// The parent is the key of the commit written before: a chain put in order costs nothing.
const PARENT_IS_PREVIOUS: u8 = 0x40;

const PLAIN_DIGEST: u8 = 0;
const AFFIXED_DIGEST: u8 = 1;
const TEXT: u8 = 2;

pub(in crate::store) fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}
