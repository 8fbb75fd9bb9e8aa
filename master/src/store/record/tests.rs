//! The codec's promises: written records are read back, and no other bytes are ever read.

use super::*;
use kvpool_types::{ChecksumAlgorithm, KeyRef, Setting};
use proptest::collection::vec;
use proptest::prelude::*;
use smallvec::smallvec;

fn keys() -> impl Strategy<Value = Key> {
    let affix = prop_oneof![Just(String::new()), "[g-z@/]{1,12}"];
    prop_oneof![
        3 => (any::<[u8; 4]>(), affix.clone(), affix).prop_map(|(seed, prefix, suffix)| {
            let mut digest = [0; 32];
            digest[..4].copy_from_slice(&seed);
            KeyRef::Digest { prefix: &prefix, suffix: &suffix, digest: &digest }.to_key()
        }),
        1 => "[a-zäß0-9]{1,40}".prop_map(|text| Key::parse(&text).unwrap()),
    ]
}

fn text() -> impl Strategy<Value = String> {
    "[ -~ä]{0,20}"
}

fn places() -> impl Strategy<Value = Places> {
    let places = vec(
        (any::<u32>(), any::<u64>()).prop_map(|(s, o)| (SegmentId(s), Offset(o))),
        0..4,
    );
    places.prop_map(Places::from)
}

fn records() -> impl Strategy<Value = Record> {
    let namespaces = || (0u32..3).prop_map(NamespaceId);
    let versions = || prop_oneof![(0u64..50), any::<u64>()].prop_map(Version);
    let body = (
        any::<u64>(),
        any::<u64>(),
        places(),
        proptest::option::of(keys()),
        any::<bool>(),
    );
    prop_oneof![
        4 => (namespaces(), keys(), versions(), body).prop_map(
            |(namespace, key, version, (length, checksum, replicas, parent, hard_pin))| {
                Record::Commit(Commit {
                    namespace,
                    key,
                    version,
                    length: Length(length),
                    checksum: Checksum(checksum),
                    replicas,
                    parent,
                    hard_pin,
                })
            }
        ),
        1 => (namespaces(), keys(), versions(), any::<bool>(), any::<bool>(), places()).prop_map(
            |(namespace, key, version, unleased, everywhere, places)| {
                Record::Remove(Remove { namespace, key, version, unleased, everywhere, places })
            }
        ),
        1 => (any::<u32>(), any::<u128>(), text(), any::<u64>(), any::<bool>(), any::<[u64; 3]>()).prop_map(
            |(id, medium, node, generation, is_pending, [size, zone, cursor])| {
                Record::Medium(Medium {
                    id: SegmentId(id),
                    medium: MediumId(medium),
                    node: NodeName(node),
                    generation,
                    is_pending,
                    size: Length(size),
                    zone: Length(zone),
                    cursor: u32::try_from(cursor >> 32).unwrap(),
                })
            }
        ),
        1 => (namespaces(), keys(), versions(), any::<u32>(), any::<Option<u64>>()).prop_map(
            |(namespace, key, version, segment, offset)| {
                let (segment, offset) = (SegmentId(segment), offset.map(Offset));
                Record::ReplicaGone(ReplicaGone { namespace, key, version, segment, offset })
            }
        ),
        1 => (namespaces(), keys(), versions(), any::<u32>(), any::<u64>()).prop_map(
            |(namespace, key, version, segment, offset)| {
                Record::ReplicaAdded(ReplicaAdded {
                    namespace,
                    key,
                    version,
                    segment: SegmentId(segment),
                    offset: Offset(offset),
                })
            }
        ),
        1 => (any::<u32>(), text(), text(), text(), text(), text()).prop_map(
            |(id, name, model, dtype, parallel_rank, salt)| {
                let namespace =
                    namespace::Namespace { name, model, dtype, parallel_rank, salt };
                Record::Namespace(Namespace { id: NamespaceId(id), namespace })
            }
        ),
        1 => (any::<u32>(), any::<[u64; 3]>()).prop_map(|(id, [soft, hard, priority])| {
            let settings = NamespaceSettings::default()
                .with(Setting::MemorySoft, soft)
                .with(Setting::MemoryHard, hard)
                .with(Setting::Priority, priority);
            Record::NamespaceSet(NamespaceSet { id: NamespaceId(id), settings })
        }),
        1 => any::<u32>().prop_map(|id| {
            Record::NamespaceGone(NamespaceGone { id: NamespaceId(id) })
        }),
        1 => (any::<u32>(), text(), any::<u128>(), any::<u32>(), any::<u64>()).prop_map(
            |(id, node, incarnation, index, size)| {
                Record::Segment(Segment {
                    id: SegmentId(id),
                    node: NodeName(node),
                    incarnation: Incarnation(incarnation),
                    index,
                    size: Length(size),
                })
            }
        ),
        1 => any::<u32>().prop_map(|id| Record::SegmentGone(SegmentGone { id: SegmentId(id) })),
        1 => any::<u64>().prop_map(|seed| Record::Seed(Seed { seed })),
        1 => versions().prop_map(|until| Record::VersionsGranted(VersionsGranted { until })),
        1 => any::<u32>().prop_map(|until| {
            Record::SegmentsGranted(SegmentsGranted { until: SegmentId(until) })
        }),
        1 => (any::<u32>(), vec(any::<(u64, u64)>(), 0..5)).prop_map(|(segment, ranges)| {
            let ranges = ranges.into_iter().map(|(at, n)| (Offset(at), Length(n))).collect();
            Record::LeasedRanges(LeasedRanges { segment: SegmentId(segment), ranges })
        }),
        1 => (any::<u32>(), vec(any::<(u64, u64)>(), 0..5)).prop_map(|(segment, ranges)| {
            let ranges = ranges.into_iter().map(|(at, n)| (Offset(at), Length(n))).collect();
            Record::UnleasedRanges(UnleasedRanges { segment: SegmentId(segment), ranges })
        }),
        1 => (text(), any::<u128>()).prop_map(|(node, incarnation)| {
            let (node, incarnation) = (NodeName(node), Incarnation(incarnation));
            Record::IncarnationDropped(IncarnationDropped { node, incarnation })
        }),
    ]
}

