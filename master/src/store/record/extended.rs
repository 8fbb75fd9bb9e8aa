//! The kinds of records since format 1. Their fields are protobuf messages, so an older reader
//! skips unknown fields.

use super::{
    LeasedRanges, Medium, NamespaceGone, NamespaceSet, Record, ReplicaAdded, SegmentsGranted,
    UnleasedRanges,
};
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::keys::{KeyBatch, pack};
use kvpool_types::{
    Key, Length, MediumId, NamespaceSettings, NodeName, Offset, SegmentId, Setting, Version,
};
use prost::Message as _;

/// The head of an extended record.
pub(super) struct Head {
    pub(super) kind: u64,
    /// Whether a reader that does not know the kind must stop. Set this if skipping the record
    /// could lose a block: a master that skips a record does not write it into its next snapshot.
    pub(super) is_required: bool,
}

const SEGMENTS_GRANTED: u64 = 1;
const MEDIUM: u64 = 2;
const REPLICA_ADDED: u64 = 3;
const LEASED_RANGES: u64 = 4;
const NAMESPACE_SET: u64 = 8;
const NAMESPACE_GONE: u64 = 9;
const UNLEASED_RANGES: u64 = 10;

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct SegmentsGrantedFields {
    #[prost(uint32, tag = "1")]
    until: u32,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct MediumFields {
    #[prost(uint32, tag = "1")]
    id: u32,
    #[prost(bytes = "vec", tag = "2")]
    medium: Vec<u8>,
    #[prost(string, tag = "3")]
    node: String,
    #[prost(uint64, tag = "4")]
    generation: u64,
    #[prost(bool, tag = "5")]
    is_pending: bool,
    #[prost(uint64, tag = "6")]
    size: u64,
    #[prost(uint64, tag = "7")]
    zone: u64,
    #[prost(uint32, tag = "8")]
    cursor: u32,
}

impl From<&Medium> for MediumFields {
    fn from(medium: &Medium) -> Self {
        Self {
            id: medium.id.0,
            medium: medium.medium.to_bytes().to_vec(),
            node: medium.node.0.clone(),
            generation: medium.generation,
            is_pending: medium.is_pending,
            size: medium.size.0,
            zone: medium.zone.0,
            cursor: medium.cursor,
        }
    }
}

impl MediumFields {
    fn into_record(self) -> Option<Record> {
        Some(Record::Medium(Medium {
            id: SegmentId(self.id),
            medium: MediumId::from_slice(&self.medium)?,
            node: NodeName(self.node),
            generation: self.generation,
            is_pending: self.is_pending,
            size: Length(self.size),
            zone: Length(self.zone),
            cursor: self.cursor,
        }))
    }
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct ReplicaAddedFields {
    #[prost(uint32, tag = "1")]
    namespace: u32,
    /// The key, packed as a batch of one.
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
    #[prost(uint64, tag = "3")]
    version: u64,
    #[prost(uint32, tag = "4")]
    segment: u32,
    #[prost(uint64, tag = "5")]
    offset: u64,
}

impl From<&ReplicaAdded> for ReplicaAddedFields {
    fn from(added: &ReplicaAdded) -> Self {
        Self {
            namespace: added.namespace.0,
            key: pack(std::slice::from_ref(&added.key)),
            version: added.version.0,
            segment: added.segment.0,
            offset: added.offset.0,
        }
    }
}

impl ReplicaAddedFields {
    fn into_record(self) -> Option<Record> {
        Some(Record::ReplicaAdded(ReplicaAdded {
            namespace: NamespaceId(self.namespace),
            key: unpack_one(&self.key)?,
            version: Version(self.version),
            segment: SegmentId(self.segment),
            offset: Offset(self.offset),
        }))
    }
}

/// A setting with its value. An unknown setting of a later version is left out.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct SettingFields {
    #[prost(uint32, tag = "1")]
    setting: u32,
    #[prost(uint64, tag = "2")]
    value: u64,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct NamespaceSetFields {
    #[prost(uint32, tag = "1")]
    id: u32,
    #[prost(message, repeated, tag = "2")]
    settings: Vec<SettingFields>,
}

impl From<&NamespaceSet> for NamespaceSetFields {
    fn from(set: &NamespaceSet) -> Self {
        let settings = set.settings.iter().map(|(setting, value)| SettingFields {
            setting: setting.to_wire(),
            value,
        });
        Self {
            id: set.id.0,
            settings: settings.collect(),
        }
    }
}

impl NamespaceSetFields {
    fn into_record(self) -> Record {
        let mut settings = NamespaceSettings::default();
        for fields in self.settings {
            if let Some(setting) = Setting::from_wire(fields.setting) {
                settings.set(setting, Some(fields.value));
            }
        }
        Record::NamespaceSet(NamespaceSet {
            id: NamespaceId(self.id),
            settings,
        })
    }
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct NamespaceGoneFields {
    #[prost(uint32, tag = "1")]
    id: u32,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct RangesFields {
    #[prost(uint32, tag = "1")]
    segment: u32,
    #[prost(uint64, repeated, tag = "2")]
    offsets: Vec<u64>,
    /// One length for each offset.
    #[prost(uint64, repeated, tag = "3")]
    lengths: Vec<u64>,
}

impl RangesFields {
    fn new(segment: SegmentId, ranges: &[(Offset, Length)]) -> Self {
        Self {
            segment: segment.0,
            offsets: ranges.iter().map(|(offset, _)| offset.0).collect(),
            lengths: ranges.iter().map(|(_, length)| length.0).collect(),
        }
    }

    fn read(self) -> Option<(SegmentId, Vec<(Offset, Length)>)> {
        let ranges = self.offsets.iter().zip(&self.lengths);
        (self.offsets.len() == self.lengths.len()).then(|| {
            let ranges = ranges.map(|(at, n)| (Offset(*at), Length(*n)));
            (SegmentId(self.segment), ranges.collect())
        })
    }
}

fn unpack_one(packed: &[u8]) -> Option<Key> {
    let batch = KeyBatch::unpack(packed, 1).ok()?;
    batch.get(0).map(|key| key.to_key())
}

/// An extended record's head and fields; `None` for the kinds of format 1.
pub(super) fn encode(record: &Record) -> Option<(Head, Vec<u8>)> {
    match record {
        Record::SegmentsGranted(granted) => {
            let fields = SegmentsGrantedFields {
                until: granted.until.0,
            };
            let head = Head {
                kind: SEGMENTS_GRANTED,
                is_required: true,
            };
            Some((head, fields.encode_to_vec()))
        }
        Record::Medium(medium) => {
            let head = Head {
                kind: MEDIUM,
                is_required: true,
            };
            Some((head, MediumFields::from(medium).encode_to_vec()))
        }
        Record::ReplicaAdded(added) => {
            // A reader that skipped this record would drop the block with its first replica.
            let head = Head {
                kind: REPLICA_ADDED,
                is_required: true,
            };
            Some((head, ReplicaAddedFields::from(added).encode_to_vec()))
        }
        // A reader that skips one of these two kinds loses quotas, or keeps an empty namespace. It loses no
        // block.
        Record::NamespaceSet(set) => {
            let head = Head {
                kind: NAMESPACE_SET,
                is_required: false,
            };
            Some((head, NamespaceSetFields::from(set).encode_to_vec()))
        }
        Record::NamespaceGone(gone) => {
            let head = Head {
                kind: NAMESPACE_GONE,
                is_required: false,
            };
            let fields = NamespaceGoneFields { id: gone.id.0 };
            Some((head, fields.encode_to_vec()))
        }
        Record::LeasedRanges(leased) => {
            // A reader that skips this record may grant a range while a lease runs. It loses no
            // block.
            let head = Head {
                kind: LEASED_RANGES,
                is_required: false,
            };
            let fields = RangesFields::new(leased.segment, &leased.ranges);
            Some((head, fields.encode_to_vec()))
        }
        Record::UnleasedRanges(unleased) => {
            // A reader that skips this record keeps the ranges in quarantine for one lease TTL.
            let head = Head {
                kind: UNLEASED_RANGES,
                is_required: false,
            };
            let fields = RangesFields::new(unleased.segment, &unleased.ranges);
            Some((head, fields.encode_to_vec()))
        }
        _ => None,
    }
}

/// The record of a kind; `None` for an unknown kind.
pub(super) fn decode(kind: u64, fields: &[u8]) -> Option<Result<Record, DecodeError>> {
    let record = match kind {
        SEGMENTS_GRANTED => SegmentsGrantedFields::decode(fields).ok().map(|fields| {
            Record::SegmentsGranted(SegmentsGranted {
                until: SegmentId(fields.until),
            })
        }),
        MEDIUM => MediumFields::decode(fields)
            .ok()
            .and_then(MediumFields::into_record),
        REPLICA_ADDED => ReplicaAddedFields::decode(fields)
            .ok()
            .and_then(ReplicaAddedFields::into_record),
        LEASED_RANGES => RangesFields::decode(fields)
            .ok()
            .and_then(RangesFields::read)
            .map(|(segment, ranges)| Record::LeasedRanges(LeasedRanges { segment, ranges })),
        UNLEASED_RANGES => RangesFields::decode(fields)
            .ok()
            .and_then(RangesFields::read)
            .map(|(segment, ranges)| Record::UnleasedRanges(UnleasedRanges { segment, ranges })),
        NAMESPACE_SET => NamespaceSetFields::decode(fields)
            .ok()
            .map(NamespaceSetFields::into_record),
        NAMESPACE_GONE => NamespaceGoneFields::decode(fields).ok().map(|fields| {
            Record::NamespaceGone(NamespaceGone {
                id: NamespaceId(fields.id),
            })
        }),
        _ => return None,
    };
    Some(record.ok_or(DecodeError::BadValue {
        what: "fields of an extended record",
        value: kind,
    }))
}
