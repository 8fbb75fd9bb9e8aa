//! Invariant 9: bad input gets a clear error and changes nothing.

use kvpool_client::{GetBlock, GetOptions, PutBlock, PutOptions};
use kvpool_proto as proto;
use kvpool_tests::blocks::{key, put_all, source, target};
use kvpool_tests::daemon::{Daemon, path_of};
use kvpool_tests::grants::Control;
use kvpool_tests::raw::Port;
use kvpool_tests::{Cluster, Options};
use kvpool_types::wire::data::{Failure, Hello, Meta};
use kvpool_types::wire::frame::{Header, Op, VERSION};
use kvpool_types::wire::keys;
use kvpool_types::{Code, Epoch, Key, Length, key::KeyError};
use std::process::{Command, Output};
use std::time::Duration;

async fn unchanged(cluster: &Cluster) {
    let client = cluster.client().await.unwrap();
    assert_eq!(client.list("", 0, None).await.unwrap().blocks.len(), 1);
    assert_eq!(cluster.gauge("blocks").unwrap(), 1);
    cluster
        .wait_for(
            "no reservations",
            || Ok(cluster.gauge("reservations")? == 0),
        )
        .unwrap();
}

fn code_of(status: &tonic::Status) -> Option<Code> {
    let text = status.metadata().get(proto::CODE_METADATA)?.to_str().ok()?;
    Code::from_wire(text.parse().ok()?)
}

