//! The hot calls over framed connections to the master's port. They give the same answers as over
//! gRPC, and requests that no kvpool client sends do no harm.

use kvpool_proto as proto;
use kvpool_tests::blocks::{key, put_all};
use kvpool_tests::grants::Control;
use kvpool_tests::raw::Port;
use kvpool_tests::{Cluster, Options};
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::{Header, MAX_META_BYTES, Op};
use kvpool_types::wire::keys;
use kvpool_types::{Code, Epoch, Key};
use prost::Message;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A framed connection to a cluster's master, before its hello.
fn open(cluster: &Cluster) -> Port<TcpStream> {
    let url = cluster.master_url();
    Port::open(url.trim_start_matches("http://")).unwrap()
}

/// A framed connection after its hello.
fn greeted(cluster: &Cluster, control: &Control) -> Port<TcpStream> {
    let mut port = open(cluster);
    let hello = proto::HelloRequest {
        min_version: 1,
        max_version: 1,
        caller: control.caller(),
        spin_us: 0,
        features: 0,
        ..Default::default()
    };
    let reply: proto::HelloReply = call(&mut port, Op::Greet, &hello);
    assert_eq!(reply.epoch, control.epoch.0);
    port
}

fn call<R: Message + Default>(port: &mut Port<TcpStream>, op: Op, request: &impl Message) -> R {
    let (header, meta, _) = port
        .ask(op, Epoch(0), &request.encode_to_vec(), &[])
        .unwrap();
    assert_eq!(header.op, Op::Reply, "{:?}", Failure::decode(&meta));
    R::decode(meta.as_slice()).unwrap()
}

/// The code of the next failure, and the number of the failed request.
fn failure(port: &mut Port<TcpStream>) -> (Code, u64) {
    let (header, meta, _) = port.receive().unwrap();
    assert_eq!(header.op, Op::Failure);
    (Failure::decode(&meta).unwrap().code, header.request)
}

fn packed(range: std::ops::Range<u64>) -> bytes::Bytes {
    keys::pack(&range.map(key).collect::<Vec<Key>>()).into()
}