/// Corrects the CRC, which no accident would do, so that the checks after it are tested.
fn reseal(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() - CRC_BYTES);
    let crc = crc(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(records in vec(records(), 0..40)) {
        let decoded = decode(&encode_group(&records)).unwrap();
        prop_assert_eq!(decoded, Decoded { shards: 0, records });
    }

    #[test]
    fn any_change_of_the_bytes_is_noticed(
        records in vec(records(), 1..10),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut bytes = encode_group(&records).to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert_eq!(decode(&bytes), Err(RecordError::Crc));
    }

    #[test]
    fn bytes_that_end_early_are_an_error(
        records in vec(records(), 1..10),
        at in any::<prop::sample::Index>(),
    ) {
        let bytes = encode_group(&records);
        let cut = at.index(bytes.len());
        prop_assert_eq!(decode(&bytes[..cut]), Err(RecordError::Crc));
        if cut >= CRC_BYTES {
            prop_assert!(decode(&reseal(bytes[..cut].to_vec())).is_err());
        }
    }

    #[test]
    fn damage_under_a_right_crc_gives_records_or_an_error(
        records in vec(records(), 1..10),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut bytes = encode_group(&records).to_vec();
        let at = at.index(bytes.len() - CRC_BYTES);
        bytes[at] ^= flip;
        // Every record that can be read can be written, because the types allow no other values.
        if let Ok(decoded) = decode(&reseal(bytes)) {
            prop_assert_eq!(decode(&encode_group(&decoded.records)).unwrap().records, decoded.records);
        }
    }

    #[test]
    fn a_snapshots_chunks_hold_all_records_in_order(
        records in vec(records(), 0..40),
        shards in any::<u32>(),
    ) {
        let mut read = Vec::new();
        for chunk in encode_snapshot(shards, records.clone()) {
            let decoded = decode(&chunk).unwrap();
            prop_assert_eq!(decoded.shards, shards);
            read.extend(decoded.records);
        }
        prop_assert_eq!(read, records);
    }
}