#[test]
fn keys_have_1_to_1024_bytes() {
    assert_eq!(Key::parse("").unwrap_err(), KeyError::Empty);
    assert_eq!(
        Key::parse(&"k".repeat(1025)).unwrap_err(),
        KeyError::TooLong(1025)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_have_a_length_within_the_limit() {
    let cluster = Cluster::start(Options::default().master(&["--max-block-size", "1MiB"])).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..1, 1000).await.unwrap();
    let empty = PutBlock {
        key: key(1),
        parent: None,
        buffers: Vec::new(),
    };
    let huge = PutBlock::new(key(2), source(&key(2), (1 << 20) + 1));
    let good = PutBlock::new(key(0), source(&key(0), 1000));
    let outcomes = client
        .batch_put(vec![empty, huge, good], &PutOptions::default())
        .await;
    assert_eq!(
        outcomes[0].as_ref().unwrap_err().code(),
        Code::InvalidArgument
    );
    assert_eq!(outcomes[1].as_ref().unwrap_err().code(), Code::TooLarge);
    assert!(outcomes[2].is_ok(), "a bad key failed its neighbour");
    // A destination that is too small stays unchanged.
    let small = target(999);
    let get = GetBlock::new(key(0), small.clone());
    let outcome = client
        .batch_get(vec![get], &GetOptions::default())
        .await
        .remove(0);
    assert_eq!(outcome.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(small.to_vec(), vec![0; 999]);
    unchanged(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_checks_what_no_client_of_ours_would_send() {
    let cluster = Cluster::start(Options::default().master(&["--max-batch-keys", "8"])).unwrap();
    put_all(&cluster.client().await.unwrap(), 0..1, 1000)
        .await
        .unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let caller = control.caller();
    let packed = |count: u64| keys::pack(&(0..count).map(key).collect::<Vec<_>>());
    let reserve = |lengths: Vec<u64>, keys: Vec<u8>| proto::ReserveRequest {
        caller: caller.clone(),
        keys: keys.into(),
        lengths,
        ..Default::default()
    };
    let cases = [
        (reserve(vec![5], packed(2)), Code::InvalidArgument),
        (reserve(vec![5; 9], packed(9)), Code::Oversized),
        (
            reserve(vec![5], vec![1, 1, 0, 0, 0, 9]),
            Code::InvalidArgument,
        ),
        (
            proto::ReserveRequest {
                caller: None,
                ..reserve(vec![], vec![])
            },
            Code::Malformed,
        ),
    ];
    for (request, expected) in cases {
        let status = control.raw().reserve(request).await.unwrap_err();
        assert_eq!(code_of(&status), Some(expected), "{status}");
    }
    let request = reserve(vec![0], packed(1));
    let reply = control.raw().reserve(request).await.unwrap().into_inner();
    let zero = reply.reservations[0].code;
    assert_eq!(zero, u32::from(Code::InvalidArgument.to_wire()));

    let unknown = proto::Caller {
        namespace: "nobody".into(),
        ..caller.clone().unwrap()
    };
    let request = proto::LookupRequest {
        caller: Some(unknown),
        keys: packed(1).into(),
        no_lease: true,
    };
    let status = control.raw().lookup(request).await.unwrap_err();
    assert_eq!(code_of(&status), Some(Code::UnknownNamespace), "{status}");

    let old = proto::HelloRequest {
        token: String::new(),
        spin_us: 0,
        features: 0,
        min_version: 0,
        max_version: 0,
        caller: None,
    };
    let status = control.raw().hello(old).await.unwrap_err();
    assert_eq!(code_of(&status), Some(Code::VersionMismatch));
    let ours = format!("{} to {}", proto::MIN_VERSION, proto::VERSION);
    assert!(
        status.message().contains("0 to 0") && status.message().contains(&ours),
        "{status}"
    );

    // A commit that does not match its grant changes nothing.
    let granted = control.reserve(&key(5), 4096, 2000).await.unwrap();
    let mut shorter = granted.clone();
    shorter.grant.extent.length = Length(100);
    let refused = control
        .commit(&key(5), &shorter, kvpool_types::Checksum(0))
        .await
        .unwrap();
    assert_eq!(refused, Code::InvalidArgument);
    let mut elsewhere = granted.clone();
    elsewhere.grant.extent.segment = kvpool_types::SegmentId(77);
    let refused = control
        .commit(&key(5), &elsewhere, kvpool_types::Checksum(0))
        .await
        .unwrap();
    assert_eq!(refused, Code::InvalidArgument);

    // Columns have the length of the batch, and exclude the other encoding.
    let versions = vec![granted.grant.id.0];
    let columns = proto::CommitColumns {
        versions: versions.clone(),
        lengths: vec![2000],
        checksums: vec![0],
        segments: vec![granted.grant.extent.segment.0],
        parents: vec![],
    };
    let item = proto::CommitItem {
        version: versions[0],
        length: 2000,
        checksum: 0,
        segments: columns.segments.clone(),
        parent: 0,
    };
    let without = |change: fn(&mut proto::CommitColumns)| {
        let mut columns = columns.clone();
        change(&mut columns);
        columns
    };
    let cases = [
        (without(|c| c.versions.clear()), vec![]),
        (without(|c| c.lengths.push(1)), vec![]),
        (without(|c| c.checksums.clear()), vec![]),
        (without(|c| c.segments.clear()), vec![]),
        (without(|c| c.parents = vec![0; 2]), vec![]),
        (without(|c| c.parents = vec![9]), vec![]),
        (columns.clone(), vec![item]),
    ];
    for (columns, items) in cases {
        let request = proto::CommitRequest {
            caller: caller.clone(),
            keys: keys::pack(&[key(5)]).into(),
            items,
            parents: Vec::new().into(),
            columns: Some(columns),
        };
        let status = control.raw().commit(request).await.unwrap_err();
        assert_eq!(code_of(&status), Some(Code::InvalidArgument), "{status}");
    }
    unchanged(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_port_answers_bad_frames_and_serves_others() {
    let cluster = Cluster::start(Options::default()).unwrap();
    put_all(&cluster.client().await.unwrap(), 0..1, 1000)
        .await
        .unwrap();
    let control = Control::connect(&cluster.master_url()).await.unwrap();
    let node = &cluster.nodes[0].listen;
    let failure = |port: &mut Port<std::net::TcpStream>| {
        let (header, meta, _) = port.receive().unwrap();
        assert_eq!(header.op, Op::Failure);
        Failure::decode(&meta).unwrap()
    };

    let mut port = Port::open(node).unwrap();
    port.bytes(&[0x47; 40]).unwrap();
    assert_eq!(failure(&mut port).code, Code::Malformed);
    assert!(port.is_closed());

    let mut port = Port::open(node).unwrap();
    let mut head = Header {
        version: VERSION,
        op: Op::Hello,
        request: 1,
        epoch: Epoch(0),
        meta: 0,
        payload: 0,
    };
    head.meta = u32::MAX;
    port.bytes(&head.encode()).unwrap();
    let told = failure(&mut port);
    assert_eq!(told.code, Code::Oversized);
    assert!(told.message.contains("4294967295"), "{}", told.message);

    let mut port = Port::open(node).unwrap();
    head.version = 99;
    head.meta = 0;
    port.bytes(&head.encode()).unwrap();
    let told = failure(&mut port);
    assert_eq!(told.code, Code::VersionMismatch);
    assert!(told.message.contains("99"), "{}", told.message);

    // A connection without a hello, and a hello without a common version.
    let mut port = Port::open(node).unwrap();
    port.send(Op::Ping, Epoch(0), &[], &[]).unwrap();
    assert_eq!(failure(&mut port).code, Code::Malformed);
    let mut port = Port::open(node).unwrap();
    let hello = Hello {
        min_version: 7,
        max_version: 9,
        cluster: control.cluster,
        client: Default::default(),
        incarnation: Default::default(),
        checksum_algorithm: 1,
        token: kvpool_types::Token::default(),
    };
    port.send(Op::Hello, Epoch(0), &hello.to_bytes(), &[])
        .unwrap();
    assert_eq!(failure(&mut port).code, Code::VersionMismatch);
    let stranger = Hello {
        cluster: kvpool_types::ClusterId(5),
        ..hello
    };
    let stranger = Hello {
        min_version: 1,
        max_version: 1,
        ..stranger
    };
    let mut port = Port::open(node).unwrap();
    port.send(Op::Hello, Epoch(0), &stranger.to_bytes(), &[])
        .unwrap();
    assert_eq!(failure(&mut port).code, Code::WrongCluster);

    let client = cluster.client().await.unwrap();
    assert!(client.get(&key(0)).await.unwrap().is_some());
    unchanged(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_with_no_nodes_says_so() {
    let cluster = Cluster::start(Options {
        nodes: 0,
        ..Options::default()
    })
    .unwrap();
    let client = cluster.client().await.unwrap();
    let options = PutOptions {
        timeout: Some(Duration::from_millis(300)),
        ..PutOptions::default()
    };
    let put = PutBlock::new(key(0), source(&key(0), 10));
    let error = client
        .batch_put(vec![put], &options)
        .await
        .remove(0)
        .unwrap_err();
    assert_eq!(error.code(), Code::NoNodes);
    assert_eq!(client.get(&key(0)).await.unwrap(), None);
}

fn run(binary: &str, arguments: &[&str]) -> Output {
    Command::new(path_of(binary).unwrap())
        .args(arguments)
        .output()
        .unwrap()
}

fn refused(binary: &str, arguments: &[&str], word: &str) {
    let output = run(binary, arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{binary} {arguments:?} succeeded");
    assert!(text.contains(word), "{binary} {arguments:?} said: {text}");
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn daemons_name_the_bad_setting() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bad.toml");
    let path = file.display().to_string();
    std::fs::write(&file, "lease_tll = \"5s\"\n").unwrap();
    refused("kvmaster", &["--config", &path], "lease_tll");
    std::fs::write(&file, "lease_ttl = \"five\"\n").unwrap();
    refused("kvmaster", &["--config", &path], "lease_ttl");
    std::fs::write(&file, "lease_ttl = \n").unwrap();
    refused("kvmaster", &["--config", &path], "bad.toml");
    refused(
        "kvmaster",
        &["--config", "/nonexistent.toml"],
        "/nonexistent.toml",
    );
    refused("kvmaster", &["--eviction-ratio", "2"], "eviction_ratio");
    refused("kvmaster", &["--listen", "nonsense"], "nonsense");
    refused("kvstore-node", &["--segment", "0"], "segment");
    refused("kvstore-node", &["--segment", "much"], "much");
    std::fs::write(&file, "segments = 5\nwhat = 1\n").unwrap();
    refused("kvstore-node", &["--config", &path], "bad.toml");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().display().to_string();
    refused(
        "kvmaster",
        &["--listen", &address, "--data-dir", &data],
        &address,
    );
    let flags = [
        "--listen",
        &address,
        "--segment",
        "1MiB",
        "--http-listen",
        "127.0.0.1:0",
    ];
    refused("kvstore-node", &flags, &address);
}

#[test]
fn memory_that_is_not_there_shows_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let flags: Vec<String> = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
        .iter()
        .chain(&["--segment", "64TiB", "--master", "http://127.0.0.1:1"])
        .map(|flag| (*flag).to_owned())
        .collect();
    let error = Daemon::start("kvstore-node", directory.path(), "big", &flags).unwrap_err();
    assert!(error.to_string().contains("segment"), "{error}");
}
