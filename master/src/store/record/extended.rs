//! The kinds of records since format 1. Their fields are protobuf messages, so an older reader
//! skips unknown fields.

use super::{Record, SegmentsGranted};
use kvpool_types::SegmentId;
use kvpool_types::wire::DecodeError;
use prost::Message as _;

/// The head of an extended record.
pub(super) struct Head {
    pub(super) kind: u64,
    /// Whether a reader that does not know the kind must stop. Mark a kind so when skipping it
    /// could lose a block: a master that skips a record does not write it into its next snapshot.
    pub(super) is_required: bool,
}

const SEGMENTS_GRANTED: u64 = 1;

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct SegmentsGrantedFields {
    #[prost(uint32, tag = "1")]
    until: u32,
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
        _ => None,
    }
}

/// The record of a kind; `None` for an unknown kind.
pub(super) fn decode(kind: u64, fields: &[u8]) -> Option<Result<Record, DecodeError>> {
    match kind {
        SEGMENTS_GRANTED => Some(
            SegmentsGrantedFields::decode(fields)
                .map(|fields| {
                    Record::SegmentsGranted(SegmentsGranted {
                        until: SegmentId(fields.until),
                    })
                })
                .map_err(|_| DecodeError::BadValue {
                    what: "fields of an extended record",
                    value: kind,
                }),
        ),
        _ => None,
    }
}
