//! Requests as clients make them, in bytes: the seeds of mutations.

use crate::blocks::key;
use kvpool_proto as proto;
use kvpool_types::wire::data::{MapRequest, Meta, PinRequest, ReadItem, ReadRequest, WriteRequest};
use kvpool_types::wire::frame::{Header, Op, VERSION};
use kvpool_types::wire::keys;
use kvpool_types::{
    Epoch, Extent, GrantId, GrantKey, Incarnation, Length, Offset, ReadRight, SegmentId, Version,
};
use prost::Message;

/// A frame of these parts.
pub fn frame(op: Op, epoch: Epoch, meta: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = Header {
        version: VERSION,
        op,
        request: 9,
        epoch,
        meta: u32::try_from(meta.len()).unwrap(),
        payload: payload.len() as u64,
    };
    [&header.encode(), meta, payload].concat()
}

/// What a client says to a data port or a Unix socket after its hello.
pub fn of_data_port(epoch: Epoch, life: Incarnation) -> Vec<Vec<u8>> {
    let extent = |n: u64| Extent {
        segment: SegmentId(1),
        offset: Offset(n << 16),
        length: Length(4096),
    };
    let read = ReadRequest {
        incarnation: life,
        items: (0..3)
            .map(|n| ReadItem {
                extent: extent(n),
                from: Offset(0),
                length: Length(4096),
                right: (n % 2 == 0).then_some(ReadRight {
                    version: Version(1),
                    deadline_ms: 1_000,
                    mac: [7; 16],
                }),
            })
            .collect(),
    };
    let signer = GrantKey([3; 32]);
    let write = WriteRequest {
        incarnation: life,
        grants: vec![signer.sign(life, epoch, GrantId(1 << 40), extent(1))],
    };
    let pin = PinRequest {
        incarnation: life,
        extents: vec![extent(0)],
    };
    let map = MapRequest {
        incarnation: life,
        segment: SegmentId(1),
        writable: false,
    };
    let payload = vec![1; usize::try_from(write.payload_bytes().unwrap()).unwrap()];
    vec![
        frame(Op::Read, epoch, &read.to_bytes(), &[]),
        frame(Op::Sums, epoch, &read.to_bytes(), &[]),
        frame(Op::Write, epoch, &write.to_bytes(), &payload),
        frame(Op::WriteBegin, epoch, &write.to_bytes(), &[]),
        frame(Op::Pin, epoch, &pin.to_bytes(), &[]),
        frame(Op::Unpin, epoch, &pin.to_bytes(), &[]),
        frame(Op::Map, epoch, &map.to_bytes(), &[]),
        frame(Op::Ping, epoch, &[], &[]),
    ]
}

/// What a client calls a master for: the op of a frame, the path over gRPC, and the message.
pub fn of_master(caller: &proto::Caller) -> Vec<(Op, &'static str, Vec<u8>)> {
    let packed: bytes::Bytes = keys::pack(&[key(1), key(2), key(9999)]).into();
    let caller = Some(caller.clone());
    let lookup = proto::LookupRequest {
        caller: caller.clone(),
        keys: packed.clone(),
        no_lease: true,
    };
    let exist = proto::ExistRequest {
        caller: caller.clone(),
        keys: packed.clone(),
        no_lease: true,
    };
    let renew = proto::RenewRequest {
        caller: caller.clone(),
        keys: packed.clone(),
        token: 1,
        versions: vec![1; 3],
    };
    let commit = proto::CommitRequest {
        caller: caller.clone(),
        keys: packed,
        items: vec![proto::CommitItem {
            version: 1 << 50,
            length: 4096,
            checksum: 9,
            segments: vec![1],
            parent: 0,
        }],
        ..Default::default()
    };
    let hello = proto::HelloRequest {
        min_version: 1,
        max_version: 1,
        caller,
        ..Default::default()
    };
    vec![
        (Op::Lookup, "/kvpool.v1.Pool/Lookup", lookup.encode_to_vec()),
        (Op::Exist, "/kvpool.v1.Pool/Exist", exist.encode_to_vec()),
        (Op::Renew, "/kvpool.v1.Pool/Renew", renew.encode_to_vec()),
        (Op::Commit, "/kvpool.v1.Pool/Commit", commit.encode_to_vec()),
        (Op::Greet, "/kvpool.v1.Pool/Hello", hello.encode_to_vec()),
    ]
}
