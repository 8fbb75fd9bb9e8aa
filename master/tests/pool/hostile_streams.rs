//! A stranger's connection begins as many calls as the master announces, and no more.

use kvpool_master::{Config, Server};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const MAX_CONCURRENT_STREAMS: u16 = 3;
const REFUSED_STREAM: u32 = 7;

/// Calls over the announced limit.
const BEYOND: u32 = 50;

struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    body: Vec<u8>,
}

fn frame(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend_from_slice(&[kind, flags]);
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(body);
    frame
}

fn read(socket: &mut TcpStream) -> Frame {
    let mut head = [0; 9];
    socket.read_exact(&mut head).unwrap();
    let [a, b, c, kind, flags, stream @ ..] = head;
    let mut body = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    socket.read_exact(&mut body).unwrap();
    Frame {
        kind,
        flags,
        stream: u32::from_be_bytes(stream),
        body,
    }
}

/// The headers of a call, as HPACK writes them without its tables. No message follows.
fn headers() -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    let mut literal = |name: &[u8], value: &str| {
        block.extend_from_slice(name);
        block.push(u8::try_from(value.len()).unwrap());
        block.extend_from_slice(value.as_bytes());
    };
    literal(&[0x04], "/kvpool.v1.Pool/Exist");
    literal(&[0x01], "master");
    literal(&[0x0f, 0x10], "application/grpc");
    block
}

/// The limit that the master announces, and the streams that it refuses when `BEYOND` more are
/// opened.
fn refused_streams(address: SocketAddr) -> (u32, Vec<u32>) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(4)))
        .unwrap();
    socket.write_all(PREFACE).unwrap();
    socket.write_all(&frame(SETTINGS, 0, 0, &[])).unwrap();
    let settings = read(&mut socket);
    assert_eq!(settings.kind, SETTINGS);
    let mut entries = settings.body.chunks_exact(6);
    let limit = entries
        .find_map(|entry| {
            let (id, value) = entry.split_at(2);
            let is_limit = id == MAX_CONCURRENT_STREAMS.to_be_bytes();
            is_limit.then(|| u32::from_be_bytes(value.try_into().unwrap()))
        })
        .expect("the master announces no limit");

    let headers = headers();
    let calls: Vec<u8> = (0..limit + BEYOND)
        .flat_map(|call| frame(HEADERS, END_HEADERS, 2 * call + 1, &headers))
        .collect();
    socket.write_all(&calls).unwrap();
    socket.write_all(&frame(PING, 0, 0, &[7; 8])).unwrap();
    let mut refused = Vec::new();
    loop {
        let answer = read(&mut socket);
        match answer.kind {
            RST_STREAM => {
                assert_eq!(answer.body, REFUSED_STREAM.to_be_bytes());
                refused.push(answer.stream);
            }
            PING if answer.flags == ACK && answer.body == [7; 8] => return (limit, refused),
            HEADERS => panic!("call {} was answered before its message", answer.stream),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_of_headers_alone_has_as_many_calls_as_the_master_announces() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        listen: "127.0.0.1:0".to_owned(),
        http_listen: "127.0.0.1:0".to_owned(),
        data_dir: directory.path().join("data"),
        ..Config::default()
    };
    let server = Server::start(config).await.unwrap();
    let address = server.grpc_address();
    let (limit, refused) = tokio::task::spawn_blocking(move || refused_streams(address))
        .await
        .unwrap();
    assert!((100..1000).contains(&limit), "{limit} calls at a time");
    let beyond: Vec<u32> = (limit..limit + BEYOND).map(|call| 2 * call + 1).collect();
    assert_eq!(refused, beyond);
    server.stop().await;
}