#[tokio::test(flavor = "multi_thread")]
async fn both_protocols_of_the_port_give_the_same_answers() {
    let cluster = Cluster::start(Options::default()).unwrap();
    put_all(&cluster.client().await.unwrap(), 0..20, 1000)
        .await
        .unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let mut port = greeted(&cluster, &control);
    let exist = proto::ExistRequest {
        caller: control.caller(),
        keys: packed(10..30),
        no_lease: true,
    };
    let framed: proto::ExistReply = call(&mut port, Op::Exist, &exist);
    assert_eq!(framed.present.as_ref(), [0xff, 0x03, 0x00]);
    assert_eq!(
        framed,
        control.raw().exist(exist).await.unwrap().into_inner()
    );
    let lookup = proto::LookupRequest {
        caller: control.caller(),
        keys: packed(18..22),
        no_lease: true,
    };
    let framed: proto::LookupReply = call(&mut port, Op::Lookup, &lookup);
    assert_eq!(
        framed,
        control.raw().lookup(lookup).await.unwrap().into_inner()
    );
    let chain = proto::MatchPrefixRequest {
        caller: control.caller(),
        keys: packed(15..25),
        no_lease: true,
    };
    let framed: proto::MatchPrefixReply = call(&mut port, Op::MatchPrefix, &chain);
    assert_eq!(framed.blocks, 5);
    assert_eq!(
        framed,
        control
            .raw()
            .match_prefix(chain)
            .await
            .unwrap()
            .into_inner()
    );
    // A lease that was taken over one protocol is renewed and released over the other.
    let exist = proto::ExistRequest {
        caller: control.caller(),
        keys: packed(0..2),
        no_lease: false,
    };
    let leased: proto::ExistReply = call(&mut port, Op::Exist, &exist);
    let renew = proto::RenewRequest {
        caller: control.caller(),
        keys: packed(0..2),
        token: leased.lease.unwrap().token,
        ..Default::default()
    };
    let renewed = control.raw().renew(renew).await.unwrap().into_inner();
    assert_eq!(renewed.codes, [0, 0]);
    let release = proto::ReleaseRequest {
        caller: control.caller(),
        keys: packed(0..2),
        token: renewed.lease.unwrap().token,
        ..Default::default()
    };
    let released: proto::Outcomes = call(&mut port, Op::Release, &release);
    assert_eq!(released.codes, [0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_call_is_refused_and_harms_nobody_else() {
    let cluster = Cluster::start(Options::default()).unwrap();
    put_all(&cluster.client().await.unwrap(), 0..1, 1000)
        .await
        .unwrap();
    let control = Control::connect(&cluster.master_url()).await.unwrap();
    let mut bystander = greeted(&cluster, &control);

    // Bytes that cannot be decoded end the connection.
    let frame = |change: fn(&mut [u8])| {
        let mut head = Header {
            version: 1,
            op: Op::Exist,
            request: 7,
            epoch: Epoch(0),
            meta: 0,
            payload: 0,
        }
        .encode();
        change(&mut head);
        head.to_vec()
    };
    let too_long = (MAX_META_BYTES + 1).to_le_bytes();
    assert_eq!(too_long[..4], [1, 0, 64, 0]);
    for (what, bytes, expected) in [
        ("no magic", frame(|head| head[1] = b'X'), Code::Malformed),
        (
            "a version to come",
            frame(|head| head[4] = 200),
            Code::VersionMismatch,
        ),
        ("a payload", frame(|head| head[32] = 1), Code::Malformed),
        (
            "a huge meta",
            frame(|head| head[24..28].copy_from_slice(&[1, 0, 64, 0])),
            Code::Oversized,
        ),
    ] {
        let mut port = greeted(&cluster, &control);
        port.bytes(&bytes).unwrap();
        assert_eq!(failure(&mut port), (expected, 0), "{what}");
        assert!(port.is_closed(), "{what}");
    }
    let mut hasty = open(&cluster);
    hasty.send(Op::Exist, Epoch(0), &[], &[]).unwrap();
    assert_eq!(failure(&mut hasty), (Code::Malformed, 0), "no greeting");
    assert!(hasty.is_closed());

    // After a refused hello the connection takes no call.
    let mut older = open(&cluster);
    let greeting = proto::HelloRequest {
        min_version: 90,
        max_version: 99,
        ..Default::default()
    };
    older
        .send(Op::Greet, Epoch(0), &greeting.encode_to_vec(), &[])
        .unwrap();
    assert_eq!(failure(&mut older).0, Code::VersionMismatch);
    assert!(older.is_closed());

    // A fault of one call, or an operation of a later version, leaves the connection usable for the
    // next call.
    let mut port = greeted(&cluster, &control);
    port.bytes(&frame(|head| head[6] = 250)).unwrap();
    assert_eq!(failure(&mut port), (Code::Unimplemented, 7));
    let nameless = proto::ExistRequest::default().encode_to_vec();
    for (op, meta, expected) in [
        (Op::Exist, vec![0xff; 9], Code::Malformed),
        (Op::Exist, nameless, Code::Malformed),
        (Op::Read, Vec::new(), Code::InvalidArgument),
        (Op::Reply, Vec::new(), Code::InvalidArgument),
    ] {
        port.send(op, Epoch(0), &meta, &[]).unwrap();
        let (code, request) = failure(&mut port);
        assert_eq!(code, expected, "{op:?}");
        assert_ne!(request, 0, "{op:?}");
    }
    for port in [&mut port, &mut bystander] {
        let (header, ..) = port.ask(Op::Ping, Epoch(0), &[], &[]).unwrap();
        assert_eq!(header.op, Op::Pong);
    }
    assert_eq!(cluster.gauge("blocks").unwrap(), 1);
    assert_eq!(cluster.gauge("reservations").unwrap(), 0);
}

/// A put that waits for another writer of its key delays no call behind it on the same connection.
/// It is answered when its time is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_waits_holds_up_none_behind_it() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let _writing = control.reserve(&key(0), 1000, 30_000).await.unwrap();
    let mut port = greeted(&cluster, &control);
    let wait = Duration::from_millis(1500);
    let reserve = proto::ReserveRequest {
        caller: control.caller(),
        keys: packed(0..1),
        lengths: vec![1000],
        timeout_ms: 1500,
        ..Default::default()
    };
    let exist = proto::ExistRequest {
        caller: control.caller(),
        keys: packed(0..1),
        no_lease: true,
    };
    let begun = Instant::now();
    port.send(Op::Reserve, Epoch(0), &reserve.encode_to_vec(), &[])
        .unwrap();
    port.send(Op::Exist, Epoch(0), &exist.encode_to_vec(), &[])
        .unwrap();
    let (first, meta, _) = port.receive().unwrap();
    assert!(begun.elapsed() < wait / 2, "{:?}", begun.elapsed());
    assert_eq!(first.request, 3, "the answer to exist comes first");
    assert!(proto::ExistReply::decode(meta.as_slice()).is_ok());
    let (second, meta, _) = port.receive().unwrap();
    assert_eq!(second.request, 2);
    let reply = proto::ReserveReply::decode(meta.as_slice()).unwrap();
    assert_eq!(
        reply.reservations[0].code,
        u32::from(Code::InProgress.to_wire())
    );
    assert!(begun.elapsed() >= wait, "{:?}", begun.elapsed());
}

/// A master that waits for the nodes of the last term is alive. A client that pings it meanwhile
/// must not take it for dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_waits_for_its_nodes_answers_pings_meanwhile() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    put_all(&cluster.client().await.unwrap(), 0..1, 1000)
        .await
        .unwrap();
    cluster.nodes[0].pause().unwrap();
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    let control = Control::connect(&cluster.master_url()).await.unwrap();
    let mut port = greeted(&cluster, &control);
    let exist = proto::ExistRequest {
        caller: control.caller(),
        keys: packed(0..1),
        no_lease: true,
    };
    let asked = Instant::now();
    port.send(Op::Exist, Epoch(0), &exist.encode_to_vec(), &[])
        .unwrap();
    port.send(Op::Ping, Epoch(0), &[], &[]).unwrap();
    let (first, _, _) = port.receive().unwrap();
    assert_eq!(first.op, Op::Pong);
    let (second, _, _) = port.receive().unwrap();
    assert_eq!(second.op, Op::Reply);
    assert!(
        asked.elapsed() > Duration::from_millis(500),
        "it did not wait: {:?}",
        asked.elapsed()
    );
    cluster.nodes[0].resume().unwrap();
}

/// Sends `count` puts that wait for another writer of key 0, each with a request of `bytes` bytes.
/// Returns how many are refused at once.
fn wait_many(port: &mut Port<TcpStream>, control: &Control, count: usize, bytes: usize) -> usize {
    let reserve = proto::ReserveRequest {
        caller: control.caller(),
        keys: packed(0..1),
        lengths: vec![1000],
        timeout_ms: 20_000,
        instead_of: vec![u64::MAX; bytes / 8],
        ..Default::default()
    }
    .encode_to_vec();
    for _ in 0..count {
        port.send(Op::Reserve, Epoch(0), &reserve, &[]).unwrap();
    }
    port.send(Op::Ping, Epoch(0), &[], &[]).unwrap();
    let mut refused = 0;
    loop {
        let (header, meta, _) = port.receive().unwrap();
        if header.op == Op::Pong {
            return refused;
        }
        assert_eq!(header.op, Op::Failure);
        assert_eq!(Failure::decode(&meta).unwrap().code, Code::TooManyHeld);
        refused += 1;
    }
}

/// The waiting calls of one connection are bounded in number and in bytes, and further calls are
/// refused. Pings, and the commit that the waiting puts need, are still answered.
#[tokio::test(flavor = "multi_thread")]
async fn puts_that_wait_by_the_thousand_are_refused_and_the_commit_they_wait_for_is_not() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let writing = control.reserve(&key(0), 1000, 30_000).await.unwrap();
    let mut many = greeted(&cluster, &control);
    let few_refused = wait_many(&mut many, &control, 4200, 0);
    assert!((1..400).contains(&few_refused), "{few_refused} of 4200");
    let mut large = greeted(&cluster, &control);
    let large_refused = wait_many(&mut large, &control, 20, 4_000_000);
    assert!((1..8).contains(&large_refused), "{large_refused} of 20");

    let commit = proto::CommitRequest {
        caller: control.caller(),
        keys: packed(0..1),
        items: vec![proto::CommitItem {
            version: writing.grant.id.0,
            length: 1000,
            checksum: 0,
            segments: vec![writing.grant.extent.segment.0],
            parent: 0,
        }],
        ..Default::default()
    };
    many.send(Op::Commit, Epoch(0), &commit.encode_to_vec(), &[])
        .unwrap();
    let mut present = 0;
    for (port, answers) in [
        (&mut many, 4200 - few_refused + 1),
        (&mut large, 20 - large_refused),
    ] {
        for _ in 0..answers {
            let (header, meta, _) = port.receive().unwrap();
            assert_eq!(header.op, Op::Reply);
            let reply = proto::ReserveReply::decode(meta.as_slice());
            present += usize::from(reply.is_ok_and(|reply| {
                let code = reply.reservations.first().map(|first| first.code);
                code == Some(Code::Exists.to_wire().into())
            }));
        }
        // There is room again.
        assert_eq!(wait_many(port, &control, 0, 0), 0);
    }
    assert_eq!(present, 4220 - few_refused - large_refused);
}

