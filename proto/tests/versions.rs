//! What the version before said when two met, and that it is understood, and would understand this one.

use kvpool_proto::{
    Caller, ExtentRange, HelloReply, HelloRequest, MIN_VERSION, OfferedSegment, Refusal, Register,
    VERSION, Welcome,
};
use prost::Message;
use prost::bytes::Bytes;

/// The bytes of a fixture of version 1.
fn v1(name: &str) -> Vec<u8> {
    let path = format!("{}/fixtures/v1/{name}.hex", env!("CARGO_MANIFEST_DIR"));
    let text: String = std::fs::read_to_string(path).unwrap();
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn sequence(from: u8, count: u8) -> Bytes {
    (from..from + count).collect::<Vec<u8>>().into()
}

/// Reads the fixture as `expected`, which written now gives the same bytes: nothing has moved, and a
/// peer of version 1 reads them as it did.
fn holds<M: Message + Default + PartialEq + std::fmt::Debug>(name: &str, expected: &M) {
    let bytes = v1(name);
    assert_eq!(&M::decode(bytes.as_slice()).unwrap(), expected, "{name}");
    assert_eq!(expected.encode_to_vec(), bytes, "{name}");
}

#[test]
fn both_ends_of_a_handshake_of_version_1_are_understood() {
    holds(
        "hello_request",
        &HelloRequest {
            min_version: 1,
            max_version: 1,
            caller: Some(Caller {
                cluster_id: sequence(0x10, 16),
                epoch: 7,
                client_id: sequence(0x20, 16),
                host_id: sequence(0x30, 16),
                namespace: "team-a".into(),
                forward: false,
                trace: Default::default(),
                wait_ms: 0,
            }),
            spin_us: 50,
            features: 0,
            token: String::new(),
        },
    );
    holds(
        "hello_reply",
        &HelloReply {
            version: 1,
            cluster_id: sequence(0x10, 16),
            epoch: 7,
            lease_ttl_ms: 10_000,
            max_block_bytes: 1 << 30,
            max_batch_keys: 8192,
            checksum_algorithm: 1,
            features: 0,
        },
    );
    holds(
        "register",
        &Register {
            min_version: 1,
            max_version: 1,
            cluster_id: sequence(0x10, 16),
            name: "node-1".into(),
            incarnation: sequence(0x40, 16),
            data_address: "10.0.0.2:7072".into(),
            shm_path: "/run/kvpool/node-1.sock".into(),
            host_id: sequence(0x30, 16),
            can_pull: false,
            epoch_seen: 7,
            segments: [(8 << 30, 3), (1 << 30, 0)]
                .map(|(size_bytes, id)| OfferedSegment { size_bytes, id })
                .into(),
            held: vec![ExtentRange {
                segment: 3,
                offset: 4096,
                length: 65536,
            }],
            checksum_algorithm: 1,
            life_secret: Bytes::new(),
            epoch_proof: Bytes::new(),
            wants_signed_reads: false,
            loaded: Vec::new(),
            can_undrain: false,
            version: String::new(),
        },
    );
    holds(
        "welcome",
        &Welcome {
            version: 1,
            cluster_id: sequence(0x10, 16),
            epoch: 7,
            segment_ids: vec![3],
            grant_key: sequence(0x50, 32),
            heartbeat_interval_ms: 500,
            epoch_proof: Bytes::new(),
            clock_ms: 0,
            loads_recorded_below: 0,
        },
    );
    let refusal = Refusal {
        code: 24,
        message: "dropped".into(),
        leader: String::new(),
    };
    holds("refusal", &refusal);
}

/// Peers agree when their ranges overlap; version 1 answers the lower of the highest ones.
#[test]
fn the_versions_spoken_here_overlap_with_those_of_version_1() {
    const { assert!(MIN_VERSION <= 1 && VERSION >= 1) };
    let greeting = HelloRequest::decode(v1("hello_request").as_slice()).unwrap();
    assert!(greeting.max_version >= MIN_VERSION && greeting.min_version <= VERSION);
    let register = Register::decode(v1("register").as_slice()).unwrap();
    assert!(register.max_version >= MIN_VERSION && register.min_version <= VERSION);
}

#[test]
fn what_version_1_does_not_know_comes_after_what_it_reads() {
    let refusal = Refusal {
        code: 24,
        message: "dropped".into(),
        leader: "http://10.0.0.1:7070".into(),
    };
    assert!(refusal.encode_to_vec().starts_with(&v1("refusal")));
}
