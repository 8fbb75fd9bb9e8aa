use super::*;
use crate::{ReadRight, Version};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use std::fmt::Debug;

/// Checks the rules of every part: it round-trips, and is refused when truncated anywhere or
/// followed by anything.
pub(in super::super) fn check<M: Meta + PartialEq + Debug>(part: &M) -> Result<(), TestCaseError> {
    let mut bytes = check_whole(part)?;
    bytes.push(0);
    prop_assert!(
        matches!(
            M::decode(&bytes),
            Err(DecodeError::Trailing { left: 1, .. })
        ),
        "one byte too many"
    );
    Ok(())
}

/// The same for the parts that open a connection, to which a later version may append.
fn check_open<M: Meta + PartialEq + Debug>(part: &M) -> Result<(), TestCaseError> {
    let mut bytes = check_whole(part)?;
    bytes.extend([0, 1, 2]);
    let decoded = M::decode(&bytes);
    prop_assert_eq!(decoded.as_ref(), Ok(part));
    Ok(())
}

fn check_whole<M: Meta + PartialEq + Debug>(part: &M) -> Result<Vec<u8>, TestCaseError> {
    let bytes = part.to_bytes();
    let decoded = M::decode(&bytes);
    prop_assert_eq!(decoded.as_ref(), Ok(part));
    for cut in 0..bytes.len() {
        prop_assert!(M::decode(&bytes[..cut]).is_err(), "cut at {cut}");
    }
    Ok(bytes)
}

fn extents() -> impl Strategy<Value = Extent> {
    (any::<u32>(), any::<u64>(), any::<u64>()).prop_map(|(segment, offset, length)| Extent {
        segment: SegmentId(segment),
        offset: Offset(offset),
        length: Length(length.min(u64::MAX - offset)),
    })
}

fn grants() -> impl Strategy<Value = Grant> {
    (
        extents(),
        any::<u64>(),
        any::<u64>(),
        any::<[u8; MAC_BYTES]>(),
    )
        .prop_map(|(extent, epoch, id, mac)| Grant {
            extent,
            epoch: Epoch(epoch),
            id: GrantId(id),
            mac,
        })
}

fn rights() -> impl Strategy<Value = ReadRight> {
    (any::<u64>(), any::<u64>(), any::<[u8; MAC_BYTES]>()).prop_map(
        |(version, deadline_ms, mac)| ReadRight {
            version: Version(version),
            deadline_ms,
            mac,
        },
    )
}

fn sums() -> impl Strategy<Value = Vec<Checksum>> {
    vec(any::<u64>().prop_map(Checksum), 0..5)
}

fn codes() -> impl Strategy<Value = Code> {
    prop::sample::select(Code::ALL)
}

proptest! {
    #[test]
    fn hellos_round_trip(
        min_version: u16, max_version: u16, cluster: u128, client: u128, incarnation: u128,
        checksum_algorithm: u8, token in "\\PC{0,40}",
    ) {
        check_open(&Hello {
            min_version,
            max_version,
            cluster: ClusterId(cluster),
            client: ClientId(client),
            incarnation: Incarnation(incarnation),
            checksum_algorithm,
            token: token.into(),
        })?;
    }

    #[test]
    fn hello_replies_round_trip(
        version: u16, cluster: u128, node in "\\PC{0,40}", incarnation: u128, host: u128,
        checksum_algorithm: u8,
    ) {
        check_open(&HelloReply {
            version,
            cluster: ClusterId(cluster),
            node: NodeName(node),
            incarnation: Incarnation(incarnation),
            host: HostId(host),
            checksum_algorithm,
            features: crate::wire::features::Features::default(),
        })?;
    }

    #[test]
    fn read_requests_round_trip(
        incarnation: u128,
        items in vec((extents(), any::<u64>(), any::<u64>(), option::of(rights())), 0..6),
    ) {
        let items = items.into_iter().map(|(extent, from, length, right)| ReadItem {
            extent,
            from: Offset(from),
            length: Length(length),
            right,
        });
        check(&ReadRequest {
            incarnation: Incarnation(incarnation),
            items: items.collect(),
        })?;
    }

    #[test]
    fn write_requests_round_trip(incarnation: u128, grants in vec(grants(), 0..6)) {
        check(&WriteRequest { incarnation: Incarnation(incarnation), grants })?;
    }

    #[test]
    fn write_ends_round_trip(items in vec((any::<u64>().prop_map(GrantId), sums()), 0..6)) {
        check(&WriteEnd { items })?;
    }

    #[test]
    fn pin_requests_round_trip(incarnation: u128, extents in vec(extents(), 0..6)) {
        check(&PinRequest { incarnation: Incarnation(incarnation), extents })?;
    }

    #[test]
    fn map_requests_round_trip(incarnation: u128, segment: u32, writable: bool) {
        check(&MapRequest {
            incarnation: Incarnation(incarnation),
            segment: SegmentId(segment),
            writable,
        })?;
    }

    #[test]
    fn map_replies_round_trip(size: u64) {
        check(&MapReply { size: Length(size) })?;
    }

    #[test]
    fn statuses_round_trip(statuses in vec(codes(), 0..20)) {
        check(&Statuses(statuses))?;
    }

    #[test]
    fn sums_replies_round_trip(
        items in vec(prop_oneof![
            sums().prop_map(Ok),
            codes().prop_filter("ok is no failure", |code| *code != Code::Ok).prop_map(Err),
        ], 0..6),
    ) {
        check(&SumsReply(items))?;
    }

    #[test]
    fn failures_round_trip(code in codes(), message in "\\PC{0,60}") {
        check(&Failure { code, message })?;
    }

    #[test]
    fn no_bytes_cause_a_panic(mut bytes: Vec<u8>, count in 0u32..5) {
        decode_all(&bytes);
        // With a small count at the positions of counts, so that items are reached.
        for at in [0, 16] {
            if let Some(field) = bytes.get_mut(at..at + 4) {
                field.copy_from_slice(&count.to_le_bytes());
            }
        }
        decode_all(&bytes);
    }
}

