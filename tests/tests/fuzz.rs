//! Mutated input for every decoder of network messages and of files. For any bytes a decoder returns a
//! value or an error and uses memory in proportion to the input. A decoded value survives encoding and
//! decoding unchanged.
//!
//! A program of its own: each test bounds the memory of its process.
//!
//! `KVPOOL_FUZZ=10000000` for more mutations of each, and `KVPOOL_FUZZ_SEED` for others:
//! `cargo xtask fuzz --cases 10000000`.

use kvpool_master::store::record;
use kvpool_proto as proto;
use kvpool_tests::fuzz::{Corpus, cases};
use kvpool_types::namespace::Namespace;
use kvpool_types::wire::data::{
    Failure, Hello, HelloReply, MapReply, MapRequest, Meta, PinRequest, ReadItem, ReadRequest,
    Statuses, SumsReply, WriteEnd, WriteRequest,
};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::wire::incoming::Incoming;
use kvpool_types::wire::keys::{self, KeyBatch};
use kvpool_types::wire::rdma::{RdmaLocated, RdmaOpen, RdmaOpened};
use kvpool_types::{
    Checksum, Code, Epoch, Extent, GrantId, GrantKey, HostId, Incarnation, Key, Length, NodeName,
    Offset, ReadRight, SegmentId, Version,
};
use prost::Message;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The number of mutations for each decoder in a usual run.
const USUALLY: u64 = 5_000;

/// A decoder that trusts a count fails here: the limit is many times the inputs, and no more.
fn bound_memory() {
    const ROOM: u64 = 1 << 30;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    let Rlimit { maximum, .. } = getrlimit(Resource::As);
    let bounded = Rlimit {
        current: Some(kib * 1024 + ROOM),
        maximum,
    };
    setrlimit(Resource::As, bounded).unwrap();
}

fn fuzz(name: &str, seeds: Vec<Vec<u8>>, check: impl Fn(&[u8]) -> Result<(), String>) {
    bound_memory();
    let mut corpus = Corpus::load(name, seeds).unwrap();
    corpus.run(name, cases(USUALLY), check).unwrap();
}

fn meta<M: Meta + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Result<(), String> {
    let Ok(value) = M::decode(bytes) else {
        return Ok(());
    };
    match M::decode(&value.to_bytes()) {
        Ok(again) if again == value => Ok(()),
        other => Err(format!("{value:?} is read back as {other:?}")),
    }
}

fn extent(number: u64) -> Extent {
    Extent {
        segment: SegmentId(3),
        offset: Offset(number << 20),
        length: Length(100_000 + number),
    }
}

fn write() -> WriteRequest {
    let key = GrantKey([7; 32]);
    let grants = (1..4).map(|n| key.sign(Incarnation(1), Epoch(2), GrantId(n), extent(n)));
    WriteRequest {
        incarnation: Incarnation(1),
        grants: grants.collect(),
    }
}

fn hello() -> Hello {
    Hello {
        min_version: 1,
        max_version: VERSION,
        cluster: 5.into(),
        client: 6.into(),
        incarnation: Incarnation(7),
        checksum_algorithm: 1,
        token: "a token".to_owned().into(),
    }
}

fn read() -> ReadRequest {
    let item = |n| ReadItem {
        extent: extent(n),
        from: Offset(4096),
        length: Length(70_000),
        right: (n % 2 == 0).then_some(ReadRight {
            version: Version(9),
            deadline_ms: 1_000,
            mac: [7; 16],
        }),
    };
    ReadRequest {
        incarnation: Incarnation(7),
        items: (0..5).map(item).collect(),
    }
}

