//! The records of the log and the snapshots, and their compact encoding.
//!
//! A group of the log and a chunk of a snapshot have one self-contained form:
//!
//! ```text
//! group  = u8:format u8:checksum algorithm varint:shards varint:count record*count u64:CRC-64
//! record = u8:tag fields [varint:length later fields]
//!        | u8:EXTENDED|flags varint:kind str:version varint:length fields
//! key    = varint:entry [varint:namespace u8:form [str:prefix str:suffix]] digest or text
//! ```
//!
//! A key is the number of an entry in the group's dictionary, then 32 bytes of digest or the text.
//! An entry has a namespace and the affixes of the digest, which are written at its first use. A
//! version is written as its distance from the previous version. So a block with one replica costs
//! about 55 bytes. A parent costs 33 bytes more, unless it is the block of the commit before.
//! `shards` is the number of shards when a snapshot was made; 0 in the log. The CRC covers all
//! bytes before it.
//!
//! **What a later version may add** (ADR 0020). A new kind of record is *extended*: its fields are
//! a protobuf message behind its length. A reader that does not know the kind skips it. At a record
//! marked as required the reader stops instead, and names the version that wrote the record. A
//! record of an old kind may carry later fields, marked in its tag. A reader that does not know
//! them skips them.

mod decode;
mod encode;
mod extended;
#[cfg(test)]
mod tests;

pub use decode::{Decoded, RecordError, decode};
pub use encode::{Encoder, encode_group, encode_snapshot};

use kvpool_types::ids::NamespaceId;
use kvpool_types::namespace;
use kvpool_types::{
    Checksum, Incarnation, Key, Length, MediumId, NamespaceSettings, NodeName, Offset, SegmentId,
    Version,
};
use smallvec::SmallVec;

/// The extents of a block's replicas, each as its segment and its offset there.
pub type Places = SmallVec<[(SegmentId, Offset); 1]>;

/// A block became visible and replaced any earlier version of its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// The committed version.
    pub version: Version,
    /// The block's length.
    pub length: Length,
    /// Checksum of the block's bytes.
    pub checksum: Checksum,
    /// The extents of its replicas; each spans `length`.
    pub replicas: Places,
    /// Key of the block before this one in the chain, in the same namespace.
    pub parent: Option<Key>,
    /// Whether the block is hard-pinned, which means never evicted.
    pub hard_pin: bool,
}

/// A block left the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remove {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// The removed version; another version stays.
    pub version: Version,
    /// Whether the block had no lease. After a load, its extents then need not wait for leases.
    pub unleased: bool,
    /// Whether the block's copy on a medium left too. An evicted block leaves memory only.
    pub everywhere: bool,
    /// The extents in memory that the block left. Replicas at other extents stay. Empty: the block left all
    /// extents. The log may have the load of a block before the record of its earlier eviction.
    pub places: Places,
}

/// One of several replicas of a block was dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaGone {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// The version without the replica; another version keeps its own.
    pub version: Version,
    /// The segment of the replica.
    pub segment: SegmentId,
    /// The replica's offset in the segment. A replica at another offset stays. `None` in records of earlier
    /// builds.
    pub offset: Option<Offset>,
}

impl ReplicaGone {
    /// Whether `replica` is the replica of this record.
    pub fn is_at(&self, replica: &crate::replica::Replica) -> bool {
        let is_there = self.offset.is_none_or(|offset| offset == replica.offset);
        replica.segment == self.segment && is_there
    }
}

/// A block got another replica. A block that has left, or has another version, stays as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaAdded {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// The version that was copied.
    pub version: Version,
    /// The segment of the replica.
    pub segment: SegmentId,
    /// The offset in the segment, in bytes.
    pub offset: Offset,
}

/// A namespace was created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// The namespace's id.
    pub id: NamespaceId,
    /// The namespace's fields.
    pub namespace: namespace::Namespace,
}

/// The settings of a namespace were changed. They replace the earlier ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSet {
    /// The namespace's id.
    pub id: NamespaceId,
    /// The settings.
    pub settings: NamespaceSettings,
}

/// A namespace was deleted, after its last block. Its id is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceGone {
    /// The namespace's id.
    pub id: NamespaceId,
}

/// A segment was registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The segment's id.
    pub id: SegmentId,
    /// The node with the segment.
    pub node: NodeName,
    /// The node's incarnation.
    pub incarnation: Incarnation,
    /// The segment's index among the node's segments, from 0.
    pub index: u32,
    /// The size in bytes.
    pub size: Length,
}

/// A medium was attached, or its state changed. A later record of a medium replaces the earlier one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Medium {
    /// The id of the medium's segment.
    pub id: SegmentId,
    /// The medium.
    pub medium: MediumId,
    /// The node that offered the medium last.
    pub node: NodeName,
    /// The generation that the node wrote to the medium when it last attached it.
    pub generation: u64,
    /// True while the node has not confirmed that generation.
    pub is_pending: bool,
    /// The bytes for extents.
    pub size: Length,
    /// The bytes of a zone.
    pub zone: Length,
    /// The zone that is written.
    pub cursor: u32,
}

