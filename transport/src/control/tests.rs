use super::Control;
use crate::frame::decode_header;
use kvpool_types::wire::data::{Meta, ReadItem, ReadRequest};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::{HEADER_BYTES, Op};
use kvpool_types::{Epoch, Extent, Incarnation, Length, Offset, SegmentId};
use rustix::net::{RecvFlags, sockopt};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A request of `items` items.
fn request(items: usize) -> ReadRequest {
    let item = ReadItem {
        extent: Extent {
            segment: SegmentId(1),
            offset: Offset(0),
            length: Length(4096),
        },
        from: Offset(0),
        length: Length(4096),
        right: None,
    };
    ReadRequest {
        incarnation: Incarnation(7),
        items: vec![item; items],
    }
}

/// No other thread needs to run for a request to reach the socket.
#[test]
fn a_request_has_been_sent_when_the_call_returns() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let control = Control::start(
        std::os::fd::OwnedFd::from(ours),
        "test",
        Features::default(),
    )
    .unwrap();
    for _ in 0..100 {
        control.request(Op::Sums, Epoch(1), &request(3), |_| {});
        let mut head = [0; HEADER_BYTES];
        let flags = RecvFlags::DONTWAIT;
        let (received, _) = rustix::net::recv(&theirs, &mut head[..], flags).unwrap();
        assert_eq!(received, HEADER_BYTES);
        let mut meta = vec![0; decode_header(&head).unwrap().meta as usize];
        let (received, _) = rustix::net::recv(&theirs, &mut meta[..], flags).unwrap();
        assert_eq!(received, meta.len());
    }
}

/// The requesting threads send some frames, the sending thread others, and both parts of some.
#[test]
fn frames_are_sent_whole_and_in_order_by_any_thread() {
    const THREADS: u64 = 4;
    const EACH: u64 = 500;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    // A small buffer, so that the socket is often full.
    sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    let control = Control::start(
        std::os::fd::OwnedFd::from(ours),
        "test",
        Features::default(),
    )
    .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let control = &control;
            scope.spawn(move || {
                for at in 0..EACH {
                    let items = ((at * 37 + thread) % 200) as usize;
                    control.request(Op::Sums, Epoch(1), &request(items), |_| {});
                }
            });
        }
        for number in 1..=THREADS * EACH {
            let mut head = [0; HEADER_BYTES];
            theirs.read_exact(&mut head).unwrap();
            let header = decode_header(&head).unwrap();
            assert_eq!((header.op, header.request), (Op::Sums, number));
            let mut meta = vec![0; header.meta as usize];
            theirs.read_exact(&mut meta).unwrap();
            let read = ReadRequest::decode(&meta).unwrap();
            assert_eq!(read, request(read.items.len()));
            if number % 100 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    // The queue is sent before the socket is closed.
    for _ in 0..50 {
        control.request(Op::Sums, Epoch(1), &request(100), |_| {});
    }
    drop(control);
    let mut rest = Vec::new();
    theirs.read_to_end(&mut rest).unwrap();
    let one = {
        let mut meta = Vec::new();
        request(100).encode(&mut meta);
        HEADER_BYTES + meta.len()
    };
    assert_eq!(rest.len(), 50 * one);
}
