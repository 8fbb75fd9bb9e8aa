use super::*;
use proptest::prelude::*;

const OPS: [Op; 29] = [
    Op::Hello,
    Op::Read,
    Op::Write,
    Op::Map,
    Op::WriteBegin,
    Op::WriteEnd,
    Op::Pin,
    Op::Unpin,
    Op::Sums,
    Op::Ping,
    Op::RdmaOpen,
    Op::RdmaLocate,
    Op::Greet,
    Op::Reserve,
    Op::Commit,
    Op::Lookup,
    Op::Exist,
    Op::MatchPrefix,
    Op::Renew,
    Op::Release,
    Op::HelloReply,
    Op::Statuses,
    Op::SumsReply,
    Op::MapReply,
    Op::Pong,
    Op::Failure,
    Op::RdmaOpened,
    Op::Reply,
    Op::RdmaLocated,
];

fn ping() -> Header {
    Header {
        version: VERSION,
        op: Op::Ping,
        request: 1,
        epoch: Epoch(2),
        meta: 0,
        payload: 0,
    }
}

fn with(at: usize, bytes: &[u8]) -> Result<Header, DecodeError> {
    let mut header = ping().encode();
    header[at..at + bytes.len()].copy_from_slice(bytes);
    Header::decode(&header)
}

#[test]
fn every_operation_round_trips_and_other_numbers_are_refused() {
    let known: Vec<_> = (0..=u16::MAX).filter_map(Op::from_wire).collect();
    assert_eq!(known, OPS);
    for op in OPS {
        assert_eq!(Op::from_wire(op as u16), Some(op));
    }
}

/// The bytes that every version writes: peers of other versions find magic and version here.
#[test]
fn a_header_has_its_documented_bytes() {
    let header = Header {
        version: 1,
        op: Op::Write,
        request: 0x0102_0304_0506_0708,
        epoch: Epoch(9),
        meta: 0x0a0b,
        payload: 0x0c0d,
    };
    let mut expected = [0; HEADER_BYTES];
    expected[..8].copy_from_slice(b"KVP1\x01\0\x03\0");
    expected[8..16].copy_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1]);
    expected[16] = 9;
    expected[24..26].copy_from_slice(&[0x0b, 0x0a]);
    expected[32..34].copy_from_slice(&[0x0d, 0x0c]);
    assert_eq!(header.encode(), expected);
}

#[test]
fn a_frame_without_the_magic_number_is_refused() {
    let error = with(0, b"GET ").unwrap_err();
    assert_eq!(error, DecodeError::BadMagic(u32::from_le_bytes(*b"GET ")));
    assert_eq!(error.code(), crate::Code::Malformed);
}

#[test]
fn another_version_is_refused_with_both_named() {
    for version in [0, VERSION + 1, u16::MAX] {
        let error = with(4, &version.to_le_bytes()).unwrap_err();
        assert_eq!(
            error,
            DecodeError::VersionMismatch {
                theirs: version,
                ours_min: MIN_VERSION,
                ours_max: VERSION
            }
        );
        assert_eq!(error.code(), crate::Code::VersionMismatch);
    }
    // Nothing else of another version's frame is read: its operations may be unknown.
    assert!(matches!(
        with(4, &[9, 0, 255, 255]),
        Err(DecodeError::VersionMismatch { theirs: 9, .. })
    ));
}

/// The following frame is found, so the unknown one can be answered and skipped.
#[test]
fn an_unknown_operation_is_read_as_such() {
    for op in [0u16, 13, 64, 74, u16::MAX] {
        let header = with(6, &op.to_le_bytes()).unwrap();
        assert_eq!(
            header,
            Header {
                op: Op::Unknown,
                ..ping()
            }
        );
    }
}

#[test]
fn parts_over_their_limits_are_refused() {
    let meta = |bytes: u64| with(24, &u32::try_from(bytes).unwrap().to_le_bytes());
    let payload = |bytes: u64| with(32, &bytes.to_le_bytes());
    meta(MAX_META_BYTES).unwrap();
    payload(MAX_PAYLOAD_BYTES).unwrap();
    for (outcome, limit) in [
        (meta(MAX_META_BYTES + 1), MAX_META_BYTES),
        (meta(u32::MAX.into()), MAX_META_BYTES),
        (payload(MAX_PAYLOAD_BYTES + 1), MAX_PAYLOAD_BYTES),
        (payload(u64::MAX), MAX_PAYLOAD_BYTES),
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, DecodeError::Oversized { limit: l, .. } if *l == limit));
        assert_eq!(error.code(), crate::Code::Oversized);
    }
}

proptest! {
    #[test]
    fn headers_round_trip(
        version in MIN_VERSION..=VERSION,
        op in prop::sample::select(&OPS[..]),
        request: u64,
        epoch: u64,
        meta in 0..=u32::try_from(MAX_META_BYTES).unwrap(),
        payload in 0..=MAX_PAYLOAD_BYTES,
    ) {
        let header = Header { version, op, request, epoch: Epoch(epoch), meta, payload };
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn no_header_bytes_cause_a_panic_or_pass_a_limit(bytes: [u8; HEADER_BYTES], framed: bool) {
        let mut bytes = bytes;
        if framed {
            // Valid magic, version and operation, so that the limits are reached.
            bytes[..8].copy_from_slice(&ping().encode()[..8]);
        }
        if let Ok(header) = Header::decode(&bytes) {
            prop_assert!(u64::from(header.meta) <= MAX_META_BYTES);
            prop_assert!(header.payload <= MAX_PAYLOAD_BYTES);
        }
    }
}
