//! Slightly wrong frames and messages, on every port. Daemons continue, no block is lost, and
//! memory is given back.
//!
//! `KVPOOL_FUZZ=100000` sets the number for each port, and `KVPOOL_FUZZ_SEED` another seed.

use kvpool_client::Client;
use kvpool_proto as proto;
use kvpool_tests::blocks::{bytes_of, key, put_all};
use kvpool_tests::fuzz::{Corpus, cases};
use kvpool_tests::grants::Control;
use kvpool_tests::raw::Port;
use kvpool_tests::requests::{self, frame};
use kvpool_tests::{Cluster, Options};
use kvpool_types::wire::data::{Hello, Meta};
use kvpool_types::wire::frame::{Op, VERSION};
use kvpool_types::{Epoch, Incarnation, Token};
use prost::Message;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The number of inputs of each kind in a usual run.
const USUALLY: u64 = 500;
const BLOCKS: u64 = 50;
const LENGTH: usize = 10_000;
/// The longest wait for one answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Sends `words` and reads until the daemon closes the connection.
fn converse(stream: impl Into<OwnedFd>, words: &[u8]) {
    // The calls below work on stream sockets of both families.
    let mut stream = UnixStream::from(stream.into());
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    // The daemon may close the connection before it has read everything.
    let _said = stream
        .write_all(words)
        .and_then(|()| stream.shutdown(Shutdown::Write));
    hear_out(stream);
}

fn tcp(address: &str) -> TcpStream {
    TcpStream::connect(address).unwrap()
}

fn hear_out(mut stream: impl Read) {
    let mut scratch = [0; 16 << 10];
    loop {
        match stream.read(&mut scratch) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                let is_silent = error.kind() == std::io::ErrorKind::WouldBlock;
                assert!(!is_silent, "a connection is neither answered nor ended");
                return;
            }
        }
    }
}

/// A node's registration that its master refuses. A mutation of it may have any outcome.
fn registration() -> Vec<u8> {
    let register = proto::Register {
        min_version: 1,
        max_version: 1,
        name: "node-0".into(),
        incarnation: vec![4; 16].into(),
        data_address: "127.0.0.1:1".into(),
        epoch_seen: 1 << 30,
        segments: vec![proto::OfferedSegment {
            size_bytes: 1 << 20,
            id: 0,
        }],
        checksum_algorithm: 1,
        ..Default::default()
    };
    let body = Some(proto::node_message::Body::Register(register));
    proto::NodeMessage { body }.encode_to_vec()
}

/// An HTTP/2 connection with one gRPC call, by hand: the headers are literals, without Huffman's code.
fn http2(path: &str, message: &[u8]) -> Vec<u8> {
    fn part(kind: u8, flags: u8, stream: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        let head = [
            length[1], length[2], length[3], kind, flags, 0, 0, 0, stream,
        ];
        [&head, body].concat()
    }
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    // POST, http; then path, authority, content type and te.
    let mut headers = vec![0x83, 0x86, 0x04];
    headers.extend(text(path));
    headers.push(0x01);
    headers.extend(text("kvpool.example"));
    headers.extend([0x0f, 0x10]);
    headers.extend(text("application/grpc"));
    headers.push(0x00);
    headers.extend(text("te"));
    headers.extend(text("trailers"));
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = [&[0], &length[..], message].concat();
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        part(4, 0, 0, &[]),
        part(1, 4, 1, &headers),
        part(0, 1, 1, &body),
    ]
    .concat()
}

async fn all_is_well(cluster: &Cluster, client: &Client) {
    for number in 0..BLOCKS {
        let right = bytes_of(&key(number), LENGTH);
        assert_eq!(client.get(&key(number)).await.unwrap(), Some(right));
    }
    let late = cluster.client().await.unwrap();
    assert!(late.get(&key(0)).await.unwrap().is_some());
    let states = cluster.node_states().unwrap();
    assert!(
        states.contains(&("node-0".into(), "live".into())),
        "{states:?}"
    );
    for daemon in [&cluster.master, &cluster.nodes[0]] {
        let log = daemon.log_text();
        assert!(!log.contains("panicked"), "{log}");
        assert_eq!(daemon.http_get("/healthz").unwrap(), "ok\n");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mutated_frames_and_messages_harm_nobody() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..BLOCKS, LENGTH).await.unwrap();
    let control = Control::connect(&cluster.master_url()).await.unwrap();
    let (master, node) = (&cluster.master, &cluster.nodes[0]);
    let socket = cluster.node_socket(0);
    let hello = Hello {
        min_version: 1,
        max_version: VERSION,
        cluster: control.cluster,
        client: 77.into(),
        incarnation: Incarnation(0),
        checksum_algorithm: 1,
        token: Token::default(),
    };
    let hello = frame(Op::Hello, Epoch(0), &hello.to_bytes(), &[]);
    let greeted = Port::open(&node.listen).unwrap().hello(control.cluster);
    let life = greeted.unwrap().incarnation;
    let caller = control.caller().unwrap();
    let greeting = proto::HelloRequest {
        min_version: 1,
        max_version: 1,
        ..Default::default()
    };
    let greeting = frame(Op::Greet, Epoch(0), &greeting.encode_to_vec(), &[]);

    let to_node = requests::of_data_port(control.epoch, life);
    let framed = requests::of_master(&caller)
        .iter()
        .map(|(op, _, message)| frame(*op, control.epoch, message, &[]))
        .collect::<Vec<_>>();
    let mut http2s = requests::of_master(&caller)
        .iter()
        .map(|(_, path, message)| http2(path, message))
        .collect::<Vec<_>>();
    http2s.push(http2("/kvpool.v1.Nodes/Session", &registration()));
    let http = vec![
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".to_vec(),
        b"GET /api/v1/nodes HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabcde".to_vec(),
    ];
    let ports: [(&str, Vec<Vec<u8>>); 6] = [
        ("data port", to_node.clone()),
        ("Unix socket", to_node),
        ("framed calls", framed),
        ("gRPC", http2s),
        ("master's HTTP", http.clone()),
        ("node's HTTP", http),
    ];
    let count = cases(USUALLY);
    let memory = || [master, node].map(|daemon| daemon.resident_bytes().unwrap() >> 20);
    let mut before = None;
    for (name, seeds) in ports {
        let mut corpus = Corpus::load("ports", seeds).unwrap();
        tokio::task::block_in_place(|| {
            for number in 0..count {
                let mutated = corpus.mutate();
                // Most inputs follow a valid hello: unknown callers do not get far.
                let after = |opening: &[u8]| match number % 8 {
                    0 => mutated.clone(),
                    _ => [opening, &mutated].concat(),
                };
                match name {
                    "data port" => converse(tcp(&node.listen), &after(&hello)),
                    "Unix socket" => {
                        converse(UnixStream::connect(&socket).unwrap(), &after(&hello))
                    }
                    "framed calls" => converse(tcp(&master.listen), &after(&greeting)),
                    "gRPC" => converse(tcp(&master.listen), &mutated),
                    "master's HTTP" => converse(tcp(&master.http), &mutated),
                    _ => converse(tcp(&node.http), &mutated),
                }
            }
        });
        let now = memory();
        println!(
            "{count} to the {name}: master {} MiB, node {} MiB",
            now[0], now[1]
        );
        before.get_or_insert(now);
        all_is_well(&cluster, &client).await;
    }
    let (before, now) = (before.unwrap(), memory());
    for (before, now) in before.iter().zip(now) {
        assert!(now <= before + 64, "{before} MiB became {now} MiB");
    }
}
