//! Requests as clients make them, in bytes: the seeds of mutations.

use crate::blocks::key;
use kvpool_proto as proto;
use kvpool_types::wire::data::{MapRequest, Meta, PinRequest, ReadItem, ReadRequest, WriteRequest};
use kvpool_types::wire::frame::{Header, Op, VERSION};
use kvpool_types::wire::keys;
use kvpool_types::{
    Epoch, Extent, GrantId, GrantKey, Incarnation, Key, Length, Offset, ReadRight, SegmentId,
    Version,
};
use prost::Message;
use proto::change_replicas_request::Blocks;
use proto::remove_request::What;

/// A frame with these parts.
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

/// The requests of a client to a data port or a Unix socket after its hello.
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

/// The calls of a client to a master: the op of a frame, the path over gRPC, and the message.
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
        presence: false,
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

/// Each call of the service `Pool`, by its path: a valid request of `caller` for `keys`.
///
/// # Panics
///
/// If a call of `pool.proto` is missing here.
pub fn of_every_call(caller: &proto::Caller, keys: &[Key]) -> Vec<(String, Vec<u8>)> {
    let caller = Some(caller.clone());
    let packed: bytes::Bytes = keys::pack(keys).into();
    let count = keys.len();
    let name = "elsewhere".to_owned();
    let mut calls = Vec::new();
    macro_rules! call {
        ($path:literal, $message:ident { $($field:ident: $value:expr),* }) => {{
            #[allow(clippy::needless_update, reason = "some requests have no further fields")]
            let message = proto::$message {
                caller: caller.clone(),
                $($field: $value,)*
                ..Default::default()
            };
            calls.push((format!("/kvpool.v1.Pool/{}", $path), message.encode_to_vec()));
        }};
    }
    let namespace = proto::Namespace {
        name: name.clone(),
        ..Default::default()
    };
    let item = proto::CommitItem {
        version: 1 << 50,
        length: 4096,
        checksum: 9,
        segments: vec![1],
        parent: 0,
    };
    let report = proto::ReportedReplica {
        version: 1 << 50,
        segment: 1,
        code: 1,
    };
    let setting = proto::NamespaceSetting {
        setting: 2,
        value: 1 << 20,
    };
    let what = |what| Some(what);
    call!(
        "Hello",
        HelloRequest {
            min_version: 1,
            max_version: 2
        }
    );
    call!(
        "CreateNamespace",
        CreateNamespaceRequest {
            namespace: Some(namespace)
        }
    );
    call!(
        "ChangeNamespace",
        ChangeNamespaceRequest {
            name: name.clone(),
            set: vec![setting],
            clear: vec![1]
        }
    );
    call!(
        "DeleteNamespace",
        DeleteNamespaceRequest {
            name: name.clone(),
            with_blocks: true
        }
    );
    call!("ListNamespaces", ListNamespacesRequest { limit: 10 });
    call!(
        "Reserve",
        ReserveRequest {
            keys: packed.clone(),
            lengths: vec![4096; count],
            timeout_ms: 20,
            grant_ttl_ms: 50,
            preferred_nodes: vec!["node-0".to_owned()],
            request: 7,
            instead_of: vec![8],
            columns: true
        }
    );
    call!(
        "Commit",
        CommitRequest {
            keys: packed.clone(),
            items: vec![item; count]
        }
    );
    call!(
        "Revoke",
        RevokeRequest {
            keys: packed.clone(),
            versions: vec![1 << 50; count]
        }
    );
    call!(
        "Lookup",
        LookupRequest {
            keys: packed.clone()
        }
    );
    call!(
        "Exist",
        ExistRequest {
            keys: packed.clone()
        }
    );
    call!(
        "MatchPrefix",
        MatchPrefixRequest {
            keys: packed.clone()
        }
    );
    call!(
        "Renew",
        RenewRequest {
            keys: packed.clone(),
            token: u64::MAX,
            versions: vec![0; count]
        }
    );
    call!(
        "Release",
        ReleaseRequest {
            keys: packed.clone(),
            tokens: vec![9; count]
        }
    );
    call!(
        "Remove",
        RemoveRequest {
            what: what(What::Keys(packed.clone()))
        }
    );
    call!(
        "Remove",
        RemoveRequest {
            what: what(What::Pattern(".*".to_owned())),
            force: true
        }
    );
    call!(
        "Remove",
        RemoveRequest {
            what: what(What::Everything(true)),
            force: true
        }
    );
    call!(
        "List",
        ListRequest {
            pattern: ".*".to_owned(),
            limit: 10
        }
    );
    call!(
        "Describe",
        DescribeRequest {
            keys: packed.clone()
        }
    );
    call!(
        "ReportReplicas",
        ReportReplicasRequest {
            keys: packed.clone(),
            reports: vec![report; count]
        }
    );
    call!("Stats", StatsRequest {});
    call!(
        "DetachMedium",
        DetachMediumRequest {
            medium_id: vec![9; 16].into(),
            with_copies: true
        }
    );
    call!(
        "ChangeReplicas",
        ChangeReplicasRequest {
            change: proto::ReplicaChange::ReplicaDrop.into(),
            blocks: Some(Blocks::Keys(packed.clone())),
            evict: true
        }
    );
    call!(
        "ReplicaTasks",
        ReplicaTasksRequest {
            ids: vec![1],
            cancel: true
        }
    );
    call!(
        "DrainNode",
        DrainNodeRequest {
            name: "node-0".to_owned()
        }
    );
    call!(
        "UndrainNode",
        UndrainNodeRequest {
            name: "node-0".to_owned()
        }
    );
    call!("Cluster", ClusterRequest { overview: true });
    let definition = include_str!("../../proto/proto/pool.proto");
    let defined = definition.lines().filter_map(|line| {
        let (name, _) = line.trim().strip_prefix("rpc ")?.split_once('(')?;
        Some(format!("/kvpool.v1.Pool/{name}"))
    });
    for path in defined {
        assert!(calls.iter().any(|(known, _)| *known == path), "add {path}");
    }
    calls
}