#[test]
fn metas_of_the_data_port_hold_whatever_comes() {
    let seeds = vec![
        hello().to_bytes(),
        HelloReply {
            version: VERSION,
            cluster: 5.into(),
            node: NodeName("node-1".into()),
            incarnation: Incarnation(7),
            host: HostId(8),
            checksum_algorithm: 1,
            features: kvpool_types::wire::features::Features::default(),
        }
        .to_bytes(),
        read().to_bytes(),
        write().to_bytes(),
        PinRequest {
            incarnation: Incarnation(7),
            extents: (0..5).map(extent).collect(),
        }
        .to_bytes(),
        MapRequest {
            incarnation: Incarnation(7),
            segment: SegmentId(3),
            writable: true,
        }
        .to_bytes(),
        MapReply {
            size: Length(1 << 30),
        }
        .to_bytes(),
        Statuses(Code::ALL.to_vec()).to_bytes(),
        SumsReply(vec![
            Ok(vec![Checksum(1), Checksum(2)]),
            Err(Code::OutOfRange),
        ])
        .to_bytes(),
        Failure {
            code: Code::Malformed,
            message: "because".into(),
        }
        .to_bytes(),
    ];
    fuzz("metas", seeds, |bytes| {
        meta::<Hello>(bytes)?;
        meta::<HelloReply>(bytes)?;
        meta::<ReadRequest>(bytes)?;
        meta::<WriteRequest>(bytes)?;
        meta::<WriteEnd>(bytes)?;
        meta::<PinRequest>(bytes)?;
        meta::<MapRequest>(bytes)?;
        meta::<MapReply>(bytes)?;
        meta::<Statuses>(bytes)?;
        meta::<SumsReply>(bytes)?;
        meta::<Failure>(bytes)?;
        meta::<RdmaOpen>(bytes)?;
        meta::<RdmaOpened>(bytes)?;
        meta::<RdmaLocated>(bytes)
    });
}

fn frame(op: Op, meta: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = Header {
        version: VERSION,
        op,
        request: 9,
        epoch: Epoch(2),
        meta: u32::try_from(meta.len()).unwrap(),
        payload: payload.len() as u64,
    };
    [&header.encode(), meta, payload].concat()
}

/// Frames that arrive in pieces: all of them are read, and none is larger than the bytes received. The
/// buffer grows to the length that a header announces, within the limits only.
#[test]
fn frames_hold_whatever_comes() {
    const MOST_PAYLOAD: u64 = 1 << 20;
    let whole = frame(Op::Read, &read().to_bytes(), &[]);
    let several = [
        frame(Op::Hello, &hello().to_bytes(), &[]),
        whole.clone(),
        frame(Op::Write, &write().to_bytes(), &[5; 300]),
    ];
    let seeds = vec![whole, several.concat()];
    fuzz("frames", seeds, |bytes| {
        if let Some(head) = bytes.first_chunk::<HEADER_BYTES>()
            && let Ok(header) = Header::decode(head)
        {
            let again = Header::decode(&header.encode());
            if again.as_ref() != Ok(&header) {
                return Err(format!("{header:?} is read back as {again:?}"));
            }
        }
        let mut incoming = Incoming::new(MOST_PAYLOAD);
        let mut left = bytes;
        loop {
            match incoming.next_frame() {
                Ok(Some(frame)) => {
                    let size = frame.meta.len() + frame.payload.len();
                    if size > bytes.len() {
                        return Err(format!("{size} bytes out of {}", bytes.len()));
                    }
                    continue;
                }
                Ok(None) => {}
                Err(_) => return Ok(()),
            }
            if left.is_empty() {
                return Ok(());
            }
            let room = incoming.room();
            if room.len() > 8 << 20 {
                return Err(format!("room for {} bytes is made", room.len()));
            }
            let count = room.len().min(left.len()).min(97);
            let (now, later) = left.split_at(count);
            room[..count].copy_from_slice(now);
            incoming.filled(count);
            left = later;
        }
    });
}

#[test]
fn packed_keys_hold_whatever_comes() {
    let digest = |n: u8| Key::from_digest([n; 32]);
    let text = |text: &str| Key::parse(text).unwrap();
    let seeds = vec![
        keys::pack(&[digest(1), digest(2), digest(3)]),
        keys::pack(&[text("model@1@a"), text("model@1@b"), digest(4)]),
        keys::pack(&[text("k")]),
    ];
    fuzz("keys", seeds, |bytes| {
        let Ok(batch) = KeyBatch::unpack(bytes, 1000) else {
            return Ok(());
        };
        let owned: Vec<Key> = batch.iter().map(|key| key.to_key()).collect();
        let packed = keys::pack(&owned);
        let again = KeyBatch::unpack(&packed, 1000).map_err(|error| error.to_string())?;
        let again: Vec<Key> = again.iter().map(|key| key.to_key()).collect();
        if again == owned {
            Ok(())
        } else {
            Err(format!("{owned:?} are read back as {again:?}"))
        }
    });
}