/// A grant for a client that has gone would help no client.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_waits_ends_with_its_connection() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let writing = control.reserve(&key(0), 1000, 30_000).await.unwrap();
    let mut port = greeted(&cluster, &control);
    assert_eq!(wait_many(&mut port, &control, 1, 0), 0);
    drop(port);
    // Gives the master time to notice.
    std::thread::sleep(Duration::from_millis(500));
    let revoke = proto::RevokeRequest {
        caller: control.caller(),
        keys: packed(0..1),
        versions: vec![writing.grant.id.0],
    };
    control.raw().revoke(revoke).await.unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(cluster.gauge("reservations").unwrap(), 0);
}

/// A client whose host has gone sends nothing, and would keep its thread for ever. So the kernel
/// must probe the peer.
#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_client_is_asked_whether_it_is_there() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let stream = TcpStream::connect(cluster.master_url().trim_start_matches("http://")).unwrap();
    let (client, master) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
    // The form of a running keepalive timer in that table.
    let is_asked = || {
        let connections = std::fs::read_to_string("/proc/net/tcp").unwrap();
        connections.lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_of = |field: usize, port: u16| fields[field].ends_with(&format!(":{port:04X}"));
            is_of(1, master.port()) && is_of(2, client.port()) && fields[5].starts_with("02:")
        })
    };
    let limit = Instant::now() + Duration::from_secs(20);
    while !is_asked() {
        assert!(Instant::now() < limit, "nobody asks");
        std::thread::sleep(Duration::from_millis(10));
    }
}
