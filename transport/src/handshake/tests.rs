use super::say_hello;
use crate::frame::encode_head;
use crate::link::TransferError;
use kvpool_types::wire::data::Hello;
use kvpool_types::wire::frame::Op;
use kvpool_types::{ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, Incarnation, Token};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Says hello to a peer that answers with these bytes.
fn hello_answered_by(bytes: &[u8]) -> TransferError {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(bytes).unwrap();
    let hello = Hello {
        min_version: 1,
        max_version: 1,
        cluster: ClusterId(1),
        client: ClientId(1),
        incarnation: Incarnation(1),
        checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
        token: Token::default(),
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    say_hello(ours.as_fd(), &hello, deadline).unwrap_err()
}

#[test]
fn a_port_that_another_program_has_is_no_node() {
    let http = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let error = hello_answered_by(http.as_bytes());
    assert_eq!(error.code, Code::Unreachable, "{error}");
    assert!(error.message.contains("not a kvpool frame"), "{error}");
}

#[test]
fn a_node_that_answers_hello_with_another_frame_is_malformed() {
    let frame = encode_head(Op::Pong, 0, Epoch(0), 0, |_| {}).unwrap();
    assert_eq!(hello_answered_by(&frame).code, Code::Malformed);
    // A reply to hello whose fields end too early.
    let frame = encode_head(Op::HelloReply, 0, Epoch(0), 0, |_| {}).unwrap();
    assert_eq!(hello_answered_by(&frame).code, Code::Malformed);
}