fn message<M: Message + Default + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Result<(), String> {
    let Ok(value) = M::decode(bytes) else {
        return Ok(());
    };
    match M::decode(value.encode_to_vec().as_slice()) {
        Ok(again) if again == value => Ok(()),
        other => Err(format!("{value:?} is read back as {other:?}")),
    }
}

#[test]
fn messages_to_a_master_hold_whatever_comes() {
    let caller = proto::Caller {
        cluster_id: vec![1; 16].into(),
        epoch: 3,
        client_id: vec![2; 16].into(),
        host_id: vec![3; 16].into(),
        namespace: "team-a".into(),
        forward: false,
        trace: Default::default(),
        wait_ms: 0,
    };
    let packed = keys::pack(&[Key::from_digest([1; 32]), Key::from_digest([2; 32])]);
    let reserve = proto::ReserveRequest {
        caller: Some(caller.clone()),
        keys: packed.clone().into(),
        lengths: vec![4096, 1 << 20],
        replicas: 2,
        timeout_ms: 1000,
        ..Default::default()
    };
    let commit = proto::CommitRequest {
        caller: Some(caller.clone()),
        keys: packed.into(),
        items: vec![proto::CommitItem {
            version: 7,
            length: 4096,
            checksum: 9,
            segments: vec![3],
            parent: 0,
        }],
        ..Default::default()
    };
    let register = proto::Register {
        min_version: 1,
        max_version: 1,
        name: "node-1".into(),
        incarnation: vec![4; 16].into(),
        data_address: "10.0.0.2:7072".into(),
        segments: vec![proto::OfferedSegment {
            size_bytes: 1 << 30,
            id: 0,
        }],
        ..Default::default()
    };
    let node = proto::NodeMessage {
        body: Some(proto::node_message::Body::Register(register)),
    };
    let seeds = vec![
        reserve.encode_to_vec(),
        commit.encode_to_vec(),
        node.encode_to_vec(),
    ];
    fuzz("messages", seeds, |bytes| {
        message::<proto::HelloRequest>(bytes)?;
        message::<proto::ReserveRequest>(bytes)?;
        message::<proto::CommitRequest>(bytes)?;
        message::<proto::LookupRequest>(bytes)?;
        message::<proto::NodeMessage>(bytes)?;
        message::<proto::MasterMessage>(bytes)
    });
}

/// Also under a right checksum, which no accident gives: the checks of a record's fields must be
/// sufficient alone.
#[test]
fn records_hold_whatever_the_disk_gives() {
    let namespace = record::Namespace {
        id: 1.into(),
        namespace: Namespace {
            name: "team-a".into(),
            ..Default::default()
        },
    };
    let segment = record::Segment {
        id: SegmentId(3),
        node: NodeName("node-1".into()),
        incarnation: Incarnation(7),
        index: 0,
        size: Length(1 << 30),
    };
    let granted = record::VersionsGranted {
        until: Version(1 << 20),
    };
    let records = [
        record::Record::Namespace(namespace),
        record::Record::Segment(segment),
        record::Record::VersionsGranted(granted),
        record::Record::Seed(record::Seed { seed: 9 }),
    ];
    let seeds = vec![record::encode_group(&records).to_vec()];
    fuzz("records", seeds, |bytes| {
        let sealed = {
            let body = bytes
                .get(..bytes.len().saturating_sub(8))
                .unwrap_or_default();
            let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, body);
            [body, &sum.to_le_bytes()].concat()
        };
        for bytes in [bytes, &sealed] {
            let Ok(decoded) = record::decode(bytes) else {
                continue;
            };
            let written = record::encode_group(&decoded.records);
            let again = record::decode(&written).map_err(|error| error.to_string())?;
            if again.records != decoded.records {
                return Err(format!("{decoded:?} is read back as {again:?}"));
            }
        }
        Ok(())
    });
}