fn block(number: u64, parent: Option<u64>) -> Record {
    let key = |number: u64| {
        let mut digest = [7; 32];
        digest[..8].copy_from_slice(&number.to_le_bytes());
        Key::from_digest(digest)
    };
    Record::Commit(Commit {
        namespace: NamespaceId(3),
        key: key(number),
        version: Version((5 << 40) + number),
        length: Length(2 << 20),
        checksum: Checksum(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        replicas: smallvec![(SegmentId(300), Offset(number * (2 << 20)))],
        parent: parent.map(key),
        hard_pin: false,
    })
}

#[test]
fn a_block_of_one_replica_costs_at_most_60_bytes() {
    let roots: Vec<Record> = (0..10_000).map(|n| block(n, None)).collect();
    let bytes = encode_group(&roots).len();
    assert!(
        bytes <= 60 * roots.len(),
        "{bytes} bytes for {} blocks",
        roots.len()
    );
    // A chain written in order needs no bytes for parents.
    let chain: Vec<Record> = (0..10_000u64).map(|n| block(n, n.checked_sub(1))).collect();
    assert_eq!(encode_group(&chain).len(), bytes);
    // In a snapshot of a shard the parent is seldom the block before.
    let apart: Vec<Record> = (0..10_000).map(|n| block(n, Some(n + 10_000))).collect();
    assert_eq!(encode_group(&apart).len(), bytes + 33 * apart.len());
}

#[test]
fn snapshots_are_cut_into_small_chunks() {
    let chunks = encode_snapshot(4, (0..20_000).map(|n| block(n, None)));
    assert!(chunks.len() > 1);
    assert!(chunks.iter().all(|chunk| chunk.len() <= (256 << 10) + 256));
    assert_eq!(encode_snapshot(4, []).len(), 1);
}

#[test]
fn another_format_is_refused_by_name() {
    let mut bytes = encode_group(&[block(1, None)]).to_vec();
    bytes[0] = 9;
    assert_eq!(decode(&reseal(bytes.clone())), Err(RecordError::Format(9)));
    bytes[0] = FORMAT;
    bytes[1] = 200;
    assert_eq!(decode(&reseal(bytes)), Err(RecordError::Algorithm(200)));
}

/// A group of records of a later version.
fn of_a_later_version(count: u64, records: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![FORMAT, ChecksumAlgorithm::Crc64Nvme as u8, 0];
    bytes.push(u8::try_from(count).unwrap());
    records
        .iter()
        .for_each(|record| bytes.extend_from_slice(record));
    bytes.extend_from_slice(&[0; CRC_BYTES]);
    reseal(bytes)
}

/// An extended record; `required` is its flag.
fn extended(required: u8, kind: u8, version: &str, fields: &[u8]) -> Vec<u8> {
    let mut record = vec![
        EXTENDED | required,
        kind,
        u8::try_from(version.len()).unwrap(),
    ];
    record.extend_from_slice(version.as_bytes());
    record.push(u8::try_from(fields.len()).unwrap());
    record.extend_from_slice(fields);
    record
}

const GONE: [u8; 2] = [SEGMENT_GONE, 7];

fn gone() -> Record {
    Record::SegmentGone(SegmentGone { id: SegmentId(7) })
}

#[test]
fn a_record_of_an_unknown_kind_is_skipped_where_it_may_be() {
    let unknown = extended(0, 99, "9.1.0", b"whatever a later version says");
    let group = of_a_later_version(3, &[&GONE, &unknown, &GONE]);
    assert_eq!(decode(&group).unwrap().records, [gone(), gone()]);
}

#[test]
fn a_record_of_an_unknown_kind_that_must_not_be_skipped_names_the_version_to_run() {
    let unknown = extended(REQUIRED, 99, "9.1.0", b"x");
    let error = decode(&of_a_later_version(2, &[&GONE, &unknown])).unwrap_err();
    let kind = 99;
    let version = "9.1.0".to_owned();
    assert_eq!(error, RecordError::Unknown { kind, version });
    let said = error.to_string();
    assert!(said.contains("run 9.1.0 or later here"), "{said}");
}

#[test]
fn later_fields_of_known_kinds_are_skipped() {
    // Field 1 is known, field 15 is not.
    let granted = extended(REQUIRED, 1, "9.1.0", &[0x08, 42, 0x7a, 2, b'h', b'i']);
    let seven = [SEGMENT_GONE | HAS_LATER_FIELDS, 7, 3, 1, 2, 3];
    let group = of_a_later_version(3, &[&granted, &seven, &GONE]);
    let until = SegmentId(42);
    let granted = Record::SegmentsGranted(SegmentsGranted { until });
    assert_eq!(decode(&group).unwrap().records, [granted, gone(), gone()]);
    // Fields that exceed the group are damage, not a later version.
    let long = [SEGMENT_GONE | HAS_LATER_FIELDS, 7, 30, 1, 2, 3];
    let error = decode(&of_a_later_version(1, &[&long])).unwrap_err();
    assert!(matches!(error, RecordError::Malformed(_)), "{error}");
}