fn decode_all(bytes: &[u8]) {
    let _ = Hello::decode(bytes);
    let _ = HelloReply::decode(bytes);
    let _ = ReadRequest::decode(bytes);
    let _ = WriteRequest::decode(bytes);
    let _ = WriteEnd::decode(bytes);
    let _ = PinRequest::decode(bytes);
    let _ = MapRequest::decode(bytes);
    let _ = MapReply::decode(bytes);
    let _ = Statuses::decode(bytes);
    let _ = SumsReply::decode(bytes);
    let _ = Failure::decode(bytes);
}

#[test]
fn an_excessive_count_is_refused_before_memory_is_allocated() {
    let mut bytes = (MAX_ITEMS + 1).to_le_bytes().to_vec();
    assert_eq!(
        Statuses::decode(&bytes),
        Err(DecodeError::Oversized {
            what: "item count",
            size: u64::from(MAX_ITEMS) + 1,
            limit: MAX_ITEMS.into()
        })
    );
    let full = Statuses(vec![Code::Ok; MAX_ITEMS as usize]);
    assert_eq!(Statuses::decode(&full.to_bytes()), Ok(full));

    // One item whose checksums would take 32 GiB.
    bytes = 1u32.to_le_bytes().to_vec();
    bytes.extend_from_slice(&7u64.to_le_bytes());
    bytes.extend_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(
        WriteEnd::decode(&bytes),
        Err(DecodeError::Truncated { what: "checksums" })
    );
}

#[test]
fn values_that_a_field_cannot_have_are_refused() {
    let mut map = MapRequest {
        incarnation: Incarnation(1),
        segment: SegmentId(1),
        writable: true,
    }
    .to_bytes();
    *map.last_mut().unwrap() = 2;
    assert_eq!(
        MapRequest::decode(&map),
        Err(DecodeError::BadValue {
            what: "writable",
            value: 2
        })
    );

    let mut statuses = Statuses(vec![Code::Ok]).to_bytes();
    statuses[4..].copy_from_slice(&999u16.to_le_bytes());
    // A later version's code is a failure here; it must not end the connection.
    assert_eq!(
        Statuses::decode(&statuses),
        Ok(Statuses(vec![Code::Internal]))
    );

    let past_the_end = PinRequest {
        incarnation: Incarnation(1),
        extents: vec![Extent {
            segment: SegmentId(1),
            offset: Offset(u64::MAX),
            length: Length(1),
        }],
    };
    assert!(matches!(
        PinRequest::decode(&past_the_end.to_bytes()),
        Err(DecodeError::BadValue {
            what: "extent end",
            ..
        })
    ));

    let mut failure = Failure {
        code: Code::Full,
        message: "é".into(),
    }
    .to_bytes();
    failure.pop();
    failure[2] = 1;
    assert_eq!(
        Failure::decode(&failure),
        Err(DecodeError::NotUtf8 { what: "failure" })
    );
}

#[test]
fn a_long_message_is_cut_at_a_character() {
    let failure = Failure {
        code: Code::Internal,
        message: "é".repeat(40_000),
    };
    let decoded = Failure::decode(&failure.to_bytes()).unwrap();
    assert_eq!(decoded.message, "é".repeat(32_767));
}

#[test]
fn the_payload_of_a_write_is_its_blocks_and_their_chunk_checksums() {
    let grant = |length| Grant {
        extent: Extent {
            segment: SegmentId(1),
            offset: Offset(0),
            length: Length(length),
        },
        epoch: Epoch(1),
        id: GrantId(1),
        mac: [0; MAC_BYTES],
    };
    let request = |lengths: &[u64]| WriteRequest {
        incarnation: Incarnation(1),
        grants: lengths.iter().map(|length| grant(*length)).collect(),
    };
    let chunk = crate::CHUNK;
    assert_eq!(request(&[]).payload_bytes(), Some(0));
    assert_eq!(
        request(&[1, chunk, chunk + 1]).payload_bytes(),
        Some(1 + 8 + chunk + 8 + chunk + 1 + 16)
    );
    assert_eq!(request(&[u64::MAX]).payload_bytes(), None);
    assert_eq!(request(&[u64::MAX / 2, u64::MAX / 2]).payload_bytes(), None);
}

/// A node of an earlier version takes no rights.
#[test]
fn a_read_without_rights_is_encoded_as_before_there_were_any() {
    let extent = Extent {
        segment: SegmentId(3),
        offset: Offset(4096),
        length: Length(100),
    };
    let plain = ReadRequest {
        incarnation: Incarnation(9),
        items: vec![ReadItem::whole(extent); 2],
    };
    let bytes = plain.to_bytes();
    assert_eq!(bytes.len(), 16 + 4 + 2 * (20 + 8 + 8));
    let right = ReadRight {
        version: Version(5),
        deadline_ms: 7,
        mac: [1; MAC_BYTES],
    };
    let mut signed = plain.clone();
    if let Some(item) = signed.items.last_mut() {
        *item = item.with(Some(right));
    }
    let more = 1 + (1 + 8 + 8 + MAC_BYTES);
    assert_eq!(signed.to_bytes().len(), bytes.len() + more);
    assert_eq!(ReadRequest::decode(&signed.to_bytes()), Ok(signed));
    assert_eq!(ReadRequest::decode(&bytes), Ok(plain));
}