/// A segment is gone for good, with every replica on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentGone {
    /// The segment's id.
    pub id: SegmentId,
}

/// A node's incarnation was dropped. The pool never accepts it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncarnationDropped {
    /// The node.
    pub node: NodeName,
    /// The dropped incarnation.
    pub incarnation: Incarnation,
}

/// The secret seed of the directory's hashes. It is made once and stored, so that a key keeps its
/// shard after every restart of the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed {
    /// The secret.
    pub seed: u64,
}

/// Versions below `until` may have been granted. Later terms begin at `until`, so no two grants
/// ever share a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionsGranted {
    /// The first version not granted.
    pub until: Version,
}

/// Segment ids below `until` may have been given. New segments get ids from `until` on, so no two
/// segments ever share an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentsGranted {
    /// The first id not given.
    pub until: SegmentId,
}

/// Ranges of a segment that blocks have left, while leases on them run. In the log this record
/// follows the record with which the blocks left, because a load may find a snapshot without these
/// blocks. A snapshot lists all such ranges at its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeasedRanges {
    /// The segment.
    pub segment: SegmentId,
    /// The beginning and the length of each range, in bytes.
    pub ranges: Vec<(Offset, Length)>,
}

/// Ranges of a segment that removed blocks left without a lease. In the log this record follows the
/// record of the removal, since a reader may take a lease until the removal is durable. It precedes
/// every record of the next blocks in these ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnleasedRanges {
    /// The segment.
    pub segment: SegmentId,
    /// The beginning and the length of each range, in bytes.
    pub ranges: Vec<(Offset, Length)>,
}

/// One change of the metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// A block became visible.
    Commit(Commit),
    /// A block left.
    Remove(Remove),
    /// A replica left its block.
    ReplicaGone(ReplicaGone),
    /// A block got another replica.
    ReplicaAdded(ReplicaAdded),
    /// A namespace was created.
    Namespace(Namespace),
    /// The settings of a namespace were changed.
    NamespaceSet(NamespaceSet),
    /// A namespace was deleted.
    NamespaceGone(NamespaceGone),
    /// A segment was registered.
    Segment(Segment),
    /// A segment is gone.
    SegmentGone(SegmentGone),
    /// An incarnation was dropped.
    IncarnationDropped(IncarnationDropped),
    /// The directory's secret was made.
    Seed(Seed),
    /// Versions were reserved for grants.
    VersionsGranted(VersionsGranted),
    /// Segment ids were reserved for new segments.
    SegmentsGranted(SegmentsGranted),
    /// A medium was attached or changed.
    Medium(Medium),
    /// Blocks left ranges under leases.
    LeasedRanges(LeasedRanges),
    /// Removed blocks left ranges without a lease.
    UnleasedRanges(UnleasedRanges),
}

impl Record {
    /// The key of the record, which decides its shard; `None` for a record without a block, which
    /// belongs to [`super::ShardIndex::SYSTEM`].
    pub const fn place(&self) -> Option<(NamespaceId, &Key)> {
        match self {
            Self::Commit(Commit { namespace, key, .. })
            | Self::Remove(Remove { namespace, key, .. })
            | Self::ReplicaGone(ReplicaGone { namespace, key, .. })
            | Self::ReplicaAdded(ReplicaAdded { namespace, key, .. }) => Some((*namespace, key)),
            Self::Namespace(_)
            | Self::NamespaceSet(_)
            | Self::NamespaceGone(_)
            | Self::Segment(_)
            | Self::SegmentGone(_)
            | Self::IncarnationDropped(_)
            | Self::Seed(_)
            | Self::VersionsGranted(_)
            | Self::SegmentsGranted(_)
            | Self::Medium(_)
            | Self::LeasedRanges(_)
            | Self::UnleasedRanges(_) => None,
        }
    }
}

/// The format that this version writes and reads.
const FORMAT: u8 = 1;

/// The bytes of the CRC at the end of a group.
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
/// The tag of a record whose kind follows: every kind since format 1.
const EXTENDED: u8 = 10;

/// The low bits of a tag byte hold the tag; the others are flags.
const TAG_MASK: u8 = 0x0f;
/// In any kind except an extended one: fields of a later version follow, behind their length.
const HAS_LATER_FIELDS: u8 = 0x80;
/// Flag of an extended record: a reader that does not know the kind must stop.
const REQUIRED: u8 = 0x10;
const HARD_PIN: u8 = 0x10;
/// In the first byte of a removal's later fields: the block had no lease.
const UNLEASED: u8 = 1;
/// In the same byte: the block's copy on a medium left too.
const EVERYWHERE: u8 = 2;
/// In the same byte: the extents that the block left follow.
const HAS_PLACES: u8 = 4;
const HAS_PARENT: u8 = 0x20;
/// The parent is the key of the commit before this one. So a chain in order needs no bytes for
/// parents.
const PARENT_IS_PREVIOUS: u8 = 0x40;

const PLAIN_DIGEST: u8 = 0;
const AFFIXED_DIGEST: u8 = 1;
const TEXT: u8 = 2;

pub(in crate::store) fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}
